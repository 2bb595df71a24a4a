"""Read and add records about artifacts on a Hub, evaluations and signatures: <kind>/<sha256>/<sha256 of file>.json."""

from collections.abc import Mapping
from pathlib import PurePath

from kvq_runtime.disk import faults
from kvq_runtime.registry import evaluations, reference
from kvq_runtime.registry.hub import ask, cache, client

MAX_RECORDS = 1 << 12  # records of an artifact, of one kind
BYTES = 1 << 26  # of all of them


def add(repo: str, path: str, data: bytes) -> None:
    """Add a record in a commit. It contradicts nothing, so the commit names no parent."""
    from huggingface_hub import CommitOperationAdd

    kind, sha256, _ = path.split("/")
    message = f"add {kind[:-1]} of {sha256[:12]}"

    def commit() -> None:
        client.api().create_commit(repo, [CommitOperationAdd(path, data)], commit_message=message)

    with client.translate_errors(repo):
        client.check_online(repo)
        client.retry(commit)
    faults.point("hub.recorded")


def read(repo: str, folder: str, commit: str) -> list[tuple[PurePath, bytes]]:
    """(path, content) of every record in a folder at a commit; RuntimeError for too many."""
    from huggingface_hub.errors import RemoteEntryNotFoundError

    with client.translate_errors(repo):
        try:
            found = ask.tree(repo, commit, folder)
        except RemoteEntryNotFoundError:
            return []
        return contents(repo, folder, {PurePath(path).name: commit for path in found if path.endswith(".json")})


def contents(repo: str, folder: str, names: Mapping[str, str]) -> list[tuple[PurePath, bytes]]:
    """Records by {file name: a commit that has it}; a file that is not named by a digest is none."""
    found, left = [], BYTES
    for name, commit in sorted(names.items()):
        digest, path = name.removesuffix(".json"), f"{folder}/{name}"
        if reference.is_sha256(digest):
            found.append((PurePath(path), cache.content(repo, path, commit, evaluations.LIMIT, digest)))
            left -= len(found[-1][1])
        if left < 0 or len(found) > MAX_RECORDS:
            raise RuntimeError(
                f"{repo}/{folder}: more than {MAX_RECORDS} records or {BYTES} bytes of them; remove some there"
            )
    return found
