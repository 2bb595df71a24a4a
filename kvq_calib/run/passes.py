"""Do what is done with one chunk of a layer: the unit of work, in this process or in another one.

A pass over the chunks is a task, what all chunks share, and their numbers; `here` does it in this process, `workers.py`
in others. A task reads and writes files of the run folder, and returns what one reducer adds up in ascending order, so
that who did which chunk leaves no trace in the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvq_calib import checkpoint
from kvq_calib.capture import Captured, Layer, Stream
from kvq_calib.fit.layer import Blocks, Partial, Residuals, SideFit, blocks
from kvq_calib.fit.query import Gathered
from kvq_calib.statistics import Moments, QueryMoments
from kvq_runtime.codec import Codec, Context
from kvq_runtime.recipe import HALVES, Half, Recipe, Side
from kvq_runtime.stages.predict import Linear

if TYPE_CHECKING:
    from kvq_calib.run import Run

Pair = tuple[Tensor, Tensor]
Task = Callable[[Any, int], Any]
Spread = Callable[[Task, Any, Iterable[int]], Iterator[Any]]


def here(task: Task, shared: Any, indices: Iterable[int]) -> Iterator[Any]:
    """Do a task for each chunk, one after the other; the results in the chunks' order."""
    return (task(shared, index) for index in indices)


@dataclass(frozen=True)
class Capture:
    """What a layer's capture shares.

    sinks      the numbers of sinks that are left out, each, of moments
    gathered   of the queries, if they are asked for
    """

    run: Run
    stream: Stream
    layer: int
    folder: Path
    sinks: frozenset[int]
    gathered: Gathered | None

    @cached_property
    def module(self) -> Layer:
        """The layer, read where the first chunk needs it, and held as long as this is."""
        return self.stream.layer(self.layer)


@dataclass(frozen=True)
class Caught:
    """What a chunk says: moments of keys and of values by number of sinks, of queries; seconds of the model itself."""

    moments: dict[int, tuple[Moments, Moments]]
    queries: QueryMoments | None
    forward: float


@dataclass(frozen=True)
class Pass:
    """What a pass over the decoded layers below shares: one half of one recipe, as far as it is fitted."""

    work: RecipeWork
    side: SideFit


def capture(shared: Capture, index: int) -> Caught:
    """Run the layer on a chunk, keep its keys and values, and say what statistics of it are sums.

    Nothing reads what comes out of the last layer: it is run no further than its keys and values.
    """
    run, folder, asked = shared.run, shared.folder, shared.gathered is not None
    hidden = checkpoint.load(checkpoint.folder_of(run.folder, shared.layer - 1) / file("hidden", index))["hidden"]
    begun = time.perf_counter()
    last = shared.layer == run.plan.geometry.layers - 1
    captured = shared.module.project(hidden, asked) if last else shared.module.forward(hidden, asked)
    spent = time.perf_counter() - begun
    if isinstance(captured, Captured):
        checkpoint.save({"hidden": captured.h_BTE.cpu()}, folder / file("hidden", index))
    checkpoint.save({"key": captured.k_NTC.cpu(), "value": captured.v_NTC.cpu()}, folder / file("capture", index))
    moments = {}
    if index < run.plan.fitted_chunks:
        pair = captured.k_NTC, captured.v_NTC
        moments = {sinks: (_moments(pair[0][:, sinks:]), _moments(pair[1][:, sinks:])) for sinks in shared.sinks}
    queries = None
    if shared.gathered is not None and captured.q_NTC is not None:
        queries = shared.gathered.partial(index, captured.q_NTC)
    return Caught(moments, queries, spent)


def statistics(shared: Pass, index: int) -> Partial:
    """What a chunk says of the prediction."""
    half, side = shared.side.codec.half, shared.side.codec.side
    return shared.side.partial(*shared.work.data(index, half, clean(side)))


def residuals(shared: Pass, index: int) -> Residuals:
    """What a chunk says of what the prediction leaves."""
    data = shared.work.data(index, shared.side.codec.half, clean=False)
    return shared.side.residuals(*data, shared.work.run.plan.seed)


def decode(shared: Pass, index: int) -> Tensor:
    """Keep a chunk as it is decoded, where a prediction reads it; the sums of its errors, where they count."""
    work, half, plan = shared.work, shared.side.codec.half, shared.work.run.plan
    kept, measured = work.is_read(half), index >= plan.fitted_chunks or plan.held_out == 0
    sums = torch.zeros(5, dtype=torch.float64)
    if kept or measured:
        data, context = work.data(index, half, clean=False)
        decoded = shared.side.decode(data, context)
        if kept:
            work.keep(index, half, decoded)
        if measured:
            sums = shared.side.errors(data, context, decoded).cpu()
    return sums


