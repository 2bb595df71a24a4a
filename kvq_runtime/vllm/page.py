"""Lay out a page of vLLM's cache: the fields of one encoded block of its tokens, keys' and values', one after another.

    | keys: scale [N, ...] | values: scale | keys: codes [N, ...] | values: codes | padding: less than a word a token |

A field of a page is a tensor [N, ...] in its own dtype, as a codec gives and takes it: nothing is moved, byte by byte,
between a page and a codec. So a page costs the bytes of `fields`, which are the bits that the recipe states. Where the
decode kernel reads pages, a field lies in its order (codec/kernel_order.py), in as many bytes.

B = pages of the cache · N = tokens of a page.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvq_runtime.codec.kernel_order import KernelOrder
from kvq_runtime.geometry import ROLES, Geometry, Role
from kvq_runtime.recipe import Recipe
from kvq_runtime.stages.stage import Specs

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
    orders     how codes lie in a page, of keys and of values; None, or none: as they are encoded
    """

    tokens: int
    per_token: int
    fields: tuple[Field, ...]
    orders: Mapping[Role, KernelOrder | None] = field(default_factory=dict)

    @property
    def used(self) -> int:
        """Bytes of a page that hold something."""
        return sum(one.bytes for one in self.fields)

    def views(self, raw_BX: Tensor) -> dict[Role, Fields]:
        """The fields of all pages, [B, ...] each, in the memory of `raw`, uint8 [B, bytes of a page]."""
        found: dict[Role, Fields] = {role: {} for role in ROLES}
        for one in self.fields:
            part = raw_BX[:, one.start : one.start + one.bytes].view(one.dtype)
            found[one.role][one.name] = part.unflatten(-1, one.shape)
        return found

    def arranged(self, role: Role, fields_P: Fields) -> Fields:
        """Fields of pages, [P, ...] each, as a codec encodes them, in the order of pages."""
        order = self.orders.get(role)
        if order is None:
            return fields_P
        return {name: x[0] for name, x in order.arranged({name: x[None] for name, x in fields_P.items()}).items()}

    def collected(self, role: Role, fields_RP: Fields) -> Fields:
        """Undo `arranged`, of fields [R, P, ...]."""
        order = self.orders.get(role)
        return fields_RP if order is None else order.collected(fields_RP)


_NO_ORDERS: Mapping[Role, KernelOrder | None] = {}


def page_of(
    recipe: Recipe,
    layer: int,
    geometry: Geometry,
    dtype: torch.dtype,
    orders: Mapping[Role, KernelOrder | None] = _NO_ORDERS,
) -> Page:
    """The layout of a layer's pages of `recipe.window.block` tokens; `dtype` is the model's, `orders` as in Page."""
    tokens = recipe.window.block
    stored: dict[Role, Specs] = {}
    for role in ROLES:
        encoded, order = recipe.scheme(layer, role).fields(tokens, geometry, dtype), orders.get(role)
        stored[role] = encoded if order is None else order.specs(encoded)
    listed: list[tuple[Role, str, tuple[int, ...], torch.dtype]] = [
        (role, name, shape, kind) for role in ROLES for name, (shape, kind) in stored[role].items()
    ]
    fields, start = [], 0
    for role, name, shape, kind in sorted(listed, key=lambda each: -each[3].itemsize):  # wide ones first: all aligned
        fields.append(Field(role, name, start, tuple(shape), kind))
        start += fields[-1].bytes
    word = dtype.itemsize
    return Page(tokens, -(-start // (tokens * word)) * word, tuple(fields), orders)
