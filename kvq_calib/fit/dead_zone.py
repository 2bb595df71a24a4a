"""Find the step of latent channels, and which of them are stored; then the rung of each, by the codes of a sample.

rate(step)   of a channel of variance λ, by theory: what the codes of a rung of deviation √λ / step say
codes        of a sample of tokens: a rung for each channel, and for each token how many rungs it is off, that
             together take the fewest bits, as the coder of files has them
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvq_calib.fit.rotate import metric
from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit.statistics import ResidualMoment, Residuals, Statistics
from kvq_runtime.ops import entropy, ladder
from kvq_runtime.stages.latent import DeadZone

QUIET = 0.25  # of a step: a channel whose deviation is less is not stored
HALVINGS = 24  # of an interval of logarithms that a step is found in
TURNS = 2  # of choosing rungs and what tokens are off them
SAMPLE = 1024  # tokens that a rate is measured on


def requests(stage: DeadZone) -> tuple[ResidualMoment, Residuals]:
    """Return the statistics that a fit needs."""
    return ResidualMoment(), Residuals()


def schedule(stage: DeadZone, variances_C: Tensor) -> DeadZone:
    """The stage with its step, if it has only a target, and with as many channels as are stored."""
    deviation_C = variances_C.clamp_min(0).sqrt()
    step = stage.step or found(lambda step: expected(deviation_C / step), stage.target, float(deviation_C.max()))
    count = int((deviation_C >= QUIET * step).sum())
    return replace(stage, step=step, channels=max(1, count), shared=False)


def found(rate: Callable[[float], float], target: float, largest: float) -> float:
    """The step, of 6 digits, at which a falling rate is the target; `largest` is the largest deviation."""
    low, high = math.log(max(largest, 1e-30)) - 16, math.log(max(largest, 1e-30)) + 3
    place = where_it_falls_to_0(lambda place: rate(math.exp(place)) - target, low, high, HALVINGS)
    return float(f"{math.exp(place):.6g}")


def where_it_falls_to_0(function: Callable[[float], float], low: float, high: float, halvings: int = 50) -> float:
    """Where a function that falls is 0; the end that is nearer to it, if it is nowhere."""
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return high


def expected(deviation_C: Tensor) -> float:
    """Bits per element of channels of these deviations, in cells, by what the codes of their rungs say."""
    deviation_C = deviation_C.cpu()
    rungs = ladder.of_deviation(deviation_C.clamp_max(ladder.LOUD)).long()
    counts = ladder.ladder().counts.double()
    own = (counts * ladder.ladder().lengths).sum(1) / 2.0**ladder.BITS
    return float(own[rungs].masked_fill(deviation_C < QUIET, 0.0).mean())


def solve(stage: DeadZone, statistics: Statistics, codec: Codec) -> tuple[DeadZone, dict[str, Tensor]]:
    """The stage with its step and channels, and their cells and rungs."""
    stage = schedule(stage, statistics.directions(metric(codec.scheme.rotate))[0])
    z_NR = codec.rotated(statistics[Residuals()][None])[0].float()
    return stage, rungs(z_NR, stage.step)


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
    """How often each channel has each code, float32 [R, codes]."""
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
