"""Keep records about artifacts on a Hub, evaluations and signatures: files that are added and never changed.

<kind>/<artifact's sha256>/<record's sha256>.json
"""

from collections.abc import Mapping
from hashlib import sha256 as hash_of
from pathlib import PurePath

from kvq_runtime.disk import faults, files
from kvq_runtime.registry import evaluations, reference
from kvq_runtime.registry.hub import ask, cache, client
from kvq_runtime.registry.registry import Kind

MAX_RECORDS = 1 << 12  # records of an artifact, of one kind
BYTES = 1 << 26  # of all of them


def add(repo: str, kind: Kind, sha256: str, data: bytes) -> str:
    """Add a record in a commit, and return its digest. It contradicts nothing, so the commit names no parent."""
    from huggingface_hub import CommitOperationAdd

    digest = hash_of(data).hexdigest()
    path, message = f"{_folder(kind, sha256)}/{digest}.json", f"add {kind[:-1]} of {sha256[:12]}"

    def commit() -> None:
        client.api().create_commit(repo, [CommitOperationAdd(path, data)], commit_message=message)

    with client.translate_errors(repo):
        client.check_online(repo)
        client.retry(commit)
    faults.point("hub.recorded")
    return digest


def read(repo: str, kind: Kind, sha256: str, commit: str) -> list[tuple[PurePath, bytes]]:
    """(path, content) of every record of an artifact at a commit; RuntimeError for too many."""
    from huggingface_hub.errors import RemoteEntryNotFoundError

    folder = _folder(kind, sha256)
    with client.translate_errors(repo):
        try:
            found = ask.tree(repo, commit, folder)
        except RemoteEntryNotFoundError:
            return []
        names = {PurePath(path).name: commit for path in found if path.endswith(".json")}
        return _read(repo, folder, names)


def read_cached(repo: str, kind: Kind, sha256: str) -> list[tuple[PurePath, bytes]]:
    """`read` from the cache, without a request: the records that any cached commit has."""
    folder = _folder(kind, sha256)
    return _read(repo, folder, cache.json_files(repo, folder))


def _read(repo: str, folder: str, names: Mapping[str, str]) -> list[tuple[PurePath, bytes]]:
    """Records by {file name: a commit that has it}; a file that is not named by a digest is none."""
    found, left = [], BYTES
    for name, commit in sorted(names.items()):
        digest, path = name.removesuffix(".json"), f"{folder}/{name}"
        if reference.is_sha256(digest):
            data = cache.whole(repo, path, commit, evaluations.LIMIT)
            data = data or files.read(cache.download(repo, path, commit, evaluations.LIMIT, digest), evaluations.LIMIT)
            found.append((PurePath(path), data))
            left -= len(data)
        if left < 0 or len(found) > MAX_RECORDS:
            raise RuntimeError(
                f"{repo}/{folder}: more than {MAX_RECORDS} records or {BYTES} bytes of them; remove some there"
            )
    return found


def _folder(kind: Kind, sha256: str) -> str:
    return f"{kind}/{reference.check_sha256(sha256)}"
