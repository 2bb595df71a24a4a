"""Define a registry: what events and files of a name mean, the same in a folder (`local`) and on a Hub (`hub`)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256 as hash_of
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal

from kvq_runtime.artifact import header
from kvq_runtime.disk import files
from kvq_runtime.errors import ArtifactError, Conflict, NotFound
from kvq_runtime.registry import evaluation_records, events, rating, reference
from kvq_runtime.registry.events import Change, Event, Promote, Publish, Rollback, State, Version, Yank
from kvq_runtime.registry.lock import Lock
from kvq_runtime.registry.reference import ARTIFACT_FILE, GRACE, PRODUCTION

if TYPE_CHECKING:  # kvq list and promote should not wait for torch
    from kvq_runtime.artifact.artifact import Artifact

TRIES = 200
Kind = Literal["evaluations", "signatures"]
MAX_RECORDS = 1 << 12  # records of an artifact, of one kind, that are in memory at once
BYTES = 1 << 26  # of all of them
NOT_SETTINGS = {"model", "revision", "environment"}  # of a provenance: a recalibration may change these


@dataclass(frozen=True)
class Finding:
    """One line of `kvq doctor`: a `path`, of a file or a repository, what is wrong there, and what to do.

    level    "fault", or "note" for what is harmless
    """

    level: str
    what: str
    path: str
    advice: str


@dataclass(frozen=True)
class Head:
    """The state of a name, as read; without its events, nothing was published under it.

    about    {version: summary of its artifact}, where the place keeps that beside the events
    commit   in which it was read; None: there is no repository, or the place has no commits
    """

    state: State
    about: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    commit: str | None = None


class Registry(ABC):
    """Named, versioned artifacts: a fold over the events of each name, which a folder or a Hub keeps.

    Methods that take a name raise ValueError for an invalid one, and ArtifactError for a damaged registry.

    moves_again   whether a promote or rollback is decided again after another change came first, or ends in a Conflict
    """

    # ---- of each kind of registry

    moves_again = True

    @property
    @abstractmethod
    def url(self) -> str:
        """Its address."""

    def check_name(self, name: str) -> str:
        """The name, if an artifact may have it here; else a ValueError."""
        return reference.check_name(name)

    @abstractmethod
    def names(self) -> list[str]:
        """Every name with at least one event."""

    @abstractmethod
    def look(self, name: str) -> Head:
        """Read its present state, never from a cache; empty if it is not visible."""

    def read(self, name: str, commit: str = "") -> Head:
        """Read its state, from a cache where the place does not answer, or its state at a commit.

        Raises ValueError for a commit if the place has none, as here.
        """
        if commit:
            raise ValueError(f"{self.url} has no commits, and {commit} is one; use a version, as in {name}@1.2.0")
        return self.look(name)

    @abstractmethod
    def write(
        self, head: Head, after: State, content: Mapping[str, bytes], about: Mapping[str, Any], unanswered: list[Event]
    ) -> Head | None:
        """Write the last event of `after` on top of the head that was read; returns what stands there then.

        content      of a publish: its files by name
        about        of a publish: the summary of its artifact
        unanswered   gets the event if it is not known whether it was written
        Returns None if another change came first, if a repository had to be made, or if it is not known.
        """

    def store(self, name: str, content: Mapping[str, bytes]) -> None:
        """Store files that the next event will name, in a place where that is a step of its own."""
        return None

    def finish(self, name: str, version: Version | None = None, content: Mapping[str, bytes] | None = None) -> None:
        """Do what an interrupted change, or publish of a version, may have left undone; content: its files."""
        return None

    @abstractmethod
    def fetch(self, name: str, version: Version, file: str = ARTIFACT_FILE) -> Path:
        """A file of a version; whoever reads it checks its digest."""

    @abstractmethod
    def fetch_verified(self, name: str, version: Version, file: str = ARTIFACT_FILE) -> Path:
        """`fetch`, and a copy of it that is kept here is not a damaged one."""

    @abstractmethod
    def about(self, name: str, version: Version) -> dict[str, Any]:
        """Recipe, model and corpus of a version, as `header.summary`, without fetching the whole file."""

    @abstractmethod
    def add(self, name: str, path: str, data: bytes) -> None:
        """Add a file that never changes; one that is there is the same."""

    @abstractmethod
    def listed(self, name: str, folder: str) -> Iterator[tuple[PurePath, bytes]]:
        """(path, content) of every .json file of a folder, by path; each is read when it is its turn."""

    @abstractmethod
    def check_writable(self) -> None:
        """Raise the OSError or RuntimeError that a publish would end in; nothing is written."""

    def pinned_file(self, lock: Lock) -> Path | None:
        """The file that a lock pins if it is at hand, without a request; else None."""
        return None

    def last_commit(self, name: str) -> str:
        """The commit in which a name was last read; "" for a place without commits."""
        return ""

    def hint(self, name: str) -> str:
        """Return the end of the message about a missing name."""
        names = self.names()
        return f"there are {', '.join(names[:8])}" if names else "it is empty; kvq-calibrate publishes artifacts"

    @abstractmethod
    def collect(self, grace: float = GRACE, dry_run: bool = False) -> list[str]:
        """Remove files that no event names, and drafts of killed processes, that are older than `grace` seconds.

        dry_run   remove nothing
        Returns what was removed, or would be. Raises ArtifactError, and removes nothing, if an event is damaged: it may
        name any file.
        """

    @abstractmethod
    def examine(self) -> list[Finding]:
        """Everything wrong with events, files and records; unfinished and unnamed files as notes."""

    # ---- reading

    def state(self, name: str) -> State:
        """Versions, aliases and history of a name; empty if nothing was published under it."""
        return self.read(name).state

    def state_at(self, name: str, commit: str) -> State:
        """`state` as of a commit; ValueError for a registry without commits, NotFound if there is nothing."""
        state = self.read(name, commit).state
        if not state.events:
            raise NotFound(f"{self.url}/{name} has no kvq.json at commit {commit}; kvq history {name} lists versions")
        return state

    def current_state(self, name: str) -> State:
        """`state`, never from a cache; empty if it is not visible."""
        return self.look(name).state

    def existing(self, name: str) -> State:
        """The state of a name with at least one event; else NotFound, with the names there are."""
        state = self.state(name)
        if not state.events:
            raise NotFound(f"no artifact {name} in {self.url}; {self.hint(name)}")
        return state

    def attachments(self, name: str, version: Version) -> dict[str, bytes]:
        """The files stored with a version, by name, their digests checked."""
        contents = {}
        for file, entry in version.files.items():
            path = self.fetch_verified(name, version, file)
            contents[file] = files.read(path, entry["size"])
            digest = hash_of(contents[file]).hexdigest()
            if digest != entry["sha256"]:
                raise ArtifactError(f"{path}: sha256: the file has {digest}; kvq doctor says what to do")
        return contents

    # ---- records

    def add_record(self, kind: Kind, sha256: str, data: bytes, name: str = "") -> str:
        """Store a record about an artifact, never changed; returns the record's digest. A Hub needs the name."""
        digest = hash_of(data).hexdigest()
        self.add(name, f"{kind}/{reference.check_sha256(sha256)}/{digest}.json", data)
        return digest

    def records(
        self, kind: Kind, sha256: str, name: str = "", of: Callable[[PurePath, bytes], Any] = lambda *record: record
    ) -> list[Any]:
        """Read an artifact's records, in the order of their paths, .../artifact's digest/record's digest.json.

        of   makes of path and content what is returned. A record of which it makes None is let go, and not counted
        RuntimeError for too many others.
        """
        folder, found, left = f"{kind}/{reference.check_sha256(sha256)}", [], BYTES
        for path, data in self.listed(name, folder):
            made = of(path, data)
            if made is not None:
                found.append(made)
                left -= len(data)
            if left < 0 or len(found) > MAX_RECORDS:
                text = f"more than {MAX_RECORDS} records or {BYTES} bytes of them; remove some there"
                raise RuntimeError(f"{self.url}, {name} {folder}: {text}")
        return found

    def add_evaluation(self, record: Mapping[str, Any], name: str = "") -> str:
        """Store a measurement of an artifact, in the form of `evaluation_records`; returns the record's digest."""
        return self.add_record("evaluations", record["artifact"], evaluation_records.to_bytes(record), name)

    def evaluations(self, sha256: str, name: str = "") -> list[dict[str, Any]]:
        """Every evaluation record of an artifact, ordered by the record's digest."""
        return self.records("evaluations", sha256, name, lambda path, data: evaluation_records.from_bytes(data, path))

    def signatures(self, sha256: str, name: str) -> list[bytes]:
        """Every signature record of an artifact, in the form of `lock`."""
        return self.records("signatures", sha256, name, lambda _, data: data)

    # ---- changing

    def change(
        self,
        name: str,
        decide: Callable[[State], Change | None],
        content: Mapping[str, bytes] = {},
        about: Mapping[str, Any] = {},
    ) -> State:
        """Make one change; returns the state with the change in it.

        decide           called with the present state, and again whenever another change came first; returns the
                         change, or None if there is nothing left to do, or raises Conflict to give up
        content, about   of a publish: its files by name, and the summary of its artifact
        """
        unanswered: list[Event] = []
        overtaken = False
        for _ in range(TRIES):
            head = self.look(name)
            if any(event in head.state.events for event in unanswered):  # it was written, and the answer was lost
                return head.state
            change = decide(head.state)
            if change is None:
                self.finish(name)
                return head.state
            if overtaken and not self.moves_again and isinstance(change, (Promote, Rollback)):
                raise Conflict(f"{self.url}: somebody changed {name} first; look at kvq history {name}, then retry")
            event = Event(len(head.state.events) + 1, name, events.now(), change)
            written = self.write(head, head.state.apply(event), content, about, unanswered)
            if written is not None:
                return written.state
            overtaken = overtaken or event not in unanswered
        raise Conflict(f"{self.url}: {TRIES} other changes of {name} came first; try again")

    def publish(
        self, name: str, data: bytes, version: str | None = None, attachments: Mapping[str, bytes] | None = None
    ) -> Version:
        """Publish an artifact; if these bytes are published already, return their version and change nothing.

        data          the artifact's file
        version       its number, or None for the one that `following` gives
        attachments   {"README.md": ..., plots}: files stored with the version
        Raises ArtifactError for bytes that do not load, Conflict if the number is taken.
        """
        from kvq_runtime.artifact import artifact

        self.check_name(name)
        if version is not None:
            reference.check_version(version)
        beside, sha256 = attachments or {}, hash_of(data).hexdigest()
        entries = {file: {"sha256": hash_of(held).hexdigest(), "size": len(held)} for file, held in beside.items()}
        events.check_files(entries)
        new, content = artifact.from_bytes(data), {ARTIFACT_FILE: data, **beside}

        def decide(state: State) -> Change | None:
            if state.with_digest(sha256):
                return None
            return Publish(version or following(state, new, self.fetch), sha256, len(data), entries)

        about = header.summary({"recipe": {"name": new.recipe.name}, "provenance": new.provenance})
        self.store(name, content)
        published = self.change(name, decide, content, about).with_digest(sha256)
        assert published is not None, "the change that was written is in the state"
        self.finish(name, published, content)
        return published

    def promote(
        self, name: str, version: str, alias: str = PRODUCTION, expect: str | None = None, force: bool = False
    ) -> State:
        """Point an alias to a version; returns the new state.

        expect   the version the alias must point to now ("none" for a new alias); None is the one it points to when
                 this is called
        force    also a version that is too lossy (`rating`)
        Raises NotFound for an unknown name or version, Conflict if the alias has moved, or the version is yanked or too
        lossy.
        """
        reference.check_version(version)
        reference.check_alias(alias)
        if expect not in (None, "none"):
            reference.check_version(expect)
        state = self.existing(name) if expect is None else self.current_state(name)
        before = state.at(alias) if expect is None else expect
        if not force and version in state.versions:
            found = rating.rate_version(self, name, state.versions[version])
            if found.word == rating.LOSSY:
                raise Conflict(
                    f"{name}@{version} is {found}; kvq compare measures other recipes, and --force (force=True) "
                    "promotes this one all the same"
                )
        before = None if before == "none" else before

        def decide(state: State) -> Change | None:
            if state.at(alias) == version:
                return None
            _check_unmoved(state, alias, before)
            state.get(version)
            return Promote(alias, version)

        return self.change(name, decide)

    def rollback(self, name: str, alias: str = PRODUCTION) -> State:
        """Point an alias to the version it had before; returns the new state.

        Raises NotFound if it had none, Conflict if it moves meanwhile.
        """
        before = self.existing(name).at(reference.check_alias(alias))

        def decide(state: State) -> Change | None:
            _check_unmoved(state, alias, before)
            return Rollback(alias, state.before(alias))

        return self.change(name, decide)

    def yank(self, name: str, version: str, reason: str) -> State:
        """Withdraw a version: it stays, and is chosen only by number or digest. Returns the new state.

        reason   one line of 1 to 500 characters
        Raises NotFound for an unknown version, Conflict if an alias points to it or it is yanked already.
        """
        reference.check_version(version)
        events.check_line("reason", reason)
        self.existing(name)
        return self.change(name, lambda state: Yank(version, reason))


