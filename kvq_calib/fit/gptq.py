"""Round a matrix to 4 bits against the Gram matrix of what it is multiplied with: GPTQ.

The loss is Σ_o (ŵ_o - w_o)ᵀ C (ŵ_o - w_o), C the covariance of the inputs: what the rounding does to the outputs, in
the mean over inputs. Stored as in `kvq_runtime/ops/rtn.py`.

Source: Frantar et al., 2022 (GPTQ), algorithm 1, a method for weights.
Differs: inputs are rounded in their own order, one at a time; C gets no other damping than its caller's.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kvq_runtime.ops import dispatch, pack, rtn
from kvq_runtime.ops.rtn import MATRIX_BITS, MATRIX_GROUP

Tensors = dict[str, Tensor]


def gptq(weight_IO: Tensor, covariance_II: Tensor) -> Tensors:
    """Round W against the (damped) covariance of its inputs: codes uint8 [O, I/group, packed], step and low float16."""
    return rounded(weight_IO, inverse_root(covariance_II))


def rounded(weight_IO: Tensor, upper_II: Tensor) -> Tensors:
    """The same, given the upper triangular U, UᵀU the inverse of the covariance.

    After input i is rounded with error e, the inputs j > i move by -e · U_ij / U_ii: the move that makes up best for
    the error. A group's ends are taken when its first input is reached.
    """
    inputs, weight = len(weight_IO), weight_IO.double().clone()
    group = min(MATRIX_GROUP, inputs)
    found: dict[str, list[Tensor]] = {"codes": [], "step": [], "low": []}
    for start in range(0, inputs, group):
        end = min(start + group, inputs)
        _, step, low = rtn.encode(weight[start:end].mT, MATRIX_BITS)
        codes_OK, errors_KO = round_group(weight[start:end], upper_II[start:end, start:end], step, low)
        weight[end:] -= upper_II[start:end, end:].mT @ errors_KO
        codes_OK = functional.pad(codes_OK, (0, group - codes_OK.shape[1]))
        for name, part in (("codes", pack.pack(codes_OK, MATRIX_BITS)), ("step", step), ("low", low)):
            found[name].append(part)
    return {name: torch.stack(parts, 1) for name, parts in found.items()}


@dispatch.paired("feedback.round_group")
def round_group(weight_KO: Tensor, upper_KK: Tensor, step: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Round the inputs of one group in turn: codes [O, K], and each input's error over its U_ii, [K, O]."""
    rest, step, low = weight_KO.clone(), step.double(), low.double()
    unit, diagonal = step.where(step > 0, 1.0), upper_KK.diagonal().tolist()
    codes_KO, errors_KO = torch.empty_like(rest), torch.empty_like(rest)
    for i, (code, error) in enumerate(zip(codes_KO, errors_KO, strict=True)):
        torch.sub(rest[i], low, out=code).div_(unit).round_().clamp_(0, 2**MATRIX_BITS - 1)
        torch.sub(rest[i], torch.addcmul(low, step, code), out=error).div_(diagonal[i])
        rest[i + 1 :].addr_(upper_KK[i, i + 1 :], error, alpha=-1)
    return codes_KO.mT.to(torch.uint8), errors_KO


def inverse_root(covariance_II: Tensor, count: int = 0) -> Tensor:
    """The upper triangular U with UᵀU the inverse, float64: of a Cholesky factor from the last input to the first.

    count   samples that the covariance is of, as `cholesky` has it
    """
    factor_II = cholesky(covariance_II.double().flip(0, 1), count)
    return torch.linalg.solve_triangular(factor_II, torch.eye(len(factor_II)).to(factor_II), upper=False).flip(0, 1)


def damped(covariance_II: Tensor, ridge: float) -> Tensor:
    """A covariance with a part of its mean more on the diagonal."""
    diagonal = covariance_II.diagonal()
    return covariance_II + torch.diag(ridge * diagonal.mean().expand_as(diagonal))


def cholesky(matrix_II: Tensor, count: int = 0) -> Tensor:
    """The lower factor; what is not positive definite by rounding alone gets a little more on its diagonal.

    count   samples that the matrix is of, which an error names; 0: unknown
    """
    for jitter in (0.0, 1e-10, 1e-8, 1e-6):
        factor, info = torch.linalg.cholesky_ex(damped(matrix_II, jitter))
        if not info and bool(factor.isfinite().all()):
            return factor
    source, state = f" from {count} samples" if count else "", "finite" if matrix_II.isfinite().all() else "not finite"
    raise RuntimeError(
        f"the covariance of {len(matrix_II)} inputs{source} ({state}) is not positive definite; "
        "use more samples, or a larger ridge"
    )
