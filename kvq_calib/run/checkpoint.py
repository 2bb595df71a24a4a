"""Keep a run's files so that it can be killed at any moment: a layer's folder appears whole, or not at all.

    <run>/plan.json                     the plan, and the numeric environment in it
    <run>/layer-start/                  the tokens, and moments of gradients
    <run>/layer-0003/                   hidden states above layer 3, and per recipe its decoded keys and values, a file
                                        per chunk; fit.safetensors, the fitted tensors; done.json, sha256 of every file
    <run>/layer-0004.partial/           the layer at work
    <run>/kept-0003/                    where activations are held in memory (`run.py`): those that the layers
                                        above layer 3 read; then layers' own folders have fitted tensors alone

A folder is written under its partial name, every file is fsynced, then the folder is renamed.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvq_calib.run.plan import Plan
from kvq_runtime.disk import files
from kvq_runtime.errors import Conflict

# names in a run folder, its own and those of the draft, workers and the evaluation
_OWN = re.compile(
    r"lock|plan\.json|evaluation\.json|evaluated|workers|draft|(layer-start|(layer|kept)-\d+)(\.partial)?"
)


def check_beside(name: str) -> None:
    """Raise a ValueError where an artifact's folder would be in the place of what a run folder has."""
    if _OWN.fullmatch(name):
        raise ValueError(f"name {name!r}: a run folder has something else by that name; use another")


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
    elif (theirs := _object(path, folder)) != (ours := json.loads(given)):
        differ = sorted(key for key in {*ours, *theirs} if theirs.get(key) != ours.get(key))
        raise ValueError(
            f"{folder} holds the run of another plan, or of another numeric environment ({', '.join(differ)} differ); "
            "use another run folder, or delete this one"
        )


def folder_of(run: Path, layer: int) -> Path:
    """The folder of a finished layer; -1: the folder of what a run begins with."""
    return run / ("layer-start" if layer < 0 else f"layer-{layer:04d}")


@contextmanager
def sealed(final: Path, noted: dict) -> Iterator[Path]:
    """Give a partial folder to fill; on leaving, seal it with digests and what is `noted`, and rename it into place."""
    partial = final.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    files.fault_point("layer.begun")
    partial.mkdir()
    files.fault_point("layer.made")
    yield partial
    digests = _seal(sorted(path for path in partial.iterdir() if path.is_file()))
    files.save(partial / "done.json", json.dumps(noted | {"files": digests}, sort_keys=True).encode())
    partial.rename(final)
    files.fault_point("layer.renamed")
    files.sync(final.parent)
    files.fault_point("layer.done")


def keep(run: Path, layer: int, held: Mapping[Path, Mapping[str, Tensor]]) -> None:
    """Write what layers above this one read, by the path that it would have as a file; earlier ones are removed."""
    with sealed(_kept(run, layer), {}) as folder:
        for path, tensors in sorted(held.items()):
            save(dict(tensors), folder / f"{path.parent.name}.{path.name}")
    _remove_kept(run, but=_kept(run, layer))


def _kept(run: Path, layer: int) -> Path:
    return run / f"kept-{layer:04d}"


def _remove_kept(run: Path, but: Path | None = None) -> None:
    for folder in sorted(run.glob("kept-*")):
        if folder != but:
            for path in sorted(folder.iterdir()):
                path.unlink()
                files.fault_point("kept.unlinked")
            folder.rmdir()
            files.fault_point("kept.removed")


def kept_files(run: Path) -> dict[Path, Path]:
    """The files that `keep` wrote last: by the path that each would have as a file, its place."""
    folder = max(run.glob("kept-????"), default=None)
    found = [] if folder is None else sorted(folder.glob("*.safetensors"))
    return {run.joinpath(*path.name.split(".", 1)): path for path in found}


def kept_file(path: Path) -> Path | None:
    """The path at which the newest `keep` wrote what would be this file; None if the file is there, or neither is."""
    name = f"{path.parent.name.removesuffix('.partial')}.{path.name}"
    return None if path.is_file() else max(path.parent.parent.glob(f"kept-????/{name}"), default=None)


