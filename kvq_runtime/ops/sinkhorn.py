"""Balance a tile: find scales of its columns with which all rows, and all columns, can have one standard deviation.

    b_c = deviation of column c of x_rc / a_r        a_r = deviation of row r of x_rc / b_c        in turn

As Sinkhorn and Knopp, 1967, do it with sums: a step on one axis upsets the other, less each time. Deviations are about
means, which move too, so the best step is taken: that with the least ratio of the largest deviation to the smallest.

Source: Müller et al., 2026 (KVarN), the variance normalization; columns first, and the best step, as in the authors'
test of their Ascend kernel.
Differs: the authors add the logarithm of what deviates in x_rc / (a_r b_c) to that of the scale, which comes to the
same. Their code holds scales above 0.74, so that numbers below 1 are balanced in part; here a tile is balanced alike
whatever its rows and columns are multiplied with. On SmolLM2-135M both lose the same (`kvarn-k4v2`: 0.184, theirs 0.186
nats).
"""

import torch
from torch import Tensor

ITERATIONS = 16
FLAT = 2**-8  # of a row's root mean square: the least deviation that counts; of a constant row it is rounding


def column_scales(x_RC: Tensor) -> Tensor:
    """Return b of tiles [..., R, C], float32 [..., 1, C], of geometric mean 1.

    a is not returned: rounding between the ends of a row is the same for any a.
    """
    x_RC = x_RC.float().contiguous()  # products are ten times slower of anything else
    moments = x_RC, x_RC.square()
    turned = moments[0].mT, moments[1].mT
    b_1C = best_1C = _deviations(torch.ones_like(x_RC[..., :1]).mT, moments)
    least = torch.inf
    for _ in range(ITERATIONS):
        next_1C = _deviations(_deviations(b_1C, turned), moments)
        ratio_1C = next_1C / b_1C  # what is left to balance
        imbalance = ratio_1C.amax(-1, keepdim=True) / ratio_1C.amin(-1, keepdim=True)
        best_1C = torch.where(imbalance < least, b_1C, best_1C)
        b_1C, least = next_1C, imbalance.clamp_max(least)
    logs_1C = best_1C.log()
    return (logs_1C - logs_1C.mean(-1, keepdim=True)).exp()


def _deviations(scale_1R: Tensor, moments_RC: tuple[Tensor, Tensor]) -> Tensor:
    """Return standard deviations of columns of x / scale, [..., 1, C], 1 where all is zero; moments are x and x²."""
    weight_1R, rows = 1 / scale_1R, scale_1R.shape[-1]
    mean_1C, square_1C = ((weight_1R**power) @ moment / rows for power, moment in enumerate(moments_RC, 1))
    variance_1C = torch.maximum(square_1C - mean_1C.square(), FLAT**2 * square_1C)
    return torch.where(square_1C > 0, variance_1C, 1.0).sqrt()
