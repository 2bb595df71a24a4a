"""Read the measurements of an evaluation record, by protocol, in records of either version.

    full     every token but the sinks was encoded and decoded before anything attended to it
    in-use   tokens arrived in steps, and a block was encoded when the cache would encode it

A record holds `result.protocols`, {protocol: figures or {"reason": why there are none}}. Records of version 1 have one
set of figures in `result` itself, which were measured in use. Records of tasks have answers in place of figures.
"""

from collections.abc import Iterable, Mapping
from typing import Any

FULL, IN_USE = "full", "in-use"
PROTOCOLS = (FULL, IN_USE)
SPOKEN = {FULL: "full encode", IN_USE: "in use"}


TASKS = ("tasks", "lm-eval")  # names of the protocols under which questions are answered, and no text is predicted


DECODE = "decode"  # name of the protocol under which the 16-bit model's own greedy text is followed


def of_text(record: Mapping[str, Any]) -> bool:
    """True if a record is of predicted text, and so has what the rest of this file reads."""
    return record["protocol"].get("name", "perplexity") == "perplexity"


def of_tasks(record: Mapping[str, Any]) -> bool:
    """True if a record is of tasks."""
    return record["protocol"].get("name") in TASKS


def answers(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List the results of a record of tasks, for each protocol, task and metric.

    Each is {"protocol", "task", "metric", "value", "se", "texts", "reference"}, the last the 16-bit model's value, or
    None; of a task without figures {"protocol", "task", "reason"}, the task None if the reason is that of all.
    """
    found: list[dict[str, Any]] = []
    for protocol, part in record["result"]["protocols"].items():
        if "reason" in part:
            found.append({"protocol": protocol, "task": None, "reason": part["reason"]})
        for task, one in part.get("tasks", {}).items():
            about = {"protocol": protocol, "task": task}
            if "reason" in one:
                found.append(about | {"reason": one["reason"]})
            exact = _metrics(part.get("reference", {}).get(task, {}))
            for metric, value in _metrics(one).items():
                known = {"texts": one.get("texts"), "reference": exact.get(metric, {}).get("value")}
                found.append(about | {"metric": metric, **value, **known})
    return found


def _metrics(task: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """{metric: {"value", "se"}}: lm-eval's by their names, the one of kvq's own tasks as accuracy."""
    if "accuracy" in task:
        return {"accuracy": {"value": task["accuracy"], "se": task["se"]}}
    return task.get("metrics", {})


def parts(record: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return a record's part for each protocol: figures, or the reason why there are none; the full encode first."""
    found = record["result"].get("protocols")
    if found is None:
        return {IN_USE: record["result"]}
    return {name: found[name] for name in PROTOCOLS if name in found}


def figures(record: Mapping[str, Any], protocol: str) -> Mapping[str, Any] | None:
    """The figures of one protocol; None where it was not asked for, or cannot be measured."""
    part = parts(record).get(protocol)
    return None if part is None or "reason" in part else part


def decisive(record: Mapping[str, Any]) -> str | None:
    """The protocol whose figures count where one must: the full encode where it was measured. None: there are none."""
    return next((name for name in PROTOCOLS if figures(record, name) is not None), None)


def reasons(record: Mapping[str, Any]) -> list[str]:
    """Return the reasons for missing figures, a sentence for each protocol that has none."""
    return [f"{SPOKEN[name]}: {part['reason']}" for name, part in parts(record).items() if "reason" in part]


def elsewhere(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the measurements on texts of other kinds, by name: the record as one of that text alone."""
    about, result = record["protocol"], record["result"]
    found = {}
    for name, measured in (result.get("texts") or {}).items():
        protocol = {**about, **about["texts"][name]}
        del protocol["texts"]
        found[name] = {**record, "protocol": protocol, "result": {**result, **measured, "layers": [], "texts": {}}}
        found[name]["corpus"] = (protocol.get("text") or {}).get("corpus_digest", record["corpus"])
    return found


def texts(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of the texts of other kinds that any of the records has."""
    return list(dict.fromkeys(name for record in records for name in record["result"].get("texts") or {}))
