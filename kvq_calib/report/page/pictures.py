"""Write the parts of a version's page that show what was measured: by layer, by bits, by task, along greedy text."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from matplotlib.figure import Figure

from kvq_calib.report import decode_table
from kvq_calib.report.fit_plots import layer_bits
from kvq_calib.report.frame import names_as_they_are
from kvq_calib.report.looks import BLUE, Look
from kvq_calib.report.page.html import Html, folded, pairs, table, tag
from kvq_calib.report.page.words import Known, figure, missing, model_of, reference, spread
from kvq_calib.report.plots import SHORT, layer_errors, scatter
from kvq_calib.report.points import Point, not_drawn
from kvq_calib.report.points import frontier as frontier_of
from kvq_calib.report.svg import svg
from kvq_calib.report.task_plot import grid
from kvq_runtime.registry.measured import SPOKEN

MOST_CELLS = 32  # lengths, depths and tasks that a picture has; what has more is a table alone
_HOW = (
    "By full encode, in domain. Grey stairs: the frontier; nothing has both fewer bits and less divergence. Ringed: "
    "this version, and the recipe that kvq recommends where it was measured. Lines: a standard error over windows. "
    "Others: versions in this registry that were measured on the same windows, and records that were given."
)


def bits(known: Known) -> list[Any]:
    """Bits of keys and values by layer."""
    rows = known.get("layers")
    if not rows:
        return [tag("p", "The file does not load: see Health.", class_="bad")]
    flat = len({row[role] for row in rows for role in ("keys", "values")}) == 1
    note = "All layers have the same bits." if flat else None
    return [
        drawn(_bars, rows),
        tag("p", "Scales and all metadata included; sinks, window and what all tokens share are not.", class_="soft"),
        tag("p", note, class_="soft"),
        folded("Stages, and what the fit measured by layer", _stages(known), table(rows)),
    ]


def _stages(known: Known) -> Html:
    recipe = known["recipe"]
    names = {"position": "RoPE", "keys": "keys", "values": "values", "layers": "other layers", "window": "window"}
    return pairs({said: str(recipe[name]) or None for name, said in names.items()})


def errors(known: Known) -> list[Any]:
    """Errors of keys, values and attention's output by layer."""
    if not known["errors"]:
        return [missing(f"kvq eval {reference(known)} --model {model_of(known)} --layers")]
    windows = known["evaluation"]["error_windows"]
    about = f"Relative squared error, on {windows:g} of the windows. " if windows else "Relative squared error. "
    return [
        drawn(_errors, known["errors"]),
        tag("p", about, "Keys and values: 1 is what storing their mean alone would give. Attention's output: over its "
            "energy, with exact queries.", class_="soft"),
        folded("By layer", table([{"layer": n} | dict(row) for n, row in enumerate(known["errors"])])),
    ]  # fmt: skip


def frontier(known: Known) -> list[Any]:
    """Divergence against bits, beside what it can be compared with."""
    points = [
        Point(one["recipe"], named(one), one["bits"], one["kl"], one.get("kl_se"), here=bool(one.get("this")))
        for one in known["compared"]
        if one["kl"] is not None
    ]
    left = not_drawn(named(one) for one in known["compared"] if one["kl"] is None) or None
    if len(points) < 2:
        measure = f"kvq compare --model {model_of(known)} --output compare.json"
        found = missing(measure, f"kvq report {reference(known)} --compare compare.json")
        return [found, left and tag("p", left, class_="soft")]
    best = frontier_of(points)
    rows = [
        {
            "name": one.name,
            "recipe": one.recipe,
            "bits": f"{one.bits:.3g}",
            "KL, nats": spread(figure(one.cost), one.spread, ".2g"),
            "frontier": "yes" if one in best else "",
        }
        for one in sorted(points, key=lambda one: (one.bits, one.cost))
    ]
    return [
        drawn(_scatter, points),
        tag("p", " ".join(filter(None, [_HOW, left])), class_="soft"),
        folded(f"All {len(points)}", table(rows)),
    ]


