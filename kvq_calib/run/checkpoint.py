"""Save a run so that it survives a kill at any moment: the folder of a layer appears whole, or not at all.

    <run>/plan.json             the plan, with the numeric environment
    <run>/layer-start/          the tokens, and moments of gradients
    <run>/layer-0003/           hidden states above layer 3, and decoded keys and values by recipe, a file a chunk;
                                fit.safetensors, the fitted tensors; done.json, the sha256 of every file
    <run>/layer-0004.partial/   the layer in progress
    <run>/kept-0003/            the activations in memory that layers above layer 3 read (`run.InMemory`); the folders
                                of layers then have fitted tensors alone

A folder is written under its partial name, every file is fsynced, then the folder is renamed.
"""

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvq_calib.run.plan import Plan
from kvq_runtime.artifact.header import ARTIFACT_FILE
from kvq_runtime.disk import files
from kvq_runtime.errors import Conflict


class AlreadyRunning(Conflict, RuntimeError):
    """Another process works on the same plan in the same folder."""


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Lock the run folder, until this process ends in whatever way."""
    files.make_folder(folder)
    try:
        lock = files.lock(folder / "lock", wait=False)
    except Timeout:
        raise AlreadyRunning(f"already running: another process calibrates this plan in {folder}") from None
    with lock:
        yield


def describe(run: Path) -> dict[str, Any]:
    """Return the model of a run folder, whether all its artifacts are published, its bytes, and days without a change.

    Artifacts that are published leave in the folder what is beside them, and not themselves.
    """
    status = []
    for folder, _, names in os.walk(run):
        for name in names:
            with suppress(FileNotFoundError):  # a run at work removed it
                status.append(Path(folder, name).lstat())
    plan = _object(run / "plan.json", run) if (run / "plan.json").exists() else {"recipes": [], "model": ""}
    complete = 0 < len(list(run.glob("artifacts/*"))) == len(plan["recipes"])
    published = complete and not any(run.glob(f"artifacts/*/{ARTIFACT_FILE}"))
    unused = time.time() - max((one.st_mtime for one in status), default=0)
    about = {"run": run.name, "model": plan["model"], "published": published, "unused, days": round(unused / 86400, 1)}
    return about | {"bytes": sum(one.st_size for one in status)}


def delete(run: Path) -> None:
    """Delete a run folder; raise AlreadyRunning if a process works in it. If killed, a folder .NAME is left."""
    gone = run.with_name(f".{run.name.removeprefix('.')}")
    with claimed(run):
        run.rename(gone)  # a new run of the plan gets a folder of its own
    shutil.rmtree(gone)


def open_run(plan: Plan, folder: Path) -> None:
    """Write the plan, or compare it with the folder's."""
    files.make_folder(folder)
    files.sync(folder)  # the writer of its last layer may have died before
    path, text = folder / "plan.json", json.dumps(plan.to_json(), sort_keys=True, indent=1)
    if not path.exists():
        files.save(path, text.encode())
    elif (theirs := _object(path, folder)) != (ours := json.loads(text)):
        differ = sorted(key for key in {*ours, *theirs} if theirs.get(key) != ours.get(key))
        raise ValueError(
            f"{folder} holds the run of another plan, or of another numeric environment ({', '.join(differ)} differ); "
            "use another run folder, or delete this one"
        )


def folder_of(run: Path, layer: int) -> Path:
    """Return the folder of a finished layer; -1: of the start."""
    return run / ("layer-start" if layer < 0 else f"layer-{layer:04d}")


@contextmanager
def sealed(final: Path, notes: dict) -> Iterator[Path]:
    """Yield a partial folder to fill; then seal it with digests and notes, and rename it."""
    partial = final.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    files.fault_point("layer.begun")
    partial.mkdir()
    files.fault_point("layer.made")
    yield partial
    digests = _seal(sorted(path for path in partial.iterdir() if path.is_file()))
    files.save(partial / "done.json", json.dumps(notes | {"files": digests}, sort_keys=True).encode())
    partial.rename(final)
    files.fault_point("layer.renamed")
    files.sync(final.parent)
    files.fault_point("layer.done")


def _seal(paths: list[Path]) -> dict[str, str]:
    """Fsync files; return their digests by name, computed by other threads meanwhile."""
    with ThreadPoolExecutor() as pool:
        digests = pool.map(files.digest, paths)
        for path in paths:
            files.sync(path)
            files.fault_point("layer.sealed")
        return {path.name: digest for path, (digest, _) in zip(paths, digests, strict=True)}


