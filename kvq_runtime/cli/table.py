"""Print results: aligned text for people, JSON for programs."""

import json as json_module
import textwrap
from itertools import zip_longest
from typing import Any

from kvq_runtime.disk.strict_json import flatten


def print_table(rows: list[dict[str, Any]], json: bool) -> None:
    """Print rows as a table with their keys as header; with `json`, as a JSON list."""
    if json:
        print(json_module.dumps(rows, indent=2, default=str))
        return
    if not rows:
        print("(nothing)")
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[printable(name) for name in names], *([cell(row.get(name)) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [str.rjust if all(_is_number(row.get(name)) for row in rows) else str.ljust for name in names]
    for line in lines:
        cells = [align(text, width) for align, text, width in zip(aligned, line, widths, strict=True)]
        print("  ".join(cells).rstrip())


def print_record(record: dict[str, Any], json: bool) -> None:
    """Print a record, a field a line of 100 columns or several, nested fields as a.b; with `json`, as a JSON object."""
    if json:
        print(json_module.dumps(record, indent=2, default=str))
        return
    lines = {printable(name): cell(value) for name, value in flatten(record).items()}
    width = max(map(len, lines), default=0)
    for name, text in lines.items():
        rows = textwrap.wrap(text, max(20, 98 - width), break_long_words=False, break_on_hyphens=False) or [""]
        print("\n".join(f"{begin:{width}}  {row}".rstrip() for begin, row in zip_longest([name], rows, fillvalue="")))


def cell(value: Any) -> str:
    """Return a value as text for people, with control characters escaped."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(cell(item) for item in value)
    return printable(str(value))


def percent(ratio: float) -> str:
    """Return a difference in per cent, signed unless it rounds to zero: "+1.23%", "0.00%"."""
    shown = f"{ratio:+.2%}"
    return shown if shown.strip("+-0.%") else shown[1:]


def printable(text: str) -> str:
    """Return the text with unprintable characters escaped, so that a file cannot control the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
