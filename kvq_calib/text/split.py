"""Divide a corpus into a part to fit on and a held-out part that shares no document with it.

A document is held out if a hash of its content, the same for every seed and every corpus it stands in, is among the
lowest tenth. So a text that two files share is on the same side in both. Documents may still repeat passages of each
other: which held-out ones are measured on is decided by `overlap.py`, and the fit part is the same with and without it.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

from kvq_calib.text import documents as sources
from kvq_calib.text.documents import Documents

HELD_OUT = 0.1
PASSAGE = 32768  # characters: what a single long document is cut into

Split = Literal["fit", "held-out", "all"]


def part(corpus: Documents, split: Split) -> Documents:
    """The documents of one part, each text once. A single document is cut: its last tenth is held out."""
    first = {id: place for place, id in reversed(list(enumerate(corpus.ids)))}
    if split not in ("fit", "held-out", "all"):
        raise ValueError(f'split={split!r}; use "fit", "held-out" or "all"')
    if len(first) == 1:
        return sources.of(corpus.name, _passages(corpus.texts[0], split))
    if split == "all":
        kept = sorted(first.values())
    else:
        held = _held_out(list(first))
        kept = sorted(place for id, place in first.items() if (id in held) == (split == "held-out"))
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
