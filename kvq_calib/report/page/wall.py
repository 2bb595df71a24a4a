"""Write the page of a registry from what is known of it (`whole.py`): what a team puts on a wall."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvq_calib.report.page import html, pictures
from kvq_calib.report.page.words import named
from kvq_calib.report.points import Point
from kvq_runtime.registry.measured import FULL
from kvq_runtime.registry.verdict import COLOURS, LOSSY
from kvq_runtime.store.memory import human

Row = Mapping[str, Any]
WORST = 6  # points of the picture that are named


def page(whole: Mapping[str, Any]) -> str:
    """The whole page."""
    rows, now = whole["versions"], current(whole["versions"])
    counts, chosen = Counter(row["verdict"] for row in now), {id(row) for row in now}
    points = [
        Point(row["recipe"], named(row), row["bits"], row["kl"])
        for row in now
        if row["kl"] and row["bits"] is not None and row["protocol"] == FULL and row["recipe"]
    ]
    needs = [{"name": one["name"], "what": f"cannot be read: {one['reason']}"} for one in whole["faults"]]
    needs += [{"name": named(row), "what": "; ".join(row["needs"])} for row in now if row["needs"]]
    return html.page(
        "wall.html",
        whole=whole,
        heading=f"Registry: {_count(len({row['name'] for row in rows}), 'name')}, {_count(len(rows), 'version')}",
        verdicts={word: counts[word] for word in COLOURS if counts[word]},
        figures=_figures(rows, now, len(needs)),
        needs=needs,
        picture=pictures.outliers(points, WORST) if len(points) > 1 else None,
        worst=min(WORST, len({(one.bits, one.cost) for one in points})),
        versions=[(row, _classes(row, id(row) in chosen), _marks(row), *_spark(row["losses"])) for row in rows],
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def current(rows: Sequence[Row]) -> list[Row]:
    """Return the version that each name alone means: production, else the newest that is not yanked."""
    chosen: dict[str, Row] = {}
    for row in rows:
        if row["production"] or (row["newest"] and row["name"] not in chosen):
            chosen[row["name"]] = row
    return list(chosen.values())


def _figures(rows: Sequence[Row], now: Sequence[Row], needs: int) -> list[tuple[Any, str]]:
    """The tiles: a figure, and what it is."""
    return [
        (len({row["name"] for row in rows}), "names"),
        (len({row["model"] for row in rows if row["model"]}), "models"),
        (len(rows), "versions"),
        (sum(row["production"] for row in rows), "in production"),
        (sum(row["production"] and not row["newest"] for row in rows), "production behind the newest"),
        (f"{sum(row['kl'] is not None for row in now)} of {len(now)}", "measured, of those in use"),
        (sum(bool(row["failed"] or row["verdict"] == LOSSY) for row in now), "too lossy, or beyond bounds"),
        (needs, "to look at"),
        (human(sum(row["size"] for row in rows)), "all files"),
    ]


def _classes(row: Row, chosen: bool) -> str:
    """What the page's filter asks for."""
    found = {"production": row["production"], "newest": row["newest"], "current": chosen}
    found |= {"yanked": row["yanked"] is not None, "attention": row["needs"]}
    return " ".join(mark for mark, has in found.items() if has)


def _marks(row: Row) -> list[str]:
    return [*row["aliases"], *(["yanked"] if row["yanked"] is not None else [])]


def _spark(losses: Sequence[float | None]) -> tuple[list[tuple[float, float]], bool]:
    """Places of losses along a small line, and whether the last version has one."""
    known = [(place, math.log(value)) for place, value in enumerate(losses) if value and value > 0]
    if not known:
        return [], False
    low, high = min(value for _, value in known), max(value for _, value in known)
    at = [
        (4 + 76 * place / max(1, len(losses) - 1), 16 - 12 * (value - low) / ((high - low) or 1.0))
        for place, value in known
    ]
    return at, known[-1][0] == len(losses) - 1
