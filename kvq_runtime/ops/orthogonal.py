"""Make a random orthogonal matrix from whole numbers: hash → uniform → Gaussian (Box–Muller) → QR with positive R.

All of it in float64 on the CPU, so that a seed gives the same matrix for every device. A sign fix (each column of Q
times the sign of R's diagonal) makes it uniform over all rotations and reflections.

Source: Han et al., 2025 (PolarQuant), section 3.2, footnote: a rotation instead of a Gaussian sketch; Mezzadri, 2007.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from kvq_runtime.ops import hadamard


def uniform(seed: int, count: int) -> Tensor:
    """Numbers inside (0, 1), float64 [count]: the upper 53 bits of `hadamard.hash64(seed, position)`."""
    start = hadamard.hash64(seed)
    x = (torch.arange(count) ^ _signed(start)) + _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    x = x ^ _shifted(x, 31)
    return (_shifted(x, 11).double() + 0.5) / 2**53


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _shifted(x: Tensor, places: int) -> Tensor:
    """Shift 64-bit words right, filling with zeros."""
    return (x >> places) & ((1 << (64 - places)) - 1)


@lru_cache(maxsize=16)
def matrix(size: int, seed: int) -> Tensor:
    """The orthogonal float32 [size, size] that rows are multiplied with."""
    one, two = uniform(seed, 2 * size * size).view(2, size, size)
    gaussian = (-2 * one.log()).sqrt() * (2 * math.pi * two).cos()
    q, r = torch.linalg.qr(gaussian)
    return (q * r.diagonal().sign()).float()
