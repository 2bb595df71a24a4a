"""Fit one scheme of one layer, chunk by chunk: what stages are fitted to is collected in passes over the chunks.

    inputs      of what a prediction reads, and its target   → predict
    residuals   of what the prediction leaves                → rotate, quantize, feedback, correct

What takes the same pass is collected in one, so that a chunk is read once, however many stages ask. The moment of what
a linear prediction leaves follows from the moments of its inputs and target: in the first 8 layers of SmolLM2-135M, at
4 bits, it is the same to a thousandth.

    Summed   added up over chunks: the sums of each chunk, a partial, are merged in ascending order
    Given    known of a layer without another pass, from its queries or its gradients

A statistic that no row has is one of these, and stands beside the fit that it was made for; here are those that rows
have, too. `Fitting` goes through the stages in the order of the pipeline, each solved by the module of `kvq_calib.fit`
that has the name of the stage's own. Settings that a fit finds, as bits of channels, are written into
`SchemeFit.scheme`, which the artifact's recipe names.

Algorithm 1 of AQUA-KV with the runtime's own codec: what a layer is predicted from are the layers below as inference
will decode them.

Source: Shutova et al., 2025 (AQUA-KV), algorithm 1.
Differs: each row's exact sinks are left out of the fit (they are never encoded); the authors fit on all positions. Of
codes that are searched for, fits read numbers with errors of the same moments (`Codec.approximated`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from scipy import stats
from torch import Tensor

from kvq_calib.fit.chunks import Blocks, Chunk
from kvq_calib.fit.statistics import Centred, CrossMoments, LayerQueries, Sample
from kvq_runtime.codec.codec import Context
from kvq_runtime.fit.fitting import Collect, Fitting
from kvq_runtime.fit.statistics import (
    Queried,
    QueryMoment,
    ResidualMoment,
    Residuals,
    Statistic,
    Statistics,
)
from kvq_runtime.recipe import Scheme
from kvq_runtime.stages.stage import SLOTS, Fields
from kvq_runtime.store.block_errors import FIELD, QUANTILE, block_errors

V = TypeVar("V", covariant=True)
Sums = Any  # of one statistic: anything that can be merged, as those of `statistics.py`
Empty = Callable[[], Sums]  # how sums are made before any chunk: a worker is sent this
Asked = Sequence[tuple[Any, Empty]]  # what a pass adds up


@dataclass(frozen=True)
class LayerSource:
    """Everything that a calibration knows of a layer's keys, or values.

    partials         a pass: the sums of every chunk to fit on (`summed`), in ascending order
    queries          those to fit on; None: they were not summed
    gradients        the second moment of the gradients at the keys, or values, float64 [H, D, D]
    log_importance   logarithms of how much an error of each token counts there, float32 [first sequences, T]
    """

    partials: Callable[["SchemeFit", Asked], Iterable[list[Sums]]]
    queries: LayerQueries | None
    gradients: Callable[[], Tensor]
    log_importance: Callable[[], Tensor]


class Summed(Statistic[V], ABC):
    """A statistic that is added up over the chunks of a pass, the last of `passes`."""

    @abstractmethod
    def empty(self, fit: "SchemeFit", source: LayerSource) -> Empty:
        """Sums before any chunk."""

    @abstractmethod
    def add(self, sums: Sums, chunk: Chunk) -> None:
        """Add the tokens of a chunk that are ever encoded."""

    def value(self, sums: Sums, fit: "SchemeFit") -> V:
        """Return the value of the sums of all chunks."""
        return sums.value()


class Given(Statistic[V], ABC):
    """A statistic that takes no pass of its own."""

    @abstractmethod
    def read(self, fit: "SchemeFit", source: LayerSource) -> V:
        """Its value."""


def summed(asked: Asked, chunk: Chunk) -> list[Sums]:
    """Return the sums of one chunk."""
    every = [empty() for _, empty in asked]
    for (statistic, _), sums in zip(asked, every, strict=True):
        statistic.add(sums, chunk)
    return every


@dataclass(frozen=True)
class Errors:
    """The errors of some blocks.

    sums       over the encoded tokens, float64: |x|², |x - μ|², |x - prediction|², |x - x̂|², and their number
    blocks_N   of each block, the mean |x - x̂|² of its tokens
    """

    sums: Tensor = field(default_factory=lambda: torch.zeros(5, dtype=torch.float64))
    blocks_N: Tensor = field(default_factory=lambda: torch.zeros(0))

    def __add__(self, other: "Errors") -> "Errors":
        return Errors(self.sums + other.sums, torch.cat([self.blocks_N, other.blocks_N.cpu()]))


class SchemeFit(Fitting):
    """The fit of keys or of values.

    rows   residuals that a sample has at the most; 0: as many as are asked for
    """

    packages = ("kvq_calib.fit", "kvq_runtime.fit")
    rows: int = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a worker: the codec and the mean, without other statistics."""
        statistics = Statistics(self.statistics.mean_C, seed=self.statistics.seed)
        return self.__dict__ | {"statistics": statistics}

    @property
    def joint(self) -> Centred | None:
        """The moments of what inference reads and predicts, if they were collected."""
        exact = self.scheme.predict is not None and self.scheme.predict.fitted_on_exact
        return None if exact else self.statistics.values.get(Inputs())

    def zeros(self, size: int) -> Tensor:
        """Return a vector of zeros where the fit computes."""
        return self.statistics.mean_C.new_zeros(size)

    def fit(self, source: LayerSource) -> None:
        """Fit every stage."""
        self.solve(partial(self.collect, source))

    def collect(self, source: LayerSource, asked: Sequence[Statistic[Any]]) -> dict[Statistic[Any], Any]:
        """The values of statistics, those that are summed in one pass over the inputs, and one over residuals."""
        ways = {one: way(one) for one in asked}
        values = {one: own.read(self, source) for one, own in ways.items() if isinstance(own, Given)}
        joint, affine = self.joint, self.codec.affine() if ResidualMoment() in ways else None
        if joint is not None and affine is not None:
            values[ResidualMoment()] = joint.left(*affine)
            del ways[ResidualMoment()]
        for name in ("inputs", "residuals"):
            own = [(one, own) for one, own in ways.items() if isinstance(own, Summed) and own.passes[-1] == name]
            if not own:
                continue
            adding = [(summed, summed.empty(self, source)) for _, summed in own]
            totals = [empty() for _, empty in adding]
            for parts in source.partials(self, adding):
                for total, part in zip(totals, parts, strict=True):
                    total.merge(part)
            values |= {one: summed.value(total, self) for (one, summed), total in zip(own, totals, strict=True)}
        return values

    def with_rounding(self, scheme: Scheme, statistics: Statistics, collect: Collect) -> "SchemeFit":
        """Return the same prediction with the stages of another scheme after it, fitted to what the prediction leaves.

        collect   gives what `statistics` does not have yet
        """
        assert scheme.predict == self.scheme.predict, "the prediction is kept"
        other = copy(self)
        other.scheme, other.statistics = scheme, statistics
        other.tensors = {name: tensor for name, tensor in self.tensors.items() if name.startswith("predict.")}
        other.hold({})
        other.solve(collect, SLOTS[1:])
        return other

    def errors(self, data: Blocks, context: Context, fields: Fields, decoded: Tensor) -> Errors:
        """Return the errors of a chunk's blocks, as they are decoded."""
        x = data.x
        centred = x - self.codec.turned(self.statistics.mean_C, context)
        predicted = self.codec.predicted(context)
        residual = centred if predicted is None else centred - predicted.float()
        error = (x if self.predictor is None else centred) - decoded.float()
        mask = data.mask_NT[..., None]
        sums = [(part.double().square() * mask).sum() for part in (x, centred, residual, error)]
        counted = torch.tensor([*map(float, sums), float(data.mask_NT.sum())], dtype=torch.float64)
        return Errors(counted, block_errors(error, data.mask_NT))


