"""Multiply bfloat16 in what the processor is fast at: in bfloat16 where it has instructions, else in float32.

A product of two bfloat16 numbers is exact in float32, and sums are float32 either way. So only the order of addition
differs, and with it now and then the last bit of the bfloat16 result. Without instructions bfloat16 takes 2 times
(AVX-512) to 25 times (AVX2) as long as float32, conversions included.
"""

from functools import cache

import torch
from torch import Tensor


@cache
def multiplies_bfloat16() -> bool:
    """Return True if this machine's CPU has instructions for products of bfloat16."""
    if hasattr(torch.cpu, "get_capabilities"):
        return any(has for name, has in torch.cpu.get_capabilities().items() if name.endswith("bf16"))
    return torch.cpu._is_avx512_bf16_supported()  # before torch had a list of them


def without_bfloat16(device: str) -> str | None:
    """Return one line for people where a device multiplies no bfloat16 and float32 is taken instead; else None."""
    if device != "cpu" or multiplies_bfloat16():
        return None
    return "this processor has no bfloat16 instructions: the model's products are made in float32"


def widened(x: Tensor) -> bool:
    """Return True if products of this tensor are computed in float32."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and not multiplies_bfloat16()


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """x @ y, in the dtype of x."""
    return (x.float() @ y.float()).to(x.dtype) if widened(x) else x @ y.to(x.dtype)


def addmm(bias: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """bias + x @ y, in the dtype of x."""
    if widened(x):
        return torch.addmm(bias.float(), x.float(), y.float()).to(x.dtype)
    return torch.addmm(bias, x, y.to(x.dtype))


def inverse(x: Tensor) -> Tensor:
    """Return 1 / x, and 0 where x is not above 0: of what scales numbers that may all be 0."""
    return torch.where(x > 0, 1 / x.clamp_min(torch.finfo(torch.float32).tiny), 0.0)


def scaled(x_NRW: Tensor, scale_NRG: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply each of the G groups by its scale, in float32 (on a CPU several times faster than in bfloat16)."""
    x = x_NRW.to(torch.float32, copy=True) if out is None else out.copy_(x_NRW)
    x.unflatten(-1, (scale_NRG.shape[-1], -1)).mul_(scale_NRG.float()[..., None])
    return x
