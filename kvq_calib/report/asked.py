"""Read answers to tasks, and where greedy text was left, out of evaluation records: for pages, and for cards."""

from collections.abc import Sequence
from typing import Any

from kvq_calib.report import decode_table, task_table
from kvq_calib.report.captions import size_of, where
from kvq_calib.report.sections import markdown_table
from kvq_runtime.registry.card import TASKS
from kvq_runtime.registry.measured import DECODE, SPOKEN, GreedyRecord, Record, TasksRecord, of_tasks

_FIGURES = ("reason", "kl", "kl_se", "top1", "trend", "windows", "bins")


def tasks(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A row a record, protocol, task and metric: its value, standard error and texts, the 16-bit model's value, and
    cells by length and depth."""
    return [
        {
            **{name: getattr(one, name) for name in ("protocol", "task", "metric", "value", "se", "texts")},
            "of_16_bit": one.reference,
            "cells": [{"length": cell.length, "depth": cell.depth, "accuracy": cell.accuracy}
                      for cell in record.result.protocols[one.protocol].cells if cell.task == one.task],
        }
        for record in of_tasks(records) for one in record.answers() if one.value is not None
    ]  # fmt: skip


def greedy(records: Sequence[Record]) -> list[dict[str, Any]]:
    """What each record found, as `evaluate/decode.py` writes it, with "about", a sentence on what was followed.

    Records of a registry may be by anybody: what cannot be laid out is left out.
    """
    return [found for record in _greedy_records(records) if (found := _greedy(record)) is not None]


def _greedy_records(records: Sequence[Record]) -> list[GreedyRecord]:
    return [one for one in records if isinstance(one, GreedyRecord)]


def _greedy(record: GreedyRecord) -> dict[str, Any] | None:
    try:
        part = record.result.protocols[DECODE]
        found = {name: part[name] for name in _FIGURES if name in part}
        decode_table.row(found), decode_table.positions(found)  # what cannot be laid out is left out
        return {"about": f"{where(record.protocol.model)}. {decode_table.about([record])}", **found}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None


def sections(records: Sequence[Record]) -> list[str]:
    """A section of the records of tasks, and one of those of greedy text, where there are any."""
    found = []
    if tasks := of_tasks(records):
        found.append(f"{TASKS}\n\n" + "\n\n".join(map(_tasks, tasks)))
    for one in _greedy_records(records):
        head = "" if any(text.startswith("## Greedy") for text in found) else "## Greedy text\n\n"
        table = markdown_table(decode_table.rows([one]))
        found.append(f"{head}{_model(one)}; {decode_table.about([one])} KL in nats.\n\n{table}")
    return found


def _tasks(record: TasksRecord) -> str:
    """Write one record: how the tasks were asked, then a row a task, metric and protocol, beside the 16-bit model."""
    rows = []
    for answer in record.answers():
        if answer.reason is not None:
            rows.append({"task": answer.task or "all", "16 bit": answer.reason})
            continue
        rows.append({
            "task": task_table.head(answer),
            "16 bit": None if answer.reference is None else task_table.cell(answer.reference),
            record.name: task_table.cell(answer.value, answer.se),
            "texts": answer.texts,
            "protocol": SPOKEN[answer.protocol],
        })  # fmt: skip
    given = record.protocol
    by = f"asked by lm-eval {given.lm_eval}" if given.name == "lm-eval" else "kvq's own texts"
    of = f", the first {given.limit} examples" if given.limit else ""
    with_examples = "" if given.num_fewshot is None else f", {given.num_fewshot} worked examples"
    bits = record.result.bits["asymptotic"]
    said = f"{_model(record)}; {by}{of}{with_examples}, through the cache of {bits:.3g} bits. ± is a standard error."
    return f"{said}\n\n{markdown_table(rows)}"


def _model(record: Record) -> str:
    model = record.protocol.model
    return f"`{model.id}`, **{size_of(model.parameters)} parameters**"
