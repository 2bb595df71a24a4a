"""Keep what a Hub sent in the folder of huggingface_hub's cache, in its layout, by names of our own making.

blobs/<sha256>, of the bytes that were received; snapshots/<commit>/<path>, links to blobs; refs/main, the head of main
when it was last asked for. What huggingface_hub put there is read as well: it names small files by git's digest. A file
whose bytes are not those of its name is received again. Only files and links of these names are written or replaced.
"""

import hashlib
import os
import re
import secrets
import time
from contextlib import suppress
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from kvq_runtime.disk import files
from kvq_runtime.errors import ArtifactError
from kvq_runtime.registry import reference
from kvq_runtime.registry.hub import ask, client
from kvq_runtime.registry.reference import check_commit

_DRAFT = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")  # of a link; a repository's own file may be hidden, and a .tmp


def _store(repo: str) -> Path:
    return client.cache_folder() / "--".join(["models", *repo.split("/")])


def blob(repo: str, sha256: str, size: int) -> Path | None:
    """The cached file of a digest, None if there is none. It is found by name and size: loading checks its digest."""
    path = (_store(repo) / "blobs" / reference.check_sha256(sha256)).resolve()
    return path if path.is_file() and path.stat().st_size == size else None


def whole(repo: str, path: str, commit: str, limit: int) -> bytes | None:
    """The content of a small file of a commit if the cache has it as it was received; else None."""
    blobs, found = (_store(repo) / "blobs").resolve(), _link(repo, path, commit).resolve()
    if found.parent != blobs or not found.is_file():
        return None
    data = files.read(found, limit)
    return data if agree(found, found.name) else None


def content(repo: str, path: str, commit: str, limit: int, sha256: str | None = None) -> bytes:
    """The content of a small file of a commit, from the cache, by its digest if that is given, or received."""
    kept = None if sha256 is None else _store(repo) / "blobs" / reference.check_sha256(sha256)  # of whatever commit
    if kept is not None and kept.is_file() and files.digest(kept)[0] == sha256:
        return files.read(kept, limit)
    return whole(repo, path, commit, limit) or files.read(download(repo, path, commit, limit, sha256), limit)


def download(repo: str, path: str, commit: str, limit: int, sha256: str | None = None) -> Path:
    """Receive a file of a commit into the cache; returns its path.

    limit    the most bytes that it may have
    sha256   that it must have; None: that of its ETag, if it is one
    What does not have it is received once more, and ArtifactError if that has not either; nothing of it is kept.
    """
    link, address = _link(repo, path, commit), f"{client.endpoint()}/{repo}/resolve/{commit}/{quote(path)}"
    blobs, tag = _store(repo) / "blobs", ""
    client.check_online(repo)
    files.make_folder(blobs)
    with files.draft(blobs) as (draft, file):
        for _ in range(2):
            file.seek(0)
            file.truncate()
            tag = client.retry(lambda: ask.append(address, file, limit))
            file.flush()
            if agree(draft, sha256 or tag):
                kept = blobs / files.digest(draft)[0]
                files.settle(draft, file, kept)
                _point(link, kept)
                return kept
        received, size = files.digest(draft)
    raise ArtifactError(
        f"{repo}/{path}: sha256: the Hub sent {received}, {size} bytes, twice; expected {sha256 or f'its ETag {tag}'}; "
        "nothing was kept, kvq doctor checks the repository"
    )


def agree(path: Path, tag: str) -> bool:
    """True if a file has the digest that a name or an ETag states: sha256, git's sha1 or sha1. Other tags pass."""
    if len(tag) == 64:
        return files.digest(path)[0] == tag
    if len(tag) != 40:
        return True
    with files.opened(path) as (file, size):
        plain, git = hashlib.sha1(), hashlib.sha1(b"blob %d\0" % size)
        while chunk := file.read(1 << 20):
            plain.update(chunk)
            git.update(chunk)
    return tag in (plain.hexdigest(), git.hexdigest())


def _link(repo: str, path: str, commit: str) -> Path:
    """Return the cache's path of a file of a commit; ValueError for no commit, or a path that leaves its folder."""
    parts = PurePosixPath(path).parts
    if not parts or ".." in parts or parts[0] == "/" or "\0" in path:
        raise ValueError(f"path {path!r:.120}: not one within a repository")
    return _store(repo).joinpath("snapshots", check_commit(commit), *parts)


def _point(link: Path, kept: Path) -> None:
    """Let a link lead to a blob, whatever is there."""
    files.make_folder(link.parent)
    draft = link.with_name(f".{link.name}.{secrets.token_hex(8)}.tmp")
    draft.symlink_to(os.path.relpath(kept, link.parent))
    draft.replace(link)


def last_head(repo: str) -> str | None:
    """The head of main when it was last asked for; None if it never was."""
    with suppress(FileNotFoundError, ValueError):
        return check_commit((_store(repo) / "refs" / "main").read_text().strip())
    return None


def note_head(repo: str, commit: str) -> None:
    """Remember the head of main; a read-only cache is left as it is."""
    refs = _store(repo) / "refs"
    if last_head(repo) != commit:
        with suppress(OSError):
            refs.mkdir(parents=True, exist_ok=True)
            files.save(refs / "main", commit.encode())


def unfinished(repo: str, older: float) -> list[Path]:
    """List what a killed process left half done, at least `older` seconds ago: downloads, drafts of refs and links."""
    store, paths = _store(repo), []
    links = [path for path in store.glob("snapshots/*/**/.*.tmp") if _DRAFT.fullmatch(path.name) and path.is_symlink()]
    for path in [*store.glob("blobs/.*.tmp"), *store.glob("refs/.*.tmp"), *store.glob("blobs/*.incomplete"), *links]:
        with suppress(FileNotFoundError):  # finished meanwhile
            if path.lstat().st_mtime <= time.time() - older:
                paths.append(path)
    return sorted(paths)


def json_files(repo: str, folder: str) -> dict[str, str]:
    """{name: a commit that has it} of the .json files of a folder of the repository in any cached commit."""
    found = sorted(_store(repo).glob(f"snapshots/*/{folder}/*.json"))
    return {path.name: path.relative_to(_store(repo) / "snapshots").parts[0] for path in found}
