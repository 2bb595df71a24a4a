"""Fetch files of a registry that lies elsewhere, in a bucket or an OCI registry, into $KVQ_HOME/cache/blobs.

They are kept by their digest. A file whose bytes are not those of its name is not kept.
"""

import io
from abc import abstractmethod
from pathlib import Path
from typing import Any, BinaryIO

from kvq_runtime.artifact import header
from kvq_runtime.disk import files
from kvq_runtime.errors import ArtifactError
from kvq_runtime.registry import reference
from kvq_runtime.registry.events import Version
from kvq_runtime.registry.place import Elsewhere
from kvq_runtime.registry.tree import BLOBS, TreeRegistry


class CachedTree(Elsewhere, TreeRegistry):
    """A registry whose blobs are fetched into a cache."""

    kind: str  # what its address begins with

    def __init__(self, root: str):
        self.root = root

    @property
    def url(self) -> str:
        """Its address."""
        return f"{self.kind}{self.root}"

    def at(self, path: str) -> str:
        """The file's key, or address without its kind."""
        return f"{self.root}/{path}"

    def address(self, path: str) -> str:
        """A path as messages name it."""
        return f"{self.url}/{path}"

    @abstractmethod
    def first(self, sha256: str, count: int) -> bytes:
        """The first bytes of a blob, so many or, of a shorter one, all."""

    @abstractmethod
    def receive(self, sha256: str, size: int, file: BinaryIO) -> None:
        """Write a blob of this size into a file; whoever asks for it checks the digest."""

    def about(self, name: str, version: Version) -> dict[str, Any]:
        """Recipe, model and corpus of a version, from its file's header alone, whose form is checked as a file's."""
        data = self.first(version.sha256, min(version.size, 8 + header.LIMIT))
        try:
            return header.summary(header.about_of(header.read(io.BytesIO(data), version.size)))
        except ArtifactError as error:
            raise ArtifactError(f"{self.address(f'{BLOBS}/{version.sha256}')}: {error}") from None

    def cached(self, name: str, sha256: str, size: int) -> Path | None:
        """A blob in the cache."""
        path = kept(sha256)
        return path if path.is_file() and path.stat().st_size == size else None

    def download(self, name: str, version: Version, file: str) -> Path:
        """Fetch a blob into the cache."""
        sha256, size = version.content[file]
        path = kept(sha256)
        files.make_folder(path.parent)
        with files.draft(path.parent) as (draft, data):
            self.receive(sha256, size, data)
            data.flush()
            found = files.digest(draft)
            if found != (sha256, size):
                raise ArtifactError(
                    f"{self.address(f'{BLOBS}/{sha256}')}: sha256: the store sent {found[0]}, {found[1]} bytes, for "
                    f"{size}; nothing was kept, kvq doctor checks the registry"
                )
            files.settle(draft, data, path)
        return path


def kept(sha256: str) -> Path:
    """Where a blob is in the cache, whether it is there or not."""
    return reference.home() / "cache" / "blobs" / reference.check_sha256(sha256)
