"""Find every kind of stage by its name, and turn a stage into JSON and back."""

import dataclasses
import json
from collections.abc import Mapping, Set
from typing import Any

from kvq_runtime.stages import (
    escape,
    exact,
    feedback,
    grid,
    lloyd,
    low_rank,
    mixed,
    nuq,
    online,
    polar,
    predict,
    rotate,
    rtn,
    select,
    sparse,
    window,
)  # fmt: skip

KINDS: dict[str, dict[str, type]] = {
    "predict": {kind.kind: kind for kind in predict.KINDS},
    "rotate": {kind.kind: kind for kind in rotate.KINDS},
    "quantize": {kind.kind: kind for module in (exact, grid, lloyd, mixed, nuq, polar, rtn) for kind in module.KINDS},
    "feedback": {kind.kind: kind for kind in feedback.KINDS},
    "correct": {kind.kind: kind for module in (escape, low_rank, sparse) for kind in module.KINDS},
}
LATER = ("feedback", "correct")  # stages younger than the file format: without one, a side does not speak of it
WINDOWS: dict[str, type] = {kind.kind: kind for kind in window.KINDS}
ONLINE: dict[str, type] = {kind.kind: kind for kind in online.KINDS}
SELECT: dict[str, type] = {kind.kind: kind for kind in select.KINDS}


def stage_json(stage: Any) -> dict:
    """A stage as JSON: its kind and its settings."""
    return {"kind": stage.kind} | json.loads(json.dumps(dataclasses.asdict(stage)))


def stage_from(stage: str, given: Any, kinds: Mapping[str, type]) -> Any:
    """Read a stage, or None; a kind that is none of `kinds`, and other settings than it has, are a ValueError."""
    if given is None:
        return None
    if not isinstance(given, dict) or not isinstance(given.get("kind"), str) or given["kind"] not in kinds:
        raise ValueError(f"{stage}={given!r:.200}; use an object with a kind of {sorted(kinds)}")
    cls: Any = kinds[given["kind"]]
    settings = {key: value for key, value in given.items() if key != "kind"}
    types = {f.name: f.default for f in dataclasses.fields(cls)}
    check_keys(settings, set(types), f"{stage} {cls.kind}", optional=set(types))
    for name, value in settings.items():
        if not _like(value, types[name], name):
            raise ValueError(f"{stage} {cls.kind}: {name}={value!r:.200}; a value like {types[name]!r} is meant")
    return cls(**settings)


def _like(value: Any, example: Any, name: str) -> bool:
    """Whether a JSON value has the type of a setting's default."""
    if isinstance(example, tuple):
        return isinstance(value, list) and len(value) <= 8 and all(_like(item, 1, name) for item in value)
    if isinstance(example, bool) or isinstance(value, bool):
        return isinstance(example, bool) and isinstance(value, bool)
    if name in ("group", "fit_tokens"):
        return isinstance(value, (int, str))
    return isinstance(value, (int, float) if isinstance(example, float) else type(example))


def check_keys(given: Any, names: set[str], what: str, optional: Set[str] = frozenset()) -> None:
    """Raise a ValueError unless this is an object with these names, the optional ones perhaps."""
    if not isinstance(given, dict):
        raise ValueError(f"{what}: an object is meant, not {given!r:.200}")
    unknown, missing = set(given) - names, names - set(given) - optional
    if unknown or missing:
        raise ValueError(f"{what}: unknown keys {sorted(unknown)}, missing keys {sorted(missing)}")
