"""Keep repositories on a Hub in order: find what is wrong with them, and remove what kvq.json does not name.

The Hub lists a large file's sha256 and size, so that nothing is downloaded to compare them. Large files that were
uploaded for a commit that never came are in no commit: the Hub does not show them, and removes them by its own rules.
"""

import time

from kvq_runtime import faults
from kvq_runtime.errors import ArtifactError, Conflict
from kvq_runtime.registries import hub_api, hub_cache, hub_index, hub_tags
from kvq_runtime.registries.hub import HubRegistry
from kvq_runtime.registries.hub_index import ARTIFACT, Seen, folder
from kvq_runtime.registries.upkeep import GRACE, Finding

_RECORDS = ("evaluations/", "signatures/")


def _named(seen: Seen) -> dict[str, tuple[str, int]]:
    """Every path that kvq.json names: {path: (sha256, size)}."""
    found = {}
    for version in seen.index.state.versions.values():
        place = folder(version.version)
        found[f"{place}/{ARTIFACT}"] = (version.sha256, version.size)
        found |= {f"{place}/{file}": (entry["sha256"], entry["size"]) for file, entry in version.files.items()}
    return found


def _tree(registry: HubRegistry, name: str, seen: Seen) -> dict:
    """The files of a repository at what was seen of it, by path."""
    repo = registry.repo(name)
    with hub_api.asking(repo):
        files = hub_api.api().list_repo_tree(repo, recursive=True, expand=True, revision=seen.commit)
        return {file.path: file for file in files if hasattr(file, "blob_id")}


def _unnamed(tree: dict, seen: Seen) -> list[str]:
    """Files of versions that there are not, and records about artifacts that there are not."""
    named, known = _named(seen), {version.sha256 for version in seen.index.state.versions.values()}
    found = [path for path in tree if path.startswith(("versions/", *_RECORDS)) and path not in named]
    return sorted(path for path in found if not (path.startswith(_RECORDS) and path.split("/")[1] in known))


def collect(registry: HubRegistry, grace: float = GRACE, dry_run: bool = False) -> list[str]:
    """Remove files under versions/, evaluations/ and signatures/ that nothing names and that are older than `grace`.

    One commit a repository, on what was read: if another commit came first nothing is removed (Conflict). What killed
    processes left half written in this machine's cache goes too.
    """
    removed: dict[str, None] = {}  # in order; a commit whose answer was lost is found done when it is tried again
    for name in registry.names():
        with hub_api.asking(registry.repo(name)):
            hub_api.patiently(lambda name=name: _collect(registry, name, grace, dry_run, removed))
        for path in hub_cache.drafts(registry.repo(name), older=grace):
            removed[str(path)] = None
            if not dry_run:
                path.unlink(missing_ok=True)
    return list(removed)


def _collect(registry: HubRegistry, name: str, grace: float, dry_run: bool, removed: dict[str, None]) -> None:
    from huggingface_hub import CommitOperationDelete

    repo, seen = registry.repo(name), registry.look(name)
    tree = _tree(registry, name, seen)
    old = [path for path in _unnamed(tree, seen) if tree[path].last_commit.date.timestamp() <= time.time() - grace]
    removed.update(dict.fromkeys(f"{repo}/{path}" for path in old))
    if not old or dry_run:
        return
    try:
        operations = [CommitOperationDelete(path) for path in old]
        api = hub_api.api()
        api.create_commit(repo, operations, commit_message="remove unnamed files", parent_commit=seen.commit)
    except Exception as error:
        if hub_api.status(error) not in (409, 412):
            raise
        raise Conflict(f"{repo}: somebody changed it first; nothing was removed, say it again") from None
    faults.point("hub.collected")


def examine(registry: HubRegistry) -> list[Finding]:
    """Everything wrong with index, files and tags of every name; unnamed files as notes."""
    found = []
    for name in registry.names():
        try:
            with hub_api.asking(registry.repo(name)):
                seen = registry.look(name)
        except ArtifactError as error:
            advice = "restore it from an earlier commit; artifacts are where they were"
            found.append(Finding("fault", str(error), f"{registry.repo(name)}/{hub_index.FILE}", advice))
            continue
        tree = _tree(registry, name, seen)
        found += _files(registry, name, seen, tree) + _tags(registry, name, seen)
    return found


def _files(registry: HubRegistry, name: str, seen: Seen, tree: dict) -> list[Finding]:
    repo, found = registry.repo(name), []
    for path, (sha256, size) in _named(seen).items():
        file = tree.get(path)
        again = "restore the file from an earlier commit, or yank the version"
        if file is None:
            found.append(Finding("fault", "file is missing", f"{repo}/{path}", again))
        elif file.size != size or (file.lfs and file.lfs.sha256 != sha256):
            found.append(Finding("fault", "file is not the one that was published", f"{repo}/{path}", again))
    note = "no event names it", "kvq gc removes it when it is old"
    return found + [Finding("note", note[0], f"{repo}/{path}", note[1]) for path in _unnamed(tree, seen)]


def _tags(registry: HubRegistry, name: str, seen: Seen) -> list[Finding]:
    repo, found = registry.repo(name), []
    with hub_api.asking(repo):
        there = {one.name: one.target_commit for one in hub_api.api().list_repo_refs(repo).tags}
    for version in seen.index.state.versions.values():
        tag = f"v{version.version}"
        if tag not in there:
            advice = "publish the same bytes again: that makes it again"
            found.append(Finding("note", f"tag {tag} is missing", repo, advice))
            continue
        try:
            with hub_api.asking(repo):
                hub_tags.check(registry, name, version, there[tag])
        except ArtifactError as error:
            found.append(Finding("fault", str(error), repo, "kvq.json on main counts; make the tag again"))
    return found
