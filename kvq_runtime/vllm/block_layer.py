"""Write tokens of one attention layer into pages that are encoded whole, once they are full; see `tails.py`.

Shapes: T tokens of a step · P pages, of N tokens each · O pages in which the step's tokens stand · E entries of the
pool.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvq_runtime.codec.codec import Codec
from kvq_runtime.geometry import ROLES, Geometry, Role
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.vllm.layer import PagedLayer
from kvq_runtime.vllm.page import Page
from kvq_runtime.vllm.page_reader import PageReader
from kvq_runtime.vllm.tails import Step


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
        self._step: tuple[Mapping[Role, Tensor], Step] | None = None

    def bind(self, cache: Tensor) -> None:
        """As `PagedLayer.bind`. ValueError: the kernel cannot read pages that lie so."""
        if self._cache is not cache:
            super().bind(cache)
            if self.reader is not None:
                self.reader.bind(self.codecs, self._views)

    def take(self, pair: Mapping[Role, Tensor], step: Step) -> None:
        """Take in the tokens [T, C] of a step: encode the pages that are full, keep the others' tokens."""
        tails_E2NC = self._pool(pair["key"], step.held)
        device = tails_E2NC.device
        for entry, page, begin, filled in step.settled:
            x_2PNC = tails_E2NC[entry][:, None]
            self._encode(dict(zip(ROLES, x_2PNC, strict=True)), [page], [begin], filled)
        for entry, page, begin, filled in step.reopened:
            positions_1N = begin + torch.arange(self.page.tokens, device=device)[None]
            for index, role in enumerate(ROLES):
                fields = self._fields(role, torch.tensor([[page]], device=device))
                x_NC = self._decode(role, {name: x[0] for name, x in fields.items()}, positions_1N)[0]
                tails_E2NC[entry, index, :filled] = x_NC[:filled].to(tails_E2NC.dtype)
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

    def sinks_pool(self, sample: Tensor) -> Tensor:
        """The pool of exact first tokens, [entries, 2, S, C]; with no entry yet, one of zeros, as `sample` is."""
        if self.exact_E2SC is None:
            self.exact_E2SC = sample.new_zeros(1, 2, self.sinks, self.geometry.width)
        return self.exact_E2SC

    def _pool(self, sample: Tensor, held: int) -> Tensor:
        if self.tails_E2NC is None or len(self.tails_E2NC) < held:
            room = sample.new_zeros(max(8, 2 * held), 2, self.page.tokens, self.geometry.width)
            if self.tails_E2NC is not None:
                room[: len(self.tails_E2NC)] = self.tails_E2NC
            self.tails_E2NC = room
        return self.tails_E2NC

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
