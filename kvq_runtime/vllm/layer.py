"""Write tokens of one attention layer into pages, encoded, and read runs of pages for scores and sums.

Shapes: T tokens of a step · R requests · P pages of a run, of N tokens each · S first tokens that stay exact ·
Y = R · H · M = G · queries of a request.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvq_runtime.codec.block_input import block_input
from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.geometry import ROLES, Geometry, Role
from kvq_runtime.ops import rope
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.vllm.page import Fields, Page

PACKED = 64  # rows of queries of a KV head up to which pages are read without decoding, as in attention/reference.py


@dataclass
class Run:
    """Pages [R, P] of as many requests, from their token `first` on."""

    pages_RP: Tensor
    first: int
    held: dict[Role, Fields] = field(default_factory=dict)


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
        self._views: dict[Role, Fields] = {}
        self.exact_E2SC: Tensor | None = None  # first tokens, by entry: see first_tokens.py

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
        self._cache, self._views = cache, self.page.views(raw_BX)
        self.codecs = {role: codec.to(cache.device) for role, codec in self.codecs.items()}
        if self.rotary is not None:
            self.rotary = replace(self.rotary, frequencies_K=self.rotary.frequencies_K.to(cache.device))

    def write(self, pair: Mapping[Role, Tensor], slots_T: Tensor, positions_T: Tensor) -> None:
        """Encode tokens [T, C] into the slots page · N + place, int64; positions are those in the text."""
        pages_T, places_T = slots_T // self.page.tokens, slots_T % self.page.tokens
        for role, encoded in self._encoded({role: x[None] for role, x in pair.items()}, positions_T[None]).items():
            for name, view in self._views[role].items():
                view[pages_T, places_T] = encoded[name][0].to(view.dtype)

    def write_exact(
        self, pair: Mapping[Role, Tensor], rows: Tensor, entries: Tensor, places: Tensor, held: int
    ) -> None:
        """Keep some of the tokens [T, C], by row, as they are, as first token `place` of an entry of `held`."""
        sample = pair["key"]
        if self.exact_E2SC is None or len(self.exact_E2SC) < held:
            room = sample.new_zeros(2 * held, 2, self.sinks, self.geometry.width)
            if self.exact_E2SC is not None:
                room[: len(self.exact_E2SC)] = self.exact_E2SC
            self.exact_E2SC = room
        exact_E2SC = self.exact_E2SC
        for index, role in enumerate(ROLES):
            exact_E2SC[entries, index, places] = pair[role][rows]

    def exact(self, role: Role, entries_R: Tensor) -> Tensor:
        """The first tokens of entries, [Y, S, D] in float32."""
        assert self.exact_E2SC is not None, "an entry without first tokens"
        return self._by_head(self.exact_E2SC[entries_R, ROLES.index(role)])

    def scores(self, q_YMD: Tensor, run: Run) -> Tensor:
        """q · k of every token of a run: [Y, M, P · N]."""
        reader = self.codecs["key"].packed_reader
        if reader is not None and q_YMD.shape[1] <= PACKED:
            return reader.scores(q_YMD, reader.view_blocks(self._fields("key", run.pages_RP), 0))
        return torch.bmm(q_YMD, self._decoded("key", run).mT)

    def mix(self, p_YMT: Tensor, run: Run) -> Tensor:
        """Σ p v over every token of a run: [Y, M, D]."""
        reader = self.codecs["value"].packed_reader
        if reader is not None and p_YMT.shape[1] <= PACKED:
            return reader.mix(p_YMT, reader.view_blocks(self._fields("value", run.pages_RP), 0))
        return torch.bmm(p_YMT, self._decoded("value", run))

    def _fields(self, role: Role, pages_RP: Tensor) -> Fields:
        """[R, P, N, ...] each, as they were encoded."""
        return self.page.collected(role, {name: view[pages_RP] for name, view in self._views[role].items()})

    def _decoded(self, role: Role, run: Run) -> Tensor:
        """Keys or values of a run, [Y, P · N, D], float32."""
        rows, pages = run.pages_RP.shape
        tokens = self.page.tokens
        positions_1T = run.first + torch.arange(pages * tokens, device=run.pages_RP.device)[None]
        positions_NT = positions_1T.view(1, pages, tokens).expand(rows, -1, -1).flatten(0, 1)
        fields = {name: part.flatten(0, 1) for name, part in self._fields(role, run.pages_RP).items()}
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
