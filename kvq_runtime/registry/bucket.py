"""Keep artifacts in a bucket of an object store that speaks S3: see `tree`.

A change is claimed by writing the next event's key on the condition that there is none (If-None-Match: *): of several
publishers the store lets one, and the others decide again. The same write follows, which the store has to refuse: one
that knows no such condition is found out by the first event, and not used. Files are fetched into
$KVQ_HOME/cache/blobs, by their digest. Needs `s3fs`; credentials and endpoint are those of AWS's tools
(AWS_PROFILE, AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...).
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from kvq_runtime.errors import ArtifactError, NotFound, extra
from kvq_runtime.registry import reference
from kvq_runtime.registry.events import Event, State
from kvq_runtime.registry.place import Finding, Head
from kvq_runtime.registry.tree import BLOBS, CachedTree

TAKEN = re.compile("PreconditionFailed|ConditionalRequestConflict")  # is there, or is written by another one now
PIECE = 1 << 23  # bytes that are fetched at once
_systems: dict[int, Any] = {}  # by process: a forked one has to make its own


class BucketRegistry(CachedTree):
    """A registry in a bucket, `root` is "bucket" or "bucket/prefix", which has to be there.

    Every request may raise PermissionError, or RuntimeError where the store does not answer or s3fs is missing.
    """

    kind = reference.BUCKET
    restore = "restore the event from a version of the bucket, or a copy; later ones are kept, and nothing was removed"

    # ---- reading

    def first(self, sha256: str, count: int) -> bytes:
        """The first bytes of a blob."""
        return self._range(f"{BLOBS}/{sha256}", 0, count)

    def receive(self, sha256: str, size: int, file: BinaryIO) -> None:
        """Write a blob into a file, piece by piece."""
        for start in range(0, size, PIECE):
            file.write(self._range(f"{BLOBS}/{sha256}", start, min(start + PIECE, size)))

    def check_writable(self) -> None:
        """Raise what asking the store for this bucket ends in; whether it may be written to is not asked."""
        with self._told():
            if not self._system().exists(self.root.partition("/")[0]):
                raise RuntimeError(f"{self.url}: there is no such bucket, or these credentials do not see it")

    # ---- changing

    def write(
        self, head: Head, after: State, content: Mapping[str, bytes], about: Mapping[str, Any], unanswered: list[Event]
    ) -> Head | None:
        """Claim the next number; None if another publisher took it, or if that was an earlier try of this one."""
        written = super().write(head, after, content, about, unanswered)
        unanswered += [] if written else [after.events[-1]]
        return written

    def remove_blobs(self, orphans: list[str], before: float) -> list[str]:
        """Remove these blobs: events, and then ages, are read again before any is removed. A publish writes its blobs
        anew, then its event: what was published since is in one of the two."""
        if not orphans:
            return []
        named = self.named()
        young = {name for name, changed in self.changed().items() if changed is not None and changed > before}
        orphans = [sha256 for sha256 in orphans if sha256 not in named and sha256 not in young]
        for sha256 in orphans:
            self.remove(f"{BLOBS}/{sha256}")
        return orphans

    def examine(self) -> list[Finding]:
        """Everything wrong with events, blobs (by content) and records; a bucket that is not there is a fault, too."""
        try:
            return super().examine()
        except NotFound as error:
            what = str(error).removeprefix(f"{self.url}: ")
            return [Finding("fault", what, self.url, "use the address of one that is there, or make it")]

    # ---- the store

    def entries(self, folder: str) -> list[str]:
        """The names right below a folder, in order; NotADirectoryError if an object is all that has its name."""
        names = [one["name"] for one in self._listing(folder)]
        if names == [self.at(folder)]:
            raise NotADirectoryError(f"{self.address(folder)}: an object, and no folder")
        return sorted(PurePosixPath(name).name for name in names)

    def changed(self) -> dict[str, float | None]:
        """{name: time of its last change} of all that is among blobs; None for what is no object."""
        found = [(PurePosixPath(one["name"]).name, one) for one in self._listing(BLOBS)]
        folders = dict.fromkeys(name for name, one in found if one["type"] != "file")
        return folders | {name: one["LastModified"].timestamp() for name, one in found if one["type"] == "file"}

    def _listing(self, folder: str) -> list[dict[str, Any]]:
        with self._told():
            try:
                return self._system().ls(self.at(folder), detail=True, refresh=True)
            except FileNotFoundError as error:
                if "NoSuchBucket" in f"{error} {error.__cause__!r}" or "bucket does not exist" in str(error):
                    raise NotFound(f"{self.url}: there is no such bucket") from None
                return []

    def has(self, path: str) -> bool:
        """True if an object is there."""
        with self._told():
            return self._system().exists(self.at(path))

    def content(self, path: str, limit: int) -> bytes:
        """All of a small object."""
        data = self._range(path, 0, limit + 1)
        if len(data) > limit:
            raise ArtifactError(f"{self.address(path)}: longer than {limit} bytes")
        return data

    def put(self, path: str, data: bytes) -> None:
        """Write an object, replacing one that is there."""
        with self._told():
            self._system().pipe_file(self.at(path), data)

    def claim(self, path: str, data: bytes) -> bool:
        """Write an object that is not there; False if it is."""
        with self._told():
            for tries in range(2):
                try:
                    self._system().pipe_file(self.at(path), data, mode="create")
                except OSError as error:
                    if isinstance(error, FileExistsError) or TAKEN.search(f"{error} {error.__cause__}"):
                        return tries > 0
                    raise
        raise RuntimeError(
            f"{self.url}: this store does not know If-None-Match, by which publishers keep out of each other's way; "
            "use a store that does, as S3, MinIO and R2 do, or a folder"
        )

    def remove(self, path: str) -> None:
        """Remove an object."""
        with self._told():
            self._system().rm_file(self.at(path))

    def _range(self, path: str, start: int, stop: int) -> bytes:
        with self._told():
            try:
                return self._system().cat_file(self.at(path), start=start, end=stop)
            except FileNotFoundError:
                raise NotFound(f"{self.address(path)}: there is no such object") from None
            except OSError as error:
                if "InvalidRange" in f"{error} {error.__cause__}":  # it ends before
                    return b""
                raise

    def _system(self) -> Any:
        process = os.getpid()
        if process not in _systems:
            import fsspec

            _systems[process] = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)
        return _systems[process]

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Say in a sentence what the store, or the library, ends a request with."""
        try:
            yield
        except ImportError as error:
            raise RuntimeError(f"{self.url}: {error.name or 's3fs'} is missing; {extra('s3')}") from None
        except PermissionError as error:
            raise PermissionError(f"{self.url}: the store refuses: {error}") from None
        except (FileNotFoundError, FileExistsError, ArtifactError, NotFound, RuntimeError):
            raise
        except OSError as error:
            raise RuntimeError(f"{self.url}: {error}") from None
        except Exception as error:
            if not type(error).__module__.startswith(("botocore", "aiobotocore", "aiohttp")):
                raise
            raise RuntimeError(
                f"{self.url}: {error}; credentials and endpoint are those of AWS's tools: AWS_PROFILE, "
                "AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL"
            ) from None
