"""Read and write kvq.json, the one file of a Hub repository that says what there is.

    {"schema": 1, "name": "...",
     "versions": {"1.2.0": {"sha256", "size", "about": {recipe, model, revision, corpus, corpus_digest}}},
     "aliases": {"production": "1.2.0"},
     "events": [...]}                      as in events.py, in order: the last one is what its commit did

Versions and aliases are what the events add up to, written out for readers that do not fold; a file in which the two
disagree is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvq_runtime import strict_json
from kvq_runtime.errors import ArtifactError
from kvq_runtime.registries import events
from kvq_runtime.registries.events import State

FILE = "kvq.json"
ARTIFACT = "kvq.safetensors"
SCHEMA = 1
LIMIT = 16 << 20
ABOUT = {"recipe", "model", "revision", "corpus", "corpus_digest"}


@dataclass(frozen=True)
class Index:
    """What kvq.json says: the state of a name, and {version: about}."""

    state: State
    about: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """What a commit of main says; `commit` is None where there is no repository yet."""

    commit: str | None
    index: Index


def folder(version: str) -> str:
    """Where a version's files are in its repository."""
    return f"versions/{version}"


def to_bytes(index: Index) -> bytes:
    """The file."""
    state = index.state
    return (strict_json.dumps({
        "schema": SCHEMA,
        "name": state.name,
        "versions": _versions(state, index.about),
        "aliases": {alias: state.at(alias) for alias in state.aliases},
        "events": [event.to_json() for event in state.events],
    }) + "\n").encode()  # fmt: skip


def from_bytes(data: bytes, name: str, where: str) -> Index:
    """Read the file that must be about this name; ArtifactError, beginning with `where`, for anything else."""
    try:
        return _read(data, name)
    except ArtifactError as error:
        raise ArtifactError(f"{where}: {FILE}: {error}") from None


def _read(data: bytes, name: str) -> Index:
    if len(data) > LIMIT:
        raise ArtifactError(f"{len(data)} bytes; at most {LIMIT} are allowed")
    given = strict_json.loads(data, "index")
    if not isinstance(given, dict) or given.get("schema") != SCHEMA:
        raise ArtifactError(f"schema {SCHEMA} is meant, not {given!r:.80}; a newer kvq may have written it")
    strict_json.keys(given, {"schema", "name", "versions", "aliases", "events"}, "index")
    if given["name"] != name or not isinstance(given["events"], list) or not isinstance(given["versions"], dict):
        raise ArtifactError(f"it is about {given['name']!r:.120}, not {name}, or holds no lists")
    state = events.fold(name, (events.from_json(one, number, name) for number, one in enumerate(given["events"], 1)))
    about = {}
    for version, row in given["versions"].items():
        strict_json.keys(row, {"sha256", "size", "about"}, f"version {version!r:.40}")
        about[version] = strict_json.keys(row["about"], ABOUT, f"about {version!r:.40}")
    stated = given["aliases"]
    if given["versions"] != _versions(state, about) or stated != {alias: state.at(alias) for alias in state.aliases}:
        raise ArtifactError("versions or aliases are not what the events add up to; somebody edited it by hand")
    return Index(state, about)


def _versions(state: State, about: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        version.version: {"sha256": version.sha256, "size": version.size, "about": dict(about.get(version.version, {}))}
        for version in state.versions.values()
    }