def summary(errors: Errors, held_out: bool = False) -> dict[str, Any]:
    """Return the measures of one scheme, relative to the variance about the mean.

    Errors of held-out blocks also bound those of other blocks; the fit's own blocks would bound them too narrowly.
    """
    energy, variance, residual, error, _ = errors.sums.tolist()
    measures = {
        "relative_error": error / variance if variance else 0.0,
        "explained_variance": 1 - residual / variance if variance else 0.0,
        "mean_energy": 1 - variance / energy if energy else 0.0,
    }
    return measures | ({FIELD: quantile_of(errors.blocks_N)} if held_out and len(errors.blocks_N) > 1 else {})


def quantile_of(errors_N: Tensor) -> float:
    """Estimate the 99.9% quantile of blocks' errors from the few that calibration measures, to four digits.

    The logarithms of errors are taken as normal. The result is the upper limit for one more block (prediction interval
    of Student's t). It is wide where blocks are few: of two, as good as none.
    """
    logs_N, count = errors_N.double().clamp(min=1e-30).log(), len(errors_N)
    limit = float(logs_N.mean() + stats.t.ppf(QUANTILE, count - 1) * logs_N.std() * (1 + 1 / count) ** 0.5)
    return float(f"{math.exp(min(limit, 600.0)):.4g}")


