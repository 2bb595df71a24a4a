"""Encode the tokens of one attention layer into pages, and read runs of pages for scores and sums.

`PagedLayer` encodes token by token, `BlockLayer` pages whole, once they are full. Exact tokens beside pages, first ones
and tails, lie in pools (`exact.py`).

Shapes: T tokens of a step · R requests · P columns of their pages, of N tokens each · S first tokens that stay exact ·
O pages in which a step's tokens stand · E entries of a pool · Y = R · H · M = G · queries of a request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kvq_runtime.codec.block_input import block_input
from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.geometry import ROLES, Geometry, Role
from kvq_runtime.ops import rope
from kvq_runtime.ops.rope import Pair, Rotary
from kvq_runtime.vllm.exact import Copies, ExactStep, Piece
from kvq_runtime.vllm.page import Fields, Page, PageReader

PACKED = 64  # rows of queries of a KV head up to which pages are read without decoding, as in attention/path.py


class PagedLayer:
    """The keys and values of one layer in vLLM's pages, encoded token by token.

    codecs   of keys and values, of this worker's heads
    rotary   the model's rotation, where keys are encoded before it or less a mean after it; else None
    sinks    first tokens of a sequence that are kept exact as well, at least 0
    reader   has the decode kernel read a `BlockLayer`'s pages, in whose order they are; None: torch alone reads them
    """

    def __init__(
        self,
        codecs: tuple[Codec, Codec],
        page: Page,
        geometry: Geometry,
        rotary: Rotary | None,
        sinks: int,
        reader: PageReader | None = None,
    ):
        self.codecs: dict[Role, Codec] = dict(zip(ROLES, codecs, strict=True))
        self.page, self.geometry, self.rotary, self.sinks, self.reader = page, geometry, rotary, sinks, reader
        self._cache: Tensor | None = None
        self._raw_BX = torch.empty(0)
        self._views: dict[Role, Fields] = {}
        self.exact_E2SC: Tensor | None = None  # first tokens, by entry

    def bind(self, cache: Tensor) -> None:
        """Use this memory, a layer's cache as vLLM gives it: [B, 1, N, ...], contiguous within a page.

        ValueError: the kernel cannot read pages that lie so.
        """
        if self._cache is cache:
            return
        raw_BX = cache.view(torch.uint8).view(len(cache), -1)
        if raw_BX.shape[1] != self.page.tokens * self.page.per_token:
            raise RuntimeError(
                f"vLLM gave pages of {raw_BX.shape[1]} bytes, not {self.page.tokens} tokens of {self.page.per_token}; "
                "use vLLM 0.32 or 0.33, whose layout of the cache is known"
            )
        self._cache, self._raw_BX, self._views = cache, raw_BX, self.page.views(raw_BX)
        self.codecs = {role: codec.to(cache.device) for role, codec in self.codecs.items()}
        if self.rotary is not None:
            self.rotary = replace(self.rotary, frequencies_K=self.rotary.frequencies_K.to(cache.device))
        if self.reader is not None:
            self.reader.bind(self.codecs, self._views)

    def write(self, pair: Mapping[Role, Tensor], slots_T: Tensor, positions_T: Tensor) -> None:
        """Encode tokens [T, C] into the slots page · N + place, int64; positions are those in the text."""
        pages_T, places_T = slots_T // self.page.tokens, slots_T % self.page.tokens
        # what a layer of another format left in a page may decode to a NaN, which no weight of 0 hides
        self._raw_BX[pages_T[places_T == 0]] = 0
        for role, encoded in self._encoded({role: x[None] for role, x in pair.items()}, positions_T[None]).items():
            for name, view in self._views[role].items():
                view[pages_T, places_T] = encoded[name][0].to(view.dtype)

    def write_exact(self, pair: Mapping[Role, Tensor], arrived: Copies) -> None:
        """Keep first tokens, of tokens [T, C], as they are."""
        self.exact_E2SC = _grown(self.exact_E2SC, arrived.size, self.sinks, pair["key"])
        _copy(self.exact_E2SC, arrived, pair)

    def scores(self, q_YMD: Tensor, pages_RP: Tensor, first: int) -> Tensor:
        """Return q · k of every token of columns of the block table, from token `first` on: [Y, M, P · N]."""
        reader = self.codecs["key"].packed_reader
        if reader is not None and q_YMD.shape[1] <= PACKED:
            blocks = reader.view_blocks(self._fields("key", pages_RP), 0)
            return reader.scores(q_YMD, blocks, partial(self._angles, first, blocks.tokens))
        return torch.bmm(q_YMD, self._decoded("key", pages_RP, first).mT)

    def mix(self, p_YMT: Tensor, pages_RP: Tensor, first: int) -> Tensor:
        """Return Σ p v over every token of these columns: [Y, M, D]."""
        reader = self.codecs["value"].packed_reader
        if reader is not None and p_YMT.shape[1] <= PACKED:
            return reader.mix(p_YMT, reader.view_blocks(self._fields("value", pages_RP), 0))
        return torch.bmm(p_YMT, self._decoded("value", pages_RP, first))

    def by_head(self, x_RTC: Tensor) -> Tensor:
        """Return rows [R, T, C] as [Y, T, D], float32."""
        return x_RTC.float().unflatten(-1, (self.geometry.kv_heads, -1)).transpose(1, 2).flatten(0, 1)

    def _fields(self, role: Role, pages_RP: Tensor) -> Fields:
        """Return the fields of these columns, [R, P, N, ...] each, as they were encoded."""
        return self.page.collected(role, {name: view[pages_RP] for name, view in self._views[role].items()})

    def _decoded(self, role: Role, pages_RP: Tensor, first: int) -> Tensor:
        """Return keys or values of these columns, [Y, P · N, D], float32."""
        rows, pages = pages_RP.shape
        positions_T = first + torch.arange(pages * self.page.tokens, device=pages_RP.device)
        positions_NT = positions_T.view(1, pages, -1).expand(rows, -1, -1).flatten(0, 1)
        fields = {name: part.flatten(0, 1) for name, part in self._fields(role, pages_RP).items()}
        return self.by_head(self._decode(role, fields, positions_NT).reshape(rows, len(positions_T), -1))

    def _encoded(
        self, pair: Mapping[Role, Tensor], positions_NT: Tensor, source_NS: Tensor | None = None
    ) -> dict[Role, Fields]:
        """Encode keys and values [N, T, C]; `source` as in `block_input`."""
        tables, encoded = self._tables(positions_NT), dict[Role, Fields]()
        for role, codec in self.codecs.items():
            turn = "undo" if codec.unrotated else None
            taken = tables if role == "key" else None
            x_NTC, turned = block_input(pair[role], source_NS, taken, turn, self.geometry.kv_heads, codec.segment)
            x_NTC = x_NTC.to(pair[role].dtype) if codec.scheme.quantize.keeps_dtype else x_NTC
            encoded[role] = codec.encode(x_NTC, Context(rope=turned))
        return encoded

    def _decode(self, role: Role, fields: Fields, positions_NT: Tensor) -> Tensor:
        """Return keys, after RoPE, or values of tokens [N, T, C]."""
        codec, tables = self.codecs[role], self._tables(positions_NT)
        context = Context(rope=tables)
        if codec.segment and tables is not None:
            middles = rope.of_middles(tables, codec.segment)
            tables, context = middles, Context(rope=rope.between(tables, middles))
        x_NTC = codec.restore(codec.decode(fields, context), context)
        if not codec.unrotated:
            return x_NTC
        assert tables is not None, "keys before RoPE without the model's rotation"
        return rope.rotate(x_NTC.float().unflatten(-1, (self.geometry.kv_heads, -1)), *tables).flatten(-2)

    def _angles(self, first: int, tokens: int, segment: int) -> tuple[Pair | None, Pair]:
        """Return the angles of tokens from position `first` on, as `Positions.by_segment`."""
        assert self.rotary is not None, "keys by segment without the model's rotation"
        tables = self.rotary.tables(first + torch.arange(tokens, device=self.rotary.frequencies_K.device)[None])
        if not segment:
            return None, tables
        whole = rope.of_middles(tables, segment)
        return (whole[0][:, ::segment], whole[1][:, ::segment]), tables

    def _tables(self, positions_NT: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return cos and sin of positions, where the recipe needs them."""
        return None if self.rotary is None else self.rotary.tables(positions_NT)


