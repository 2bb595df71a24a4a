"""Encode a side by one op, one launch on a GPU: rotate, scale, find codes and pack; see ops/chain.py.

The stages do the same one by one, which is the reference; rotations by a matrix round differently.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import chain
from kvq_runtime.recipe import Side
from kvq_runtime.stages import groups
from kvq_runtime.stages.grid import Grid
from kvq_runtime.stages.lloyd import Lloyd
from kvq_runtime.stages.polar import Polar
from kvq_runtime.stages.rotate import Hadamard, Random
from kvq_runtime.stages.rtn import Rtn

MATRIX = 128  # rows of a rotation that is not made of additions: one tile of a matrix product


Encoder = Callable[[Tensor, Mapping[str, Tensor]], dict[str, Tensor]]


def encoder(side: Side, geometry: Geometry) -> Encoder | None:
    """What encodes rows [N, R, W] of any dtype, before rotation, given fitted tensors; None: stage by stage."""
    quantize = side.quantize
    if side.feedback is not None or not isinstance(quantize, (Rtn, Grid, Lloyd, Polar)):
        return None
    if isinstance(quantize, Polar) and quantize.radius != "fp16":
        return None
    width = geometry.width if side.axis == "token" else side.block
    size, turn = groups.size(quantize.group, width, geometry), None
    if isinstance(side.rotate, Hadamard):
        turn = chain.Signed(side.rotate.size(width, geometry), side.rotate.seed)
    elif isinstance(side.rotate, Random) and side.rotate.size(width, geometry) <= MATRIX:
        turn = side.rotate.matrix(width, geometry)
    elif side.rotate is not None:
        return None
    if turn is not None and size % (turn.size if isinstance(turn, chain.Signed) else len(turn)):
        return None

    names = ("codes", "step", "low") if isinstance(quantize, Rtn) else ("codes", "scale")
    if isinstance(quantize, Polar):
        names = ("codes", "radius")

    def encoded(x_NRW: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        x = x_NRW.unflatten(-1, (-1, size))
        way = turn.to(x.device) if isinstance(turn, Tensor) else turn
        if isinstance(quantize, Grid):
            found = chain.nearest(x, quantize.dim, quantize.size, way)
        elif isinstance(quantize, Lloyd):
            found = chain.sphere(x, quantize.bits, quantize.scale, way)
        elif isinstance(quantize, Polar):
            bits = quantize.sizes(width, geometry)[1]
            cuts = tensors["boundaries"].split([2**wide - 1 for wide in bits]) if tensors else None
            found = chain.angles(x, bits, way, cuts)
        else:
            op = chain.minmax if quantize.range == "minmax" else chain.absmax
            found = op(x, quantize.bits, way)
        return dict(zip(names, found, strict=False))

    return encoded
