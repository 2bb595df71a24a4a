"""Track the tokens that are exact beside vLLM's pages: a sequence's first ones, and those of pages not yet full.

Exact tokens of a physical page lie in a pool beside the pages, under an *entry*.

First tokens: a page that begins a sequence has an entry. Requests that share a prefix share its first page and entry; a
page that vLLM keeps for a later request keeps its entry. It is freed when the page is written again as a later part of
a sequence, so there are never more entries than pages that begin a sequence.

Tails: where a code belongs to a channel of a whole page, a page is encoded when its last token arrives. Until then its
tokens, a *tail*, have an entry. A query reads the tokens of its own page exact and those of earlier pages encoded, in
whatever chunks a text arrives. A tail whose last tokens may be drafts is kept until they are accepted: its page may be
written, and encoded, again. vLLM does not report the end of a request. So a tail that was idle for some steps is
encoded as it is when another needs its entry; if its request goes on after all, the page is decoded, and its tokens are
no longer exact.

O = pages in which a step's tokens stand · N = tokens of a page.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kvq_runtime.store.storage import sent

IDLE = 8  # steps after which a tail may have to give up its entry


@dataclass
class Copies:
    """Tokens of a step that go into a pool: (entry, row in the step, place in the entry) of each.

    size   entries that were ever in use at once: the size of the pool
    """

    tokens: list[tuple[int, int, int]] = field(default_factory=list)
    size: int = 0
    _sent: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        """Return entries, rows and places on a device, int64 [3, tokens]; all layers use one copy."""
        if self._sent is None or self._sent.device != device:
            self._sent = sent(torch.tensor(self.tokens, dtype=torch.int64).view(-1, 3).T.contiguous(), device)
        return self._sent


class _Pool:
    """Entries of a pool; `size` were ever in use at once."""

    def __init__(self):
        self.size = 0
        self.free: list[int] = []

    def take(self) -> int:
        """Return an entry that is not in use."""
        if not self.free:
            self.free.append(self.size)
            self.size += 1
        return self.free.pop()


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
    ) -> tuple[Copies, list[int]]:
        """Take in a step's requests; return the first tokens that arrive, and the entry of each request, or -1."""
        copies = Copies()
        for start, count, length, table in zip(starts, counts, lengths, tables, strict=True):
            before = length - count
            for page in range(max(1, -(-before // self.page)), -(-length // self.page)):
                if table[page] in self.entries:
                    self.free.append(self.entries.pop(table[page]))
            if before < self.sinks and count:
                if table[0] not in self.entries:
                    self.entries[table[0]] = self.take()
                arriving = range(before, min(self.sinks, length))
                copies.tokens += [(self.entries[table[0]], start + place - before, place) for place in arriving]
        copies.size = self.size
        tokens = zip(tables, lengths, strict=True)  # only now: a request may share a page that another begins here
        return copies, [self.entries.get(table[0], -1) if length else -1 for table, length in tokens]


class Tail(NamedTuple):
    """An entry of the pool, its page, that page's first position in its text, and its tokens so far."""

    entry: int
    page: int
    begin: int
    filled: int


class Piece(NamedTuple):
    """Queries `start` to `stop` of a request, whose own page is the step's `own`."""

    start: int
    stop: int
    own: int


@dataclass
class TailWork:
    """The work of a layer for a step's tokens, in the order of the fields, and the pages that queries read exact.

    settled    tails that are encoded as they are, to free their entries
    reopened   tails that are decoded from their pages, each with the entry of its exact first tokens, or -1
    kept       tokens that are written to entries
    entries    of the pages O, -1: all of its tokens are the step's
    rows       of the first token of each such page in the step
    begins     positions of the pages' first tokens
    full       (index of O, physical page) of the pages that are encoded
    pieces     by request, its queries page by page
    """

    settled: list[Tail] = field(default_factory=list)
    reopened: list[tuple[Tail, int]] = field(default_factory=list)
    kept: Copies = field(default_factory=Copies)
    entries: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    full: list[tuple[int, int]] = field(default_factory=list)
    pieces: list[list[Piece]] = field(default_factory=list)


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
        """Take in a step's requests, as `attend.Batch` has them; `firsts` as its `entries`."""
        work, given_up = TailWork(), list[int]()
        self._clock += 1
        requests = list(zip(starts, counts, lengths, tables, firsts or [-1] * len(counts), strict=True))
        for _, count, length, table, _ in requests:
            for index in range(-(-(length - count) // self.page), -(-length // self.page)):
                self._drop(table[index], self.free)  # written anew
        for start, count, length, table, first in requests:
            before, pieces = length - count, list[Piece]()
            if count and before >= self.page:
                self._drop(table[before // self.page - 1], given_up)  # full, and all of it accepted
            for index in range(before // self.page, -(-length // self.page)) if count else ():
                begin = index * self.page
                arriving = range(max(before, begin), min(length, begin + self.page))
                keep = begin + self.page > length - self.drafts
                tail = self._tail(work, table[index], begin, arriving, keep, -1 if index else first)
                if tail.entry >= 0:
                    work.kept.tokens += [(tail.entry, start + n - before, n - begin) for n in arriving]
                    if keep:
                        self._of[tail.page] = tail, self._clock
                    else:
                        given_up.append(tail.entry)
                if tail.filled == self.page:
                    work.full.append((len(work.entries), tail.page))
                pieces.append(Piece(arriving.start - before, arriving.stop - before, len(work.entries)))
                work.entries.append(tail.entry)
                work.rows.append(start + arriving.start - before)
                work.begins.append(begin)
            work.pieces.append(pieces)
        self.free += given_up  # only now: this step still reads them
        work.kept.size = self.size
        return work

    def _tail(self, work: TailWork, page: int, begin: int, arriving: range, keep: bool, first: int) -> Tail:
        """Return a page's tail with the arriving positions, of entry -1 where it needs none: it arrives whole."""
        entry = -1
        if page in self._of:
            entry = self._of.pop(page)[0].entry
        elif keep or arriving.start > begin:
            entry = self._entry(work)
            if arriving.start > begin:
                work.reopened.append((Tail(entry, page, begin, arriving.start - begin), first))
        return Tail(entry, page, begin, arriving.stop - begin)

    def _entry(self, work: TailWork) -> int:
        """Return a free entry; if there is none, that of the oldest tail, if it is idle."""
        if not self.free and self._of:
            tail, used = next(iter(self._of.values()))
            if used < self._clock - IDLE:
                if tail.filled < self.page:
                    work.settled.append(tail)
                del self._of[tail.page]
                return tail.entry
        return self.take()

    def _drop(self, page: int, free: list[int]) -> None:
        if page in self._of:
            free.append(self._of.pop(page)[0].entry)
