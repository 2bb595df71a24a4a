"""Lay out the evaluation records of a version as tables, for `kvq show`."""

from collections.abc import Sequence
from typing import Any

from kvq_runtime.disk.strict_json import flatten
from kvq_runtime.registry.measured import Record, TasksRecord, of_tasks

MEASURED = {  # {column of the table of evaluations: dotted key in the record's JSON, which `kvq show --json` prints}
    **{"model": "protocol.model.id", "text": "protocol.text.source", "windows": "protocol.windows"},
    **{"length": "protocol.length", "recent": "protocol.recent", "perplexity": "result.perplexity"},
    **{"relative": "result.relative", "kl": "result.kl", "top1": "result.top1"},  # of version 1, in use
    **{
        f"{protocol}: {name}": f"result.protocols.{protocol}.{key}"
        for protocol in ("full", "in-use")
        for name, key in {"relative": "relative", "kl": "kl", "decoded": "decoded.attention", "none": "reason"}.items()
    },
}


def tables(records: Sequence[Record]) -> dict[str, list[dict[str, Any]]]:
    """{title: rows}: a row a record, of tasks a row a protocol and task."""
    stated = [flatten(one.raw) for one in records if not isinstance(one, TasksRecord)]
    measured = [{name: flat[key] for name, key in MEASURED.items() if key in flat} for flat in stated]
    answered = [row for one in of_tasks(records) for row in _answered(one)]
    titled = {"evaluations (--json has all of each)": measured, "tasks": answered}
    return {title: rows for title, rows in titled.items() if rows}


def _answered(record: TasksRecord) -> list[dict[str, Any]]:
    """A row for each task and protocol: its figures by metric, and how many texts."""
    rows = []
    for protocol, part in record.result.protocols.items():
        for task, found in part.tasks.items():
            said = [f"{name} {one.value:.4g}" for name, one in found.figures.items() if one.value is not None]
            said += [] if found.reason is None else [found.reason]
            rows.append({"task": task, "protocol": protocol, "figures": ", ".join(said), "texts": found.texts})
    return rows
