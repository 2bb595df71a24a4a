"""`kvq bytes`: everything a cache holds under a recipe, computed for models that need not be there."""

import json
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvq_runtime.artifact import recipe_text
from kvq_runtime.cli.table import print_table
from kvq_runtime.disk import gguf
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.geometry import MODELS, NONE_SLIDE, VOCABULARIES, Geometry, Sliding
from kvq_runtime.prefix import rate
from kvq_runtime.recipe import Recipe
from kvq_runtime.registry.resolve import load_artifact
from kvq_runtime.store.break_even import smaller_from
from kvq_runtime.store.held import Sizes
from kvq_runtime.store.memory import asymptotic_bits

GIB = 1 << 30
COMPUTED = """
Computed from shapes, not measured: all bytes of {}, with blocks, sinks and window, and shared (predictors, bases,
codebooks, rotations). "bits" is what one more token costs, per element. Under 16 bit from, under HIGGS from: tokens a
row from which all bytes are fewer than those of 16 bit, and of the plain HIGGS recipe of the next width."""
RECURRENT = ("linear_attention", "conv", "mamba")
RECUR = "Layers that recur: {}. Their state, which does not grow with the text, is not counted ({})."
SLIDES = "Bytes of {} layers that slide over a window of {:,} tokens are in all GiB, and not in the bits ({})."
FILED = "Bits in files: what calibration steers files of a kept prefix of {:,} tokens to, sinks and frames among them."


class Model(NamedTuple):
    """A model's name, its shape, the tokens of its vocabulary if known, its layers that slide, how many recur."""

    name: str
    geometry: Geometry
    vocabulary: int | None
    sliding: Sliding = NONE_SLIDE
    recurrent: int = 0


def held(args: Namespace) -> int:
    """Print what each recipe holds on each model: bits per element and GiB of all bytes, beside 16 bit."""
    recipes = recipe_text.distinct(map(_recipe, recipe_text.with_settings(args.recipes, args.set)))
    models = {one.name: one for text in args.model or ["qwen2.5-7b"] for one in _models(text, args.vocabulary)}
    counts = args.tokens or [8192, 32768, 131072]
    rows: list[dict[str, Any]] = []
    for model in models.values():
        rows += _rows(model, [_of(recipe, model.name, model.vocabulary) for recipe in recipes], counts, args)
    print_table(rows, args.json)
    if not args.json:
        print(COMPUTED.format("1 row" if args.batch == 1 else f"{args.batch} rows"))
        for model in models.values():
            if (sliding := model.sliding).layers:
                print(SLIDES.format(sliding.layers, sliding.window, model.name))
            if model.recurrent:
                print(RECUR.format(model.recurrent, model.name))
        if any("bits in files" in row for row in rows):
            print(FILED.format(rate.LENGTH))
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


def _of(recipe: Recipe, model: str, tokens: int | None) -> Recipe:
    """The recipe for a vocabulary of `tokens` tokens; ValueError if it needs one and `tokens` is None."""
    if tokens is not None:
        return recipe.of_vocabulary(tokens)
    if recipe.of_vocabulary(2) != recipe:
        raise ValueError(
            f"{recipe.name} has a table of the vocabulary; say how many tokens {model} has: --vocabulary N"
        )
    return recipe


