"""State what a place does that keeps a registry: it reads what stands there, gives and adds files, and writes an event
only on top of the events that were read. All else is the same for every one, and in `registry`.

Places are a folder (`local`) and the repositories of a Hub (`hub`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from kvq_runtime.disk import files
from kvq_runtime.registry import reference
from kvq_runtime.registry.events import Event, State, Version
from kvq_runtime.registry.lock import Lock
from kvq_runtime.registry.reference import ARTIFACT_FILE, GRACE


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


class Place(ABC):
    """The operations that each kind of registry has of its own.

    moves_again   whether a promote or rollback is decided again after another change came first, or ends in a Conflict
    """

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


class Elsewhere(Place):
    """A place of which files are received into a cache."""

    @abstractmethod
    def cached(self, name: str, sha256: str, size: int) -> Path | None:
        """The file with this digest and size in the cache of a place that is elsewhere, unread; None: there is none."""

    @abstractmethod
    def download(self, name: str, version: Version, file: str) -> Path:
        """Receive a file of a version into that cache; ArtifactError, and nothing is kept, for another digest."""

    def fetch(self, name: str, version: Version, file: str = ARTIFACT_FILE) -> Path:
        """A file of a version, from the cache or downloaded; whoever reads it checks its digest."""
        return self.cached(name, *version.content[file]) or self.download(name, version, file)

    def fetch_verified(self, name: str, version: Version, file: str = ARTIFACT_FILE) -> Path:
        """`fetch`, with the digest of a cached file checked; a damaged one is downloaded again."""
        path = self.cached(name, *version.content[file])
        whole = path is not None and files.digest(path) == version.content[file]
        return path if path is not None and whole else self.download(name, version, file)