def _check_unmoved(state: State, alias: str, before: str | None) -> None:
    now = state.at(alias)
    if now != before:
        raise Conflict(
            f"{state.name}@{alias} points to {now or 'none'}, expected {before or 'none'}: somebody moved it; "
            f"look at kvq history {state.name}, then retry with --expect {now or 'none'}"
        )


def following(state: State, new: "Artifact", fetch: Callable[[str, Version], Path]) -> str:
    """Number the next version of a name, by what differs between its artifact and that of the highest version.

    patch   a recalibration: the same recipe and provenance, except for model id, revision and environment
    minor   another setting, or another corpus or choice of it
    major   another schema, or a model with another fingerprint

    A yanked version counts: numbers are never reused.

    fetch   gets the file of a version
    """
    from kvq_runtime.artifact import artifact, fingerprint

    highest = max(state.versions.values(), key=lambda version: reference.order(version.version), default=None)
    if highest is None:
        return "1.0.0"
    try:
        old = artifact.load(fetch(state.name, highest), highest.sha256, highest.size)
    except ArtifactError as error:
        text = f"{error}; it is needed to choose the number after {highest.version}: give one, --artifact-version"
        raise ArtifactError(text) from None
    major, minor, patch = reference.order(highest.version)
    far = any(one > fingerprint.TOLERANCE for one in fingerprint.distances(old.fingerprint, new.fingerprint).values())
    other_model = far or fingerprint.mismatches(old.fingerprint, new.fingerprint)
    if old.schema != new.schema or other_model:
        return f"{major + 1}.0.0"
    settings = [{k: v for k, v in made.provenance.items() if k not in NOT_SETTINGS} for made in (old, new)]
    if old.recipe != new.recipe or settings[0] != settings[1]:
        return f"{major}.{minor + 1}.0"
    return f"{major}.{minor}.{patch + 1}"