class BlockLayer(PagedLayer):
    """The keys and values of one layer in vLLM's pages, each one block, and its tails, exact."""

    tails_E2NC: Tensor | None = None
    _pair: Mapping[Role, Tensor] | None = None  # the step's tokens [T, C]

    def take(self, pair: Mapping[Role, Tensor], step: ExactStep) -> None:
        """Take in the tokens [T, C] of a step: encode the pages that are full, keep the others' tokens."""
        tails_E2NC = self.tails_E2NC = _grown(self.tails_E2NC, step.kept.size, self.page.tokens, pair["key"])
        self._pair = pair
        for entry, page, begin, filled in step.settled:
            self._encode(tails_E2NC[entry][:, None], [page], [begin], filled)
        for (entry, page, begin, filled), first in step.reopened:
            positions_1N = begin + torch.arange(self.page.tokens, device=tails_E2NC.device)[None]
            for index, role in enumerate(ROLES):
                fields = self._fields(role, torch.tensor([[page]], device=tails_E2NC.device))
                x_NC = self._decode(role, {name: x[0] for name, x in fields.items()}, positions_1N)[0]
                tails_E2NC[entry, index, :filled] = x_NC[:filled].to(tails_E2NC.dtype)
            if first >= 0 and self.exact_E2SC is not None:  # which codes lack
                known = min(self.sinks, filled)
                tails_E2NC[entry, :, :known] = self.exact_E2SC[first, :, :known]
        _copy(tails_E2NC, step.kept, pair)
        if step.full:
            pages, begins = ([piece.tail.page for piece in step.full], [piece.tail.begin for piece in step.full])
            self._encode(self.own_pages(step.full), pages, begins, self.page.tokens)

    def release(self) -> None:
        """Let go of a step's tokens: its queries are answered."""
        self._pair = None

    def own_pages(self, pieces: Sequence[Piece]) -> Tensor:
        """Return keys and values of the pages O of pieces of the step, exact: [2, O, N, C]."""
        assert self._pair is not None and self.tails_E2NC is not None, "no step was taken in"
        pair, device = self._pair, self.tails_E2NC.device
        entries_O, rows_O = torch.tensor([(piece.tail.entry, piece.row) for piece in pieces], device=device).mT
        whole_O1 = (entries_O < 0)[:, None]  # all tokens are the step's
        rows_ON = torch.where(whole_O1, rows_O[:, None] + torch.arange(self.page.tokens, device=device), 0)
        tails_2ONC = self.tails_E2NC[entries_O.clamp(min=0)].transpose(0, 1)
        arrived_2ONC = torch.stack([pair[role][rows_ON] for role in ROLES])
        return torch.where(whole_O1[..., None], arrived_2ONC, tails_2ONC)

    @property
    def tails(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the pool of tails, [E, N, C]: the step's tokens are in their entries."""
        assert self.tails_E2NC is not None, "a step without tails"
        return self.tails_E2NC[:, 0], self.tails_E2NC[:, 1]

    @property
    def first_tokens(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the pool of exact first tokens, [E, S, C]; with no entry yet, of zeros."""
        exact_E2SC = self.exact_E2SC = _grown(self.exact_E2SC, 1, self.sinks, self.tails[0])
        return exact_E2SC[:, 0], exact_E2SC[:, 1]

    def _encode(self, x_2PNC: Tensor, pages: Sequence[int], begins: Sequence[int], filled: int) -> None:
        """Encode pages [2, P, N, C]; first tokens, which stay exact elsewhere, and what has not come as the nearest."""
        pages_P, begins_P1 = (torch.tensor(x, device=x_2PNC.device) for x in (pages, [[begin] for begin in begins]))
        places_N = torch.arange(self.page.tokens, device=x_2PNC.device)
        skipped_P1 = torch.where(begins_P1 == 0, min(self.sinks, filled - 1), 0)
        source_PN = places_N.clamp(max=filled - 1).maximum(skipped_P1)
        pair = dict(zip(ROLES, x_2PNC, strict=True))
        for role, encoded in self._encoded(pair, begins_P1 + places_N, source_PN).items():
            for name, x in self.page.arranged(role, encoded).items():
                view = self._views[role][name]
                view[pages_P] = x.to(view.dtype)


def _grown(pool_E2TC: Tensor | None, entries: int, tokens: int, like_C: Tensor) -> Tensor:
    """Return a pool of that many entries or more, [E, 2, tokens, C], with its content; dtype and width of `like`."""
    if pool_E2TC is not None and len(pool_E2TC) >= entries:
        return pool_E2TC
    grown_E2TC = like_C.new_zeros(max(8, 2 * entries), 2, tokens, like_C.shape[-1])
    if pool_E2TC is not None:
        grown_E2TC[: len(pool_E2TC)] = pool_E2TC
    return grown_E2TC


def _copy(pool_E2TC: Tensor, copies: Copies, pair: Mapping[Role, Tensor]) -> None:
    """Copy tokens [T, C] of a step into their entries."""
    if not copies.tokens:
        return
    entries, rows, places = copies.on(pool_E2TC.device)
    for index, role in enumerate(ROLES):
        pool_E2TC[entries, index, places] = pair[role][rows]
