"""Keep records about artifacts on a Hub, evaluations and signatures: files that are added and never changed.

<kind>/<artifact's sha256>/<record's sha256>.json
"""

from hashlib import sha256 as hash_of
from pathlib import PurePath

from kvq_runtime.disk import faults, files
from kvq_runtime.registry import evaluations, reference
from kvq_runtime.registry.hub import cache, client
from kvq_runtime.registry.registry import Kind


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
    """(path, content) of every record of an artifact at a commit."""
    from huggingface_hub.errors import RemoteEntryNotFoundError

    with client.translate_errors(repo):
        try:
            tree = client.api().list_repo_tree(repo, _folder(kind, sha256), revision=commit)
            paths = sorted(file.path for file in tree if file.path.endswith(".json"))
        except RemoteEntryNotFoundError:
            return []
        downloads = [(PurePath(path), client.download(repo, path, commit)) for path in paths]
    return [(path, files.read(file.resolve(), evaluations.LIMIT)) for path, file in downloads]


def read_cached(repo: str, kind: Kind, sha256: str) -> list[tuple[PurePath, bytes]]:
    """`read` from the cache, without a request: the records that any cached commit has."""
    folder = _folder(kind, sha256)
    paths = cache.json_files(repo, folder)
    return [(PurePath(folder, path.name), files.read(path.resolve(), evaluations.LIMIT)) for path in paths]


def _folder(kind: Kind, sha256: str) -> str:
    return f"{kind}/{reference.check_sha256(sha256)}"
