"""Lay out a benchmark's results as rows, and explain the columns below."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvq_calib.bench.turn import WARM
from kvq_runtime.store.memory import human

Rows = Sequence[Mapping[str, Any]]


def rows(found: Rows, memory: int) -> list[dict[str, Any]]:
    """Rows of a table, a cache at a context and batch each: figures, and × their ratio to the first cache there."""
    return [_row(one, f"rows in {human(memory)}") for one in found]


def _row(one: Mapping[str, Any], fits: str) -> dict[str, Any]:
    row: dict[str, Any] = {"context": one["context"], "batch": one["batch"], "cache": one["cache"]}
    row |= dict.fromkeys(("first token", "tokens/s", "quartiles", "bytes", "peak", fits))
    if one["measured"]:
        low, high = (one["batch"] / step for step in reversed(one["step_s_quartiles"]))
        row["first token"] = f"{one['first_token_s']:.3g} s{_times(one, 'first_token_s')}"
        row["tokens/s"] = f"{one['tokens_per_s']:.3g}{_times(one, 'tokens_per_s')}"
        row["quartiles"] = f"{low:.3g} to {high:.3g}"
        row["bytes"] = f"{human(one['cache_bytes'])}{_times(one, 'cache_bytes')}"
        row["peak"] = None if one["peak_bytes"] is None else human(one["peak_bytes"])
        row[fits] = one["largest_batch"]
    return row | {"note": one["note"]}


def _times(one: Mapping[str, Any], name: str) -> str:
    ratio = one.get(f"{name}_ratio")
    return "" if ratio is None else f", {ratio:.2f}×"


def notes(found: Rows, about: Mapping[str, Any], memory: int) -> list[str]:
    """Explain what was measured, on what, and what it does not show."""
    model, machine, tokens = about["model"], about["environment"], about["tokens"]
    rounds = max((one.get("steps", 0) for one in found), default=0) // tokens
    whole = ", of the whole process" if machine["device"] == "cpu" else ""
    weights = human(about["weights_bytes"])
    said = [
        f"{model['id']}, {machine['dtype']}, on {_spoken(machine)}; random prompts. {rounds} rounds in which every "
        f"cache takes its turn, after one to warm up; {tokens} tokens a row and round count, after {WARM} that do not. "
        f"×: ratio to {found[0]['cache']} (transformers' DynamicCache) in the same run. First token: the median "
        "round's. tokens/s: of the median step, and its quartiles; a step that encodes a block takes longer (--json: "
        "mean, most).",
        "bytes: what the cache holds in memory, codebooks and predictors included. peak: measured, with the weights"
        f"{whole}. rows in {human(memory)}: computed, from bytes a row of this length beside {weights} of weights; a "
        "pass needs memory of its own.",
    ]
    if machine["device"] == "cpu":
        said.append("Measured on a CPU, which says nothing of a GPU: neither of its times nor of their ratios.")
    return said


def _spoken(machine: Mapping[str, Any]) -> str:
    if machine["device"] != "cpu":
        return machine["device"]
    threads = machine["threads"]
    return f"a CPU ({machine['machine']}, {machine['cpu']}, {threads} {'thread' if threads == 1 else 'threads'})"
