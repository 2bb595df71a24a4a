"""Fit the scale of every latent channel on a sample of tokens, in the basis that was fitted before.

    scale of channel r      of some candidates, the one with the least squared error on the sample, the largest
                            thousandth of its tokens left out

A scale that only covers the bulk of a heavy-tailed channel has less error than one that covers its extremes; a normal
channel keeps its deviation.

Source: Hong et al., 2025 (SVDq).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit.statistics import ResidualMoment, Residuals, Statistics
from kvq_runtime.ops import latent
from kvq_runtime.stages.latent import Mixed

DEVIATIONS = tuple(0.7 + 0.05 * step for step in range(19))  # times the deviation
REACHES = tuple(0.5 + 0.1 * step for step in range(36))  # ends at the sample's quantiles of so many deviations
ROOM = 2.0  # times the largest gain that the sample needs
RESCALED = 2
SOME = 1024  # tokens that gains are found with, before the last time
COARSE = 3  # of the candidates for a scale one of so many is tried, and then the last time those beside the best
TRIMMED = 1024  # one token of so many is left out: an outlier must not stretch the ranges of all


def requests(stage: Mixed) -> tuple[ResidualMoment, Residuals]:
    """Return the statistics that a fit needs."""
    return ResidualMoment(), Residuals()


def solve(stage: Mixed, statistics: Statistics, codec: Codec) -> tuple[Mixed, dict[str, Tensor]]:
    """Return the scales, float32 [R], as the stage's codebook names them; `codec` holds the basis."""
    moment_CC = statistics[ResidualMoment()]
    own = {name.partition(".")[2]: tensor for name, tensor in codec.tensors.items() if name.startswith("rotate.")}
    rotate: Any = codec.scheme.rotate
    basis_CR, _ = rotate.pair(len(moment_CC), codec.geometry, own)
    deviation_R = (basis_CR.double() * (moment_CC.double() @ basis_CR.double())).sum(0).clamp_min(0).sqrt()
    z_NR = statistics[Residuals()] @ basis_CR.float()
    if stage.gain:
        return stage, with_gain(stage, z_NR, deviation_R, len(moment_CC))
    return stage, scales(stage, z_NR, deviation_R, len(moment_CC))


def with_gain(quantize: Mixed, z_NR: Tensor, deviation_R: Tensor, width: int) -> dict[str, Tensor]:
    """The same with a gain for every token: its ends, and the scales of channels over the gains that were chosen.

    The ends are those of the tokens' sizes, the outer hundredths left out, and above them ROOM for tokens of other
    text. A token's size is the norm of its latents over their root mean square; the gains that leave the least error
    follow from the scales, and the scales from those: RESCALED times, the last time with all tokens, before with some.
    """
    norm_N = z_NR.float().square().mean(1).sqrt()
    whole = deviation_R.square().mean().sqrt().float()
    size_N = (norm_N / whole if whole > 0 else torch.ones_like(norm_N)).clamp(2.0**-8, 2.0**8)
    low, high = torch.quantile(size_N, size_N.new_tensor([0.01, 0.99])).log()
    ends_2 = torch.stack([low, high + math.log(ROOM)])
    levels = latent.gains(ends_2, quantize.gain)
    gain_N = levels[(size_N.log()[:, None] - levels.log()).abs().argmin(1)]
    found = {"gain_ends": ends_2}
    for step in range(RESCALED + 1):
        some = slice(None, None, 1 if step == RESCALED else max(1, len(z_NR) // SOME))
        z_MR, gain_M = z_NR[some].float(), gain_N[some]
        if step:
            gain_M = levels[quantize.best_gain(z_MR.mT[None], found, width)[0].long()]
        over_MR = z_MR / gain_M[:, None]
        deviation_R = over_MR.double().square().mean(0).sqrt()
        found |= scales(quantize, over_MR, deviation_R, width, fine=step == RESCALED)
    return found


def scales(quantize: Mixed, z_NR: Tensor, deviation_R: Tensor, width: int, fine: bool = True) -> dict[str, Tensor]:
    """Return the tensors of the quantizer, from a sample of latents and their deviations.

    fine   of the candidates, which follow each other by size, those beside the best of one in COARSE are tried too
    """
    found: dict[str, list[Tensor]] = {}
    start = 0
    for count, bits in quantize.runs(width):
        part = slice(start, start + count)
        z_RT = z_NR[:, part].mT.float().contiguous()
        if quantize.codebook == "uniform":
            best = _uniform(z_RT, bits, fine)
        else:
            best = _gaussian(z_RT, deviation_R[part], bits, fine)
        for name, tensor in best.items():
            found.setdefault(name, []).append(tensor)
        start += count
    return {name: torch.cat(parts) for name, parts in found.items()}


def _gaussian(z_RT: Tensor, deviation_R: Tensor, bits: int, fine: bool) -> dict[str, Tensor]:
    factors = deviation_R.new_tensor(DEVIATIONS)

    def option(choice_R: Tensor) -> dict[str, Tensor]:
        return {"deviation": (deviation_R * factors[choice_R]).float()}

    def errors(part_RT: Tensor, own: dict[str, Tensor]) -> Tensor:
        return latent.errors_gaussian(part_RT[None], own["deviation"], bits)[0]

    return _best(z_RT, len(DEVIATIONS), option, errors, fine)


def _uniform(z_RT: Tensor, bits: int, fine: bool) -> dict[str, Tensor]:
    shares = torch.special.ndtr(-z_RT.new_tensor(REACHES))
    ends = {name: torch.quantile(z_RT, part, dim=1) for name, part in (("low", shares), ("high", 1 - shares))}

    def option(choice_R: Tensor) -> dict[str, Tensor]:
        return {name: end.gather(0, choice_R[None])[0] for name, end in ends.items()}

    def errors(part_RT: Tensor, own: dict[str, Tensor]) -> Tensor:
        low, high = own["low"], own["high"]
        decoded = latent.decode_uniform(latent.encode_uniform(part_RT, low, high, bits), low, high, bits)
        return (decoded - part_RT).square_()

    return _best(z_RT, len(REACHES), option, errors, fine)


def _best(
    z_RT: Tensor,
    count: int,
    option: Callable[[Tensor], dict[str, Tensor]],
    errors: Callable[[Tensor, dict[str, Tensor]], Tensor],
    fine: bool,
) -> dict[str, Tensor]:
    """Channel by channel, the option with the least error of `count`; the first on a tie. Errors have one minimum."""
    largest_RK = z_RT.gather(1, z_RT.abs().topk(z_RT.shape[1] // TRIMMED, 1).indices)

    def least(choices: list[Tensor]) -> Tensor:
        found = []
        for choice_R in choices:
            own = option(choice_R)
            all_R, trimmed_R = (errors(part, own).sum(1, dtype=torch.float64) for part in (z_RT, largest_RK))
            found.append(all_R - trimmed_R)
        return torch.stack(choices).gather(0, torch.stack(found).argmin(0)[None])[0]

    first = torch.zeros(len(z_RT), dtype=torch.int64, device=z_RT.device)
    best_R = least([first + place for place in range(0, count, COARSE)])
    if fine:
        best_R = least([(best_R + step).clamp(0, count - 1) for step in range(1 - COARSE, COARSE)])
    return option(best_R)
