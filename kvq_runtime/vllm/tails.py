"""Remember which physical pages are not full, and where their tokens are kept exact until they are.

Where a code belongs to a channel of a whole page, a page is encoded when its last token arrives. Until then its tokens,
a *tail*, lie in a pool beside the pages, under an entry. A query reads the tokens of its own page exact and those of
earlier pages encoded, in whatever chunks a text arrives. A tail whose last tokens may be drafts is kept until they are
accepted: its page may be written, and encoded, again.

vLLM does not tell when a request ends. So a tail that no step has touched for some time gives its entry to another one,
and is encoded as it is; if its request goes on after all, the page is decoded, and its tokens are no longer exact.

O = pages in which a step's tokens stand · N = tokens of a page.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kvq_runtime.store.device import sent

IDLE = 8  # steps after which a tail may have to give up its entry


class Place(NamedTuple):
    """An entry of the pool, the page it is for, that page's first position in its text, and its tokens so far."""

    entry: int
    page: int
    begin: int
    filled: int


class Piece(NamedTuple):
    """Queries of a request, from its `start` to its `stop` in this step, whose own page is the step's `own`."""

    start: int
    stop: int
    own: int


class Kept(NamedTuple):
    """Tokens of a step that become part of a tail: its entry, their rows in the step, their places in the page."""

    entry: int
    rows: slice
    places: slice


@dataclass
class Step:
    """The work of a layer for a step's tokens, in the order of the fields, and the pages that queries read exact.

    settled    tails that are encoded as they are, to free their entries
    reopened   pages that are decoded into entries
    entries    of the pages O, -1: all its tokens are the step's
    rows       of the step's tokens, by place in a page, -1: the token is in the entry, or has not come, int64 [O, N]
    begins     positions of the pages' first tokens
    full       (index of O, physical page) of the pages that are encoded
    kept       tokens that are written to entries
    last       those that would be, but that their pages are full, and their entries free after this step
    pieces     by request, its queries page by page
    held       entries that were ever in use at once: the size of a pool
    """

    settled: list[Place] = field(default_factory=list)
    reopened: list[Place] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    full: list[tuple[int, int]] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    last: list[Kept] = field(default_factory=list)
    pieces: list[list[Piece]] = field(default_factory=list)
    held: int = 0
    _written: tuple[Tensor, Tensor, Tensor] | None = None

    def written(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Entries, rows in the step and places in the page of all tokens that are kept, or the last: int64 each.

        All layers use one copy on the device.
        """
        if self._written is None or self._written[0].device != device:
            entries, rows, places = sent(torch.stack(self._listed()), device)
            self._written = entries, rows, places
        return self._written

    def _listed(self) -> tuple[Tensor, Tensor, Tensor]:
        every = [*self.kept, *self.last]
        counts = torch.tensor([each.rows.stop - each.rows.start for each in every], dtype=torch.int64)
        entries = torch.tensor([each.entry for each in every], dtype=torch.int64).repeat_interleave(counts)
        none = torch.empty(0, dtype=torch.int64)
        rows, places = (
            torch.cat([none, *(torch.arange(part.start, part.stop) for part in parts)])
            for parts in ([each.rows for each in every], [each.places for each in every])
        )
        return entries, rows, places


@dataclass
class _Tail:
    entry: int
    begin: int
    filled: int
    used: int


class Tails:
    """The tails of one cache.

    page     tokens of a page
    drafts   how many of a step's last tokens may be refused
    """

    def __init__(self, page: int, drafts: int = 0):
        self.page, self.drafts = page, drafts
        self.held = 0
        self._of: dict[int, _Tail] = {}  # by physical page, least recently used first
        self._free: list[int] = []
        self._clock = 0

    def step(
        self, starts: Sequence[int], counts: Sequence[int], lengths: Sequence[int], tables: Sequence[Sequence[int]]
    ) -> Step:
        """Take a step's requests in, as `attend.Batch` has them."""
        made, given_up = Step(), list[int]()
        self._clock += 1
        requests = list(zip(starts, counts, lengths, tables, strict=True))
        for _, count, length, table in requests:
            for index in range(-(-(length - count) // self.page), -(-length // self.page)):
                self._drop(table[index], self._free)  # what it was of is gone
        for start, count, length, table in requests:
            before, pieces = length - count, list[Piece]()
            if count and before >= self.page:
                self._drop(table[before // self.page - 1], given_up)  # full, and all of it accepted
            for index in range(before // self.page, -(-length // self.page)) if count else ():
                pieces.append(self._own(made, start, before, length, index * self.page, table[index], given_up))
            made.pieces.append(pieces)
        self._free += given_up  # only now: this step still reads them
        made.held = self.held
        return made

    def _own(
        self, made: Step, start: int, before: int, length: int, begin: int, page: int, given_up: list[int]
    ) -> Piece:
        """Take in what arrives of one page."""
        first, stop = max(before, begin), min(length, begin + self.page)
        keep = begin + self.page > length - self.drafts
        if page not in self._of and (keep or first > begin):
            self._of[page] = _Tail(self._entry(made), begin, first - begin, self._clock)
            if first > begin:
                made.reopened.append(Place(self._of[page].entry, page, begin, first - begin))
        tail = self._of.pop(page, None)
        own, places = len(made.entries), slice(first - begin, stop - begin)
        rows_N = torch.full((self.page,), -1)
        rows_N[places] = torch.arange(start + first - before, start + stop - before)
        made.rows.append(rows_N)
        made.entries.append(-1 if tail is None else tail.entry)
        made.begins.append(begin)
        if stop == begin + self.page:
            made.full.append((own, page))
        if tail is not None:
            kept = Kept(tail.entry, slice(start + first - before, start + stop - before), places)
            (made.kept if keep else made.last).append(kept)
        if tail is not None and keep:
            self._of[page] = _Tail(tail.entry, begin, stop - begin, self._clock)
        elif tail is not None:
            given_up.append(tail.entry)
        return Piece(first - before, stop - before, own)

    def _entry(self, made: Step) -> int:
        if not self._free:
            page, tail = next(iter(self._of.items()), (-1, None))
            if tail is not None and tail.used < self._clock - IDLE:
                if tail.filled < self.page:
                    made.settled.append(Place(tail.entry, page, tail.begin, tail.filled))
                del self._of[page]
                return tail.entry
            self._free.append(self.held)
            self.held += 1
        return self._free.pop()

    def _drop(self, page: int, free: list[int]) -> None:
        tail = self._of.pop(page, None)
        if tail is not None:
            free.append(tail.entry)
