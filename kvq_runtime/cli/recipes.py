"""The command `kvq recipes`: which recipe to take, the families there are, every recipe, and all settings of one."""

import re
from argparse import Namespace
from importlib import import_module
from typing import Any

from kvq_runtime.artifact import describe, recipe_text
from kvq_runtime.attention import absorbed, fused
from kvq_runtime.cli.table import print_record, print_table
from kvq_runtime.errors import NotFound
from kvq_runtime.recipe import Recipe, families, preset
from kvq_runtime.store.memory import asymptotic_bits

ADVICE = {  # which to take, as README.md has it
    "higgs-4bit": "nothing to calibrate: begin here; kivi-4bit if single channels of the keys are large",
    "aqua-2bit": "calibrated on your model, for 2 bits: saves memory, costs time; or auto with --bits 2.1",
    "higgs-head-3bit": "nothing to calibrate: under kvq attention steps read packed codes, not decoded ones",
}
MODEL = "Qwen2.5-7B (28 layers, 4 KV heads of 128)"
BITS = f"""
bits: per element of an encoded token, scales and all metadata included, on {MODEL};
a first layer in 4 bits weighs more on smaller models. kvq bytes RECIPE --model M computes whole caches, exact tokens
included."""
ALL = """kvq recipes --family NAME, --bits 2.5, --fitted or --all list single recipes; kvq recipes NAME has all of one,
and what its decode step reads."""


def recipes(args: Namespace) -> int:
    """Print what to take and a line a family; or those recipes that are asked for; or one, changed perhaps."""
    if args.set and not args.name:
        raise ValueError(
            f"--set {args.set[0]} changes a recipe; name it, as in kvq recipes aqua-2bit --set {args.set[0]}"
        )
    if args.name:
        return _one(args)
    chosen = _chosen(args)
    rows = {name: describe.recipe_row(recipe, describe.REFERENCE_MODEL) for name, recipe in chosen.items()}
    if args.json:
        print_table([row | {"settings": chosen[name].to_json()} for name, row in rows.items()], json=True)
        return 0
    if not (args.all or args.family or args.bits or args.fitted is not None):
        print("\n".join(_advice()) + "\n")
        print_table(by_family(), json=False)
        print(f"{BITS}\n{ALL}")
        return 0
    shown = [{field: row[field] for field in ("name", "bits", "fitted", "summary")} for row in rows.values()]
    print_table(shown, json=False)
    print(BITS)
    return 0


def _one(args: Namespace) -> int:
    chosen = recipe_text.read(args.name, args.set)
    row = describe.recipe_row(chosen, describe.REFERENCE_MODEL)
    row["decode"] = absorbed.reads(chosen, describe.REFERENCE_MODEL) or fused.reads(chosen, describe.REFERENCE_MODEL)
    print_record(row | ({"settings": chosen.to_json()} if args.json else {}), args.json)
    if not args.json:
        print("\nsettings, as --set takes them")
        print("\n".join(f"{path}={value}" for path, value in recipe_text.settings(chosen).items()))
        print(f"{BITS}\nwindow: exact first tokens / exact newest tokens / tokens encoded together.")
        print(f"decode: what a step reads on a GPU under kvq attention, on {MODEL}; expected, not measured.")
    return 0


def _chosen(args: Namespace) -> dict[str, Recipe]:
    """The recipes that the filters leave, by name, fewest bits first."""
    known = {name.replace("_", "-"): found for name, found in families().items()}
    if args.family and args.family not in known:
        raise NotFound(f"no family {args.family!r:.80}; there are {', '.join(known)}")
    low, high = args.bits or (0.0, float("inf"))
    found = [
        (bits, recipe)
        for recipe in (known[args.family] if args.family else [one for own in known.values() for one in own])
        if low <= (bits := _bits(recipe)) <= high and args.fitted in (None, _is_fitted(recipe))
    ]
    return {recipe.name: recipe for _, recipe in sorted(found, key=lambda pair: pair[0])}


def _bits(recipe: Recipe) -> float:
    return round(asymptotic_bits(recipe, describe.REFERENCE_MODEL), 4)


def _is_fitted(recipe: Recipe) -> bool:
    """True if the recipe needs a calibration; one that is fitted to each prompt needs none."""
    return recipe.fitted and not recipe.fits_prompt


def _advice() -> list[str]:
    width = max(map(len, ADVICE))
    return [f"{name:{width}}  {_bits(preset(name)):.2f} bits  {text}" for name, text in ADVICE.items()]


def by_family() -> list[dict[str, Any]]:
    """A row a family, by the fewest bits of its recipes."""
    rows = []
    for name, found in families().items():
        bits, fitted = [_bits(recipe) for recipe in found], {_is_fitted(recipe) for recipe in found}
        about = " ".join((import_module(f"kvq_runtime.recipes.{name}").__doc__ or "").split("\n\n")[0].split())
        row = {"family": name.replace("_", "-"), "recipes": len(found), "least bits": min(bits), "most": max(bits)}
        row["fitted"] = "some" if len(fitted) == 2 else fitted.pop()
        rows.append(row | {"what": re.split(r"[;.](?: |$)", about)[0]})
    return sorted(rows, key=lambda row: row["least bits"])
