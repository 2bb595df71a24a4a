"""Round to nearest between the ends of a group, any strides, so that groups of tokens need no transpose.

One launch rotates, finds the ends, rounds and packs; see ops/rtn.py for the formulas and ops/chain.py for the chain.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.kernels.tile import FUSED, on, programs, rounded, rows_of, strided, turned, warps, write_codes
from kvq_runtime.ops.pack import packed_size


def encode_minmax(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    codes, step, low = launch(x, bits, 8, True)
    assert low is not None
    return codes, step, low


def encode_absmax(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    return launch(x, bits, 8, False)[:2]


def launch(x: Tensor, bits: int, stored: int, ends: bool, signs: Tensor | None = None, matrix: Tensor | None = None):
    """Encode groups [..., K] to codes of `stored` bits, step, and low unless symmetric (`ends` False)."""
    size, shape = x.shape[-1], x.shape[:-1]
    codes = torch.empty(*shape, packed_size(size, stored), dtype=torch.uint8, device=x.device)
    step = torch.empty(shape, dtype=torch.float16, device=x.device)
    low = torch.empty_like(step) if ends else None
    x, (second, third), strides = strided(x)
    padded = triton.next_power_of_2(size)
    rows, grid = programs(step.numel(), padded, matrix)
    turn = signs if signs is not None else matrix
    run = 1 if turn is None else len(turn)
    if step.numel():
        with on(x):
            _encode[grid](
                x, codes, step, low, signs, matrix, step.numel(), second, third, *strides,
                bits, stored, size, padded, rows, run, run.bit_length() - 1, num_warps=warps(matrix), **FUSED,
            )  # fmt: skip
    return codes, step, low


@triton.jit
def _encode(
    x, codes, step, low, signs, matrix, n, second, third, s0, s1, s2, s3,
    BITS: tl.constexpr, STORED: tl.constexpr, K: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
    RUN: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    tile, row, mask = rows_of(x, n, second, third, s0, s1, s2, s3, K, P, ROWS)
    tile = turned(tile, signs, matrix, RUN, LOG)
    TOP: tl.constexpr = (1 << BITS) - 1
    if low is not None:
        start = tl.min(tl.where(mask, tile, float("inf")), 1).to(tl.float16)
        high = tl.max(tl.where(mask, tile, float("-inf")), 1)
        size = (tl.maximum(high - start.to(tl.float32), 0.0) / TOP).to(tl.float16)
        tl.store(low + row, start, mask=row < n)
        start = start.to(tl.float32)
    else:
        size = (tl.max(tl.where(mask, tl.abs(tile), 0.0), 1) * (2 / TOP)).to(tl.float16)
        start = size.to(tl.float32) * (-TOP / 2)
    tl.store(step + row, size, mask=row < n)
    size = size.to(tl.float32)
    inverse = tl.where(size > 0, 1 / tl.maximum(size, 1e-30), 0.0)
    code = rounded(tl.minimum(tl.maximum((tile - start[:, None]) * inverse[:, None], 0.0), TOP))
    write_codes(code.to(tl.int32), codes, row, n, STORED, K)


def decode(codes: Tensor, step: Tensor, low: Tensor | None, bits: int, out: Tensor | None = None) -> Tensor:
    if out is None:
        out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    codes, size = codes.contiguous(), codes.shape[-1]
    target = out if out.is_contiguous() else torch.empty_like(codes, dtype=out.dtype)
    if codes.numel():
        with on(codes):
            low = low if low is None else low.contiguous()
            grid = (triton.cdiv(codes.numel(), 1024),)
            _decode[grid](codes, step.contiguous(), low, target, codes.numel(), size, bits, 1024, **FUSED)
    return out if target is out else out.copy_(target)


@triton.jit
def _decode(codes, step, low, out, n, size, BITS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here, group = i < n, i // size
    scale = tl.load(step + group, mask=here, other=0.0).to(tl.float32)
    start = scale * (-((1 << BITS) - 1) / 2)
    if low is not None:
        start = tl.load(low + group, mask=here, other=0.0).to(tl.float32)
    x = tl.load(codes + i, mask=here, other=0).to(tl.float32) * scale + start
    tl.store(out + i, x, mask=here)
