"""The commands `kvq recipes` and `kvq bytes`: which recipe to take, and what a cache holds under one.

Bytes are computed, for models that need not be there.
"""

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from kvq_runtime.artifact import describe, recipe_text
from kvq_runtime.attention import fused
from kvq_runtime.cli.table import print_record, print_table
from kvq_runtime.disk import files
from kvq_runtime.errors import ArtifactError, NotFound, counted
from kvq_runtime.geometry import MODELS, NONE_SLIDE, Geometry, Sliding
from kvq_runtime.recipe import Recipe, families, is_preset, preset
from kvq_runtime.registry.resolve import load_artifact
from kvq_runtime.store.estimate import Sizes
from kvq_runtime.store.memory import asymptotic_bits

ADVICE = {  # which to take, as README.md has it
    "kivi-4bit": "nothing to calibrate: begin here; smaller: higgs-4bit",
    "aqua-fisher-2bit": "calibrated on your model: least loss at 2 bits, slow to fit and encode; or auto --bits 2.1",
    "aqua-2bit": "calibrated, for 2 bits, and faster: saves memory, costs time",
}
# of config.json: which layers cache what is said otherwise than by layer_types, num_key_value_heads and head_dim
OTHERWISE = ("layers_block_type", "attn_layer_indices", "attn_layer_period", "hybrid_override_pattern", "multi_query",
             "attention_chunk_size")  # fmt: skip
MODEL = "Qwen2.5-7B (28 layers, 4 KV heads of 128)"
BITS = f"""
bits: per element of an encoded token, scales and all metadata included, on {MODEL};
a first layer in 4 bits weighs more on smaller models. kvq bytes RECIPE --model M computes whole caches, exact tokens
included."""
ALL = """kvq recipes --family NAME, --bits 2.5, --fitted or --all list single recipes; kvq recipes NAME has all of one,
and what its decode step reads."""
GIB = 1 << 30
COMPUTED = """
Computed from shapes, not measured: all bytes of {}, with blocks, sinks and window, and shared (predictors, bases,
codebooks, rotations). "bits" is what one more token costs, per element. Under 16 bit from: tokens a row from which all
bytes are fewer than those of 16 bit."""
RECURRENT = ("linear_attention", "conv", "mamba")
RECUR = "Layers that recur: {}. Their state, which does not grow with the text, is not counted ({})."
SLIDES = "Bytes of {} layers that slide over a window of {:,} tokens are in all GiB, and not in the bits ({})."


def recipes(args: Namespace) -> int:
    """Print what to take and a line a family; or those recipes that are asked for; or one, changed perhaps."""
    if args.name and args.family:
        raise ValueError(f"both {args.name} and --family {args.family}; give one")
    if args.name in _families() and not is_preset(args.name) and not args.set:
        args.name, args.family = None, args.name
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
    row["decode"] = fused.reads(chosen, describe.REFERENCE_MODEL)
    print_record(row | ({"settings": chosen.to_json()} if args.json else {}), args.json)
    if not args.json:
        print("\nsettings, as --set takes them")
        print("\n".join(f"{path}={value}" for path, value in recipe_text.settings(chosen).items()))
        print(f"{BITS}\nwindow: exact first tokens / exact newest tokens / tokens encoded together.")
        print(f"decode: what a step reads on a GPU under kvq attention, on {MODEL}; expected, not measured.")
    return 0


def _families() -> dict[str, list[Recipe]]:
    """The recipes of each family, by its name as it is written."""
    return {name.replace("_", "-"): family.recipes() for name, family in families().items()}


def _chosen(args: Namespace) -> dict[str, Recipe]:
    """The recipes that the filters leave, by name, fewest bits first."""
    known = _families()
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
    for name, family in families().items():
        found = family.recipes()
        bits, fitted = [_bits(recipe) for recipe in found], {_is_fitted(recipe) for recipe in found}
        about = " ".join((import_module(f"kvq_runtime.recipes.{name}").__doc__ or "").split("\n\n")[0].split())
        row = {"family": name.replace("_", "-"), "recipes": len(found), "least bits": min(bits), "most": max(bits)}
        row["fitted"] = "some" if len(fitted) == 2 else fitted.pop()
        rows.append(row | {"what": re.split(r"[;.](?: |$)", about)[0]})
    return sorted(rows, key=lambda row: row["least bits"])


# ---- kvq bytes -------------------------------------------------------------------------------------------------------


class Model(NamedTuple):
    """A model's name, its shape, its layers that slide, how many recur."""

    name: str
    geometry: Geometry
    sliding: Sliding = NONE_SLIDE
    recurrent: int = 0


