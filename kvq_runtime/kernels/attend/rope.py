"""Give scores back the mean that was removed from keys: RoPE, advanced block by block.

A pair of tiles [K, M], K = D / 2 channels, stands for Σ_f left_f cos θ_f t + right_f sin θ_f t. Rotated to a position,
t counts from there. It is rotated by a padded row's start and a block's first position; within a block t enters by a
constant table that all heads and layers share, so no token's cos and sin are computed, nor read but from a cache.

The mean μ of keys before RoPE, which was removed from keys after it as R_t μ, is in the scores

    q · R_t μ = Σ_f A_f cos θ_f t + B_f sin θ_f t        A = q₁ μ₁ + q₂ μ₂,  B = q₂ μ₁ - q₁ μ₂, by halves of a head
              = Σ_f A_f + Σ_f A_f (cos θ_f t - 1) + B_f sin θ_f t

Its first sum is float32, once a block: slow channels have large means, and what is left of them in float16 is small.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.attend.arguments import COMPILED
from kvq_runtime.kernels.attend.queries import load_query
from kvq_runtime.ops.fragment import EDGE

CHUNK = tl.constexpr(32)  # frequencies that a product takes at a time: more would lie in registers


class RopePointers(NamedTuple):
    """RoPE's argument of the kernel: the tensors of RopeTables, and the mean that was removed from keys.

    mean   of keys before RoPE, float32 [H · D]
    """

    block: Any
    bases: Any
    leads: Any
    mean: Any


class RopeTables(NamedTuple):
    """Cos and sin by positions: constant but for `leads`. K = D / 2 frequencies.

    block           cos - 1 and sin of the positions of a block, float16, T and K rounded up, zeros beyond K: the
                    tensor core's operand A, [T / 16, K / 16, 2, 8 g, 4 t, 2 w, 2 r, 2 h], token g + 8 r, frequency
                    2 t + h + 8 w; its registers one after another, so that none is copied
    bases_N2K       of every block's first position, float32
    leads_B2K       of every row's start, float32, times `scaling`
    middles_S2K     of the middle of every segment, float32; empty where there are none
    inside_J2K      cos - 1 and sin of the places of a segment's tokens from its middle, float32
    frequencies_K   radians a token, float64
    scaling         of cos and sin in use
    """

    block: Tensor
    bases_N2K: Tensor
    leads_B2K: Tensor
    middles_S2K: Tensor
    inside_J2K: Tensor
    frequencies_K: Tensor
    scaling: float

    @staticmethod
    def of(
        frequencies_K: Tensor, scaling: float, block: int, blocks: int, starts_B: Tensor, segment: int = 0
    ) -> "RopeTables":
        """Make tables of `blocks` blocks of `block` tokens.

        starts_B   the first real slot of each row
        segment    tokens of a segment of a block; 0: keys are not encoded by segments
        """
        frequencies_K = frequencies_K.double()
        both_T2K = _turns(torch.arange(-(-block // EDGE) * EDGE), frequencies_K)
        padded_T2K = torch.nn.functional.pad(both_T2K, (0, -len(frequencies_K) % CHUNK.value))
        tiles = padded_T2K.view(-1, 2, 8, 2, padded_T2K.shape[2] // EDGE, 2, 4, 2)  # T / 16, r, g, 2, K / 16, w, t, h
        table = tiles.permute(0, 4, 3, 2, 6, 5, 1, 7)
        bases_N2K = _circle(torch.arange(blocks) * block, frequencies_K).float()
        leads_B2K = _leads(starts_B, frequencies_K, scaling)
        places_S = torch.arange(blocks * block // segment if segment else 0) * segment + segment // 2
        middles_S2K = _circle(places_S, frequencies_K).float()
        inside_J2K = _turns(torch.arange(segment) - segment // 2, frequencies_K).float()
        return RopeTables(
            table.half().contiguous(), bases_N2K, leads_B2K, middles_S2K, inside_J2K, frequencies_K, scaling
        )

    def start_at(self, starts_B: Tensor) -> None:
        """Write `leads_B2K` anew for other padding of as many rows."""
        self.leads_B2K.copy_(_leads(starts_B, self.frequencies_K, self.scaling))

    def pointers(self, mean: Tensor) -> RopePointers:
        return RopePointers(self.block, self.bases_N2K, self.leads_B2K, mean)

    def segments(self, mean: Tensor | None) -> RopePointers:
        """Pointers by segments: to `inside_J2K`, and to the bases of their middles."""
        return RopePointers(self.inside_J2K, self.middles_S2K, self.leads_B2K, mean)


def _leads(starts_B: Tensor, frequencies_K: Tensor, scaling: float) -> Tensor:
    """Position t of a row is slot start + t: cos and sin of its start, float32 [B, 2, K], times `scaling`."""
    return (_circle(starts_B, frequencies_K) * scaling).float()


def _circle(positions_N: Tensor, frequencies_K: Tensor) -> Tensor:
    """cos and sin, float64 [N, 2, K]."""
    angles = positions_N.to(frequencies_K.device).double()[:, None] * frequencies_K
    return torch.stack([angles.cos(), angles.sin()], 1)


def _turns(places_N: Tensor, frequencies_K: Tensor) -> Tensor:
    """cos - 1 and sin, float64 [N, 2, K]: cos x - 1 = -2 sin²(x / 2), which loses nothing where cos is near 1."""
    half_NK = _circle(places_N.double() / 2, frequencies_K)[:, 1]
    return torch.stack([-2 * half_NK.square(), _circle(places_N, frequencies_K)[:, 1]], 1)


@triton.jit
def zero(i):
    """0, which Triton takes for a multiple of 128 that depends on a loop's counter: what is loaded from an address
    beside it stays in the loop.

    Triton moves loads that no pass changes out of a loop, all of a table at once, where they lie in registers.
    """
    if COMPILED:
        i = tl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [i], dtype=tl.int32, is_pure=True, pack=1)
    else:
        i = 0 * i
    return i * 128


@triton.jit
def to_row(b_left, b_right, o_k, p_rope, i_b, HALF: tl.constexpr):
    """Return a pair [K, M] of position 0, of channels o_k below HALF, rotated to the first slot of row i_b."""
    m_k = o_k < HALF
    b_cos = tl.load(p_rope.leads + i_b * (2 * HALF) + o_k, mask=m_k, other=1.0)[:, None]
    b_sin = tl.load(p_rope.leads + i_b * (2 * HALF) + HALF + o_k, mask=m_k, other=0.0)[:, None]
    return b_left * b_cos - b_right * b_sin, b_right * b_cos + b_left * b_sin


@triton.jit
def to_block(b_left, b_right, o_k, p_rope, i_block, HALF: tl.constexpr):
    """Return a pair [K, M] of a row's first slot, rotated to the first token of a block."""
    p_angles = p_rope.bases + i_block * (2 * HALF)
    b_cos = tl.load(p_angles + o_k, mask=o_k < HALF, other=1.0)[:, None]
    b_sin = tl.load(p_angles + HALF + o_k, mask=o_k < HALF, other=0.0)[:, None]
    return b_left * b_cos + b_right * b_sin, b_right * b_cos - b_left * b_sin


