"""The execution context of a plan: its run folder, the model's files, executor of chunks, listener to progress, and
what holds activations, which layers leave to those above: hidden states, captured keys and values, decoded ones.

    InFiles     in the folder of their layer, which is sealed with them: a killed run goes on at its layer
    InMemory    in this process. Every few minutes, behind the work, what the next layer reads is written; a killed run
                goes on after the layer of the last such checkpoint

A path names them in both; bytes of artifacts are the same. Workers are other processes, and exchange files.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvq_calib.model.files import ModelFiles
from kvq_calib.run import checkpoint
from kvq_calib.run.plan import Plan

EVERY = 300.0  # seconds between two checkpoints, at the least
SHARE = 0.05  # of the time that writing them may take

Task = Callable[[Any, int], Any]  # (what all chunks of a pass share, the number of a chunk) → its result
Executor = Callable[[Task, Any, Iterable[int]], Iterator[Any]]  # the results, in the order of the numbers


@dataclass(frozen=True)
class Progress:
    """One report of progress: `done` of the `total` units of work of a stage of a layer.

    layer    from 0; -1: the whole model, whose units are `total` tokens
    tokens   done since the last report; 0: those of one chunk
    round    0, or 1 after a draft (`bit_allocation.py`)
    """

    layer: int
    layers: int
    stage: str
    done: int
    total: int
    tokens: int
    round: int = 0


Listener = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """The listener that ignores every report."""


def serial(task: Task, shared: Any, indices: Iterable[int]) -> Iterator[Any]:
    """The executor of this process: one chunk after the other."""
    return (task(shared, index) for index in indices)


class InFiles:
    """Save and load files; what a killed run that held all in memory has written is read from its checkpoint."""

    @property
    def place(self) -> str:
        """The place of what is saved, in words."""
        return "files, each layer a checkpoint"

    def save(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        """Keep tensors under a path in the folder of a layer, or in its partial one."""
        checkpoint.save({name: tensor.cpu() for name, tensor in tensors.items()}, path)

    def load(self, path: Path, device: str = "cpu", names: Sequence[str] = ()) -> dict[str, Tensor]:
        """Return what was saved under a path, on a device; of several tensors those of these names."""
        kept = checkpoint.kept_file(path)
        found = checkpoint.load(path if kept is None else kept, device)
        return {name: found[name] for name in names or found}

    def remove(self, path: Path) -> None:
        """Forget what was saved under a path."""
        path.unlink()

    def resume(self, run: Path) -> None:
        """Begin with what the newest checkpoint has, which was found whole."""

    def finished(self, run: Path, layer: int, depth: int, last: bool) -> None:
        """Forget what no layer above this one reads; the last layer: all. Those that do reach `depth` layers down."""
        checkpoint.thin(run, layer, depth, last)

    def close(self) -> None:
        """Wait for what is being written."""


class InMemory(InFiles):
    """Keep tensors in host memory, or on a device that has room; write them every `every` seconds, or more where that
    took over SHARE of the time.

    An error of the disk is raised at the end of the layer that was at work meanwhile.
    """

    def __init__(self, every: float = EVERY, device: str = "cpu"):
        self._held: dict[Path, dict[str, Tensor]] = {}
        self._every, self._due, self._device = every, time.monotonic() + every, device
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def place(self) -> str:
        """The place of what is saved, in words."""
        return f"memory{'' if self._device == 'cpu' else f' of {self._device}'}, a checkpoint every few minutes"

    def save(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        self._held[_finished(path)] = {name: _copied(tensor, self._device) for name, tensor in tensors.items()}

    def load(self, path: Path, device: str = "cpu", names: Sequence[str] = ()) -> dict[str, Tensor]:
        held = self._held.get(_finished(path))
        if held is None:
            return super().load(path, device, names)
        if device == "cpu":
            _wait_for_copies()
        return {name: held[name].to(device, non_blocking=True) for name in names or held}

    def remove(self, path: Path) -> None:
        if self._held.pop(_finished(path), None) is None:
            super().remove(path)

    def resume(self, run: Path) -> None:
        for path in [path for path in self._held if path.parent.parent == run]:
            del self._held[path]
        for path, kept in checkpoint.kept_files(run).items():
            self.save({name: tensor.clone() for name, tensor in checkpoint.load(kept).items()}, path)

    def finished(self, run: Path, layer: int, depth: int, last: bool) -> None:
        if self._error is not None or last:
            self.close()
        for older in range(-1, layer + 1):
            folder = checkpoint.folder_of(run, older)
            for path in [path for path in self._held if path.parent == folder]:
                if last or checkpoint.is_past(path.name, older, layer, depth):
                    del self._held[path]
        if last:
            return checkpoint.thin(run, layer, depth, last)
        if time.monotonic() >= self._due and (self._writer is None or not self._writer.is_alive()):
            _wait_for_copies()
            held = {path: tensors for path, tensors in self._held.items() if path.parent.parent == run}
            self._writer = threading.Thread(target=self._write, args=(run, layer, depth, held), daemon=True)
            self._writer.start()

    def close(self) -> None:
        stopped: BaseException | None = None
        while self._writer is not None and self._writer.is_alive():
            try:
                self._writer.join()
            except BaseException as error:  # as a second Ctrl-C: the run folder is the writer's until it ends
                stopped = error
        if stopped is not None:
            raise stopped
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(self, run: Path, layer: int, depth: int, held: dict[Path, dict[str, Tensor]]) -> None:
        begun = time.monotonic()
        try:
            checkpoint.keep(run, layer, held)
            checkpoint.thin(run, layer, depth, last=False)
        except BaseException as error:
            self._error = error
        ended = time.monotonic()
        self._due = ended + max(self._every, (ended - begun) * (1 / SHARE - 1))


def _finished(path: Path) -> Path:
    """The path in the layer's finished folder, whether or not it is finished."""
    return path.parent.with_suffix("") / path.name


def _copied(tensor: Tensor, device: str) -> Tensor:
    """The tensor on a device, in memory that holds nothing else; from a GPU to the host beside the GPU's work."""
    if tensor.is_cuda and device == "cpu":
        try:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        except RuntimeError:  # the system allows no more page-locked memory: copies are waited for
            host = torch.empty(tensor.shape, dtype=tensor.dtype)
        return host.copy_(tensor, non_blocking=True)
    moved = tensor.detach().to(device)
    alone = moved.is_contiguous() and moved.untyped_storage().nbytes() == moved.nbytes
    return moved if alone else moved.clone(memory_format=torch.contiguous_format)


def _wait_for_copies() -> None:
    """Wait until the host may read what a GPU has copied to it."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Run:
    """A plan, with everything that it takes to execute it. Pickled without executor and listener, which a worker has
    not, and with activations in files."""

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
        """Hold the run folder, until what is being written there is whole. AlreadyRunning: another process holds it."""
        with checkpoint.claimed(self.folder), closing(self.activations):
            yield

    def report(self, layer: int, stage: str, done: int, total: int, tokens: int = 0) -> None:
        """Report progress to the listener."""
        self.listener(Progress(layer, self.plan.geometry.layers, stage, done, total, tokens, self.round))