def held(args: Namespace) -> int:
    """Print what each recipe holds on each model: bits per element and GiB of all bytes, beside 16 bit."""
    recipes = recipe_text.distinct(map(_recipe, recipe_text.with_settings(args.recipes, args.set)))
    models = {one.name: one for text in args.model or ["qwen2.5-7b"] for one in _models(text)}
    counts = args.tokens or [8192, 32768, 131072]
    rows: list[dict[str, Any]] = []
    for model in models.values():
        rows += _rows(model, recipes, counts, args)
    print_table(rows, args.json)
    if not args.json:
        print(COMPUTED.format(counted(args.batch, "row")))
        for model in models.values():
            if (sliding := model.sliding).layers:
                print(SLIDES.format(sliding.layers, sliding.window, model.name))
            if model.recurrent:
                print(RECUR.format(model.recurrent, model.name))
    return 0


def _recipe(text: str) -> Recipe:
    """The recipe of a name or of a file; else that of the artifact that the text refers to."""
    try:
        return recipe_text.read(text)
    except NotFound as error:
        try:
            return load_artifact(text).recipe
        except (ArtifactError, ValueError):
            raise error from None


def _models(text: str) -> Iterator[Model]:
    """The model of a known name, "all" of them, a config.json or its folder, or LAYERSxHEADSxSIZE."""
    path = Path(text)
    shape = re.fullmatch(r"(\d{1,4})x(\d{1,4})x(\d{1,4})", text)
    if text == "all":
        yield from (Model(name, geometry) for name, geometry in MODELS.items())
    elif text in MODELS:
        yield Model(text, MODELS[text])
    elif shape:
        yield Model(text, Geometry(*map(int, shape.groups())))
    elif path.exists():
        try:
            config = files.json_value(path / "config.json" if path.is_dir() else path)
        except NotFound as error:
            raise NotFound(f"{error}; --model takes the folder of a model in Hugging Face format") from None
        if isinstance(config, dict) and isinstance(config.get("text_config"), dict):  # of a model of images and text
            config = config["text_config"]
        if not isinstance(config, dict) or not {"num_hidden_layers", "num_attention_heads"} <= config.keys():
            raise ValueError(
                f"--model {text}: no config.json of a model, or one that leaves layers and heads to transformers; give "
                "its shape as layers x KV heads x head size"
            )
        told = isinstance(config.get("layer_types"), list)
        if other := [name for name in OTHERWISE if config.get(name) is not None and not told]:
            raise ValueError(
                f"--model {text}: config.json has {other[0]}, as models have whose layers cache otherwise than "
                "kvq takes (docs/models.md); give its shape as layers x KV heads x head size"
            )
        said = {name: one for name, one in config.items() if one is not None}
        try:
            yield _of_config(path.name if path.is_dir() else path.parent.name, said)
        except KeyError as error:
            raise ValueError(
                f"--model {text}: config.json leaves {error.args[0]} to transformers; give its shape as layers x KV "
                "heads x head size"
            ) from None
    else:
        raise NotFound(
            f"--model {text}; use all, one of {', '.join(MODELS)}, a folder with config.json, or "
            "layers x KV heads x head size, as in 28x4x128"
        )


def _of_config(name: str, config: Mapping[str, Any]) -> Model:
    geometry, sliding = Geometry.from_config(config), Sliding.from_config(config)
    kinds = config.get("layer_types")
    recurrent = sum(kind in RECURRENT for kind in kinds) if isinstance(kinds, list) else 0
    if config.get("full_attention_interval") and not kinds:
        recurrent = config["num_hidden_layers"] - geometry.layers
    return Model(name, geometry, sliding, recurrent)


def _rows(model: Model, recipes: list[Recipe], counts: list[int], args: Namespace) -> Iterator[dict[str, Any]]:
    geometry, sliding = model.geometry, model.sliding
    token = 4 * geometry.layers * geometry.width * args.batch  # bytes of keys and values in 16 bits
    row: dict[str, Any] = {"model": model.name, "recipe": "16 bit", "bits": 16.0, "shared MiB": 0.0}
    for count in counts:
        row |= {
            f"bits at {count}": 16.0,
            f"GiB at {count}": round((count * token + args.batch * sliding.bytes(count)) / GIB, 3),
        }
    yield row | {"under 16 bit from": None}
    for recipe in recipes:
        sizes = Sizes(recipe.check(geometry), geometry, sliding=sliding)
        found = [sizes.at(count, args.batch) for count in counts]
        row = {"model": model.name, "recipe": recipe.name, "bits": round(asymptotic_bits(recipe, geometry), 4)}
        row["shared MiB"] = round(sizes.shared / (1 << 20), 1)
        for one in found:
            row[f"bits at {one.tokens}"] = round(one.bits, 3)
            row[f"GiB at {one.tokens}"] = round(one.total / GIB, 3)
        row["under 16 bit from"] = sizes.smaller_from(args.batch)
        if args.json:
            row["bytes"] = [
                {"tokens": one.tokens, "batch": one.batch, "total": one.total, "exact": one.exact}
                | {"sequence": one.sequence, "shared": one.shared, "sliding": one.sliding}
                for one in found
            ]
        yield row
