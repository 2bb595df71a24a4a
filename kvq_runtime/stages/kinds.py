"""Find every kind of stage by its name, and turn a stage into JSON and back.

A stage is found because its class stands in a file of this folder: nothing is registered, and a name in a JSON file
never causes an import.
"""

import dataclasses
import json
import pkgutil
import types
from collections.abc import Mapping, Sequence, Set
from functools import cache
from importlib import import_module
from inspect import isabstract
from typing import Any, Literal, Union, get_args, get_origin

from kvq_runtime.stages.stage import SLOTS, Stage, setting_types


@cache
def kinds() -> dict[str, dict[str, type]]:
    """Return the classes of all stages: slot → kind → class, in alphabetical order of files."""
    classes: dict[str, dict[str, type]] = {slot: {} for slot in SLOTS}
    for cls in classes_in(("kvq_runtime.stages",), Stage):
        classes[cls.slot][cls.kind] = cls
    return classes


def classes_in(packages: Sequence[str], base: type) -> list[Any]:
    """Return the classes in the files of packages that are derived from `base` and have a kind of their own."""
    names = [
        f"{package}.{file.name}"
        for package in packages
        for file in pkgutil.iter_modules(import_module(package).__path__)
    ]
    return [
        cls
        for module in map(import_module, names)
        for cls in vars(module).values()
        if isinstance(cls, type) and issubclass(cls, base) and cls.__module__ == module.__name__
        if "kind" in vars(cls) and not isabstract(cls)
    ]


def stage_json(stage: Any) -> dict:
    """Return a stage or policy as JSON: its kind and its settings, some of them only where they are set."""
    optional, defaults = getattr(stage, "optional", ()), {f.name: f.default for f in dataclasses.fields(stage)}
    settings = {name: value for name, value in dataclasses.asdict(stage).items()
                if name not in optional or value != defaults[name]}  # fmt: skip
    return json.loads(json.dumps({"kind": stage.kind} | settings))


def stage_from(name: str, stated: Any, known: Mapping[str, type]) -> Any:
    """Read a stage, or None; a kind that is none of `known`, and other settings than it has, are a ValueError."""
    if stated is None:
        return None
    if not isinstance(stated, dict) or not isinstance(stated.get("kind"), str) or stated["kind"] not in known:
        raise ValueError(f"{name}={stated!r:.200}; use an object with a kind of {sorted(known)}")
    cls: Any = known[stated["kind"]]
    settings = {key: value for key, value in stated.items() if key != "kind"}
    allowed = setting_types(cls)
    check_keys(settings, set(allowed), f"{name} {cls.kind}", optional=set(allowed))
    for key, value in settings.items():
        if not fits_type(value, allowed[key]):
            default = next(field.default for field in dataclasses.fields(cls) if field.name == key)
            raise ValueError(f"{name} {cls.kind}: {key}={value!r:.200}; expected a value like {default!r}")
    return cls(**settings)


def fits_type(value: Any, expected: Any) -> bool:
    """Return True if a JSON value may be a setting of this type; a list stands for a tuple, of at most 8 items."""
    origin, arguments = get_origin(expected), get_args(expected)
    if origin in (Union, types.UnionType):
        return any(fits_type(value, part) for part in arguments)
    if origin is tuple:
        return isinstance(value, list) and len(value) <= 8 and all(fits_type(item, arguments[0]) for item in value)
    if origin is Literal:
        return any(isinstance(value, type(option)) and not isinstance(value, bool) for option in arguments)
    if expected is bool or isinstance(value, bool):
        return expected is bool and isinstance(value, bool)
    return isinstance(value, (int, float) if expected is float else expected)


def check_keys(stated: Any, names: Set[str], what: str, optional: Set[str] = frozenset()) -> None:
    """Raise a ValueError unless this is an object with these names, the optional ones perhaps."""
    if not isinstance(stated, dict):
        raise ValueError(f"{what}: expected an object, got {stated!r:.200}")
    unknown, missing = set(stated) - names, names - set(stated) - optional
    if unknown or missing:
        raise ValueError(f"{what}: unknown keys {sorted(unknown)}, missing keys {sorted(missing)}")
