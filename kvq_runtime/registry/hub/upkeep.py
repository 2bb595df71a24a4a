"""Check repositories on a Hub, and remove files that their kvq.json does not name.

The Hub lists a large file's sha256 and size, so nothing is downloaded to compare them. Large files uploaded for a
commit that was never made are in no commit: the Hub does not show them, and removes them by its own rules.
"""

import time
from collections.abc import Mapping

from kvq_runtime.disk import faults
from kvq_runtime.errors import ArtifactError, Conflict
from kvq_runtime.registry.hub import ask, cache, client, index, tags
from kvq_runtime.registry.hub.ask import File
from kvq_runtime.registry.hub.index import folder
from kvq_runtime.registry.hub.registry import HubRegistry
from kvq_runtime.registry.place import GRACE, Finding, Head
from kvq_runtime.registry.reference import ARTIFACT_FILE

_RECORDS = ("evaluations/", "signatures/")


def _named(head: Head) -> dict[str, tuple[str, int]]:
    """Every path that kvq.json names: {path: (sha256, size)}."""
    return {
        f"{folder(version.version)}/{file}": version.file(file)
        for version in head.state.versions.values()
        for file in (ARTIFACT_FILE, *version.files)
    }


def _tree(repo: str, head: Head) -> dict[str, File]:
    """The files of a repository at a commit, by path; none without a repository."""
    with client.translate_errors(repo):
        return ask.tree(repo, head.commit, times=True) if head.commit else {}


def _unnamed(tree: Mapping[str, File], head: Head) -> list[str]:
    """Files of unknown versions, and records about unknown artifacts."""
    named, artifacts = _named(head), {version.sha256 for version in head.state.versions.values()}
    paths = [path for path in tree if path.startswith(("versions/", *_RECORDS)) and path not in named]
    return sorted(path for path in paths if not (path.startswith(_RECORDS) and path.split("/")[1] in artifacts))


def collect(registry: HubRegistry, grace: float = GRACE, dry_run: bool = False) -> list[str]:
    """Remove files under versions/, evaluations/ and signatures/ that nothing names and that are older than `grace`.

    grace     seconds
    dry_run   change nothing
    Returns what was removed, or with `dry_run` would be. One commit a repository, on top of the commit that was read:
    if another commit came first nothing is removed (Conflict). Files that killed processes left half written in this
    machine's cache are removed too.
    """
    removed: dict[str, None] = {}  # in order; a commit whose answer was lost is noticed by the retry, and counted once
    for name in registry.names():
        repo = registry.repo(name)
        with client.translate_errors(repo):
            client.retry(lambda name=name: _collect(registry, name, grace, dry_run, removed))
        for path in cache.unfinished(repo, older=grace):
            removed[str(path)] = None
            if not dry_run:
                path.unlink(missing_ok=True)
    return list(removed)


def _collect(registry: HubRegistry, name: str, grace: float, dry_run: bool, removed: dict[str, None]) -> None:
    from huggingface_hub import CommitOperationDelete

    repo, head = registry.repo(name), registry.look(name)
    tree = _tree(repo, head)
    old = [path for path in _unnamed(tree, head) if tree[path].at <= time.time() - grace]
    removed.update(dict.fromkeys(f"{repo}/{path}" for path in old))
    if not old or dry_run:
        return
    try:
        operations = [CommitOperationDelete(path) for path in old]
        api = client.api()
        api.create_commit(repo, operations, commit_message="remove unnamed files", parent_commit=head.commit)
    except Exception as error:
        if client.http_status(error) not in (409, 412):
            raise
        raise Conflict(f"{repo}: somebody changed it first; nothing was removed, retry") from None
    faults.point("hub.collected")


def examine(registry: HubRegistry) -> list[Finding]:
    """Everything wrong with index, files and tags of every name; unnamed files as notes."""
    findings = []
    for name in registry.names():
        repo = registry.repo(name)
        try:
            with client.translate_errors(repo):
                head = registry.look(name)
        except ArtifactError as error:
            advice = "restore it from an earlier commit; the artifacts are not affected"
            findings.append(Finding("fault", str(error), f"{repo}/{index.FILE}", advice))
            continue
        findings += _check_files(repo, head) + _check_tags(repo, head)
    return findings


def _check_files(repo: str, head: Head) -> list[Finding]:
    tree, findings = _tree(repo, head), []
    for path, (sha256, size) in _named(head).items():
        file = tree.get(path)
        advice = "restore the file from an earlier commit, or yank the version"
        if file is None:
            findings.append(Finding("fault", "file is missing", f"{repo}/{path}", advice))
        elif file.size != size or file.sha256 not in (None, sha256):
            findings.append(Finding("fault", "file is not the one that was published", f"{repo}/{path}", advice))
    note, advice = "no event names it", "kvq gc removes it when it is old"
    return findings + [Finding("note", note, f"{repo}/{path}", advice) for path in _unnamed(tree, head)]


def _check_tags(repo: str, head: Head) -> list[Finding]:
    findings = []
    with client.translate_errors(repo):
        targets = ask.tags(repo)
    for version in head.state.versions.values():
        tag = tags.name_of(version)
        if tag not in targets:
            findings.append(Finding("note", f"tag {tag} is missing", repo, "publish the same bytes again to create it"))
            continue
        try:
            with client.translate_errors(repo):
                tags.check(repo, version, targets[tag])
        except ArtifactError as error:
            advice = "kvq.json on main is what kvq reads; create the tag again"
            findings.append(Finding("fault", str(error), repo, advice))
    return findings
