"""The execution context of a plan: its run folder, the model's files, executor of chunks, listener to progress, and
where activations are held."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvq_calib.model.files import ModelFiles
from kvq_calib.run import checkpoint
from kvq_calib.run.activations import InFiles
from kvq_calib.run.plan import Plan

Task = Callable[[Any, int], Any]  # (what all chunks of a pass share, the number of a chunk) → its result
Executor = Callable[[Task, Any, Iterable[int]], Iterator[Any]]  # the results, in the order of the numbers


@dataclass(frozen=True)
class Progress:
    """One report of progress: `done` of the `total` units of work of a stage of a layer.

    layer    from 0; -1: the whole model, whose units are `total` tokens
    tokens   done since the last report; 0: those of one chunk
    round    of a recipe with a budget (`budget.py`)
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