def keep(run: Path, layer: int, activations: Mapping[Path, Mapping[str, Tensor]]) -> None:
    """Write the activations that layers above this one read, by path; remove earlier ones."""
    final = run / f"kept-{layer:04d}"
    with sealed(final, {}) as folder:
        for path, tensors in sorted(activations.items()):
            save(dict(tensors), folder / f"{path.parent.name}.{path.name}")
    _remove_kept(run, but=final)


def _newest_kept(run: Path) -> Path | None:
    return max(run.glob("kept-????"), default=None)


def _remove_kept(run: Path, but: Path | None = None) -> None:
    for folder in sorted(run.glob("kept-*")):
        if folder != but:
            for path in sorted(folder.iterdir()):
                path.unlink()
                files.fault_point("kept.unlinked")
            folder.rmdir()
            files.fault_point("kept.removed")


def kept_files(run: Path) -> dict[Path, Path]:
    """Return the files that `keep` wrote last, by the paths of their activations."""
    folder = _newest_kept(run)
    written = [] if folder is None else sorted(folder.glob("*.safetensors"))
    return {run.joinpath(*path.name.split(".", 1)): path for path in written}


def kept_file(path: Path) -> Path | None:
    """Return the newest file that `keep` wrote for the activations of a path; None if the path is a file itself."""
    name = f"{path.parent.name.removesuffix('.partial')}.{path.name}"
    return None if path.is_file() else max(path.parent.parent.glob(f"kept-????/{name}"), default=None)


def newest(run: Path, layers: int) -> int:
    """Return the newest layer to resume after: files hold its activations, or it is the last. -1: the start."""
    notes = {layer: note for layer in range(layers) if (note := record(run, layer))}
    if layers - 1 in notes:
        return layers - 1
    in_files = [layer for layer, note in notes.items() if any(name.startswith("hidden-") for name in note["files"])]
    return max([*in_files, *(int(folder.name[-4:]) for folder in run.glob("kept-????"))], default=-1)


def rewind(run: Path, layers: int) -> int:
    """Remove the layers after the newest one to resume after, whose activations a killed process held in memory.

    Returns that layer. Raises RuntimeError if its kept activations are missing or damaged.
    """
    layer = newest(run, layers)
    for later in range(layers - 1, layer, -1):
        folder = folder_of(run, later)
        if folder.is_dir():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            folder.rename(partial)
            shutil.rmtree(partial)
    kept = _newest_kept(run)
    if kept is not None and layer < layers - 1:
        _remove_kept(run, but=kept)  # an earlier removal may have been killed
        _check(kept, _object(kept / "done.json", run)["files"], run)
    return layer


def record(run: Path, layer: int) -> dict | None:
    """Read the notes on a finished layer; None: not finished."""
    folder = folder_of(run, layer)
    return _object(folder / "done.json", run) if folder.is_dir() else None


def verify(run: Path, layer: int, prefixes: tuple[str, ...] = ("",)) -> None:
    """Compare a finished layer's files, or those whose names begin so, with their digests."""
    digests = (record(run, layer) or {"files": {}})["files"]
    named = {name: digest for name, digest in digests.items() if name.startswith(prefixes)}
    _check(folder_of(run, layer), named, run)


def _check(folder: Path, digests: Mapping[str, str], run: Path) -> None:
    for name, digest in digests.items():
        if not (folder / name).is_file() or files.digest(folder / name)[0] != digest:
            raise _damaged(folder / name, run)


def _object(path: Path, run: Path) -> dict[str, Any]:
    """Read a JSON object in a run folder."""
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        raise _damaged(path, run) from None
    if not isinstance(value, dict):
        raise _damaged(path, run)
    return value


def _damaged(path: Path, run: Path) -> RuntimeError:
    return RuntimeError(f"checkpoint {path} is missing or damaged; delete {run} to start over")


def thin(run: Path, layer: int, depth: int, last: bool) -> None:
    """Delete the files of activations that no layer above `layer` reads, `depth` layers down at most; `last`: all."""
    unread = []
    for older in range(-1, layer + 1):
        for path in folder_of(run, older).glob("*-?????.safetensors"):
            if last or is_past(path.name, older, layer, depth):
                unread.append(path)
    for path in unread:
        path.unlink()
        files.fault_point("thin.unlinked")
    if last:
        _remove_kept(run)


def is_past(name: str, older: int, layer: int, depth: int) -> bool:
    """Return whether no layer above `layer`, `depth` layers down at most, reads a file of an older layer."""
    return older <= layer - depth or (older < layer and name.startswith("hidden-"))


def save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors, to be fsynced with their layer's folder."""
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # the disk is full, or worse
        raise OSError(f"{path}: {error}") from error
    files.fault_point("layer.saved")


def load(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    """Read tensors, memory-mapped on a CPU."""
    return load_file(path, device=device)
