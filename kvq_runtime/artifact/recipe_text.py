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
    policies.heavy=on, policies.heavy.share=0.5   a choice about tokens; none drops it
    name=mine                                     a name of one's own

Settings hold in any order: what cannot be is refused once all are set. A changed recipe is named after its settings,
`squat-2bit-key.feedback.rank-60`. Where that is no name, a part of a digest stands for them.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvq_runtime.disk import files, strict_json
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.geometry import ROLES
from kvq_runtime.policy_setting import policy_kinds
from kvq_runtime.recipe import WINDOW, Recipe, is_preset, preset
from kvq_runtime.stages.kinds import fits_type, kinds
from kvq_runtime.stages.stage import SLOTS, setting_types

SUFFIX = ".json"
LARGEST = 1 << 20  # bytes of a file
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")  # with a model's name before it, the name of an artifact
SETTING = re.compile(r"\+(?=[a-z0-9_.]+=)")
Tree = dict[str, Any]


def read(text: str, changes: Sequence[str] = ()) -> Recipe:
    """The recipe that a text means, with more settings, `PATH=VALUE` each. ValueError, or NotFound: there is none."""
    start, *settings = SETTING.split(text)
    recipe = _from_file(Path(start)) if start.endswith(SUFFIX) else preset(start)
    return changed(recipe, [*settings, *changes]) if settings or changes else recipe


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
    """The recipe with other settings, `PATH=VALUE` each, under a name that states those that change something."""
    tree, name, stated = recipe.to_json(), "", []
    for path, text in _ordered(changes):
        before = json.dumps(tree)
        if path == "name":
            name = text
            continue
        _put(tree, path, text)
        stated += [(path, text)] if json.dumps(tree) != before else []
    try:
        found = Recipe.from_json(tree)
    except ValueError as error:
        said = str(error).removeprefix(f"{recipe.name}: ")
        raise ValueError(f"{'+'.join([recipe.name, *changes])}: {said}") from None
    plain = found.key, found.value
    layers = {layer: pair for layer, pair in found.layers.items() if layer in recipe.layers or pair != plain}
    found = replace(found, layers=layers)
    if found != recipe:
        summary = f"{recipe.name} with {' '.join(f'{path}={text}' for path, text in stated)}"
        found = replace(found, summary=summary, name=_derived_name(found, stated))
    return _named(found, name or found.name) if found.name != recipe.name or name else recipe


def settings(recipe: Recipe) -> dict[str, str]:
    """Every setting of a recipe, as it is written: {path: value}."""
    return {path: _text(value) for path, value in _walked(recipe.to_json())}


def _walked(tree: Tree) -> Iterator[tuple[str, Any]]:
    yield "position", tree["position"]
    yield from ((f"window.{name}", value) for name, value in tree["window"].items())
    for place, pair in [("", tree), *((f"layers.{layer}.", pair) for layer, pair in tree["layers"].items())]:
        for role in ROLES:
            yield f"{place}{role}.axis", pair[role]["axis"]
            for slot in SLOTS:
                yield from _stage_settings(f"{place}{role}.{slot}", pair[role][slot])
    for policy in tree["policies"]:
        yield from _stage_settings(f"policies.{policy['kind']}", policy | {"kind": "on"})


def _stage_settings(path: str, stage: Tree | None) -> Iterator[tuple[str, Any]]:
    yield path, (stage or {"kind": "none"})["kind"]
    yield from ((f"{path}.{name}", value) for name, value in (stage or {}).items() if name != "kind")


# ---- setting a path --------------------------------------------------------------------------------------------------


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
    return sorted(pairs.items(), key=lambda pair: (*_rank(pair[0]), pair[0]))


def _rank(path: str) -> tuple[bool, int, bool]:
    return path.startswith("layers."), path.count("."), not path.startswith("all.")


def _put(tree: Tree, path: str, text: str) -> None:
    """Set what a path means to what a text means."""
    match path.split("."):
        case ["position"]:
            tree["position"] = text
        case ["window", name] if name in WINDOW:
            tree["window"][name] = _value(path, text, int, 32)
        case ["window", *_]:
            raise ValueError(f"{path}: no such setting; window has {', '.join(WINDOW)}")
        case ["policies", kind, *rest] if len(rest) < 2:
            _put_policy(tree["policies"], path, kind, rest, text)
        case ["layers", number, role, *rest] if number.isdecimal() and role in ROLES:
            pair = tree["layers"].setdefault(str(int(number)), json.loads(json.dumps({r: tree[r] for r in ROLES})))
            _put_scheme(pair[role], path, rest, text)
        case ["all", *rest]:
            schemes = [pair[role] for pair in (tree, *tree["layers"].values()) for role in ROLES]
            for scheme in [scheme for scheme in schemes if _has(scheme, rest)] or schemes[:1]:
                _put_scheme(scheme, path, rest, text)
        case [role, *rest] if role in ROLES:
            _put_scheme(tree[role], path, rest, text)
        case _:
            places = "position, window.recent, key.STAGE, value.STAGE, all.STAGE, layers.N.key.STAGE, policies.KIND"
            raise ValueError(f"{path}: no such setting; use name, {places}, or a setting of a stage or policy")


