"""Collect the statistics that stages request of a calibration.

    Summed   added up over chunks: the sums of each chunk, a partial, are merged in ascending order
    Given    known of a layer without another pass, from its queries, its weights or its gradients

A statistic that no row has is one of these, and stands beside the fit that it was made for; here are those that rows
have, too. What takes the same pass is collected in one, so that a chunk is read once, however many stages ask.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvq_calib.fit.scheme import Chunk, SchemeFit
from kvq_calib.fit.statistics import CrossMoments, LayerQueries, Sample
from kvq_runtime.fit.statistics import Queried, QueryMoment, ResidualMoment, Residuals, Statistic

V = TypeVar("V", covariant=True)
Sums = Any  # of one statistic: anything that can be merged, as those of `statistics.py`
Empty = Callable[[], Sums]  # how sums are made before any chunk: a worker is sent this
Asked = Sequence[tuple[Any, Empty]]  # what a pass adds up


@dataclass(frozen=True)
class Source:
    """What a calibration knows of a layer's keys, or values.

    partials     a pass: the sums of every chunk to fit on (`summed`), in ascending order
    queries      those to fit on; None: they were not summed
    projection   the weight of the output projection, [hidden, query heads · D]
    gradients    the second moment of the gradients at the keys, or values, float64 [H, D, D]
    vocabulary   the first layer's keys before RoPE, or values, of every token that there is: float32 [V, C]
    """

    partials: Callable[[SchemeFit, Asked], Iterable[list[Sums]]]
    queries: LayerQueries | None
    projection: Callable[[], Tensor]
    gradients: Callable[[], Tensor]
    vocabulary: Callable[[], Tensor]


class Summed(Statistic[V], ABC):
    """A statistic that is added up over the chunks of a pass, the last of `passes`."""

    @abstractmethod
    def empty(self, fit: SchemeFit, source: Source) -> Empty:
        """Sums before any chunk."""

    @abstractmethod
    def add(self, sums: Sums, chunk: Chunk) -> None:
        """Add the tokens of a chunk that are ever encoded."""

    def value(self, sums: Sums, fit: SchemeFit) -> V:
        """What the sums of all chunks come to."""
        return sums.value()


class Given(Statistic[V], ABC):
    """A statistic that takes no pass of its own."""

    @abstractmethod
    def of(self, fit: SchemeFit, source: Source) -> V:
        """Its value."""


def summed(asked: Asked, chunk: Chunk) -> list[Sums]:
    """The sums of one chunk."""
    found = [empty() for _, empty in asked]
    for (statistic, _), sums in zip(asked, found, strict=True):
        statistic.add(sums, chunk)
    return found


def fit(fitting: SchemeFit, source: Source) -> None:
    """Fit every stage of a scheme."""
    fitting.solve(partial(collected, fitting, source))


def collected(fit: SchemeFit, source: Source, asked: Sequence[Statistic[Any]]) -> dict[Statistic[Any], Any]:
    """The values of statistics, those that are summed in one pass over the inputs, and one over residuals."""
    ways = {one: way(one) for one in asked}
    found = {one: own.of(fit, source) for one, own in ways.items() if isinstance(own, Given)}
    for name in ("inputs", "residuals"):
        own = [(one, own) for one, own in ways.items() if isinstance(own, Summed) and own.passes[-1] == name]
        if not own:
            continue
        adding = [(summed, summed.empty(fit, source)) for _, summed in own]
        totals = [empty() for _, empty in adding]
        for index, parts in enumerate(source.partials(fit, adding)):
            for total, part in zip(totals, parts, strict=True):
                total.merge(index, part)
        found |= {one: summed.value(total, fit) for (one, summed), total in zip(own, totals, strict=True)}
    return found


def way(asked: Statistic[Any]) -> Summed[Any] | Given[Any]:
    """The statistic itself, if it says how a calibration collects it; of one that rows have, too, what does."""
    own = {Residuals: _Residuals, ResidualMoment: _ResidualMoment, QueryMoment: _QueryMoment}.get(type(asked))
    found = asked if own is None else own(**vars(asked))
    assert isinstance(found, Summed | Given), f"{asked} does not say how a calibration collects it"
    return found


class _Residuals(Residuals, Summed[Tensor]):
    """The tokens with the smallest hashes."""

    def empty(self, fit: SchemeFit, source: Source) -> Empty:
        return partial(Sample, self.rows, fit.codec.geometry.width, fit.statistics.seed)

    def add(self, sums: Sample, chunk: Chunk) -> None:
        chunk.offer(sums, chunk.residual)

    def value(self, sums: Sample, fit: SchemeFit) -> Tensor:
        return sums.value().to(fit.codec.device)


class _ResidualMoment(ResidualMoment, Summed[Tensor]):
    def empty(self, fit: SchemeFit, source: Source) -> Empty:
        return partial(CrossMoments, fit.zeros(fit.codec.geometry.width), fit.zeros(0))

    def add(self, sums: CrossMoments, chunk: Chunk) -> None:
        sums.update(chunk.residual, chunk.residual[..., :0], chunk.data.mask_NT)

    def value(self, sums: CrossMoments, fit: SchemeFit) -> Tensor:
        found = sums.value()
        return found.xx_II + torch.outer(found.mean_x_I, found.mean_x_I)


class _QueryMoment(QueryMoment, Given[Queried]):
    def of(self, fit: SchemeFit, source: Source) -> Queried:
        assert source.queries is not None, "queries are summed while a layer is captured"
        return Queried(source.queries.moment(self.queries), source.queries.sequence)
