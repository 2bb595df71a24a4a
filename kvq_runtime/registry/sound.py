"""Read and write evaluation records: measurements of an artifact after its fit, stored beside it, never changed.

    {"artifact": sha256, "corpus": digest, "protocol": {...}, "environment": {...}, "result": {...}}

A record's file is named by its own digest. The same measurement, stored twice, is one record. The form is that of the
classes in `measured`, read strictly: whoever may write to a registry may add one. What may be left out may be null, and
anything else may stand beside it.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import sha256 as hash_of
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from kvq_runtime.disk import strict_json
from kvq_runtime.errors import ArtifactError
from kvq_runtime.registry import measured, reference
from kvq_runtime.registry.measured import TEXT, Record, TextRecord

T = TypeVar("T")
R = TypeVar("R", bound=Record)
WORDS = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}
FIELDS = {"artifact", "corpus", "protocol", "environment", "result"}
LIMIT = 1 << 20  # bytes of a file
LARGEST = 1e15  # of a number, either way: larger ones overflow where they are drawn
KINDS: Mapping[str, type[Record]] = {
    TEXT: TextRecord,
    **dict.fromkeys(measured.TASKS, measured.TasksRecord),
}


def to_bytes(record: Mapping[str, Any]) -> bytes:
    """The record's file; raises ArtifactError if the record is malformed."""
    return strict_json.record(_check(dict(record), "evaluation"))


def from_bytes(data: bytes, path: PurePath) -> dict[str, Any]:
    """Read a record's JSON from the bytes at `path`, .../artifact's digest/record's digest.json.

    Raises ArtifactError if it is damaged, or is not about the artifact its folder is named by.
    """
    digest = hash_of(data).hexdigest()
    if path.stem != digest:
        raise ArtifactError(f"{path}: evaluation: sha256 is {digest}, not that of its name; the file was changed")
    record = _check(strict_json.loads(data, f"{path}: evaluation"), f"{path}: evaluation")
    if record["artifact"] != path.parent.name:
        raise ArtifactError(f"{path}: evaluation: is about {record['artifact']}, but stored with another artifact")
    return record


def _check(record: Any, label: str) -> dict[str, Any]:
    strict_json.keys(record, FIELDS, label)
    try:
        reference.check_sha256(record["artifact"])
        if not isinstance(record["corpus"], str):
            raise ValueError("corpus must be text: the digest of the corpus")
        for name in ("protocol", "environment", "result"):
            if not isinstance(record[name], dict):
                raise ValueError(f"{name} must be an object")
    except ValueError as error:
        raise ArtifactError(f"{label}: {error}") from None
    return record


# ---- as `measured` has them -----------------------------------------------------------------------------------------


def read(record: Any, wanted: type[R] = Record) -> R:
    """A record of its JSON; of a protocol that is not known here, what all have.

    Raises ArtifactError for another form, and for a record that is not the wanted one.
    """
    try:
        kind, given = KINDS.get(record["protocol"].get("name", TEXT), Record), record
        if kind is TextRecord:
            result = record["result"]
            parts = result.get("protocols", {measured.IN_USE: result})  # of version 1: those in use alone
            ordered = {name: parts[name] for name in measured.PROTOCOLS if name in parts}
            given = record | {"result": result | {"protocols": ordered}}
        found = of_json(kind, given, "record")
        if not isinstance(found, wanted):
            raise ValueError(f"the protocol is {found.protocol.name!r:.80}, of which there is no {wanted.__name__}")
        return dataclasses.replace(found, raw=record, name=found.result.recipe)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"evaluation: {error}") from None


def of_json(kind: type[T], value: Any, where: str) -> T:
    """An object of a class, from the fields that are there."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {value!r:.80} is not an object")
    given = {}
    for name, (form, needed, optional) in _fields(kind).items():
        if value.get(name) is not None:
            given[name] = _value(form, value[name], f"{where}.{name}")
        elif optional and name in value:
            given[name] = None
        elif needed:
            raise ValueError(f"{where} has no {name}")
    return kind(**given)


@cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool, bool]]:
    """{name: (its form, whether it is needed, whether it may be None)}."""
    hints, missing = get_type_hints(kind), dataclasses.MISSING
    return {
        one.name: (hints[one.name], one.default is missing and one.default_factory is missing,
                   NoneType in get_args(hints[one.name]))
        for one in dataclasses.fields(kind)
    }  # fmt: skip


def _suits(kind: Any, value: Any) -> bool:
    """True for an object that has all that a class needs."""
    return isinstance(value, dict) and all(name in value for name, (_, needed, _) in _fields(kind).items() if needed)


def _value(form: Any, value: Any, where: str) -> Any:
    """A value of a form: a class, a number, text, several of a form, or one of some."""
    origin, args = get_origin(form), get_args(form)
    if origin is UnionType:
        kinds = [one for one in args if one is not NoneType]
        return _value(next((one for one in kinds[:-1] if _suits(one, value)), kinds[-1]), value, where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):  # a record that was just made has tuples
            raise ValueError(f"{where}: {value!r:.80} is not a list")
        return tuple(_value(args[0], one, f"{where}.{place}") for place, one in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, dict):
            raise ValueError(f"{where}: {value!r:.80} is not an object")
        return {
            name: None if one is None else _value(args[1], one, f"{where}.{name}")
            for name, one in value.items()
            if one is not None or NoneType in get_args(args[1]) or args[1] is Any
        }
    if isinstance(form, type) and dataclasses.is_dataclass(form):
        return of_json(form, value, where)
    kinds = (int, float) if form is float else form
    if form is not Any and (not isinstance(value, kinds) or isinstance(value, bool) != (form is bool)):
        raise ValueError(f"{where}: {value!r:.80} is not {WORDS[form]}")
    return value


def sound(records: Iterable[Mapping[str, Any]]) -> list[Record]:
    """The records that can be read, and whose numbers can be drawn."""
    found = []
    for record in records:
        try:
            found += [read(record)] if _plain(record) else []
        except ArtifactError:
            continue
    return found


def _plain(value: Any) -> bool:
    """True if all numbers below a value can be drawn."""
    if isinstance(value, (int, float)):
        return isinstance(value, bool) or -LARGEST <= value <= LARGEST
    return all(
        map(_plain, value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ())
    )
