"""Read LMCache's chunks, in each layout that it has, as keys and values [2, L, T, C], and write them back.

    [2, L, T, C]                   engines that hold keys and values apart
    [L, T, 2C] or [1, L, T, 2C]    those that hold them fused, as vLLM does: each head's key, then its value;
                                   the first where the engine moves chunks, the second where LMCache's server does

Latent attention (MLA) has one row a token too, and its shape may be that of fused heads: a model's configuration tells
them apart, a chunk does not. Source: `compute_kv_layout` and `get_kernel_group_shape_dtype` of LMCache 0.5.6.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def fused(shape: Sequence[int]) -> bool:
    """True if chunks of this shape have one row per token, which may hold both keys and values."""
    return len(shape) == 3 or (len(shape) == 4 and shape[0] == 1)


def apart(shape: Sequence[int], size: int) -> tuple[int, int, int, int]:
    """(2, L, T, C) of a chunk, whose heads have `size` elements. ValueError: no such keys and values."""
    *planes, layers, tokens, width = shape if len(shape) in (3, 4) else (0, 0, 0, 0)
    if planes not in ([], [1], [2]):
        raise ValueError(
            f"a chunk of shape {list(shape)}; kvq keeps keys and values of attention, [2, layers, tokens, channels], "
            "or fused, [layers, tokens, heads · 2 · head size]"
        )
    channels, rest = (width // 2, width % (2 * size)) if fused(shape) else (width, width % size)
    if rest or not channels:
        kind = "fused keys and values" if fused(shape) else "keys and values"
        raise ValueError(
            f"a chunk of shape {list(shape)}; {width} is no number of {kind} of heads of {size} elements: the serde's "
            "model is another than the engine's, or its cache holds something else"
        )
    return 2, layers, tokens, channels


def keys_and_values(x: Tensor, size: int) -> Tensor:
    """[2, L, T, C] of a chunk: itself, or a copy of what is fused."""
    if not fused(x.shape):
        return x
    return _fused_2LTHD(x, size).flatten(-2).contiguous()


def room(x: Tensor, size: int) -> Tensor:
    """[2, L, T, C] to write a chunk's keys and values to: itself, or a place from which `fill` takes them."""
    return x.new_empty(apart(x.shape, size), dtype=x.dtype) if fused(x.shape) else x


def fill(x: Tensor, x_2LTC: Tensor, size: int) -> None:
    """Write keys and values into a chunk, unless they are in it already."""
    if fused(x.shape):
        _fused_2LTHD(x, size).copy_(x_2LTC.unflatten(-1, (-1, size)))


def _fused_2LTHD(x: Tensor, size: int) -> Tensor:
    """A view of fused keys and values."""
    rows_LTW = x[0] if x.dim() == 4 else x
    return torch.movedim(rows_LTW.unflatten(-1, (-1, 2, size)), -2, 0)
