"""Make figures of a benchmark's rounds, and show them: a table, and notes on its columns.

Figures are medians and quartiles of each cache at each context and batch, and ratios to 16 bit.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvq_calib.bench.contenders import Contender
from kvq_calib.bench.rounds import FULL, WARM, Round, Turn
from kvq_runtime.errors import counted
from kvq_runtime.store.memory import human

Rows = Sequence[Mapping[str, Any]]


def figures(rounds: Iterable[Round], entrants: Sequence[Contender], weights: int, memory: int) -> list[dict[str, Any]]:
    """A row of each cache at each context and batch of which there is a round.

    entrants  the first is what the others are compared to
    weights   bytes of the model
    memory    bytes that model and caches are to share
    """
    cells: dict[tuple[int, int], list[Round]] = {}
    for one in rounds:
        cells.setdefault((one.context, one.batch), []).append(one)
    found = []
    for (context, batch), some in cells.items():
        base: Mapping[str, Any] = {}
        for entrant in entrants:
            row = {"context": context, "batch": batch, "cache": entrant.name, "recipe": entrant.recipe}
            turns = [one.turns[entrant.name] for one in some if entrant.name in one.turns]
            measured = _figures([turn for turn in turns if not turn.error], batch, weights, memory)
            base = measured if entrant is entrants[0] else base
            row |= measured | _ratios(measured, base)
            why = dict.fromkeys(turn.error for turn in turns)
            graphs = turns[-1].graphs if turns else ""
            row["note"] = "; ".join(filter(None, [*why, entrant.note, graphs]))
            row["measured"] = bool(measured)
            found.append(row)
    return found


def _figures(turns: Sequence[Turn], batch: int, weights: int, memory: int) -> dict[str, Any]:
    """Return the figures of the turns of one cache; {} if there are none."""
    if not turns:
        return {}
    steps = np.array([step for turn in turns for step in turn.steps_s])
    low, middle, high = np.quantile(steps, (0.25, 0.5, 0.75)).tolist()
    last = turns[-1]
    return {
        "first_token_s": float(np.median([turn.first_s for turn in turns])),
        "step_s": middle,
        "step_s_quartiles": [low, high],
        "processor_s": float(np.median([turn.processor_s for turn in turns])),
        "step_s_mean": float(steps.mean()),
        "step_s_most": float(steps.max()),
        "steps": len(steps),
        "tokens_per_s": batch / middle,
        "cache_bytes": last.cache_bytes,
        "shared_bytes": last.shared_bytes,
        "peak_bytes": min((turn.peak_bytes for turn in turns if turn.peak_bytes is not None), default=None),
        "largest_batch": largest_batch(last, batch, weights, memory),
    }


def failed(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return why recipes have no figures, apart from a lack of memory: sentences, each once."""
    missing = [one for one in found if one["recipe"] and not one["measured"] and FULL not in one["note"]]
    return list(dict.fromkeys(f"{one['cache']}: {one['note']}" for one in missing))


def largest_batch(turn: Turn, batch: int, weights: int, memory: int) -> int:
    """Compute how many rows such as these fit beside the weights.

    The bytes of a row were measured; the memory of a pass itself is not counted.
    """
    row = (turn.cache_bytes - turn.shared_bytes) / batch
    return max(0, int((memory - weights - turn.shared_bytes) / row))


def _ratios(row: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, float]:
    names = ("first_token_s", "tokens_per_s", "cache_bytes") if row and base else ()
    return {f"{name}_ratio": row[name] / base[name] for name in names}


def rows(found: Rows, memory: int) -> list[dict[str, Any]]:
    """Rows of a table, a cache at a context and batch each: figures, and × their ratio to the first cache there."""
    fits = f"rows in {human(memory)}"
    return [{name: one[name] for name in ("context", "batch", "cache")} | _row(one, fits) for one in found]


def _row(one: Mapping[str, Any], fits: str) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(("first token", "tokens/s", "quartiles", "processor", "bytes", "peak", fits))
    if one["measured"]:
        low, high = (one["batch"] / step for step in reversed(one["step_s_quartiles"]))
        row["first token"] = f"{one['first_token_s']:.3g} s{_times(one, 'first_token_s')}"
        row["tokens/s"] = f"{one['tokens_per_s']:.3g}{_times(one, 'tokens_per_s')}"
        row["quartiles"] = f"{low:.3g} to {high:.3g}"
        row["processor"] = f"{one['processor_s']:.3g} s"
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
    weights = human(about["weights_bytes"])
    said = [
        f"{model['id']}, {machine['dtype']}, on {_spoken(machine)}; random prompts. {counted(rounds, 'round')} in "
        f"which every cache takes its turn, after one to warm up; {counted(tokens, 'token')} a row and round count, "
        f"after {WARM} that do not. ×: ratio to {found[0]['cache']} (transformers' DynamicCache) in the same run. "
        "First token: the median round's. tokens/s: of the median step, and its quartiles; a step that encodes a block "
        "takes longer (--json: mean, most). processor: seconds of all threads a step.",
        "bytes: what the cache holds in memory, codebooks and predictors included. peak: of a GPU, with the "
        f"weights. rows in {human(memory)}: computed, from bytes a row of this length beside {weights} of weights; a "
        "pass needs memory of its own.",
    ]
    if machine["device"] == "cpu":
        said.append("Measured on a CPU, which says nothing of a GPU: neither of its times nor of their ratios.")
    return said


def _spoken(machine: Mapping[str, Any]) -> str:
    if machine["device"] != "cpu":
        return machine["device"]
    return f"a CPU ({machine['machine']}, {machine['cpu']}, {counted(machine['threads'], 'thread')})"
