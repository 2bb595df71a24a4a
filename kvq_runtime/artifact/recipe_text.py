"""Read a recipe as it is written on a command line, and name it after what was changed.

    squat-2bit                                    a recipe that comes with kvq
    squat-2bit+key.feedback.rank=60+window.recent=32      the same with other settings; each begins with +
    my.json, my.json+key.quantize.bits=3          a file: `Recipe.to_json`, or what `kvq recipes NAME --json` prints

A setting is a path in the recipe's JSON, and a value of the dataclass field's type:

    position=pre                                  window.recent=32 (sinks, recent, block)
    key.axis=channel                              key.quantize.bits=3, value.predict.ridge=0.01
    key.rotate=hadamard, key.feedback=none        a stage of this kind with its defaults; no stage
    layers.0.key.quantize.bits=4                  keys of one layer, which begins as the others
    all.quantize.bits=4                           keys and values of all layers, wherever there is such a setting
    policies.heavy=on, policies.heavy.share=0.5   a policy with its defaults, and a setting of it; none drops it
    position=segment+segment=64                   keys less the angle of their segment's middle; its tokens
    key_bias=kept                                 keys with the bias of the model's k_proj, as the paper encodes them
    name=mine                                     the recipe's name

Settings hold in any order, and are checked once all are set. A changed recipe is named after its settings,
`squat-2bit-key.feedback.rank-60`, or after a digest if that is no valid name.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvq_runtime.disk import files, strict_json
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.geometry import ROLES
from kvq_runtime.policy_setting import policy_kinds
from kvq_runtime.recipe import Recipe, is_preset, preset
from kvq_runtime.stages.kinds import fits_type, kinds
from kvq_runtime.stages.stage import SLOTS, setting_types

SUFFIX = ".json"
LARGEST = 1 << 20  # bytes of a file
NAME = re.compile(r"(?!.*(?:--|\.\.))[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9_])?")  # a part of an artifact's name
SETTING = re.compile(r"\+(?=[a-z0-9_.]+=)")
Tree = dict[str, Any]  # a recipe's JSON without name and summary; policies by kind, None: it has no such policy


def read(text: str) -> Recipe:
    """Return the recipe that a text means. Raises ValueError, or NotFound if there is none."""
    start, *settings = SETTING.split(text)
    recipe = _from_file(Path(start)) if start.endswith(SUFFIX) else preset(start)
    return _changed(recipe, settings) if settings else recipe


def is_recipe(text: str) -> bool:
    """Return True for a preset, a file, or either with settings; False for a reference to an artifact."""
    start, *settings = SETTING.split(text)
    return bool(settings) or start.endswith(SUFFIX) or is_preset(start)


def distinct(recipes: Iterable[Recipe]) -> list[Recipe]:
    """Return each recipe once; ValueError if two that differ have one name."""
    by_name: dict[str, Recipe] = {}
    for recipe in recipes:
        if by_name.setdefault(recipe.name, recipe) != recipe:
            raise ValueError(f"two recipes are called {recipe.name}; give one of them another name, as in +name=mine")
    return list(by_name.values())


def _changed(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """Return the recipe with other settings, `PATH=VALUE` each, under a name that states those that change it."""
    tree, name, effective = _tree(recipe), "", []
    for path, text in _ordered(settings):
        before = json.dumps(tree)
        if path == "name":
            name = text
            continue
        for target in _targets(tree, path):
            _set(tree, target, text)
        effective += [(path, text)] if json.dumps(tree) != before else []
    policies = [policy for policy in tree["policies"].values() if policy is not None]
    try:
        made = Recipe.from_json(tree | {"name": recipe.name, "summary": recipe.summary, "policies": policies})
    except ValueError as error:
        reason = str(error).removeprefix(f"{recipe.name}: ")
        raise ValueError(f"{'+'.join([recipe.name, *settings])}: {reason}") from None
    plain = made.key, made.value
    layers = {layer: pair for layer, pair in made.layers.items() if layer in recipe.layers or pair != plain}
    made = replace(made, layers=layers)
    if made != recipe:
        summary = f"{recipe.name} with {' '.join(f'{path}={text}' for path, text in effective)}"
        made = replace(made, summary=summary, name=_derived_name(made, effective))
    return _named(made, name or made.name) if made.name != recipe.name or name else recipe


def settings(recipe: Recipe) -> dict[str, str]:
    """Return every setting of a recipe, as it is written: {path: value}."""

    def walk(path: str, value: Any) -> dict[str, str]:
        if not isinstance(value, dict):
            return {path: _text(value)}
        kind = {path: "on" if path.startswith("policies.") else value["kind"]} if "kind" in value else {}
        parts = [walk(f"{path}.{name}".lstrip("."), item) for name, item in value.items() if name != "kind"]
        return kind | {name: text for part in parts for name, text in part.items()}

    tree = _tree(recipe)
    tree["policies"] = {kind: policy for kind, policy in tree["policies"].items() if policy is not None}
    return walk("", tree)


# ---- setting a path --------------------------------------------------------------------------------------------------


def _tree(recipe: Recipe) -> Tree:
    stated: Tree = {"key_bias": recipe.key_bias, "segment": recipe.segment} | recipe.to_json()
    for pair in (stated, *stated["layers"].values()):
        for role in ROLES:
            stages = {slot: _default(kinds()[slot][s["kind"]]) | s for slot in SLOTS if (s := pair[role].get(slot))}
            pair[role] |= stages
    policies = {policy["kind"]: policy for policy in stated["policies"]}
    policies |= {kind: None for kind in sorted(policy_kinds().keys() - policies.keys())}
    return {name: stated[name] for name in ("position", "key_bias", "segment", "window", *ROLES, "layers")} | {
        "policies": policies
    }


def _ordered(settings: Sequence[str]) -> list[tuple[str, str]]:
    """Return (path, value) of settings: stages before their settings, `all` before one, single layers last."""
    pairs: dict[str, str] = {}
    for setting in settings:
        path, _, text = setting.partition("=")
        if pairs.setdefault(path, text) != text:
            raise ValueError(f"{path} is set to {pairs[path]} and to {text}; set it once")

    def rank(pair: tuple[str, str]) -> tuple[bool, int, bool, str]:
        path = pair[0]
        return path.startswith("layers."), path.count("."), not path.startswith("all."), path

    return sorted(pairs.items(), key=rank)


def _targets(tree: Tree, path: str) -> list[str]:
    """Return the paths that a path means; a layer that it names is added."""
    match path.split("."):
        case ["layers", number, *_] if number.isdecimal():
            tree["layers"].setdefault(str(int(number)), deepcopy({role: tree[role] for role in ROLES}))
            return [path.replace(number, str(int(number)), 1)]
        case ["all", *rest]:
            pairs = ["", *(f"layers.{layer}." for layer in tree["layers"])]
            paths = [".".join([pair + role, *rest]) for pair in pairs for role in ROLES]
            return [path for path in paths if _exists(tree, path)] or paths[:1]
    return [path]


def _exists(tree: Tree, path: str) -> bool:
    node: Any = tree
    for name in path.split("."):
        if not isinstance(node, dict) or name not in node:
            return False
        node = node[name]
    return True


def _set(tree: Tree, path: str, text: str) -> None:
    """Set the stage, policy or setting at a path to the value that a text means."""
    *parents, name = path.split(".")
    node, choices = tree, dict[str, Any]()
    for depth, parent in enumerate(parents):
        choices, below = _choices(parents[:depth], parent), node.get(parent)
        if below is None and choices:
            here, known = ".".join(parents[: depth + 1]), ", ".join(sorted(choices.keys() - {"none"}))
            raise ValueError(f"{path}: there is no {here} here: first set {here} to one of {known}")
        if not isinstance(below, dict):
            raise ValueError(_unknown(path, parents[:depth], node))
        node = below
    kinds_here = _choices(parents, name)
    if kinds_here:
        if text not in kinds_here:
            raise ValueError(f"{path}={text}; use one of {', '.join(sorted(kinds_here))}")
        node[name] = None if kinds_here[text] is None else _default(kinds_here[text])
    elif name not in node or name == "kind" or isinstance(node[name], dict):
        raise ValueError(_unknown(path, parents, node))
    else:
        stage = next((cls for cls in choices.values() if cls is not None and cls.kind == node.get("kind")), None)
        expected = type(node[name]) if stage is None else setting_types(stage)[name]
        node[name] = _value(path, text, expected, node[name])


def _choices(parents: Sequence[str], name: str) -> dict[str, Any]:
    """Return {text: class} of what a stage or policy can be set to, None for no stage; empty for another path."""
    if [*parents] == ["policies"] and name in policy_kinds():
        return {"on": policy_kinds()[name], "none": None}
    if parents and parents[-1] in ROLES and name in SLOTS:
        return kinds()[name] | ({} if name == "quantize" else {"none": None})
    return {}


def _default(stage: Any) -> Tree:
    """Return the JSON of a stage or policy with its defaults, which may need other settings."""
    defaults = {field.name: field.default for field in dataclasses.fields(stage)}
    return json.loads(json.dumps({"kind": stage.kind} | defaults))


def _unknown(path: str, parents: Sequence[str], node: Tree) -> str:
    names = [name for name in node if name != "kind"] + ([] if parents else ["all", "name"])
    return f"{path}: no such setting; {node.get('kind') or '.'.join(parents) or 'a recipe'} has {', '.join(names)}"


def _value(path: str, text: str, expected: Any, like: Any) -> Any:
    """Parse a text as a value of this type; the stage checks the choices of a Literal."""
    candidates: list[Any] = []
    for form in (text, f"[{text}]"):  # 8,4,2 is a list without brackets
        with suppress(ArtifactError):
            candidates.append(strict_json.loads(form, path))
    for value in [*candidates, *([None] if text == "none" else []), text]:
        if fits_type(value, expected):
            return float(value) if expected is float else value
    raise ValueError(f"{path}={text}; use a value like {_text(like)}")


def _text(value: Any) -> str:
    """Write a value as `_value` reads it."""
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# ---- files and names -------------------------------------------------------------------------------------------------


def _from_file(path: Path) -> Recipe:
    """Read the recipe in a file. ValueError for a file that holds none."""
    try:
        stated = strict_json.loads(files.read(path, LARGEST), str(path))
        if isinstance(stated, Mapping) and "settings" in stated:
            stated = stated["settings"]
        recipe = Recipe.from_json(stated)
        return _named(recipe, recipe.name)
    except NotFound:
        raise
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None


def _named(recipe: Recipe, name: str) -> Recipe:
    """Return the recipe under another name, which must not be that of a different preset."""
    if not NAME.fullmatch(name):
        use = "1 to 64 of a-z 0-9 . _ -, the first a letter or digit, the last no . or -, without .. and --"
        raise ValueError(f"name {name!r:.120}; use {use}")
    if name == "auto" or (is_preset(name) and preset(name) != replace(recipe, name=name)):
        raise ValueError(f"name={name}; that is another recipe, which comes with kvq: use a name that none of its has")
    return replace(recipe, name=name)


def _derived_name(recipe: Recipe, settings: Sequence[tuple[str, str]]) -> str:
    name = "".join([recipe.name, *(re.sub(r"[,+]", "_", f"-{path}-{text}") for path, text in settings)])
    if NAME.fullmatch(name):
        return name
    described = recipe.to_json() | {"summary": ""}
    return f"{recipe.name:.53}-{sha256(strict_json.dumps(described).encode()).hexdigest()[:10]}"
