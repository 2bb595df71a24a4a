"""Rotate a token's channels before rounding, so that every channel is close to Gaussian with the same variance."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry, check_group
from kvq_runtime.ops import rotation as rotations
from kvq_runtime.ops.rotation import SignedHadamard, hadamard_matrix, random_matrix
from kvq_runtime.stages.stage import Rotation, Site, Specs, Tensors


class Fixed(Rotation):
    """A rotation that is known without a fit: orthogonal, the same for all layers."""

    @abstractmethod
    def matrix(self, width: int, geometry: Geometry) -> Tensor:
        """Return the orthogonal matrix of one group, float32 [size, size]."""

    def pair(self, width: int, geometry: Geometry, tensors: Tensors) -> tuple[Tensor, Tensor]:
        matrix = self.matrix(width, geometry)
        return matrix, matrix.mT

    def check(self, site: Site) -> None:
        if site.geometry is not None:
            self.size(site.scheme.width(site.window.block, site.geometry), site.geometry)


@dataclass(frozen=True)
class Hadamard(Fixed):
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
        """Return the group size for vectors of `width` (the model's width, or a block's tokens)."""
        if isinstance(self.group, int):
            if width % self.group:
                raise ValueError(f"rotate: group={self.group} does not divide the width {width}")
            return self.group
        size = geometry.head_size if self.group == "head" and width == geometry.width else width
        return min(size & -size, 1024)

    def matrix(self, width: int, geometry: Geometry) -> Tensor:
        """Return the orthogonal matrix of one group, float32."""
        return hadamard_matrix(self.size(width, geometry), self.seed)

    def forward(self, width: int, geometry: Geometry) -> rotations.Rotation:
        """Return the rotation for encoding."""
        return SignedHadamard(self.size(width, geometry), self.seed)


@dataclass(frozen=True)
class Random(Fixed):
    """Rotate by one random orthogonal matrix, the same for all layers, keys and values: PolarQuant's and TurboQuant's.

    group   "head": every head, whatever its size; "all": as for Hadamard; or a size
    seed    of the matrix
    """

    kind: ClassVar[str] = "random"
    group: str | int = "head"
    seed: int = 0

    def __post_init__(self):
        check_group(self.group)

    def size(self, width: int, geometry: Geometry) -> int:
        """Return the group size for vectors of `width` (the model's width, or a block's tokens)."""
        size = geometry.group_size(self.group, width)
        if size > 1024:
            raise ValueError(f"rotate: a random rotation of {size} elements; use at most 1024, or kind hadamard")
        return size

    def matrix(self, width: int, geometry: Geometry) -> Tensor:
        """Return the orthogonal matrix of one group, float32."""
        return random_matrix(self.size(width, geometry), self.seed)


@dataclass(frozen=True)
class Basis(Rotation):
    """PCA basis of all heads of a token: latent channels z = x B, x̂ = ẑ Bᵀ.

    B holds the eigenvectors of the calibrated second moment of the prediction's residual, [C, R], in the order
    of their eigenvalues; only the R channels that the quantizer stores are kept. `quantize: mixed` must follow.

    group   "all": one basis of all heads · "head": one of each head, [H, D, R / H]. Channel j is then of head j mod H,
            so that runs of one width have as many channels of every head, in the order of their variances

    Source: Hong et al., 2025 (SVDq), theorem 4.1: the latent variances are the eigenvalues.
    Differs: fitted once, offline, by the eigenvectors of the covariance, which are the right singular vectors.
    """

    kind: ClassVar[str] = "basis"
    optional: ClassVar[tuple[str, ...]] = ("group",)
    latents: ClassVar[bool] = True
    fitted: ClassVar[bool] = True
    group: Literal["all", "head"] = "all"

    def size(self, width: int, geometry: Geometry) -> int:
        return width

    def pair(self, width: int, geometry: Geometry, tensors: Tensors) -> tuple[Tensor, Tensor] | None:
        if not tensors:
            return None
        basis = self._dense(tensors["basis"])
        return basis, basis.mT

    def _dense(self, matrix: Tensor) -> Tensor:
        """Return [C, R] of [H, D, R / H], zeros where a channel is of another head; [C, R] as it is."""
        if self.group == "all":
            return matrix
        heads, size, count = matrix.shape
        dense_HDNH = matrix.new_zeros(heads, size, count, heads)
        head_H = torch.arange(heads, device=matrix.device)
        dense_HDNH[head_H, :, :, head_H] = matrix
        return dense_HDNH.view(heads * size, count * heads)

    def tensors(self, site: Site, geometry: Geometry) -> Specs:
        """Return the fitted basis."""
        stored, heads = site.scheme.quantize.stored(geometry.width), geometry.kv_heads
        by_head = heads, geometry.head_size, stored // heads
        return {"basis": (by_head if self.group == "head" else (geometry.width, stored), torch.bfloat16)}

    def check_prompt_fit(self) -> None:
        """Allow it: a row's own tokens have a second moment."""