def newest(run: Path, layers: int) -> int:
    """The newest layer that a run goes on after: the activations that it leaves are in files. -1: the beginning; the
    last of all layers: the run is finished."""
    noted = {layer: note for layer in range(layers) if (note := record(run, layer))}
    if layers - 1 in noted:
        return layers - 1
    in_files = [layer for layer, note in noted.items() if any(name.startswith("hidden-") for name in note["files"])]
    return max([*in_files, *(int(folder.name[-4:]) for folder in run.glob("kept-????"))], default=-1)


def rewind(run: Path, layers: int) -> int:
    """Remove the folders of layers after the newest that a run goes on after; a process that was killed held their
    activations in memory. Returns that layer.

    RuntimeError: what a killed process kept of it is missing or damaged.
    """
    found = newest(run, layers)
    for layer in range(layers - 1, found, -1):
        folder = folder_of(run, layer)
        if folder.is_dir():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            folder.rename(partial)
            shutil.rmtree(partial)
    kept = max(run.glob("kept-????"), default=None)
    if kept is not None and found < layers - 1:
        _remove_kept(run, but=kept)  # whoever removed older ones may have died before that was done
        _check(kept, _object(kept / "done.json", run)["files"], run)
    return found


def record(run: Path, layer: int) -> dict | None:
    """Read the notes on a finished layer; None if it is not finished."""
    folder = folder_of(run, layer)
    return _object(folder / "done.json", run) if folder.is_dir() else None


def verify(run: Path, layer: int, kinds: tuple[str, ...] | None = None) -> None:
    """Compare a finished layer's files with their digests; `kinds`: only files whose name starts so."""
    digests = (record(run, layer) or {"files": {}})["files"]
    _check(
        folder_of(run, layer), {n: digest for n, digest in digests.items() if kinds is None or n.startswith(kinds)}, run
    )


def _check(folder: Path, digests: Mapping[str, str], run: Path) -> None:
    for name, digest in digests.items():
        if not (folder / name).is_file() or files.digest(folder / name)[0] != digest:
            raise _damaged(folder / name, run)


def _object(path: Path, run: Path) -> dict[str, Any]:
    """Read a file of JSON in a run folder."""
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        raise _damaged(path, run) from None
    if not isinstance(found, dict):
        raise _damaged(path, run)
    return found


def _damaged(path: Path, run: Path) -> RuntimeError:
    return RuntimeError(f"checkpoint {path} is missing or damaged; delete {run} to start over")


def thin(run: Path, layer: int, depth: int, last: bool) -> None:
    """Delete what no layer above `layer` reads, `depth` layers down at most: older hidden states, older decoded keys
    and values."""
    gone = []
    for older in range(-1, layer + 1):
        for path in folder_of(run, older).glob("*-?????.safetensors"):
            if last or is_past(path.name, older, layer, depth):
                gone.append(path)
    for path in gone:
        path.unlink()
        files.fault_point("thin.unlinked")
    if last:
        _remove_kept(run)


def is_past(name: str, older: int, layer: int, depth: int) -> bool:
    """True if no layer above `layer`, which reads `depth` layers down, reads a file of an older layer."""
    return older <= layer - depth or (older < layer and name.startswith("hidden-"))


def save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors; they are made durable when their layer is sealed."""
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # the disk is full, or worse
        raise OSError(f"{path}: {error}") from error
    files.fault_point("layer.saved")


def load(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    """Read tensors, memory-mapped on a CPU."""
    return load_file(path, device=device)


def _seal(paths: list[Path]) -> dict[str, str]:
    """Make files durable; their digests by name, which other threads find meanwhile."""
    with ThreadPoolExecutor() as pool:
        digests = pool.map(files.digest, paths)
        for path in paths:
            files.sync(path)
            files.fault_point("layer.sealed")
        return {path.name: digest for path, (digest, _) in zip(paths, digests, strict=True)}
