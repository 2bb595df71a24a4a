"""Figures in the same words in every table, card, page and caption; "" where one is not known."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvq_runtime.cli.table import cell, percent
from kvq_runtime.registry.measured import Model


def size_of(parameters: int | None) -> str:
    """4.1M, 7.6B: a number of parameters as text."""
    if parameters is None:
        return "unknown"
    for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if parameters >= scale:
            return f"{parameters / scale:.3g}{unit}"
    return str(parameters)


def where(model: Model) -> str:
    """Model and its size."""
    return f"{str(model.id).rstrip('/').rpartition('/')[2]} ({size_of(model.parameters)} parameters)"


def named(one: Mapping[str, Any]) -> str:
    """The reference of a version: its name and number."""
    return f"{one['name']}@{one['version']}" if one.get("version") else str(one["name"])


def in_bold(model: Model) -> str:
    """Model and its size, on a card."""
    return f"`{model.id}`, **{size_of(model.parameters)} parameters**"


def figure(value: float | None, form: str = ".3g") -> str:
    """A number: three digits that count, or in another form."""
    return "" if value is None else f"{value:{form}}"


def exact(value: float | None) -> str:
    """All digits, for a program."""
    return "" if value is None else repr(value)


def spread(said: str, error: float | None, form: str) -> str:
    """A figure with its standard error, if that is known."""
    return said if error is None else f"{said} ± {error:{form}}"


def change(value: float | None) -> str:
    """A relative difference in per cent."""
    return "" if value is None else percent(value)


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a table, a column for each name that any of them has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---", *["---:"] * (len(names) - 1)]]
    lines += [[escaped(row.get(name)) for name in names] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def escaped(value: Any) -> str:
    """A cell of a table in Markdown."""
    return cell(value).replace("|", "\\|")
