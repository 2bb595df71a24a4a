"""Rotate each head in the metric of what reads it, as OSCAR does.

An error e of a key costs e M eᵀ in its scores, M = E[q qᵀ] over the queries after RoPE; of a value, in the output of
the layer, M = Σ WₒᵀWₒ. The rotation is a head's own: that of values could be folded into the projections
on both sides, that of keys works after RoPE, on keys as they are stored and on queries once a step.

H = heads that are cached.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.stages.stage import Rotation, Site, Specs, Tensors

Metric = Literal["queries", "output", "attended"]


@dataclass(frozen=True)
class MetricRotation(Rotation):
    """A matrix for each head, fitted in a metric.

    metric   "queries": second moment of the queries after RoPE, for keys; "output": of the output projection's columns;
             "attended": second moment of the values, each weighed by what queries see in its key
    """

    fitted = True
    metric: Metric = "queries"

    def size(self, width: int, geometry: Geometry) -> int:
        if width != geometry.width:
            raise ValueError(f'rotate: rows of {width} elements are no tokens; use axis "token"')
        return geometry.head_size

    @abstractmethod
    def pair(self, width: int, geometry: Geometry, tensors: Tensors) -> tuple[Tensor, Tensor] | None:
        """(forward, back), [H, D, D] each: every head has its own."""

    def check(self, site: Site) -> None:
        scheme, own = site.scheme, {"key": ("queries",), "value": ("output", "attended")}[site.role]
        if self.metric not in own:
            raise ValueError(f"{self.kind}: metric={self.metric!r} does not weigh a {site.role}; use one of {own}")
        if self.metric in ("queries", "attended") and site.position != "post":
            raise ValueError(f'{self.kind}: queries weigh keys after RoPE; encode keys there, position "post"')
        if scheme.axis != "token":
            raise ValueError(f'{self.kind} rotates the channels of a head; use axis "token"')
        if scheme.feedback is not None:
            raise ValueError(f"{self.kind} and feedback both weigh errors by queries; drop one of them")
        if site.geometry is not None:
            head, group = site.geometry.head_size, scheme.quantize.group_size(site.geometry.width, site.geometry)
            if group is None:
                raise ValueError(
                    f"{self.kind}: {scheme.quantize.kind} has no groups; use a quantizer with some, as rtn"
                )
            if head % group:
                raise ValueError(
                    f'{self.kind}: {scheme.quantize.kind} with group={group} mixes heads of {head}; use group="head"'
                )


@dataclass(frozen=True)
class Oscar(MetricRotation):
    """Rotate by the eigenvectors of the metric, then by a Hadamard: x ↦ x U H P, orthogonal.

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
    papers: ClassVar[tuple[str, ...]] = ("2605.17757",)

    def pair(self, width: int, geometry: Geometry, tensors: Tensors) -> tuple[Tensor, Tensor] | None:
        rotation_HDD = tensors.get("rotation")
        return None if rotation_HDD is None else (rotation_HDD, rotation_HDD.mT.to(torch.bfloat16))

    def tensors(self, site: Site, geometry: Geometry) -> Specs:
        """The rotation of each head, float32, as OSCAR's files have it."""
        return {"rotation": ((geometry.kv_heads, geometry.head_size, geometry.head_size), torch.float32)}
