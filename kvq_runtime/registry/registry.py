"""Decide changes of a name in the same way for every kind of registry.

A registry keeps, per name, a list of events and the files they name. Kinds differ in how an event is stored durably:
`Registry.change`. What a change means is the same for all, and is here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from hashlib import sha256 as hash_of
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal

from kvq_runtime.errors import ArtifactError, Conflict, NotFound
from kvq_runtime.registry import evaluations, events, reference, verdict
from kvq_runtime.registry.events import Change, Promote, Publish, Rollback, State, Version, Yank
from kvq_runtime.registry.lock import Lock
from kvq_runtime.registry.reference import PRODUCTION

if TYPE_CHECKING:  # kvq list and promote should not wait for torch
    from kvq_runtime.artifact.artifact import Artifact

Kind = Literal["evaluations", "signatures"]


class Registry(ABC):
    """A place that keeps named, versioned artifacts: a folder (`local`) or an organization on a Hub (`hub`).

    Methods that take a name raise ValueError for an invalid one, and ArtifactError for a damaged registry.
    """

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
    def state(self, name: str) -> State:
        """Versions, aliases and history of a name; empty if nothing was published under it."""

    def state_at(self, name: str, commit: str) -> State:
        """`state` as of a commit; ValueError for a registry without commits, NotFound if there is nothing."""
        raise ValueError(f"{self.url} has no commits, and {commit} is one; use a version, as in {name}@1.2.0")

    def current_state(self, name: str) -> State:
        """`state`, never from a cache; empty if it is not visible."""
        return self.state(name)

    @abstractmethod
    def change(self, name: str, decide: Callable[[State], Change | None]) -> State:
        """Make one change; returns the state with the change in it.

        decide   called with the present state, and again whenever another change came first; returns the change, or
                 None if there is nothing left to do, or raises Conflict to give up
        """

    @abstractmethod
    def publish(
        self, name: str, data: bytes, version: str | None = None, attachments: Mapping[str, bytes] | None = None
    ) -> Version:
        """Publish an artifact; if these bytes are published already, return their version and change nothing.

        data          the artifact's file
        version       its number, or None for the next: PATCH for a recalibration, MINOR for other settings or another
                      corpus, MAJOR for another schema or model
        attachments   {"README.md": ..., plots}: files stored with the version
        Raises ArtifactError for bytes that do not load, Conflict if the number is taken.
        """

    def finish_publish(self, name: str, version: Version) -> None:
        """Do what an interrupted publish of this version may have left undone: on a Hub, set the tag."""
        return None

    @abstractmethod
    def fetch(self, name: str, version: Version) -> Path:
        """The file of a version; loading it checks digest and size."""

    def fetch_verified(self, name: str, version: Version) -> Path:
        """`fetch`; a file from a cache is compared with the digest, and downloaded again if it is damaged."""
        return self.fetch(name, version)

    @abstractmethod
    def attachments(self, name: str, version: Version) -> dict[str, bytes]:
        """The files stored with a version, by name, their digests checked."""

    @abstractmethod
    def about(self, name: str, version: Version) -> dict[str, Any]:
        """Recipe, model and corpus of a version, as `stated.summary`, without fetching the whole file."""

    @abstractmethod
    def add_record(self, kind: Kind, sha256: str, data: bytes, name: str) -> str:
        """Store a record about an artifact, never changed; returns the record's digest."""

    @abstractmethod
    def records(self, kind: Kind, sha256: str, name: str) -> list[tuple[PurePath, bytes]]:
        """(path, content) of every record of an artifact, by path: .../artifact's digest/record's digest.json."""

    def add_evaluation(self, record: Mapping[str, Any], name: str = "") -> str:
        """Store a measurement of an artifact, in the form of `evaluations`; returns the record's digest.

        name   of the artifact; required by a Hub
        """
        data = evaluations.to_bytes(record)
        return self.add_record("evaluations", record["artifact"], data, name)

    def evaluations(self, sha256: str, name: str = "") -> list[dict[str, Any]]:
        """Every evaluation record of an artifact, ordered by the record's digest."""
        return [evaluations.from_bytes(data, path) for path, data in self.records("evaluations", sha256, name)]

    def signatures(self, sha256: str, name: str) -> list[bytes]:
        """Every signature record of an artifact, in the form of `signing`."""
        return [data for _, data in self.records("signatures", sha256, name)]

    @abstractmethod
    def check_writable(self) -> None:
        """Raise the OSError or RuntimeError that a publish would end in; nothing is written."""

    def pinned_file(self, lock: Lock) -> Path | None:
        """The file that a lock pins if it is at hand, without a request; else None."""
        return None

    def last_commit(self, name: str) -> str:
        """The commit in which a name was last read; "" for a registry without commits."""
        return ""

    def existing(self, name: str) -> State:
        """The state of a name with at least one event; else NotFound, with the names there are."""
        state = self.state(name)
        if not state.events:
            raise NotFound(f"no artifact {name} in {self.url}; {self._hint(name)}")
        return state

    def _hint(self, name: str) -> str:
        """What the message about a missing name ends with."""
        names = self.names()
        return f"there are {', '.join(names[:8])}" if names else "it is empty; kvq-calibrate publishes artifacts"

    def next_version(self, state: State, new: "Artifact") -> str:
        """The number of the next version of a name; fetches the highest version to compare it with `new`."""
        from kvq_runtime.artifact import artifact
        from kvq_runtime.registry import versions

        highest = versions.highest(state)
        if highest is None:
            return versions.FIRST
        try:
            old = artifact.load(self.fetch(state.name, highest), highest.sha256, highest.size)
        except ArtifactError as error:
            text = f"{error}; it is needed to choose the number after {highest.version}: give one, --artifact-version"
            raise ArtifactError(text) from None
        return versions.following(highest.version, old, new)

    def promote(
        self, name: str, version: str, alias: str = PRODUCTION, expect: str | None = None, force: bool = False
    ) -> State:
        """Point an alias to a version; returns the new state.

        expect   the version the alias must point to now ("none" for a new alias); None is the one it points to when
                 this is called
        force    also a version that is too lossy (`verdict`)
        Raises NotFound for an unknown name or version, Conflict if the alias has moved, or the version is yanked or too
        lossy.
        """
        reference.check_version(version)
        reference.check_alias(alias)
        state = self.existing(name) if expect is None else self.current_state(name)
        before = state.at(alias) if expect is None else expect
        if not force and version in state.versions:
            verdict.require(self, name, state.versions[version])
        before = None if before == "none" else before

        def decide(state: State) -> Change | None:
            if state.at(alias) == version:
                return None
            _check_unmoved(state, alias, before)
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
        events.check_reason(reason)
        self.existing(name)
        return self.change(name, lambda state: Yank(version, reason))


def prepare_publish(
    registry: Registry, data: bytes, version: str | None, attachments: Mapping[str, bytes]
) -> "tuple[Artifact, Callable[[State], Publish | None]]":
    """Check what is to be published; returns the artifact, and the `decide` that publishes it."""
    from kvq_runtime.artifact import artifact

    if version is not None:
        reference.check_version(version)
    entries = {
        file: {"sha256": hash_of(content).hexdigest(), "size": len(content)} for file, content in attachments.items()
    }
    events.check_files(entries)
    new, sha256 = artifact.from_bytes(data), hash_of(data).hexdigest()

    def decide(state: State) -> Publish | None:
        if state.with_digest(sha256):
            return None
        return Publish(version or registry.next_version(state, new), sha256, len(data), entries)

    return new, decide


def _check_unmoved(state: State, alias: str, before: str | None) -> None:
    now = state.at(alias)
    if now != before:
        raise Conflict(
            f"{state.name}@{alias} points to {now or 'none'}, expected {before or 'none'}: somebody moved it; "
            f"look at kvq history {state.name}, then retry with --expect {now or 'none'}"
        )
