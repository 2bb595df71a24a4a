"""Print the results of commands: aligned text for people, JSON for programs."""

import json as json_module
import shutil
import sys
import unicodedata
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from kvq_runtime.disk.strict_json import flatten

LEAST = 20  # cells of a terminal to which a column of texts is narrowed at the most


def print_table(rows: list[dict[str, Any]], json: bool) -> None:
    """Print rows as a table with their keys as header, on a terminal within its width; with `json`, as a JSON list."""
    if json:
        print(json_module.dumps(rows, indent=2, default=str))
        return
    if not rows:
        print("(nothing)")
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[printable(name) for name in names], *([cell(row.get(name)) for name in names] for row in rows)]
    numeric = [all(_is_number(row.get(name)) for row in rows) for name in names]
    columns = [Column(texts, right) for texts, right in zip(zip(*lines, strict=True), numeric, strict=True)]
    print("\n\n".join(_laid_out(part) for part in _parts(columns, _room())))


class Column(NamedTuple):
    """The texts of a column, its header first; numbers stand at its right."""

    texts: Sequence[str]
    right: bool

    @property
    def width(self) -> int:
        """Cells of the longest line."""
        return max(cells(line) for text in self.texts for line in text.split("\n"))


def _room() -> int | None:
    """Cells of a line of the terminal; None where the table is read by something else, and stays as it is."""
    return shutil.get_terminal_size().columns if sys.stdout and sys.stdout.isatty() else None


def _parts(columns: list[Column], room: int | None) -> list[list[Column]]:
    """The columns one below the other, so that each part is at most as wide as the room.

    Columns without content go. Texts are broken at spaces where that is enough; else each part repeats the first
    columns, as many as tell the rows apart. A cell is never cut.
    """
    if room is None or _width(columns) <= room:
        return [columns]
    columns = [one for number, one in enumerate(columns) if not number or any(one.texts[1:])]
    widest = max((one for one in columns if not one.right), key=lambda one: one.width, default=None)
    if widest is not None and (left := room - _width(columns) + widest.width) >= LEAST:
        broken = ["\n".join(_broken(text, left)) for text in widest.texts]
        fitting = [Column(broken, False) if one is widest else one for one in columns]
        if _width(fitting) <= room:
            return [fitting]
    lead = _leading(columns, room)
    parts = [lead]
    for column in (one for one in columns if one not in lead):
        if len(parts[-1]) > len(lead) and _width([*parts[-1], column]) > room:
            parts.append(lead)
        parts[-1] = [*parts[-1], column]
    if len(parts) == 1:  # nothing is left to move
        return parts
    return [one for part in parts for one in _parts(part, room)]


def _leading(columns: list[Column], room: int) -> list[Column]:
    """The first columns, as many as tell the rows apart, or of these those that differ; the first alone where both take
    over half of the room, and leave too little of it for the widest of the others."""
    for count in range(1, len(columns)):
        rows = list(zip(*(one.texts for one in columns[:count]), strict=True))
        if len(set(rows)) < len(rows):
            continue
        beside = max(one.width for one in columns[count:])
        for lead in (columns[:count], [one for one in columns[:count] if len(set(one.texts[1:])) > 1]):
            if lead and (2 * _width(lead) <= room or _width(lead) + 2 + beside <= room):
                return lead
    return columns[:1]


def _width(columns: Sequence[Column]) -> int:
    return sum(one.width + 2 for one in columns) - 2


def _laid_out(columns: Sequence[Column]) -> str:
    """The lines of the columns side by side."""
    lines = []
    for row in zip(*(one.texts for one in columns), strict=True):
        for texts in zip_longest(*(text.split("\n") for text in row), fillvalue=""):
            padded = [_padded(text, one.width, one.right) for text, one in zip(texts, columns, strict=True)]
            lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def print_record(record: dict[str, Any], json: bool) -> None:
    """Print one record, a field a line, on a terminal within its width, nested fields as a.b; with `json`, as a JSON
    object."""
    if json:
        print(json_module.dumps(record, indent=2, default=str))
        return
    lines = flatten(record)
    width = max((cells(printable(name)) for name in lines), default=0)
    left = (_room() or 0) - width - 2
    for name, value in lines.items():
        text = cell(value)
        named = printable(name)
        for line in _broken(text, left) if left >= LEAST else [text]:
            print(f"{_padded(named, width)}  {line}".rstrip())
            named = ""


def cell(value: Any) -> str:
    """A value as text for people; control characters are escaped."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(cell(item) for item in value)
    return printable(str(value))


def cells(text: str) -> int:
    """Count the cells of a terminal that a text takes: two for a wide character, none for a mark on the one before."""
    return len(text) if text.isascii() else sum(map(_cells_of, text))


def _cells_of(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _padded(text: str, width: int, right: bool = False) -> str:
    space = " " * (width - cells(text))
    return space + text if right else text + space


def _broken(text: str, room: int) -> list[str]:
    """The lines of a text, of at most so many cells: broken at spaces and beside wide characters, never in a word."""
    pieces = [""]
    for character in text:
        size, before = _cells_of(character), pieces[-1]
        if before.strip() and (character.isspace() or size == 2 or (size and _cells_of(before[-1]) == 2)):
            pieces.append("")
        pieces[-1] += character
    lines = [pieces[0]]
    for piece in pieces[1:]:
        fits = cells(lines[-1] + piece) <= room
        lines[-1:] = [lines[-1] + piece] if fits else [lines[-1], piece.lstrip()]
    return lines


def percent(share: float) -> str:
    """A difference in per cent, with its sign where it has one: "+1.23%", "0.00%"."""
    shown = f"{share:+.2%}"
    return shown if shown.strip("+-0.%") else shown[1:]


def printable(text: str) -> str:
    """The text with every unprintable character as an escape, so that files cannot control the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
