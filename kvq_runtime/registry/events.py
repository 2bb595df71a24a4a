"""Say what happened to a name, and fold it into what is: versions, aliases, history. Nothing else is state.

An event is one JSON file, numbered from 1 without gaps:

    {"schema": 1, "number": 3, "name": "...", "at": "2026-01-31T12:00:00Z", "kind": "promote", ...}

    publish    version, sha256, size, files {name: {sha256, size}}
    promote    alias, version
    rollback   alias, version      the version the alias goes back to
    yank       version, reason
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from kvq_runtime import reference, strict_json
from kvq_runtime.errors import ArtifactError, Conflict, NotFound

SCHEMA = 1
_AT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")


@dataclass(frozen=True)
class Publish:
    """A new version: the artifact, and the files beside it by digest and size."""

    kind: ClassVar[str] = "publish"
    version: str
    sha256: str
    size: int
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Promote:
    """An alias moves to a version."""

    kind: ClassVar[str] = "promote"
    alias: str
    version: str


@dataclass(frozen=True)
class Rollback:
    """An alias moves back to the version it had before."""

    kind: ClassVar[str] = "rollback"
    alias: str
    version: str


@dataclass(frozen=True)
class Yank:
    """A version is no longer chosen unless it is asked for by number or digest."""

    kind: ClassVar[str] = "yank"
    version: str
    reason: str


Change = Publish | Promote | Rollback | Yank
KINDS: dict[str, type] = {kind.kind: kind for kind in (Publish, Promote, Rollback, Yank)}


@dataclass(frozen=True)
class Event:
    """A change of one name, with its number and its time (UTC)."""

    number: int
    name: str
    at: str
    change: Change

    def to_json(self) -> dict[str, Any]:
        """The event as JSON."""
        head = {"schema": SCHEMA, "number": self.number, "name": self.name, "at": self.at, "kind": self.change.kind}
        return head | asdict(self.change)

    def to_bytes(self) -> bytes:
        """The event's file."""
        return (strict_json.dumps(self.to_json()) + "\n").encode()


def from_bytes(data: bytes, number: int, name: str) -> Event:
    """Read the event that must have this number and name; ArtifactError for anything else."""
    return from_json(strict_json.loads(data, "event"), number, name)


def from_json(given: Any, number: int, name: str) -> Event:
    """`from_bytes` for JSON at hand."""
    if not isinstance(given, dict) or type(given.get("schema")) is not int or given["schema"] != SCHEMA:
        raise ArtifactError(f"event: schema 1 is meant, not {given!r:.80}; a newer kvq may have written it")
    kind = KINDS.get(given["kind"]) if isinstance(given.get("kind"), str) else None
    if kind is None:
        raise ArtifactError(f"event: kind {given.get('kind')!r:.80}; use one of {sorted(KINDS)}")
    names = set(kind.__dataclass_fields__) - {"kind"}
    strict_json.keys(given, {"schema", "number", "name", "at", "kind"} | names, "event")
    if type(given["number"]) is not int or given["number"] != number or given["name"] != name:
        stated = f"{given['name']!r:.120} number {given['number']!r:.40}"
        raise ArtifactError(f"event: {stated} in the place of {name} number {number}")
    try:
        for key in names | {"at"}:
            _CHECKS[key](given[key])
    except ValueError as error:
        raise ArtifactError(f"event: {error}") from None
    return Event(number, name, given["at"], kind(**{key: given[key] for key in names}))


def _check_size(given: Any) -> None:
    if type(given) is not int or given < 0:
        raise ValueError(f"size {given!r:.80}; a whole number is meant")


def _check_files(given: Any) -> None:
    if not isinstance(given, dict) or len(given) > 64:
        raise ValueError("files must be an object of at most 64 names")
    for name, entry in given.items():
        reference.check_file(name)
        strict_json.keys(entry, {"sha256", "size"}, f"files: {name}")
        reference.check_sha256(entry["sha256"])
        _check_size(entry["size"])


