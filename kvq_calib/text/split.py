"""Split a corpus into a fit part and a held-out part without common documents and with next to no common text.

A document is held out if the hash of its content is among the lowest tenth: for every seed, and in every corpus. So a
text in two files is on the same side in both. Held-out documents that repeat passages of the fit part are dropped; the
fit part does not depend on that.

Texts are compared by runs of `RUN` bytes of UTF-8, white space collapsed to single spaces: some ten words, 16 to 32
tokens, for every tokenizer, line width or indentation. The share of a text is the fraction of its runs that occur in
the other text; a text shorter than a run has share 0.

Runs are compared by 64-bit hashes. The hashes of held-out documents are kept, in groups of `GROUP` characters or one
document, behind a filter of 16 MiB: some 150 MiB in all. The other text is read once for each group, a document at a
time, `PIECE` bytes at once, so that memory does not grow with the corpus. Against four billion runs, the probability of
a false match in a group is 1 in 1,000.
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

Split = Literal["fit", "held-out"]


def part(corpus: Documents, split: Split) -> Documents:
    """Select the documents of one part, each text once. A single document is cut: its last tenth is held out."""
    if split not in ("fit", "held-out"):
        raise ValueError(f'split={split!r}; use "fit" or "held-out"')
    first = {id: index for index, id in reversed(list(enumerate(corpus.ids)))}
    if len(first) == 1:
        return sources.of(corpus.name, _passages(corpus.texts[0], split))
    held_out = _held_out(list(first))
    selected = sorted(index for id, index in first.items() if (id in held_out) == (split == "held-out"))
    return Documents(corpus.name, _Selection(corpus.texts, selected), [corpus.ids[index] for index in selected])


def _held_out(ids: list[str]) -> set[str]:
    """Select the ids below the bound: at least one, and never all."""
    marks = {id: mark("held-out", id) / 2**64 for id in ids}
    lowest = min(marks, key=marks.__getitem__)
    selected = {id for id, fraction in marks.items() if fraction <= HELD_OUT} | {lowest}
    return selected if len(selected) < len(ids) else {lowest}


@dataclass(frozen=True)
class _Selection:
    """Some texts of a sequence, read lazily."""

    texts: Any
    indices: list[int]

    def __getitem__(self, index: int) -> str:
        return self.texts[self.indices[index]] or ""

    def __len__(self) -> int:
        return len(self.indices)


def _passages(text: str, split: Split) -> list[str]:
    """Cut a text at line ends, and its end off as the held-out part."""
    border = _line_end(text, int(len(text) * (1 - HELD_OUT)))
    text = text[:border] if split == "fit" else text[border:]
    cuts = [0]
    while len(text) - cuts[-1] > 1.5 * PASSAGE:
        cuts.append(_line_end(text, cuts[-1] + PASSAGE))
    return [text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True) if text[start:end].strip()]


def _line_end(text: str, near: int) -> int:
    """Return the position after the first line end at or after `near`; `near` if there is none soon."""
    end = text.find("\n", near, near + PASSAGE // 4)
    return near if end < 0 else end + 1


def mark(*words: str) -> int:
    """Return 64 bits of the sha256 of words."""
    return int.from_bytes(hashlib.sha256("\0".join(words).encode()).digest()[:8], "big")


def shares(texts: Sequence[str], others: Iterable[str]) -> list[float]:
    """Return the share of each text's runs, 0 to 1, that occur in `others`, which are read once, in any order."""
    by_text = [np.concatenate([*runs(text), np.empty(0, np.uint64)]) for text in texts]
    unique = np.unique(np.concatenate([*by_text, np.empty(0, np.uint64)]))
    occurs = np.zeros(len(unique), bool)
    candidates = np.zeros(_FILTER, bool)
    candidates[unique & np.uint64(_FILTER - 1)] = True
    for hashes in chain.from_iterable(map(runs, others)) if len(unique) else ():
        hashes = hashes[candidates[hashes & np.uint64(_FILTER - 1)]]
        indices = np.minimum(np.searchsorted(unique, hashes), len(unique) - 1)
        occurs[indices[unique[indices] == hashes]] = True
    return [float(occurs[np.searchsorted(unique, hashes)].mean()) if len(hashes) else 0.0 for hashes in by_text]


def runs(text: str) -> Iterator[np.ndarray]:
    """Yield the hashes of a text's runs, in order: Σ_i byte_i · base^(RUN - 1 - i) mod 2^64, by doubling the length."""
    data = np.frombuffer(" ".join(text.split()).encode("utf-8", "replace"), np.uint8)
    for start in range(0, len(data) - RUN + 1, PIECE):
        hashes, power, length = _BYTES[data[start : start + PIECE + RUN - 1]], _BASE, 1
        while length < RUN:
            hashes = hashes[:-length] * np.uint64(power) + hashes[length:]
            power, length = power * power % 2**64, 2 * length
        yield hashes


class Unseen:
    """The documents that repeat little of the fit parts.

    texts     of all documents, read by index
    fits      the fit parts; none: no document is dropped
    dropped   indices of the documents dropped since the last call of `among`
    """

    def __init__(self, texts: Sequence[str] | Any, fits: Sequence[Documents]):
        self.texts, self.fits = texts, fits
        self.dropped: list[int] = []
        self._shares: dict[int, float] = {}

    def among(self, indices: Iterable[int]) -> Iterator[int]:
        """Yield the indices of documents with a share of at most LIMIT, in order."""
        self.dropped = []
        if not self.fits:
            yield from indices
            return
        for group in self._groups(indices):
            new = [index for index in group if index not in self._shares]
            measured = shares([self.texts[index] for index in new], self._fit_texts())
            self._shares |= dict(zip(new, measured, strict=True))
            for index in group:
                if self._shares[index] > LIMIT:
                    self.dropped.append(index)
                else:
                    yield index

    def left(self, texts: Sequence[str]) -> float:
        """Return the share of all the texts' runs that occur in the fit parts."""
        sizes = [sum(map(len, runs(text))) for text in texts]
        measured = shares(texts, self._fit_texts())
        return sum(size * share for size, share in zip(sizes, measured, strict=True)) / max(1, sum(sizes))

    def _fit_texts(self) -> Iterator[str]:
        return chain.from_iterable(fit.texts for fit in self.fits)

    def _groups(self, indices: Iterable[int]) -> Iterator[list[int]]:
        group, size = [], 0
        for index in indices:
            group.append(index)
            size += len(self.texts[index])
            if size >= GROUP:
                yield group
                group, size = [], 0
        if group:
            yield group
