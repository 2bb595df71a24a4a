"""Keep records about artifacts on a Hub, evaluations and signatures: files that are added and never changed.

<kind>/<artifact's sha256>/<record's sha256>.json
"""

from hashlib import sha256 as hash_of
from pathlib import PurePath

from kvq_runtime import faults, files, reference
from kvq_runtime.registries import evaluations, hub_api, hub_cache
from kvq_runtime.registries.changes import Kind


def add(repo: str, kind: Kind, sha256: str, data: bytes) -> str:
    """Add one, in a commit of its own: it contradicts nothing, so that it has no parent to insist on."""
    from huggingface_hub import CommitOperationAdd

    digest = hash_of(data).hexdigest()
    path, message = f"{_place(kind, sha256)}/{digest}.json", f"add {kind[:-1]} of {sha256[:12]}"

    def commit() -> None:
        hub_api.api().create_commit(repo, [CommitOperationAdd(path, data)], commit_message=message)

    with hub_api.asking(repo):
        hub_api.check_online(repo)
        hub_api.patiently(commit)
    faults.point("hub.recorded")
    return digest


def read(repo: str, kind: Kind, sha256: str, commit: str) -> list[tuple[PurePath, bytes]]:
    """Every record of an artifact at a commit."""
    from huggingface_hub.errors import RemoteEntryNotFoundError

    with hub_api.asking(repo):
        try:
            tree = hub_api.api().list_repo_tree(repo, _place(kind, sha256), revision=commit)
            paths = sorted(file.path for file in tree if file.path.endswith(".json"))
        except RemoteEntryNotFoundError:
            return []
        found = [(PurePath(path), hub_api.file(repo, path, commit)) for path in paths]
    return [(path, files.read(file.resolve(), evaluations.LIMIT)) for path, file in found]


def cached(repo: str, kind: Kind, sha256: str) -> list[tuple[PurePath, bytes]]:
    """Every record of an artifact that the cache has."""
    place = _place(kind, sha256)
    found = hub_cache.under(repo, place)
    return [(PurePath(place, path.name), files.read(path.resolve(), evaluations.LIMIT)) for path in found]


def _place(kind: Kind, sha256: str) -> str:
    return f"{kind}/{reference.check_sha256(sha256)}"
