"""Look into huggingface_hub's cache of a repository, without a request.

The cache's layout is documented: blobs/<etag>, for large files their sha256; snapshots/<commit>/<path>, links to blobs;
refs/main, the head of main when it was last asked for.
"""

import time
from contextlib import suppress
from pathlib import Path

from kvq_runtime.disk import files
from kvq_runtime.registry.hub import client
from kvq_runtime.registry.hub.index import ARTIFACT, folder


def _store(repo: str) -> Path:
    return client.cache_folder() / "--".join(["models", *repo.split("/")])


def artifact(repo: str, version: str, sha256: str, size: int) -> Path | None:
    """The cached file of a version, None if there is none. It is found by name and size: loading checks its digest."""
    store = _store(repo)
    blob = (store / "blobs" / sha256).resolve()
    if blob.is_file() and blob.stat().st_size == size:
        return blob
    for path in store.glob(f"snapshots/*/{folder(version)}/{ARTIFACT}"):  # from a Hub that uses other etags
        blob = path.resolve()
        if blob.is_file() and files.digest(blob) == (sha256, size):
            return blob
    return None


def last_head(repo: str) -> str | None:
    """The head of main when it was last asked for; None if it never was."""
    try:
        return (_store(repo) / "refs" / "main").read_text().strip()
    except FileNotFoundError:
        return None


def note_head(repo: str, commit: str) -> None:
    """Remember the head of main, where huggingface_hub does; a read-only cache is left as it is."""
    refs = _store(repo) / "refs"
    if last_head(repo) != commit:
        with suppress(OSError):
            refs.mkdir(parents=True, exist_ok=True)
            files.save(refs / "main", commit.encode())


def unfinished(repo: str, older: float) -> list[Path]:
    """Files that a killed process left half written, at least `older` seconds ago: downloads, and drafts of refs."""
    store, paths = _store(repo), []
    for path in [*store.glob("blobs/*.incomplete"), *(store / "refs").glob(".*.tmp")]:
        with suppress(FileNotFoundError):  # finished meanwhile
            if path.stat().st_mtime <= time.time() - older:
                paths.append(path)
    return sorted(paths)


def json_files(repo: str, folder: str) -> list[Path]:
    """The .json files of a folder of the repository in any cached commit, one for each file name."""
    return sorted({path.name: path for path in _store(repo).glob(f"snapshots/*/{folder}/*.json")}.values())
