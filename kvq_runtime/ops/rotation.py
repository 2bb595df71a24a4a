"""Rotate runs of elements before they are rounded, so that every element is close to Gaussian with the same variance.

    signed Hadamard   x ↦ x · diag(±1) · H / √S, in runs of S elements, a power of two
    random            x ↦ x · Q, with Q of the QR decomposition of a Gaussian matrix, the diagonal of R positive

Signs and Gaussian numbers come from an integer hash of (seed, position), in float64 on the CPU, never from a random
generator: a seed is the same rotation on every device and with every version. The signs break up components that line
up with a Walsh function, a constant above all, which a plain H would gather in one spike. The sign fix of Q makes it
uniform over all rotations and reflections.

Source: Malinovskii et al., 2024 (HIGGS), section 3, Sylvester's construction of H; Han et al., 2025 (PolarQuant),
section 3.2, footnote: a rotation instead of a Gaussian sketch; Mezzadri, 2007: the sign fix.
Differs: AQUA-KV's released code uses H without signs; the paper, like us, a randomized transform.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvq_runtime.ops import product
from kvq_runtime.ops.constant import constant

# Rows of a matrix that a kernel multiplies a tile with: whole in shared memory, and a shape of the tensor cores.
TILE_MATRICES = (16, 32, 64, 128)


class SignedHadamard(NamedTuple):
    """diag(±1) · H / √size.

    size   elements of a run, a power of two
    seed   of the signs
    """

    size: int
    seed: int

    @property
    def matrix(self) -> Tensor:
        """The orthogonal float32 [size, size] that rows are multiplied with."""
        return hadamard_matrix(self.size, self.seed)


# A matrix is float [S, V]: a run of S elements becomes V; square and orthogonal, but for a fitted basis. [H, S, V]:
# each of a token's H runs has its own. None: nothing.
Rotation = SignedHadamard | Tensor | None


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate runs along the last dimension of [..., K], to float32.

    A run that is longer than K goes over the groups [..., G, K] one after another. The shape stays, but for K where a
    matrix is not square.
    """
    if rotation is None:
        return x.float()
    if isinstance(rotation, SignedHadamard):
        return hadamard(x, rotation.size, rotation.seed)
    return by_runs(x.float(), rotation.float())


def by_runs(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply every run of S elements with the matrix, or run h of each H with its own; V elements in its place."""
    run, out = matrix.shape[-2:]
    if matrix.ndim == 2:
        rotated = product.matmul(x.reshape(-1, run), matrix)
    else:
        rotated = product.matmul(x.reshape(-1, len(matrix), run).transpose(0, 1), matrix).transpose(0, 1)
    return rotated.reshape(*x.shape[:-1], x.shape[-1] * out // run)


def in_tile(rotation: Rotation, size: int) -> bool:
    """Return True if a kernel rotates groups of `size` elements in registers, in the launch that encodes them.

    Its runs have to be inside a group, and a matrix one operand of a tile's product, the same for all heads. Any other
    rotation is a launch before it: of `hadamard`, or a product, which may round a row otherwise in other company.
    """
    if rotation is None:
        return True
    if isinstance(rotation, Tensor) and rotation.ndim == 3:
        return False
    run = rotation.size if isinstance(rotation, SignedHadamard) else len(rotation)
    square = isinstance(rotation, SignedHadamard) or (rotation.shape[1] == run and run in TILE_MATRICES)
    return square and size % run == 0


def hadamard(x: Tensor, size: int, seed: int) -> Tensor:
    """Rotate runs of `size` elements of [..., K] by a signed Hadamard matrix, to float32; K as in `rotate`."""
    check(size, x.shape)
    return (x.float().reshape(-1, size) @ _matrix_on(size, seed, x.device)).view(x.shape)


@constant(64)
def _matrix_on(size: int, seed: int, device: torch.device) -> Tensor:
    return hadamard_matrix(size, seed).to(device)


def check(size: int, shape: torch.Size) -> None:
    """Raise a ValueError unless `size` is a power of two, and divides the last dimension, or the last two together."""
    if size < 1 or size & (size - 1):
        raise ValueError(f"Hadamard rotation of {size} elements; use a power of two")
    if shape[-1] % size and (len(shape) < 2 or shape[-2] * shape[-1] % size):
        raise ValueError(f"Hadamard rotation of {size} elements does not divide {list(shape[-2:])}; use a divisor")


@constant(64)
def signs(size: int, seed: int) -> Tensor:
    """Return the ±1 of one run, float32 [size]."""
    return ((hashes(seed, size) & 1) * 2 - 1).float()


@constant(64)
def hadamard_matrix(size: int, seed: int) -> Tensor:
    """Return diag(signs) · H / √size, float32 [size, size]; ValueError unless `size` is a power of two."""
    check(size, torch.Size([size]))
    sylvester = torch.ones(1, 1, dtype=torch.float32)
    while len(sylvester) < size:
        sylvester = torch.cat([torch.cat([sylvester, sylvester], 1), torch.cat([sylvester, -sylvester], 1)])
    return signs(size, seed)[:, None] * sylvester / size**0.5


@constant(16)
def random_matrix(size: int, seed: int) -> Tensor:
    """Return a random orthogonal matrix, float32 [size, size]: hash → uniform → Gaussian (Box–Muller) → QR."""
    radius, angle = uniform(seed, 2 * size * size).view(2, size, size)
    gaussian = (-2 * radius.log()).sqrt() * (2 * math.pi * angle).cos()
    q, r = torch.linalg.qr(gaussian)
    return (q * r.diagonal().sign()).float()


def uniform(seed: int, count: int) -> Tensor:
    """Return numbers inside (0, 1), float64 [count]: the upper 53 bits of `hashes`."""
    return (_shifted(hashes(seed, count), 11).double() + 0.5) / 2**53


def hashes(seed: int, count: int) -> Tensor:
    """Mix a seed and each position into 64 bits, int64 [count]."""
    return mix(torch.arange(count) ^ mix(torch.tensor(_signed(seed % 2**64))))


def mix(x: Tensor) -> Tensor:
    """Mix the bits of each int64, the same everywhere; products wrap. Source: Steele et al., 2014 (splitmix64)."""
    x = x + _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return x ^ _shifted(x, 31)


def _signed(word: int) -> int:
    """64 bits as torch's int64 holds them."""
    return word - 2**64 if word >> 63 else word


def _shifted(x: Tensor, places: int) -> Tensor:
    """Shift 64-bit words right, filling with zeros."""
    return (x >> places) & ((1 << (64 - places)) - 1)
