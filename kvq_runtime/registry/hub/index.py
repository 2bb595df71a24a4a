"""Read and write kvq.json, the index of a Hub repository: its versions, aliases and events.

    {"schema": 1, "name": "...",
     "versions": {"1.2.0": {"sha256", "size", "about": {recipe, model, revision, corpus, corpus_digest}}},
     "aliases": {"production": "1.2.0"},
     "events": [...]}                      as in events.py, in order: the last one is the change of its commit

Versions and aliases follow from the events, and are written out for readers that do not fold them; a file in which the
two disagree is refused.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvq_runtime.disk import strict_json
from kvq_runtime.errors import ArtifactError
from kvq_runtime.registry import events
from kvq_runtime.registry.events import State
from kvq_runtime.registry.hub import ask, cache, client
from kvq_runtime.registry.place import Head

FILE = "kvq.json"
SCHEMA = 1
LIMIT = 16 << 20
ABOUT = {"recipe", "model", "revision", "corpus", "corpus_digest"}


def folder(version: str) -> str:
    """Return the folder of a version in its repository."""
    return f"versions/{version}"


def to_bytes(head: Head) -> bytes:
    """The bytes of kvq.json."""
    state = head.state
    return (strict_json.dumps({
        "schema": SCHEMA,
        "name": state.name,
        "versions": _versions(state, head.about),
        "aliases": {alias: state.at(alias) for alias in state.aliases},
        "events": [event.to_json() for event in state.events],
    }) + "\n").encode()  # fmt: skip


def from_bytes(data: bytes, name: str, where: str) -> Head:
    """Read kvq.json, which must be about this name; raises ArtifactError, beginning with `where`, otherwise."""
    try:
        return _read(data, name)
    except ArtifactError as error:
        raise ArtifactError(f"{where}: {FILE}: {error}") from None


def at(repo: str, commit: str) -> Head:
    """What kvq.json of a repository, org/name, says at a commit; nothing if the commit has none."""
    from huggingface_hub.errors import RemoteEntryNotFoundError

    name = repo.rpartition("/")[2]
    try:
        data = cache.content(repo, FILE, commit, LIMIT)
    except RemoteEntryNotFoundError:
        return Head(State(name), commit=commit)
    return replace(from_bytes(data, name, f"{repo} at {commit[:12]}"), commit=commit)


def main(repo: str) -> str:
    """The commit at the head of main, asked of the Hub; raises huggingface_hub's error if offline."""
    commit = ask.head(repo)
    cache.note_head(repo, commit)
    return commit


def main_or_last_known(repo: str) -> str:
    """`main`; offline, or with a warning if the Hub does not answer, the head that was last seen."""
    last = cache.last_head(repo)
    if last is not None and client.is_offline():
        return last
    try:
        return main(repo)
    except Exception as error:
        if last is None or client.retry_delay(error) is None:
            raise
        text = "the Hub did not answer; aliases and versions are as of its last answer"
        warnings.warn(f"{repo}: {text} ({client.redacted(error)})", stacklevel=5)
        return last


def _read(data: bytes, name: str) -> Head:
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
    return Head(state, about)


def _versions(state: State, about: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        version.version: {"sha256": version.sha256, "size": version.size, "about": dict(about.get(version.version, {}))}
        for version in state.versions.values()
    }
