"""Read losses out of evaluation records: by text and protocol, against bounds, and by week.

Records of a registry may be of any age and by anybody: what is no number is None, and what has another form is left
out.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvq_calib.report.points import kl_error
from kvq_calib.report.sections import corpus_of
from kvq_calib.report.tables import about_text, standard_error, text_name
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.registry import measured, verdict
from kvq_runtime.registry.measured import FULL, IN_USE
from kvq_runtime.registry.sound import of_text
from kvq_runtime.registry.verdict import week

Record = Mapping[str, Any]


def number(value: Any) -> float | None:
    """A number as it is; None for anything else."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def main(records: Iterable[Record], made: Artifact | None) -> Record | None:
    """The record that stands for a version. None: it was not measured."""
    return verdict.main(records, source(made))


def source(made: Artifact | None) -> str | None:
    """The text that an artifact was fitted to; None where that is not known."""
    given = corpus_of(made).get("source") if made else None
    return given if isinstance(given, str) else None


def rows(record: Record, fitted: str | None = None) -> list[dict[str, Any]]:
    """The losses of a record: a row a text and protocol, its own text first, then texts beside it.

    fitted   the text of the fit, which is in domain; None: not known
    """
    texts = {text_name(record): record} | measured.elsewhere(record)
    found = []
    for place, (text, one) in enumerate(texts.items()):
        for name, part in measured.parts(one).items():
            row: dict[str, Any] = {"text": text, "main": place == 0, "protocol": name}
            row["in_domain"] = None if fitted is None else text == fitted
            found.append(row | _figures(part) | _windows(one))
    return found


def _figures(part: Record) -> dict[str, Any]:
    if "reason" in part:
        return {"reason": str(part["reason"])}
    shares = part.get("decoded")
    read = number(shares.get("attention")) if isinstance(shares, Mapping) else None
    names = ("perplexity", "reference_perplexity", "relative", "kl", "top1")
    return {name: number(part.get(name)) for name in names} | {
        "relative_se": number(standard_error(part)),
        "kl_se": kl_error(part),
        "decoded": read,
    }


def _windows(record: Record) -> dict[str, Any]:
    return {name: record["protocol"][name] for name in ("windows", "length")}


def loss(row: Mapping[str, Any]) -> float | None:
    """The divergence of a row of `rows`, nats per token."""
    return number(row.get("kl"))


def deciding(found: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the row that counts where one must: on the record's own text, by full encode if that was measured."""
    own = [row for row in found if row["main"] and loss(row) is not None]
    return next((row for name in (FULL, IN_USE) for row in own if row["protocol"] == name), None)


def about(record: Record) -> dict[str, Any]:
    """Describe the measurement: a sentence a text, the model's size, and the windows that errors by layer are from."""
    given = record["protocol"]
    texts = [about_text(record), *(about_text(one, name) for name, one in measured.elsewhere(record).items())]
    parameters = number((given.get("model") or {}).get("parameters"))
    return {"texts": texts, "parameters": parameters, "error_windows": number(given.get("error_windows"))}


def gate(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The verdicts on bounds that records hold, the latest week last."""
    found = []
    for record in sorted(of_text(records), key=lambda one: week(one) or 0):
        verdict = record["result"].get("gate")
        if isinstance(verdict, Mapping) and isinstance(verdict.get("bounds"), Mapping):
            failed = [str(one) for one in verdict.get("failed") or []]
            bounds = {str(name): number(bound) for name, bound in verdict["bounds"].items()}
            found.append(
                {"bounds": bounds, "failed": failed, "protocol": verdict.get("protocol"), "week": week(record)}
            )
    return found


def weekly(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the results of drift checks: a row a week, in their order."""
    found = []
    for record in sorted((one for one in of_text(records) if week(one)), key=lambda one: week(one) or 0):
        row = deciding(rows(record))
        found.append({"week": week(record), "kl": row and loss(row), "relative": row and row["relative"]})
    return found


def brief(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A line a record and text and protocol, of all that the registry has of the version."""
    found = []
    for record in of_text(records):
        for row in rows(record):
            found.append({"week": week(record)} | {name: row.get(name) for name in _BRIEF})
    return found


_BRIEF = ("text", "protocol", "windows", "length", "perplexity", "relative", "relative_se", "kl", "top1", "reason")
