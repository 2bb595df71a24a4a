"""Rotate a token's channels before they are rounded, so that every code meets the same, bell-shaped distribution."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import hadamard, orthogonal
from kvq_runtime.stages import groups


@dataclass(frozen=True)
class Hadamard:
    """Rotate by a signed Hadamard matrix in groups.

    group   "all": all heads of a token together, in groups of the largest power of two (at most 1024) that divides
            the width; "head": inside each head (80 is 5 blocks of 16); or a size, a power of two
    seed    of the signs
    """

    kind: ClassVar[str] = "hadamard"
    group: str | int = "all"
    seed: int = 0

    def __post_init__(self):
        if isinstance(self.group, str) and self.group not in ("all", "head"):
            raise ValueError(f'group={self.group!r}; use "all", "head" or a power of two')
        if isinstance(self.group, int) and (self.group < 1 or self.group & (self.group - 1)):
            raise ValueError(f"group={self.group}; a Hadamard group is a power of two")

    def size(self, width: int, geometry: Geometry) -> int:
        """The group size for vectors of `width` (the model's width, or a block's tokens)."""
        if isinstance(self.group, int):
            if width % self.group:
                raise ValueError(f"rotate: group={self.group} does not divide the width {width}")
            return self.group
        size = geometry.head_size if self.group == "head" and width == geometry.width else width
        return min(size & -size, 1024)

    def matrix(self, width: int, geometry: Geometry) -> Tensor:
        """The orthogonal matrix of one group, float32."""
        return hadamard.matrix(self.size(width, geometry), self.seed)


@dataclass(frozen=True)
class Random:
    """Rotate by one random orthogonal matrix, the same for all layers, keys and values: PolarQuant's and TurboQuant's.

    group   "head": every head, whatever its size; "all": as for Hadamard; or a size
    seed    of the matrix
    """

    kind: ClassVar[str] = "random"
    group: str | int = "head"
    seed: int = 0

    def __post_init__(self):
        groups.check(self.group)

    def size(self, width: int, geometry: Geometry) -> int:
        """The group size for vectors of `width` (the model's width, or a block's tokens)."""
        size = groups.size(self.group, width, geometry)
        if size > 1024:
            raise ValueError(f"rotate: a random rotation of {size} elements; use at most 1024, or kind hadamard")
        return size

    def matrix(self, width: int, geometry: Geometry) -> Tensor:
        """The orthogonal matrix of one group, float32."""
        return orthogonal.matrix(self.size(width, geometry), self.seed)


@dataclass(frozen=True)
class Basis:
    """Turn all heads of a token together into latent channels, by a fitted basis: z = x B, x̂ = ẑ Bᵀ.

    B holds the eigenvectors of the calibrated second moment of what is left after the prediction, [C, R], in the order
    of their eigenvalues; only the R channels that the quantizer stores are kept. `quantize: mixed` must follow.

    Source: Hong et al., 2025 (SVDq), theorem 4.1: the latent variances are the eigenvalues.
    Differs: fitted once, offline, by the eigenvectors of the covariance, which are the right singular vectors.
    """

    kind: ClassVar[str] = "basis"

    def specs(self, width: int, stored: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The fitted basis: name, shape and dtype."""
        return {"basis": ((width, stored), torch.bfloat16)}


@dataclass(frozen=True)
class OutputBasis(Basis):
    """Turn values into latent channels whose errors count as the output projection weighs them: z = x B, x̂ = ẑ Dᵀ.

    With the metric M = Σ WₒᵀWₒ, over the query heads that read a KV head, an error e of a value costs e M eᵀ in the
    layer's output. B = M^½ V and D = M^-½ V, V the eigenvectors of M^½ S M^½, so that the cost of an error of ẑ is its
    square: bits are shared out by what the output sees. B is not orthogonal; both are stored, and billed.
    """

    kind: ClassVar[str] = "output_basis"

    def specs(self, width: int, stored: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The fitted basis B, and its dual D, DᵀB = 1: names, shapes and dtypes."""
        shape = (width, stored)
        return {"basis": (shape, torch.bfloat16), "dual": (shape, torch.bfloat16)}


KINDS = (Hadamard, Random, Basis, OutputBasis)
Rotate = Hadamard | Random | Basis