def _has(scheme: Tree, rest: list[str]) -> bool:
    """True if a scheme has what a path names below it; a stage may be put anywhere."""
    if len(rest) < 2:
        return True
    stage = scheme.get(rest[0])
    return stage is not None and rest[1] in setting_types(kinds()[rest[0]][stage["kind"]])


def _put_scheme(scheme: Tree, path: str, rest: list[str], text: str) -> None:
    match rest:
        case ["axis"]:
            scheme["axis"] = text
        case [slot] if slot in SLOTS:
            known = [*sorted(kinds()[slot]), *(["none"] if slot != "quantize" else [])]
            if text not in known:
                raise ValueError(f"{path}={text}; use one of {', '.join(known)}")
            scheme[slot] = None if text == "none" else {"kind": text}
        case [slot, name] if slot in SLOTS:
            if scheme[slot] is None:
                place = path.rpartition(".")[0]
                known = ", ".join(sorted(kinds()[slot]))
                raise ValueError(f"{path}: there is no {place} here: first {place}=KIND, one of {known}")
            _put_setting(scheme[slot], kinds()[slot][scheme[slot]["kind"]], path, name, text)
        case _:
            raise ValueError(f"{path}: no such setting; a scheme has axis, {', '.join(SLOTS)}")


def _put_policy(policies: list[Tree], path: str, kind: str, rest: list[str], text: str) -> None:
    cls, stated = policy_kinds().get(kind), next((policy for policy in policies if policy["kind"] == kind), None)
    if cls is None:
        raise ValueError(f"{path}: no such setting; policies has {', '.join(sorted(policy_kinds()))}")
    if rest:
        if stated is None:
            raise ValueError(f"{path}: there is no policies.{kind} here: first policies.{kind}=on")
        _put_setting(stated, cls, path, rest[0], text)
    elif text not in ("on", "none"):
        raise ValueError(f"{path}={text}; use on or none")
    elif text == "on" and stated is None:
        policies.append({"kind": kind})
    elif text == "none" and stated is not None:
        policies.remove(stated)


def _put_setting(stated: Tree, cls: Any, path: str, name: str, text: str) -> None:
    types = setting_types(cls)
    if name not in types:
        raise ValueError(f"{path}: no such setting; {cls.kind} has {', '.join(types) or 'none'}")
    default = next(field.default for field in dataclasses.fields(cls) if field.name == name)
    stated[name] = _value(path, text, types[name], default)


def _value(path: str, text: str, expected: Any, like: Any) -> Any:
    """Parse a text as a value of this type; the choices of a Literal are the stage's to check."""
    candidates: list[Any] = []
    for form in (text, f"[{text}]"):  # 8,4,2 is a list without brackets
        with suppress(ArtifactError):
            candidates.append(strict_json.loads(form, path))
    for value in [*candidates, *([None] if text == "none" else []), text]:
        if fits_type(value, expected):
            return float(value) if expected is float else value
    raise ValueError(f"{path}={text}; use a value like {_text(list(like) if isinstance(like, tuple) else like)}")


def _text(value: Any) -> str:
    """A value as it is written: what `_value` reads."""
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# ---- files and names -------------------------------------------------------------------------------------------------


def _from_file(path: Path) -> Recipe:
    """The recipe in a file, under the name that it has there. ValueError for a file that holds none."""
    try:
        stated = strict_json.loads(files.read(path, LARGEST), str(path))
        if isinstance(stated, Mapping) and "settings" in stated:
            stated = stated["settings"]
        recipe = Recipe.from_json(stated)
        return _named(recipe, recipe.name)
    except NotFound:
        raise
    except (ArtifactError, ValueError) as error:
        raise ValueError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None


def _named(recipe: Recipe, name: str) -> Recipe:
    """The recipe under this name, which must not be that of another preset."""
    if not NAME.fullmatch(name):
        raise ValueError(f"name {name!r:.120}; use 1 to 64 of a-z 0-9 . _ -, the first a letter or digit")
    if name == "auto" or (is_preset(name) and preset(name) != replace(recipe, name=name)):
        raise ValueError(f"name={name}; that is another recipe, which comes with kvq: use a name that none of its has")
    return replace(recipe, name=name)


def _derived_name(recipe: Recipe, stated: Sequence[tuple[str, str]]) -> str:
    name = "".join([recipe.name, *(re.sub(r"[,+]", "_", f"-{path}-{text}") for path, text in stated)])
    if NAME.fullmatch(name):
        return name
    described = recipe.to_json() | {"summary": ""}
    return f"{recipe.name:.53}-{sha256(strict_json.dumps(described).encode()).hexdigest()[:10]}"
