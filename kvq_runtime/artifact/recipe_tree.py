"""A recipe as a tree of settings: what the path of a setting means, which values it may have, how two recipes differ.

    {"position": ..., "window": {"recent": ...}, "key": {"axis": ..., "quantize": {"kind": ..., "bits": ...}, ...},
     "value": ..., "layers": {"0": {"key": ..., "value": ...}}, "policies": {"heavy": {"kind": ..., "share": ...}}}

Checked here is that a path is one, and the type of its value; what cannot be, `Recipe.from_json` refuses.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from kvq_runtime.disk import strict_json
from kvq_runtime.errors import ArtifactError
from kvq_runtime.geometry import ROLES
from kvq_runtime.policy_setting import policy_kinds
from kvq_runtime.recipe import WINDOW, Recipe
from kvq_runtime.stages.kinds import fits_type, kinds
from kvq_runtime.stages.stage import SLOTS, Scheme, setting_types

Tree = dict[str, Any]


def tree_of(recipe: Recipe) -> Tree:
    """The settings of a recipe, nested as their paths are."""
    return {
        "position": recipe.position,
        "window": asdict(recipe.window),
        **_pair(recipe.key, recipe.value),
        "layers": {str(layer): _pair(*pair) for layer, pair in sorted(recipe.layers.items())},
        "policies": {policy.kind: _settings(policy) for policy in recipe.policies},
    }


def _pair(key: Scheme, value: Scheme) -> Tree:
    return {role: _scheme(scheme) for role, scheme in zip(ROLES, (key, value), strict=True)}


def _scheme(scheme: Scheme) -> Tree:
    stages = {slot: getattr(scheme, slot) for slot in SLOTS}
    return {"axis": scheme.axis} | {slot: None if s is None else _settings(s) for slot, s in stages.items()}


def _settings(stage: Any) -> Tree:
    """The kind and all settings of a stage or policy, those included that its JSON does not name."""
    return json.loads(json.dumps({"kind": stage.kind} | asdict(stage)))


def recipe_json(tree: Tree, recipe: Recipe) -> Tree:
    """The tree as JSON of a recipe, in its schema: the window with every scheme, policies under their slots."""

    def pair(stated: Tree) -> Tree:
        return {role: stated[role] | tree["window"] for role in ROLES}

    layers = {layer: pair(stated) for layer, stated in tree["layers"].items()}
    stated = {"name": recipe.name, "position": tree["position"], **pair(tree), "layers": layers}
    for kind, settings in tree["policies"].items():
        slot = _policies()[kind].slot
        if slot == "policies":
            stated.setdefault("policies", []).append(settings)
        elif slot in stated:
            taken = stated[slot]["kind"]
            raise ValueError(
                f"policies.{kind} beside policies.{taken}: a recipe has one of the two; set the other to none"
            )
        else:
            stated[slot] = settings
    return stated | {"summary": recipe.summary}


def paths(tree: Tree) -> Iterable[tuple[str, str]]:
    """(path, value) of every setting, as `put` takes them: a stage before its settings."""
    return ((path, _text(value)) for path, value in _walked(tree))


def _walked(tree: Tree) -> Iterable[tuple[str, Any]]:
    yield "position", tree["position"]
    yield from ((f"window.{name}", value) for name, value in tree["window"].items())
    for place, pair in [("", tree), *((f"layers.{layer}.", pair) for layer, pair in tree["layers"].items())]:
        for role in ROLES:
            yield f"{place}{role}.axis", pair[role]["axis"]
            for slot in SLOTS:
                stage = pair[role][slot] or {"kind": "none"}
                yield f"{place}{role}.{slot}", stage["kind"]
                yield from _own(f"{place}{role}.{slot}", stage)
    for kind, policy in tree["policies"].items():
        yield f"policies.{kind}", "on"
        yield from _own(f"policies.{kind}", policy)


def _own(place: str, stage: Tree) -> Iterable[tuple[str, Any]]:
    """(path, value) of the settings of a stage or policy."""
    return ((f"{place}.{name}", value) for name, value in stage.items() if name != "kind")


def put(tree: Tree, path: str, text: str) -> None:
    """Set what a path means to what a text means."""
    match path.split("."):
        case ["position"]:
            tree["position"] = _value(path, text, Literal["pre", "post"])
        case ["window", name] if name in WINDOW:
            tree["window"][name] = _value(path, text, int)
        case ["window", *_]:
            raise _unknown(path, "window", WINDOW)
        case ["policies", kind, *rest]:
            _set_policy(tree["policies"], path, kind, rest, text)
        case ["layers", number, role, *rest] if number.isdecimal() and role in ROLES:
            number = str(int(number))
            if number not in tree["layers"]:
                tree["layers"][number] = json.loads(json.dumps({role: tree[role] for role in ROLES}))
            _set_scheme(tree["layers"][number][role], path, rest, text)
        case ["layers", *_]:
            raise _unknown(path, "layers", ["N.key", "N.value"])
        case [role, *rest] if role in ROLES:
            _set_scheme(tree[role], path, rest, text)
        case ["all", *rest]:
            schemes = [pair[role] for pair in (tree, *tree["layers"].values()) for role in ROLES]
            for scheme in [scheme for scheme in schemes if _has(scheme, rest)] or schemes[:1]:
                _set_scheme(scheme, path, rest, text)
        case _:
            raise _unknown(path, "a recipe", ["name", "position", "window", *ROLES, "all", "layers", "policies"])


def _has(scheme: Tree, rest: list[str]) -> bool:
    """True if a scheme has what a path names below it; a stage may be put anywhere."""
    return len(rest) < 2 or (isinstance(stage := scheme.get(rest[0]), dict) and rest[1] in stage)


def _set_scheme(scheme: Tree, path: str, rest: list[str], text: str) -> None:
    known = kinds()
    match rest:
        case ["axis"]:
            scheme["axis"] = _value(path, text, Literal["token", "channel"])
        case [slot] if slot in SLOTS and text == "none" and slot != "quantize":
            scheme[slot] = None
        case [slot] if slot in SLOTS:
            if text not in known[slot]:
                others = [] if slot == "quantize" else ["none"]
                raise ValueError(f"{path}={text}; use one of {', '.join([*sorted(known[slot]), *others])}")
            scheme[slot] = _defaults(known[slot][text])
        case [slot, name] if slot in SLOTS:
            if scheme[slot] is None:
                place, some = path.removesuffix(f".{name}"), ", ".join(sorted(known[slot]))
                raise ValueError(f"{path}={text}; there is no {place} here: first {place}=KIND, one of {some}")
            _set_setting(scheme[slot], known[slot][scheme[slot]["kind"]], path, name, text)
        case _:
            raise _unknown(path, "a scheme", ["axis", *SLOTS])


def _set_policy(policies: Tree, path: str, kind: str, rest: list[str], text: str) -> None:
    known = _policies()
    if kind not in known or len(rest) > 1:
        raise _unknown(path, "policies", sorted(known))
    if rest:
        if kind not in policies:
            raise ValueError(f"{path}={text}; there is no policies.{kind} here: first policies.{kind}=on")
        _set_setting(policies[kind], known[kind], path, rest[0], text)
    elif text == "none":
        policies.pop(kind, None)
    elif text == "on":
        policies.setdefault(kind, _defaults(known[kind]))
    else:
        raise ValueError(f"{path}={text}; use on or none")


def _policies() -> dict[str, Any]:
    """The settings of all policies, by kind."""
    return {kind: cls for classes in policy_kinds().values() for kind, cls in classes.items()}


def _defaults(cls: Any) -> Tree:
    """The settings of a stage or policy as it is without any, as JSON; they may need others beside them."""
    return json.loads(json.dumps({"kind": cls.kind} | {setting.name: setting.default for setting in fields(cls)}))


def _set_setting(stage: Tree, cls: type, path: str, name: str, text: str) -> None:
    types = setting_types(cls)
    if name not in types:
        raise _unknown(path, stage["kind"], types)
    stage[name] = _value(path, text, types[name])


def _unknown(path: str, where: str, names: Iterable[str]) -> ValueError:
    return ValueError(f"{path}: no such setting; {where} has {', '.join(names) or 'none'}")


# ---- values ----------------------------------------------------------------------------------------------------------


def _value(path: str, text: str, expected: Any) -> Any:
    """Parse a text as a value of this type; ValueError lists the values there are."""
    candidates: list[Any] = []
    for written in (text, f"[{text}]"):  # 8,4,2 is a list without brackets
        try:
            candidates.append(strict_json.loads(written, path))
        except ArtifactError:
            continue
    for value in [*candidates, *([None] if text == "none" else []), text]:
        if fits_type(value, expected) and (get_origin(expected) is not Literal or value in get_args(expected)):
            return float(value) if _wants_float(value, expected) else value
    raise ValueError(f"{path}={text}; use {_allowed(expected)}")


def _wants_float(value: Any, expected: Any) -> bool:
    """True for a whole number where only fractions are expected: 1 for 1.0."""
    kinds = get_args(expected) if get_origin(expected) in (Union, UnionType) else (expected,)
    return type(value) is int and float in kinds and int not in kinds


def _allowed(expected: Any) -> str:
    """The values of a type, in words."""
    origin, arguments = get_origin(expected), get_args(expected)
    if origin in (Union, UnionType):
        return " or ".join(_allowed(part) for part in arguments)
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin is tuple:
        return f"a list, each {_allowed(arguments[0])}, as in 1,2"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", NoneType: "none"}
    return words.get(expected, str(expected))


def _text(value: Any) -> str:
    """A value as it is written: what `_value` reads."""
    if isinstance(value, list):
        return ",".join(map(_text, value))
    if value is None or isinstance(value, bool):
        return "none" if value is None else str(value).lower()
    return str(value)


# ---- how recipes differ ----------------------------------------------------------------------------------------------


def differences(ours: Tree, theirs: Tree) -> Iterable[tuple[str, str]]:
    """(path, value) of the settings that make the one of the other, in the order of a recipe's JSON."""
    layers = sorted({*ours["layers"], *theirs["layers"]}, key=int)  # one that is named anew begins as the others
    ours, theirs = (
        tree | {"layers": {layer: tree["layers"].get(layer, ours) for layer in layers}} for tree in (ours, theirs)
    )
    known = dict(_walked(theirs))
    for path, value in _walked(ours):
        if known.get(path, ...) != value:
            yield path, _text(value)
            if (cls := _class(path, value)) is not None:  # its settings are those that it has without any
                known |= dict(_own(path, _defaults(cls)))
    yield from ((f"policies.{kind}", "none") for kind in theirs["policies"] if kind not in ours["policies"])


def _class(path: str, kind: str) -> type | None:
    """The class of the stage or policy that a path puts somewhere; None for another path."""
    match path.split("."):
        case ["policies", name]:
            return _policies()[name]
        case [*_, slot] if slot in SLOTS and kind != "none":
            return kinds()[slot][kind]
    return None