@dataclass(frozen=True)
class GradientBasis(Basis):
    """Basis in the metric of the model's own predictions, M = E[g gᵀ], Fisher information by KV head: x̂ = ẑ Dᵀ.

    g is the gradient of the log-probability of tokens drawn from the model, with respect to one token's keys in the
    recipe's position, or values. ½ e M eᵀ is, to second order, the divergence in nats that an error e of the token
    causes in all that follows: the one metric holds for keys and values, and compares between layers.

    B = M^½ V and D = M^-½ V, V the eigenvectors of M^½ S M^½, so that the cost of an error of ẑ is its square. B is not
    orthogonal; both are stored, and counted in bits.
    """

    kind: ClassVar[str] = "gradient_basis"

    def pair(self, width: int, geometry: Geometry, tensors: Tensors) -> tuple[Tensor, Tensor] | None:
        if not tensors:
            return None
        basis, dual = (self._dense(tensors[name]) for name in ("basis", "dual"))
        return basis, dual.mT

    def tensors(self, site: Site, geometry: Geometry) -> Specs:
        """Return the fitted basis B, and its dual D, DᵀB = 1."""
        basis = super().tensors(site, geometry)["basis"]
        return {"basis": basis, "dual": basis}

    def check_prompt_fit(self) -> None:
        raise ValueError(f"{self.kind} needs calibration; drop it, or the fit to the prompt")


@dataclass(frozen=True)
class Oscar(Rotation):
    """Rotate each head by the eigenvectors of a metric M, then by a Hadamard: x ↦ x U H P, orthogonal.

    metric   "queries": for keys, M = E[q qᵀ] of the queries after RoPE, by which an error e costs e M eᵀ in scores;
             "attended": for values, their second moment, each weighed by what queries see in its key

    After it the metric is the same on every channel's own: (UHP)ᵀ M (UHP) has a constant diagonal, so that no channel
    of the codes weighs more than another. P is the bit-reversal order of the eigenvalues; with one scale for a head it
    changes nothing.

    Source: Zhou et al., 2026 (OSCAR), section 3, and the authors' code, compositions `qqt_r_h_pbr` of keys and
    `sst_r_h_pbr` of values.
    Differs: one rotation for each cached head, as in version 2 of the authors' files; the paper has one for a layer.
    The exact sinks are left out of the fit. Heads that are no power of two, which the authors refuse, are mixed by a
    Hadamard over strided directions, without P.
    """

    kind: ClassVar[str] = "oscar"
    fitted: ClassVar[bool] = True
    metric: Literal["queries", "attended"] = "queries"

    def size(self, width: int, geometry: Geometry) -> int:
        if width != geometry.width:
            raise ValueError(f'rotate: rows of {width} elements are no tokens; use axis "token"')
        return geometry.head_size

    def pair(self, width: int, geometry: Geometry, tensors: Tensors) -> tuple[Tensor, Tensor] | None:
        """(forward, back), [H, D, D] each: every head has its own."""
        rotation_HDD = tensors.get("rotation")
        return None if rotation_HDD is None else (rotation_HDD, rotation_HDD.mT.to(torch.bfloat16))

    def tensors(self, site: Site, geometry: Geometry) -> Specs:
        """Return the rotation of each head, float32."""
        return {"rotation": ((geometry.kv_heads, geometry.head_size, geometry.head_size), torch.float32)}

    def check(self, site: Site) -> None:
        scheme, metric = site.scheme, {"key": "queries", "value": "attended"}[site.role]
        if self.metric != metric:
            raise ValueError(f"oscar: metric={self.metric!r} does not weigh a {site.role}; use {metric!r}")
        if site.position != "post":
            raise ValueError('oscar: queries weigh keys after RoPE; encode keys there, position "post"')
        if scheme.axis != "token":
            raise ValueError('oscar rotates the channels of a head; use axis "token"')
        if scheme.feedback is not None:
            raise ValueError("oscar and feedback both weigh errors by queries; drop one of them")
        if site.geometry is not None:
            head, group = site.geometry.head_size, scheme.quantize.group_size(site.geometry.width, site.geometry)
            if group is None:
                raise ValueError(f"oscar: {scheme.quantize.kind} has no groups; use a quantizer with some, as rtn")
            if head % group:
                raise ValueError(
                    f'oscar: {scheme.quantize.kind} with group={group} mixes heads of {head}; use group="head"'
                )
