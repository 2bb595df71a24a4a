"""Encode and decode latent channels, each with its own scale, [..., R, T]; see ops/latent.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.tile import FUSED, on
from kvq_runtime.ops.latent import gaussian


def encode_gaussian(z_NRT: Tensor, deviation_R: Tensor, bits: int) -> Tensor:
    boundaries = gaussian(bits)[0].to(z_NRT.device, torch.float32)
    return _run(_gaussian, z_NRT, torch.uint8, deviation_R, boundaries, bits)


def decode_gaussian(codes_NRT: Tensor, deviation_R: Tensor, bits: int) -> Tensor:
    centroids = gaussian(bits)[1].to(codes_NRT.device, torch.float32)
    return _run(_centroid, codes_NRT, torch.float32, deviation_R, centroids, bits)


def encode_uniform(z_NRT: Tensor, low: Tensor, high: Tensor, bits: int) -> Tensor:
    return _run(_uniform, z_NRT, torch.uint8, low, high, bits)


def decode_uniform(codes_NRT: Tensor, low: Tensor, high: Tensor, bits: int) -> Tensor:
    return _run(_line, codes_NRT, torch.float32, low, high, bits)


def _run(element, x_NRT: Tensor, dtype: torch.dtype, one: Tensor, two: Tensor, bits: int) -> Tensor:
    x_NRT, out = x_NRT.contiguous(), torch.empty(x_NRT.shape, dtype=dtype, device=x_NRT.device)
    rows, tokens = x_NRT.numel() // max(1, x_NRT.shape[-1]), x_NRT.shape[-1]
    if x_NRT.numel():
        with on(x_NRT):
            period = one.numel()  # the scales repeat: of [R] or of [N, R]
            grid = (rows, triton.cdiv(tokens, 128))
            _elements[grid](x_NRT, out, one.contiguous(), two.contiguous(), tokens, period, element, bits, 128, **FUSED)
    return out


@triton.jit
def _elements(x, out, one, two, tokens, period, element: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tile = tl.load(x + row * tokens + i, mask=i < tokens, other=0)
    tl.store(out + row * tokens + i, element(tile, one, two, row % period, BITS), mask=i < tokens)


@triton.jit
def _gaussian(z, deviation, boundaries, channel, BITS: tl.constexpr):
    """The cell of z / σ, by halving: its bits from the highest down."""
    size = tl.load(deviation + channel)
    z = z.to(tl.float32) * tl.where(size > 0, 1 / tl.maximum(size, 1.1754944e-38), 0.0)
    code = tl.zeros(z.shape, tl.int32)
    for i in tl.static_range(BITS):
        beyond = z > tl.load(boundaries + code + ((1 << (BITS - 1 - i)) - 1))
        code += tl.where(beyond, 1 << (BITS - 1 - i), 0)
    return code.to(tl.uint8)


@triton.jit
def _centroid(code, deviation, centroids, channel, BITS: tl.constexpr):
    return tl.load(centroids + code.to(tl.int32)) * tl.load(deviation + channel)


@triton.jit
def _uniform(z, low, high, channel, BITS: tl.constexpr):
    start = tl.load(low + channel)
    step = (tl.load(high + channel) - start) / ((1 << BITS) - 1)
    inverse = tl.where(step > 0, 1 / tl.maximum(step, 1.1754944e-38), 0.0)
    code = tl.minimum(tl.maximum((z.to(tl.float32) - start) * inverse, 0.0), (1 << BITS) - 1)
    return ((code + 12582912.0) - 12582912.0).to(tl.uint8)  # to nearest, ties to even


@triton.jit
def _line(code, low, high, channel, BITS: tl.constexpr):
    start = tl.load(low + channel)
    return start + code.to(tl.float32) * ((tl.load(high + channel) - start) / ((1 << BITS) - 1))
