"""Keep artifacts in a bucket of an object store that speaks S3, in the layout of a folder (`local/registry.py`).

    s3://bucket/prefix/blobs/sha256/<hex>   names/<name>/events/00000042.json   evaluations/...   signatures/...

A change is claimed by writing the next event's key on the condition that there is none (If-None-Match: *): of several
publishers the store lets one, and the others decide again. The same write follows, which the store has to refuse: one
that knows no such condition is found out by the first event, and not used. Files are fetched into
$KVQ_HOME/cache/blobs, by their digest. Needs `s3fs`; credentials and endpoint are those of AWS's tools
(AWS_PROFILE, AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ...).
"""

import io
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from hashlib import sha256 as hash_of
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from kvq_runtime.artifact import header, stated
from kvq_runtime.disk import files
from kvq_runtime.errors import ArtifactError, NotFound, extra
from kvq_runtime.registry import evaluations, events, reference
from kvq_runtime.registry.events import Event, State, Version
from kvq_runtime.registry.place import Head
from kvq_runtime.registry.reference import ARTIFACT_FILE
from kvq_runtime.registry.registry import Registry

TAKEN = re.compile("PreconditionFailed|ConditionalRequestConflict")  # is there, or is written by another one now
PIECE = 1 << 23  # bytes that are fetched at once
_EVENT_LIMIT = 1 << 16
_EVENT = re.compile(r"(?!0{8})[0-9]{8}\.json")
_systems: dict[int, Any] = {}  # by process: a forked one has to make its own