def named(one: Mapping[str, Any]) -> str:
    """Return the label of a point."""
    return f"{one['name']}@{one['version']}" if one.get("version") else str(one["name"])


def drawn(draw: Callable[..., Figure], *given: Any) -> Html:
    """A picture in a page, drawn from JSON by a function of this file, whose docstring a screen reader reads."""
    return _drawn(draw, json.dumps(given, default=asdict))


@lru_cache(maxsize=64)  # a page of every version of a registry has many pictures twice
def _drawn(draw: Callable[..., Figure], given: str) -> Html:
    with names_as_they_are():
        label = str(draw.__doc__).rstrip(".")
        return tag("figure", Html(svg(draw(*json.loads(given)), label)))


def _bars(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Bits per element by layer."""
    return layer_bits(rows, 10, 2.8)


def _errors(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Relative squared error by layer."""
    return layer_errors([rows], [Look(BLUE, "o").line])


def _scatter(points: Sequence[Mapping[str, Any]]) -> Figure:
    """KL divergence against bits per element."""
    return scatter(_short(points))


def outliers(points: Sequence[Mapping[str, Any]], worst: int) -> Figure:
    """KL divergence against bits per element."""
    found = _short(points)
    apart = {(one.bits, one.cost): one for one in reversed(found)}  # of points in one place the first
    return scatter(found, front=False, named=sorted(apart.values(), key=lambda one: -one.cost)[:worst])


def _short(points: Sequence[Mapping[str, Any]]) -> list[Point]:
    return [Point(**{**one, "name": one["name"][:48]}) for one in points]


def _grid(*given: Any) -> Figure:
    """Right answers by task, length and depth."""
    return grid(*given)


def tasks(known: Known) -> list[Any]:
    """Right answers by task, and by length and depth."""
    if not known["tasks"]:
        return [missing(f"kvq eval {reference(known)} --model {model_of(known)} --tasks TASK,TASK")]
    rows = []
    for one in known["tasks"]:
        protocol = SPOKEN.get(one["protocol"], one["protocol"])
        row = {
            "task": one["task"],
            "metric": one["metric"],
            "protocol": protocol,
            "value": _value(one["value"], one["se"]),
        }
        rows.append(row | {"16 bit": _value(one["of_16_bit"], None), "texts": one["texts"]})
    return [table(rows), _answers(known), tag("p", "± is a standard error over texts.", class_="soft")]


def _answers(known: Known) -> Html | None:
    """Accuracy by length and depth, a row of panels a protocol; None where it was not counted so."""
    found: dict[str, list[dict[str, Any]]] = {}
    for one in known["tasks"]:
        protocol = str(SPOKEN.get(one["protocol"], one["protocol"]))
        found.setdefault(protocol, []).extend(cell | {"task": one["task"][:SHORT]} for cell in one["cells"])
    rows = [(protocol, {"cells": cells}) for protocol, cells in found.items() if cells]
    cells = [cell for _, part in rows for cell in part["cells"]]
    names, lengths, depths = ({cell[name] for cell in cells} for name in ("task", "length", "depth"))
    if not cells or max(map(len, (names, lengths, depths))) > MOST_CELLS:
        return None
    return drawn(_grid, rows, sorted(names), sorted(lengths), sorted(depths))


def greedy(known: Known) -> list[Any]:
    """Write where the cache left the 16-bit model's greedy text, and by how much, by position."""
    if not known["greedy"]:
        return [missing(f"kvq eval {reference(known)} --model {model_of(known)} --protocol decode")]
    parts = []
    for one in known["greedy"]:
        bins = decode_table.positions(one)
        parts += [table([decode_table.row(one)]), tag("p", f"{one['about']} KL in nats.", class_="soft")]
        parts += [folded("By position in the continuation", table(bins))] if bins else []
    return parts


def _value(value: float | None, error: float | None) -> str:
    """A metric: a share in per cent, another as it is."""
    if value is None:
        return ""
    return spread(f"{value:.1%}", error, ".1%") if 0 <= value <= 1 else spread(figure(value), error, ".2g")
