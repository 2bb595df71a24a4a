"""Share the bits of latent channels out by reverse water-filling on the channels' variances λ.

    minimise Σ λ_r d(b_r)   subject to   Σ b_r = budget,   0 ≤ b_r ≤ most

d(b) is what b bits leave of a unit variance. It falls convexly, so giving one bit at a time to the channel that gains
most is optimal (Fox, 1966); with d(b) = 4^-b and fractions of bits it is the textbook's b_r = max(0, ½ log₂ λ_r / θ).
Scales are fitted by `kvq_runtime.fit.mixed`, which a cache that fits to its own prompt shares.

Source: Cover and Thomas, 2006, section 10.3.3; Shoham and Gersho, 1988 (whole bits).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvq_calib.fit.chunks import Chunk
from kvq_calib.fit.rotate import directions
from kvq_calib.fit.scheme import Empty, LayerSource, SchemeFit, Summed
from kvq_calib.fit.statistics import CrossMoments
from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit import mixed
from kvq_runtime.fit.statistics import ResidualMoment, Residuals, Statistic, Statistics
from kvq_runtime.geometry import Geometry
from kvq_runtime.stages.latent import Mixed
from kvq_runtime.stages.stage import Scheme

RIDGE = 0.1  # of the variance of a channel: what tells importance is fitted to few tokens, and noisy gradients


class LogImportance(CrossMoments):
    """Sums of tokens and of logarithms of how much their errors count: float32 [first sequences, T]."""

    def __init__(self, logs_ST: Tensor, zeros_C: Tensor):
        super().__init__(zeros_C, zeros_C[:1])
        self.logs_ST = logs_ST

    def add(self, chunk: Chunk) -> None:
        """Add the tokens of a chunk whose gradients were taken."""
        numbers_N, (_, size, _) = chunk.data.sequences, chunk.data.x.shape
        known_N = numbers_N < len(self.logs_ST)
        if not bool(known_N.any()):
            return
        place_N = torch.cat([torch.arange(int(count)) for count in numbers_N.unique_consecutive(return_counts=True)[1]])
        token_NT = place_N[known_N, None] * size + torch.arange(size)
        logs_NT = self.logs_ST[numbers_N[known_N, None], token_NT].to(chunk.data.x.device)
        self.update(chunk.target[known_N], logs_NT[..., None], chunk.data.mask_NT[known_N])


@dataclass(frozen=True)
class Importance(Summed[Tensor]):
    """u, float32 [C], by which a token about the mean says how much its errors count: ln w ≈ u x and a constant, by
    least squares with a ridge."""

    passes = ("gradients", "residuals")

    def empty(self, fit: SchemeFit, source: LayerSource) -> Empty:
        return partial(LogImportance, source.log_importance(), fit.zeros(fit.codec.geometry.width))

    def add(self, sums: LogImportance, chunk: Chunk) -> None:
        sums.add(chunk)

    def value(self, sums: LogImportance, fit: SchemeFit) -> Tensor:
        joint = sums.value()
        ridged_CC = joint.xx_II + RIDGE * joint.xx_II.diagonal().clamp_min(1e-30).diag()
        return torch.linalg.solve(ridged_CC, joint.xy_IO)[:, 0].float()


def requests(stage: Mixed) -> tuple[Statistic[Tensor], ...]:
    """Return the statistics that a fit needs."""
    return ResidualMoment(), Residuals(), *([Importance()] if stage.weighed else [])


def solve(stage: Mixed, statistics: Statistics, codec: Codec) -> tuple[Mixed, dict[str, Tensor]]:
    """Return the quantizer with the bits of its channels, and their scales."""
    variances_C = directions(codec.scheme, statistics, codec.geometry)[0]
    stage = schedule(codec.scheme, variances_C, codec.geometry)
    stage, scales = mixed.solve(stage, statistics, codec)
    return stage, scales | ({"importance": statistics[Importance()]} if stage.weighed else {})


def schedule(scheme: Scheme, variances_C: Tensor, geometry: Geometry) -> Mixed:
    """Return the scheme's quantizer with the channels that are stored, of each width."""
    stage: Any = scheme.quantize
    if not stage.target:
        return stage
    unit = stage.unit(scheme, geometry)
    budget = stage.budget(geometry.width, geometry.kv_heads) // unit
    bits_U = water_fill(variances_C.unflatten(0, (-1, unit)).sum(1), budget, stage.distortions())
    return replace(stage, counts=tuple(unit * count for count in counts(bits_U, stage.bits)))


def water_fill(variances_R: Tensor, budget: int, distortions: Sequence[float] | Tensor) -> list[int]:
    """Bits of each channel, in the channels' order. Ties go to the channel that comes first.

    distortions   d(0), d(1), ..., d(most): falling, and by less and less; of all channels, or [R, most + 1] of each
    """
    table_DB = torch.as_tensor(distortions, dtype=torch.float64).cpu()
    table_DB = table_DB if table_DB.ndim == 2 else table_DB[None]
    most, gains_DB = table_DB.shape[1] - 1, -table_DB.diff(dim=1)
    if bool((gains_DB <= 0).any() or (gains_DB.diff(dim=1) > 0).any()):
        raise ValueError(f"distortions={table_DB.tolist()}; they must fall, by less and less")
    if not 0 <= budget <= most * len(variances_R):
        raise ValueError(f"budget={budget} for {len(variances_R)} channels of at most {most} bits; use less, or 0")
    table_RB = variances_R.cpu().double()[:, None] * gains_DB
    # bit by bit over all channels: on equal gains the lower bit and then the first channel comes first
    order = table_RB.mT.flatten().argsort(descending=True, stable=True)[:budget]
    return (order % len(variances_R)).bincount(minlength=len(variances_R)).tolist()


def counts(bits_R: Sequence[int], widths: Sequence[int]) -> tuple[int, ...]:
    """Count the channels of each of these widths: what a schedule in falling order stores."""
    if any(bits not in widths for bits in bits_R):
        raise ValueError(f"bits {sorted(set(bits_R))}; the schedule has {list(widths)}")
    return tuple(sum(bits == width for bits in bits_R) for width in widths)
