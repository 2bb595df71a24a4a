"""Define a registry: the meaning of a name's events and files, common to a folder (`local`) and a Hub (`hub`)."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256 as hash_of
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal

from kvq_runtime.artifact import header
from kvq_runtime.disk import files
from kvq_runtime.errors import ArtifactError, Conflict, NotFound, Unanswered
from kvq_runtime.registry import evaluation_records, events, rating, reference
from kvq_runtime.registry.events import Change, Event, Promote, Publish, Rollback, State, Version, Yank
from kvq_runtime.registry.reference import ARTIFACT_FILE, PRODUCTION

if TYPE_CHECKING:  # kvq list and promote must not import torch
    from kvq_runtime.artifact.artifact import Artifact

TRIES = 200  # decisions of one change
UNANSWERED = 4  # writes whose outcome was not learned
Kind = Literal["evaluations", "signatures"]
MAX_RECORD = 1 << 20  # bytes of a record
MAX_RECORDS = 1 << 12  # records of one artifact and kind
MAX_RECORD_BYTES = 1 << 26  # of all of them
NOT_SETTINGS = {"model", "revision", "environment"}  # of a provenance: a recalibration may change these
_REPUBLISH = "publish the same bytes again (on a Hub, restore the file from an earlier commit), or yank the version"


class Registry(ABC):
    """Named, versioned artifacts: a fold over the events of each name, stored in a folder or on a Hub.

    Methods that take a name raise ValueError for an invalid one, and ArtifactError for a damaged registry.
    """

    # ---- to implement

    @property
    @abstractmethod
    def url(self) -> str:
        """The address: file:///folder or hf://org."""

    @abstractmethod
    def names(self) -> list[str]:
        """List every name with events, and those whose events cannot be read."""

    @abstractmethod
    def state(self, name: str) -> State:
        """Return versions, aliases and history of a name, empty without events; offline, the last known ones."""

    @abstractmethod
    def write(self, state: State, event: Event, content: Mapping[str, bytes]) -> bool:
        """Write an event on top of the state that was read, and the files of a publish (`content`) before it.

        state   with the event in it already
        Returns False, and writes no event, if another change came first. Raises Unanswered if the outcome is unknown.
        """

    @abstractmethod
    def fetch(self, name: str, version: Version, file: str = ARTIFACT_FILE) -> Path:
        """Return the path of a version's file; the reader checks its digest."""

    @abstractmethod
    def add(self, name: str, path: str, data: bytes) -> None:
        """Add an immutable file; nothing happens if it exists."""

    @abstractmethod
    def list_records(self, name: str, folder: str) -> Iterator[tuple[PurePath, bytes]]:
        """Yield path and content of the .json files of a folder, in the order of their names."""

    @abstractmethod
    def check_writable(self) -> None:
        """Raise the error with which a publish would end; write nothing."""

    # ---- to override

    access = ""  # what to do about a name that is not visible

    def mend(self, state: State, content: Mapping[str, bytes]) -> None:
        """Make the last event durable, and write the files of a version again that is published already."""
        return None

    # ---- reading

    def existing(self, name: str) -> State:
        """Return the state of a name with events; NotFound for another name."""
        state = self.state(name)
        if not state.events:
            names = f"kvq list --registry {self.url} lists its names"
            raise NotFound(f"no artifact {name} in {self.url}; {names}{self.access}")
        return state

    def attachments(self, name: str, version: Version) -> dict[str, bytes]:
        """Return the files stored with a version, by name, with their digests checked."""
        contents = {}
        for file, entry in version.files.items():
            path = self.fetch(name, version, file)
            contents[file] = files.read(path, entry["size"])
            digest = hash_of(contents[file]).hexdigest()
            if digest != entry["sha256"]:
                raise ArtifactError(f"{path}: sha256: the file has {digest}; {_REPUBLISH}")
        return contents

    # ---- records

    def add_record(self, kind: Kind, sha256: str, data: bytes, name: str = "") -> str:
        """Store an immutable record about an artifact; returns the record's digest. A Hub needs the name."""
        digest = hash_of(data).hexdigest()
        self.add(name, f"{kind}/{reference.check_sha256(sha256)}/{digest}.json", data)
        return digest

    def records(self, kind: Kind, sha256: str, name: str = "") -> Iterator[tuple[PurePath, bytes]]:
        """Yield path and content of an artifact's records, whose names are their digests; RuntimeError for too many."""
        folder, size = f"{kind}/{reference.check_sha256(sha256)}", 0
        for count, (path, data) in enumerate(self.list_records(name, folder), 1):
            size += len(data)
            if count > MAX_RECORDS or size > MAX_RECORD_BYTES:
                text = f"more than {MAX_RECORDS} records or {MAX_RECORD_BYTES} bytes of them; remove some there"
                raise RuntimeError(f"{self.url}, {name} {folder}: {text}")
            if hash_of(data).hexdigest() != path.stem:
                text = "not that of its name; the file was changed: delete it, then evaluate or sign again"
                raise ArtifactError(f"{path}: sha256: {text}")
            yield path, data

    def add_evaluation(self, record: Mapping[str, Any], name: str = "") -> str:
        """Store an evaluation record of an artifact; returns the record's digest."""
        return self.add_record("evaluations", record["artifact"], evaluation_records.to_bytes(record), name)

    def evaluations(self, sha256: str, name: str = "") -> list[dict[str, Any]]:
        """Return every evaluation record of an artifact, ordered by digest."""
        records = self.records("evaluations", sha256, name)
        return [evaluation_records.from_bytes(data, path) for path, data in records]

    def signatures(self, sha256: str, name: str) -> list[bytes]:
        """Return every signature record of an artifact."""
        return [data for _, data in self.records("signatures", sha256, name)]

    # ---- changing

    def change(self, name: str, decide: Callable[[State], Change | None], content: Mapping[str, bytes] = {}) -> State:
        """Make one change; returns the state that includes it.

        decide    called with the present state, and again whenever another change came first; returns the change, or
                  None if nothing is left to do, or raises Conflict to give up
        content   the files of a publish, by name
        """
        unanswered: list[Event] = []
        for _ in range(TRIES):
            state = self.state(name)
            if any(event in state.events for event in unanswered):  # it was written, and the answer was lost
                return state
            change = decide(state)
            if change is None:
                self.mend(state, content)
                return state
            event = Event(len(state.events) + 1, name, events.now(), events.author(), change)
            state.add(event)
            try:
                if self.write(state, event, content):
                    return state
            except Unanswered:
                if len(unanswered) == UNANSWERED:
                    raise
                time.sleep(2.0 ** len(unanswered))
                unanswered.append(event)
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

        reference.check_name(name)
        if version is not None:
            reference.check_version(version)
        attachments, sha256 = attachments or {}, hash_of(data).hexdigest()
        entries = {
            file: {"sha256": hash_of(content).hexdigest(), "size": len(content)}
            for file, content in attachments.items()
        }
        events.check_files(entries)
        new, content = artifact.from_bytes(data), {ARTIFACT_FILE: data, **attachments}
        about = header.summary(new.recipe.name, new.provenance)

        def decide(state: State) -> Change | None:
            if state.with_digest(sha256):
                return None
            return Publish(version or following(state, new, self.fetch), sha256, len(data), entries, about)

        published = self.change(name, decide, content).with_digest(sha256)
        assert published is not None, "the change that was written is in the state"
        return published

    def promote(
        self, name: str, version: str, alias: str = PRODUCTION, expect: str | None = None, force: bool = False
    ) -> State:
        """Point an alias to a version; returns the new state.

        expect   the version that the alias must point to now, "none" for a new alias; None: its version at this call
        force    promote even a version that `rating` does not find usable; the event states it
        Raises NotFound for an unknown name or version, Conflict if the alias has moved, or the version is yanked, too
        lossy or not measured.
        """
        reference.check_version(version)
        reference.check_alias(alias)
        if expect not in (None, "none"):
            reference.check_version(expect)
        state = self.existing(name)
        before = state.at(alias) if expect is None else None if expect == "none" else expect
        rated = None if force else rating.rate_version(self, name, state.get(version))
        if rated is not None and rated.word != rating.USABLE:
            raise Conflict(f"{name}@{version} is {rated}; --force (force=True) promotes it all the same")

        def decide(state: State) -> Change | None:
            if state.at(alias) == version:
                return None
            _check_unmoved(state, alias, before)
            return Promote(alias, version, force)

        return self.change(name, decide)

    def rollback(self, name: str, alias: str = PRODUCTION) -> State:
        """Point an alias to its previous version; returns the new state.

        Raises NotFound if there was none, Conflict if the alias moves meanwhile.
        """
        before = self.existing(name).at(reference.check_alias(alias))

        def decide(state: State) -> Change | None:
            _check_unmoved(state, alias, before)
            return Rollback(alias, state.before(alias)[0])

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


