"""Read answers to tasks out of evaluation records: by task, and by length and depth.

A record of tasks has them in `result.protocols`, as `kvq eval --tasks` writes them, with an accuracy or metrics by
name; a record of perplexity may have the same under `result.tasks`, with or without a protocol in between. What has
another form is left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvq_calib.report.page.losses import number
from kvq_runtime.registry.measured import PROTOCOLS

Record = Mapping[str, Any]


def tasks(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A row a record, protocol, task and metric: its value, standard error and texts, the 16-bit model's value, and
    cells by length and depth."""
    return [row for record in records for protocol, part in _parts(record) for row in _rows(protocol, part)]


def _parts(record: Record) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(protocol, {"tasks": ..., "cells": ...}) of a record, wherever they stand."""
    result = record.get("result")
    if not isinstance(result, Mapping):
        return
    for place in (result.get("protocols"), result.get("tasks"), record.get("tasks")):
        if not isinstance(place, Mapping):
            continue
        for given in (place, place.get("protocols")):
            if isinstance(given, Mapping):
                yield from ((name, given[name]) for name in _named(given) if _answered(given[name]))
        if _answered(place):
            yield "", place


def _named(given: Mapping[str, Any]) -> list[str]:
    """Names of protocols, known ones first."""
    return [name for name in PROTOCOLS if name in given] + sorted(set(map(str, given)) - set(PROTOCOLS) - {"protocols"})


def _answered(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("tasks"), Mapping)


def _rows(protocol: str, part: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    cells, exact = part.get("cells"), part.get("reference")
    for task, found in part["tasks"].items():
        own = [one for one in (cells if isinstance(cells, list) else []) if _is_cell(one) and one["task"] == task]
        reference = _metrics(exact.get(task)) if isinstance(exact, Mapping) else {}
        for metric, (value, error) in _metrics(found).items():
            row = {"task": str(task), "metric": metric, "protocol": protocol, "value": value, "se": error}
            row |= {"texts": number(found.get("texts")), "of_16_bit": reference.get(metric, (None, None))[0]}
            yield row | {"cells": [{name: one[name] for name in ("length", "depth", "accuracy")} for one in own]}


def _metrics(found: Any) -> dict[str, tuple[float, float | None]]:
    """{metric: (value, standard error)} of a task: kvq's accuracy, or those of lm-eval by their names."""
    if not isinstance(found, Mapping):
        return {}
    named = found.get("metrics")
    given = named if isinstance(named, Mapping) else {}
    several = {str(name): (number(one.get("value")), number(one.get("se"))) for name, one in given.items()
               if isinstance(one, Mapping)}  # fmt: skip
    several |= {"accuracy": (number(found.get("accuracy")), number(found.get("se")))}
    return {name: (value, error) for name, (value, error) in several.items() if value is not None}


def _is_cell(one: Any) -> bool:
    numbers = ("length", "depth", "accuracy")
    return isinstance(one, Mapping) and "task" in one and all(number(one.get(name)) is not None for name in numbers)
