"""Write tokens of one attention layer into pages that are encoded whole, once they are full; see `tails.py`.

Shapes: T tokens of a step · P pages, of N tokens each · O pages in which the step's tokens stand · E entries of the
pool.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.geometry import ROLES, Role
from kvq_runtime.vllm.layer import PagedLayer
from kvq_runtime.vllm.tails import Step


class BlockLayer(PagedLayer):
    """The keys and values of one layer in vLLM's pages, each one block, and its tails, exact."""

    def __init__(self, *settings: Any):
        super().__init__(*settings)
        self.tails_E2NC: Tensor | None = None
        self._own: dict[Role, Tensor] = {}

    def take(self, pair: Mapping[Role, Tensor], step: Step) -> None:
        """Take in the tokens [T, C] of a step: encode the pages that are full, keep the others' tokens."""
        tails_E2NC = self._pool(pair["key"], step.held)
        for entry, page, begin, filled in step.settled:
            x_2PNC = tails_E2NC[entry][:, None]
            self._encode(dict(zip(ROLES, x_2PNC, strict=True)), [page], [begin], filled)
        for entry, page, begin, filled in step.reopened:
            positions_1N = begin + torch.arange(self.page.tokens, device=tails_E2NC.device)[None]
            for index, role in enumerate(ROLES):
                fields = {name: view[page : page + 1] for name, view in self._views[role].items()}
                x_NC = self._decode(role, fields, positions_1N)[0]
                tails_E2NC[entry, index, :filled] = x_NC[:filled].to(tails_E2NC.dtype)
        self._own = self._gather(pair, step, tails_E2NC)
        if step.full:
            which, pages = (list(x) for x in zip(*step.full, strict=True))
            self._encode(
                {role: x[which] for role, x in self._own.items()}, pages, [step.begins[i] for i in which],
                self.page.tokens,
            )  # fmt: skip
        for entry, rows, places in step.kept:
            for index, role in enumerate(ROLES):
                tails_E2NC[entry, index, places] = pair[role][rows]

    def own(self, role: Role, which: Sequence[int]) -> Tensor:
        """Pages of the step's queries, by index of O, exact: [Y, N, D], float32; zeros where no token has come."""
        return self._by_head(self._own[role][list(which)])

    def _pool(self, sample: Tensor, held: int) -> Tensor:
        if self.tails_E2NC is None or len(self.tails_E2NC) < held:
            room = sample.new_zeros(max(8, 2 * held), 2, self.page.tokens, self.geometry.width)
            if self.tails_E2NC is not None:
                room[: len(self.tails_E2NC)] = self.tails_E2NC
            self.tails_E2NC = room
        return self.tails_E2NC

    def _gather(self, pair: Mapping[Role, Tensor], step: Step, tails_E2NC: Tensor) -> dict[Role, Tensor]:
        """The tokens of the step's pages, [O, N, C] each, in the model's dtype."""
        device = tails_E2NC.device
        rows_ON, entries_O = torch.stack(step.rows).to(device), torch.tensor(step.entries, device=device)
        kept_O1 = (entries_O >= 0)[:, None, None]
        found: dict[Role, Tensor] = {}
        for index, role in enumerate(ROLES):
            x_ONC = tails_E2NC[entries_O.clamp(min=0), index].where(kept_O1, 0)
            found[role] = pair[role][rows_ON.clamp(min=0)].where((rows_ON >= 0)[..., None], x_ONC)
        return found

    def _encode(self, pair: Mapping[Role, Tensor], pages: Sequence[int], begins: Sequence[int], filled: int) -> None:
        """Encode pages [P, N, C]; first tokens, which stay exact elsewhere, and what has not come as the nearest."""
        device = pair["key"].device
        pages_P, begins_P1 = torch.tensor(pages, device=device), torch.tensor(begins, device=device)[:, None]
        places_N = torch.arange(self.page.tokens, device=device)
        skipped_P1 = torch.where(begins_P1 == 0, min(self.sinks, filled - 1), 0)
        source_PN = places_N.clamp(max=filled - 1).maximum(skipped_P1)
        for role, encoded in self._encoded(pair, begins_P1 + places_N, source_PN).items():
            for name, view in self._views[role].items():
                view[pages_P] = encoded[name].to(view.dtype)
