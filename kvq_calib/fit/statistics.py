"""Gather what fits need in one pass over the tokens: sums in float64, and samples.

One partial per (layer, chunk): an empty statistic and `update` with that chunk alone. One reducer: an empty statistic
of the same settings, which merges the partials in the order of the chunks. So a sum has one order of addition, whatever
the number of workers, and the same bytes.

    Moments       n, Σx, Σx² by channel                        → mean, variance
    CrossMoments  n, Σx, Σy, XᵀX, XᵀY, Σ‖y‖² of shifted data   → covariances, exactly centred
    QueryMoments  n, Σq qᵀ by KV head, before and after RoPE   → second moments about zero
    Attended      n, Σ w, Σ w v vᵀ by KV head                  → second moments of values, weighed by their keys
    Sample        rows of the smallest hashes

Everything shifts by a vector near the mean before it is squared: a mean a thousand deviations away, as keys with biases
have, would otherwise take with it the digits that the covariance is in.

O = outputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kvq_runtime.fit.statistics import add_moment
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import rope
from kvq_runtime.ops.rotation import mix
from kvq_runtime.stages.stage import Queries

Pair = tuple[Tensor, Tensor]

# rows of one float32 product, whose error grows with them; a GPU takes more, or waits for launches
TILE, WIDE_TILE = 1024, 4096
# columns that one product takes: of a symmetric matrix about half need not be calculated; a GPU would wait for launches
PANEL, WIDE_PANEL = 128, 1024


@dataclass(frozen=True)
class MeanVariance:
    """count, and by channel the mean and the variance (divided by count), float64."""

    count: float
    mean_C: Tensor
    variance_C: Tensor


@dataclass(frozen=True)
class Centred:
    """Covariances (divided by count) of inputs x and outputs y, float64."""

    count: float
    mean_x_I: Tensor
    mean_y_O: Tensor
    xx_II: Tensor
    xy_IO: Tensor
    yy_OO: Tensor

    @property
    def yy_O(self) -> Tensor:
        """The variances of outputs."""
        return self.yy_OO.diagonal()

    def left(self, weight_IO: Tensor, bias_O: Tensor) -> Tensor:
        """Return the second moment about zero of y - x W - b, float64 [O, O]."""
        weight_IO, mean_O = weight_IO.double(), self.mean_y_O - bias_O.double()
        mean_O = mean_O - self.mean_x_I @ weight_IO
        crossed_OO = weight_IO.mT @ (self.xx_II @ weight_IO / 2 - self.xy_IO)
        return self.yy_OO + crossed_OO + crossed_OO.mT + torch.outer(mean_O, mean_O)


class _Sums:
    """A statistic that is a sum of tensors, and what such a one adds up: `sums`, by name, float64."""

    def __init__(self, settings: dict[str, Tensor], sums: dict[str, Tensor]):
        self.settings, self.sums = settings, sums

    def merge(self, partial: Self) -> None:
        """Add the partial of a chunk, which has the same settings."""
        for name, total in self.sums.items():
            total += partial.sums[name].to(total.device)


class Moments(_Sums):
    """Sum x and x² by channel."""

    def __init__(self, width: int, device: torch.device | str = "cpu"):
        super().__init__({}, _zeros(device, count=(), x=(width,), xx=(width,)))

    def update(self, x_NTC: Tensor, mask_NT: Tensor | None = None) -> None:
        """Add the rows where the mask is true."""
        for (x,) in _tiles(mask_NT, x_NTC):
            x = x.to(self.sums["x"])
            self.sums["count"] += len(x)
            self.sums["x"] += x.sum(0)
            self.sums["xx"] += x.square().sum(0)

    def value(self) -> MeanVariance:
        count = _count(self.sums)
        mean = self.sums["x"] / count
        variance = (self.sums["xx"] / count - mean.square()).clamp_min(0)
        return MeanVariance(count, mean, variance)


class CrossMoments(_Sums):
    """Sum the products of inputs x with themselves and with outputs y, and of those with themselves.

    shift_x_I, shift_y_O   vectors near the means: products are float32, where those of large means would not fit
    """

    def __init__(self, shift_x_I: Tensor, shift_y_O: Tensor):
        both, device = len(shift_x_I) + len(shift_y_O), shift_x_I.device
        shifts = {"shift_x": shift_x_I.float(), "shift_y": shift_y_O.to(device).float()}
        # x and y side by side; only what is on and above the diagonal counts
        super().__init__(shifts, _zeros(device, count=(), sum=(both,), products=(both, both)))

    def update(self, x_NTI: Tensor, y_NTO: Tensor, mask_NT: Tensor | None = None) -> None:
        """Add the rows where the mask is true."""
        shift = torch.cat([*self.settings.values()])
        for parts in _tiles(mask_NT, x_NTI, y_NTO):
            xy = torch.cat(parts, 1).float().sub_(shift)
            self.sums["count"] += len(xy)
            self.sums["sum"] += xy.sum(0)
            panel = PANEL if xy.device.type == "cpu" else WIDE_PANEL
            for first in range(0, len(shift), panel):
                self.sums["products"][first : first + panel, first:] += xy[:, first : first + panel].mT @ xy[:, first:]

    def value(self) -> Centred:
        count = _count(self.sums)
        inputs = len(self.settings["shift_x"])
        moment, mean = self.sums["products"] / count, self.sums["sum"] / count
        covariance = moment.triu() + moment.triu(1).mT - torch.outer(mean, mean)
        x, y = (mean + torch.cat([*self.settings.values()])).tensor_split([inputs])
        (xx, xy), (_, yy) = (rows.tensor_split([inputs], 1) for rows in covariance.tensor_split([inputs]))
        return Centred(count=count, mean_x_I=x, mean_y_O=y, xx_II=xx, xy_IO=xy, yy_OO=yy)


@dataclass(frozen=True)
class LayerQueries:
    """The queries of a layer.

    before, after   second moments before and after RoPE, float64 [H, D, D]
    sequence        how many queries one KV head is multiplied with in a sequence
    """

    before: Tensor
    after: Tensor
    sequence: float

    def moment(self, which: Queries) -> Tensor:
        """Return the moment of the queries that a stage asks for."""
        return self.after if which == "after" else self.before


class QueryMoments(_Sums):
    """Sum q qᵀ over the tokens and query heads of each KV head, before and after RoPE; nothing is subtracted."""

    def __init__(self, geometry: Geometry, device: torch.device | str = "cpu"):
        square = (geometry.kv_heads, geometry.head_size, geometry.head_size)
        super().__init__({}, _zeros(device, count=(), sequences=(), before=square, after=square))

    def update(self, q_NTGD: Tensor, tables: Pair) -> None:
        """Add sequences' queries before RoPE, those of one KV head side by side; cos and sin [1, T, K]."""
        q_NTGD = q_NTGD.float()
        heads = len(self.sums["before"])
        for name, part in (("before", q_NTGD), ("after", rope.rotate(q_NTGD, *tables))):
            add_moment(self.sums[name], part)
        self.sums["count"] += q_NTGD.shape[:3].numel() // heads
        self.sums["sequences"] += len(q_NTGD)

    def value(self) -> LayerQueries:
        count = _count(self.sums)
        sequence = count / float(self.sums["sequences"])
        return LayerQueries(self.sums["before"] / count, self.sums["after"] / count, sequence)


