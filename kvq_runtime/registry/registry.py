"""Decide changes of a name the same way wherever the name is kept.

A registry keeps, per name, a list of events and the files they name. What differs from one kind to another is how an
event is made to last: `change`. What a change means does not differ, and is here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from hashlib import sha256 as hash_of
from pathlib import Path, PurePath
from typing import Any, Literal

from kvq_runtime import artifact, reference
from kvq_runtime.artifact import Artifact
from kvq_runtime.errors import ArtifactError, Conflict, NotFound
from kvq_runtime.reference import PRODUCTION, Lock
from kvq_runtime.registries import evaluations, events, versions
from kvq_runtime.registries.events import Change, Promote, Publish, Rollback, State, Version, Yank

Kind = Literal["evaluations", "signatures"]


class Registry(ABC):
    """A place that keeps names: a folder (`local`) or an organization on a Hub (`hub`)."""

    @property
    @abstractmethod
    def url(self) -> str:
        """Its address."""

    @abstractmethod
    def names(self) -> list[str]:
        """Every name with at least one event."""

    @abstractmethod
    def state(self, name: str) -> State:
        """Versions, aliases and history of a name; empty if nothing was published under it."""

    def now(self, name: str) -> State:
        """`state`, asked for anew; what cannot be seen is empty."""
        return self.state(name)

    @abstractmethod
    def change(self, name: str, decide: Callable[[State], Change | None]) -> State:
        """Make one change: `decide` sees the present state, and again whenever another change came first.

        decide   returns the change, or None if nothing is left to do; raises Conflict to give up
        Returns the state with the change in it.
        """

    @abstractmethod
    def publish(
        self, name: str, data: bytes, version: str | None = None, beside: Mapping[str, bytes] | None = None
    ) -> Version:
        """Publish an artifact's bytes; bytes that are there already are the version they are, and nothing changes.

        version   its number, or None for the next: PATCH for a recalibration, MINOR for other settings or another
                  corpus, MAJOR for another schema or model
        beside    {"README.md": ..., plots}: files stored with the version
        Raises ArtifactError for bytes that do not load, Conflict if the number is taken.
        """

    def settle(self, name: str, version: Version) -> None:
        """Do what a publication that was cut off may have left undone: on a Hub, the tag."""
        return None

    @abstractmethod
    def fetch(self, name: str, version: Version) -> Path:
        """The file of a version; loading it checks digest and size."""

    def whole(self, name: str, version: Version) -> Path:
        """`fetch`; where the file is a copy in a cache, it is compared, and replaced if it was damaged."""
        return self.fetch(name, version)

    @abstractmethod
    def beside(self, name: str, version: Version) -> dict[str, bytes]:
        """The files beside a version, by name, their digests checked."""

    @abstractmethod
    def about(self, name: str, version: Version) -> dict[str, Any]:
        """Recipe, model and corpus of a version, as `describe.summary` says, without fetching the whole file."""

    @abstractmethod
    def add_record(self, kind: Kind, sha256: str, data: bytes, name: str) -> str:
        """Store a record about an artifact, never changed; returns the record's digest."""

    @abstractmethod
    def records(self, kind: Kind, sha256: str, name: str) -> list[tuple[PurePath, bytes]]:
        """Every record of an artifact with where it is, .../artifact's digest/record's digest.json, in that order."""

    def add_evaluation(self, record: Mapping[str, Any], name: str = "") -> str:
        """Store what was measured of an artifact, as `evaluations` says; returns the record's digest.

        name   the artifact's, which a Hub must be told
        """
        data = evaluations.to_bytes(record)
        return self.add_record("evaluations", record["artifact"], data, name)

    def evaluations(self, sha256: str, name: str = "") -> list[dict[str, Any]]:
        """Every evaluation record of an artifact, ordered by the record's digest."""
        return [evaluations.from_bytes(data, path) for path, data in self.records("evaluations", sha256, name)]

    def signatures(self, sha256: str, name: str) -> list[bytes]:
        """Every signature record of an artifact: see `signing`."""
        return [data for _, data in self.records("signatures", sha256, name)]

    @abstractmethod
    def check_writable(self) -> None:
        """Raise an OSError or a RuntimeError where a publish would end in one; nothing is written."""

    def held(self, lock: Lock) -> Path | None:
        """The file that a lock pins, where it is at hand and nobody need be asked for it."""
        return None

    def commit(self, name: str) -> str:
        """The commit that what was last read of a name is in; "" where there are no commits."""
        return ""

    def existing(self, name: str) -> State:
        """The state of a name that must be there; NotFound says what is."""
        state = self.state(name)
        if not state.events:
            raise NotFound(f"no artifact {name} in {self.url}; {self._instead(name)}")
        return state

    def _instead(self, name: str) -> str:
        known = self.names()
        return f"there are {', '.join(known[:8])}" if known else "it is empty; kvq-calibrate publishes artifacts"

    def next_version(self, state: State, new: Artifact) -> str:
        """The number that a new artifact of this name gets; fetches the highest version to compare."""
        highest = versions.highest(state)
        if highest is None:
            return versions.FIRST
        try:
            old = artifact.load(self.fetch(state.name, highest), highest.sha256, highest.size)
        except ArtifactError as error:
            text = f"{error}; the next version follows from {highest.version}: name yours with --version"
            raise ArtifactError(text) from None
        return versions.following(highest.version, old, new)

    def promote(self, name: str, version: str, alias: str = PRODUCTION, expect: str | None = None) -> State:
        """Point an alias to a version.

        expect   the version the alias must have now ("none" for a new alias); None is whatever it has when this is
                 called. If the alias moved meanwhile: Conflict, and nothing changes.
        """
        reference.check_version(version)
        before = self.existing(name).at(reference.check_alias(alias)) if expect is None else expect
        before = None if before == "none" else before

        def decide(state: State) -> Change | None:
            if state.at(alias) == version:
                return None
            _check_unmoved(state, alias, before)
            return Promote(alias, version)

        return self.change(name, decide)

    def rollback(self, name: str, alias: str = PRODUCTION) -> State:
        """Point an alias to the version it had before."""
        before = self.existing(name).at(reference.check_alias(alias))

        def decide(state: State) -> Change | None:
            _check_unmoved(state, alias, before)
            return Rollback(alias, state.before(alias))

        return self.change(name, decide)

    def yank(self, name: str, version: str, reason: str) -> State:
        """Withdraw a version: it stays, and is chosen only by number or digest."""
        reference.check_version(version)
        events.check_reason(reason)
        self.existing(name)
        return self.change(name, lambda state: Yank(version, reason))


def same(state: State, sha256: str) -> Version | None:
    """The version that these bytes are already."""
    return next((version for version in state.versions.values() if version.sha256 == sha256), None)


def publication(
    registry: Registry, data: bytes, version: str | None, beside: Mapping[str, bytes]
) -> tuple[Artifact, Callable[[State], Publish | None]]:
    """Check what is to be published; the artifact, and the `decide` that publishes it."""
    if version is not None:
        reference.check_version(version)
    entries = {
        reference.check_file(file): {"sha256": hash_of(content).hexdigest(), "size": len(content)}
        for file, content in beside.items()
    }
    fitted, sha256 = artifact.from_bytes(data), hash_of(data).hexdigest()

    def decide(state: State) -> Publish | None:
        if same(state, sha256):
            return None
        return Publish(version or registry.next_version(state, fitted), sha256, len(data), entries)

    return fitted, decide


def _check_unmoved(state: State, alias: str, before: str | None) -> None:
    now = state.at(alias)
    if now != before:
        raise Conflict(
            f"{state.name}@{alias} is {now or 'none'}, {before or 'none'} was expected: somebody moved it; "
            f"look at kvq history {state.name}, then say it again with --expect {now or 'none'}"
        )
