"""Record changes of a name as events, and fold the events into its state: versions, aliases, history.

There is no other state.

An event is one JSON file, numbered from 1 without gaps:

    {"schema": 1, "number": 3, "name": "...", "at": "2026-01-31T12:00:00Z", "kind": "promote", ...}

    publish    version, sha256, size, files {name: {sha256, size}}
    promote    alias, version
    rollback   alias, version      the version the alias goes back to
    yank       version, reason
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256 as hash_of
from typing import Any, ClassVar

from kvq_runtime.disk import strict_json
from kvq_runtime.errors import ArtifactError, Conflict, NotFound
from kvq_runtime.registry import reference

SCHEMA = 1
MAX_SIZE = 1 << 36  # bytes of an artifact
MAX_FILE = 1 << 26  # bytes of a file beside it
_AT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")


@dataclass(frozen=True)
class Publish:
    """A new version: digest and size of the artifact, and of its attachments (`files`)."""

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
    """A version is withdrawn: from now on it is chosen only by number or digest."""

    kind: ClassVar[str] = "yank"
    version: str
    reason: str


Change = Publish | Promote | Rollback | Yank
KINDS: dict[str, type] = {kind.kind: kind for kind in (Publish, Promote, Rollback, Yank)}


@dataclass(frozen=True)
class Event:
    """A change of one name, with its number, from 1, and its time `at` (UTC, as in 2026-01-31T12:00:00Z)."""

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
        return strict_json.record(self.to_json())


def from_bytes(data: bytes, number: int, name: str) -> Event:
    """Read an event, which must have this number and name; raises ArtifactError otherwise."""
    return from_json(strict_json.loads(data, "event"), number, name)


def from_json(fields: Any, number: int, name: str) -> Event:
    """`from_bytes` for JSON that is already parsed."""
    if not isinstance(fields, dict) or type(fields.get("schema")) is not int or fields["schema"] != SCHEMA:
        raise ArtifactError(f"event: expected schema 1, got {fields!r:.80}; a newer kvq may have written it")
    kind = KINDS.get(fields["kind"]) if isinstance(fields.get("kind"), str) else None
    if kind is None:
        raise ArtifactError(f"event: kind {fields.get('kind')!r:.80}; use one of {sorted(KINDS)}")
    names = set(kind.__dataclass_fields__) - {"kind"}
    strict_json.keys(fields, {"schema", "number", "name", "at", "kind"} | names, "event", checks=_CHECKS)
    if type(fields["number"]) is not int or fields["number"] != number or fields["name"] != name:
        stated = f"{fields['name']!r:.120} number {fields['number']!r:.40}"
        raise ArtifactError(f"event: expected {name} number {number}, got {stated}")
    return Event(number, name, fields["at"], kind(**{key: fields[key] for key in names}))


def check_count(what: str, count: Any, most: int) -> None:
    """Raise ValueError, beginning with `what`, unless this is a whole number from 0 to `most`."""
    if type(count) is not int or not 0 <= count <= most:
        raise ValueError(f"{what} {count!r:.80}; use a whole number from 0 to {most}")


def check_files(files: Any) -> None:
    """Raise ValueError unless this is what an event may state of the files beside an artifact."""
    if not isinstance(files, dict) or len(files) > 64:
        raise ValueError("files must be an object of at most 64 names")
    for name, entry in files.items():
        reference.check_file(name)
        strict_json.keys(entry, {"sha256", "size"}, f"files: {name}")
        reference.check_sha256(entry["sha256"])
        check_count("size", entry["size"], MAX_FILE)


def now() -> str:
    """The time, as events state it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def check_at(at: Any) -> None:
    """Raise ValueError unless this is a time as events state it."""
    if not isinstance(at, str) or not _AT.fullmatch(at):
        raise ValueError(f"at {at!r:.80}; use a UTC time, as in 2026-01-31T12:00:00Z")


def check_line(what: str, text: Any, most: int = 500) -> None:
    """Raise ValueError, beginning with `what`, unless a text is one printable line that is not blank."""
    if not isinstance(text, str) or not text.strip() or len(text) > most or not text.isprintable():
        raise ValueError(f"{what} {text!r:.80}; use one line of 1 to {most} characters")


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "version": reference.check_version,
    "alias": reference.check_alias,
    "sha256": reference.check_sha256,
    "size": lambda size: check_count("size", size, MAX_SIZE),
    "files": check_files,
    "reason": lambda reason: check_line("reason", reason),
    "at": check_at,
}


@dataclass(frozen=True)
class Version:
    """A published version: digest and size of its artifact and attachments (`files`), and when it was published (`at`).

    yanked   the reason if it was withdrawn, else None
    """

    version: str
    sha256: str
    size: int
    files: Mapping[str, Mapping[str, Any]]
    at: str
    yanked: str | None = None

    @classmethod
    def of(cls, change: Publish, at: str) -> "Version":
        """The version that a publish at this time makes."""
        return cls(change.version, change.sha256, change.size, change.files, at)

    @property
    def content(self) -> dict[str, tuple[str, int]]:
        """{name: (digest, size)} of the artifact and of the files beside it."""
        beside = {name: (entry["sha256"], entry["size"]) for name, entry in self.files.items()}
        return {reference.ARTIFACT_FILE: (self.sha256, self.size)} | beside

    @property
    def beside(self) -> str:
        """A digest of the files beside the artifact, without the card, which a copy gets anew."""
        files = {name: dict(entry) for name, entry in self.files.items() if name != "README.md"}
        return hash_of(strict_json.dumps(files).encode()).hexdigest()


