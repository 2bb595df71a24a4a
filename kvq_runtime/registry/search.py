"""Find versions by name, recipe, model, model revision and corpus."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line reads FIELDS, and should not import torch for its help
    from kvq_runtime.registry.registry import Registry

FIELDS = ("name", "recipe", "model", "revision", "corpus")


def search(registry: "Registry", query: Mapping[str, str | None]) -> Iterator[dict[str, Any]]:
    """Yield every version that matches all patterns, as a row.

    query   {field: pattern}, fields of FIELDS; None matches all. A pattern with * ? [ must match the whole field,
            another a part of it; case is ignored. `corpus` is compared with the name of the corpus and its digest
    """
    patterns = {field: pattern.lower() for field, pattern in query.items() if pattern}
    for name in registry.names():
        if "name" in patterns and not _matches(patterns["name"], name):
            continue
        for version in registry.state(name).versions.values():
            row = {"name": name, "version": version.version} | registry.about(name, version)
            if all(_matches(pattern, row[f]) or _matches_digest(f, pattern, row) for f, pattern in patterns.items()):
                yield row | {"sha256": version.sha256, "published": version.at, "yanked": version.yanked}


def _matches(pattern: str, value: Any) -> bool:
    text = str(value or "").lower()
    return fnmatchcase(text, pattern) if any(sign in pattern for sign in "*?[") else pattern in text


def _matches_digest(field: str, pattern: str, row: Mapping[str, Any]) -> bool:
    return field == "corpus" and len(pattern) >= 8 and str(row["corpus_digest"] or "").startswith(pattern)
