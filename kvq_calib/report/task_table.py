"""Lay out as rows what was answered: of recipes and protocols, for `kvq eval --tasks` and for cards."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvq_calib.report.names import name_of
from kvq_runtime.registry import measured
from kvq_runtime.registry.measured import SPOKEN


def rows(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a table: a recipe and protocol each, with each task's figures, a column a metric, and standard errors."""
    found = []
    for one in records:
        answers = measured.answers(one)
        for name, part in one["result"]["protocols"].items():
            bits_held = one["result"].get("bits", {}).get("asymptotic", 16.0)
            row: dict[str, Any] = {"recipe": name_of(one), "bits": bits_held, "protocol": SPOKEN[name]}
            for answer in (answer for answer in answers if answer["protocol"] == name and "value" in answer):
                row[head(answer)] = cell(answer)
            found.append(row | {"decoded": _decoded(part)})
    return found


def notes(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return why tasks have no figures: a sentence for each recipe and task."""
    some = ((name_of(one), answer) for one in records for answer in measured.answers(one))
    return [f"{name}: {answer['reason']}\n" for name, answer in some if answer["task"] and "reason" in answer]


def head(answer: Mapping[str, Any]) -> str:
    """The name of a column: the task and, where it is not plain accuracy, the metric."""
    metric = answer["metric"].removesuffix(",none")
    return answer["task"] if metric == "accuracy" else f"{answer['task']} {metric}"


def cell(answer: Mapping[str, Any]) -> str:
    """A share in per cent, with its standard error; a metric that is none, such as a perplexity, as it is."""
    value, spread = answer["value"], answer["se"]
    if 0 <= value <= 1:
        return f"{value:.1%}" + ("" if spread is None else f" ± {spread:.1%}")
    return f"{value:.4g}" + ("" if spread is None else f" ± {spread:.2g}")


def _decoded(part: Mapping[str, Any]) -> str:
    """Write the share of the reads that was decoded, by length or by task; or why nothing was measured."""
    if "reason" in part:
        return part["reason"]
    shares = [f"{share:.0%} of {length}" for length, share in (part.get("decoded") or {}).items()]
    through = part.get("through_the_cache") or {}
    shares += [
        f"{one['decoded']:.0%} of {task}, {one['read_encoded']} of {one['requests']} requests"
        for task, one in through.items()
    ]
    return ", ".join(shares)
