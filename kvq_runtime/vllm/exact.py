"""Remember where tokens are exact beside vLLM's pages: the first ones of a sequence, and those of pages not yet full.

What is exact of a physical page lies in a pool beside the pages, under an *entry*.

First tokens: a page that begins a sequence has an entry. Requests that share a prefix share its first page, and so its
entry; a page that vLLM keeps for a later request keeps its own. When a page is written again, as a later part of a
sequence, its entry is free: no more entries are in use than pages that begin a sequence.

Tails: where a code belongs to a channel of a whole page, a page is encoded when its last token arrives. Until then its
tokens, a *tail*, have an entry. A query reads the tokens of its own page exact and those of earlier pages encoded, in
whatever chunks a text arrives. A tail whose last tokens may be drafts is kept until they are accepted: its page may be
written, and encoded, again. vLLM does not tell when a request ends. So a tail that no step has touched for some time
gives its entry to another one, and is encoded as it is; if its request goes on after all, the page is decoded, and its
tokens are no longer exact.

O = pages in which a step's tokens stand · N = tokens of a page.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kvq_runtime.store.storage import sent

IDLE = 8  # steps after which a tail may have to give up its entry


class _Pool:
    """Entries of a pool; `held` were ever in use at once, which is its size."""

    def __init__(self):
        self.held = 0
        self.free: list[int] = []

    def take(self) -> int:
        """Return an entry that is not in use."""
        if not self.free:
            self.free.append(self.held)
            self.held += 1
        return self.free.pop()


@dataclass(frozen=True)
class Arrived:
    """First tokens among a step's: their rows, the entry of each, and which of the first tokens each is, int64.

    held   entries that were ever in use at once: the size of a pool
    """

    rows: Tensor
    entries: Tensor
    places: Tensor
    held: int


class FirstTokens(_Pool):
    """The entries of one cache's first tokens. `sinks` is at most the tokens of a page."""

    def __init__(self, sinks: int, page: int):
        if sinks > page:
            raise ValueError(f"{sinks} sinks do not fit into the first page of {page} tokens; use --block-size {sinks}")
        super().__init__()
        self.sinks, self.page = sinks, page
        self.entries: dict[int, int] = {}

    def step(
        self, starts: Sequence[int], counts: Sequence[int], lengths: Sequence[int], tables: Sequence[Sequence[int]]
    ) -> tuple[Arrived | None, list[int]]:
        """Take a step's requests in: what of their first tokens arrives, and the entry of each request, or -1."""
        found: list[tuple[int, int, int]] = []
        for start, count, length, table in zip(starts, counts, lengths, tables, strict=True):
            before = length - count
            for page in range(max(1, -(-before // self.page)), -(-length // self.page)):
                if table[page] in self.entries:
                    self.free.append(self.entries.pop(table[page]))
            if before < self.sinks and count:
                if table[0] not in self.entries:
                    self.entries[table[0]] = self.take()
                entry = self.entries[table[0]]
                found += [(start + i - before, entry, i) for i in range(before, min(self.sinks, length))]
        arrived = None
        if found:
            rows, entries, places = torch.tensor(found).T
            arrived = Arrived(rows, entries, places, self.held)
        return arrived, [
            self.entries.get(table[0], -1) if length else -1 for table, length in zip(tables, lengths, strict=True)
        ]


class Tail(NamedTuple):
    """An entry of the pool, the page it is for, that page's first position in its text, and its tokens so far."""

    entry: int
    page: int
    begin: int
    filled: int


class Reopened(NamedTuple):
    """A tail that is decoded from its page, and the entry of that page's exact first tokens, or -1."""

    tail: Tail
    first: int


class Piece(NamedTuple):
    """Queries of a request, from its `start` to its `stop` in this step, whose own page is the step's `own`."""

    start: int
    stop: int
    own: int


@dataclass
class TailWork:
    """The work of a layer for a step's tokens, in the order of the fields, and the pages that queries read exact.

    settled    tails that are encoded as they are, to free their entries
    reopened   pages that are decoded into entries, but for first tokens that are exact elsewhere
    entries    of the pages O, -1: all its tokens are the step's
    rows       of the step's tokens, by place in a page, -1: the token is in the entry, or has not come, int64 [O, N]
    begins     positions of the pages' first tokens
    full       (index of O, physical page) of the pages that are encoded
    kept       (entry, row in the step, place in the page) of tokens that are written to entries
    pieces     by request, its queries page by page
    held       entries that were ever in use at once: the size of a pool
    """

    settled: list[Tail] = field(default_factory=list)
    reopened: list[Reopened] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    full: list[tuple[int, int]] = field(default_factory=list)
    kept: list[tuple[int, int, int]] = field(default_factory=list)
    pieces: list[list[Piece]] = field(default_factory=list)
    held: int = 0
    _written: Tensor | None = None

    def written(self, device: torch.device) -> Tensor:
        """Entries, rows and places of `kept`, int64 [3, tokens]; all layers use one copy on the device."""
        if self._written is None or self._written.device != device:
            self._written = sent(torch.tensor(self.kept, dtype=torch.int64).view(-1, 3).T.contiguous(), device)
        return self._written


class Tails(_Pool):
    """The tails of one cache.

    page     tokens of a page
    drafts   how many of a step's last tokens may be refused
    """

    def __init__(self, page: int, drafts: int = 0):
        super().__init__()
        self.page, self.drafts = page, drafts
        self._of: dict[int, tuple[Tail, int]] = {}  # by physical page, with the step of its use, the oldest first
        self._clock = 0

    def step(
        self,
        starts: Sequence[int],
        counts: Sequence[int],
        lengths: Sequence[int],
        tables: Sequence[Sequence[int]],
        firsts: Sequence[int] | None = None,
    ) -> TailWork:
        """Take a step's requests in, as `attend.Batch` has them; `firsts` as its `entries`."""
        made, given_up = TailWork(), list[int]()
        self._clock += 1
        firsts = [-1] * len(counts) if firsts is None else firsts
        requests = list(zip(starts, counts, lengths, tables, firsts, strict=True))
        for _, count, length, table, _ in requests:
            for index in range(-(-(length - count) // self.page), -(-length // self.page)):
                self._drop(table[index], self.free)  # what it was of is gone
        for start, count, length, table, first in requests:
            before, pieces = length - count, list[Piece]()
            if count and before >= self.page:
                self._drop(table[before // self.page - 1], given_up)  # full, and all of it accepted
            for index in range(before // self.page, -(-length // self.page)) if count else ():
                exact = -1 if index else first
                pieces.append(self._own(made, start, before, length, index * self.page, table[index], exact, given_up))
            made.pieces.append(pieces)
        self.free += given_up  # only now: this step still reads them
        made.held = self.held
        return made

    def _own(
        self, made: TailWork, start: int, before: int, length: int, begin: int, page: int, exact: int,
        given_up: list[int],
    ) -> Piece:  # fmt: skip
        """Take in what arrives of one page, whose first tokens may be exact in an entry."""
        first, stop = max(before, begin), min(length, begin + self.page)
        keep = begin + self.page > length - self.drafts
        entry, own = -1, len(made.entries)
        if page in self._of:
            entry = self._of.pop(page)[0].entry
        elif keep or first > begin:
            entry = self._entry(made)
            if first > begin:
                made.reopened.append(Reopened(Tail(entry, page, begin, first - begin), exact))
        rows, places = range(start + first - before, start + stop - before), range(first - begin, stop - begin)
        rows_N = torch.full((self.page,), -1)
        rows_N[places.start : places.stop] = torch.arange(rows.start, rows.stop)
        made.rows.append(rows_N)
        made.entries.append(entry)
        made.begins.append(begin)
        if stop == begin + self.page:
            made.full.append((own, page))
        if entry >= 0:
            made.kept += [(entry, row, place) for row, place in zip(rows, places, strict=True)]
            if keep:
                self._of[page] = Tail(entry, page, begin, stop - begin), self._clock
            else:
                given_up.append(entry)
        return Piece(first - before, stop - before, own)

    def _entry(self, made: TailWork) -> int:
        """A free entry; where there is none that of the oldest tail, if no step has touched it for long."""
        if not self.free and self._of:
            tail, used = next(iter(self._of.values()))
            if used < self._clock - IDLE:
                if tail.filled < self.page:
                    made.settled.append(tail)
                del self._of[tail.page]
                return tail.entry
        return self.take()

    def _drop(self, page: int, free: list[int]) -> None:
        if page in self._of:
            free.append(self._of.pop(page)[0].entry)
