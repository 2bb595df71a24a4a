"""Divide a corpus into a part to fit on and a held-out part that shares no document, and next to no text, with it.

A document is held out if a hash of its content, the same for every seed and every corpus it stands in, is among the
lowest tenth. So a text that two files share is on the same side in both. Documents may still repeat passages of each
other: held-out ones that repeat text of the fit are passed over, and the fit part is the same with and without that.

What is compared are runs of `RUN` bytes of UTF-8, white space collapsed to single spaces: some ten words, 16 to 32
tokens, and the same whatever the tokenizer, line width or indentation. A text's share is the part of its runs that
stand somewhere in the other text; one shorter than a run has none, and shares nothing.

Runs are known by 64-bit hashes. Those of the texts in question are kept, in groups of `GROUP` characters or one
document, with a table of 16 MiB in front of them: some 150 MiB in all. The other text is read once for each group, a
document at a time, `PIECE` bytes at once, so that memory does not grow with the corpus. That any run of a group is
taken for another by chance has a probability of 1 in 1,000 when it is held against four billion runs.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np

from kvq_calib.text import documents as sources
from kvq_calib.text.documents import Documents

HELD_OUT = 0.1
PASSAGE = 32768  # characters: what a single long document is cut into
RUN = 64  # bytes; a power of 2
LIMIT = 0.05  # a held-out document that shares more of its runs with the fit part is dropped
PIECE = 1 << 20  # bytes that are hashed at once
GROUP = 1 << 22  # characters of held-out documents that are looked up together; rarely more are measured on
_FILTER = 1 << 24

_BYTES = np.random.Generator(np.random.PCG64(0)).integers(0, 1 << 64, 256, dtype=np.uint64)
_BASE = 0x9E3779B97F4A7C15

Split = Literal["fit", "held-out", "all"]


def part(corpus: Documents, split: Split) -> Documents:
    """The documents of one part, each text once. A single document is cut: its last tenth is held out."""
    first = {id: place for place, id in reversed(list(enumerate(corpus.ids)))}
    if split not in ("fit", "held-out", "all"):
        raise ValueError(f'split={split!r}; use "fit", "held-out" or "all"')
    if len(first) == 1:
        return sources.of(corpus.name, _passages(corpus.texts[0], split))
    held = set[str]() if split == "all" else _held_out(list(first))
    kept = sorted(place for id, place in first.items() if split == "all" or (id in held) == (split == "held-out"))
    return Documents(corpus.name, _Chosen(corpus.texts, kept), [corpus.ids[place] for place in kept])


def _held_out(ids: list[str]) -> set[str]:
    """The ids below the bound; of few documents at least one, and never all."""
    marks = {id: mark("held-out", id) / 2**64 for id in ids}
    lowest = min(marks, key=marks.__getitem__)
    held = {id for id, place in marks.items() if place <= HELD_OUT} | {lowest}
    return held if len(held) < len(ids) else {lowest}


@dataclass(frozen=True)
class _Chosen:
    texts: Any
    places: list[int]

    def __getitem__(self, index: int) -> str:
        return self.texts[self.places[index]] or ""

    def __len__(self) -> int:
        return len(self.places)


def _passages(text: str, split: Split) -> list[str]:
    """Cut a text at line ends, and its end off as the held-out part."""
    border = _line_end(text, int(len(text) * (1 - HELD_OUT)))
    text = {"fit": text[:border], "held-out": text[border:], "all": text}[split]
    cuts = [0]
    while len(text) - cuts[-1] > 1.5 * PASSAGE:
        cuts.append(_line_end(text, cuts[-1] + PASSAGE))
    return [text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True) if text[start:end].strip()]


def _line_end(text: str, near: int) -> int:
    """The place after the first line end at or after `near`, if there is one soon."""
    found = text.find("\n", near, near + PASSAGE // 4)
    return near if found < 0 else found + 1


def mark(*words: str) -> int:
    """64 bits of sha256 over words."""
    return int.from_bytes(hashlib.sha256("\0".join(words).encode()).digest()[:8], "big")


def shares(texts: Sequence[str], others: Iterable[str]) -> list[float]:
    """Return the share of each text's runs, 0 to 1, that `others` have; they are read once, in any order."""
    own = [np.concatenate([*runs(text), np.empty(0, np.uint64)]) for text in texts]
    known = np.unique(np.concatenate([*own, np.empty(0, np.uint64)]))
    found = np.zeros(len(known), bool)
    maybe = np.zeros(_FILTER, bool)
    maybe[known & np.uint64(_FILTER - 1)] = True
    for hashes in chain.from_iterable(map(runs, others)) if len(known) else ():
        hashes = hashes[maybe[hashes & np.uint64(_FILTER - 1)]]
        places = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
        found[places[known[places] == hashes]] = True
    return [float(found[np.searchsorted(known, hashes)].mean()) if len(hashes) else 0.0 for hashes in own]


def runs(text: str) -> Iterator[np.ndarray]:
    """The hashes of all runs of a text, in order: Σ_i byte_i · base^(RUN - 1 - i) mod 2^64, by doubling the length."""
    data = np.frombuffer(" ".join(text.split()).encode("utf-8", "replace"), np.uint8)
    for start in range(0, len(data) - RUN + 1, PIECE):
        hashes, power, length = _BYTES[data[start : start + PIECE + RUN - 1]], _BASE, 1
        while length < RUN:
            hashes = hashes[:-length] * np.uint64(power) + hashes[length:]
            power, length = power * power % 2**64, 2 * length
        yield hashes


class Unseen:
    """Leave out the documents that repeat too much of the parts of corpora that are fitted on.

    texts     of the documents, read by index
    fits      the corpora's fit parts; none: no document is left out
    dropped   places of the documents left out since `among` was last called
    """

    def __init__(self, texts: Sequence[str] | Any, fits: Sequence[Documents]):
        self.texts, self.fits = texts, fits
        self.dropped: list[int] = []
        self._shares: dict[int, float] = {}

    def among(self, places: Iterable[int]) -> Iterator[int]:
        """The documents at these places that may be measured on, in their order."""
        self.dropped = []
        if not self.fits:
            yield from places
            return
        for group in self._groups(places):
            left = [place for place in group if place not in self._shares]
            found = shares([self.texts[place] for place in left], self._fitted())
            self._shares |= dict(zip(left, found, strict=True))
            for place in group:
                if self._shares[place] > LIMIT:
                    self.dropped.append(place)
                else:
                    yield place

    def left(self, texts: Sequence[str]) -> float:
        """Return the share of all the texts' runs that is fitted on."""
        sizes = [sum(map(len, runs(text))) for text in texts]
        found = shares(texts, self._fitted())
        return sum(size * share for size, share in zip(sizes, found, strict=True)) / max(1, sum(sizes))

    def _fitted(self) -> Iterator[str]:
        return chain.from_iterable(fit.texts for fit in self.fits)

    def _groups(self, places: Iterable[int]) -> Iterator[list[int]]:
        group, size = [], 0
        for place in places:
            group.append(place)
            size += len(self.texts[place])
            if size >= GROUP:
                yield group
                group, size = [], 0
        if group:
            yield group
