"""Rotate, scale, find codes and pack in one launch; see ops/chain.py.

Packing in registers needs a power of two, at least 8, of codes; other sizes (heads of 80 or 96) take a second launch.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from kvq_runtime.kernels import grid, lloyd, polar, rtn
from kvq_runtime.kernels.hadamard import signs_on
from kvq_runtime.kernels.pack import pack
from kvq_runtime.ops import chain
from kvq_runtime.ops.chain import Signed, Turn


def minmax(x: Tensor, bits: int, turn: Turn = None) -> tuple[Tensor, Tensor, Tensor]:
    return _packed(x, x.shape[-1], bits, turn, lambda x, stored, **way: rtn.launch(x, bits, stored, True, **way))


def absmax(x: Tensor, bits: int, turn: Turn = None) -> tuple[Tensor, Tensor]:
    return _packed(x, x.shape[-1], bits, turn, lambda x, stored, **way: rtn.launch(x, bits, stored, False, **way))[:2]


def nearest(x: Tensor, dim: int, size: int, turn: Turn = None) -> tuple[Tensor, Tensor]:
    bits, count = size.bit_length() - 1, x.shape[-1] // dim
    if turn is not None and count & (count - 1):  # the grid's streams are not runs of a padded tile
        x, turn = chain.turned(x, turn), None
    return _packed(x, count, bits, turn, lambda x, stored, **way: grid.launch(x, dim, size, stored, **way))


def sphere(
    x: Tensor, bits: int, scale: Literal["plain", "norm", "least_squares"], turn: Turn = None
) -> tuple[Tensor, Tensor]:
    how = "rms" if scale == "plain" else scale
    return _packed(
        x, x.shape[-1], bits, turn, lambda x, stored, **way: lloyd.launch(x, bits, stored, how, torch.float16, **way)
    )


def angles(
    x: Tensor, bits: Sequence[int], turn: Turn = None, boundaries: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    if isinstance(turn, Tensor) and not _fits(turn):
        x, turn = chain.turned(x, turn), None
    return polar.packed(x, bits, boundaries, **_way(turn, x.device))


def _fits(turn: Tensor) -> bool:
    """Whether a rotation is a tile of a matrix product, and lies in shared memory whole."""
    return len(turn) in (16, 32, 64, 128)


def _packed(x: Tensor, count: int, bits: int, turn: Turn, encode: Callable):
    if isinstance(turn, Tensor) and not _fits(turn):
        x, turn = chain.turned(x, turn), None
    whole = count >= 8 and not count & (count - 1)
    codes, *rest = encode(x, bits if whole else 8, **_way(turn, x.device))
    return (codes if whole else pack(codes, bits), *rest)


def _way(turn: Turn, device: torch.device) -> dict[str, Tensor]:
    if turn is None:
        return {}
    if isinstance(turn, Signed):
        return {"signs": signs_on(turn.size, turn.seed, device)}
    return {"matrix": turn.contiguous()}
