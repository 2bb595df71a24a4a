"""Define the execution context of a plan: run folder, model, executor of chunks, progress, and activations.

Activations are the inputs of later layers: hidden states, captured keys and values, decoded keys and values.

    InFiles     in the folder of their layer, sealed with it: a killed run resumes at its layer
    InMemory    in this process, with a checkpoint every few minutes: a killed run resumes after it

Both name them by path and give artifacts of the same bytes. Workers are other processes, and exchange files.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvq_calib.model.files import ModelFiles
from kvq_calib.run import checkpoint
from kvq_calib.run.plan import Plan

EVERY = 300.0  # least seconds between two checkpoints
SHARE = 0.05  # largest share of the time that writing them takes

Task = Callable[[Any, int], Any]  # (shared state of a pass, index of a chunk) → result
Executor = Callable[[Task, Any, Iterable[int]], Iterator[Any]]  # results in the order of the indices


@dataclass(frozen=True)
class Progress:
    """One report of progress: `done` of the `total` units of work of a stage of a layer.

    layer   from 0; -1: the whole model
    round   0, or 1 after a draft (`bit_allocation.py`)
    """

    layer: int
    layers: int
    stage: str
    done: int
    total: int
    round: int = 0


Listener = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """Ignore a report."""


def serial(task: Task, shared: Any, indices: Iterable[int]) -> Iterator[Any]:
    """Execute one chunk after the other in this process."""
    return (task(shared, index) for index in indices)


class InFiles:
    """Keep activations in files; read the files of `checkpoint.keep` where an earlier process kept them in memory."""

    description = "files, each layer a checkpoint"

    def save(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        """Keep tensors under a path in the folder of a layer, finished or partial."""
        checkpoint.save({name: tensor.cpu() for name, tensor in tensors.items()}, path)

    def load(self, path: Path, device: str = "cpu", names: Sequence[str] = ()) -> dict[str, Tensor]:
        """Load the tensors of a path, or some of them, to a device."""
        tensors = checkpoint.load(checkpoint.kept_file(path) or path, device)
        return {name: tensors[name] for name in names or tensors}

    def remove(self, path: Path) -> None:
        """Remove the tensors of a path."""
        path.unlink()

    def resume(self, run: Path) -> None:
        """Load the newest checkpoint, whose digests were compared."""

    def finished(self, run: Path, layer: int, depth: int, last: bool) -> None:
        """Remove the activations that no later layer reads, `depth` layers down at most; after the last layer all."""
        checkpoint.thin(run, layer, depth, last)


class InMemory(InFiles):
    """Keep activations in host memory, and write a checkpoint every `every` seconds.

    Checkpoints take at most SHARE of the time: one that takes long makes the next one later.
    """

    description = "memory, a checkpoint every few minutes"

    def __init__(self, every: float = EVERY):
        self._tensors: dict[Path, dict[str, Tensor]] = {}
        self._every, self._due = every, time.monotonic() + every

    def save(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        self._tensors[_finished(path)] = {name: _copied(tensor) for name, tensor in tensors.items()}

    def load(self, path: Path, device: str = "cpu", names: Sequence[str] = ()) -> dict[str, Tensor]:
        tensors = self._tensors.get(_finished(path))
        if tensors is None:
            return super().load(path, device, names)
        if device == "cpu":
            _wait_for_copies()
        return {name: tensors[name].to(device, non_blocking=True) for name in names or tensors}

    def remove(self, path: Path) -> None:
        if self._tensors.pop(_finished(path), None) is None:
            super().remove(path)

    def resume(self, run: Path) -> None:
        for path in self._of(run):
            del self._tensors[path]
        for path, kept in checkpoint.kept_files(run).items():
            self.save({name: tensor.clone() for name, tensor in checkpoint.load(kept).items()}, path)

    def finished(self, run: Path, layer: int, depth: int, last: bool) -> None:
        for path in self._of(run):
            if last or checkpoint.is_past(path.name, int(path.parent.name[-4:]), layer, depth):
                del self._tensors[path]
        if last:
            return checkpoint.thin(run, layer, depth, last)
        if (begun := time.monotonic()) >= self._due:
            _wait_for_copies()
            checkpoint.keep(run, layer, {path: self._tensors[path] for path in self._of(run)})
            checkpoint.thin(run, layer, depth, last=False)
            ended = time.monotonic()
            self._due = ended + max(self._every, (ended - begun) * (1 / SHARE - 1))

    def _of(self, run: Path) -> list[Path]:
        """List the paths in a run folder, without those of its draft."""
        return [path for path in self._tensors if path.parent.parent == run]


def _finished(path: Path) -> Path:
    """Return the path in the layer's finished folder, of a path in the finished or the partial one."""
    return path.parent.with_suffix("") / path.name


def _copied(tensor: Tensor) -> Tensor:
    """Copy a tensor to host memory of its own, unless it has one; copies from a GPU do not wait for it."""
    if tensor.is_cuda:
        try:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        except RuntimeError:  # the system allows no more page-locked memory: copies are waited for
            host = torch.empty(tensor.shape, dtype=tensor.dtype)
        return host.copy_(tensor, non_blocking=True)
    moved = tensor.detach().to("cpu")
    alone = moved.is_contiguous() and moved.untyped_storage().nbytes() == moved.nbytes
    return moved if alone else moved.clone(memory_format=torch.contiguous_format)


def _wait_for_copies() -> None:
    """Wait until the host may read what a GPU has copied to it."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Run:
    """A plan and all that executes it. Pickled without executor and listener, with activations in files."""

    plan: Plan
    files: ModelFiles
    folder: Path
    listener: Listener = silent
    round: int = 0
    executor: Executor = serial
    activations: InFiles = field(default_factory=InFiles)

    def __reduce__(self):
        return Run, (self.plan, self.files, self.folder)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Lock the run folder. Raises AlreadyRunning if another process holds it."""
        with checkpoint.claimed(self.folder):
            yield

    def report(self, layer: int, stage: str, done: int, total: int) -> None:
        """Report progress to the listener."""
        self.listener(Progress(layer, self.plan.geometry.layers, stage, done, total, self.round))
