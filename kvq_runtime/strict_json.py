"""Write JSON in one way only, and read it without trust: no duplicate keys, no NaN, bounded depth.

Canonical form: keys sorted, no spaces, ASCII only, floats as Python's `repr`. The same value gives the same bytes.
"""

import json
import math
import re
from typing import Any

from kvq_runtime.errors import ArtifactError

DEPTH = 16
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


def dumps(value: Any) -> str:
    """The canonical text of a JSON value; NaN and infinity are a ValueError."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def loads(given: bytes | str, what: str, depth: int = DEPTH) -> Any:
    """Read JSON that somebody else wrote; `what` begins every message.

    Raises ArtifactError for bytes that are not UTF-8, more than `depth` levels (before anything recurses into them),
    keys given twice, numbers that are not finite, and whatever is not JSON.
    """
    try:
        text = given if isinstance(given, str) else given.decode()
        level = deepest = 0
        for bracket in re.findall(r"[\[\]{}]", _STRING.sub("", text)):
            level += 1 if bracket in "[{" else -1
            deepest = max(deepest, level)
        if deepest > depth:
            raise ValueError(f"nested {deepest} deep; at most {depth} is allowed")
        return json.loads(text, object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite)
    except ValueError as error:
        raise ArtifactError(f"{what}: not the JSON that is meant: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r:.80} is there twice")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is not a finite number")
    return value


def keys(given: Any, names: set[str], what: str) -> dict[str, Any]:
    """Return `given` if it is an object with exactly these keys, or raise an ArtifactError."""
    if not isinstance(given, dict):
        raise ArtifactError(f"{what}: an object is meant, not {given!r:.80}")
    if set(given) != names:
        unknown, missing = sorted(set(given) - names), sorted(names - set(given))
        raise ArtifactError(f"{what}: unknown keys {unknown!r:.200}, missing keys {missing}")
    return given
