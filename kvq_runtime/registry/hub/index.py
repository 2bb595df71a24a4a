"""Read and write kvq.json, the index of a Hub repository: its versions, aliases and events.

    {"schema": 1, "name": "...",
     "versions": {"1.2.0": {"sha256", "size", "about": {recipe, model, revision, corpus, corpus_digest}}},
     "aliases": {"production": "1.2.0"},
     "events": [...]}                      as in events.py, in order: the last one is the change of its commit

Versions and aliases follow from the events, and are written out for readers that do not fold them; a file in which the
two disagree is refused.

The git tag v1.2.0 stands at the commit that published 1.2.0, for people and `hf download`; no load depends on it. A
missing tag is created again. A tag that points to another commit has been moved, and is an error.

The Hub lists a large file's sha256 and size, so nothing is downloaded to compare them. Large files uploaded for a
commit that was never made are in no commit: the Hub does not show them, and removes them by its own rules.
"""

import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvq_runtime.artifact import header
from kvq_runtime.disk import files, strict_json
from kvq_runtime.errors import ArtifactError, Conflict
from kvq_runtime.registry import events
from kvq_runtime.registry.events import Publish, State, Version
from kvq_runtime.registry.hub import ask, cache, client
from kvq_runtime.registry.hub.ask import File
from kvq_runtime.registry.registry import Finding, Head

FILE = "kvq.json"
SCHEMA = 1
LIMIT = 16 << 20
_RECORDS = ("evaluations/", "signatures/")
ABOUT = {"recipe", "model", "revision", "corpus", "corpus_digest"}


def folder(version: str) -> str:
    """Return the folder of a version in its repository."""
    return f"versions/{version}"


def to_bytes(head: Head) -> bytes:
    """The bytes of kvq.json."""
    state = head.state
    return strict_json.record({
        "schema": SCHEMA,
        "name": state.name,
        "versions": _versions(state, head.about),
        "aliases": {alias: state.at(alias) for alias in state.aliases},
        "events": [event.to_json() for event in state.events],
    })  # fmt: skip


def from_bytes(data: bytes, name: str, where: str) -> Head:
    """Read kvq.json, which must be about this name; raises ArtifactError, beginning with `where`, otherwise."""
    try:
        return _read(data, name)
    except ArtifactError as error:
        raise ArtifactError(f"{where}: {FILE}: {error}") from None


def at(repo: str, commit: str) -> Head:
    """Read kvq.json of a repository, org/name, at a commit; nothing if the commit has none."""
    from huggingface_hub.errors import RemoteEntryNotFoundError

    name = repo.rpartition("/")[2]
    try:
        data = cache.content(repo, FILE, commit, LIMIT)
    except RemoteEntryNotFoundError:
        return Head(State(name), commit=commit)
    return replace(from_bytes(data, name, f"{repo} at {commit[:12]}"), commit=commit)


def main(repo: str) -> str:
    """The commit at the head of main, asked of the Hub; raises huggingface_hub's error if offline."""
    commit = ask.head(repo)
    cache.note_head(repo, commit)
    return commit


def main_or_last_known(repo: str) -> str:
    """`main`; offline, or with a warning if the Hub does not answer, the head that was last seen."""
    last = cache.last_head(repo)
    if last is not None and client.is_offline():
        return last
    try:
        return main(repo)
    except Exception as error:
        if last is None or client.retry_delay(error) is None:
            raise
        text = "the Hub did not answer; aliases and versions are as of its last answer"
        warnings.warn(f"{repo}: {text} ({client.redacted(error)})", stacklevel=5)
        return last


def _read(data: bytes, name: str) -> Head:
    if len(data) > LIMIT:
        raise ArtifactError(f"{len(data)} bytes; at most {LIMIT} are allowed")
    fields = strict_json.loads(data, "index")
    if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
        raise ArtifactError(f"expected schema {SCHEMA}, got {fields!r:.80}; a newer kvq may have written it")
    strict_json.keys(fields, {"schema", "name", "versions", "aliases", "events"}, "index")
    if fields["name"] != name or not isinstance(fields["events"], list) or not isinstance(fields["versions"], dict):
        raise ArtifactError(
            f"expected versions and events of {name}, got those of {fields['name']!r:.120}, or no lists"
        )
    state = events.fold(
        name, (events.from_json(event, number, name) for number, event in enumerate(fields["events"], 1))
    )
    about = {}
    for version, row in fields["versions"].items():
        strict_json.keys(row, {"sha256", "size", "about"}, f"version {version!r:.40}")
        about[version] = strict_json.keys(row["about"], ABOUT, f"about {version!r:.40}")
        header.check_summary(about[version])
    stated = fields["aliases"]
    if fields["versions"] != _versions(state, about) or stated != {alias: state.at(alias) for alias in state.aliases}:
        raise ArtifactError("versions or aliases contradict the events; somebody edited the file by hand")
    return Head(state, about)


