"""Find versions by what they were made of: name, recipe, model, model revision, corpus."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from kvq_runtime.registries.changes import Registry

FIELDS = ("name", "recipe", "model", "revision", "corpus")


def search(registry: Registry, wanted: Mapping[str, str | None]) -> Iterator[dict[str, Any]]:
    """Every version for which all that is wanted holds.

    wanted   {field: pattern}, fields of FIELDS. A pattern with * ? [ matches the whole, another a part of it, in any
             case; `corpus` is compared with the corpus' name and with its digest.
    """
    asked = {field: pattern.lower() for field, pattern in wanted.items() if pattern}
    for name in registry.names():
        if "name" in asked and not _matches(asked["name"], name):
            continue
        for version in registry.state(name).versions.values():
            row = {"name": name, "version": version.version} | registry.about(name, version)
            if all(_matches(pattern, row[field]) or _digest(field, pattern, row) for field, pattern in asked.items()):
                yield row | {"sha256": version.sha256, "published": version.at, "yanked": version.yanked}


def _matches(pattern: str, given: Any) -> bool:
    text = str(given or "").lower()
    return fnmatchcase(text, pattern) if any(sign in pattern for sign in "*?[") else pattern in text


def _digest(field: str, pattern: str, row: Mapping[str, Any]) -> bool:
    return field == "corpus" and len(pattern) >= 8 and str(row["corpus_digest"] or "").startswith(pattern)
