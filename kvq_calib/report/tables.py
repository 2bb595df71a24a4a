"""Lay out as rows what was measured: of recipes, for `kvq eval` and `kvq compare`, and of an artifact's layers; and put
figures in the same words in every table, card, page and caption, "" where one is not known.

Where a protocol has no figures, its reason stands in their place, never a zero.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any, TypeVar

from kvq_calib.evaluate.perplexity import mean_and_error
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.cli.table import cell, percent
from kvq_runtime.errors import counted
from kvq_runtime.recipe import ROLES
from kvq_runtime.registry.evaluation_records import (
    FULL,
    IN_USE,
    PROTOCOLS,
    SPOKEN,
    Figures,
    Model,
    Part,
    Record,
    TasksRecord,
    TextRecord,
    Unmeasured,
    Windows,
    other_texts,
)
from kvq_runtime.store.memory import scheme_bits

Records = Sequence[TextRecord]
R = TypeVar("R", bound=Record)
ERRORS = {FULL: "attention_error_encoded", IN_USE: "attention_error"}  # of a layer, by protocol
EXACT = {"asymptotic": 16.0, "at_length": 16.0, "at_4096": 16.0}


def comparison(records: Records) -> list[dict[str, Any]]:
    """The rows that `kvq compare` prints: one a recipe, the protocols side by side; the 16-bit model first.

    "decoded" is the share of attention's weight that lay on decoded tokens, "attention" the error of its output, where
    errors by layer were measured.
    """
    length, names = records[0].protocol.length, _protocols(records)
    by_layer = any(record.result.layers for record in records)
    rows = [
        _bits(one.name, one.result.bits, length)
        | {"block": one.result.window.get("block")}
        | _side_by_side(one, names, by_layer)
        for one in records
    ]
    first: dict[str, Any] = dict.fromkeys(rows[0]) | _bits("16 bit", EXACT, length)
    for text, group in _by_text(records).items():  # its columns are together, whichever record has which
        for name in _protocols(group):
            head, one = _head(text, name), reference(group, name)
            first |= {head: f"{one:.3f}" if one else None, f"{head} KL": None}
    return [first, *(row | _of_texts(one) for one, row in zip(records, rows, strict=True))]


def _side_by_side(record: TextRecord, names: Sequence[str], by_layer: bool) -> dict[str, Any]:
    """The columns of all protocols, the distance of perplexity first."""
    row: dict[str, Any] = {}
    for name in names:
        found, head = record.figures(name), _head("", name)
        share = found.decoded.attention if found and found.decoded else None
        row |= _loss(found, head) | {f"{head} top-1": f"{found.top1:.1%}" if found else None}
        row[f"{head} decoded"] = None if share is None else f"{share:.0%}"
        if by_layer:
            row[f"{head} attention"] = attention_error(record, name) if found else None
    return row


def _of_texts(record: TextRecord) -> dict[str, Any]:
    """The columns of texts of other kinds."""
    row: dict[str, Any] = {}
    for text, other in record.elsewhere().items():
        for name in other.result.protocols:
            row |= _loss(other.figures(name), _head(text, name))
    return row


def _head(text: str, protocol: str) -> str:
    return f"{text} {protocol.replace('-', ' ')}".lstrip()


def _loss(found: Figures | None, head: str) -> dict[str, Any]:
    return {head: relative(found) if found else "none", f"{head} KL": found.kl if found else None}


def narrow(records: Records) -> list[dict[str, Any]]:
    """The columns of `comparison` that decide, in 100 characters: bits, loss and divergence by protocol."""
    heads = [_head("", name) for name in _protocols(records)]
    kept = ["recipe", "bits", *(name for head in heads for name in (head, f"{head} KL"))]
    return [{name: row.get(name) for name in kept} for row in comparison(records)]


def elsewhere(records: Records, text: str) -> list[TextRecord]:
    """The records of a text of another kind."""
    return [one.elsewhere()[text] for one in records if text in one.result.texts]


def table(records: Records) -> list[dict[str, Any]]:
    """The rows that `kvq eval` prints: one a recipe and protocol, the 16-bit model first, and so for each text."""
    groups, source = _by_text(records), records[0].protocol.text.source
    if len(groups) == 1:
        return by_protocol(records)
    return [{"text": text or source, **row} for text, group in groups.items() for row in by_protocol(group)]


def by_protocol(records: Records) -> list[dict[str, Any]]:
    """The rows of one text."""
    length = records[0].protocol.length
    known = next((one for name in _protocols(records) if (one := reference(records, name))), None)
    rows = [_bits("16 bit", EXACT, length) | {"protocol": None, "perplexity": known and f"{known:.3f}"}]
    for record in records:
        bits, parts = _bits(record.name, record.result.bits, length), record.result.protocols
        rows += [bits | {"protocol": SPOKEN[name]} | measures(part) for name, part in parts.items()]
    return rows


def measures(part: Unmeasured | Figures) -> dict[str, Any]:
    """The cells of one protocol's figures, or of the reason why there are none."""
    if isinstance(part, Unmeasured):
        return dict.fromkeys(("perplexity", "vs 16 bit", "KL", "top-1")) | {"decoded": part.reason}
    return {
        "perplexity": f"{part.perplexity:.3f}",
        "vs 16 bit": relative(part),
        "KL": part.kl,
        "top-1": f"{part.top1:.2%}",
        "decoded": decoded(part),
    }


