"""Pack and unpack codes of 1 to 8 bits; see ops/pack.py for the layout."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.tile import FUSED, on
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
            kernel[(triton.cdiv(out.numel(), 1024),)](given, out, out.numel(), count, size, bits, 1024, **FUSED)


@triton.jit
def _pack(codes, out, n, count, size, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """One byte a lane: gather the codes of its streams."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, byte = i // size, i % size
    value = tl.zeros((BLOCK,), tl.int32)
    first = 0
    for log in tl.static_range(4):
        if BITS & (8 >> log) != 0:
            length = (count * (8 >> log) + 7) // 8
            value |= streams(codes + row * count, i < n, byte - first, length, count, 8 >> log, BITS)
            first += length
    tl.store(out + i, value.to(tl.uint8), mask=i < n)


@triton.jit
def streams(codes, here, j, length, count, W: tl.constexpr, BITS: tl.constexpr):
    """Byte j of a plane of W bits, of `length` bytes; 0 where j is not inside it."""
    value = j.to(tl.int32) * 0
    for s in tl.static_range(8 // W):
        k = j + s * length
        code = tl.load(codes + k, mask=here & (j >= 0) & (j < length) & (k < count), other=0).to(tl.int32)
        value |= ((code >> (BITS - BITS % (2 * W))) & ((1 << W) - 1)) << (s * W)
    return value


@triton.jit
def _unpack(packed, out, n, count, size, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """One code a lane: its bits from the byte of every plane."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, k = i // count, i % count
    code = tl.zeros((BLOCK,), tl.int32)
    first = 0
    for log in tl.static_range(4):
        if BITS & (8 >> log) != 0:
            length = (count * (8 >> log) + 7) // 8
            byte = tl.load(packed + row * size + first + k % length, mask=i < n, other=0).to(tl.int32)
            bits = (byte >> (k // length * (8 >> log)).to(tl.int32)) & ((1 << (8 >> log)) - 1)
            code |= bits << (BITS - BITS % (16 >> log))
            first += length
    tl.store(out + i, code.to(tl.uint8), mask=i < n)
