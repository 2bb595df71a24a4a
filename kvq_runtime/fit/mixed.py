"""Turn the second moment of what is left to be rounded, and a sample of it, into basis and scales.

    S = E[r rᵀ] = V diag(λ) Vᵀ          the basis is V, its leading columns; the latent variances are λ
    scale of channel r                  of some candidates, the one with the least squared error on the sample, the
                                        worst thousandth of its tokens left out

With a metric M the error that counts is e M eᵀ: S becomes M^½ S M^½, the basis M^½ V, and its dual M^-½ V decodes.

S is about zero, not about a mean: no stage after the prediction removes one. A scale that only covers the bulk of a
heavy-tailed channel has less error than one that covers its extremes; a normal channel keeps its deviation.

Source: Hong et al., 2025 (SVDq), theorem 4.1.
Differs: eigenvectors of the moment, in float64, with a fixed sign, for the right singular vectors of the data.
"""

import torch
from torch import Tensor

from kvq_runtime.ops import latent
from kvq_runtime.stages.mixed import Mixed

DEVIATIONS = tuple(0.7 + 0.05 * step for step in range(19))  # times the deviation
REACHES = tuple(0.5 + 0.1 * step for step in range(36))  # ends at the sample's quantiles of so many deviations
TRIMMED = 1024  # one token of so many is left out: an outlier must not stretch the ranges of all


def directions(moment_CC: Tensor, metric_CC: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Latent variances, falling, and the square matrices of which a basis stage stores the leading columns, float64.

    metric_CC   what an error costs, where the basis has a dual: symmetric, positive definite
    """
    if metric_CC is None:
        values_C, vectors_CC = eigen(moment_CC)
        return values_C, {"basis": vectors_CC}
    values_C, basis_CC, dual_CC = eigen_in(metric_CC, moment_CC)
    return values_C, {"basis": basis_CC, "dual": dual_CC}


def tensors(quantize: Mixed, moment_CC: Tensor, rows_NC: Tensor, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of basis and quantizer, named by stage; `found` are the matrices of `directions`.

    moment_CC   float64
    rows_NC     the sample, float32
    """
    width = len(moment_CC)
    kept = quantize.stored(width)
    stored = {f"rotate.{name}": part[:, :kept].to(torch.bfloat16).contiguous() for name, part in found.items()}
    turned = stored["rotate.basis"].double()
    deviation_R = (turned * (moment_CC.double() @ turned)).sum(0).clamp_min(0).sqrt()
    own = scales(quantize, rows_NC @ turned.float(), deviation_R, width)
    return stored | {f"quantize.{name}": tensor for name, tensor in own.items()}


def eigen(moment_CC: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, falling, and their eigenvectors as columns, float64."""
    symmetric = (moment_CC + moment_CC.mT).double() / 2
    values_C, vectors_CC = torch.linalg.eigh(symmetric)
    return values_C.flip(0).clamp_min(0), fixed_sign(vectors_CC.flip(1))


def eigen_in(metric_CC: Tensor, moment_CC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues of M^½ S M^½, falling; the basis M^½ V and its dual M^-½ V, float64."""
    weights_C, axes_CC = eigen(metric_CC)
    root_C = weights_C.sqrt()
    half_CC, inverse_CC = ((axes_CC * scale) @ axes_CC.mT for scale in (root_C, 1 / root_C))
    values_C, vectors_CC = eigen(half_CC @ moment_CC.double() @ half_CC)
    return values_C, half_CC @ vectors_CC, inverse_CC @ vectors_CC


def fixed_sign(vectors_NR: Tensor) -> Tensor:
    """Turn each column so that its largest component is positive: eigenvectors come with either sign."""
    largest = vectors_NR.abs().argmax(0, keepdim=True)
    return vectors_NR * vectors_NR.gather(0, largest).sign()


def scales(quantize: Mixed, z_NR: Tensor, deviation_R: Tensor, width: int) -> dict[str, Tensor]:
    """The tensors of the quantizer, from a sample of latents and their deviations."""
    if quantize.codebook == "block":
        return {}
    found: dict[str, list[Tensor]] = {}
    start = 0
    for count, bits in quantize.runs(width):
        part = slice(start, start + count)
        z_RT = z_NR[:, part].mT.float().contiguous()
        best = _uniform(z_RT, bits) if quantize.codebook == "uniform" else _gaussian(z_RT, deviation_R[part], bits)
        for name, tensor in best.items():
            found.setdefault(name, []).append(tensor)
        start += count
    return {name: torch.cat(parts) for name, parts in found.items()}


def _gaussian(z_RT: Tensor, deviation_R: Tensor, bits: int) -> dict[str, Tensor]:
    options = [{"deviation": (deviation_R * factor).float()} for factor in DEVIATIONS]

    def there_and_back(option: dict[str, Tensor]) -> Tensor:
        scale = option["deviation"]
        return latent.decode_gaussian(latent.encode_gaussian(z_RT, scale, bits), scale, bits)

    return _best(z_RT, options, there_and_back)


def _uniform(z_RT: Tensor, bits: int) -> dict[str, Tensor]:
    shares = torch.special.ndtr(-z_RT.new_tensor(REACHES))
    lows, highs = (torch.quantile(z_RT, part, dim=1) for part in (shares, 1 - shares))
    options = [{"low": low, "high": high} for low, high in zip(lows, highs, strict=True)]

    def there_and_back(option: dict[str, Tensor]) -> Tensor:
        ends = option["low"], option["high"]
        return latent.decode_uniform(latent.encode_uniform(z_RT, *ends, bits), *ends, bits)

    return _best(z_RT, options, there_and_back)


def _best(z_RT: Tensor, options: list[dict[str, Tensor]], there_and_back) -> dict[str, Tensor]:
    """Channel by channel, the option with the least error; the first on a tie."""
    left_out, errors = z_RT.shape[1] // TRIMMED, []
    for option in options:
        error_RT = (there_and_back(option) - z_RT).double().square()
        errors.append(error_RT.sum(1) - error_RT.topk(left_out, 1).values.sum(1))
    chosen_R = torch.stack(errors).argmin(0)
    return {name: torch.stack([option[name] for option in options]).gather(0, chosen_R[None])[0] for name in options[0]}
