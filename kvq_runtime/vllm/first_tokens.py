"""Remember which physical pages begin a sequence, and where that sequence's first tokens are kept exact.

A page that begins a sequence has an entry: an index into a pool beside the pages. Requests that share a prefix share
its first page, and so its entry; a page that vLLM keeps for a later request keeps its own. When a page is written
again, as a later part of a sequence, its entry is free: no more entries are in use than pages that begin a sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Arrived:
    """First tokens among a step's: their rows, the entry of each, and which of the first tokens each is, int64."""

    rows: Tensor
    entries: Tensor
    places: Tensor


class FirstTokens:
    """The entries of one cache. `sinks` is at most the tokens of a page."""

    def __init__(self, sinks: int, page: int):
        if sinks > page:
            raise ValueError(f"{sinks} sinks do not fit into the first page of {page} tokens; use --block-size {sinks}")
        self.sinks, self.page = sinks, page
        self.entries: dict[int, int] = {}
        self._free: list[int] = []
        self.held = 0  # entries that were ever in use at once: the size of a pool

    def step(
        self, starts: Sequence[int], counts: Sequence[int], lengths: Sequence[int], tables: Sequence[Sequence[int]]
    ) -> tuple[Arrived | None, list[int]]:
        """Take a step's requests in: what of their first tokens arrives, and the entry of each request, or -1."""
        found: list[tuple[int, int, int]] = []
        for start, count, length, table in zip(starts, counts, lengths, tables, strict=True):
            before = length - count
            for page in range(max(1, -(-before // self.page)), -(-length // self.page)):
                self._drop(table[page])
            if before < self.sinks and count:
                entry = self._entry(table[0])
                found += [(start + i - before, entry, i) for i in range(before, min(self.sinks, length))]
        arrived = Arrived(*torch.tensor(found).T) if found else None
        return arrived, [
            self.entries.get(table[0], -1) if length else -1 for table, length in zip(tables, lengths, strict=True)
        ]

    def _entry(self, page: int) -> int:
        if page not in self.entries:
            self.entries[page] = self._free.pop() if self._free else self.held
            self.held += self.entries[page] == self.held
        return self.entries[page]

    def _drop(self, page: int) -> None:
        entry = self.entries.pop(page, None)
        if entry is not None:
            self._free.append(entry)
