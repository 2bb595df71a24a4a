"""Split vectors into radii and angles, level by level in registers, in one launch; see ops/polar.py.

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
from kvq_runtime.ops.pack import packed_size
from kvq_runtime.ops.rotation import Rotation


def encode(
    x: Tensor, bits: Sequence[int], rotation: Rotation = None, boundaries: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    rows, count, shape, levels = Rows.of(x, rotation), x.shape[-1], x.shape[:-1], len(bits)
    size = sum(packed_size(sum(counts), wide) for wide, counts in polar.runs(count, tuple(bits)))
    codes = torch.empty(*shape, count - (count >> levels), dtype=torch.uint8, device=x.device)  # before packing
    packed = torch.empty(*shape, size, dtype=torch.uint8, device=x.device)
    radii = torch.empty(*shape, count >> levels, dtype=torch.float16, device=x.device)
    if rows.count:
        with on(x):
            _encode[rows.grid](
                rows.x, codes, packed, radii, *rows.rotation, _lines(bits, boundaries, x.device), *rows.layout,
                levels, widths(bits), boundaries is not None, size, *rows.sizes, **rows.options,
            )  # fmt: skip
    return packed, radii


def widths(bits: Sequence[int]) -> int:
    """The widths of all levels in one number."""
    return sum(width << (3 * level) for level, width in enumerate(bits))


def _lines(bits: Sequence[int], boundaries: Sequence[Tensor] | None, device: torch.device) -> Tensor:
    """(cos, sin) of the boundaries, and 1 in the upper half of the circle, 0 below: float32 [levels, 63, 3]."""
    if boundaries is None:
        return _quarters(tuple(bits), device)
    padded = torch.stack([torch.nn.functional.pad(level.double(), (0, 63 - len(level))) for level in boundaries])
    return torch.stack([padded.cos(), padded.sin(), (padded < math.pi).double()], 2).float().to(device)


@constant(32)
def _quarters(bits: tuple[int, ...], device: torch.device) -> Tensor:
    """(cos, sin, 1) of the boundaries inside a quarter circle, of every level, float32 [levels, 63, 3]."""
    table = torch.ones(len(bits), 63, 3, dtype=torch.float64)
    for level, width in enumerate(bits, start=1):
        cuts = polar.codebook(level, width)[0]
        cuts = cuts[: 2 ** (width - 2) - 1] if level == 1 else cuts
        table[level - 1, : len(cuts), :2] = torch.stack([cuts.cos(), cuts.sin()], 1)
    return table.float().to(device)


@triton.jit
def _encode(
    p_x, p_codes, p_packed, p_radii, p_signs, p_matrix, p_lines, n, second, third, s0, s1, s2, s3,
    LEVELS: tl.constexpr, BITS: tl.constexpr, FITTED: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr,
    P: tl.constexpr, ROWS: tl.constexpr, RUN: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """Tiles [ROWS, P] of elements, halved level by level to [ROWS, P >> LEVELS] of radii.

    p_codes    unpacked, of one level after another, uint8 [n, K - K/2^L]; p_packed uint8 [n, SIZE]
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
    tl.debug_barrier()  # the codes to pack were stored by other threads
    _pack(p_codes + o_row * (K - (K >> LEVELS)), p_packed + o_row * SIZE, m_row, LEVELS, BITS, K)


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


@triton.constexpr_function
def _last(level, bits, levels):
    """The level after a run of the same width."""
    width = (bits >> (3 * level)) & 7
    while level < levels and (bits >> (3 * level)) & 7 == width:
        level += 1
    return level


@triton.jit
def _pack(p_codes, p_packed, m_row, LEVELS: tl.constexpr, BITS: tl.constexpr, K: tl.constexpr):
    """Pack the codes of every run of levels of the same width; pointers and mask [ROWS, 1]."""
    for level in tl.static_range(LEVELS):
        if level == 0 or (BITS >> (3 * level)) & 7 != (BITS >> (3 * level - 3)) & 7:
            p_packed = _pack_run(
                p_codes, p_packed, m_row, level, _last(level, BITS, LEVELS), (BITS >> (3 * level)) & 7, K
            )


@triton.jit
def _pack_run(
    p_codes, p_packed, m_row, LEVEL: tl.constexpr, LAST: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """Pack the codes of levels LEVEL to LAST, bytes [ROWS, COUNT padded]; returns where the next run's bytes begin."""
    COUNT: tl.constexpr = (K >> LEVEL) - (K >> LAST)
    i_byte = tl.arange(0, triton.next_power_of_2(COUNT))[None, :]
    first = 0
    b_byte = tl.zeros((m_row.shape[0], i_byte.shape[1]), tl.int32)
    for log in tl.static_range(4):
        if WIDTH & (8 >> log) != 0:
            length = (COUNT * (8 >> log) + 7) // 8
            p_run = p_codes + (K - (K >> LEVEL))
            b_byte |= _stream_bytes(p_run, m_row, i_byte - first, length, COUNT, 8 >> log, WIDTH)
            first += length
    tl.store(p_packed + i_byte, b_byte.to(tl.uint8), mask=m_row & (i_byte < first))
    return p_packed + first


@triton.jit
def _stream_bytes(p_codes, m_row, i_byte, length, count, W: tl.constexpr, BITS: tl.constexpr):
    """Bytes i_byte of a plane of W bits, of `length` bytes; 0 where they are not inside it. The shape of i_byte."""
    b_byte = i_byte.to(tl.int32) * 0
    for stream in tl.static_range(8 // W):
        i_code = i_byte + stream * length
        m_code = m_row & (i_byte >= 0) & (i_byte < length) & (i_code < count)
        b_code = tl.load(p_codes + i_code, mask=m_code, other=0).to(tl.int32)
        b_byte |= ((b_code >> (BITS - BITS % (2 * W))) & ((1 << W) - 1)) << (stream * W)
    return b_byte
