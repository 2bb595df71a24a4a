"""Record the changes of a name as events, and fold them into its state: versions, aliases and history.

An event is one JSON object, numbered from 1 without gaps:

    {"schema": 1, "number": 3, "name": "...", "at": "2026-01-31T12:00:00Z", "by": "user@host", "kind": "promote", ...}

    publish    version, sha256, size, files {name: {sha256, size}}, about {recipe, model, revision, corpus, ...}
    promote    alias, version, force      whether the version's rating was overruled
    rollback   alias, version      the version that the alias goes back to
    yank       version, reason
"""

import getpass
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from hashlib import sha256 as hash_of
from typing import Any, ClassVar

from kvq_runtime.artifact import header
from kvq_runtime.disk import strict_json
from kvq_runtime.errors import ArtifactError, Conflict, NotFound
from kvq_runtime.registry import reference

SCHEMA = 1
MAX_SIZE = 1 << 36  # bytes of an artifact
MAX_FILE = 1 << 26  # bytes of a file beside it
ABOUT = ("recipe", "model", "revision", "corpus", "corpus_digest")  # fields of `header.summary`
_AT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")


@dataclass(frozen=True)
class Publish:
    """Publish a version: digest and size of its artifact and attachments (`files`), and its summary (`about`)."""

    kind: ClassVar[str] = "publish"
    version: str
    sha256: str
    size: int
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    about: Mapping[str, str | None] = field(default_factory=lambda: dict.fromkeys(ABOUT))


@dataclass(frozen=True)
class Promote:
    """Move an alias to a version, whatever its rating if `force`."""

    kind: ClassVar[str] = "promote"
    alias: str
    version: str
    force: bool = False


@dataclass(frozen=True)
class Rollback:
    """Move an alias back to the version it had before."""

    kind: ClassVar[str] = "rollback"
    alias: str
    version: str


@dataclass(frozen=True)
class Yank:
    """Withdraw a version: from then on it is chosen only by number or digest."""

    kind: ClassVar[str] = "yank"
    version: str
    reason: str


Change = Publish | Promote | Rollback | Yank
KINDS: dict[str, type] = {kind.kind: kind for kind in (Publish, Promote, Rollback, Yank)}


@dataclass(frozen=True)
class Event:
    """A change of one name, with its number, from 1, its UTC time `at` and its author (`author`)."""

    number: int
    name: str
    at: str
    by: str
    change: Change

    def to_json(self) -> dict[str, Any]:
        """Return the event as JSON."""
        head = {"schema": SCHEMA, "number": self.number, "name": self.name, "at": self.at, "by": self.by}
        return head | {"kind": self.change.kind} | asdict(self.change)

    def to_bytes(self) -> bytes:
        """Serialize the event."""
        return strict_json.record(self.to_json())


def from_bytes(data: bytes, number: int, name: str) -> Event:
    """Read an event, which must have this number and name; raises ArtifactError otherwise."""
    return from_json(strict_json.loads(data, "event"), number, name)


def from_json(fields: Any, number: int, name: str) -> Event:
    """Read an event from parsed JSON, as `from_bytes`."""
    if not isinstance(fields, dict) or type(fields.get("schema")) is not int or fields["schema"] != SCHEMA:
        raise ArtifactError(f"event: expected schema 1, got {fields!r:.80}; a newer kvq may have written it")
    kind = KINDS.get(fields["kind"]) if isinstance(fields.get("kind"), str) else None
    if kind is None:
        raise ArtifactError(f"event: kind {fields.get('kind')!r:.80}; use one of {sorted(KINDS)}")
    names = set(kind.__dataclass_fields__) - {"kind"}
    strict_json.keys(fields, {"schema", "number", "name", "at", "by", "kind"} | names, "event", checks=_CHECKS)
    if type(fields["number"]) is not int or fields["number"] != number or fields["name"] != name:
        stated = f"{fields['name']!r:.120} number {fields['number']!r:.40}"
        raise ArtifactError(f"event: expected {name} number {number}, got {stated}")
    return Event(number, name, fields["at"], fields["by"], kind(**{key: fields[key] for key in names}))


