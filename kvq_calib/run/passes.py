"""Process one chunk of one layer: the unit of work, in this process or a worker.

A pass is a task (`capture`, `collect`, `decode`, `measure`), the state that its chunks share, and their indices; an
executor (`run.py`, `workers.py`) runs it. A task loads and saves activations, and returns sums. One process adds them
in ascending order, so that bytes do not depend on the workers.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from kvq_calib.fit.chunks import Blocks, Chunk, blocks
from kvq_calib.fit.scheme import Asked, Errors, SchemeFit, Sums, summed
from kvq_calib.fit.statistics import Moments, QueryMoments
from kvq_calib.model.streamed import Layer, Stream
from kvq_calib.run import checkpoint
from kvq_calib.run.device import settle
from kvq_calib.run.run import Run
from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.recipe import ROLES, Recipe, Role, Scheme
from kvq_runtime.stages.stage import Inputs

Pair = tuple[Tensor, Tensor]

TOKENS = "tokens.safetensors"  # of all sequences


@dataclass(frozen=True)
class Capture:
    """The shared state of capturing a layer.

    sinks     numbers of sinks to leave out of moments
    queries   whether to sum moments of queries
    """

    run: Run
    stream: Stream
    layer: int
    folder: Path
    sinks: frozenset[int]
    queries: bool

    @cached_property
    def module(self) -> Layer:
        """The layer, loaded with the first chunk."""
        return self.stream.layer(self.layer)


@dataclass(frozen=True)
class ChunkStatistics:
    """Sums over one chunk.

    moments   of keys and values, by the number of sinks left out
    queries   None: not requested, or the chunk is held out
    forward   seconds of the model itself
    """

    moments: dict[int, tuple[Moments, Moments]]
    queries: QueryMoments | None
    forward: float


def capture(shared: Capture, index: int) -> ChunkStatistics:
    """Run the layer on a chunk, keep its keys, values and output, and sum their moments."""
    run, folder = shared.run, shared.folder
    hidden = inputs(run, shared.stream, shared.layer, index)
    begun = time.perf_counter()
    fitted, geometry = index < run.plan.fitted_chunks, run.plan.geometry
    captured = shared.module.forward(hidden, shared.queries and fitted)
    settle(hidden.device)
    spent = time.perf_counter() - begun
    if shared.layer < geometry.layers - 1:
        run.activations.save({"hidden": captured.h_BTE}, folder / file("hidden", index))
    run.activations.save({"key": captured.k_NTC, "value": captured.v_NTC}, folder / file("capture", index))
    moments = {}
    if fitted:
        pair = captured.k_NTC, captured.v_NTC
        moments = {sinks: (_moments(pair[0][:, sinks:]), _moments(pair[1][:, sinks:])) for sinks in shared.sinks}
    queries = None
    if captured.q_NTC is not None:
        queries = QueryMoments(geometry, hidden.device)
        queries.update(captured.q_NTC.unflatten(-1, (-1, geometry.head_size)), shared.stream.rope(run.plan.seq_len))
    return ChunkStatistics(moments, queries, spent)


def inputs(run: Run, stream: Stream, layer: int, index: int) -> Tensor:
    """Load the hidden states that enter a layer, on the device; embed the tokens of the first."""
    folder, rows = checkpoint.folder_of(run.folder, layer - 1), run.plan.chunks[index]
    if layer:
        return run.activations.load(folder / file("hidden", index), str(stream.device))["hidden"]
    return stream.embed(checkpoint.load(folder / TOKENS)["tokens"][rows.start : rows.stop])


class RecipeWork:
    """One recipe in one layer: loads a chunk as its codecs see it, and saves decoded chunks for the layers above."""

    def __init__(self, run: Run, stream: Stream, layer: int, recipe: Recipe, folder: Path):
        self.run, self.stream, self.layer, self.recipe, self.folder = run, stream, layer, recipe, folder
        self.fits: dict[str, SchemeFit] = {}
        self._tables = stream.rope(run.plan.seq_len)

    @property
    def schemes(self) -> tuple[Scheme, Scheme]:
        """The fitted schemes of keys and values."""
        return self.fits["key"].scheme, self.fits["value"].scheme

    def hidden(self, index: int) -> Tensor:
        """The hidden states under the layer, of a chunk."""
        return inputs(self.run, self.stream, self.layer, index)

    def data(self, index: int, role: Role, clean: bool) -> tuple[Blocks, Context]:
        """Load a chunk and the inputs of its prediction, decoded, or exact with `clean`."""
        data = self._blocks(role, index, self.folder)
        reads = self._inputs(self.layer, role)
        nearest = range(1, max(reads.below, default=0) + 1)
        below = [self._clean(d, index) if clean else self._decoded(d, index) for d in nearest]
        keys = None
        if reads.keys:
            keys = self._load(self.folder, index, ("key",))["key"]
            if clean:
                keys = _centred(self.fits["key"].codec, self._blocks("key", index, self.folder))
        return data, Context(rope=data.rope, keys=keys, below=below)

    def is_read(self, role: Role) -> bool:
        """Return whether the prediction of this layer's values, or of a layer above, reads decoded keys, or values."""
        above = range(self.layer + 1, self.run.plan.geometry.layers)
        below = (n - max(self._inputs(n, role).below, default=0) <= self.layer for n in above for role in ROLES)
        return any(below) or (role == "key" and self._inputs(self.layer, "value").keys)

    def _inputs(self, layer: int, role: Role) -> Inputs:
        return self.recipe.scheme(layer, role).inputs(layer, role)

    def keep(self, index: int, role: str, decoded: Tensor) -> None:
        """Save decoded keys, or values, of a chunk, in the dtype that predictions read."""
        name = file(f"{self.recipe.name}-{role}", index)
        self.run.activations.save({role: decoded.to(torch.bfloat16)}, self.folder / name)

    def _load(self, folder: Path, index: int, roles: tuple[str, ...] = ROLES) -> dict[str, Tensor]:
        decoded: dict[str, Tensor] = {}
        for role in roles:
            path = folder / file(f"{self.recipe.name}-{role}", index)
            decoded |= self.run.activations.load(path, str(self.stream.device))
        return decoded

    def _decoded(self, depth: int, index: int) -> Pair:
        decoded = self._load(checkpoint.folder_of(self.run.folder, self.layer - depth), index)
        return decoded["key"], decoded["value"]

    def _clean(self, depth: int, index: int) -> Pair:
        """Load the exact keys and values of a layer below, centred by its fitted means."""
        layer, geometry = self.layer - depth, self.run.plan.geometry
        folder = checkpoint.folder_of(self.run.folder, layer)
        fitted = checkpoint.load(folder / "fit.safetensors", str(self.stream.device))
        pair = []
        for role in ROLES:
            mean = fitted.get(f"{self.recipe.name}/layers.{layer}.{role}.predict.mean")
            codec = Codec(self.recipe, layer, role, geometry, {"predict.mean": mean} if mean is not None else {})
            pair.append(_centred(codec.to(self.stream.device), self._blocks(role, index, folder)))
        return pair[0], pair[1]

    def keys(self, index: int) -> Tensor:
        """Load the layer's keys of a chunk in the recipe's position, [N, block, C]."""
        return self._blocks("key", index, self.folder).x

    def _blocks(self, role: Role, index: int, folder: Path) -> Blocks:
        path, device = folder / file("capture", index), str(self.stream.device)
        captured = self.run.activations.load(path, device, [role])[role]
        return blocks(self.recipe, role, self.run.plan.geometry, captured, self._tables, self.run.plan.chunks[index])


