"""Check repositories on a Hub, and remove files that their kvq.json does not name.

The Hub lists a large file's sha256 and size, so nothing is downloaded to compare them. Large files uploaded for a
commit that was never made are in no commit: the Hub does not show them, and removes them by its own rules.
"""

import time
from collections.abc import Mapping

from kvq_runtime.disk import faults
from kvq_runtime.errors import ArtifactError, Conflict
from kvq_runtime.registry.hub import ask, client, index
from kvq_runtime.registry.hub.ask import File
from kvq_runtime.registry.hub.index import folder
from kvq_runtime.registry.reference import ARTIFACT_FILE
from kvq_runtime.registry.registry import Finding, Head

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


def collect(repo: str, head: Head, grace: float, dry_run: bool, removed: dict[str, None]) -> None:
    """Remove unnamed files older than `grace` seconds, in one commit on top of the head; `removed` gets their paths."""
    from huggingface_hub import CommitOperationDelete

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


def examine(repo: str, head: Head) -> list[Finding]:
    """Everything wrong with the files and tags of a repository; unnamed files as notes."""
    return _check_files(repo, head) + _check_tags(repo, head)


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
        tag = index.tag_of(version)
        if tag not in targets:
            findings.append(Finding("note", f"tag {tag} is missing", repo, "publish the same bytes again to create it"))
            continue
        try:
            with client.translate_errors(repo):
                index.check_tag(repo, version, targets[tag])
        except ArtifactError as error:
            advice = "kvq.json on main is what kvq reads; create the tag again"
            findings.append(Finding("fault", str(error), repo, advice))
    return findings