def now() -> str:
    """Return the present time as events state it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def author() -> str:
    """Return $KVQ_USER, else user@host: who a new event states as its author."""
    if given := os.environ.get("KVQ_USER"):
        return _check_line("KVQ_USER", given)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def check_files(files: Any) -> None:
    """Raise ValueError unless this is a valid `files` field."""
    if not isinstance(files, dict) or len(files) > 64:
        raise ValueError("files must be an object of at most 64 names")
    for name, entry in files.items():
        reference.check_file(name)
        strict_json.keys(entry, {"sha256", "size"}, f"files: {name}", checks=_FILE_CHECKS)


def check_reason(reason: Any) -> None:
    """Raise ValueError unless a reason is one printable line of 1 to 500 characters."""
    _check_line("reason", reason)


def _check_line(name: str, text: Any) -> str:
    if not isinstance(text, str) or not text.strip() or len(text) > 500 or not text.isprintable():
        raise ValueError(f"{name} {text!r:.80}; use one line of 1 to 500 characters")
    return text


def _check_force(force: Any) -> None:
    if type(force) is not bool:
        raise ValueError(f"force {force!r:.80}; use true or false")


def _check_size(size: Any, most: int) -> None:
    if type(size) is not int or not 0 <= size <= most:
        raise ValueError(f"size {size!r:.80}; use a whole number from 0 to {most}")


def _check_at(at: Any) -> None:
    if not isinstance(at, str) or not _AT.fullmatch(at):
        raise ValueError(f"at {at!r:.80}; use a UTC time, as in 2026-01-31T12:00:00Z")


def _check_about(about: Any) -> None:
    header.check_summary(strict_json.keys(about, set(ABOUT), "about"))


_FILE_CHECKS: dict[str, Callable[[Any], Any]] = {
    "sha256": reference.check_sha256,
    "size": lambda size: _check_size(size, MAX_FILE),
}
_CHECKS: dict[str, Callable[[Any], Any]] = {
    "version": reference.check_version,
    "alias": reference.check_alias,
    "sha256": reference.check_sha256,
    "size": lambda size: _check_size(size, MAX_SIZE),
    "files": check_files,
    "about": _check_about,
    "reason": check_reason,
    "force": _check_force,
    "by": lambda by: _check_line("by", by),
    "at": _check_at,
}


@dataclass(frozen=True)
class Version(Publish):
    """A published version: the fields of its publish event, that event's time, and the reason of a withdrawal."""

    at: str = ""
    yanked: str | None = None

    @property
    def content(self) -> dict[str, tuple[str, int]]:
        """{name: (digest, size)} of the artifact and its attachments."""
        attachments = {name: (entry["sha256"], entry["size"]) for name, entry in self.files.items()}
        return {reference.ARTIFACT_FILE: (self.sha256, self.size)} | attachments

    @property
    def beside(self) -> str:
        """A digest of the attachments without the card, which `kvq copy` adapts."""
        files = {name: dict(entry) for name, entry in self.files.items() if name != "README.md"}
        return hash_of(strict_json.dumps(files).encode()).hexdigest()


@dataclass
class State:
    """The state of a name after its events.

    versions   {number: version}, in the order of publication
    aliases    {alias: the versions it pointed to, the present one last}
    commit     the commit of a Hub in which it was read, else ""
    """

    name: str
    versions: dict[str, Version] = field(default_factory=dict)
    aliases: dict[str, list[str]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    commit: str = ""

    def at(self, alias: str) -> str | None:
        """Return the version that an alias points to; None if there is no such alias."""
        return self.aliases[alias][-1] if alias in self.aliases else None

    def get(self, version: str) -> Version:
        """Return a version by number; NotFound lists the versions."""
        if version not in self.versions:
            raise NotFound(f"{self.name} has no version {version}; it has {', '.join(self.versions) or 'none'}")
        return self.versions[version]

    def newest(self) -> Version | None:
        """Return the highest version that is not yanked."""
        candidates = [version for version in self.versions.values() if version.yanked is None]
        return max(candidates, key=lambda version: reference.order(version.version), default=None)

    def with_digest(self, sha256: str) -> Version | None:
        """Return the version whose artifact has this digest."""
        return next((version for version in self.versions.values() if version.sha256 == sha256), None)

    def before(self, alias: str) -> tuple[str, int]:
        """Return the target of a rollback, the alias' last earlier version that is not yanked, and its place."""
        history, yanked = self.aliases.get(alias, []), {}
        for index in reversed(range(len(history) - 1)):
            version = self.versions[history[index]]
            if version.yanked is not None:
                yanked[version.version] = f"; {version.version} is yanked ({version.yanked})"
            elif version.version != history[-1]:
                return version.version, index
        why = "".join(yanked.values())
        raise NotFound(f"{self.name}@{alias} has no earlier version to go back to{why}; promote a version instead")

    def add(self, event: Event) -> None:
        """Apply an event; raises Conflict or NotFound, and changes nothing, if it contradicts the earlier ones."""
        change = event.change
        if isinstance(change, Publish):
            if change.version in self.versions:
                raise Conflict(f"{self.name} {change.version} is published with other bytes; use another number")
            self.versions[change.version] = Version(**vars(change), at=event.at)
        elif isinstance(change, Yank):
            self._yank(change)
        elif isinstance(change, Promote):
            yanked = self.get(change.version).yanked
            if yanked is not None:
                raise Conflict(f"{self.name} {change.version} is yanked ({yanked})")
            self.aliases.setdefault(change.alias, []).append(change.version)
        else:
            version, index = self.before(change.alias)
            if change.version != version:
                raise Conflict(f"{self.name}@{change.alias} goes back to {version}, not to {change.version}")
            del self.aliases[change.alias][index + 1 :]
        self.events.append(event)

    def _yank(self, change: Yank) -> None:
        version = self.get(change.version)
        aliases = [alias for alias, history in self.aliases.items() if history[-1] == change.version]
        if aliases:
            text = f"{self.name} {change.version} is {', '.join(aliases)}"
            raise Conflict(f"{text}; promote another version first, or roll back")
        if version.yanked is not None:
            raise Conflict(f"{self.name} {change.version} is yanked already ({version.yanked})")
        self.versions[change.version] = replace(version, yanked=change.reason)


def fold(name: str, events: Iterable[Event]) -> State:
    """Return the state of a name after these events, in order."""
    state = State(name)
    for event in events:
        state.add(event)
    return state