@dataclass(frozen=True)
class Pass:
    """The shared state of a pass over the decoded layers below: one scheme of one recipe, fitted in part.

    asked   the requested statistics, and the start of their sums
    """

    work: RecipeWork
    fit: SchemeFit
    asked: Asked = ()


def collect(shared: Pass, index: int) -> list[Sums]:
    """Sum the statistics of one chunk; residuals are those of inference."""
    work, codec = shared.work, shared.fit.codec
    exact_below = clean(shared.fit.scheme) and any("inputs" in one.passes for one, _ in shared.asked)
    data, context = work.data(index, codec.role, exact_below)
    return summed(shared.asked, Chunk(codec, data, context, partial(work.keys, index)))


def decode(shared: Pass, index: int) -> Errors:
    """Save a decoded chunk if a prediction reads it; return its errors if they count.

    Without errors to count, an approximation replaces the search for codes, which takes most of the time: a fit reads
    moments of errors alone."""
    work, codec, plan = shared.work, shared.fit.codec, shared.work.run.plan
    counts = plan.held_out == 0 or index >= plan.fitted_chunks
    kept, measured = work.is_read(codec.role), counts and not plan.draft
    if not kept and not measured:
        return Errors()
    data, context = work.data(index, codec.role, clean=False)
    if not measured:
        work.keep(index, codec.role, codec.approximated(data.x, context))
        return Errors()
    fields, decoded = codec.encode_decode(data.x, context)
    if kept:
        work.keep(index, codec.role, decoded)
    return shared.fit.errors(data, context, fields, decoded)


@dataclass(frozen=True)
class Settings:
    """The shared state of a pass that decodes keys, or values, with several settings."""

    work: RecipeWork
    fits: Sequence[SchemeFit]


def measure(shared: Settings, index: int) -> list[Errors]:
    """Measure the errors of one chunk, by setting."""
    data, context = shared.work.data(index, shared.fits[0].codec.role, clean=False)
    return [fit.errors(data, context, *fit.codec.encode_decode(data.x, context)) for fit in shared.fits]


def _centred(codec: Codec, data: Blocks) -> Tensor:
    return data.x if codec.predictor is None else data.x - codec.mean(Context(rope=data.rope))


def clean(scheme: Scheme) -> bool:
    """Return whether the scheme's prediction is fitted on exact layers below."""
    return scheme.predict is not None and scheme.predict.fitted_on_exact


def file(kind: str, index: int) -> str:
    """Return the name of a chunk's file."""
    return f"{kind}-{index:05d}.safetensors"


def _moments(x_NTC: Tensor) -> Moments:
    moments = Moments(x_NTC.shape[-1], x_NTC.device)
    moments.update(x_NTC)
    return moments