@triton.jit
def mean_of_block(p_q, scale, p_rope, i_b, i_h, i_block, L: tl.constexpr):
    """Return the mean's share of the scores of a block, or () where none was removed.

    A, B, A, B, ... float16 [CHUNK, M], of CHUNK frequencies each; at last Σ A, float32 [M]. It is computed anew for
    every block: kept from one to the next it would lie in registers.
    """
    M: tl.constexpr = L.M
    b_mean = ()
    if p_rope is not None:
        b_base = tl.zeros((M,), tl.float32)
        i_b, i_h = i_b + zero(i_block), i_h + zero(i_block)
        for chunk in tl.static_range((L.D // 2 + CHUNK - 1) // CHUNK):
            o_k = chunk * CHUNK + tl.arange(0, CHUNK)
            m_k = o_k < L.D // 2
            b_left = load_query(p_q, scale, i_b * L.H + i_h, o_k, m_k, L)
            b_right = load_query(p_q, scale, i_b * L.H + i_h, L.D // 2 + o_k, m_k, L)
            b_mean1 = tl.load(p_rope.mean + i_h * L.D + o_k, mask=m_k, other=0.0)[:, None]
            b_mean2 = tl.load(p_rope.mean + i_h * L.D + L.D // 2 + o_k, mask=m_k, other=0.0)[:, None]
            b_a, b_b = b_left * b_mean1 + b_right * b_mean2, b_right * b_mean1 - b_left * b_mean2
            b_a, b_b = to_row(b_a, b_b, o_k, p_rope, i_b, L.D // 2)
            b_a, b_b = to_block(b_a, b_b, o_k, p_rope, i_block, L.D // 2)
            b_mean = b_mean + (b_a.to(tl.float16), b_b.to(tl.float16))
            b_base += tl.sum(b_a, 0)
        b_mean = b_mean + (b_base,)
    return b_mean


@triton.jit
def add_mean(b_s, b_mean, p_rope, i_tile, i_block, L: tl.constexpr):
    """Return scores [N, M] of the i_tile-th N tokens of a block, plus what `mean_of_block` gave for it."""
    if len(b_mean) > 0:
        p_table = p_rope.block + zero(i_block)
        for i in tl.static_range(len(b_mean) - 1):
            b_s = tl.dot(_angles(p_table, i_tile, i // 2, i % 2, b_s.shape[0], L), b_mean[i], b_s)
        b_s += b_mean[len(b_mean) - 1][None, :]
    return b_s


@triton.jit
def _angles(p_table, i_tile, FIRST: tl.constexpr, PART: tl.constexpr, N: tl.constexpr, L: tl.constexpr):
    """Return cos - 1, PART 0, or sin, PART 1, of N tokens and the FIRST-th CHUNK frequencies: float16 [N, CHUNK]."""
    TILES: tl.constexpr = N // 16
    WIDE: tl.constexpr = CHUNK // 16
    CHUNKS: tl.constexpr = (L.D // 2 + CHUNK - 1) // CHUNK
    o_tile = i_tile * TILES + tl.arange(0, TILES)[:, None, None]
    o_k = FIRST * WIDE + tl.arange(0, WIDE)[None, :, None]
    o_lane = tl.arange(0, 256)[None, None, :]
    p = p_table + ((o_tile * (CHUNKS * WIDE) + o_k) * 2 + PART) * 256 + o_lane
    b_x = tl.load(p) if tl.constexpr(L.T) % N == 0 else tl.load(p, mask=o_tile < (L.T + 15) // 16, other=0.0)
    b_x = tl.permute(tl.reshape(b_x, (TILES, WIDE, 8, 4, 2, 2, 2)), (0, 5, 2, 1, 4, 3, 6))
    return tl.reshape(b_x, (N, CHUNK))
