"""Lay out a page of vLLM's cache: the fields of one encoded block of its tokens, keys' and values', one after another.

    | keys: scale [N, ...] | values: scale | keys: codes [N, ...] | values: codes | padding: less than a word a token |

A field of a page is a tensor [N, ...] in its own dtype, as a codec gives and takes it, so that no byte moves between a
page and a codec, and a page costs the bits that the recipe states. Where the decode kernel reads pages (`PageReader`),
a field lies in its order (codec/kernel_order.py), in as many bytes. The first such layer imports the kernels, and with
them triton: see ops/dispatch.py.

B = pages of the cache · P pages in a row · N = tokens of a page.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.attention import fused
from kvq_runtime.codec.codec import Codec
from kvq_runtime.geometry import ROLES, Geometry, Role
from kvq_runtime.ops import dispatch
from kvq_runtime.ops.constant import lasting
from kvq_runtime.ops.dense import Softmax, kept
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.recipe import Recipe
from kvq_runtime.store.storage import Order

Fields = dict[str, Tensor]
Orders = Mapping[Role, Order]
ALIGNED = 16  # tokens of a page, of which its fields begin at multiples of 16 bytes


@dataclass(frozen=True)
class Field:
    """One field of a page: bytes `start` to `stop`."""

    role: Role
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int = 0

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize


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
    orders: Orders

    def views(self, raw_BX: Tensor) -> dict[Role, Fields]:
        """Return the fields of all pages, [B, ...] each, in the memory of `raw`, uint8 [B, bytes of a page]."""
        views: dict[Role, Fields] = {role: {} for role in ROLES}
        for field in self.fields:
            bytes_BX = raw_BX[:, field.start : field.stop]
            views[field.role][field.name] = bytes_BX.view(field.dtype).unflatten(-1, field.shape)
        return views

    def arranged(self, role: Role, fields_P: Fields) -> Fields:
        """Return fields of pages, [P, ...] each, as a codec encodes them, in the order of pages."""
        order = self.orders.get(role)
        if order is None:
            return fields_P
        return {name: x[0] for name, x in order.arranged({name: x[None] for name, x in fields_P.items()}).items()}

    def collected(self, role: Role, fields_RP: Fields) -> Fields:
        """Undo `arranged`, of fields [R, P, ...]."""
        order = self.orders.get(role)
        return fields_RP if order is None else order.collected(fields_RP)


def page_of(
    recipe: Recipe, layer: int, geometry: Geometry, dtype: torch.dtype, orders: Orders = MappingProxyType({})
) -> Page:
    """Lay out a layer's pages of `recipe.window.block` tokens; `dtype` is the model's, `orders` as in Page."""
    tokens, unplaced = recipe.window.block, list[Field]()
    for role in ROLES:
        specs, order = recipe.scheme(layer, role).fields(tokens, geometry, dtype), orders.get(role)
        specs = specs if order is None else order.specs(specs)
        unplaced += [Field(role, name, tuple(shape), kind) for name, (shape, kind) in specs.items()]
    fields, stop = list[Field](), 0
    for field in sorted(unplaced, key=lambda field: -field.dtype.itemsize):  # so each begins at a multiple of its own
        fields.append(replace(field, start=stop))
        stop = fields[-1].stop
    word = dtype.itemsize
    return Page(tokens, -(-stop // (tokens * word)) * word, tuple(fields), orders)


def shared_pages(needed: int, beside: int, tokens: int, word: int) -> tuple[int, int]:
    """Return how many of kvq's pages vLLM hands out at a time, and the bytes of a token in them.

    Layers of different kinds take turns in one memory, so vLLM pads all pages to the bytes of the largest. Several of
    kvq's together fill that: as many as fit into it, which are widened, or one more, so that vLLM pads the others'.
    Whichever adds the smaller share is taken.

    needed   bytes a token of the recipe, a multiple of `word`
    beside   bytes of the largest page of other layers; 0: there are none
    tokens   of one of kvq's pages
    """
    if beside <= needed * tokens:
        return 1, needed
    few = beside // (needed * tokens)
    wider = -(-beside // (few * tokens * word)) * word
    return (few, wider) if wider / needed <= (few + 1) * needed * tokens / beside else (few + 1, needed)


def refusal(recipe: Recipe, geometry: Geometry, rotary: Rotary | None, layer: int = 0) -> str | None:
    """Return why the kernel does not read this layer's pages, of `recipe.window.block` tokens; None: it does."""
    if recipe.window.block % ALIGNED:
        return f"pages of {recipe.window.block} tokens; the kernel reads multiples of {ALIGNED}"
    if rotary is not None and 2 * len(rotary.frequencies_K) != geometry.head_size:
        return "RoPE rotates a part of a head, and the kernel rotates whole ones"
    return fused.refusal(recipe, geometry, layer)


