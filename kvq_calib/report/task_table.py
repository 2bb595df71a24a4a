"""Lay out as rows what was answered: of recipes and protocols, for `kvq eval --tasks`."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvq_calib.report.names import name_of
from kvq_runtime.registry.measured import SPOKEN


def rows(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a table: a recipe and protocol each, with the accuracy of each task and its standard error."""
    found = []
    for one in records:
        for name, part in one["result"]["protocols"].items():
            bits_held = one["result"].get("bits", {}).get("asymptotic", 16.0)
            row = {"recipe": name_of(one), "bits": bits_held, "protocol": SPOKEN[name]}
            if "reason" in part:
                found.append(row | {"decoded": part["reason"]})
                continue
            for task, one_task in part["tasks"].items():
                spread = "" if one_task["se"] is None else f" ± {one_task['se']:.1%}"
                row[task] = f"{one_task['accuracy']:.1%}{spread}"
            shares = part.get("decoded") or {}
            found.append(row | {"decoded": ", ".join(f"{share:.0%} of {length}" for length, share in shares.items())})
    return found