class Attended(_Sums):
    """Sum w v vᵀ by KV head, w = k M kᵀ: what queries of the second moment M see in the value's key, after RoPE."""

    def __init__(self, metric_HDD: Tensor):
        heads = len(metric_HDD)
        sums = _zeros(metric_HDD.device, count=(), weight=(heads,), products=tuple(metric_HDD.shape))
        super().__init__({"metric": metric_HDD.double()}, sums)

    def update(self, k_NTC: Tensor, v_NTC: Tensor, mask_NT: Tensor | None = None) -> None:
        """Add the tokens where the mask is true."""
        metric_HDD = self.settings["metric"]
        for k_RC, v_RC in _tiles(mask_NT, k_NTC, v_NTC):
            k_HRD, v_HRD = (x.double().unflatten(-1, (len(metric_HDD), -1)).transpose(0, 1) for x in (k_RC, v_RC))
            weight_HR = ((k_HRD @ metric_HDD) * k_HRD).sum(-1)
            self.sums["count"] += len(k_RC)
            self.sums["weight"] += weight_HR.sum(1)
            self.sums["products"] += (v_HRD * weight_HR[..., None]).mT @ v_HRD

    def value(self) -> Tensor:
        """Σ w v vᵀ / Σ w, float64 [H, D, D]; zero where no query sees anything."""
        _count(self.sums)
        weight_H = self.sums["weight"]
        return self.sums["products"] / torch.where(weight_H > 0, weight_H, 1.0)[:, None, None]


