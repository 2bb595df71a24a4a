"""Read answers to tasks, and where greedy text was left, out of sound evaluation records."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvq_calib.report import decode_table
from kvq_calib.report.captions import where
from kvq_runtime.registry import measured
from kvq_runtime.registry.measured import DECODE

Record = Mapping[str, Any]
_CELL = ("length", "depth", "accuracy")
_FIGURES = ("reason", "kl", "kl_se", "top1", "trend", "windows", "bins")


def tasks(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A row a record, protocol, task and metric: its value, standard error and texts, the 16-bit model's value, and
    cells by length and depth."""
    return [
        {
            **{name: one.get(name) for name in ("protocol", "task", "metric", "value", "se", "texts")},
            "of_16_bit": one["reference"], "cells": _cells(record["result"]["protocols"][one["protocol"]], one["task"]),
        }
        for record in records if measured.of_tasks(record)
        for one in measured.answers(record) if one.get("value") is not None
    ]  # fmt: skip


def _cells(part: Mapping[str, Any], task: str) -> list[dict[str, Any]]:
    """Accuracy by length and depth, where it was counted so; not of lm-eval's tasks."""
    return [{name: one[name] for name in _CELL} for one in part.get("cells", []) if one["task"] == task]


def greedy(records: Sequence[Record]) -> list[dict[str, Any]]:
    """What each record found, as `evaluate/decode.py` writes it, with "about", a sentence on what was followed.

    Records of a registry may be by anybody: what cannot be laid out is left out.
    """
    return [found for record in records if (found := _greedy(record)) is not None]


def _greedy(record: Record) -> dict[str, Any] | None:
    try:
        if record["protocol"].get("name") != DECODE:
            return None
        part = record["result"]["protocols"][DECODE]
        found = {name: part[name] for name in _FIGURES if name in part}
        decode_table.row(found), decode_table.positions(found)  # what cannot be laid out is left out
        return {"about": f"{where(record)}. {decode_table.about([record])}", **found}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None
