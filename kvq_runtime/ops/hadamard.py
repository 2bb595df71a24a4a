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
    if size < 1 or size & (size - 1):
        raise ValueError(f"Hadamard group of {size}; use a power of two")
    sylvester = torch.ones(1, 1)
    while len(sylvester) < size:
        sylvester = torch.cat([torch.cat([sylvester, sylvester], 1), torch.cat([sylvester, -sylvester], 1)])
    return signs(size, seed)[:, None] * sylvester / size**0.5
