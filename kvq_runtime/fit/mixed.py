"""Fit the scale of every latent channel on a sample of tokens, in the basis that was fitted before.

    scale of channel r      of some candidates, the one with the least squared error on the sample, the worst
                            thousandth of its tokens left out

A scale that only covers the bulk of a heavy-tailed channel has less error than one that covers its extremes; a normal
channel keeps its deviation.

Source: Hong et al., 2025 (SVDq).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit.statistics import Statistics
from kvq_runtime.ops import latent
from kvq_runtime.stages.mixed import Mixed

DEVIATIONS = tuple(0.7 + 0.05 * step for step in range(19))  # times the deviation
REACHES = tuple(0.5 + 0.1 * step for step in range(36))  # ends at the sample's quantiles of so many deviations
ROOM = 2.0  # times the largest gain that the sample needs
RESCALED = 2
COARSE = 3  # before the last time, of the candidates for a scale one of so many is tried
TRIMMED = 1024  # one token of so many is left out: an outlier must not stretch the ranges of all


def statistics(stage: Mixed) -> tuple[str, ...]:
    """What a fit needs."""
    return ("residuals",)


def solve(stage: Mixed, statistics: Statistics, codec: Codec) -> tuple[Mixed, dict[str, Tensor]]:
    """The scales, float32 [R], as the stage's codebook names them; `codec` holds the basis."""
    assert statistics.residuals is not None, "scales are fitted to residuals"
    moment_CC = statistics.residuals.moment_CC
    own = {name.partition(".")[2]: tensor for name, tensor in codec.tensors.items() if name.startswith("rotate.")}
    basis_CR, _ = codec.scheme.rotate.pair(len(moment_CC), codec.geometry, own)
    deviation_R = (basis_CR.double() * (moment_CC.double() @ basis_CR.double())).sum(0).clamp_min(0).sqrt()
    z_NR = statistics.residuals.rows_NC @ basis_CR.float()
    if stage.gain:
        return stage, with_gain(stage, z_NR, deviation_R, len(moment_CC))
    return stage, scales(stage, z_NR, deviation_R, len(moment_CC))


def with_gain(quantize: Mixed, z_NR: Tensor, deviation_R: Tensor, width: int) -> dict[str, Tensor]:
    """The same with a gain for every token: its ends, and the scales of channels over the gains that were chosen.

    The ends are those of the tokens' sizes, the outer hundredths left out, and above them ROOM for tokens of other
    text. A token's size is the norm of its latents over their root mean square; the gains that leave the least error
    follow from the scales, and the scales from those: RESCALED times.
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
        if step:
            gain_N = levels[quantize.best_gain(z_NR.mT.float()[None], found, width)[0].long()]
        over_NR = z_NR.float() / gain_N[:, None]
        every = 1 if step == RESCALED else COARSE
        found |= scales(quantize, over_NR, over_NR.double().square().mean(0).sqrt(), width, every)
    return found


def scales(quantize: Mixed, z_NR: Tensor, deviation_R: Tensor, width: int, every: int = 1) -> dict[str, Tensor]:
    """The tensors of the quantizer, from a sample of latents and their deviations.

    every   of the candidates, which follow each other by size, one of so many is tried
    """
    if quantize.codebook == "block":
        return {}
    found: dict[str, list[Tensor]] = {}
    start = 0
    for count, bits in quantize.runs(width):
        part = slice(start, start + count)
        z_RT = z_NR[:, part].mT.float().contiguous()
        if quantize.codebook == "uniform":
            best = _uniform(z_RT, bits, every)
        else:
            best = _gaussian(z_RT, deviation_R[part], bits, every)
        for name, tensor in best.items():
            found.setdefault(name, []).append(tensor)
        start += count
    return {name: torch.cat(parts) for name, parts in found.items()}


def _gaussian(z_RT: Tensor, deviation_R: Tensor, bits: int, every: int) -> dict[str, Tensor]:
    options = [{"deviation": (deviation_R * factor).float()} for factor in DEVIATIONS[::every]]
    return _best(options, lambda option: latent.errors_gaussian(z_RT[None], option["deviation"], bits)[0])


def _uniform(z_RT: Tensor, bits: int, every: int) -> dict[str, Tensor]:
    shares = torch.special.ndtr(-z_RT.new_tensor(REACHES[::every]))
    lows, highs = (torch.quantile(z_RT, part, dim=1) for part in (shares, 1 - shares))
    options = [{"low": low, "high": high} for low, high in zip(lows, highs, strict=True)]

    def errors(option: dict[str, Tensor]) -> Tensor:
        ends = option["low"], option["high"]
        return (latent.decode_uniform(latent.encode_uniform(z_RT, *ends, bits), *ends, bits) - z_RT).square_()

    return _best(options, errors)


def _best(options: list[dict[str, Tensor]], squared_errors: Callable[[dict[str, Tensor]], Tensor]) -> dict[str, Tensor]:
    """Channel by channel, the option with the least error; the first on a tie."""
    errors = []
    for option in options:
        error_RT = squared_errors(option)
        for _ in range(error_RT.shape[1] // TRIMMED):  # several times as fast as topk; equal ones go together
            error_RT.masked_fill_(error_RT == error_RT.amax(1, keepdim=True), 0.0)
        errors.append(error_RT.sum(1, dtype=torch.float64))
    chosen_R = torch.stack(errors).argmin(0)
    return {name: torch.stack([option[name] for option in options]).gather(0, chosen_R[None])[0] for name in options[0]}