class BucketRegistry(Registry):
    """A registry in a bucket, `root` is "bucket" or "bucket/prefix", which has to be there.

    Every request may raise PermissionError, or RuntimeError where the store does not answer or s3fs is missing.
    """

    def __init__(self, root: str):
        self.root = root

    @property
    def url(self) -> str:
        """Its address, s3://bucket/prefix."""
        return f"{reference.BUCKET}{self.root}"

    def blob(self, sha256: str) -> str:
        """The key of the blob with this digest, whether it exists or not."""
        return f"{self.root}/blobs/sha256/{reference.check_sha256(sha256)}"

    def events_folder(self, name: str) -> str:
        """What the keys of a name's events begin with."""
        return f"{self.root}/names/{reference.check_name(name)}/events"

    # ---- reading

    def names(self) -> list[str]:
        """Every name with at least one event."""
        found = [PurePosixPath(path).name for path in self.keys(f"{self.root}/names")]
        return sorted(name for name in found if reference.is_name(name) and self.keys(self.events_folder(name)))

    def look(self, name: str) -> Head:
        """Versions, aliases and history of a name; empty if nothing was published under it."""
        listed = [PurePosixPath(path).name for path in self.keys(self.events_folder(name))]
        last = max((int(one[:8]) for one in listed if _EVENT.fullmatch(one)), default=0)
        place = lambda number: f"{reference.BUCKET}{self._event_key(name, number)}"  # noqa: E731
        return Head(events.numbered(name, last, partial(self.event, name), place))

    def event(self, name: str, number: int) -> Event:
        """One event of a name; raises ArtifactError naming the object if it is missing or malformed."""
        key = self._event_key(name, number)
        try:
            return events.from_bytes(self.content(key, _EVENT_LIMIT), number, name)
        except NotFound:
            raise ArtifactError(f"{reference.BUCKET}{key}: event: missing, though later ones are there") from None
        except ArtifactError as error:
            raise ArtifactError(f"{reference.BUCKET}{key}: {error}; kvq doctor says what to do") from None

    def _event_key(self, name: str, number: int) -> str:
        return f"{self.events_folder(name)}/{number:08}.json"

    def about(self, name: str, version: Version) -> dict[str, Any]:
        """Recipe, model and corpus of a version, from its file's header alone."""
        data = self._range(self.blob(version.sha256), 0, min(version.size, 8 + header.LIMIT))
        return stated.summary(stated.about_of(header.read(io.BytesIO(data), version.size)))

    def fetch(self, name: str, version: Version, file: str = ARTIFACT_FILE) -> Path:
        """A file's blob, from the cache or fetched; only what is fetched now is compared with the digest."""
        sha256, size = version.file(file)
        path = self._cached(sha256)
        return path if path.is_file() and path.stat().st_size == size else self._download(sha256, size)

    def fetch_verified(self, name: str, version: Version, file: str = ARTIFACT_FILE) -> Path:
        """`fetch`, with the digest of a cached file checked; a damaged one is fetched again."""
        sha256, size = version.file(file)
        path = self._cached(sha256)
        return path if path.is_file() and files.digest(path) == (sha256, size) else self._download(sha256, size)

    def listed(self, name: str, folder: str) -> list[tuple[PurePath, bytes]]:
        """(path, content) of every .json file of a folder, by path."""
        paths = sorted(path for path in self.keys(f"{self.root}/{folder}") if path.endswith(".json"))
        return [(PurePosixPath(path), self.content(path, evaluations.LIMIT)) for path in paths]

    def check_writable(self) -> None:
        """Raise what asking the store for this bucket ends in; whether it may be written to is not asked."""
        with self._told():
            if not self._system().exists(self.root.partition("/")[0]):
                raise RuntimeError(f"{self.url}: there is no such bucket, or these credentials do not see it")

    def _cached(self, sha256: str) -> Path:
        return reference.home() / "cache" / "blobs" / sha256

    def _download(self, sha256: str, size: int) -> Path:
        """Fetch a blob into the cache; ArtifactError, and nothing is kept, if its bytes are not those of its name."""
        kept, key = self._cached(sha256), self.blob(sha256)
        files.make_folder(kept.parent)
        with files.draft(kept.parent) as (draft, file):
            for start in range(0, size, PIECE):
                file.write(self._range(key, start, min(start + PIECE, size)))
            file.flush()
            found = files.digest(draft)
            if found != (sha256, size):
                raise ArtifactError(
                    f"{reference.BUCKET}{key}: sha256: the store sent {found[0]}, {found[1]} bytes, for {size}; "
                    "nothing was kept, kvq doctor checks the registry"
                )
            files.settle(draft, file, kept)
        return kept

    # ---- changing

    def write(
        self, head: Head, after: State, content: Mapping[str, bytes], about: Mapping[str, Any], unanswered: list[Event]
    ) -> Head | None:
        """Claim the next number; None if another publisher took it, or if that was an earlier try of this one."""
        event = after.events[-1]
        if self._claim(self._event_key(after.name, event.number), event.to_bytes()):
            return Head(after)
        unanswered.append(event)
        return None

    def store(self, name: str, content: Mapping[str, bytes]) -> None:
        """Put every file into its blob, unless the history of the name is damaged."""
        self.look(name)
        for data in content.values():
            self._put(self.blob(hash_of(data).hexdigest()), data)

    def finish(self, name: str, version: Version | None = None, content: Mapping[str, bytes] | None = None) -> None:
        """Write blobs again that gc took before their event."""
        kept = set(self.keys(f"{self.root}/blobs/sha256")) if content else set()
        for data in (content or {}).values():
            key = self.blob(hash_of(data).hexdigest())
            if key not in kept:
                self._put(key, data)

    def add(self, name: str, path: str, data: bytes) -> None:
        """Add a file that never changes; the name is not needed here."""
        self._claim(f"{self.root}/{path}", data)

    def _put(self, key: str, data: bytes) -> None:
        with self._told():
            self._system().pipe_file(key, data)

    def _claim(self, key: str, data: bytes) -> bool:
        """Write a key that is not there; False if it is."""
        with self._told():
            for tries in range(2):
                try:
                    self._system().pipe_file(key, data, mode="create")
                except OSError as error:
                    if isinstance(error, FileExistsError) or TAKEN.search(f"{error} {error.__cause__}"):
                        return tries > 0
                    raise
        raise RuntimeError(
            f"{self.url}: this store does not know If-None-Match, by which publishers keep out of each other's way; "
            "use a store that does, as S3, MinIO and R2 do, or a folder"
        )

    # ---- the store

    def keys(self, folder: str) -> list[str]:
        """The keys, and beginnings of keys, right below a folder."""
        with self._told():
            try:
                return sorted(self._system().ls(folder, detail=False, refresh=True))
            except FileNotFoundError as error:
                self._missing(error)
                return []

    def details(self, folder: str) -> Iterator[tuple[str, int, float]]:
        """(key, bytes, time of its last change) of everything right below a folder that is no folder."""
        with self._told():
            try:
                found = self._system().ls(folder, detail=True, refresh=True)
            except FileNotFoundError as error:
                return self._missing(error)
        yield from (
            (one["name"], one["size"], one["LastModified"].timestamp()) for one in found if one["type"] == "file"
        )

    def _missing(self, error: FileNotFoundError) -> None:
        """Raise NotFound where it is the bucket that is missing."""
        if "NoSuchBucket" in f"{error} {error.__cause__!r}" or "bucket does not exist" in str(error):
            raise NotFound(f"{self.url}: there is no such bucket") from None

    def content(self, key: str, limit: int) -> bytes:
        """All of a small object. NotFound: there is none; ArtifactError: it is longer than the limit."""
        data = self._range(key, 0, limit + 1)
        if len(data) > limit:
            raise ArtifactError(f"{reference.BUCKET}{key}: longer than {limit} bytes")
        return data

    def remove(self, key: str) -> None:
        """Remove an object."""
        with self._told():
            self._system().rm_file(key)

    def _range(self, key: str, start: int, stop: int) -> bytes:
        with self._told():
            try:
                return self._system().cat_file(key, start=start, end=stop)
            except FileNotFoundError:
                raise NotFound(f"{reference.BUCKET}{key}: there is no such object") from None
            except OSError as error:
                if "InvalidRange" in f"{error} {error.__cause__}":  # it ends before
                    return b""
                raise

    def _system(self) -> Any:
        process = os.getpid()
        found = _systems.get(process)
        if found is None:
            import fsspec

            found = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)
            _systems[process] = found
        return found

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
