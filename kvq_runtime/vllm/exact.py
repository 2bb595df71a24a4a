"""Track the tokens that are exact beside vLLM's pages: a sequence's first ones, and those of pages not yet full.

Exact tokens of a physical page lie in a pool beside the pages, under an *entry*.

First tokens: a page that begins a sequence has an entry. Requests that share a prefix share its first page and entry; a
page that vLLM keeps for a later request keeps its entry. It is freed when the page is written again as a later part of
a sequence, so there are never more entries than pages that begin a sequence.

Tails: a page is encoded when its last token arrives. Until then its tokens, a *tail*, have an entry. A query reads the
tokens of its own page exact and those of earlier pages encoded, in whatever chunks a text arrives. A tail whose last
tokens may be drafts is kept until they are accepted: its page may be written, and encoded, again. vLLM does not report
the end of a request. So a tail that was idle for some steps is encoded as it is when another needs its entry; if its
request goes on after all, the page is decoded, and its tokens are no longer exact.

N = tokens of a page.
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


class Tail(NamedTuple):
    """An entry of the pool, its page, that page's first position in its text, and its tokens so far."""

    entry: int
    page: int
    begin: int
    filled: int


class Piece(NamedTuple):
    """Queries `start` to `stop` of a request, which stand in one page.

    row    of the first of them in the step
    tail   the page with these tokens; its entry is -1 where all of the page's tokens are the step's
    """

    start: int
    stop: int
    row: int
    tail: Tail


@dataclass
class ExactStep:
    """The work of a layer for a step's tokens, in the order of the fields, and the pages that queries read exact.

    firsts     entry of the first tokens of each request, or -1
    arrived    first tokens that are written to these entries
    settled    tails that are encoded as they are, to free their entries
    reopened   tails that are decoded from their pages, each with the entry of its exact first tokens, or -1
    opened     pages that have a tail anew, which are stamped
    kept       tokens that are written to entries of tails
    full       pieces that fill their pages, which are encoded
    pieces     by request, its queries page by page
    """

    firsts: list[int] = field(default_factory=list)
    arrived: Copies = field(default_factory=Copies)
    settled: list[Tail] = field(default_factory=list)
    reopened: list[tuple[Tail, int]] = field(default_factory=list)
    opened: list[int] = field(default_factory=list)
    kept: Copies = field(default_factory=Copies)
    full: list[Piece] = field(default_factory=list)
    pieces: list[list[Piece]] = field(default_factory=list)


class _Pool:
    """A pool's entries, of which `size` were ever in use at once."""

    def __init__(self):
        self.size = 0
        self.free: list[int] = []

    def take(self) -> int:
        """Return an entry that is not in use."""
        if not self.free:
            self.free.append(self.size)
            self.size += 1
        return self.free.pop()


class ExactTokens:
    """The exact tokens of one cache's requests.

    page     tokens of a page
    sinks    first tokens of a sequence that are kept exact, at most a page
    drafts   how many of a step's last tokens may be refused
    """

    def __init__(self, page: int, sinks: int, drafts: int = 0):
        if sinks > page:
            raise ValueError(f"{sinks} sinks do not fit into the first page of {page} tokens; use --block-size {sinks}")
        self.page, self.sinks, self.drafts = page, sinks, drafts
        self.firsts, self.tails = _Pool(), _Pool()
        self._firsts: dict[int, int] = {}  # entries by physical page
        self._tails: dict[int, tuple[Tail, int]] = {}  # by physical page, with the step of its use, the oldest first
        self._clock = 0

    def step(
        self, starts: Sequence[int], counts: Sequence[int], lengths: Sequence[int], tables: Sequence[Sequence[int]]
    ) -> ExactStep:
        """Take in a step's requests, as `attend.Batch` has them."""
        step = ExactStep()
        self._clock += 1
        requests = list(zip(starts, counts, lengths, tables, strict=True))
        for _, count, length, table in requests:
            for index in range(-(-(length - count) // self.page), -(-length // self.page)):  # pages written anew
                self._drop(table[index], self.tails.free)
                if index and table[index] in self._firsts:
                    self.firsts.free.append(self._firsts.pop(table[index]))
        for start, count, length, table in requests:
            before = length - count
            if count and before < self.sinks:
                if table[0] not in self._firsts:
                    self._firsts[table[0]] = self.firsts.take()
                entry, arriving = self._firsts[table[0]], range(before, min(self.sinks, length))
                step.arrived.tokens += [(entry, start + place - before, place) for place in arriving]
        # only now: a request may share a page that another begins in this step
        step.firsts = [self._firsts.get(table[0], -1) if length else -1 for _, _, length, table in requests]
        self._add_tails(step, requests)
        step.arrived.size, step.kept.size = self.firsts.size, self.tails.size
        return step

    def _add_tails(self, step: ExactStep, requests: list[tuple[int, int, int, Sequence[int]]]) -> None:
        given_up = list[int]()
        for (start, count, length, table), first in zip(requests, step.firsts, strict=True):
            before, pieces = length - count, list[Piece]()
            if count and before >= self.page:
                self._drop(table[before // self.page - 1], given_up)  # full, and all of it accepted
            for index in range(before // self.page, -(-length // self.page)) if count else ():
                begin = index * self.page
                arriving = range(max(before, begin), min(length, begin + self.page))
                keep = begin + self.page > length - self.drafts
                tail = self._tail(step, table[index], begin, arriving, keep, -1 if index else first)
                if tail.entry >= 0:
                    step.kept.tokens += [(tail.entry, start + n - before, n - begin) for n in arriving]
                    if keep:
                        self._tails[tail.page] = tail, self._clock
                    else:
                        given_up.append(tail.entry)
                first_query = arriving.start - before
                pieces.append(Piece(first_query, arriving.stop - before, start + first_query, tail))
            step.full += [piece for piece in pieces if piece.tail.filled == self.page]
            step.pieces.append(pieces)
        self.tails.free += given_up  # only now: this step still reads them

    def _tail(self, step: ExactStep, page: int, begin: int, arriving: range, keep: bool, first: int) -> Tail:
        """Return a page's tail with the arriving positions, of entry -1 where it needs none: it arrives whole."""
        filled, before = arriving.stop - begin, Tail(-1, page, begin, self.page)
        if page in self._tails:
            before = self._tails.pop(page)[0]
        elif keep or arriving.start > begin:
            before = before._replace(entry=self._entry(step))
            if arriving.start > begin:
                step.reopened.append((before._replace(filled=arriving.start - begin), first))
        if filled < before.filled == self.page:
            step.opened.append(page)
        return before._replace(filled=filled)

    def _entry(self, step: ExactStep) -> int:
        """Return a free entry of the tails; if there is none, that of the oldest tail, if it is idle."""
        if not self.tails.free and self._tails:
            tail, used = next(iter(self._tails.values()))
            if used < self._clock - IDLE:
                if tail.filled < self.page:
                    step.settled.append(tail)
                del self._tails[tail.page]
                return tail.entry
        return self.tails.take()

    def _drop(self, page: int, free: list[int]) -> None:
        if page in self._tails:
            free.append(self._tails.pop(page)[0].entry)
