"""Rotate by a signed Hadamard matrix: x ↦ x · diag(±1) · H / √g, in groups of g, a power of two.

The signs come from an integer hash of (seed, position), never from a random generator, so that they are the same on
every device and version. They break up components that line up with a Walsh function, a constant above all, which a
plain H would gather in one spike.

Source: Malinovskii et al., 2024 (HIGGS), section 3; Sylvester's construction.
Differs: AQUA-KV's released code uses H without signs; the paper, like us, a randomized transform.
"""

from functools import lru_cache

import torch
from torch import Tensor

from kvq_runtime.ops import dispatch

_MASK = (1 << 64) - 1


def hash64(*words: int) -> int:
    """Mix whole numbers into 64 bits (splitmix64), the same everywhere."""
    state = 0
    for word in words:
        state = (state ^ (word & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


@lru_cache(maxsize=64)
def signs(size: int, seed: int) -> Tensor:
    """The ±1 of one group, float32 [size]."""
    return torch.tensor([1.0 if hash64(seed, position) & 1 else -1.0 for position in range(size)])


@lru_cache(maxsize=64)
def matrix(size: int, seed: int) -> Tensor:
    """The orthogonal float32 [size, size] that rows are multiplied with: diag(signs) · H / √size."""
    check(size, size)
    sylvester = torch.ones(1, 1)
    while len(sylvester) < size:
        sylvester = torch.cat([torch.cat([sylvester, sylvester], 1), torch.cat([sylvester, -sylvester], 1)])
    return signs(size, seed)[:, None] * sylvester / size**0.5


def check(size: int, width: int) -> None:
    """Refuse a group that is no power of two or does not divide the width."""
    if size < 1 or size & (size - 1):
        raise ValueError(f"Hadamard group of {size}; use a power of two")
    if width % size:
        raise ValueError(f"Hadamard groups of {size} do not divide a width of {width}")


@dispatch.paired
def rotate(x: Tensor, size: int, seed: int) -> Tensor:
    """Rotate [..., W] in groups of `size`, to float32."""
    check(size, x.shape[-1])
    return (x.float().reshape(-1, size) @ matrix(size, seed).to(x.device)).view(x.shape)


@dispatch.paired
def rotate_back(x: Tensor, size: int, seed: int) -> Tensor:
    """Undo `rotate`, to float32."""
    check(size, x.shape[-1])
    return (x.float().reshape(-1, size) @ matrix(size, seed).mT.to(x.device)).view(x.shape)
