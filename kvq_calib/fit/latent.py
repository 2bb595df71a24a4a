"""Fit what latent channels are stored in: whole bits for each, or one step for all.

    mixed       where a recipe names only the sum of bits, by reverse water-filling on the channels' variances λ:
                minimise Σ λ_r d(b_r)   subject to   Σ b_r = budget,   0 ≤ b_r ≤ most
    dead_zone   the step, and which channels are stored; then the rung of each, by the codes of a sample:
                rate(step)   of a channel of variance λ, by theory: what the codes of a rung of deviation √λ / step say
                codes        of a sample of tokens: a rung for each channel, and for each token how many rungs it is
                             off, that together take the fewest bits, as the coder of files has them

d(b) is what b bits leave of a unit variance. It falls convexly, so giving one bit at a time to the channel that gains
most is optimal (Fox, 1966); with d(b) = 4^-b and fractions of bits it is the textbook's b_r = max(0, ½ log₂ λ_r / θ).
Scales of `mixed` are fitted by `kvq_runtime.fit.mixed`, which a cache that fits to its own prompt shares.

Source: Cover and Thomas, 2006, section 10.3.3; Shoham and Gersho, 1988 (whole bits).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kvq_calib.fit.rotate import metric
from kvq_calib.fit.scheme import Chunk, Empty, SchemeFit, Source, Summed
from kvq_calib.fit.statistics import CrossMoments
from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit import mixed
from kvq_runtime.fit.statistics import ResidualMoment, Residuals, Statistic, Statistics
from kvq_runtime.ops import entropy, ladder
from kvq_runtime.stages.latent import DeadZone, Mixed

QUIET = 0.25  # of a step: a channel whose deviation is less is not stored
HALVINGS = 24  # of an interval of logarithms that a step is found in
TURNS = 2  # of choosing rungs and what tokens are off them
SAMPLE = 1024  # tokens that a rate is measured on
RIDGE = 0.1  # of the variance of a channel: what tells importance is fitted to few tokens, and noisy gradients
Kind = Mixed | DeadZone


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

    def empty(self, fit: SchemeFit, source: Source) -> Empty:
        return partial(LogImportance, source.log_importance(), fit.zeros(fit.codec.geometry.width))

    def add(self, sums: LogImportance, chunk: Chunk) -> None:
        sums.add(chunk)

    def value(self, sums: LogImportance, fit: SchemeFit) -> Tensor:
        found = sums.value()
        ridged_CC = found.xx_II + RIDGE * found.xx_II.diagonal().clamp_min(1e-30).diag()
        return torch.linalg.solve(ridged_CC, found.xy_IO)[:, 0].float()


def requests(stage: Kind) -> tuple[Statistic[Tensor], ...]:
    """Return the statistics that a fit needs."""
    weighed = isinstance(stage, Mixed) and stage.weighed
    return ResidualMoment(), Residuals(), *([Importance()] if weighed else [])


def solve(stage: Kind, statistics: Statistics, codec: Codec) -> tuple[Kind, dict[str, Tensor]]:
    """The quantizer with the bits of its channels and their scales; or with its step, its channels, their cells and
    rungs."""
    stage = schedule(stage, statistics.directions(metric(codec.scheme.rotate))[0])
    if isinstance(stage, Mixed):
        stage, found = mixed.solve(stage, statistics, codec)
        return stage, found | ({"importance": statistics[Importance()]} if stage.weighed else {})
    z_NR = codec.rotated(statistics[Residuals()][None])[0].float()
    return stage, rungs(z_NR, stage.step)


def schedule(stage: Kind, variances_C: Tensor) -> Kind:
    """The stage with the channels that are stored, of each width; with its step, if it has only a target."""
    if isinstance(stage, DeadZone):
        deviation_C = variances_C.clamp_min(0).sqrt()
        step = stage.step or found(lambda step: expected(deviation_C / step), stage.target, float(deviation_C.max()))
        count = int((deviation_C >= QUIET * step).sum())
        return replace(stage, step=step, channels=max(1, count), shared=False)
    if not stage.target:
        return stage
    bits_C = water_fill(variances_C, stage.budget(len(variances_C)), stage.distortions())
    return replace(stage, counts=counts(bits_C, stage.bits))


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


def found(rate: Callable[[float], float], target: float, largest: float) -> float:
    """The step, of 6 digits, at which a falling rate is the target; `largest` is the largest deviation."""
    low, high = math.log(max(largest, 1e-30)) - 16, math.log(max(largest, 1e-30)) + 3
    place = where_it_falls_to_0(lambda place: rate(math.exp(place)) - target, low, high, HALVINGS)
    return float(f"{math.exp(place):.6g}")


def where_it_falls_to_0(function: Callable[[float], float], low: float, high: float, halvings: int = 50) -> float:
    """Find where a function that falls is 0; the end that is nearer to it, if it is nowhere."""
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return high


def expected(deviation_C: Tensor) -> float:
    """Bits per element of channels of these deviations, in cells, by what the codes of their rungs say."""
    deviation_C = deviation_C.cpu()
    rungs = ladder.of_deviation(deviation_C.clamp_max(ladder.LOUD)).long()
    return float(ladder.ladder().mean[rungs].masked_fill(deviation_C < QUIET, 0.0).mean())


def rungs(z_NR: Tensor, step: float) -> dict[str, Tensor]:
    """Cell and rung of each channel of a sample."""
    deviation_R = z_NR.double().square().mean(0).sqrt()
    cell_R = (deviation_R / ladder.LOUD).clamp_min(step).float()
    rung_R = ladder.of_deviation(deviation_R / cell_R)
    for _ in range(TURNS):
        codes_NR = ladder.encode(z_NR[None], cell_R, rung_R)[0]
        rung_R = _shortest(codes_NR, entropy.off(codes_NR, rung_R))
    return {"cell": cell_R, "rung": rung_R}


def _shortest(codes_NR: Tensor, off_N: Tensor) -> Tensor:
    """The rung of each channel with which its codes are shortest, for tokens that are so many rungs off."""
    lengths_KM, total_KR = ladder.ladder().lengths.to(codes_NR.device), []
    histograms = {int(off): _counted(codes_NR[off_N == off]) for off in off_N.unique()}
    for rung in range(ladder.RUNGS):
        parts = [counts @ lengths_KM[min(max(rung + off, 0), ladder.RUNGS - 1)] for off, counts in histograms.items()]
        total_KR.append(torch.stack(parts).sum(0))
    return torch.stack(total_KR).argmin(0).to(torch.uint8)


def _counted(codes_NR: Tensor) -> Tensor:
    """Count the codes of each channel, float32 [R, codes]."""
    width = 2 * ladder.MOST + 1
    place_NR = codes_NR.long() + ladder.MOST + width * torch.arange(codes_NR.shape[1], device=codes_NR.device)
    return place_NR.flatten().bincount(minlength=width * codes_NR.shape[1]).view(-1, width).float()


def rates(rows_NC: Tensor, basis_CC: Tensor, left: float, scale: float, steps: Sequence[float]) -> list[float]:
    """Bits per element that files take at each of these steps, of a sample; those of its tokens' sizes counted.

    rows    a sample of residuals
    left    of the sample's variance, of what other text has
    scale   of latents, to the unit of the steps
    """
    rows_NC = rows_NC[:: max(1, len(rows_NC) // SAMPLE)]
    z_NC = (rows_NC @ basis_CC.float()) * (scale / left**0.5)
    found = []
    for step in steps:
        kept_C = z_NC.square().mean(0).sqrt() >= QUIET * step
        bits = 0.0
        if bool(kept_C.any()):
            own = rungs(z_NC[:, kept_C], step)
            codes_NR = ladder.encode(z_NC[None, :, kept_C], own["cell"], own["rung"])[0]
            bits = entropy.bits([codes_NR], [own["rung"]]) / z_NC.numel()
        found.append(bits)
    return found
