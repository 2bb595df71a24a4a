"""Name the rows and points of several records: by recipe, and where two have the same recipe, by reference."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import TypeVar

from kvq_runtime.registry.measured import Record

R = TypeVar("R", bound=Record)


def named(records: Sequence[R], references: Sequence[str] = ()) -> list[R]:
    """The records, the name of each its recipe, if that is the only one of it; else the reference of the request or,
    without one, recipe and first digits of the artifact's sha256.

    references   one a record, or none at all
    """
    recipes = Counter(record.result.recipe for record in records)
    found = []
    for number, record in enumerate(records):
        recipe = name = record.result.recipe
        if recipes[recipe] > 1:
            name = _short(references[number]) if references else f"{recipe} ({record.artifact[:8]})"
        found.append(replace(record, name=name))
    return found


def _short(reference: str) -> str:
    """A reference; of a file, the last two parts of its path."""
    return "/".join(PurePath(reference).parts[-2:]) if reference.endswith(".safetensors") else reference
