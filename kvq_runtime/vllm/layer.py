"""Write tokens of one attention layer into pages, encoded, and read runs of pages for scores and sums.

`PagedLayer` encodes token by token, `BlockLayer` pages whole, once they are full; what is exact beside pages, first
tokens and tails, lies in pools (`exact.py`).

Shapes: T tokens of a step · R requests · P columns of their pages, of N tokens each · S first tokens that stay exact ·
O pages in which the step's tokens stand · E entries of a pool · Y = R · H · M = G · queries of a request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvq_runtime.codec.block_input import block_input
from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.geometry import ROLES, Geometry, Role
from kvq_runtime.ops import rope
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.vllm.exact import Arrived, TailWork
from kvq_runtime.vllm.page import Fields, Page, PageReader

PACKED = 64  # rows of queries of a KV head up to which pages are read without decoding, as in attention/path.py


@dataclass
class PageColumns:
    """Columns of the block table: pages [R, P] of as many requests, from their token `first` on."""

    pages_RP: Tensor
    first: int


class PagedLayer:
    """The keys and values of one layer in vLLM's pages.

    codecs   of keys and values, of this worker's heads
    rotary   the model's rotation, where keys are encoded before it or less a mean after it; else None
    sinks    first tokens of a sequence that are kept exact as well, at least 0
    """

    def __init__(self, codecs: tuple[Codec, Codec], page: Page, geometry: Geometry, rotary: Rotary | None, sinks: int):
        self.codecs: dict[Role, Codec] = dict(zip(ROLES, codecs, strict=True))
        self.page, self.geometry, self.rotary, self.sinks = page, geometry, rotary, sinks
        self._cache: Tensor | None = None
        self._raw_BX: Tensor | None = None
        self._views: dict[Role, Fields] = {}
        self.exact_E2SC: Tensor | None = None  # first tokens, by entry

    def bind(self, cache: Tensor) -> None:
        """Use this memory, a layer's cache as vLLM gives it: [B, 1, N, ...], contiguous within a page."""
        if self._cache is cache:
            return
        raw_BX = cache.view(torch.uint8).view(len(cache), -1)
        if raw_BX.shape[1] != self.page.tokens * self.page.per_token:
            raise RuntimeError(
                f"vLLM gave pages of {raw_BX.shape[1]} bytes, not {self.page.tokens} tokens of {self.page.per_token}; "
                "this version of vLLM lays its cache out in a way that kvq does not know"
            )
        self._cache, self._raw_BX, self._views = cache, raw_BX, self.page.views(raw_BX)
        self.codecs = {role: codec.to(cache.device) for role, codec in self.codecs.items()}
        if self.rotary is not None:
            self.rotary = replace(self.rotary, frequencies_K=self.rotary.frequencies_K.to(cache.device))

    def begin(self, pages: Tensor) -> None:
        """Make pages zeros, before their first tokens are written: what another layer, of another format, left there
        may decode to a NaN, which no weight of 0 hides."""
        assert self._raw_BX is not None, "pages of no memory"
        self._raw_BX[pages] = 0

    def write(self, pair: Mapping[Role, Tensor], slots_T: Tensor, positions_T: Tensor) -> None:
        """Encode tokens [T, C] into the slots page · N + place, int64; positions are those in the text."""
        pages_T, places_T = slots_T // self.page.tokens, slots_T % self.page.tokens
        for role, encoded in self._encoded({role: x[None] for role, x in pair.items()}, positions_T[None]).items():
            for name, view in self._views[role].items():
                view[pages_T, places_T] = encoded[name][0].to(view.dtype)

    def write_exact(self, pair: Mapping[Role, Tensor], arrived: Arrived) -> None:
        """Keep first tokens, of tokens [T, C], as they are."""
        exact_E2SC = self.exact_E2SC = _pool(self.exact_E2SC, arrived.held, self.sinks, pair["key"])
        for index, role in enumerate(ROLES):
            exact_E2SC[arrived.entries, index, arrived.places] = pair[role][arrived.rows]

    def exact(self, role: Role, entries_R: Tensor) -> Tensor:
        """The first tokens of entries, [Y, S, D] in float32."""
        assert self.exact_E2SC is not None, "an entry without first tokens"
        return self._by_head(self.exact_E2SC[entries_R, ROLES.index(role)])

    def scores(self, q_YMD: Tensor, columns: PageColumns) -> Tensor:
        """q · k of every token of the pages: [Y, M, P · N]."""
        reader = self.codecs["key"].packed_reader
        if reader is not None and q_YMD.shape[1] <= PACKED:
            return reader.scores(q_YMD, reader.view_blocks(self._fields("key", columns.pages_RP), 0))
        return torch.bmm(q_YMD, self._decoded("key", columns).mT)

    def mix(self, p_YMT: Tensor, columns: PageColumns) -> Tensor:
        """Σ p v over every token of the pages: [Y, M, D]."""
        reader = self.codecs["value"].packed_reader
        if reader is not None and p_YMT.shape[1] <= PACKED:
            return reader.mix(p_YMT, reader.view_blocks(self._fields("value", columns.pages_RP), 0))
        return torch.bmm(p_YMT, self._decoded("value", columns))

    def _fields(self, role: Role, pages_RP: Tensor) -> Fields:
        """[R, P, N, ...] each, as they were encoded."""
        return self.page.collected(role, {name: view[pages_RP] for name, view in self._views[role].items()})

    def _decoded(self, role: Role, columns: PageColumns) -> Tensor:
        """Keys or values of the pages, [Y, P · N, D], float32."""
        rows, pages = columns.pages_RP.shape
        tokens = self.page.tokens
        positions_1T = columns.first + torch.arange(pages * tokens, device=columns.pages_RP.device)[None]
        positions_NT = positions_1T.view(1, pages, tokens).expand(rows, -1, -1).flatten(0, 1)
        fields = {name: part.flatten(0, 1) for name, part in self._fields(role, columns.pages_RP).items()}
        return self._by_head(self._decode(role, fields, positions_NT).reshape(rows, pages * tokens, -1))

    def _encoded(
        self, pair: Mapping[Role, Tensor], positions_NT: Tensor, source_NS: Tensor | None = None
    ) -> dict[Role, Fields]:
        """Keys and values [N, T, C] encoded; `source` as in `block_input`."""
        tables, found = self._tables(positions_NT), dict[Role, Fields]()
        for role, codec in self.codecs.items():
            turn = "undo" if codec.before_rope else None
            taken = tables if role == "key" else None
            x_NTC, turned = block_input(pair[role], source_NS, taken, turn, self.geometry.kv_heads)
            x_NTC = x_NTC.to(pair[role].dtype) if codec.scheme.quantize.keeps_dtype else x_NTC
            found[role] = codec.encode(x_NTC, Context(rope=turned))
        return found

    def _decode(self, role: Role, fields: Fields, positions_NT: Tensor) -> Tensor:
        """Keys, after RoPE, or values of tokens [N, T, C]."""
        codec, tables = self.codecs[role], self._tables(positions_NT)
        context = Context(rope=tables)
        x_NTC = codec.restore(codec.decode(fields, context), context)
        if not codec.before_rope:
            return x_NTC
        assert tables is not None, "keys before RoPE without the model's rotation"
        return rope.rotate(x_NTC.float().unflatten(-1, (self.geometry.kv_heads, -1)), *tables).flatten(-2)

    def _tables(self, positions_NT: Tensor) -> tuple[Tensor, Tensor] | None:
        """cos and sin of positions, where the recipe needs them."""
        return None if self.rotary is None else self.rotary.tables(positions_NT)

    def _by_head(self, x_RTC: Tensor) -> Tensor:
        return x_RTC.float().unflatten(-1, (self.geometry.kv_heads, -1)).transpose(1, 2).flatten(0, 1)


