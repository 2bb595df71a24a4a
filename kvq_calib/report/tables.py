"""Lay out measurements as rows: recipes for `kvq eval` and `kvq compare`, tasks, the layers of an artifact.

A protocol without figures shows its reason, never a zero.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from kvq_calib.evaluate.perplexity import mean_and_error
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.cli.table import cell, percent
from kvq_runtime.errors import counted
from kvq_runtime.recipe import ROLES
from kvq_runtime.registry.evaluation_records import (
    IN_USE,
    PROTOCOLS,
    Figures,
    TextProtocol,
    TextRecord,
    Unmeasured,
)
from kvq_runtime.registry.rating import rate
from kvq_runtime.store.memory import scheme_bits

Records = Sequence[TextRecord]
EXACT = {"asymptotic": 16.0, "at_length": 16.0, "at_4096": 16.0}


def table(records: Records) -> list[dict[str, Any]]:
    """Return a row for the 16-bit model, then one a recipe, with a loss and a KL for each protocol.

    The row of the 16-bit model has perplexities, other rows the distance from them; "none" stands for a reason that
    `notes` gives. "rating" says whether the recipe is usable on this model. "in use decoded" is the share of reads in
    use that were of decoded tokens, "beyond" the share of blocks whose error exceeds the calibration's.
    """
    length = records[0].protocol.length
    rows = [_bits("16 bit", EXACT, length), *(_bits(one.name, one.result.bits, length) for one in records)]
    for protocol in (name for name in PROTOCOLS if any(name in one.result.protocols for one in records)):
        head, exact = protocol.replace("-", " "), reference(records, protocol)
        rows[0] |= {head: exact and f"{exact:.3f}", f"{head} KL": None}
        for row, record in zip(rows[1:], records, strict=True):
            row |= _loss(head, record.figures(protocol))
            if protocol == IN_USE:
                row["in use decoded"] = _share_decoded(record.result.protocols.get(protocol))
    rows[0]["rating"] = None
    for row, record in zip(rows[1:], records, strict=True):
        row["rating"] = rate(record).word
    return rows


def _loss(head: str, figures: Figures | None) -> dict[str, Any]:
    row = {head: relative(figures) if figures else "none", f"{head} KL": figures.kl if figures else None}
    return row if figures is None or figures.beyond is None else row | {f"{head} beyond": f"{figures.beyond:.2%}"}


def _share_decoded(part: Unmeasured | Figures | None) -> str | None:
    reads = part and part.decoded_reads
    return None if reads is None else f"{reads:.0%}"


def by_text(records: Records) -> list[dict[str, Any]]:
    """Return a row a recipe, with the perplexity against 16 bit and the KL of each text, by the decisive protocol."""
    rows: dict[str, dict[str, Any]] = {}
    for record in records:
        row = rows.setdefault(record.name, {"recipe": record.name, "bits": record.result.bits["asymptotic"]})
        measured = record.decisive
        said = "none" if measured is None else f"{relative(measured[1])}, {measured[1].kl:.2g}"
        row[record.protocol.text.source] = said
    return list(rows.values())


def notes(records: Records) -> list[str]:
    """Describe the texts, then the reasons for missing figures: a sentence each, with the recipes."""
    recipes: dict[str, list[str]] = {}  # by reason
    for record in records:
        for reason in record.reasons():
            recipes.setdefault(reason, []).append(record.name)
    said = dict.fromkeys(about_text(record.protocol) for record in records)
    return [*said, *(f"{', '.join(names)}: {reason}." for reason, names in recipes.items())]


def about_text(given: TextProtocol) -> str:
    """Describe windows, and their overlap with the text of the fit."""
    text, overlap = given.text, given.text.overlap
    windows = f"{counted(given.windows, 'window')} of {counted(given.length, 'token')} of {text.source}"
    windows += f", {text.split} part" if text.split else ""
    if overlap is None:
        return f"{windows}; their overlap with the fit part was not measured."
    less = f" {overlap.dropped_documents} documents ({overlap.dropped_tokens} tokens) that repeat it are left out."
    return (
        f"{windows}; {overlap.left:.1%} of their runs of {overlap.run_bytes} bytes are in the fit part of "
        f"{' or '.join(overlap.against)}.{less if overlap.dropped_documents else ''}"
    )


def reference(records: Records, protocol: str) -> float | None:
    """Return the perplexity of the 16-bit model under a protocol, if it was measured."""
    parts = (record.result.protocols.get(protocol) for record in records)
    return next((part.reference_perplexity for part in parts if part and part.reference_perplexity is not None), None)


def _bits(name: str, bits: Mapping[str, float], length: int) -> dict[str, Any]:
    return {"recipe": name, "bits": bits["asymptotic"], f"at {length}": bits.get("at_length"),
            "at 4096": bits.get("at_4096")}  # fmt: skip


def relative(figures: Figures) -> str:
    """Write the distance of a perplexity from that of 16 bit, with its standard error."""
    return spread(percent(figures.relative), standard_errors(figures)[0], ".2%")


def standard_errors(figures: Figures) -> tuple[float | None, float | None]:
    """Return the standard errors over windows of relative perplexity and KL; None for fewer than three windows."""
    kls = () if figures.windows is None else figures.windows.kl
    return (figures.relative_se, mean_and_error(kls)[1]) if len(kls) > 2 else (None, None)


def by_layer(artifact: Artifact) -> list[dict[str, Any]]:
    """Return bits of keys and values in each layer, and the errors that the fit measured there."""
    names = {"explained_variance": "explained", "relative_error": "error", "nats": "nats"}
    rows = []
    for layer, measures in enumerate(artifact.fit["layers"]):
        row: dict[str, Any] = {"layer": layer}
        for role in ROLES:
            row[f"{role}s"] = round(scheme_bits(artifact.recipe, layer, role, artifact.fingerprint.geometry), 4)
        for role in ROLES:
            own = measures.get(role) or {}
            row |= {f"{role}s {short}": own[name] for name, short in names.items() if name in own}
        rows.append(row)
    return rows


def named(records: Records, references: Sequence[str] = ()) -> list[TextRecord]:
    """Name each record by `labels`.

    references   of the request, one a record; none: recipe and sha256
    """
    recipes = [record.result.recipe for record in records]
    references = references or [f"{record.result.recipe} ({record.artifact[:8]})" for record in records]
    return [replace(record, name=name) for record, name in zip(records, labels(recipes, references), strict=True)]


def labels(recipes: Sequence[str], references: Sequence[str]) -> list[str]:
    """Return each recipe if it is unique, else its reference; of a path the last two parts."""
    counts = Counter(recipes)
    short = ["/".join(PurePath(one).parts[-2:]) if one.endswith(".safetensors") else one for one in references]
    return [recipe if counts[recipe] == 1 else one for recipe, one in zip(recipes, short, strict=True)]


def by_bits(records: Records) -> list[TextRecord]:
    """Sort records by asymptotic bits, then divergence; unmeasured ones last."""

    def order(one: TextRecord) -> tuple[float, float]:
        kl = None if one.decisive is None else one.decisive[1].kl
        return one.result.bits["asymptotic"], math.inf if kl is None else kl

    return sorted(records, key=order)


def tasks(records: Sequence[Mapping[str, Any]], references: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row a record and protocol, with a column a task and metric; then why tasks have no figures.

    records      JSON of answered tasks
    references   of the request, one a record
    """
    rows, notes = [], []
    names = labels([record["result"]["recipe"] for record in records], references)
    for name, result in zip(names, (record["result"] for record in records), strict=True):
        for part in result["protocols"].values():
            row: dict[str, Any] = {"recipe": name, "bits": result.get("bits", EXACT)["asymptotic"]}
            for task, answered in part.get("tasks", {}).items():
                figures = answered.get("metrics", {})
                if "accuracy" in answered:
                    figures = {"accuracy": {"value": answered["accuracy"], "se": answered["se"]}}
                for metric, figure in figures.items():
                    head = task if metric == "accuracy" else f"{task} {metric.removesuffix(',none')}"
                    form = ".1%" if 0 <= figure["value"] <= 1 else ".4g"
                    row[head] = spread(f"{figure['value']:{form}}", figure["se"], form)
                notes += [f"{name}: {answered['reason']}"] if "reason" in answered else []
            shares = [f"{share:.0%} of {length}" for length, share in part.get("decoded", {}).items()]
            shares += [f"{read['decoded']:.0%} of {task}" for task, read in part.get("through_the_cache", {}).items()]
            rows.append(row | {"decoded": part.get("reason", ", ".join(shares))})
    return rows, notes


# ---- words -----------------------------------------------------------------------------------------------------------


def size_of(parameters: int | None) -> str:
    """Write a number of parameters: 4.1M, 7.6B."""
    if parameters is None:
        return "unknown"
    for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if parameters >= scale:
            return f"{parameters / scale:.3g}{unit}"
    return str(parameters)


def spread(said: str, error: float | None, form: str) -> str:
    """Append the standard error to a figure, if it is known."""
    return said if error is None else f"{said} ± {error:{form}}"


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write rows as a Markdown table, a column for each name that any of them has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---", *["---:"] * (len(names) - 1)]]
    lines += [[escaped(row.get(name)) for name in names] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def escaped(value: Any) -> str:
    """Write a cell of a Markdown table."""
    return cell(value).replace("|", "\\|")
