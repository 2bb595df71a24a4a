"""Read a recipe as it is written on a command line, and name it after what makes it differ from a preset.

    squat-2bit                                    a recipe that comes with kvq
    squat-2bit+key.feedback.rank=60+window.recent=32      the same with other settings; each begins with +
    my.json, my.json+key.quantize.bits=3          a file: `Recipe.to_json`, or what `kvq recipes NAME --json` prints

A setting is a path and a value, of the dataclass field's type:

    position=pre                                  window.recent=32 (sinks, recent, block)
    key.axis=channel                              key.quantize.bits=3, value.predict.ridge=0.01
    key.rotate=hadamard, key.feedback=none        a stage of this kind with its defaults; no stage
    layers.0.key.quantize.bits=4                  keys of one layer, which begins as the others
    all.quantize.bits=4                           keys and values of all layers, wherever there is such a setting
    policies.heavy=on, policies.heavy.share=0.5   a choice about tokens; none drops it
    name=mine                                     a name of one's own

Settings hold in any order: what cannot be is refused once all are set. A recipe that differs from the preset it is made
of has another name, `squat-2bit-key.feedback.rank-60`: the settings in which they differ, in one order, however it came
to differ. Where that is no name, a part of a digest stands for the settings.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvq_runtime.artifact import recipe_tree
from kvq_runtime.disk import files, strict_json
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.recipe import Recipe, is_preset, preset

SUFFIX = ".json"
LARGEST = 1 << 20  # bytes of a file
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")  # with a model's name before it, the name of an artifact
SETTING = re.compile(r"\+(?=[a-z0-9_.]+=)")


def read(text: str, changes: Sequence[str] = ()) -> Recipe:
    """The recipe that a text means, with more settings, `PATH=VALUE` each. ValueError, or NotFound: there is none."""
    start, *settings = SETTING.split(text)
    recipe = _from_file(Path(start)) if start.endswith(SUFFIX) else preset(start)
    return changed(recipe, [*settings, *changes])


def written(text: str) -> bool:
    """True if a text is a recipe and not a reference to an artifact: a preset, a file, or either with settings."""
    start, *settings = SETTING.split(text)
    return bool(settings) or start.endswith(SUFFIX) or is_preset(start)


def with_settings(texts: Sequence[str], changes: Sequence[str]) -> list[str]:
    """These texts, those of recipes with more settings. ValueError if there are settings, and none is of a recipe."""
    if changes and not any(map(written, texts)):
        raise ValueError(f"--set {changes[0]} changes recipes; name those that it changes: presets, or files of JSON")
    return ["+".join([text, *changes]) if written(text) else text for text in texts]


def distinct(recipes: Iterable[Recipe]) -> list[Recipe]:
    """These recipes, each once; ValueError if two that differ have one name."""
    found: dict[str, Recipe] = {}
    for recipe in recipes:
        if found.setdefault(recipe.name, recipe) != recipe:
            raise ValueError(f"two recipes are called {recipe.name}; give one of them another name, as in +name=mine")
    return list(found.values())


def changed(recipe: Recipe, changes: Sequence[str] = ()) -> Recipe:
    """The recipe with other settings, `PATH=VALUE` each, under a name that says how it differs from the preset whose
    name it has, or, if none has it, from itself."""
    tree, name = recipe_tree.tree_of(recipe), recipe.name
    for path, text in _ordered(changes):
        if path == "name":
            name = text
        else:
            recipe_tree.put(tree, path, text)
    try:
        found = Recipe.from_json(recipe_tree.recipe_json(tree, recipe))
    except ValueError as error:
        said = str(error).removeprefix(f"{recipe.name}: ")
        raise ValueError(f"{'+'.join([recipe.name, *changes])}: {said}") from None
    derived = _derived(found, preset(recipe.name) if is_preset(recipe.name) else recipe)
    return derived if name == recipe.name else _own(derived, name)


def _ordered(changes: Sequence[str]) -> list[tuple[str, str]]:
    """(path, value) of settings: those of single layers last, a stage before its settings, `all` before one of them."""
    pairs: dict[str, str] = {}
    for change in changes:
        path, equals, text = change.partition("=")
        if not equals:
            raise ValueError(
                f"setting {change!r:.120}; write PATH=VALUE, as in key.quantize.bits=3 or window.recent=32"
            )
        if pairs.setdefault(path, text) != text:
            raise ValueError(f"{path} is set to {pairs[path]} and to {text}; set it once")
    return sorted(pairs.items(), key=lambda pair: _rank(pair[0]))


def _rank(path: str) -> tuple[bool, int, bool]:
    return path.startswith("layers."), path.count("."), not path.startswith("all.")


def differences(recipe: Recipe, origin: Recipe) -> dict[str, str]:
    """The settings that make one recipe of another: {path: value}, in the order of `to_json`."""
    return dict(recipe_tree.differences(recipe_tree.tree_of(recipe), recipe_tree.tree_of(origin)))


def settings(recipe: Recipe) -> dict[str, str]:
    """Every setting of a recipe, as it is written: {path: value}."""
    return dict(recipe_tree.paths(recipe_tree.tree_of(recipe)))


# ---- files and names -------------------------------------------------------------------------------------------------


def _from_file(path: Path) -> Recipe:
    """The recipe in a file, under the name that it has there. ValueError for a file that holds none."""
    try:
        stated = strict_json.loads(files.read(path, LARGEST), str(path))
        beside = {}
        if isinstance(stated, dict) and isinstance(stated.get("settings"), dict):
            beside, stated = stated, stated["settings"]
        recipe = Recipe.from_json(stated)
        _agree(beside, recipe)
    except NotFound:
        raise
    except (ArtifactError, ValueError) as error:
        raise ValueError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
    return recipe if is_preset(recipe.name) else _own(recipe, recipe.name)


def _agree(beside: Mapping[str, Any], recipe: Recipe) -> None:
    """ValueError where what `kvq recipes NAME --json` prints beside the settings was changed, which sets nothing."""
    if not beside:
        return
    from kvq_runtime.artifact import describe

    row = describe.recipe_row(recipe, describe.REFERENCE_MODEL)
    for field in ("position", "bits", "keys", "values", "layers", "window"):
        if beside.get(field, row[field]) != row[field]:
            given = f"{field} is {beside[field]!r:.80} beside settings that mean {row[field]!r:.80}"
            raise ValueError(f"{given}; change what is under settings, and leave {field} out")


def _own(recipe: Recipe, name: str) -> Recipe:
    """The recipe under a name of its own."""
    if not NAME.fullmatch(name):
        raise ValueError(f"name {name!r:.120}; use 1 to 64 of a-z 0-9 . _ -, the first a letter or digit")
    known = preset(name) if is_preset(name) else None
    if name == "auto" or (known is not None and known != replace(recipe, name=name)):
        raise ValueError(f"name={name}; that is another recipe, which comes with kvq: use a name that none of its has")
    return replace(recipe, name=name)


def _derived(recipe: Recipe, origin: Recipe) -> Recipe:
    """The recipe, renamed after its differences from the recipe that it is made of."""
    changes = differences(recipe, origin)
    if not changes:
        return origin
    plain = (recipe.key, recipe.value)  # named are the layers that the origin names, and others only if they differ
    layers = {n: recipe.at(n) for n in {*recipe.layers, *origin.layers} if n in origin.layers or recipe.at(n) != plain}
    recipe = replace(recipe, layers=layers)
    parts = [re.sub(r"[,+]", "_", f"-{path}-{value}") for path, value in changes.items()]
    name = "".join([origin.name, *parts])
    if not NAME.fullmatch(name):
        stated = recipe.to_json() | {"name": origin.name, "summary": ""}
        name = f"{origin.name:.53}-{sha256(strict_json.dumps(stated).encode()).hexdigest()[:10]}"
    settings = " ".join(f"{path}={value}" for path, value in changes.items())
    return _own(replace(recipe, summary=f"{origin.name} with {settings}"), name)
