"""Pack and unpack codes of 1 to 8 bits; see ops/pack.py for the layout."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.encode.tile import BLOCK, FUSED, on
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


def _launch(kernel, x: Tensor, out: Tensor, bits: int, count: int, size: int) -> None:
    if out.numel():
        with on(out):
            kernel[(triton.cdiv(out.numel(), BLOCK),)](x, out, out.numel(), count, size, bits, BLOCK, **FUSED)


@triton.jit
def _pack(p_codes, p_out, n, count, size, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK of n bytes, `size` to a row of `count` codes: gather the codes of a byte's streams."""
    i_out = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_out, i_row, i_byte = i_out < n, i_out // size, i_out % size
    b_byte = tl.zeros((BLOCK,), tl.int32)
    first = 0
    for log in tl.static_range(4):
        if BITS & (8 >> log) != 0:
            length = (count * (8 >> log) + 7) // 8
            b_byte |= stream_bytes(p_codes + i_row * count, m_out, i_byte - first, length, count, 8 >> log, BITS)
            first += length
    tl.store(p_out + i_out, b_byte.to(tl.uint8), mask=m_out)


@triton.jit
def stream_bytes(p_codes, m_row, i_byte, length, count, W: tl.constexpr, BITS: tl.constexpr):
    """Bytes i_byte of a plane of W bits, of `length` bytes; 0 where they are not inside it. The shape of i_byte."""
    b_byte = i_byte.to(tl.int32) * 0
    for stream in tl.static_range(8 // W):
        i_code = i_byte + stream * length
        m_code = m_row & (i_byte >= 0) & (i_byte < length) & (i_code < count)
        b_code = tl.load(p_codes + i_code, mask=m_code, other=0).to(tl.int32)
        b_byte |= ((b_code >> (BITS - BITS % (2 * W))) & ((1 << W) - 1)) << (stream * W)
    return b_byte


@triton.jit
def _unpack(p_packed, p_out, n, count, size, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK of n codes, `count` to a row of `size` bytes: collect a code's bits from the byte of every plane."""
    i_out = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_out, i_row, i_code = i_out < n, i_out // count, i_out % count
    b_code = tl.zeros((BLOCK,), tl.int32)
    first = 0
    for log in tl.static_range(4):
        if BITS & (8 >> log) != 0:
            length = (count * (8 >> log) + 7) // 8
            b_byte = tl.load(p_packed + i_row * size + first + i_code % length, mask=m_out, other=0).to(tl.int32)
            b_bits = (b_byte >> (i_code // length * (8 >> log)).to(tl.int32)) & ((1 << (8 >> log)) - 1)
            b_code |= b_bits << (BITS - BITS % (16 >> log))
            first += length
    tl.store(p_out + i_out, b_code.to(tl.uint8), mask=m_out)
