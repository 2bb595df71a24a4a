"""State what a place must do that keeps a registry's files: a folder (`local`), or repositories of a Hub (`hub`).

A place reads what stands there, gives and adds files, and writes an event only on top of the events that were read.
What events and files mean is the same for every place, and written once, in registry.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from kvq_runtime.registry import reference
from kvq_runtime.registry.events import Event, State, Version
from kvq_runtime.registry.lock import Lock
from kvq_runtime.registry.reference import ARTIFACT_FILE

GRACE = 24 * 3600.0  # seconds: `kvq gc` leaves younger files alone, since a publish may be about to name them


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
    """What was read of a name; without its events, nothing was published under it.

    about    {version: summary of its artifact}, where the place keeps that beside the events
    commit   in which it was read; None: there is no repository, or the place has no commits
    """

    state: State
    about: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    commit: str | None = None


class Place(ABC):
    """Where named, versioned artifacts are kept.

    moves_again   whether a promote or rollback is decided again after another change came first, or ends in a Conflict
    Methods that take a name raise ValueError for an invalid one, and ArtifactError for a damaged place.
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
        """What stands there now, never from a cache; empty if it is not visible."""

    def read(self, name: str, commit: str = "") -> Head:
        """What stands there, from a cache where the place does not answer, or stood there at a commit.

        Raises ValueError for a commit if the place has none, as here.
        """
        if commit:
            raise ValueError(f"{self.url} has no commits, and {commit} is one; use a version, as in {name}@1.2.0")
        return self.look(name)

    @abstractmethod
    def write(
        self, head: Head, after: State, files: Mapping[str, bytes], about: Mapping[str, Any], unanswered: list[Event]
    ) -> Head | None:
        """Write the last event of `after` on top of the head that was read; returns what stands there then.

        files        of a publish, by name
        about        of a publish: the summary of its artifact
        unanswered   gets the event if it is not known whether it was written
        Returns None if another change came first, if a repository had to be made, or if it is not known.
        """

    def store(self, name: str, files: Mapping[str, bytes]) -> None:
        """Store files that the next event will name, in a place where that is a step of its own."""
        return None

    def finish(self, name: str, version: Version | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Do what an interrupted change, or publish of a version, may have left undone; files: what was published."""
        return None

    @abstractmethod
    def fetch(self, name: str, version: Version, file: str = ARTIFACT_FILE) -> Path:
        """A file of a version; whoever reads it checks its digest."""

    def fetch_verified(self, name: str, version: Version, file: str = ARTIFACT_FILE) -> Path:
        """`fetch`; a file from a cache is compared with the digest, and downloaded again if it is damaged."""
        return self.fetch(name, version, file)

    @abstractmethod
    def about(self, name: str, version: Version) -> dict[str, Any]:
        """Recipe, model and corpus of a version, as `stated.summary`, without fetching the whole file."""

    @abstractmethod
    def add(self, name: str, path: str, data: bytes) -> None:
        """Add a file that never changes; one that is there is the same."""

    @abstractmethod
    def listed(self, name: str, folder: str) -> list[tuple[PurePath, bytes]]:
        """(path, content) of every .json file of a folder, by path."""

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
