"""Sum values by the softmax of scores, a tile of tokens at a time, all in powers of two.

The running state is (top [M], total [N, M], low [N, M], sums [P, M] per slot): with w = 2^(s - top), Σ w and Σ w·low[t]
as N sums each, added up at the end, and per slot Σ w·scale[t]·tile[t]. `top` follows the largest s + log2 scale[t], not
s: so the weights that the tensor cores take in float16, w·scale, are at most 1 whatever the scale.
"""

import triton
import triton.language as tl

from kvq_runtime.kernels.read import weight


@triton.jit
def empty(M: tl.constexpr, N: tl.constexpr, P: tl.constexpr, SLOTS: tl.constexpr):
    """The state of no token, for tiles of N."""
    sums = (tl.zeros((P, M), tl.float32),) * SLOTS
    return tl.full((M,), float("-inf"), tl.float32), tl.zeros((N, M), tl.float32), tl.zeros((N, M), tl.float32), sums


@triton.jit
def add(top, total, low, sums, s, tiles, numbers):
    """Add a tile of tokens with scores s [N, M], -inf where masked; numbers are (), (scale,) or (scale, low)."""
    level = s
    if len(numbers) > 0:
        level = s + _exponent(numbers[0])[:, None]
    higher = tl.maximum(top, tl.max(level, 0))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    fade = tl.exp2(top - base)
    w = tl.exp2(s - base[None, :])
    total = total * fade[None, :] + w
    if len(numbers) > 1:
        low = low * fade[None, :] + w * numbers[1][:, None]
    if len(numbers) > 0:
        w = w * numbers[0][:, None]
    faded = ()
    for slot in tl.static_range(len(tiles)):
        each = sums[slot] * fade[None, :]
        share = w.to(tiles[slot].dtype)
        faded = faded + (tl.dot(tl.trans(tiles[slot]), share, each, input_precision="ieee"),)
    return higher, total, low, faded


@triton.jit
def _exponent(x):
    """log2 of |x| rounded up, from the bits of a float32; at least 2^-24."""
    return tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 255, 102).to(tl.float32) - 126.0


@triton.jit
def store(state, part, lse, line, R: tl.constexpr, M: tl.constexpr, SET: tl.constexpr):
    """Write the mean of the values and log2 Σ 2^s of `line`, one of the splits; nothing at all is 0 and -inf."""
    top, sums = state[0], state[3]
    total, low = tl.sum(state[1], 0), tl.sum(state[2], 0)
    r = tl.arange(0, M)
    here = (r < R)[None, :]
    share = tl.where(total > 0, 1 / tl.where(total > 0, total, 1.0), 0.0)
    j = tl.arange(0, SET[2])[:, None]
    to = part + line * (R * SET[3]) + r[None, :] * SET[3] + j
    for slot in tl.static_range(tl.constexpr(SET[0])):
        mean = (sums[slot] * (1 / weight(slot, SET)) + low[None, :]) * share[None, :]
        channel = slot * SET[1] + j
        tl.store(to + slot * SET[1], mean, mask=here & (j < SET[1]) & (channel < SET[3]))
    level = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(lse + line * R + r, level, mask=r < R)
