"""Find the directions of a latent basis: eigenvectors of a second moment, by falling eigenvalue, with fixed signs.

    S = E[r rᵀ] = V diag(λ) Vᵀ          the basis is V, the latent variances are λ

With a metric M the error that counts is e M eᵀ: S becomes M^½ S M^½, the basis M^½ V, and its dual M^-½ V decodes.

S is about zero, not about a mean: no stage after the prediction removes one.

Source: Hong et al., 2025 (SVDq), theorem 4.1.
Differs: eigenvectors of the moment, in float64, with a fixed sign, for the right singular vectors of the data.
"""

import torch
from torch import Tensor


def directions(moment_CC: Tensor, metric_CC: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Latent variances, falling, and the square matrices of which a basis stage stores the leading columns, float64.

    metric_CC   what an error costs, where the basis has a dual: symmetric, positive definite
    """
    if metric_CC is None:
        values_C, vectors_CC = eigen(moment_CC)
        return values_C, {"basis": vectors_CC}
    values_C, basis_CC, dual_CC = eigen_in(metric_CC, moment_CC)
    return values_C, {"basis": basis_CC, "dual": dual_CC}


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
    """Flip columns so that the largest component of each is positive: eigenvectors come with either sign."""
    largest = vectors_NR.abs().argmax(0, keepdim=True)
    return vectors_NR * vectors_NR.gather(0, largest).sign()