class Shared:
    """State that the layers of an engine share: RoPE's tables, and the number of parts that pages are cut into."""

    def __init__(self, recipe: Recipe, geometry: Geometry, rotary: Rotary | None):
        self.recipe, self.geometry, self.rotary = recipe, geometry, rotary
        self.splits: dict[tuple, int] = {}
        self._rope: Any = None

    @lasting
    def rope(self, rows: int, pages: int, device: torch.device) -> Any:
        """Return tables for `rows` rows of `pages` pages, or more; None: the recipe needs none."""
        if self.rotary is None:
            return None
        if self._rope is None or len(self._rope.leads_B2K) < rows or len(self._rope.bases_N2K) < pages:
            starts_B = torch.zeros(2 * rows, dtype=torch.int32, device=device)  # room for steps of more rows
            frequencies_K, scaling = self.rotary.frequencies_K.to(device), self.rotary.scaling
            block, segment = self.recipe.window.block, fused.segment_of(self.recipe)
            self._rope = fused.kernels().RopeTables.of(frequencies_K, scaling, block, pages, starts_B, segment)
        return self._rope


class PageReader:
    """The kernel's reader of one layer's pages.

    orders   how their codes lie in them
    """

    def __init__(self, shared: Shared, layer: int):
        self.shared, self._encoded = shared, list[Any]()
        layouts = fused.layouts(shared.recipe, shared.geometry, layer)
        self.orders: dict[Role, Order] = {role: layout.order for role, layout in zip(ROLES, layouts, strict=True)}

    def bind(self, codecs: Mapping[Role, Codec], views: Mapping[Role, Fields]) -> None:
        """Read these pages, of codecs on the same device. ValueError: they are not where the kernel can read them."""
        self._encoded = []
        for role, codec in codecs.items():
            reader = fused.make_reader(codec, codec.device)
            no_table = torch.zeros(1, 1, device=codec.device)
            pages = fused.kernels().Pages.of(views[role], reader.names, no_table)
            self._encoded.append(replace(reader, addresses=pages))

    def takes(self, q_THD: Tensor, requests: int, count: int) -> bool:
        """True if the kernel takes `count` queries of each of `requests` requests."""
        heads = self.shared.geometry.kv_heads
        ratio = q_THD.shape[1] // heads
        return dispatch.runs_kernel(q_THD) and fused.kernels().takes(requests * heads, ratio, count)

    def attend(
        self, q_BHTD: Tensor, table: Tensor, lengths_B4: Tensor, windows: tuple[Tensor, Tensor],
        sinks: tuple[Tensor, Tensor], scale: float, softmax: Softmax,
    ) -> Tensor:  # fmt: skip
        """Return the attention of queries, the newest of their windows: [B, Hq, Tq, D].

        table        int [B, pages]
        lengths_B4   int32, contiguous: encoded pages, row of the windows, tokens there, row of the sinks or -1
        windows      of keys and of values, [E, N, C];   sinks   likewise, [E, S, C]
        """
        host, splits, pages = fused.kernels(), self.shared.splits, table.shape[1]
        keys, values = (
            replace(codes, addresses=codes.addresses._replace(table=table, width=table.stride(0)))
            for codes in self._encoded
        )
        rope = self.shared.rope(len(q_BHTD), pages, q_BHTD.device)
        kind = (keys.settings, values.settings, len(q_BHTD), q_BHTD.shape[2], pages)
        if kind not in splits:
            splits[kind] = host.choose_splits(q_BHTD, keys, values, pages)
        exact = host.Exact(*windows, *sinks)
        out_BHTD, lse_BHT = host.attend(
            q_BHTD, keys, values, exact, lengths_B4, None, scale, splits[kind], rope, softmax.cap
        )
        if softmax.logit_H is None:
            return out_BHTD
        return (out_BHTD * kept(lse_BHT * math.log(2), softmax.logit_H)[..., None]).to(out_BHTD.dtype)