@dataclass(frozen=True)
class State:
    """Versions, aliases and history of a name after its events.

    versions   {number: version}, in the order of publishing
    aliases    {alias: the versions it pointed to, the present one last}
    """

    name: str
    versions: Mapping[str, Version] = field(default_factory=dict)
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    events: tuple[Event, ...] = ()

    def at(self, alias: str) -> str | None:
        """The version an alias points to; None if there is no such alias."""
        return self.aliases[alias][-1] if alias in self.aliases else None

    def get(self, version: str) -> Version:
        """A version by number; NotFound names the versions there are."""
        return _get(self.name, version, self.versions)

    def newest(self) -> Version | None:
        """The highest version that is not yanked."""
        candidates = [version for version in self.versions.values() if version.yanked is None]
        return max(candidates, key=lambda version: reference.order(version.version), default=None)

    def with_digest(self, sha256: str) -> Version | None:
        """The version whose artifact has this digest; None if there is none."""
        return next((version for version in self.versions.values() if version.sha256 == sha256), None)

    def before(self, alias: str) -> str:
        """The target of a rollback: the last version the alias pointed to before its present one that is not yanked."""
        history = self.aliases.get(alias, ())
        return history[_before(self.name, alias, history, self.versions)]

    def apply(self, event: Event) -> "State":
        """The state after one more event; raises Conflict or NotFound if it contradicts the events before it."""
        fold = Fold(self)
        fold.add(event)
        return fold.state()


class Fold:
    """A state that events are added to, in time proportional to their number: nothing is copied for each of them."""

    def __init__(self, state: State):
        self._name, self._versions, self._events = state.name, dict(state.versions), list(state.events)
        self._histories = {alias: list(history) for alias, history in state.aliases.items()}
        self._pointing = Counter(history[-1] for history in self._histories.values())  # aliases at each version

    def state(self) -> State:
        """The state after the events so far."""
        histories = {alias: tuple(history) for alias, history in self._histories.items()}
        return State(self._name, dict(self._versions), histories, tuple(self._events))

    def add(self, event: Event) -> None:
        """Add an event; raises Conflict or NotFound, and adds nothing, if it contradicts the events before it."""
        change = event.change
        if isinstance(change, Publish):
            self._publish(change, event.at)
        elif isinstance(change, Yank):
            self._yank(change)
        elif isinstance(change, Promote):
            self._promote(change)
        else:
            self._roll_back(change)
        self._events.append(event)

    def _publish(self, change: Publish, at: str) -> None:
        if change.version in self._versions:
            raise Conflict(f"{self._name} {change.version} is published with other bytes; a version never changes")
        self._versions[change.version] = Version.of(change, at)

    def _yank(self, change: Yank) -> None:
        version = _get(self._name, change.version, self._versions)
        if self._pointing[change.version]:
            pointing = ", ".join(alias for alias, history in self._histories.items() if history[-1] == change.version)
            raise Conflict(f"{self._name} {change.version} is {pointing}; promote another version first, or roll back")
        if version.yanked is not None:
            raise Conflict(f"{self._name} {change.version} is yanked already ({version.yanked})")
        self._versions[change.version] = replace(version, yanked=change.reason)

    def _promote(self, change: Promote) -> None:
        yanked = _get(self._name, change.version, self._versions).yanked
        if yanked is not None:
            raise Conflict(f"{self._name} {change.version} is yanked ({yanked})")
        history = self._histories.setdefault(change.alias, [])
        self._pointing.subtract(history[-1:])
        history.append(change.version)
        self._pointing[change.version] += 1

    def _roll_back(self, change: Rollback) -> None:
        history = self._histories.get(change.alias, [])
        index = _before(self._name, change.alias, history, self._versions)
        if change.version != history[index]:
            raise Conflict(f"{self._name}@{change.alias} goes back to {history[index]}, not to {change.version}")
        self._pointing.subtract(history[-1:])
        del history[index + 1 :]
        self._pointing[change.version] += 1


def _get(name: str, version: str, versions: Mapping[str, Version]) -> Version:
    if version not in versions:
        raise NotFound(f"{name} has no version {version}; it has {', '.join(versions) or 'none'}")
    return versions[version]


def _before(name: str, alias: str, history: Sequence[str], versions: Mapping[str, Version]) -> int:
    """Return the index in an alias' history of the version to go back to; NotFound if there is none."""
    for index in reversed(range(len(history) - 1)):
        if history[index] != history[-1] and versions[history[index]].yanked is None:
            return index
    raise NotFound(f"{name}@{alias} has no earlier version to go back to; promote a version instead")


def fold(name: str, events: Iterable[Event]) -> State:
    """The state of a name after these events, in order."""
    made = Fold(State(name))
    for event in events:
        made.add(event)
    return made.state()
