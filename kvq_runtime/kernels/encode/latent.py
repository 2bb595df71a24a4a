"""Encode a block's latents in one launch: choose the gains of its tokens, round, pack; see ops/token_gain.py.

A program has the channels of one gain of a block, all its tokens side by side. It reads them once for every CHUNK gains
that it tries, and once for their codes. Codes that all boundaries decide are counted, those of even steps are computed.
A sum of errors is of float32 in the order of channels, so that of two gains nearly as good the other may be taken.

Names: as in tile.py.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.encode.tile import FUSED, on
from kvq_runtime.ops import latent, pack
from kvq_runtime.ops.constant import constant
from kvq_runtime.ops.dispatch import OPS
from kvq_runtime.ops.product import inverse

CHUNK = 8  # gains that are tried side by side


def encode(
    z_NRT: Tensor,
    deviation_R: Tensor,
    runs: Sequence[tuple[int, int]],
    ends_G2: Tensor | None,
    bits: int,
    index_R: Tensor,
    steps: bool,
) -> tuple[Tensor, Tensor | None]:
    (blocks, _, tokens), gains = z_NRT.shape, 1 if ends_G2 is None else len(ends_G2)
    if tokens & (tokens - 1):  # the streams of a byte are halves of a tile, of halves
        return OPS["latent.encode"](z_NRT, deviation_R, runs, ends_G2, bits, index_R, steps)
    z_NRT, device = z_NRT.contiguous(), z_NRT.device
    packed = z_NRT.new_empty(blocks, sum(count * pack.packed_size(tokens, b) for count, b in runs), dtype=torch.uint8)
    codes_NGT = levels_GL = None
    if ends_G2 is not None:
        codes_NGT = z_NRT.new_empty(blocks, gains, tokens, dtype=torch.uint8)
        levels_GL = torch.stack([latent.gains(ends_2, bits) for ends_2 in ends_G2])
    of_channels = _channels(tuple(runs), tuple(index_R.tolist()), gains, tokens, device)
    scales = deviation_R, inverse(deviation_R)
    if blocks:
        with on(z_NRT):
            _encode[(blocks, gains)](
                z_NRT, packed, codes_NGT, levels_GL, *scales, *of_channels, *_points(steps, device), packed.shape[1],
                len(deviation_R), gains, 1 << bits, min(CHUNK, 1 << bits), tokens, **FUSED,
            )  # fmt: skip
    return packed, codes_NGT


@constant(32)
def _channels(
    runs: tuple[tuple[int, int], ...], index: tuple[int, ...], gains: int, tokens: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Return channels gain by gain [R], where those of each begin [G + 1], and of channels bits and first bytes [R]."""
    index_R = torch.tensor(index)
    begin_G = torch.cat([torch.zeros(1, dtype=torch.int64), index_R.bincount(minlength=gains).cumsum(0)])
    counts, widths = (torch.tensor(each) for each in zip(*runs, strict=True))
    bits_R = widths.repeat_interleave(counts)
    size_R = torch.tensor([pack.packed_size(tokens, bits) for bits in bits_R.tolist()])
    ordered = index_R.argsort(stable=True), begin_G, bits_R, size_R.cumsum(0) - size_R
    return tuple(each.to(device, torch.int32) for each in ordered)


