"""Choose texts of other kinds to measure on beside the corpus: what a fit is worth where it was not made.

    NAME=SOURCE      NAME is what tables call it; SOURCE a corpus, as `corpus.py` takes it
    demo-code        an embedded corpus by its own name alone, and so the test set: wikitext-2, or wikitext-2:FILE
    none             alone: no text of another kind

What is measured on where nothing is asked for is the model's (`model/catalog.py`).

Of each the held-out part is read, as of the corpus itself: the same windows, whichever of the two was fitted on, and
none that a model has seen which was trained on fit parts. Documents that repeat the fit part of either are passed over.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from kvq_calib.text import corpus, documents, wikitext
from kvq_calib.text.corpus import Batch

NONE = "none"
LEAST = 2  # windows: fewer give no standard error
_NAMED = re.compile(r"([\w.+-]+)=(.+)")


def parse(given: Sequence[str]) -> dict[str, str]:
    """Sources by name. Raises ValueError for what names none, or two alike."""
    found: dict[str, str] = {}
    if NONE in given and len(given) > 1:
        raise ValueError(f"texts {' '.join(given)}; give {NONE} alone, or leave it out")
    for one in given if list(given) != [NONE] else ():
        named = _NAMED.fullmatch(one)
        name, source = named.groups() if named else (one, one)
        if not named and one not in documents.EMBEDDED and not wikitext.is_named(one):
            known = ", ".join((*documents.EMBEDDED, wikitext.NAME, NONE))
            raise ValueError(f"text {one!r} has no name; give NAME=SOURCE, or one of {known}")
        name = wikitext.NAME if not named and wikitext.is_named(one) else name
        if name in found:
            raise ValueError(f"text {name} is given twice; use another name for one of them")
        found[name] = source
    return found


def choose(
    given: Sequence[str], fitted: str, tokenizer: Path, windows: int | None, seq_len: int, seed: int = 0
) -> dict[str, Batch]:
    """Windows of each text by name, as many as there are where there are fewer, but `LEAST`.

    fitted   the corpus whose fit part recipes are fitted on
    """
    found = {}
    for name, source in parse(given).items():
        try:
            found[name] = corpus.select(source, tokenizer, windows, seq_len, seed, "held-out", beside=[fitted])
        except corpus.TooLittle as error:
            if error.found < LEAST:
                raise ValueError(f"text {name}: {error}") from None
            found[name] = corpus.select(source, tokenizer, error.found, seq_len, seed, "held-out", beside=[fitted])
    return found
