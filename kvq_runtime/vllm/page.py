"""Lay out a page of vLLM's cache: the fields of one encoded block of its tokens, keys' and values', one after another.

    | keys: scale [N, ...] | values: scale | keys: codes [N, ...] | values: codes | padding: less than a word a token |

A field of a page is a tensor [N, ...] in its own dtype, as a codec gives and takes it: nothing is moved, byte by byte,
between a page and a codec. So a page costs the bytes of `fields`, which are the bits that the recipe states.

B = pages of the cache · N = tokens of a page.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvq_runtime.geometry import ROLES, Geometry, Role
from kvq_runtime.recipe import Recipe

Fields = dict[str, Tensor]


@dataclass(frozen=True)
class Field:
    """One field of a page: it begins at byte `start`."""

    role: Role
    name: str
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Page:
    """The layout of one layer's pages.

    tokens     N
    per_token  bytes that vLLM reserves for a token, keys and values of all heads: a multiple of the model's dtype
    """

    tokens: int
    per_token: int
    fields: tuple[Field, ...]

    @property
    def used(self) -> int:
        """Bytes of a page that hold something."""
        return sum(field.bytes for field in self.fields)

    def views(self, raw_BX: Tensor) -> dict[Role, Fields]:
        """The fields of all pages, [B, ...] each, in the memory of `raw`, uint8 [B, bytes of a page]."""
        found: dict[Role, Fields] = {role: {} for role in ROLES}
        for field in self.fields:
            part = raw_BX[:, field.start : field.start + field.bytes].view(field.dtype)
            found[field.role][field.name] = part.unflatten(-1, field.shape)
        return found


def page_of(recipe: Recipe, layer: int, geometry: Geometry, dtype: torch.dtype) -> Page:
    """The layout of a layer's pages of `recipe.window.block` tokens; `dtype` is the model's."""
    tokens = recipe.window.block
    listed: list[tuple[Role, str, tuple[int, ...], torch.dtype]] = [
        (role, name, shape, kind)
        for role in ROLES
        for name, (shape, kind) in recipe.scheme(layer, role).fields(tokens, geometry, dtype).items()
    ]
    fields, start = [], 0
    for role, name, shape, kind in sorted(listed, key=lambda each: -each[3].itemsize):  # wide ones first: all aligned
        fields.append(Field(role, name, start, tuple(shape), kind))
        start += fields[-1].bytes
    word = dtype.itemsize
    return Page(tokens, -(-start // (tokens * word)) * word, tuple(fields))