@constant(8)
def _points(steps: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return boundaries and points of b bits from place 2^b on, and steps by bits, 0 where codes go by boundaries."""
    widths = range(latent.MAX_BITS + 1)
    none, nothing = torch.zeros(1, dtype=torch.float32), torch.full((1,), torch.inf, dtype=torch.float32)
    boundaries = torch.cat([none, *(torch.cat([latent.gaussian(b)[0].float(), nothing]) for b in widths)])
    points = torch.cat([none, *(latent.gaussian(b)[1].float() for b in widths)])
    even = [latent.step(b)[0] if steps and b >= latent.STEPPED else 0.0 for b in widths]
    return boundaries.to(device), points.to(device), torch.tensor(even, dtype=torch.float32, device=device)


@triton.jit
def _nearest(b_x, bits, p_boundaries, p_points, p_steps):
    """Codes of numbers over their deviations, int32, and the points that these stand for; any shape."""
    step, count = tl.load(p_steps + bits), 1 << bits
    b_code = tl.zeros(b_x.shape, tl.int32)
    if step > 0:
        half = (count - 1) * 0.5
        b_place = tl.minimum(tl.maximum(tl.floor(b_x / step + (count >> 1)), 0.0), count - 1.0)
        b_code = b_place.to(tl.int32)
        b_point = (b_place - half) * step
    else:
        b_point = tl.zeros(b_x.shape, tl.float32) + tl.load(p_points + count)
        for i in range(count - 1):
            b_above = b_x > tl.load(p_boundaries + count + i)
            b_code += b_above.to(tl.int32)
            b_point = tl.where(b_above, tl.load(p_points + count + i + 1), b_point)
    return b_code, b_point


@triton.jit
def _encode(
    p_z, p_packed, p_gain, p_level, p_scale, p_inverse, p_channel, p_begin, p_bits, p_first,
    p_boundaries, p_points, p_steps, size, stored,
    GAINS: tl.constexpr, LEVELS: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Codes of the channels of one gain of a block: tiles [TOKENS], of gains that are tried [CHUNK, TOKENS]."""
    i_block, i_gain = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_token, i_level = tl.arange(0, TOKENS), tl.arange(0, CHUNK)
    begin, end = tl.load(p_begin + i_gain), tl.load(p_begin + i_gain + 1)
    p_z += i_block * stored * TOKENS + i_token
    p_packed += i_block * size
    b_over = tl.full((TOKENS,), 1.0, tl.float32)
    if p_level is not None:
        b_least = tl.full((TOKENS,), float("inf"), tl.float32)
        b_best = tl.zeros((TOKENS,), tl.int32)
        for first in range(0, LEVELS, CHUNK):
            b_level = tl.load(p_level + i_gain * LEVELS + first + i_level)[:, None]
            b_error = tl.zeros((CHUNK, TOKENS), tl.float32)
            for i in range(begin, end):
                channel = tl.load(p_channel + i)
                b_z = tl.load(p_z + channel * TOKENS)[None, :]
                b_x = b_z / b_level * tl.load(p_inverse + channel)
                _, b_point = _nearest(b_x, tl.load(p_bits + channel), p_boundaries, p_points, p_steps)
                b_away = b_point * (b_level * tl.load(p_scale + channel)) - b_z
                b_error += b_away * b_away
            b_first = tl.min(b_error, 0)
            b_best = tl.where(b_first < b_least, first + tl.argmin(b_error, 0), b_best)
            b_least = tl.minimum(b_first, b_least)
        tl.store(p_gain + (i_block * GAINS + i_gain) * TOKENS + i_token, b_best.to(tl.uint8))
        b_over = tl.load(p_level + i_gain * LEVELS + b_best)
    for i in range(begin, end):
        channel = tl.load(p_channel + i)
        bits = tl.load(p_bits + channel)
        b_x = tl.load(p_z + channel * TOKENS) / b_over * tl.load(p_inverse + channel)
        b_code, _ = _nearest(b_x, bits, p_boundaries, p_points, p_steps)
        _pack(b_code, bits, p_packed + tl.load(p_first + channel), TOKENS)


@triton.jit
def _pack(b_code, bits, p_byte, TOKENS: tl.constexpr):
    """Store codes [TOKENS] as planes of 8, 4, 2 and 1 bits, as ops/pack.py has them."""
    for log in tl.static_range(4):
        if (bits & (8 >> log)) != 0:
            b_plane = tl.reshape(b_code & ((1 << (8 >> log)) - 1), (1 << log, TOKENS >> log))
            b_byte = tl.sum(b_plane << ((8 >> log) * tl.arange(0, 1 << log)[:, None]), 0)
            tl.store(p_byte + tl.arange(0, TOKENS >> log), b_byte.to(tl.uint8))
            p_byte += TOKENS >> log
            b_code = b_code >> (8 >> log)
