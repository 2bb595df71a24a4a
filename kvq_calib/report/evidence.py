"""Read what a registry has of a version: whether it is whole, and losses out of its evaluation records."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvq_calib.report.sections import corpus_of
from kvq_calib.report.tables import kl_error, standard_error
from kvq_runtime.artifact import artifact
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.registry import rating
from kvq_runtime.registry.evaluation_records import (
    FULL,
    IN_USE,
    Figures,
    Record,
    TextRecord,
    Unmeasured,
    readable,
    text_records,
)
from kvq_runtime.registry.events import Version
from kvq_runtime.registry.rating import drift_week
from kvq_runtime.registry.registry import Registry

OK, FAILED = "ok", "failed"


def checked(registry: Registry, name: str, version: Version) -> tuple[list[dict[str, Any]], Artifact | None]:
    """Load the version's file with every check: a row on it, and the artifact if it passed."""
    try:
        made = artifact.load(registry.fetch(name, version), version.sha256, version.size)
    except (ArtifactError, NotFound) as error:
        return [_row("file", FAILED, str(error))], None
    return [_row("file", OK, "all checks of kvq verify passed")], made


def beside(registry: Registry, name: str, version: Version) -> list[dict[str, Any]]:
    """Check attachments, and whether the version was withdrawn: a row each."""
    try:
        files = registry.attachments(name, version)
        rows = [_row("attachments", OK, f"{len(files)} files have the digests that the registry states")]
    except (ArtifactError, NotFound) as error:
        rows = [_row("attachments", FAILED, str(error))]
    return rows if version.yanked is None else [*rows, _row("yanked", FAILED, version.yanked)]


def evaluations(registry: Registry, name: str, version: Version) -> tuple[list[Record], list[dict[str, Any]]]:
    """The sound evaluation records of a version, and a row on whether all are sound; none if one is damaged."""
    try:
        found = registry.evaluations(version.sha256, name)
    except (ArtifactError, NotFound) as error:
        return [], [_row("evaluations", FAILED, str(error))]
    records, said = readable(found), f"{len(found)} records have the digests that they are named by"
    if len(records) == len(found):
        return records, [_row("evaluations", OK, said)]
    left_out = f"{said}; {len(found) - len(records)} are of a form that is not read, and left out"
    return records, [_row("evaluations", FAILED, left_out)]


def _row(check: str, result: str, what: str) -> dict[str, Any]:
    return {"check": check, "result": result, "what": what}


def main(records: Iterable[Record], made: Artifact | None) -> TextRecord | None:
    """The record that stands for a version. None: it was not measured."""
    return rating.main_record(records, fitted_on(made))


def fitted_on(made: Artifact | None) -> str | None:
    """Return the text that an artifact was fitted to; None where that is not known."""
    source = corpus_of(made).get("source") if made else None
    return source if isinstance(source, str) else None


def losses(record: TextRecord, fitted: str | None = None) -> list[dict[str, Any]]:
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


def gate(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The verdicts on bounds that records hold, the latest week last."""
    return [
        {"bounds": dict(one.bounds), "failed": list(one.failed), "protocol": one.protocol, "week": drift_week(record)}
        for record in sorted(text_records(records), key=lambda one: drift_week(one) or 0)
        if (one := record.result.gate) is not None
    ]


def weekly(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the results of drift checks: a row a week, in their order."""
    found = []
    weeks = [(week, record) for record in text_records(records) if (week := drift_week(record))]
    for week, record in sorted(weeks, key=lambda pair: pair[0]):
        row = deciding(losses(record))
        found.append({"week": week, "kl": row and row["kl"], "relative": row and row["relative"]})
    return found
