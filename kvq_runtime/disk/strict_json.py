"""Write canonical JSON, and read untrusted JSON: no duplicate keys, no NaN, bounded depth, time proportional to bytes.

Canonical form: keys sorted, no spaces, ASCII only, floats as Python's `repr`. The same value gives the same bytes.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Set
from hashlib import sha256
from itertools import accumulate
from typing import Any

from kvq_runtime.errors import ArtifactError

DEPTH = 16
_STEPS = {"[": 1, "{": 1, "]": -1, "}": -1}
# Whatever follows a quote is consumed, closed or not: a pattern that fails there would be tried at every later quote.
_NOT_BRACKETS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[^"\[\]{}]++', re.DOTALL)


def dumps(value: Any) -> str:
    """Return the canonical text of a JSON value; NaN and infinity are a ValueError."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def record(value: Any) -> bytes:
    """Return the bytes of a file with a JSON value: its canonical text and a line end."""
    return (dumps(value) + "\n").encode()


def loads(data: bytes | str, label: str, depth: int = DEPTH) -> Any:
    """Parse untrusted JSON.

    label    begins the message of every error
    depth    levels of nesting that are allowed, checked before anything recurses into them
    Raises ArtifactError for text that is not UTF-8 or not JSON, deeper nesting, duplicate keys and infinite numbers.
    """
    try:
        text = data if isinstance(data, str) else data.decode()
        deepest = max(accumulate(map(_STEPS.__getitem__, _NOT_BRACKETS.sub("", text))), default=0)
        if deepest > depth:
            raise ValueError(f"nested {deepest} levels deep; at most {depth} are allowed")
        return json.loads(text, object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite)
    except ValueError as error:
        raise ArtifactError(f"{label}: invalid JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for name, value in pairs:
        if name in unique:
            raise ValueError(f"key {name!r:.80} appears twice")
        unique[name] = value
    return unique


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is not a finite number")
    return value


def keys(
    value: Any, names: Set[str], label: str, optional: Set[str] = frozenset(),
    checks: Mapping[str, Callable[[Any], object]] = {},
) -> dict[str, Any]:  # fmt: skip
    """Return an object that has exactly these keys; raise ArtifactError, beginning with `label`, for another value.

    optional   keys that may be left out
    checks     functions that raise ValueError for an invalid value of the key
    """
    if not isinstance(value, dict):
        raise ArtifactError(f"{label}: expected an object, got {value!r:.80}")
    unknown, missing = sorted(value.keys() - names - optional), sorted(names - value.keys())
    if unknown or missing:
        faults = [f"unknown keys {unknown!r:.200}"] * bool(unknown) + [f"missing keys {missing}"] * bool(missing)
        raise ArtifactError(f"{label}: {', '.join(faults)}")
    try:
        for name in checks.keys() & value.keys():
            checks[name](value[name])
    except ValueError as error:
        raise ArtifactError(f"{label}: {error}") from None
    return value


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested objects to one with dotted keys, {"a": {"b": 1}} → {"a.b": 1}; lists of objects by index.

    A key of more than 96 characters is shortened, else a long one would be copied for each thing below it.
    """
    if isinstance(value, dict) and value:
        items = value.items()
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        items = enumerate(value)
    else:
        return {prefix: value}
    names = ((_shortened(str(name)), item) for name, item in items)
    parts = [flatten(item, f"{prefix}.{name}" if prefix else name) for name, item in names]
    return {name: item for part in parts for name, item in part.items()}


def _shortened(name: str) -> str:
    return name if len(name) <= 96 else f"{name[:64]}...{sha256(name.encode(errors='replace')).hexdigest()[:16]}"
