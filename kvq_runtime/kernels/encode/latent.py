"""Encode and decode latent channels, each with its own scale, [..., R, T]; see ops/latent.py.

One kernel goes over elements; what it does with one is a jit function that it takes as an argument.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.encode.tile import FUSED, on, rounded
from kvq_runtime.ops.latent import gaussian

TOKENS = 128  # of a program


def encode_gaussian(z_NRT: Tensor, deviation_R: Tensor, bits: int) -> Tensor:
    boundaries = gaussian(bits)[0].to(z_NRT.device, torch.float32)
    return _launch(_cell, z_NRT, torch.uint8, deviation_R, boundaries, bits)


def decode_gaussian(codes_NRT: Tensor, deviation_R: Tensor, bits: int) -> Tensor:
    centroids = gaussian(bits)[1].to(codes_NRT.device, torch.float32)
    return _launch(_centroid, codes_NRT, torch.float32, deviation_R, centroids, bits)


def encode_uniform(z_NRT: Tensor, low: Tensor, high: Tensor, bits: int) -> Tensor:
    return _launch(_level, z_NRT, torch.uint8, low, high, bits)


def decode_uniform(codes_NRT: Tensor, low: Tensor, high: Tensor, bits: int) -> Tensor:
    return _launch(_value, codes_NRT, torch.float32, low, high, bits)


def _launch(element, x_NRT: Tensor, dtype: torch.dtype, scale: Tensor, other: Tensor, bits: int) -> Tensor:
    """Apply `element` everywhere; `scale` is [R] or [N, R], and `other` the same or a table."""
    x_NRT, out = x_NRT.contiguous(), torch.empty(x_NRT.shape, dtype=dtype, device=x_NRT.device)
    rows, tokens = x_NRT.numel() // max(1, x_NRT.shape[-1]), x_NRT.shape[-1]
    if x_NRT.numel():
        with on(x_NRT):
            scale, other = scale.contiguous(), other.contiguous()
            grid = (rows, triton.cdiv(tokens, TOKENS))
            _elements[grid](x_NRT, out, scale, other, tokens, scale.numel(), element, bits, TOKENS, **FUSED)
    return out


@triton.jit
def _elements(
    p_x, p_out, p_scale, p_other, tokens, period, element: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """BLOCK tokens of one channel; scales repeat after `period` channels."""
    i_row = tl.program_id(0).to(tl.int64)
    i_token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    o_x = i_row * tokens + i_token
    b_x = tl.load(p_x + o_x, mask=i_token < tokens, other=0)
    tl.store(p_out + o_x, element(b_x, p_scale, p_other, i_row % period, BITS), mask=i_token < tokens)


@triton.jit
def _cell(b_z, p_deviation, p_boundaries, i_channel, BITS: tl.constexpr):
    """The cell of z / σ, by halving: its bits from the highest down; tiles [BLOCK]."""
    deviation = tl.load(p_deviation + i_channel)
    b_z = b_z.to(tl.float32) * tl.where(deviation > 0, 1 / tl.maximum(deviation, 1.1754944e-38), 0.0)
    b_code = tl.zeros(b_z.shape, tl.int32)
    for i in tl.static_range(BITS):
        m_beyond = b_z > tl.load(p_boundaries + b_code + ((1 << (BITS - 1 - i)) - 1))
        b_code += tl.where(m_beyond, 1 << (BITS - 1 - i), 0)
    return b_code.to(tl.uint8)


@triton.jit
def _centroid(b_code, p_deviation, p_centroids, i_channel, BITS: tl.constexpr):
    """σ times the centroid; tiles [BLOCK]."""
    return tl.load(p_centroids + b_code.to(tl.int32)) * tl.load(p_deviation + i_channel)


@triton.jit
def _level(b_z, p_low, p_high, i_channel, BITS: tl.constexpr):
    """The nearest of the levels from low to high; tiles [BLOCK]."""
    low = tl.load(p_low + i_channel)
    step = (tl.load(p_high + i_channel) - low) / ((1 << BITS) - 1)
    inverse = tl.where(step > 0, 1 / tl.maximum(step, 1.1754944e-38), 0.0)
    b_code = tl.minimum(tl.maximum((b_z.to(tl.float32) - low) * inverse, 0.0), (1 << BITS) - 1)
    return rounded(b_code).to(tl.uint8)


@triton.jit
def _value(b_code, p_low, p_high, i_channel, BITS: tl.constexpr):
    """The level of a code; tiles [BLOCK]."""
    low = tl.load(p_low + i_channel)
    return low + b_code.to(tl.float32) * ((tl.load(p_high + i_channel) - low) / ((1 << BITS) - 1))
