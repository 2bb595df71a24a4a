"""Write the page of one version from what is known of it (`known.py`): no figure here that is not there.

Tables are rows of figures in words.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from kvq_calib.report import card, greedy
from kvq_calib.report.answered import cell
from kvq_calib.report.page import evidence, html
from kvq_calib.report.page.known import named
from kvq_calib.report.panels import Point, not_drawn
from kvq_calib.report.panels import frontier as frontier_of
from kvq_calib.report.sections import machine_of
from kvq_calib.report.tables import change, figure, size_of, spread
from kvq_runtime.cli.table import percent
from kvq_runtime.disk.strict_json import flatten
from kvq_runtime.registry.measured import SPOKEN
from kvq_runtime.store.memory import human

Known = Mapping[str, Any]
Rows = list[dict[str, Any]]
HEADS = ("text", "against 16 bit", "KL, nats", "protocol", "domain", "16 bit", "perplexity", "top-1", "decoded")


def page(known: Known) -> str:
    """The whole page."""
    badges = [*known["aliases"], *(["yanked"] if known["yanked"] is not None else [])]
    badges += ["damaged"] if faults(known) else []
    model = (known.get("model") or {}).get("id")
    size = (known["evaluation"] or {}).get("parameters")
    about = [str(model or "unknown model"), size and f"{size_of(size)} parameters", known["published"]]
    tables = (figures, losses, errors, points, left, answers, drift, provenance, everything, files, history)
    rows: dict[str, Any] = {table.__name__: table(known) for table in tables}
    rows["frontier"] = frontier(rows["points"])
    rows["flat"] = len({row[role] for row in known.get("layers", ()) for role in ("keys", "values")}) == 1
    rows["before"] = beside(known["before"]) if known["before"] is not None else {}
    return html.page(
        "version.html", known=known, reference=named(known), model=shlex.quote(str(model)) if model else "MODEL",
        badges=badges, about=", ".join(filter(None, about)), small=size is not None and size < card.SMALL, rows=rows,
        decode=greedy,
    )  # fmt: skip


def faults(known: Known) -> list[str]:
    """Damage that checks found, a sentence each."""
    failed = (row for row in known["health"] if row["result"] == evidence.FAILED and row["check"] != "yanked")
    return [f"{row['check']}: {row['what']}" for row in failed]


def figures(known: Known) -> list[tuple[str, str]]:
    """The tiles: a figure, and what it is."""
    recipe, decisive = known["recipe"] or {}, evidence.deciding(known["losses"])
    found = [(recipe.get("name", "unknown"), "recipe")]
    if recipe:
        found.append((f"{recipe['bits']:.3g}", "bits per element, of one more token"))
    for one in known.get("sizes", []):
        said = f"{human(one['bytes'])} of {human(one['of_16_bit'])}"
        found.append((f"{one['bits']:.3g}", f"bits at {one['tokens']:,} tokens, all bytes: {said}"))
    if decisive:
        found.append((percent(decisive["relative"]), f"perplexity against 16 bit, {SPOKEN[decisive['protocol']]}"))
        found.append((f"{decisive['kl']:.3g}", f"KL divergence, nats per token, {SPOKEN[decisive['protocol']]}"))
    return found


def losses(known: Known) -> Rows:
    """Losses by text and protocol."""
    rows = []
    for one in known["losses"]:
        domain = {True: "in", False: "out", None: "not known"}[one["in_domain"]]
        row = dict.fromkeys(HEADS) | {"text": one["text"], "domain": domain, "protocol": SPOKEN[one["protocol"]]}
        if "reason" in one:
            rows.append(row | {"decoded": one["reason"]})
            continue
        row |= {"16 bit": figure(one["reference_perplexity"], ".3f"), "perplexity": figure(one["perplexity"], ".3f")}
        row |= {"against 16 bit": spread(percent(one["relative"]), one["relative_se"], ".2%")}
        row |= {"KL, nats": spread(figure(one["kl"]), one["kl_se"], ".2g")}
        rows.append(row | {"top-1": figure(one["top1"], ".2%"), "decoded": figure(one["decoded"], ".0%")})
    return rows


def errors(known: Known) -> Rows:
    """Errors by layer."""
    return [{"layer": number} | dict(row) for number, row in enumerate(known["errors"])]


def points(known: Known) -> list[Point]:
    """The version, and what it can be compared with: those whose divergence was measured."""
    return [
        Point(one["recipe"], named(one), one["bits"], one["kl"], one.get("kl_se"), here=bool(one.get("this")))
        for one in known["compared"]
        if one["kl"] is not None
    ]


def left(known: Known) -> str:
    """A sentence on the others."""
    return not_drawn(named(one) for one in known["compared"] if one["kl"] is None)


def frontier(points: Sequence[Point]) -> Rows:
    """Points by bits."""
    best = frontier_of(points)
    return [
        {
            "name": one.name,
            "recipe": one.recipe,
            "bits": f"{one.bits:.3g}",
            "KL, nats": spread(figure(one.cost), one.spread, ".2g"),
            "frontier": "yes" if one in best else "",
        }
        for one in sorted(points, key=lambda one: (one.bits, one.cost))
    ]


def answers(known: Known) -> Rows:
    """Right answers by task, metric and protocol."""
    return [
        {
            "task": one["task"],
            "metric": one["metric"],
            "protocol": SPOKEN.get(one["protocol"], one["protocol"]),
            "value": cell(one["value"], one["se"]),
            "16 bit": cell(one["of_16_bit"]),
            "texts": one["texts"],
        }
        for one in known["tasks"]
    ]


def drift(known: Known) -> Rows:
    """The measurements made since."""
    return [
        {"week": str(one["week"]), "KL, nats": figure(one["kl"]), "against 16 bit": change(one["relative"])}
        for one in known["drift"]
    ]


def provenance(known: Known) -> dict[str, Any]:
    """Model, text, machine, digests."""
    model, given = known.get("model") or {}, known.get("provenance") or {}
    corpus, machine = known.get("corpus") or {}, given.get("environment")
    return {
        "model": model.get("id"),
        "revision": model.get("revision"),
        "shape": f"{model['layers']} layers, {model['kv_heads']} KV heads of {model['head_size']}" if model else None,
        "fingerprint": "in the file: shape, RoPE, a probe of the projections" if model else None,
        "corpus": corpus.get("source"),
        "corpus digest": corpus.get("corpus_digest"),
        "token digest": corpus.get("token_digest"),
        "sequences": f"{given['samples']} of {given.get('seq_len')} tokens" if "samples" in given else None,
        "held out": given.get("held_out"),
        "seed": given.get("seed"),
        "environment": machine_of(machine) if isinstance(machine, Mapping) else machine,
        "fitted tensors": human(known["tensor_bytes"]) if "tensor_bytes" in known else None,
        "papers": ", ".join((known["recipe"] or {}).get("papers", [])) or None,
        "file": human(known["size"]),
        "sha256": known["sha256"],
        "registry": known["registry"] or None,
    }


def everything(known: Known) -> Rows:
    """The file's own statement of its fit."""
    return [{"setting": name, "value": value} for name, value in flatten(dict(known.get("provenance") or {})).items()]


