"""Rotate each head in the metric of what reads it, as OSCAR does.

An error e of a key costs e M eᵀ in its scores, M = E[q qᵀ] over the queries after RoPE; of a value, M is the second
moment of the values, each weighed by what queries see in its key. The rotation is a head's own: that of values could be
folded into the projections on both sides, that of keys works after RoPE, on keys as they are stored and on queries once
a step.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.stages.scheme import Site
from kvq_runtime.stages.stage import Rotation, Specs, Tensors

Metric = Literal["queries", "attended"]


@dataclass(frozen=True)
class Oscar(Rotation):
    """Rotate by the eigenvectors of the metric, then by a Hadamard: x ↦ x U H P, orthogonal.

    metric   "queries": for keys, of the queries after RoPE; "attended": for values, of the values as queries weigh them

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
    fitted: ClassVar[bool] = True
    metric: Metric = "queries"

    def size(self, width: int, geometry: Geometry) -> int:
        if width != geometry.width:
            raise ValueError(f'rotate: rows of {width} elements are no tokens; use axis "token"')
        return geometry.head_size

    def pair(self, width: int, geometry: Geometry, tensors: Tensors) -> tuple[Tensor, Tensor] | None:
        """(forward, back), [H, D, D] each: every head has its own."""
        rotation_HDD = tensors.get("rotation")
        return None if rotation_HDD is None else (rotation_HDD, rotation_HDD.mT.to(torch.bfloat16))

    def tensors(self, site: Site, geometry: Geometry) -> Specs:
        """The rotation of each head, float32."""
        return {"rotation": ((geometry.kv_heads, geometry.head_size, geometry.head_size), torch.float32)}

    def check(self, site: Site) -> None:
        scheme, own = site.scheme, {"key": "queries", "value": "attended"}[site.role]
        if self.metric != own:
            raise ValueError(f"oscar: metric={self.metric!r} does not weigh a {site.role}; use {own!r}")
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
