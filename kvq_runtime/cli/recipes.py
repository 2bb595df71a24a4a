"""The commands `kvq recipes` and `kvq bytes`: choose a recipe, and compute the memory that a cache takes."""

import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvq_runtime.artifact import describe, recipe_text
from kvq_runtime.attention import fused
from kvq_runtime.cli.table import print_record, print_table
from kvq_runtime.disk import files
from kvq_runtime.errors import NotFound, counted
from kvq_runtime.families import lists_layers
from kvq_runtime.geometry import MODELS, NONE_SLIDE, Geometry, Sliding
from kvq_runtime.ops import dispatch
from kvq_runtime.recipe import Recipe, families, is_preset, preset
from kvq_runtime.store.memory import Sizes, asymptotic_bits
from kvq_runtime.vllm import page, plugin

ADVICE = {  # README.md gives the same
    "kivi-4bit": "nothing to calibrate: begin here",
    "fisher-3bit": "calibrated on text as you serve it: about kivi-4bit's loss; fisher-head-3bit for the GPU kernel",
    "aqua-fisher-2bit": "calibrated: least loss at 2 bits, slow to fit, encode and read; or auto --bits 2.1",
}
MODEL = "Qwen2.5-7B (28 layers, 4 KV heads of 128)"
BITS = f"""
bits: per element of an encoded token, scales and all metadata included, on {MODEL}.
kvq bytes RECIPE --model M computes whole caches, exact tokens included; kvq recipes NAME shows all settings.
kernel: whether one reads packed codes under kvq attention on a GPU; otherwise a step reads decoded blocks.
vllm: kernel, one reads packed pages; decoded, pages are decoded before attention; no, vLLM cannot serve it."""
WITHOUT = "Without triton, as here, there is no kernel."
ONE = f"""
window: exact first tokens / exact newest tokens / tokens encoded together.
decode: what a step reads on a GPU under kvq attention, on {MODEL}; expected, not measured."""
SHOWN = ("name", "bits", "fitted", "kernel", "vllm", "summary")
GIB = 1 << 30
COMPUTED = """
Computed from shapes, not measured: all bytes of {}, with blocks, sinks and window, and shared (predictors, bases,
codebooks, rotations). "bits" is what one more token costs, per element. Under 16 bit from: tokens a row from which all
bytes are fewer than those of 16 bit."""
SLIDES = "Bytes of {} layers that slide over a window of {:,} tokens are in all GiB, and not in the bits ({})."


def run_recipes(args: Namespace) -> int:
    """Print advice and all recipes; or those of a family; or one, with its settings."""
    by_family = {name.replace("_", "-"): family.recipes() for name, family in families().items()}
    if args.name and (is_preset(args.name) or args.name not in by_family):
        return _show_recipe(args)
    chosen = by_family[args.name] if args.name else [recipe for members in by_family.values() for recipe in members]
    chosen = sorted(chosen, key=lambda recipe: asymptotic_bits(recipe, describe.REFERENCE_MODEL))
    rows = [describe.recipe_row(recipe, describe.REFERENCE_MODEL) | readers(recipe) for recipe in chosen]
    if args.json:
        rows = [row | {"settings": recipe.to_json()} for row, recipe in zip(rows, chosen, strict=True)]
        print_table(rows, json=True)
        return 0
    if not args.name:
        for name, text in ADVICE.items():
            print(f"{name:16}  {asymptotic_bits(preset(name), describe.REFERENCE_MODEL):.2f} bits  {text}")
        print()
    print_table([{field: row[field] for field in SHOWN} for row in rows], json=False)
    print(BITS if dispatch.available() else f"{BITS}\n{WITHOUT}")
    return 0


def readers(recipe: Recipe) -> dict[str, Any]:
    """Return whether a kernel reads all layers of a recipe under kvq attention, and what reads its pages in vLLM."""
    geometry = describe.REFERENCE_MODEL
    layers = range(geometry.layers)
    vllm = "kernel" if not any(page.refusal(recipe, geometry, None, n) for n in layers) else "decoded"
    try:
        plugin.check_recipe(recipe)
    except ValueError:
        vllm = "no"
    return {"kernel": not any(fused.refusal(recipe, geometry, n) for n in layers), "vllm": vllm}


