"""Read losses out of evaluation records: by text and protocol, against bounds, and by week."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvq_calib.report.sections import corpus_of
from kvq_calib.report.tables import about_text, kl_error, standard_error
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.registry import verdict
from kvq_runtime.registry.measured import FULL, IN_USE, Figures, Record, TextRecord, Unmeasured, of_text
from kvq_runtime.registry.verdict import week


def main(records: Iterable[Record], made: Artifact | None) -> TextRecord | None:
    """The record that stands for a version. None: it was not measured."""
    return verdict.main(records, source(made))


def source(made: Artifact | None) -> str | None:
    """The text that an artifact was fitted to; None where that is not known."""
    given = corpus_of(made).get("source") if made else None
    return given if isinstance(given, str) else None


def rows(record: TextRecord, fitted: str | None = None) -> list[dict[str, Any]]:
    """The losses of a record: a row a text and protocol, its own text first, then texts beside it.

    fitted   the text of the fit, which is in domain; None: not known
    """
    texts = {record.protocol.text.source: record} | record.elsewhere()
    found = []
    for place, (text, one) in enumerate(texts.items()):
        windows = {"windows": one.protocol.windows, "length": one.protocol.length}
        for name, part in one.result.protocols.items():
            row: dict[str, Any] = {"text": text, "main": place == 0, "protocol": name}
            row["in_domain"] = None if fitted is None else text == fitted
            found.append(row | _figures(part) | windows)
    return found


def _figures(part: Unmeasured | Figures) -> dict[str, Any]:
    if isinstance(part, Unmeasured):
        return {"reason": part.reason}
    names = ("perplexity", "reference_perplexity", "relative", "kl", "top1")
    found = {name: getattr(part, name) for name in names}
    found |= {"relative_se": standard_error(part), "kl_se": kl_error(part)}
    return found | {"decoded": part.decoded and part.decoded.attention}


def deciding(found: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the row that counts where one must: on the record's own text, by full encode if that was measured."""
    own = [row for row in found if row["main"] and row.get("kl") is not None]
    return next((row for name in (FULL, IN_USE) for row in own if row["protocol"] == name), None)


def about(record: TextRecord) -> dict[str, Any]:
    """Describe the measurement: a sentence a text, the model's size, and the windows that errors by layer are from."""
    given = record.protocol
    texts = [about_text(given), *(about_text(given.texts[name], name) for name in record.result.texts)]
    return {"texts": texts, "parameters": given.model.parameters, "error_windows": given.error_windows}


def gate(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The verdicts on bounds that records hold, the latest week last."""
    found = []
    for record in sorted(of_text(records), key=lambda one: week(one) or 0):
        verdict = record.result.gate
        if verdict is not None:
            row = {"bounds": dict(verdict.bounds), "failed": list(verdict.failed), "protocol": verdict.protocol}
            found.append(row | {"week": week(record)})
    return found


def weekly(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the results of drift checks: a row a week, in their order."""
    found = []
    for record in sorted((one for one in of_text(records) if week(one)), key=lambda one: week(one) or 0):
        row = deciding(rows(record))
        found.append({"week": week(record), "kl": row and row["kl"], "relative": row and row["relative"]})
    return found


def brief(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A line a record and text and protocol, of all that the registry has of the version."""
    found = []
    for record in of_text(records):
        for row in rows(record):
            found.append({"week": week(record)} | {name: row.get(name) for name in _BRIEF})
    return found


_BRIEF = ("text", "protocol", "windows", "length", "perplexity", "relative", "relative_se", "kl", "top1", "reason")
