"""Write the parts of a version's page that show what was measured: by layer, by bits, by task, along greedy text."""

from typing import Any

from kvq_calib.report import decode_table
from kvq_calib.report.page import scatter, svg
from kvq_calib.report.page.heat import answers
from kvq_calib.report.page.html import Html, folded, pairs, table, tag
from kvq_calib.report.page.words import Known, figure, missing, model_of, reference, spread
from kvq_runtime.registry.measured import SPOKEN

_ERRORS = {
    "key_error": "keys, over their variance",
    "value_error": "values, over their variance",
    "attention_error": "attention's output, in use",
    "attention_error_encoded": "attention's output, every token but the sinks encoded",
}
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
        svg.bars(rows, ("keys", "values"), "bits per element"),
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
    curves = {said: [_plain(row.get(name)) for row in known["errors"]] for name, said in _ERRORS.items()}
    curves = {said: curve for said, curve in curves.items() if any(curve)}
    windows = known["evaluation"]["error_windows"]
    about = f"Relative squared error, on {windows:g} of the windows. " if windows else "Relative squared error. "
    return [
        svg.lines(curves, "relative squared error"),
        tag("p", about, "Keys and values: 1 is what storing their mean alone would give. Attention's output: over its "
            "energy, with exact queries.", class_="soft"),
        folded("By layer", table([{"layer": n} | dict(row) for n, row in enumerate(known["errors"])])),
    ]  # fmt: skip


def _plain(value: Any) -> float | None:
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
    return value if usable else None


def frontier(known: Known) -> list[Any]:
    """Divergence against bits, beside what it can be compared with."""
    points = known["compared"]
    if len(points) < 2:
        measure = f"kvq compare --model {model_of(known)} --output compare.json"
        return [missing(measure, f"kvq report {reference(known)} --compare compare.json")]
    best = scatter.frontier(points)
    rows = [
        {
            "name": scatter.name(one),
            "recipe": one["recipe"],
            "bits": f"{one['bits']:.3g}",
            "KL, nats": spread(figure(one["kl"]), one.get("kl_se"), ".2g"),
            "frontier": "yes" if one in best else "",
        }
        for one in sorted(points, key=lambda one: (one["bits"], one["kl"]))
    ]
    return [
        scatter.losses_by_bits(points),
        tag("p", _HOW, class_="soft"),
        folded(f"All {len(points)}", table(rows)),
    ]


def tasks(known: Known) -> list[Any]:
    """Right answers by task, and by length and depth."""
    if not known["tasks"]:
        return [missing(f"kvq eval {reference(known)} --model {model_of(known)} --tasks TASK,TASK")]
    rows, maps = [], []
    for one in known["tasks"]:
        protocol = SPOKEN.get(one["protocol"], one["protocol"])
        row = {
            "task": one["task"],
            "metric": one["metric"],
            "protocol": protocol,
            "value": _value(one["value"], one["se"]),
        }
        rows.append(row | {"16 bit": _value(one["of_16_bit"], None), "texts": one["texts"]})
        if one["cells"]:
            maps.append(answers(f"{one['task']}{protocol and f', {protocol}'}: right answers", one["cells"]))
    return [table(rows), tag("div", maps, class_="pair"), tag("p", "± is a standard error over texts.", class_="soft")]


def greedy(known: Known) -> list[Any]:
    """Where the cache left the 16-bit model's greedy text, and by how much, by position."""
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