def decoded(part: Part) -> str:
    """Write the share of what queries read that was decoded."""
    shares = part.decoded
    if shares is None:
        return "not counted: queries are hidden, or choose what they read"
    gone = f", {shares.unread:.0%} not held" if shares.unread else ""
    about = "" if part.fitted_on is None else f", fitted to the first {part.fitted_on} tokens"
    if isinstance(part, Figures) and part.beyond is not None:
        about += f"; {part.beyond:.2%} of blocks beyond the errors in calibration"
    return f"{shares.attention:.0%} of attention, {shares.reads:.0%} of reads{gone}{about}"


def notes(records: Records) -> list[str]:
    """Describe the texts, a sentence each, and why figures are missing: one for each reason, with its recipes."""
    said: dict[str, dict[str, None]] = {}  # the recipes in their order, each once
    for group in _by_text(records).values():
        for record in group:
            for reason in record.reasons():
                said.setdefault(reason, {})[record.name] = None
    return [*about_texts(records), *(f"{', '.join(names)}: {reason}." for reason, names in said.items())]


def about_texts(records: Records) -> list[str]:
    """Describe the texts that were measured on: a sentence each."""
    return [about_text(group[0].protocol, name) for name, group in _by_text(records).items()]


def _by_text(records: Records) -> dict[str, Records]:
    """The records of each text, that of the corpus under ""."""
    return {"": records} | {text: elsewhere(records, text) for text in other_texts(records)}


def about_text(given: Windows, name: str = "") -> str:
    """Describe windows, and what they share with the text that was fitted on."""
    text, found = given.text, given.text.overlap
    known = "" if name in ("", text.source) else f"{name}: "
    said = f"{known}{counted(given.windows, 'window')} of {counted(given.length, 'token')} of {text.source}"
    said += f", {text.split} part" if text.split else ""
    if found is None:
        return f"{said}; what they share with the fit part was not measured."
    less = f" {found.dropped_documents} documents ({found.dropped_tokens} tokens) that repeat it are left out."
    return (
        f"{said}; {found.left:.1%} of their runs of {found.run_bytes} bytes are in the fit part of "
        f"{' or '.join(found.against)}.{less if found.dropped_documents else ''}"
    )


def reference(records: Records, protocol: str) -> float | None:
    """The perplexity of the 16-bit model under a protocol; None where it was not measured."""
    parts = (record.result.protocols.get(protocol) for record in records)
    return next((part.reference_perplexity for part in parts if part and part.reference_perplexity is not None), None)


def attention_error(record: TextRecord, protocol: str = IN_USE) -> float | None:
    """The error of attention's output, mean over layers, as the cache gives it in use or with all tokens but the sinks
    encoded; None where it is not measured."""
    rows = record.result.layers
    errors = [error for row in rows if (error := row[ERRORS[protocol]]) is not None]
    return sum(errors) / len(errors) if rows and len(errors) == len(rows) else None


def _protocols(records: Records) -> list[str]:
    """Return the protocols that any of the records has."""
    return [name for name in PROTOCOLS if any(name in record.result.protocols for record in records)]


def _bits(name: str, bits: Mapping[str, float], length: int) -> dict[str, Any]:
    held = {f"at {length}": bits["at_length"], "at 4096": bits["at_4096"]}
    return {"recipe": name, "bits": bits["asymptotic"], **held}


def relative(result: Figures) -> str:
    """The distance of a perplexity from that of 16 bit, with its standard error where there is one."""
    return spread(percent(result.relative), standard_error(result), ".2%")


