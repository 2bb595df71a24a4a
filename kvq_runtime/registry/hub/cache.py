"""Find what huggingface_hub's cache holds of a repository, without a request.

The cache's layout is documented: blobs/<etag>, which for large files is their sha256; snapshots/<commit>/<path>, links
to blobs; refs/main, the commit that main was when it was last asked for.
"""

import time
from contextlib import suppress
from pathlib import Path

from kvq_runtime import files
from kvq_runtime.registries.hub_index import ARTIFACT, folder


def _store(repo: str) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / "--".join(["models", *repo.split("/")])


def artifact(repo: str, version: str, sha256: str, size: int) -> Path | None:
    """A version's file: by its name, the digest, and its size; whoever loads it checks the digest itself."""
    store = _store(repo)
    blob = (store / "blobs" / sha256).resolve()
    if blob.is_file() and blob.stat().st_size == size:
        return blob
    for path in store.glob(f"snapshots/*/{folder(version)}/{ARTIFACT}"):  # a Hub that names its files otherwise
        blob = path.resolve()
        if blob.is_file() and files.digest(blob) == (sha256, size):
            return blob
    return None


def last_read(repo: str) -> str | None:
    """The commit that main was when it was last asked for."""
    try:
        return (_store(repo) / "refs" / "main").read_text().strip()
    except FileNotFoundError:
        return None


def note_read(repo: str, commit: str) -> None:
    """Remember what main is, as the library does; a cache that cannot be written to forgets."""
    place = _store(repo) / "refs"
    if last_read(repo) != commit:
        with suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            files.save(place / "main", commit.encode())


def drafts(repo: str, older: float) -> list[Path]:
    """What a killed process left half written, at least so many seconds ago: downloads, and `note_read`."""
    store, found = _store(repo), []
    for path in [*store.glob("blobs/*.incomplete"), *(store / "refs").glob(".*.tmp")]:
        with suppress(FileNotFoundError):  # finished meanwhile
            if path.stat().st_mtime <= time.time() - older:
                found.append(path)
    return sorted(found)


def under(repo: str, folder: str) -> list[Path]:
    """The .json files of a folder of the repository that any commit in the cache has, by name."""
    return sorted({path.name: path for path in _store(repo).glob(f"snapshots/*/{folder}/*.json")}.values())
