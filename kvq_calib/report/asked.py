"""Write the sections of a card on tasks that were answered and on greedy text that was followed, in Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvq_calib.report import decode_table, task_table
from kvq_calib.report.captions import size_of
from kvq_calib.report.names import name_of
from kvq_calib.report.sections import markdown_table
from kvq_runtime.registry import measured
from kvq_runtime.registry.card import TASKS
from kvq_runtime.registry.measured import DECODE, SPOKEN


def sections(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """A section of the records of tasks, and one of those of greedy text, where there are any."""
    found = []
    if tasks := [one for one in records if measured.of_tasks(one)]:
        found.append(f"{TASKS}\n\n" + "\n\n".join(map(_tasks, tasks)))
    for one in (one for one in records if one["protocol"].get("name") == DECODE):
        head = "" if any(text.startswith("## Greedy") for text in found) else "## Greedy text\n\n"
        table = markdown_table(decode_table.rows([one]))
        found.append(f"{head}{_model(one)}; {decode_table.about([one])} KL in nats.\n\n{table}")
    return found


def _tasks(record: Mapping[str, Any]) -> str:
    """Write one record: how the tasks were asked, then a row a task, metric and protocol, beside the 16-bit model."""
    rows = []
    for answer in measured.answers(record):
        if "reason" in answer:
            rows.append({"task": answer["task"] or "all", "16 bit": answer["reason"]})
            continue
        exact = answer["reference"]
        rows.append({
            "task": task_table.head(answer),
            "16 bit": None if exact is None else task_table.cell({"value": exact, "se": None}),
            name_of(record): task_table.cell(answer),
            "texts": answer["texts"],
            "protocol": SPOKEN[answer["protocol"]],
        })  # fmt: skip
    given = record["protocol"]
    by = f"asked by lm-eval {given['lm_eval']}" if given["name"] == "lm-eval" else "kvq's own texts"
    of = f", the first {given['limit']} examples" if given.get("limit") else ""
    shots = given.get("num_fewshot")
    with_examples = "" if shots is None else f", {shots} worked examples"
    bits = record["result"]["bits"]["asymptotic"]
    said = f"{_model(record)}; {by}{of}{with_examples}, through the cache of {bits:.3g} bits. ± is a standard error."
    return f"{said}\n\n{markdown_table(rows)}"


def _model(record: Mapping[str, Any]) -> str:
    model = record["protocol"]["model"]
    return f"`{model['id']}`, **{size_of(model['parameters'])} parameters**"