def way(asked: Statistic[Any]) -> Summed[Any] | Given[Any]:
    """Return the statistic itself, if it says how a calibration collects it; of one that rows have, too, what does."""
    own = {Residuals: _Residuals, ResidualMoment: _ResidualMoment, QueryMoment: _QueryMoment}.get(type(asked))
    statistic = asked if own is None else own(**vars(asked))
    assert isinstance(statistic, Summed | Given), f"{asked} does not say how a calibration collects it"
    return statistic


class _Residuals(Residuals, Summed[Tensor]):
    """The tokens with the smallest hashes."""

    def empty(self, fit: SchemeFit, source: LayerSource) -> Empty:
        among = 0 if fit.joint is None else int(fit.joint.count)
        rows = min(self.rows, fit.rows or self.rows)
        return partial(Sample, rows, fit.codec.geometry.width, fit.statistics.seed, among)

    def add(self, sums: Sample, chunk: Chunk) -> None:
        chunk.offer(sums, chunk.residuals)

    def value(self, sums: Sample, fit: SchemeFit) -> Tensor:
        return sums.value().to(fit.codec.device)


class _ResidualMoment(ResidualMoment, Summed[Tensor]):
    def empty(self, fit: SchemeFit, source: LayerSource) -> Empty:
        return partial(CrossMoments, fit.zeros(fit.codec.geometry.width), fit.zeros(0))

    def add(self, sums: CrossMoments, chunk: Chunk) -> None:
        sums.update(chunk.residual, chunk.residual[..., :0], chunk.data.mask_NT)

    def value(self, sums: CrossMoments, fit: SchemeFit) -> Tensor:
        joint = sums.value()
        return joint.xx_II + torch.outer(joint.mean_x_I, joint.mean_x_I)


@dataclass(frozen=True)
class Inputs(Summed[Centred]):
    """Joint covariances of a prediction's inputs and its target."""

    passes = ("inputs",)

    def empty(self, fit: SchemeFit, source: LayerSource) -> Empty:
        width = fit.codec.geometry.width
        return partial(CrossMoments, fit.zeros(width * len(fit.codec.input_tensors)), fit.zeros(width))

    def add(self, sums: CrossMoments, chunk: Chunk) -> None:
        sums.update(*chunk.joint, chunk.data.mask_NT)


class _QueryMoment(QueryMoment, Given[Queried]):
    def read(self, fit: SchemeFit, source: LayerSource) -> Queried:
        assert source.queries is not None, "queries are summed while a layer is captured"
        return Queried(source.queries.moment(self.queries), source.queries.sequence)