def _models(text: str, tokens: int | None) -> Iterator[Model]:
    """The model of a known name, "all" of them, a config.json or its folder, a GGUF file, or
    LAYERSxHEADSxSIZE.

    tokens   of the vocabulary, in place of what is known of the model
    """
    path = Path(text)
    shape = re.fullmatch(r"(\d{1,4})x(\d{1,4})x(\d{1,4})", text)
    if text == "all":
        yield from (Model(name, geometry, tokens or VOCABULARIES[name]) for name, geometry in MODELS.items())
    elif text in MODELS:
        yield Model(text, MODELS[text], tokens or VOCABULARIES[text])
    elif shape:
        yield Model(text, Geometry(*map(int, shape.groups())), tokens)
    elif gguf.is_gguf(path) and path.exists():
        config = gguf.config(gguf.read(path.resolve()), path)
        yield _of_config(path.name, config, tokens or config["vocab_size"])
    elif path.exists():
        config = _config(path / "config.json" if path.is_dir() else path)
        if isinstance(config, dict) and isinstance(config.get("text_config"), dict):  # of a model of images and text
            config = config["text_config"]
        if not isinstance(config, dict) or not {"num_hidden_layers", "num_attention_heads"} <= config.keys():
            raise ValueError(
                f"--model {text}: no config.json of a model, or one that leaves layers and heads to transformers; give "
                "its shape as layers x KV heads x head size"
            )
        found = tokens or config.get("vocab_size")
        if found is not None and (type(found) is not int or not 2 <= found <= 1 << 26):
            raise ValueError(f"--model {text}: vocab_size={found!r:.60}; a whole number from 2 to {1 << 26} is needed")
        yield _of_config(path.name if path.is_dir() else path.parent.name, config, found)
    else:
        raise NotFound(
            f"--model {text}; use all, one of {', '.join(MODELS)}, a folder with config.json, a .gguf file, or "
            "layers x KV heads x head size, as in 28x4x128"
        )


def _of_config(name: str, config: Mapping[str, Any], vocabulary: int | None) -> Model:
    geometry, sliding = Geometry.from_config(config), Sliding.from_config(config)
    kinds = config.get("layer_types")
    recurrent = sum(kind in RECURRENT for kind in kinds) if isinstance(kinds, list) else 0
    if config.get("full_attention_interval") and not kinds:
        recurrent = config["num_hidden_layers"] - geometry.layers
    return Model(name, geometry, vocabulary, sliding, recurrent)


def _config(path: Path) -> Any:
    """Read a file of JSON; NotFound, or ArtifactError with its name for anything else."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFound(f"{path}: no such file; --model takes the folder of a model in Hugging Face format") from None
    except ValueError as error:
        raise ArtifactError(f"{path}: invalid JSON: {error}") from None


def _rows(model: Model, recipes: list[Recipe], counts: list[int], args: Namespace) -> Iterator[dict[str, Any]]:
    geometry, sliding = model.geometry, model.sliding
    token = 4 * geometry.layers * geometry.width * args.batch  # bytes of keys and values in 16 bits
    row: dict[str, Any] = {"model": model.name, "recipe": "16 bit", "bits": 16.0, "shared MiB": 0.0}
    for count in counts:
        row |= {
            f"bits at {count}": 16.0,
            f"GiB at {count}": round((count * token + args.batch * sliding.bytes(count)) / GIB, 3),
        }
    yield row | {"under 16 bit from": None, "under HIGGS from": None}
    for recipe in recipes:
        sizes = Sizes(recipe.check(geometry), geometry, sliding=sliding)
        found = [sizes.at(count, args.batch) for count in counts]
        row = {"model": model.name, "recipe": recipe.name, "bits": round(asymptotic_bits(recipe, geometry), 4)}
        row["shared MiB"] = round(sum(sizes.shared.values()) / (1 << 20), 1)
        for one in found:
            row[f"bits at {one.tokens}"] = round(one.bits, 3)
            row[f"GiB at {one.tokens}"] = round(one.total / GIB, 3)
        shared = sum(sizes.shared.values())
        row["under 16 bit from"] = sizes.smaller_from(args.batch)
        row["under HIGGS from"] = smaller_from(recipe, geometry, shared // args.batch)
        coded: list[Any] = [
            scheme.quantize for n in range(geometry.layers) for scheme in recipe.at(n) if scheme.quantize.at_rest
        ]
        if coded:  # of a name: of prefixes of one length
            named = sum(stage.target for stage in coded) / len(coded)
            row["bits in files"] = round(named, 4)
            for count in counts:
                more = rate.beside(recipe, geometry, count) - rate.beside(recipe, geometry)
                row[f"in files at {count}"] = round(named + more, 3)
        if args.json:
            row["bytes"] = [
                {"tokens": one.tokens, "batch": one.batch, "total": one.total, "exact": one.exact}
                | {"sequence": dict(one.sequence), "shared": dict(one.shared), "sliding": one.sliding}
                for one in found
            ]
        yield row
