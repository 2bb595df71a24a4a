"""Lay out as rows what was answered: of recipes and protocols, for `kvq eval --tasks` and for cards."""

from collections.abc import Sequence
from typing import Any

from kvq_runtime.registry.measured import SPOKEN, Answer, Asked, TasksRecord


def rows(records: Sequence[TasksRecord]) -> list[dict[str, Any]]:
    """Rows of a table: a recipe and protocol each, with each task's figures, a column a metric, and standard errors."""
    found = []
    for one in records:
        for name, part in one.result.protocols.items():
            bits_held = one.result.bits.get("asymptotic", 16.0)
            row: dict[str, Any] = {"recipe": one.name, "bits": bits_held, "protocol": SPOKEN[name]}
            for answer in (answer for answer in one.answers() if answer.protocol == name and answer.reason is None):
                row[head(answer)] = cell(answer.value, answer.se)
            found.append(row | {"decoded": _decoded(part)})
    return found


def notes(records: Sequence[TasksRecord]) -> list[str]:
    """Return why tasks have no figures: a sentence for each recipe and task."""
    some = ((one.name, answer) for one in records for answer in one.answers())
    return [f"{name}: {answer.reason}\n" for name, answer in some if answer.task and answer.reason is not None]


def head(answer: Answer) -> str:
    """The name of a column: the task and, where it is not plain accuracy, the metric."""
    metric = answer.metric.removesuffix(",none")
    return answer.task if metric == "accuracy" else f"{answer.task} {metric}"


def cell(value: float | None, spread: float | None = None) -> str:
    """A share in per cent, with its standard error; a metric that is none, such as a perplexity, as it is."""
    if value is None:
        return ""
    if 0 <= value <= 1:
        return f"{value:.1%}" + ("" if spread is None else f" ± {spread:.1%}")
    return f"{value:.4g}" + ("" if spread is None else f" ± {spread:.2g}")


def _decoded(part: Asked) -> str:
    """Write the share of the reads that was decoded, by length or by task; or why nothing was measured."""
    if part.reason is not None:
        return part.reason
    shares = [f"{share:.0%} of {length}" for length, share in part.decoded.items()]
    shares += [
        f"{one['decoded']:.0%} of {task}, {one['read_encoded']} of {one['requests']} requests"
        for task, one in part.through_the_cache.items()
    ]
    return ", ".join(shares)
