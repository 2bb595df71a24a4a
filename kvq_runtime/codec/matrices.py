"""Make the two matrices of a codec's rotation: before rounding, and back with its rows in stored order."""

import math

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops.constant import constant
from kvq_runtime.ops.rotation import Rotation
from kvq_runtime.stages import stage as contract
from kvq_runtime.stages.stage import Quantizer, Scheme, Tensors


def matrices(
    scheme: Scheme, width: int, geometry: Geometry, tensors: Tensors, device: torch.device
) -> tuple[Rotation, Tensor | None]:
    """Return the rotation before rounding, and the one back (bfloat16), its rows in stored order. None: there is none.

    Of a matrix for each head both are [H, D, D].
    """
    rotate, quantize = scheme.rotate, scheme.quantize
    if rotate is None or not rotate.fitted:
        return _fixed(rotate, quantize, width, geometry, device)
    pair = rotate.pair(width, geometry, tensors)
    if pair is None:
        return None, None
    forward, back = pair
    return forward, back if back.ndim == 2 else _stored_rows(back, quantize.order(width, geometry))


@constant(64)
def stored_places(quantize: Quantizer, width: int, geometry: Geometry, device: torch.device) -> Tensor | None:
    """Return the place of each element among the decoded ones; None if each has kept its place."""
    order = quantize.order(width, geometry)
    return None if torch.equal(order, torch.arange(width)) else order.argsort().to(device)


def _stored_rows(back_HDD: Tensor, order_W: Tensor) -> Tensor:
    """Return the rows of each head's matrix in stored order, which stays inside heads."""
    heads, size, _ = back_HDD.shape
    inside_D = order_W[:size].to(back_HDD.device)
    assert torch.equal(order_W.view(heads, size), order_W[:size] + torch.arange(0, heads * size, size)[:, None])
    return back_HDD[:, inside_D].contiguous()


@constant(64)
def _fixed(
    rotate: contract.Rotation | None, quantize: Quantizer, width: int, geometry: Geometry, device: torch.device
) -> tuple[Rotation, Tensor | None]:
    """Return the same for a rotation that is known without a fit: codecs of all layers share the two."""
    order = quantize.order(width, geometry)
    natural = torch.equal(order, torch.arange(width))
    if rotate is None and natural:
        return None, None
    pair = None if rotate is None else rotate.pair(width, geometry, {})
    matrix = torch.eye(1, dtype=torch.float32) if pair is None else pair[0]
    period = 1 if natural else quantize.group_size(width, geometry) or width  # after which the order repeats itself
    size = math.lcm(period, len(matrix))
    full = torch.block_diag(*[matrix] * (size // len(matrix)))
    back = full.mT[order[:size]].to(device, torch.bfloat16).contiguous()
    forward = None if rotate is None else rotate.forward(width, geometry)
    return (forward.to(device) if isinstance(forward, Tensor) else forward), back