def _check_unmoved(state: State, alias: str, before: str | None) -> None:
    now = state.at(alias)
    if now != before:
        raise Conflict(
            f"{state.name}@{alias} points to {now or 'none'}, expected {before or 'none'}: somebody moved it; "
            f"look at kvq history {state.name}, then retry with --expect {now or 'none'}"
        )


def following(state: State, new: "Artifact", fetch: Callable[[str, Version], Path]) -> str:
    """Number the next version of a name, by the difference between its artifact and that of the highest version.

    patch   a recalibration: the same recipe and provenance, except for model id, revision and environment
    minor   another setting, or another corpus or choice of it
    major   a model with another fingerprint

    A yanked version counts: numbers are never reused.

    fetch   returns the file of a version
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
    distances = fingerprint.distances(old.fingerprint, new.fingerprint).values()
    other_model = max(distances, default=0.0) > fingerprint.TOLERANCE
    if other_model or fingerprint.mismatches(old.fingerprint, new.fingerprint):
        return f"{major + 1}.0.0"
    settings = [{k: v for k, v in made.provenance.items() if k not in NOT_SETTINGS} for made in (old, new)]
    if old.recipe != new.recipe or settings[0] != settings[1]:
        return f"{major}.{minor + 1}.0"
    return f"{major}.{minor}.{patch + 1}"