def _show_recipe(args: Namespace) -> int:
    recipe = recipe_text.read(args.name)
    row = describe.recipe_row(recipe, describe.REFERENCE_MODEL)
    row["vllm"] = readers(recipe)["vllm"]
    row["decode"] = fused.refusal(recipe, describe.REFERENCE_MODEL) or "packed codes, by a kernel"
    if args.json:
        print_record(row | {"settings": recipe.to_json()}, json=True)
        return 0
    print_record(row, json=False)
    print("\nsettings, as NAME+PATH=VALUE takes them")
    print("\n".join(f"{path}={value}" for path, value in recipe_text.settings(recipe).items()))
    print(ONE)
    return 0


# ---- kvq bytes -------------------------------------------------------------------------------------------------------


class Model(NamedTuple):
    """A model's name, the shape of its cache, and its layers that slide."""

    name: str
    geometry: Geometry
    sliding: Sliding = NONE_SLIDE


def run_bytes(args: Namespace) -> int:
    """Print the bits per element and GiB of each recipe on each model, beside 16 bit."""
    recipes = recipe_text.distinct(map(recipe_text.read, args.recipes))
    models = list(map(_model, args.model or ["qwen2.5-7b"]))
    tokens = args.tokens or [8192, 32768, 131072]
    print_table([row for model in models for row in _rows(model, recipes, tokens, args)], args.json)
    if not args.json:
        print(COMPUTED.format(counted(args.batch, "row")))
        for model in models:
            if (sliding := model.sliding).layers:
                print(SLIDES.format(sliding.layers, sliding.window, model.name))
    return 0


def _model(text: str) -> Model:
    """Find the shape of a model: of the catalog, a folder with config.json, or LAYERSxHEADSxSIZE."""
    path, shape = Path(text), re.fullmatch(r"(\d{1,4})x(\d{1,4})x(\d{1,4})", text)
    if text in MODELS:
        return Model(text, MODELS[text])
    if shape:
        return Model(text, Geometry(*map(int, shape.groups())))
    if not path.exists():
        raise NotFound(
            f"--model {text}; use {', '.join(MODELS)}, a folder with config.json, or layers x KV heads x head size, "
            "as in 28x4x128"
        )
    config = files.json_object(path / "config.json" if path.is_dir() else path)
    config = config.get("text_config", config)  # of a model of images and text
    if not lists_layers(config):
        from kvq_runtime.hf.model import settings_of_folder  # with transformers, which other models do without

        config = settings_of_folder(path)
    try:
        return Model(path.name if path.is_dir() else path.parent.name, Geometry.from_config(config),
                     Sliding.from_config(config))  # fmt: skip
    except KeyError as error:
        raise ValueError(
            f"--model {text}: config.json has no {error.args[0]}; give layers x KV heads x head size, as in 28x4x128"
        ) from None


def _rows(model: Model, recipes: list[Recipe], tokens: list[int], args: Namespace) -> Iterator[dict[str, Any]]:
    geometry, sliding = model.geometry, model.sliding
    token_bytes = 4 * geometry.layers * geometry.width * args.batch  # keys and values in 16 bits
    row: dict[str, Any] = {"model": model.name, "recipe": "16 bit", "bits": 16.0, "shared MiB": 0.0}
    for count in tokens:
        row[f"bits at {count}"] = 16.0
        row[f"GiB at {count}"] = round((count * token_bytes + args.batch * sliding.bytes(count)) / GIB, 3)
    yield row | {"under 16 bit from": None}
    for recipe in recipes:
        sizes = Sizes(recipe.check(geometry), geometry, sliding=sliding)
        caches = [sizes.at(count, args.batch) for count in tokens]
        row = {"model": model.name, "recipe": recipe.name, "bits": round(asymptotic_bits(recipe, geometry), 4)}
        row["shared MiB"] = round(sizes.shared / (1 << 20), 1)
        for size in caches:
            row[f"bits at {size.tokens}"] = round(size.all_bits, 3)
            row[f"GiB at {size.tokens}"] = round(size.total_bytes / GIB, 3)
        row["under 16 bit from"] = sizes.smaller_from(args.batch)
        if args.json:
            row["bytes"] = [
                {"tokens": size.tokens, "batch": size.batch, "total": size.total_bytes, "exact": size.exact_bytes}
                | {"sequence": size.sequence_bytes, "shared": size.shared_bytes, "sliding": size.sliding_bytes}
                for size in caches
            ]
        yield row