def files(known: Known) -> Rows:
    """The attachments."""
    return [{"file": name, "bytes": one["size"], "sha256": one["sha256"]} for name, one in known["files"].items()]


def history(known: Known) -> Rows:
    """Every change of the name."""
    return [
        {name: value for name, value in row.items() if name != "sha256"}
        | {"sha256": str(row["sha256"] or "")[:12], "number": str(row["number"])}
        for row in known["history"]
    ]


def beside(before: Mapping[str, Any]) -> dict[str, Rows]:
    """Losses, bits, bytes and settings beside those of the last version."""
    losses = [
        {
            "text": one["text"],
            "protocol": SPOKEN.get(one["protocol"], one["protocol"]),
            "KL, nats: before": figure(one["kl_before"]),
            "now": figure(one["kl"]),
            "change": _change(one["kl_before"], one["kl"]),
            "perplexity against 16 bit: before": change(one["relative_before"]),
            "now ": change(one["relative"]),
        }
        for one in before["losses"]
    ]
    sizes = []
    for one in before.get("sizes", []):
        bits = one["what"] == "bits"
        what = "bits per element, of one more token" if bits else f"all bytes at {one['tokens']:,} tokens"
        old, new = (f"{one[side]:.4g}" if bits else human(one[side]) for side in ("before", "now"))
        sizes.append({"size": what, "before": old, "now": new, "change": _change(one["before"], one["now"])})
    names = {"part": "part", "name": "setting", "a": "before", "b": "now"}
    settings = [{said: one[name] for name, said in names.items()} for one in before["settings"]]
    return {"losses": losses, "sizes": sizes, "settings": settings}


def _change(before: float | None, now: float | None) -> str:
    return "" if before is None or now is None or not before else percent((now - before) / abs(before))
