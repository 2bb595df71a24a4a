"""Read answers to tasks out of evaluation records: by task, and by length and depth.

Records of a registry may be by anybody: what is no number is None, and a record of another form is left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvq_calib.report.page.losses import number
from kvq_runtime.registry import measured

Record = Mapping[str, Any]
_CELL = ("length", "depth", "accuracy")


def tasks(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A row a record, protocol, task and metric: its value, standard error and texts, the 16-bit model's value, and
    cells by length and depth."""
    return [row for record in records for row in _of(record)]


def _of(record: Record) -> list[dict[str, Any]]:
    try:
        if not measured.of_tasks(record):
            return []
        parts = record["result"]["protocols"]
        return [
            {
                **{name: str(one[name]) for name in ("protocol", "task", "metric")},
                "value": number(one["value"]), "se": number(one.get("se")), "texts": number(one["texts"]),
                "of_16_bit": number(one["reference"]), "cells": _cells(parts[one["protocol"]], one["task"]),
            }
            for one in measured.answers(record) if number(one.get("value")) is not None
        ]  # fmt: skip
    except (AttributeError, KeyError, TypeError, ValueError):
        return []


def _cells(part: Mapping[str, Any], task: str) -> list[dict[str, Any]]:
    """Accuracy by length and depth, where it was counted so; not of lm-eval's tasks."""
    own = [{name: number(one[name]) for name in _CELL} for one in part.get("cells", []) if one["task"] == task]
    return [one for one in own if None not in one.values()]
