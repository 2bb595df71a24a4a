"""Pack and unpack codes of 1 to 8 bits; see ops/pack.py for the layout."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.tile import on
from kvq_runtime.ops.pack import packed_size, planes


def pack(codes: Tensor, bits: int) -> Tensor:
    planes(bits)
    codes, count = codes.contiguous(), codes.shape[-1]
    out = torch.empty(*codes.shape[:-1], packed_size(count, bits), dtype=torch.uint8, device=codes.device)
    _launch(_pack, codes, out, bits, count, out.shape[-1])
    return out


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    planes(bits)
    packed = packed.contiguous()
    out = torch.empty(*packed.shape[:-1], count, dtype=torch.uint8, device=packed.device)
    _launch(_unpack, packed, out, bits, count, packed.shape[-1])
    return out


def _launch(kernel, given: Tensor, out: Tensor, bits: int, count: int, size: int) -> None:
    if out.numel():
        with on(out):
            kernel[(triton.cdiv(out.numel(), 1024),)](given, out, out.numel(), count, size, bits, 1024)


@triton.jit
def _pack(codes, out, n, count, size, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """One byte a lane: gather the codes of its streams."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, byte = i // size, i % size
    value = tl.zeros((BLOCK,), tl.int32)
    first = 0
    for log in tl.static_range(4):
        W: tl.constexpr = 8 >> log
        if BITS & W != 0:
            length = (count * W + 7) // 8
            j = byte - first
            for s in tl.static_range(8 // W):
                k = j + s * length
                here = (i < n) & (j >= 0) & (j < length) & (k < count)
                code = tl.load(codes + row * count + k, mask=here, other=0).to(tl.int32)
                value |= ((code >> (BITS - BITS % (2 * W))) & ((1 << W) - 1)) << (s * W)
            first += length
    tl.store(out + i, value.to(tl.uint8), mask=i < n)


@triton.jit
def _unpack(packed, out, n, count, size, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """One code a lane: its bits from the byte of every plane."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, k = i // count, i % count
    code = tl.zeros((BLOCK,), tl.int32)
    first = 0
    for log in tl.static_range(4):
        W: tl.constexpr = 8 >> log
        if BITS & W != 0:
            length = (count * W + 7) // 8
            byte = tl.load(packed + row * size + first + k % length, mask=i < n, other=0).to(tl.int32)
            bits = (byte >> (k // length * W).to(tl.int32)) & ((1 << W) - 1)
            code |= bits << (BITS - BITS % (2 * W))
            first += length
    tl.store(out + i, code.to(tl.uint8), mask=i < n)
