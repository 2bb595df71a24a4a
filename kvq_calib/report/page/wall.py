"""Write the page of a registry from what is known of it (`whole.py`): what a team puts on a wall."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvq_calib.report.page.html import Html, document, section, table, tag, tiles
from kvq_calib.report.page.pictures import drawn, named, outliers
from kvq_calib.report.page.words import figure
from kvq_calib.report.points import Point
from kvq_runtime.cli.table import percent
from kvq_runtime.registry.measured import FULL, SPOKEN
from kvq_runtime.registry.verdict import COLOURS, LOSSY
from kvq_runtime.store.memory import human

Row = Mapping[str, Any]
WORST = 6  # points of the picture that are named
MARKS = {"": "all versions", "current": "current: production, else newest", "production": "production",
         "newest": "newest", "attention": "to look at", "yanked": "yanked"}  # fmt: skip


def page(whole: Mapping[str, Any]) -> str:
    """The whole page."""
    rows: Sequence[Row] = whole["versions"]
    title = f"Registry: {_count(len({row['name'] for row in rows}), 'name')}, {_count(len(rows), 'version')}"
    head = [tag("h1", title), tag("p", f"{whole['registry']}, as of {whole['made']}", class_="soft")]
    body = [
        _verdict(whole),
        _tiles(whole),
        _look_at(whole),
        _picture(rows),
        section("All versions", _tools(), _table(rows)),
    ]
    foot = tag("p", f"Made by kvq {whole['kvq']}. Nothing on this page is loaded from elsewhere.", class_="soft")
    return document(title, *head, *body, foot, script=True, broad=True)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def current(rows: Sequence[Row]) -> list[Row]:
    """Return the version that each name alone means: production, else the newest that is not yanked."""
    chosen: dict[str, Row] = {}
    for row in rows:
        if row["production"] or (row["newest"] and row["name"] not in chosen):
            chosen[row["name"]] = row
    return list(chosen.values())


def _verdict(whole: Mapping[str, Any]) -> Html:
    """Count the versions in use that are usable, too lossy, not measured: the first line of the page."""
    counts = Counter(row["verdict"] for row in current(whole["versions"]))
    parts = [tag("b", f"{counts[word]} {word}", class_=f"verdict {COLOURS[word]}") for word in COLOURS if counts[word]]
    return tag("p", "Of each name the version in use: ", [piece for part in parts for piece in (part, " ")])


def _tiles(whole: Mapping[str, Any]) -> Html:
    rows = whole["versions"]
    now = current(rows)
    measured = sum(row["kl"] is not None for row in now)
    figures = {
        "names": len({row["name"] for row in rows}),
        "models": len({row["model"] for row in rows if row["model"]}),
        "versions": len(rows),
        "in production": sum(row["production"] for row in rows),
        "production behind the newest": sum(row["production"] and not row["newest"] for row in rows),
        "measured, of those in use": f"{measured} of {len(now)}",
        "too lossy, or beyond bounds": sum(bool(row["failed"] or row["verdict"] == LOSSY) for row in now),
        "to look at": sum(bool(row["needs"]) for row in now) + len(whole["faults"]),
        "all files": human(sum(row["size"] for row in rows)),
    }
    return tiles([(count, said) for said, count in figures.items()])


def _look_at(whole: Mapping[str, Any]) -> Html | None:
    """List the versions in use that need attention."""
    rows = [{"name": f"{row['name']}@{row['version']}", "what": "; ".join(row["needs"])}
            for row in current(whole["versions"]) if row["needs"]]  # fmt: skip
    rows = [{"name": one["name"], "what": f"cannot be read: {one['reason']}"} for one in whole["faults"]] + rows
    if not rows:
        return section("To look at", tag("p", "Nothing.", class_="good"))
    shown, more = rows[:20], len(rows) - 20
    link = tag("a", "all in the table", href="#attention")
    note = tag("p", f"And {more} more: ", link, class_="soft") if more > 0 else None
    return section("To look at", table(shown), note)


def _picture(rows: Sequence[Row]) -> Html | None:
    points = [
        Point(row["recipe"], named(row), row["bits"], row["kl"])
        for row in current(rows)
        if row["kl"] and row["bits"] is not None and row["protocol"] == FULL and row["recipe"]
    ]
    if len(points) < 2:
        return None
    count = min(WORST, len({(one.bits, one.cost) for one in points}))
    return section(
        "Loss against bits",
        drawn(outliers, points, WORST),
        tag("p", f"Of each name the version in use, by full encode; {count} of the largest divergences are named. "
            "They may be of different models and texts: the picture shows what stands out, not which recipe is better.",
            class_="soft"),
    )  # fmt: skip


def _tools() -> Html:
    choices = (tag("option", said, value=mark) for mark, said in MARKS.items())
    return tag(
        "div",
        tag("input", type="search", placeholder="name, model, recipe", aria_label="rows that hold these words"),
        tag("select", choices, aria_label="which versions"),
        tag("output", class_="soft"),
        class_="tools",
        hidden=True,
    )


def _table(rows: Sequence[Row]) -> Html:
    heads = ("name", "version", "verdict", "against 16 bit", "bits", "KL, nats", "", "recipe", "model",
             "losses so far", "drift", "days", "size", "to look at")  # fmt: skip
    numbers = {"bits", "KL, nats", "against 16 bit", "drift", "days", "size"}
    head = tag("tr", (tag("th", name, scope="col", class_="n" if name in numbers else None) for name in heads))
    chosen = {id(row) for row in current(rows)}
    body = tag("tbody", (_row(row, id(row) in chosen) for row in rows))
    return tag("div", tag("table", tag("thead", head), body, class_="sorted"), class_="wide", tabindex="0")


def _row(row: Row, chosen: bool) -> Html:
    marks = [alias for alias in row["aliases"]] + (["yanked"] if row["yanked"] is not None else [])
    badges = [tag("span", one, class_=f"badge {'bad' if one == 'yanked' else 'good'}") for one in marks]
    needs = "; ".join(row["needs"])
    cells = [
        tag("td", tag("a", row["name"], href=row["page"]) if row.get("page") else row["name"]),
        tag("td", row["version"]),
        tag("td", tag("span", row["verdict"], class_=COLOURS[row["verdict"]])),
        tag(
            "td",
            "" if row["relative"] is None else percent(row["relative"]),
            class_="n",
            data_value=_exact(row["relative"]),
        ),
        _number(row["bits"], ".3g"),
        _loss(row),
        tag("td", [piece for badge in badges for piece in (badge, " ")]),
        tag("td", row["recipe"]),
        tag("td", row["model"]),
        tag("td", _spark(row["losses"]), data_value=_exact(row["kl"])),
        _number(row["drift"], ".2f"),
        _number(row["days"], "d"),
        tag("td", human(row["size"]), class_="n", data_value=row["size"]),
        tag("td", needs, class_="bad" if needs else None),
    ]
    return tag("tr", *cells, class_=_classes(row, chosen))


def _spark(losses: Sequence[float | None]) -> Html | None:
    """A small line of a loss a version, on a logarithmic scale, a dot at the last: a picture for every row would take
    matplotlib minutes."""
    known = [(place, math.log(value)) for place, value in enumerate(losses) if value and value > 0]
    if not known:
        return None
    low, high = min(value for _, value in known), max(value for _, value in known)
    at = [
        (4 + 76 * place / max(1, len(losses) - 1), 16 - 12 * (value - low) / ((high - low) or 1.0))
        for place, value in known
    ]
    line = tag("path", d="M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in at), class_="curve") if len(at) > 1 else None
    last = tag("circle", cx=at[-1][0], cy=at[-1][1], r=2.6) if known[-1][0] == len(losses) - 1 else None
    return tag("svg", line, last, viewBox="0 0 84 20", class_="spark", aria_hidden="true")


def _classes(row: Row, chosen: bool) -> str | None:
    found = [mark for mark in ("production", "newest") if row[mark]]
    found += ["current"] if chosen else []
    found += ["yanked"] if row["yanked"] is not None else []
    found += ["attention"] if row["needs"] else []
    return " ".join(found) or None


def _loss(row: Row) -> Html:
    """The divergence, by full encode unless stated otherwise."""
    said = f" {SPOKEN[row['protocol']]}" if row["protocol"] not in (None, FULL) else ""
    return tag("td", figure(row["kl"]) + said, class_="n", data_value=_exact(row["kl"]))


def _number(value: float | None, form: str) -> Html:
    return tag("td", "" if value is None else f"{value:{form}}", class_="n", data_value=_exact(value))


def _exact(value: float | None) -> str:
    return "" if value is None else repr(value)