def _check_at(given: Any) -> None:
    if not isinstance(given, str) or not _AT.fullmatch(given):
        raise ValueError(f"at {given!r:.80}; a UTC time is meant, as in 2026-01-31T12:00:00Z")


def check_reason(given: Any) -> None:
    """Why a version is yanked: a line that says something."""
    if not isinstance(given, str) or not given.strip() or len(given) > 500 or not given.isprintable():
        raise ValueError(f"reason {given!r:.80}; one line of 1 to 500 characters is meant")


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "version": reference.check_version,
    "alias": reference.check_alias,
    "sha256": reference.check_sha256,
    "size": _check_size,
    "files": _check_files,
    "reason": check_reason,
    "at": _check_at,
}


@dataclass(frozen=True)
class Version:
    """A published version; `yanked` is the reason, or None."""

    version: str
    sha256: str
    size: int
    files: Mapping[str, Mapping[str, Any]]
    at: str
    yanked: str | None = None


@dataclass(frozen=True)
class State:
    """What a name is after its events.

    versions   by number, in the order of publishing
    aliases    {alias: the versions it had, the present one last}
    """

    name: str
    versions: Mapping[str, Version] = field(default_factory=dict)
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    events: tuple[Event, ...] = ()

    def at(self, alias: str) -> str | None:
        """The version an alias points to."""
        return self.aliases[alias][-1] if alias in self.aliases else None

    def get(self, version: str) -> Version:
        """A version, or NotFound with the versions there are."""
        if version not in self.versions:
            raise NotFound(f"{self.name} has no version {version}; it has {', '.join(self.versions) or 'none'}")
        return self.versions[version]

    def newest(self) -> Version | None:
        """The highest version that is not yanked."""
        kept = [version for version in self.versions.values() if version.yanked is None]
        return max(kept, key=lambda version: reference.order(version.version), default=None)

    def before(self, alias: str) -> str:
        """Where a rollback goes: the last version the alias had before this one that is not yanked."""
        had = self.aliases.get(alias, ())
        found = [version for version in had[:-1] if self.versions[version].yanked is None and version != had[-1]]
        if not found:
            raise NotFound(f"{self.name}@{alias} had no earlier version to go back to; promote a version instead")
        return found[-1]

    def apply(self, event: Event) -> "State":
        """The state after an event; Conflict or NotFound if it contradicts the events before it."""
        change, versions, aliases = event.change, dict(self.versions), dict(self.aliases)
        if isinstance(change, Publish):
            if change.version in versions:
                raise Conflict(f"{self.name} {change.version} is there with other bytes; a version never changes")
            fields = asdict(change)
            versions[change.version] = Version(**fields, at=event.at)
        elif isinstance(change, Yank):
            versions[change.version] = self._yanked(change)
        elif isinstance(change, Promote):
            if self.get(change.version).yanked is not None:
                raise Conflict(f"{self.name} {change.version} is yanked ({self.versions[change.version].yanked})")
            aliases[change.alias] = (*aliases.get(change.alias, ()), change.version)
        else:
            back = self.before(change.alias)
            if change.version != back:
                raise Conflict(f"{self.name}@{change.alias} goes back to {back}, not to {change.version}")
            had = aliases[change.alias][:-1]
            aliases[change.alias] = had[: len(had) - had[::-1].index(change.version)]
        return replace(self, versions=versions, aliases=aliases, events=(*self.events, event))

    def _yanked(self, change: Yank) -> Version:
        found = self.get(change.version)
        holding = [alias for alias in self.aliases if self.at(alias) == change.version]
        if holding:
            there = ", ".join(holding)
            raise Conflict(
                f"{self.name} {change.version} is {there}; promote another version there first, or roll back"
            )
        if found.yanked is not None:
            raise Conflict(f"{self.name} {change.version} is yanked already ({found.yanked})")
        return replace(found, yanked=change.reason)


def fold(name: str, events: Iterable[Event]) -> State:
    """The state of a name after these events, in order."""
    state = State(name)
    for event in events:
        state = state.apply(event)
    return state
