"""Check what a cache of fewer bits costs a model, before anything is calibrated.

Presets that need no fit are measured by full encode on a few windows, side by side; those of few bits also with their
keys, or their values, alone. Their divergence from the 16-bit model says which of them is safe.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvq_calib.evaluate.candidate import Candidate
from kvq_calib.model.files import ModelFiles
from kvq_calib.run import plan
from kvq_runtime.recipe import Recipe, preset
from kvq_runtime.registry.evaluation_records import FULL
from kvq_runtime.store.memory import Sizes

WINDOWS, LENGTH = 2, 256
CHECKED, APART = ("rtn-8bit", "kivi-4bit", "kvarn-k4v4", "kvarn-k4v2", "kivi-2bit"), ("kivi-4bit", "kivi-2bit")
ALONE = {"keys alone": "value", "values alone": "key"}  # the other ones stay in 16 bits
SAFE = 0.03  # nats a token; in benchmarks/records perplexity grows by 1% to 2% there
FITTED = "fisher-3bit"
MEASURED = (
    "On Qwen2.5-Coder-0.5B and two windows of WikiText-2, another part of which it was fitted to, it lost 0.0079 nats "
    "at 3 bits; kivi-4bit lost 0.014 at 5, kivi-2bit 0.43 at 3."
)
MIB = 1 << 20


def candidates(files: ModelFiles) -> list[Candidate]:
    """Return what is measured: presets that suit the model, and their variants with 16 bits in values or keys."""
    recipes = [preset(name) for name in CHECKED] + [_alone(preset(name), part) for name in APART for part in ALONE]
    return [Candidate.unfitted(recipe, files) for recipe in recipes if _suits(recipe, files)]


def _alone(recipe: Recipe, column: str) -> Recipe:
    """Return the recipe of a column of `ALONE`."""
    changed: Any = {ALONE[column]: preset("exact").key}
    return replace(recipe, **changed, name=f"{recipe.name}, {column}")


def _suits(recipe: Recipe, files: ModelFiles) -> bool:
    try:
        plan.check(recipe.check(files.geometry), files)
    except ValueError:
        return False
    return True


def summarize(files: ModelFiles, chosen: Sequence[Candidate], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the share of the model's cache that is compressed, and a row for each preset.

    Bytes are those of a row as long as the model's context; "compressed" leaves out layers that slide over a window.
    """
    tokens, geometry, sliding = files.context, files.geometry, files.sliding
    whole = 4 * geometry.layers * geometry.width * tokens
    exact = whole + sliding.bytes(tokens)
    rows: list[dict[str, Any]] = [{"recipe": "16 bit", "bits": 16.0, "MiB": exact / MIB}]
    results = {candidate.recipe.name: one["result"] for candidate, one in zip(chosen, records, strict=True)}
    for candidate in chosen:
        name = candidate.recipe.name
        if name not in CHECKED:
            continue
        figures, size = results[name]["protocols"][FULL], Sizes(candidate.recipe, geometry, sliding=sliding).at(tokens)
        row = {"recipe": name, "bits": results[name]["bits"]["asymptotic"], "MiB": size.total_bytes / MIB}
        row |= {"KL": figures["kl"], "top1": figures["top1"]}
        parts = {column: results.get(f"{name}, {column}") for column in ALONE}
        row |= {column: part["protocols"][FULL]["kl"] for column, part in parts.items() if part}
        rows.append(row)
    return {"model": files.id, "tokens": tokens, "compressed": whole / exact, "rows": rows}


def advice(files: ModelFiles, model: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Say which preset is safe, what a calibration could gain, and what to run next; `model`: as the user named it."""
    exact, *measured = rows
    best = min((row for row in measured if row["KL"] <= SAFE), key=lambda row: row["MiB"], default=None)
    bound = f"Safe, at most {SAFE} nats a token:"
    if best is None:
        yield f"{bound} none of these. Serve in 16 bit, or measure a fit."
    else:
        share = f"{best['MiB'] / exact['MiB']:.0%} of the bytes"
        same = f"{best['top1']:.1%} of the likeliest tokens are those of 16 bit"
        yield f"{bound} {best['recipe']}. It takes {share}, loses {best['KL']:.2g}, and {same}."
    worst = max(measured, key=lambda row: row["KL"], default={})
    if "keys alone" in worst and "values alone" in worst:
        parts = f"{worst['keys alone']:.2g} with keys alone, {worst['values alone']:.2g} with values alone"
        yield f"{worst['recipe']} loses {worst['KL']:.2g} nats: {parts}."
    if _suits(preset(FITTED), files):
        yield f"Fewer bits may be safe after a calibration, as {FITTED}. {MEASURED}"
        yield f"Next: kvq-calibrate --model {model} --recipe {FITTED} --corpus FILE, with text as you serve."
    else:
        yield f"Next: kvq compare --model {model} --corpus FILE, with text as you serve."