class RecipeWork:
    """One recipe in one layer: reads a chunk as its codecs see it, and keeps what it decodes for the next layer."""

    def __init__(self, run: Run, stream: Stream, layer: int, recipe: Recipe, folder: Path):
        self.run, self.stream, self.layer, self.recipe, self.folder = run, stream, layer, recipe, folder
        self.fits: dict[str, SideFit] = {}
        self._tables = stream.rope(run.plan.seq_len)

    @property
    def sides(self) -> tuple[Side, Side]:
        """Keys' and values', as fitted."""
        return self.fits["key"].side, self.fits["value"].side

    def hidden(self, index: int) -> Tensor:
        """A chunk of what lies under the layer."""
        before = checkpoint.folder_of(self.run.folder, self.layer - 1)
        return checkpoint.load(before / file("hidden", index))["hidden"]

    def data(self, index: int, half: Half, clean: bool) -> tuple[Blocks, Context]:
        """A chunk, and what it is predicted from: as decoded, or, `clean`, as it was."""
        data = self._blocks(half, index, self.folder)
        reads_keys, depths = self._inputs(self.layer, half)
        nearest = range(1, max(depths, default=0) + 1)
        below = [self._clean(d, index) if clean else self._decoded(d, index) for d in nearest]
        keys = None
        if reads_keys:
            keys = self._load(self.folder, index, ("key",))["key"]
            if clean:
                keys = _centred(self.fits["key"].codec, self._blocks("key", index, self.folder))
        return data, Context(rope=data.rope, keys=keys, below=below)

    def is_read(self, half: Half) -> bool:
        """Whether a prediction reads decoded keys, or values, of this layer: that of its values, or one above."""
        above = range(self.layer + 1, self.run.plan.geometry.layers)
        below = (n - max(self._inputs(n, half)[1], default=0) <= self.layer for n in above for half in HALVES)
        return any(below) or (half == "key" and self._inputs(self.layer, "value")[0])

    def _inputs(self, layer: int, half: Half) -> tuple[bool, tuple[int, ...]]:
        return self.recipe.side(layer, half).inputs(layer, half)

    def keep(self, index: int, half: str, decoded: Tensor) -> None:
        """Store decoded keys, or values, of a chunk, in the dtype that predictions read."""
        name = file(f"{self.recipe.name}-{half}", index)
        checkpoint.save({half: decoded.cpu().to(torch.bfloat16)}, self.folder / name)

    def _load(self, folder: Path, index: int, halves: tuple[str, ...] = HALVES) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for half in halves:
            found |= checkpoint.load(folder / file(f"{self.recipe.name}-{half}", index), str(self.stream.device))
        return found

    def _decoded(self, depth: int, index: int) -> Pair:
        found = self._load(checkpoint.folder_of(self.run.folder, self.layer - depth), index)
        return found["key"], found["value"]

    def _clean(self, depth: int, index: int) -> Pair:
        """The exact keys and values of a layer below, centred by its own fitted means."""
        layer, geometry = self.layer - depth, self.run.plan.geometry
        folder = checkpoint.folder_of(self.run.folder, layer)
        fitted = checkpoint.load(folder / "fit.safetensors", str(self.stream.device))
        pair = []
        for half in HALVES:
            mean = fitted.get(f"{self.recipe.name}/layers.{layer}.{half}.predict.mean")
            codec = Codec(self.recipe, layer, half, geometry, {"predict.mean": mean} if mean is not None else {})
            pair.append(_centred(codec, self._blocks(half, index, folder)))
        return pair[0], pair[1]

    def _blocks(self, half: Half, index: int, folder: Path) -> Blocks:
        captured = checkpoint.load(folder / file("capture", index), str(self.stream.device))[half]
        return blocks(self.recipe, half, self.run.plan.geometry, captured, self._tables, self.run.plan.chunks[index])


def _centred(codec: Codec, data: Blocks) -> Tensor:
    return data.x if codec.predictor is None else data.x - codec.mean(Context(rope=data.rope))


def clean(side: Side) -> bool:
    """Whether the side's prediction is fitted on exact layers below."""
    return isinstance(side.predict, Linear) and side.predict.fit == "clean"


def file(kind: str, index: int) -> str:
    """The name of a chunk's file."""
    return f"{kind}-{index:05d}.safetensors"


def _moments(x_NTC: Tensor) -> Moments:
    found = Moments(x_NTC.shape[-1], x_NTC.device)
    found.update(x_NTC)
    return found