class Sample:
    """Keep the rows of a corpus whose hash of (seed, sequence, position) is among the `rows` smallest:
    the same rows whatever the chunks, or their order.

    among   so many rows are offered in all: those whose hash is too large for them are not looked at. 0: unknown
    """

    def __init__(self, rows: int, width: int, seed: int = 0, among: int = 0):
        self.rows, self.seed = rows, seed
        share = rows / max(among, 1) * (1 + 8 / rows**0.5)  # eight deviations more than are kept
        self._most = int(2**64 * share) - 2**63 if among and share < 1 else 2**63 - 1
        self._hash_R = torch.empty(0, dtype=torch.int64)
        self._sequence_R, self._position_R = self._hash_R.clone(), self._hash_R.clone()
        self._rows_RC = torch.empty(0, width, dtype=torch.float32)

    def update(
        self,
        rows: Callable[[Tensor], Tensor],
        sequences_N: Tensor,
        tokens: int,
        mask_NT: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Offer whole sequences, from position 0 on, where the mask is true.

        rows          places in [N · tokens], on a device → their rows, float [K, C]
        sequences_N   the sequences' numbers in the whole corpus
        """
        sequence = sequences_N.cpu().long().repeat_interleave(tokens)
        position = torch.arange(tokens).repeat(len(sequences_N))
        hashes = mix(mix(mix(torch.tensor(self.seed)) ^ sequence) ^ position)
        open_R = hashes <= self._most
        kept = (open_R if mask_NT is None else open_R & mask_NT.cpu().flatten()).nonzero()[:, 0]
        kept = kept[torch.argsort(hashes[kept], stable=True)[: self.rows]]
        self._keep(hashes[kept], sequence[kept], position[kept], rows(kept.to(device)).to("cpu", torch.float32))

    def merge(self, partial: Self) -> None:
        """Take in the partial of a chunk, with as many rows and the same seed."""
        self._keep(partial._hash_R, partial._sequence_R, partial._position_R, partial._rows_RC)

    def value(self) -> Tensor:
        """Return the rows [R, C] in the order of their hashes."""
        return self._rows_RC

    def _keep(self, hashes: Tensor, sequence: Tensor, position: Tensor, rows: Tensor) -> None:
        """Join with what is held, and keep the smallest; equal hashes by sequence, then position."""
        old = (self._hash_R, self._sequence_R, self._position_R)
        hashes, sequence, position = (torch.cat(both) for both in zip(old, (hashes, sequence, position), strict=True))
        rows = torch.cat([self._rows_RC, rows])
        order = torch.arange(len(hashes))
        for key in (position, sequence, hashes):
            order = order[torch.argsort(key[order], stable=True)]
        order = order[: self.rows]
        self._hash_R, self._sequence_R, self._position_R = hashes[order], sequence[order], position[order]
        self._rows_RC = rows[order]


def _tiles(mask_NT: Tensor | None, *parts: Tensor):
    """Rows [R, C] of each part, TILE at a time, on a GPU WIDE_TILE, without those that the mask leaves out."""
    flat = [part.flatten(0, -2) for part in parts]
    rows = TILE if flat[0].device.type == "cpu" else WIDE_TILE
    kept = None if mask_NT is None else mask_NT.to(flat[0].device).flatten().nonzero()[:, 0]
    for start in range(0, len(flat[0]) if kept is None else len(kept), rows):
        tile = slice(start, start + rows)
        yield [part[tile] if kept is None else part.index_select(0, kept[tile]) for part in flat]


def _zeros(device, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=torch.float64, device=device) for name, shape in shapes.items()}


def _count(sums: Mapping[str, Tensor]) -> float:
    count = float(sums["count"])
    if count < 1:
        raise ValueError("no tokens were counted; a statistic needs at least one")
    return count
