"""Read and write kvq.json, the index of a Hub repository: its versions, aliases and events.

    {"schema": 1, "name": "...",
     "versions": {"1.2.0": {"sha256", "size", "about": {recipe, model, revision, corpus, corpus_digest}}},
     "aliases": {"production": "1.2.0"},
     "events": [...]}                      as in events.py, in order: the last one is the change of its commit

Versions and aliases follow from the events, and are written out for readers that do not fold them; a file in which the
two disagree is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvq_runtime.disk import strict_json
from kvq_runtime.errors import ArtifactError
from kvq_runtime.registry import events, reference
from kvq_runtime.registry.events import State

FILE = "kvq.json"
ARTIFACT = reference.ARTIFACT_FILE
SCHEMA = 1
LIMIT = 16 << 20
ABOUT = {"recipe", "model", "revision", "corpus", "corpus_digest"}


@dataclass(frozen=True)
class Index:
    """The content of kvq.json.

    state   folded from the events
    about   {version: summary of its artifact}, with the keys of ABOUT
    """

    state: State
    about: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def folder(version: str) -> str:
    """Return the folder of a version in its repository."""
    return f"versions/{version}"


def to_bytes(index: Index) -> bytes:
    """The bytes of kvq.json."""
    state = index.state
    return (strict_json.dumps({
        "schema": SCHEMA,
        "name": state.name,
        "versions": _versions(state, index.about),
        "aliases": {alias: state.at(alias) for alias in state.aliases},
        "events": [event.to_json() for event in state.events],
    }) + "\n").encode()  # fmt: skip


def from_bytes(data: bytes, name: str, where: str) -> Index:
    """Read kvq.json, which must be about this name; raises ArtifactError, beginning with `where`, otherwise."""
    try:
        return _read(data, name)
    except ArtifactError as error:
        raise ArtifactError(f"{where}: {FILE}: {error}") from None


def _read(data: bytes, name: str) -> Index:
    if len(data) > LIMIT:
        raise ArtifactError(f"{len(data)} bytes; at most {LIMIT} are allowed")
    fields = strict_json.loads(data, "index")
    if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
        raise ArtifactError(f"expected schema {SCHEMA}, got {fields!r:.80}; a newer kvq may have written it")
    strict_json.keys(fields, {"schema", "name", "versions", "aliases", "events"}, "index")
    if fields["name"] != name or not isinstance(fields["events"], list) or not isinstance(fields["versions"], dict):
        raise ArtifactError(
            f"expected versions and events of {name}, got those of {fields['name']!r:.120}, or no lists"
        )
    state = events.fold(
        name, (events.from_json(event, number, name) for number, event in enumerate(fields["events"], 1))
    )
    about = {}
    for version, row in fields["versions"].items():
        strict_json.keys(row, {"sha256", "size", "about"}, f"version {version!r:.40}")
        about[version] = strict_json.keys(row["about"], ABOUT, f"about {version!r:.40}")
    stated = fields["aliases"]
    if fields["versions"] != _versions(state, about) or stated != {alias: state.at(alias) for alias in state.aliases}:
        raise ArtifactError("versions or aliases contradict the events; somebody edited the file by hand")
    return Index(state, about)


def _versions(state: State, about: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        version.version: {"sha256": version.sha256, "size": version.size, "about": dict(about.get(version.version, {}))}
        for version in state.versions.values()
    }
