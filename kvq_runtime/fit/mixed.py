"""Fit the scale of every latent channel on a sample of tokens, in the basis that was fitted before.

    scale of channel r      of some candidates, the one with the least squared error on the sample, the largest
                            thousandth of its tokens left out

A scale that only covers the bulk of a heavy-tailed channel has less error than one that covers its extremes; a normal
channel keeps its deviation.

Source: Hong et al., 2025 (SVDq).
"""

import math
from collections.abc import Callable, Sequence
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
TRIMMED = 1024  # one token of so many is left out: an outlier must not stretch the ranges of all


def requests(stage: Mixed) -> tuple[ResidualMoment, Residuals]:
    """Return the statistics that a fit needs."""
    return ResidualMoment(), Residuals()


def solve(stage: Mixed, statistics: Statistics, codec: Codec) -> tuple[Mixed, dict[str, Tensor]]:
    """Return the scales, float32 [R], as the stage's codebook names them; `codec` holds the basis."""
    moment_CC = statistics[ResidualMoment()]
    rotation = {name.partition(".")[2]: tensor for name, tensor in codec.tensors.items() if name.startswith("rotate.")}
    rotate: Any = codec.scheme.rotate
    basis_CR, _ = rotate.pair(len(moment_CC), codec.geometry, rotation)
    deviation_R = (basis_CR.double() * (moment_CC.double() @ basis_CR.double())).sum(0).clamp_min(0).sqrt()
    z_NR = statistics[Residuals()] @ basis_CR.float()
    width = len(moment_CC)
    if not stage.gain:
        return stage, scales(stage, z_NR, deviation_R, width)
    heads = codec.geometry.kv_heads
    tensors = with_gain(stage, z_NR, deviation_R, width, stage.gain_count(heads))
    if stage.gains == "head":
        tensors["deviation"] = tensors["deviation"].unflatten(0, (-1, heads)).mT.contiguous()
    return stage, tensors


def with_gain(quantize: Mixed, z_NR: Tensor, deviation_R: Tensor, width: int, gains: int = 1) -> dict[str, Tensor]:
    """Return the same with gains for every token: their ends, and the scales of channels over the gains chosen.

    The ends are those of the tokens' sizes, the outer hundredths left out, and above them ROOM for tokens of other
    text. A token's size is the norm of its latents over their root mean square, of the channels with this gain. The
    gains that leave the least error follow from the scales, and the scales from those: RESCALED times, the last time
    with all tokens, before with some.
    """
    index_R, ends, gain_NG = quantize.gain_index(z_NR.shape[1], gains).to(z_NR.device), [], []
    for group in range(gains):
        own = (index_R == group).nonzero()[:, 0]
        norm_N = z_NR[:, own].float().square().mean(1).sqrt()
        whole = deviation_R[own].square().mean().sqrt().float()
        size_N = (norm_N / whole if whole > 0 else torch.ones_like(norm_N)).clamp(2.0**-8, 2.0**8)
        low, high = torch.quantile(size_N, size_N.new_tensor([0.01, 0.99])).log()
        ends.append(torch.stack([low, high + math.log(ROOM)]))
        levels = latent.gains(ends[-1], quantize.gain)
        gain_NG.append(levels[(size_N.log()[:, None] - levels.log()).abs().argmin(1)])
    tensors = {"gain_ends": ends[0] if quantize.gains == 1 else torch.stack(ends)}
    gain_NR = torch.stack(gain_NG, 1)[:, index_R]
    for step in range(RESCALED + 1):
        some = slice(None, None, 1 if step == RESCALED else max(1, len(z_NR) // SOME))
        z_MR, gain_MR = z_NR[some].float(), gain_NR[some]
        if step:
            gain_MR = quantize.gains_of(quantize.best_gain(z_MR.mT[None], tensors, width), tensors, width)[0].mT
        over_MR = z_MR / gain_MR
        deviation_R = over_MR.double().square().mean(0).sqrt()
        tensors |= scales(quantize, over_MR, deviation_R, width)
    return tensors


def scales(quantize: Mixed, z_NR: Tensor, deviation_R: Tensor, width: int) -> dict[str, Tensor]:
    """Return the tensors of the quantizer, from a sample of latents and their deviations."""
    parts: list[dict[str, Tensor]] = []
    start = 0
    for count, bits in quantize.runs(width):
        part = slice(start, start + count)
        z_RT = z_NR[:, part].mT.float().contiguous()
        uniform, steps = quantize.codebook == "uniform", quantize.codebook == "stepped" and bits >= latent.STEPPED
        errors = latent.errors_stepped if steps else latent.errors_gaussian
        parts.append(_uniform(z_RT, bits) if uniform else _deviations(z_RT, deviation_R[part], bits, errors))
        start += count
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _deviations(
    z_RT: Tensor, deviation_R: Tensor, bits: int, errors_of: Callable[[Tensor, Tensor, int], Tensor]
) -> dict[str, Tensor]:
    def errors(part_RT: Tensor, scales: dict[str, Tensor]) -> Tensor:
        return errors_of(part_RT[None], scales["deviation"], bits)[0]

    return _best(z_RT, [{"deviation": (deviation_R * factor).float()} for factor in DEVIATIONS], errors)


def _uniform(z_RT: Tensor, bits: int) -> dict[str, Tensor]:
    def errors(part_RT: Tensor, ends: dict[str, Tensor]) -> Tensor:
        codes_RT = latent.encode_uniform(part_RT, **ends, bits=bits)
        return (latent.decode_uniform(codes_RT, **ends, bits=bits) - part_RT).square_()

    shares = torch.special.ndtr(-z_RT.new_tensor(REACHES))
    ends = zip(torch.quantile(z_RT, shares, dim=1), torch.quantile(z_RT, 1 - shares, dim=1), strict=True)
    return _best(z_RT, [{"low": low, "high": high} for low, high in ends], errors)


def _best(
    z_RT: Tensor, options: Sequence[dict[str, Tensor]], errors: Callable[[Tensor, dict[str, Tensor]], Tensor]
) -> dict[str, Tensor]:
    """Return, channel by channel, the option with the least error; the first on a tie."""
    largest_RK = z_RT.gather(1, z_RT.abs().topk(z_RT.shape[1] // TRIMMED, 1).indices)
    lost = []
    for option in options:
        all_R, trimmed_R = (errors(part, option).sum(1, dtype=torch.float64) for part in (z_RT, largest_RK))
        lost.append(all_R - trimmed_R)
    best_1R = torch.stack(lost).argmin(0)[None]
    return {name: torch.stack([option[name] for option in options]).gather(0, best_1R)[0] for name in options[0]}
