"""Keep a run's files so that it can be killed at any moment: a layer's folder appears whole, or not at all.

    <run>/plan.json                     the plan, and the numeric environment in it
    <run>/layer-start/                  the hidden states under the first layer, a file per chunk; where gradients were
                                        collected, also those under the others, until a fit has passed them
    <run>/layer-0003/                   hidden states above layer 3, and per recipe its decoded keys and values, a file
                                        per chunk; fit.safetensors, the fitted tensors; done.json, sha256 of every file
    <run>/layer-0004.partial/           the layer at work

A layer's folder is written under its partial name, every file is fsynced, then the folder is renamed.
"""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvq_calib.run.plan import Plan
from kvq_runtime.disk import faults, files
from kvq_runtime.errors import Conflict


class AlreadyRunning(Conflict, RuntimeError):
    """Another process works on the same plan in the same folder."""


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold the run folder; a lock of the operating system, so it ends with the process however that ends."""
    files.make_folder(folder)
    lock = FileLock(folder / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise AlreadyRunning(f"already running: another process calibrates this plan in {folder}") from None
    try:
        yield
    finally:
        lock.release()


def open_run(plan: Plan, folder: Path) -> None:
    """Write the plan, or compare it with the one that is there."""
    files.make_folder(folder)
    files.sync(folder)  # whoever finished its last layer may have died before
    path, given = folder / "plan.json", json.dumps(plan.to_json(), sort_keys=True, indent=1)
    if not path.exists():
        files.save(path, given.encode())
    elif (found := path.read_text()) != given:
        theirs, ours = (json.loads(text) for text in (found, given))
        differ = sorted(key for key in ours if theirs.get(key) != ours[key])
        raise ValueError(
            f"{folder} holds the run of another plan, or of another numeric environment ({', '.join(differ)} differ); "
            "use another run folder, or delete this one"
        )


def folder_of(run: Path, layer: int) -> Path:
    """The folder of a finished layer; -1: the folder of what is under the first."""
    return run / ("layer-start" if layer < 0 else f"layer-{layer:04d}")


@contextmanager
def layer_folder(run: Path, layer: int, noted: dict) -> Iterator[Path]:
    """Give a partial folder to fill; on leaving, seal it with digests and what is `noted`, and rename it into place."""
    final = folder_of(run, layer)
    partial = final.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    faults.point("layer.begun")
    partial.mkdir()
    faults.point("layer.made")
    yield partial
    digests = _seal(sorted(path for path in partial.iterdir() if path.is_file()))
    files.save(partial / "done.json", json.dumps(noted | {"files": digests}, sort_keys=True).encode())
    partial.rename(final)
    faults.point("layer.renamed")
    files.sync(run)
    faults.point("layer.done")


def record(run: Path, layer: int) -> dict | None:
    """Read the notes on a finished layer; None if it is not finished."""
    folder = folder_of(run, layer)
    return json.loads((folder / "done.json").read_text()) if folder.is_dir() else None


def verify(run: Path, layer: int, kinds: tuple[str, ...] | None = None) -> None:
    """Compare a finished layer's files with their digests; `kinds`: only files whose name starts so."""
    folder = folder_of(run, layer)
    for name, digest in (record(run, layer) or {"files": {}})["files"].items():
        if kinds is not None and not name.startswith(kinds):
            continue
        if not (folder / name).is_file() or files.digest(folder / name)[0] != digest:
            raise RuntimeError(f"checkpoint {folder / name} is missing or damaged; delete {run} to start over")


def thin(run: Path, layer: int, depth: int, last: bool) -> None:
    """Delete what no layer above `layer` reads: older hidden states, older decoded keys and values."""
    gone = [path for path in folder_of(run, -1).glob("stream-*") if last or path.name < stream_file(layer + 2)]
    for older in range(-1, layer + 1):
        for path in folder_of(run, older).glob("*-?????.safetensors"):
            if last or older <= layer - depth or (older < layer and path.name.startswith("hidden-")):
                gone.append(path)
    for path in gone:
        path.unlink()
        faults.point("thin.unlinked")


def stream_file(layer: int, index: int | None = None) -> str:
    """Where hidden states of a chunk, under a layer, are kept from the start; or how the names of all chunks begin."""
    return f"stream-{layer:04d}" + ("" if index is None else f".{index:05d}.safetensors")


def save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors; they are made durable when their layer is sealed."""
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # the disk is full, or worse
        raise OSError(f"{path}: {error}") from error
    faults.point("layer.saved")


def load(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    """Read tensors, memory-mapped on a CPU."""
    return load_file(path, device=device)


def _seal(paths: list[Path]) -> dict[str, str]:
    """Make files durable; their digests by name, which other threads find meanwhile."""
    with ThreadPoolExecutor() as pool:
        digests = pool.map(files.digest, paths)
        for path in paths:
            files.sync_file(path)
            faults.point("layer.sealed")
        return {path.name: digest for path, (digest, _) in zip(paths, digests, strict=True)}
