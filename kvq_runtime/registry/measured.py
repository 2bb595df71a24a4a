"""Read what an evaluation record says was measured, by protocol, in records of either version.

    full     every token but the sinks was encoded and decoded before anything attended to it
    in-use   tokens arrived in steps, and a block was encoded when the cache would encode it

A record holds `result.protocols`, {protocol: figures or {"reason": why there are none}}. Records of version 1 have one
set of figures in `result` itself, which were measured in use.
"""

from collections.abc import Iterable, Mapping
from typing import Any

FULL, IN_USE = "full", "in-use"
PROTOCOLS = (FULL, IN_USE)
SPOKEN = {FULL: "full encode", IN_USE: "in use"}


def parts(record: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """What a record has for each protocol, figures or the reason why there are none; the full encode first."""
    found = record["result"].get("protocols")
    if found is None:
        return {IN_USE: record["result"]}
    return {name: found[name] for name in PROTOCOLS if name in found}


def figures(record: Mapping[str, Any], protocol: str) -> Mapping[str, Any] | None:
    """The figures of one protocol; None where it was not asked for, or cannot be measured."""
    part = parts(record).get(protocol)
    return None if part is None or "reason" in part else part


def decisive(record: Mapping[str, Any]) -> str | None:
    """The protocol whose figures count where one must: the full encode where it was measured. None: there are none."""
    return next((name for name in PROTOCOLS if figures(record, name) is not None), None)


def reasons(record: Mapping[str, Any]) -> list[str]:
    """Why figures are missing, a sentence for each protocol that has none."""
    return [f"{SPOKEN[name]}: {part['reason']}" for name, part in parts(record).items() if "reason" in part]


def elsewhere(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What was measured on texts of other kinds: for each, by name, the record as one of that text alone."""
    about, result = record["protocol"], record["result"]
    found = {}
    for name, measured in (result.get("texts") or {}).items():
        protocol = {**about, **about["texts"][name]}
        del protocol["texts"]
        found[name] = {**record, "protocol": protocol, "result": {**result, **measured, "layers": [], "texts": {}}}
        found[name]["corpus"] = protocol["text"].get("corpus_digest", record["corpus"])
    return found


def texts(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of the texts of other kinds that any of the records has."""
    return list(dict.fromkeys(name for record in records for name in record["result"].get("texts") or {}))