class BlockLayer(PagedLayer):
    """The keys and values of one layer in vLLM's pages, each one block, and its tails, exact.

    reader   has the decode kernel read the pages, in whose order they are; None: torch alone reads them
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
        super().__init__(codecs, page, geometry, rotary, sinks)
        self.reader = reader
        self.tails_E2NC: Tensor | None = None
        self._step: tuple[Mapping[Role, Tensor], TailWork] | None = None

    def bind(self, cache: Tensor) -> None:
        """As `PagedLayer.bind`. ValueError: the kernel cannot read pages that lie so."""
        if self._cache is not cache:
            super().bind(cache)
            if self.reader is not None:
                self.reader.bind(self.codecs, self._views)

    def take(self, pair: Mapping[Role, Tensor], step: TailWork) -> None:
        """Take in the tokens [T, C] of a step: encode the pages that are full, keep the others' tokens."""
        tails_E2NC = self.tails_E2NC = _pool(self.tails_E2NC, step.held, self.page.tokens, pair["key"])
        device = tails_E2NC.device
        for entry, page, begin, filled in step.settled:
            x_2PNC = tails_E2NC[entry][:, None]
            self._encode(dict(zip(ROLES, x_2PNC, strict=True)), [page], [begin], filled)
        for (entry, page, begin, filled), first in step.reopened:
            positions_1N = begin + torch.arange(self.page.tokens, device=device)[None]
            for index, role in enumerate(ROLES):
                fields = self._fields(role, torch.tensor([[page]], device=device))
                x_NC = self._decode(role, {name: x[0] for name, x in fields.items()}, positions_1N)[0]
                tails_E2NC[entry, index, :filled] = x_NC[:filled].to(tails_E2NC.dtype)
            if first >= 0 and self.exact_E2SC is not None:  # of which codes know nothing
                known = min(self.sinks, filled)
                tails_E2NC[entry, :, :known] = self.exact_E2SC[first, :, :known]
        entries, rows, places = step.written(device)
        for index, role in enumerate(ROLES):
            tails_E2NC[entries, index, places] = pair[role][rows]
        self._step = pair, step
        if step.full:
            which, pages = (list(x) for x in zip(*step.full, strict=True))
            exact = dict(zip(ROLES, self.own_pages(which), strict=True))
            self._encode(exact, pages, [step.begins[i] for i in which], self.page.tokens)

    def release(self) -> None:
        """Let go of a step's tokens: its queries are answered."""
        self._step = None

    def own(self, role: Role, which: Sequence[int]) -> Tensor:
        """Pages of the step's queries, by index of O, exact: [Y, N, D], float32; zeros where no token has come."""
        return self._by_head(self._own(role, which))

    def own_pages(self, which: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Keys and values of pages of the step's queries, by index of O, in the model's dtype: [len(which), N, C]."""
        return self._own("key", which), self._own("value", which)

    @property
    def windows(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the pool of tails, [E, N, C]: the step's tokens are in their entries."""
        assert self.tails_E2NC is not None, "a step without tails"
        return self.tails_E2NC[:, 0], self.tails_E2NC[:, 1]

    @property
    def first_tokens(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the pool of exact first tokens, [E, S, C]; with no entry yet, of zeros."""
        self.exact_E2SC = _pool(self.exact_E2SC, 1, self.sinks, self.windows[0])
        return self.exact_E2SC[:, 0], self.exact_E2SC[:, 1]

    def _own(self, role: Role, which: Sequence[int]) -> Tensor:
        """The tokens of some of the step's pages, [len(which), N, C], in the model's dtype."""
        assert self._step is not None and self.tails_E2NC is not None, "no step was taken in"
        (pair, step), device = self._step, self.tails_E2NC.device
        rows_ON = torch.stack([step.rows[i] for i in which]).to(device)
        entries_O = torch.tensor([step.entries[i] for i in which], device=device)
        kept_O1 = (entries_O >= 0)[:, None, None]
        x_ONC = self.tails_E2NC[entries_O.clamp(min=0), ROLES.index(role)].where(kept_O1, 0)
        return pair[role][rows_ON.clamp(min=0)].where((rows_ON >= 0)[..., None], x_ONC)

    def _encode(self, pair: Mapping[Role, Tensor], pages: Sequence[int], begins: Sequence[int], filled: int) -> None:
        """Encode pages [P, N, C]; first tokens, which stay exact elsewhere, and what has not come as the nearest."""
        device = pair["key"].device
        pages_P, begins_P1 = torch.tensor(pages, device=device), torch.tensor(begins, device=device)[:, None]
        places_N = torch.arange(self.page.tokens, device=device)
        skipped_P1 = torch.where(begins_P1 == 0, min(self.sinks, filled - 1), 0)
        source_PN = places_N.clamp(max=filled - 1).maximum(skipped_P1)
        for role, encoded in self._encoded(pair, begins_P1 + places_N, source_PN).items():
            for name, x in self.page.arranged(role, encoded).items():
                view = self._views[role][name]
                view[pages_P] = x.to(view.dtype)


def _pool(held_E2TC: Tensor | None, entries: int, tokens: int, like_C: Tensor) -> Tensor:
    """A pool of that many entries at least, [E, 2, tokens, C], with what there is; of the dtype and width of `like`."""
    if held_E2TC is not None and len(held_E2TC) >= entries:
        return held_E2TC
    room = like_C.new_zeros(max(8, 2 * entries), 2, tokens, like_C.shape[-1])
    if held_E2TC is not None:
        room[: len(held_E2TC)] = held_E2TC
    return room