def standard_error(part: Figures) -> float | None:
    """The standard error of a relative perplexity over windows; None of fewer than three windows, which give none."""
    losses = part.windows and part.windows.loss
    return None if losses is not None and len(losses) < 3 else part.relative_se


def kl_error(part: Figures) -> float | None:
    """The standard error of a divergence; None for fewer than three windows, or where they were not kept."""
    kls = () if part.windows is None else part.windows.kl
    return mean_and_error(kls)[1] if len(kls) > 2 else None


def by_layer(artifact: Artifact) -> list[dict[str, Any]]:
    """Bits of keys and values in each layer, and what the fit measured there."""
    names = {"explained_variance": "explained", "relative_error": "error", "attention_error": "attention"}
    rows = []
    for layer, measures in enumerate(artifact.fit["layers"]):
        found: dict[str, Any] = {"layer": layer}
        for role in ROLES:
            found[f"{role}s"] = round(scheme_bits(artifact.recipe, layer, role, artifact.fingerprint.geometry), 4)
        for role in ROLES:
            own = measures.get(role) or {}
            found |= {f"{role}s {short}": own[name] for name, short in names.items() if name in own}
        rows.append(found)
    return rows


def named(records: Sequence[R], references: Sequence[str] = ()) -> list[R]:
    """The records, the name of each its recipe, if that is the only one of it; else the reference of the request or,
    without one, recipe and first digits of the artifact's sha256.

    references   one a record, or none at all
    """
    recipes = Counter(record.result.recipe for record in records)
    found = []
    for number, record in enumerate(records):
        name = record.result.recipe
        if recipes[name] > 1:
            name = references[number] if references else f"{name} ({record.artifact[:8]})"
            if name.endswith(".safetensors"):  # the last two parts of its path
                name = "/".join(PurePath(name).parts[-2:])
        found.append(replace(record, name=name))
    return found


def by_bits(records: Sequence[TextRecord]) -> list[TextRecord]:
    """Records in the order of their asymptotic bits, then of their divergence; those without one last."""

    def order(one: TextRecord) -> tuple[float, float]:
        cost = None if one.decisive is None else one.decisive[1].kl
        return one.result.bits["asymptotic"], math.inf if cost is None else cost

    return sorted(records, key=order)


def tasks(records: Sequence[TasksRecord]) -> list[dict[str, Any]]:
    """Return a row a recipe and protocol, with each task's figures and their standard errors, a column a metric."""
    rows = []
    for record in records:
        for name, part in record.result.protocols.items():
            row: dict[str, Any] = {"recipe": record.name, "bits": record.result.bits.get("asymptotic", 16.0)}
            row["protocol"] = SPOKEN[name]
            for answer in record.answers():
                if answer.protocol == name and answer.reason is None and answer.value is not None:
                    metric = answer.metric.removesuffix(",none")
                    head = answer.task if metric == "accuracy" else f"{answer.task} {metric}"
                    form = ".1%" if 0 <= answer.value <= 1 else ".4g"
                    row[head] = spread(f"{answer.value:{form}}", answer.se, form)
            shares = [f"{share:.0%} of {length}" for length, share in part.decoded.items()]
            shares += [f"{one['decoded']:.0%} of {task}" for task, one in part.through_the_cache.items()]
            rows.append(row | {"decoded": part.reason if part.reason is not None else ", ".join(shares)})
    return rows


def task_notes(records: Sequence[TasksRecord]) -> list[str]:
    """Return why tasks have no figures: a line for each recipe and task."""
    some = ((record.name, answer) for record in records for answer in record.answers())
    return [f"{name}: {answer.reason}\n" for name, answer in some if answer.task and answer.reason is not None]


# ---- words -----------------------------------------------------------------------------------------------------------


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


def in_bold(model: Model) -> str:
    """Model and its size, on a card."""
    return f"`{model.id}`, **{size_of(model.parameters)} parameters**"


def figure(value: float | None, form: str = ".3g") -> str:
    """A number: three digits that count, or in another form."""
    return "" if value is None else f"{value:{form}}"


def spread(said: str, error: float | None, form: str) -> str:
    """A figure with its standard error, if that is known."""
    return said if error is None else f"{said} ± {error:{form}}"


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a table, a column for each name that any of them has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---", *["---:"] * (len(names) - 1)]]
    lines += [[escaped(row.get(name)) for name in names] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def escaped(value: Any) -> str:
    """A cell of a table in Markdown."""
    return cell(value).replace("|", "\\|")