def _versions(state: State, about: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {
        version.version: {"sha256": version.sha256, "size": version.size, "about": dict(about.get(version.version, {}))}
        for version in state.versions.values()
    }


# ---- tags ------------------------------------------------------------------------------------------------------------


def tag_of(version: Version) -> str:
    """The tag of a version."""
    return f"v{version.version}"


def ensure_tag(repo: str, version: Version, head: Head) -> None:
    """Create the tag of a published version if it is missing, else `check_tag`.

    head   main after the publication
    Warns if the tag cannot be set, since the version is published without it. Raises Conflict for a tag that points
    elsewhere, ArtifactError if no commit of main published the version.
    """
    tag = tag_of(version)
    try:
        target = ask.tags(repo).get(tag)
        if target is None:
            commit = head.commit if _ends_with(head, version) else publishing_commit(repo, version)
            if commit is None:
                text = f"no commit on main published {version.version}; the history of the repository was rewritten"
                raise ArtifactError(f"{repo}: {text}")
            client.api().create_tag(repo, tag=tag, revision=commit, exist_ok=True)
            return
    except ArtifactError:
        raise
    except Exception as error:
        text = f"{tag} was not set ({client.redacted(error)}); publish the same bytes again to set it"
        warnings.warn(f"{repo}: {text}", stacklevel=4)
        return
    check_tag(repo, version, target)


def check_tag(repo: str, version: Version, target: str) -> None:
    """Raise Conflict unless `target`, the commit a tag points to, published the version."""
    if not published_by(repo, version, target):
        tag = tag_of(version)
        raise Conflict(
            f"{repo}: tag {tag} was moved to {target[:12]}, which did not publish {version.version}. kvq.json on main "
            f"is unaffected and is what kvq reads; find out who moved the tag, then `hf repo tag delete {repo} {tag}` "
            "and publish again"
        )


def publishing_commit(repo: str, version: Version) -> str | None:
    """The commit of main that published a version; None if there is none."""
    published = f"publish {version.version}"
    found = (commit for commit, title in ask.commits(repo) if title == published)
    return next((commit for commit in found if published_by(repo, version, commit)), None)


def published_by(repo: str, version: Version, commit: str) -> bool:
    """True if the last event of kvq.json at a commit is this publication."""
    return _ends_with(at(repo, commit), version)


def _ends_with(head: Head, version: Version) -> bool:
    events = head.state.events
    change = events[-1].change if events else None
    return isinstance(change, Publish) and (change.version, change.sha256) == (version.version, version.sha256)


# ---- the repository beside its index ---------------------------------------------------------------------------------


def _named(head: Head) -> dict[str, tuple[str, int]]:
    """Every path that kvq.json names: {path: (sha256, size)}."""
    return {
        f"{folder(version.version)}/{file}": stated
        for version in head.state.versions.values()
        for file, stated in version.content.items()
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
    files.fault_point("hub.collected")


def check_files(repo: str, head: Head) -> list[Finding]:
    """Everything wrong with the files of a repository; unnamed files as notes."""
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


def check_tags(repo: str, head: Head) -> list[Finding]:
    """Everything wrong with its tags; those that are missing as notes."""
    findings = []
    with client.translate_errors(repo):
        targets = ask.tags(repo)
    for version in head.state.versions.values():
        tag = tag_of(version)
        if tag not in targets:
            findings.append(Finding("note", f"tag {tag} is missing", repo, "publish the same bytes again to create it"))
            continue
        try:
            with client.translate_errors(repo):
                check_tag(repo, version, targets[tag])
        except ArtifactError as error:
            advice = "kvq.json on main is what kvq reads; create the tag again"
            findings.append(Finding("fault", str(error), repo, advice))
    return findings
