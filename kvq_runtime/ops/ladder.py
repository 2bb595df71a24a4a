"""Round to whole numbers with a dead zone around 0, by how large the rounded is: codes int8, by rungs of a ladder.

    code = sign(x) ⌊|x| + 1 - zone⌋          x̂ = sign(code) (|code| + shift)          x = z / cell

A rung is a deviation of x; PER rungs are an octave. To each belong the zone that costs least, counting a bit of code
as much as LAMBDA cells squared of error, the shift to the mean of what a code stands for, and the probabilities of its
codes, of a density exp(-|x/a|^SHAPE): between Laplace's and Gauss', as latents are whose tokens have their own size.

Probabilities are whole numbers of 2^-BITS, so that every machine has the same.

Source: Sullivan, 1996 (dead zones of entropy-coded scalar quantizers); Ortega and Ramchandran, 1998 (choice of codes).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kvq_runtime.ops.constant import constant

RUNGS, PER, LOWEST = 34, 3, -15  # of an octave; deviations from 2^(LOWEST / PER) to 2^((LOWEST + RUNGS - 1) / PER)
MOST = 127  # the largest code
MOST_BITS = 6.0  # of a channel whose deviation is LOUD cells
LOUD = 16.0  # cells that a deviation has at most: the largest code is eight times that
SHAPE = 1.6
LAMBDA = 0.12  # near the slope of error over bits where cells are narrow: 2 ln 2 / 12
BITS = 20
FINE = 64  # points of a cell that its mass is summed from
ZONES = tuple(0.5 + 0.05 * step for step in range(10))


class Ladder(NamedTuple):
    """Of each rung: zone and shift, float32 [RUNGS]; counts of codes -MOST to MOST, int64 [RUNGS, 2 MOST + 1], which
    add up to 2^BITS; a code's length in bits, float32, of the same shape; the mean of that, and of the squared error in
    cells, float64 [RUNGS]."""

    zone: Tensor
    shift: Tensor
    counts: Tensor
    lengths: Tensor
    mean: Tensor
    error: Tensor


@constant(1)
def ladder() -> Ladder:
    """All rungs."""
    points = (torch.arange((MOST + 1) * FINE, dtype=torch.float64) + 0.5) / FINE
    found = [_rung(2.0 ** ((LOWEST + number) / PER), points) for number in range(RUNGS)]
    zone, shift, counts, error = zip(*found, strict=True)
    counts_KM = torch.stack(counts)
    lengths_KM = (BITS - counts_KM.double().log2()).float()
    mean_K = (counts_KM.double() * lengths_KM).sum(1) / 2.0**BITS
    zone_K, shift_K, error_K = (torch.tensor(one, dtype=torch.float32) for one in (zone, shift, error))
    return Ladder(zone_K, shift_K, counts_KM, lengths_KM, mean_K, error_K.double())


def _rung(deviation: float, points: Tensor) -> tuple[float, float, Tensor, float]:
    """(zone, shift, counts, error) of a deviation."""
    gamma = torch.lgamma(torch.tensor([1 / SHAPE, 3 / SHAPE], dtype=torch.float64)).exp()
    scale = deviation * (gamma[0] / gamma[1]).sqrt()
    weight = torch.exp(-((points / scale) ** SHAPE))
    weight /= weight.sum()
    best = None
    for zone in ZONES:
        codes = (points + (1 - zone)).floor().long().clamp(max=MOST)
        mass = torch.zeros(MOST + 1, dtype=torch.float64).index_add_(0, codes, weight)
        over = codes > 0
        shift = float(((points - codes) * weight)[over].sum() / weight[over].sum().clamp_min(1e-300))
        error = float(((points - codes - shift * over.float()).square() * weight).sum())
        both = torch.cat([mass[1:].flip(0) / 2, mass[:1], mass[1:] / 2])
        counts = (both * (2**BITS - 2 * (2 * MOST + 1))).round().long() + 1
        counts[MOST] += 2**BITS - counts.sum()
        bits = float((both * (BITS - counts.double().log2())).sum())
        cost = error + LAMBDA * bits
        if best is None or cost < best[0]:
            best = cost, zone, shift, counts, error
    assert best is not None
    return best[1:]


def encode(z_NTR: Tensor, cell_R: Tensor, rung_R: Tensor) -> Tensor:
    """Codes int8 [N, T, R] of latents, float32; what is larger than the largest code becomes that."""
    zone_R = _of(ladder().zone, rung_R)
    size = (z_NTR.abs() / cell_R).add_(1 - zone_R).floor_().clamp_(0, MOST)
    return size.mul_(z_NTR.sign()).to(torch.int8)


def decode(codes_NTR: Tensor, cell_R: Tensor, rung_R: Tensor) -> Tensor:
    """Latents, float32 [N, T, R]."""
    codes = codes_NTR.float()
    return codes.add_(codes.sign() * _of(ladder().shift, rung_R)).mul_(cell_R)


def of_deviation(deviation_R: Tensor) -> Tensor:
    """The rung, uint8, that is nearest to each deviation, in cells."""
    place = deviation_R.double().clamp_min(1e-30).log2() * PER - LOWEST
    return place.round().clamp(0, RUNGS - 1).to(torch.uint8)


def coarser(cell_R: Tensor, rung_R: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """Cells of at least this step, and the rungs of the same deviations in them, to the nearest."""
    coarse_R = cell_R.clamp_min(step)
    fallen_R = (PER * (coarse_R / cell_R).log2()).round()
    return coarse_R, (rung_R - fallen_R).clamp(0, RUNGS - 1).to(torch.uint8)


def _of(table_K: Tensor, rung_R: Tensor) -> Tensor:
    return table_K.to(rung_R.device).index_select(0, rung_R.int().clamp_(max=RUNGS - 1))
