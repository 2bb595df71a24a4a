"""Follow positions from block to block: of a query that meets keys before RoPE, or the mean of keys after it.

A pair [K, M] each, K half a head, stands for Σ_f one_f cos θ_f t + two_f sin θ_f t: turned by a position, t counts from
there. It is turned by a padded row's start and a block's first position; within a block t meets a constant table that
all heads and layers share, so no token's cos and sin are computed, nor read but from a cache. `turn` is

    block      of the positions of a block, float16: cos and sin [K, 2, T] for keys before RoPE, which turn themselves;
               cos - 1 and sin [T, 2, K] for the mean
    step       cos and sin of T, float32 [2, K]
    bases      of every block's first position [N, 2, K]
    leads      of every row's start, times the scaling of cos and sin in use [B, 2, K]
    mean       of keys before RoPE, float32 [H · D]; or None

A mean μ of keys after RoPE, which was removed as R_t μ, is in the scores

    q · R_t μ = Σ_f A_f cos θ_f t + B_f sin θ_f t        A = q₁ μ₁ + q₂ μ₂,  B = q₂ μ₁ - q₁ μ₂, by halves
              = Σ_f A_f + Σ_f A_f (cos θ_f t - 1) + B_f sin θ_f t

Its first sum is float32, once a block: slow channels have large means, and what is left of them in float16 is small.
"""

import triton
import triton.language as tl

from kvq_runtime.kernels.read import load_query

CHUNK = tl.constexpr(32)  # channels that a product takes at a time: more would lie in registers


@triton.jit
def begun(one, two, k, turn, row, first, HALF: tl.constexpr):
    """A pair of position 0, of channels k, turned to the first token of a block of this row."""
    here = k < HALF
    cos = tl.load(turn[3] + row * (2 * HALF) + k, mask=here, other=1.0)[:, None]
    sin = tl.load(turn[3] + row * (2 * HALF) + HALF + k, mask=here, other=0.0)[:, None]
    one, two = one * cos - two * sin, two * cos + one * sin
    return _turned(one, two, k, turn[2] + first * (2 * HALF), HALF)


@triton.jit
def next_block(one, two, k, turn, HALF: tl.constexpr):
    """A pair turned to the next block."""
    return _turned(one, two, k, turn[1], HALF)


@triton.jit
def _turned(one, two, k, at, HALF: tl.constexpr):
    cos = tl.load(at + k, mask=k < HALF, other=1.0)[:, None]
    sin = tl.load(at + HALF + k, mask=k < HALF, other=0.0)[:, None]
    return one * cos + two * sin, two * cos - one * sin


@triton.jit
def mean_opened(q, scale, turn, row, head, block, H: tl.constexpr, G: tl.constexpr, TQ: tl.constexpr, M: tl.constexpr,
                D: tl.constexpr):  # fmt: skip
    """What a head's mean gives the scores of a block: A, B, A, B, ... float16, of CHUNK channels each, and at last Σ A.

    () where no mean was removed. It is made anew for every block: from one to the next it would lie in registers.
    """
    opened = ()
    if turn is not None:
        base = tl.zeros((M,), tl.float32)
        for chunk in tl.static_range((D // 2 + CHUNK - 1) // CHUNK):
            k = chunk * CHUNK + tl.arange(0, CHUNK)
            here = k < D // 2
            one = load_query(q, scale, row * H + head, k, here, TQ, G, M, D)
            two = load_query(q, scale, row * H + head, D // 2 + k, here, TQ, G, M, D)
            left = tl.load(turn[4] + head * D + k, mask=here, other=0.0)[:, None]
            right = tl.load(turn[4] + head * D + D // 2 + k, mask=here, other=0.0)[:, None]
            one, two = begun(one * left + two * right, two * left - one * right, k, turn, row, block, D // 2)
            opened = opened + (one.to(tl.float16), two.to(tl.float16))
            base += tl.sum(one, 0)
        opened = opened + (base,)
    return opened


@triton.jit
def mean_added(s, opened, turn, t, inside, D: tl.constexpr):
    """Scores [N, M] of tokens t of the block, with the mean's."""
    if len(opened) > 0:
        for i in tl.static_range(len(opened) - 1):
            k = i // 2 * CHUNK + tl.arange(0, CHUNK)
            at, there = turn[0] + t[:, None] * D + k[None, :], inside[:, None] & (k < D // 2)[None, :]
            s = tl.dot(tl.load(at + i % 2 * (D // 2), mask=there, other=0.0), opened[i], s)
        s += opened[len(opened) - 1][None, :]
    return s
