"""Split vectors into radii and angles, level by level in registers, in one launch, and pack by torch; see ops/polar.py.

BITS holds the width of every level in three bits each, the first level lowest. P is a power of two, as K padded.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.encode.tile import Rows, load_rows, on, rotated
from kvq_runtime.ops import polar
from kvq_runtime.ops.constant import constant
from kvq_runtime.ops.rotation import Rotation


def encode(
    x: Tensor, bits: Sequence[int], rotation: Rotation = None, boundaries: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    rows, count, shape, levels = Rows.of(x, rotation), x.shape[-1], x.shape[:-1], len(bits)
    codes = torch.empty(*shape, count - (count >> levels), dtype=torch.uint8, device=x.device)
    radii = torch.empty(*shape, count >> levels, dtype=torch.float16, device=x.device)
    if rows.count:
        with on(x):
            _encode[rows.grid](
                rows.x, codes, radii, *rows.rotation, _lines(bits, boundaries, x.device), *rows.layout,
                levels, widths(bits), boundaries is not None, *rows.sizes, **rows.options,
            )  # fmt: skip
    by_level = codes.split([count >> level for level in range(1, levels + 1)], -1)
    return polar.pack_levels(by_level, bits), radii


def widths(bits: Sequence[int]) -> int:
    """Return the widths of all levels in one number."""
    return sum(width << (3 * level) for level, width in enumerate(bits))


def _lines(bits: Sequence[int], boundaries: Sequence[Tensor] | None, device: torch.device) -> Tensor:
    """Return (cos, sin) of the boundaries, and 1 in the upper half of the circle, 0 below: float32 [levels, 63, 3]."""
    if boundaries is None:
        return _quarters(tuple(bits), device)
    padded = torch.stack([torch.nn.functional.pad(level.double(), (0, 63 - len(level))) for level in boundaries])
    return torch.stack([padded.cos(), padded.sin(), (padded < math.pi).double()], 2).float().to(device)


@constant(32)
def _quarters(bits: tuple[int, ...], device: torch.device) -> Tensor:
    """Return (cos, sin, 1) of the boundaries inside a quarter circle, of every level, float32 [levels, 63, 3]."""
    table = torch.ones(len(bits), 63, 3, dtype=torch.float64)
    for level, width in enumerate(bits, start=1):
        cuts = polar.codebook(level, width)[0]
        cuts = cuts[: 2 ** (width - 2) - 1] if level == 1 else cuts
        table[level - 1, : len(cuts), :2] = torch.stack([cuts.cos(), cuts.sin()], 1)
    return table.float().to(device)


@triton.jit
def _encode(
    p_x, p_codes, p_radii, p_signs, p_matrix, p_lines, n, second, third, s0, s1, s2, s3,
    LEVELS: tl.constexpr, BITS: tl.constexpr, FITTED: tl.constexpr, K: tl.constexpr, P: tl.constexpr,
    ROWS: tl.constexpr, RUN: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """Tiles [ROWS, P] of elements, halved level by level to [ROWS, P >> LEVELS] of radii.

    p_codes    of one level after another, uint8 [n, K - K/2^L]
    p_radii    as root mean squares, float16 [n, K/2^L]
    """
    b_x, i_row, _ = load_rows(p_x, n, second, third, s0, s1, s2, s3, K, P, ROWS)
    b_x = rotated(b_x, p_signs, p_matrix, RUN, LOG)
    m_row, o_row = (i_row < n)[:, None], i_row.to(tl.int64)[:, None]
    for level in tl.static_range(LEVELS):
        b_a, b_b = tl.split(tl.reshape(b_x, (ROWS, P >> (level + 1), 2)))
        if FITTED and level == 0:
            b_code = _around(b_a, b_b, p_lines, (1 << (BITS & 7)) - 1)
        elif level == 0:
            b_code = _sector(b_a, b_b, p_lines, 1 << (BITS & 7))
        else:
            b_code = _beyond(b_a, b_b, p_lines + level * 189, (1 << ((BITS >> (3 * level)) & 7)) - 1)
        i_angle = tl.arange(0, P >> (level + 1))[None, :]
        o_code = o_row * (K - (K >> LEVELS)) + (K - (K >> level)) + i_angle
        tl.store(p_codes + o_code, b_code.to(tl.uint8), mask=m_row & (i_angle < (K >> (level + 1))))
        b_x = tl.sqrt(b_a * b_a + b_b * b_b)
    i_radius = tl.arange(0, P >> LEVELS)[None, :]
    b_x = (b_x * 2 ** (-LEVELS / 2)).to(tl.float16)
    tl.store(p_radii + o_row * (K >> LEVELS) + i_radius, b_x, mask=m_row & (i_radius < (K >> LEVELS)))


@triton.jit
def _sector(b_x, b_y, p_lines, COUNT: tl.constexpr):
    """Return the number of the sector, of COUNT equal ones, that (x, y) lies in; any shape.

    First the quadrant, then the sector inside it.
    """
    m_up, m_right = b_y >= 0, b_x >= 0
    b_quadrant = tl.where(m_up, tl.where(m_right, 0, 1), tl.where(m_right, 3, 2))
    m_odd = m_up != m_right
    b_a, b_b = tl.abs(tl.where(m_odd, b_y, b_x)), tl.abs(tl.where(m_odd, b_x, b_y))
    return b_quadrant * (COUNT // 4) + _beyond(b_a, b_b, p_lines, COUNT // 4 - 1)


@triton.jit
def _beyond(b_x, b_y, p_lines, COUNT: tl.constexpr):
    """Count the boundaries, all inside a quarter circle, that the angle of (x, y) lies beyond; any shape."""
    b_code = tl.zeros(b_x.shape, tl.int32)
    for i in tl.static_range(COUNT):
        b_code += (b_y * tl.load(p_lines + i * 3) > b_x * tl.load(p_lines + i * 3 + 1)).to(tl.int32)
    return b_code


@triton.jit
def _around(b_x, b_y, p_lines, COUNT: tl.constexpr):
    """Count the boundaries, anywhere inside (0, 2π), that the angle of (x, y) lies beyond; any shape."""
    b_code, m_lower = tl.zeros(b_x.shape, tl.int32), b_y < 0
    for i in range(COUNT):
        m_beyond = b_y * tl.load(p_lines + i * 3) > b_x * tl.load(p_lines + i * 3 + 1)  # inside a half of the circle
        upper = tl.load(p_lines + i * 3 + 2) > 0
        b_code += tl.where(upper, m_lower | m_beyond, m_lower & m_beyond).to(tl.int32)
    return b_code
