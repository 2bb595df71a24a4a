"""Print the results of commands: aligned text for people, JSON for programs."""

import json as json_module
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
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    numeric = [all(_is_number(row.get(name)) for row in rows) for name in names]
    for line in lines:
        padded = [
            text.rjust(w) if right else text.ljust(w) for text, w, right in zip(line, widths, numeric, strict=True)
        ]
        print("  ".join(padded).rstrip())


def print_record(record: dict[str, Any], json: bool) -> None:
    """Print one record, a line a field, nested fields as a.b; with `json`, as a JSON object."""
    if json:
        print(json_module.dumps(record, indent=2, default=str))
        return
    lines = flatten(record)
    width = max(map(len, lines), default=0)
    for name, value in lines.items():
        print(f"{printable(name.ljust(width))}  {cell(value)}".rstrip())


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


def percent(share: float) -> str:
    """A difference in per cent, with its sign where it has one: "+1.23%", "0.00%"."""
    shown = f"{share:+.2%}"
    return shown if shown.strip("+-0.%") else shown[1:]


def printable(text: str) -> str:
    """The text with every unprintable character as an escape, so that files cannot control the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
