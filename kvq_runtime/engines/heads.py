"""Give a worker of tensor parallelism the part of a recipe that is its heads'.

A tensor of a fit has a dimension, or none, that grows with the number of KV heads: a worker takes its run of it. That
is right where neither a rotation nor a group of rounding reaches over heads; other recipes are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from kvq_runtime.codec import codec
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe


@dataclass(frozen=True)
class Share:
    """A worker's share of the model's KV heads: `part` of `parts` equal runs."""

    part: int = 0
    parts: int = 1


def share_of(geometry: Geometry, rank: int, ranks: int) -> Share:
    """The share of a rank; where ranks are more than heads, neighbours have the same head."""
    parts = min(ranks, geometry.kv_heads)
    if geometry.kv_heads % parts or ranks % parts:
        raise ValueError(
            f"{ranks} workers cannot share {geometry.kv_heads} KV heads evenly; choose a "
            f"divisor of {geometry.kv_heads} for --tensor-parallel-size"
        )
    return Share(rank * parts // ranks, parts)


def narrowed(recipe: Recipe, geometry: Geometry, tensors: Mapping[str, Tensor], share: Share):
    """(geometry, tensors) of a worker's heads. Raises ValueError where codes are shared between heads."""
    if share.parts == 1:
        return geometry, tensors
    _check(recipe, geometry)
    own = narrower(geometry, share)
    whole, part = codec.all_specs(recipe, geometry), codec.all_specs(recipe, own)
    return own, {name: _run(tensors[name], whole[name][0], part[name][0], share) for name in part}


def narrower(geometry: Geometry, share: Share) -> Geometry:
    """The shape of a worker's part."""
    return replace(geometry, kv_heads=geometry.kv_heads // share.parts)


def _run(tensor: Tensor, whole: tuple[int, ...], part: tuple[int, ...], share: Share) -> Tensor:
    for dim, (all_of, some) in enumerate(zip(whole, part, strict=True)):
        if all_of != some:
            return tensor.narrow(dim, share.part * some, some).contiguous()
    return tensor


def _check(recipe: Recipe, geometry: Geometry) -> None:
    size = geometry.head_size
    if recipe.cross_layer:
        raise ValueError(
            f"{recipe.name} predicts each head from all heads of the layer below, which a worker does not have; use "
            "--tensor-parallel-size 1, or a recipe without prediction"
        )
    for scheme in recipe.schemes:
        group = scheme.quantize.group_size(geometry.width, geometry)
        turned = scheme.rotate.size(geometry.width, geometry) if scheme.rotate is not None else 1
        if (group is not None and size % group) or size % turned:
            raise ValueError(
                f"{recipe.name} rotates or rounds several KV heads together, so that workers cannot have them apart; "
                'use a recipe per head (group "head"), or --tensor-parallel-size 1'
            )
