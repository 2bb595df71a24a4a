"""Keep artifacts on a Hugging Face Hub: one model repository a name, one commit a change.

    kvq.json                                        versions, aliases and events: see index.py
    versions/1.2.0/kvq.safetensors                  a version's artifact
    versions/1.2.0/README.md, ...                   its attachments: card and plots
    README.md                                       the newest version's card, which the Hub shows
    evaluations/<sha256>/<sha256 of file>.json      measurements of an artifact, added later; signatures/ likewise

A version exists if and only if kvq.json on main has it. A change is one commit whose parent is the commit that was
read; if another commit came first the Hub refuses it. A publish then decides again; a promote ends in a Conflict. If no
answer came, main is read before anything is tried again: the event is in it or it is not. The git tag v1.2.0 is a
convenience.
"""

import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from kvq_runtime.disk import files
from kvq_runtime.errors import ArtifactError, Conflict
from kvq_runtime.registry import card, evaluation_records, reference
from kvq_runtime.registry.events import Event, Promote, Publish, Rollback, State, Version
from kvq_runtime.registry.hub import ask, cache, client, index
from kvq_runtime.registry.lock import Lock
from kvq_runtime.registry.reference import ARTIFACT_FILE, GRACE
from kvq_runtime.registry.registry import Finding, Head, Registry

_INITIAL_FILES = {".gitattributes", "README.md", "LICENSE"}  # the Hub's form for a new repository may create these


class HubRegistry(Registry):
    """A registry in an organization or user account of a Hub.

    org       the organization or user
    private   whether repositories that a publish creates are private; None is the Hub's default
    Every request may raise NotFound, PermissionError or RuntimeError: see `client.translate_errors`.
    """

    moves_again = False  # the head that is read may lag behind

    def __init__(self, org: str, private: bool | None = None):
        self.org, self.private = reference.check_org(org), private
        self._heads: dict[str, Head] = {}  # last read of each name

    @property
    def url(self) -> str:
        """Its address, hf://org."""
        return f"hf://{self.org}"

    def repo(self, name: str) -> str:
        """The repository of a name."""
        return f"{self.org}/{self.check_name(name)}"

    def check_name(self, name: str) -> str:
        """The name, if a Hub accepts it as the name of a repository; else a ValueError."""
        return reference.check_hub_name(name)

    def names(self) -> list[str]:
        """Every name: models of the organization whose card has the tag kvq, as the Hub's search lists them now."""
        if client.is_offline():
            raise RuntimeError(
                f"{self.url}: offline (HF_HUB_OFFLINE), and only the Hub lists its names; name one to show"
            )
        with client.translate_errors(f"{self.org}/*"):
            return sorted(name for name in ask.names(self.org) if reference.is_name(name))

    def hint(self, name: str) -> str:
        """Return the end of the message about a missing name."""
        return "its repository has no kvq.json; kvq copy and kvq-calibrate --push publish there"

    def last_commit(self, name: str) -> str:
        """The commit of main that was last read of a name; "" before the first read."""
        return (self._heads[name].commit or "") if name in self._heads else ""

    # ---- reading

    def look(self, name: str) -> Head:
        """Main, asked of the Hub; empty without a repository."""
        from huggingface_hub.errors import RepositoryNotFoundError

        repo = self.repo(name)
        with client.translate_errors(repo):
            try:
                self._heads[name] = head = index.at(repo, index.main(repo))
            except RepositoryNotFoundError:
                return Head(State(name))
        return head

    def read(self, name: str, commit: str = "") -> Head:
        """kvq.json at a commit, or of main; one request if the cache has it and main has not moved, none offline."""
        repo = self.repo(name)
        with client.translate_errors(repo):
            self._heads[name] = head = index.at(repo, commit or index.main_or_last_known(repo))
        return head

    def about(self, name: str, version: Version) -> dict[str, Any]:
        """Recipe, model and corpus of a version, from kvq.json."""
        head = self._heads.get(name)
        if head is None or version.version not in head.about:
            head = self.read(name)
        return dict(head.about[version.version])

    def check_writable(self) -> None:
        """Ask the Hub who the token belongs to; raise PermissionError if it may not write here."""
        ask.check_writable(self.org)

    def pinned_file(self, lock: Lock) -> Path | None:
        """The file that a lock pins if the cache has it, without a request; else None."""
        return self.cached(lock.name, lock.sha256, lock.size)

    def cached(self, name: str, sha256: str, size: int) -> Path | None:
        """A file in the cache, of whatever commit."""
        return cache.blob(self.repo(name), sha256, size)

    def fetch(self, name: str, version: Version, file: str = ARTIFACT_FILE) -> Path:
        """A file of a version, from the cache or downloaded; whoever reads it checks its digest."""
        return self.cached(name, *version.content[file]) or self.download(name, version, file)

    def fetch_verified(self, name: str, version: Version, file: str = ARTIFACT_FILE) -> Path:
        """`fetch`, with the digest of a cached file checked; a damaged one is downloaded again."""
        path = self.cached(name, *version.content[file])
        whole = path is not None and files.digest(path) == version.content[file]
        return path if path is not None and whole else self.download(name, version, file)

    def download(self, name: str, version: Version, file: str) -> Path:
        """Receive a file at the commit that was last read."""
        sha256, size = version.content[file]
        with client.translate_errors(self.repo(name)):
            path = f"{index.folder(version.version)}/{file}"
            return cache.download(self.repo(name), path, self._commit(name), size, sha256)

    def _commit(self, name: str) -> str:
        return self.last_commit(name) or self.read(name).commit or ""

    def listed(self, name: str, folder: str) -> Iterator[tuple[PurePath, bytes]]:
        """(path, content) of every record of a folder on main; offline, of those in the cache."""
        repo = self.repo(name)
        with client.translate_errors(repo):
            offline = client.is_offline()
            found = cache.json_files(repo, folder) if offline else _json_files(repo, folder, self._commit(name))
            for file in sorted(found):
                sha256, path = file.removesuffix(".json"), f"{folder}/{file}"
                if reference.is_sha256(sha256):  # else it is no record
                    yield PurePath(path), cache.content(repo, path, found[file], evaluation_records.LIMIT, sha256)

    # ---- changing

    def write(
        self, head: Head, after: State, content: Mapping[str, bytes], about: Mapping[str, Any], unanswered: list[Event]
    ) -> Head | None:
        """Commit an event, and with a publish its files and card, on top of the commit that was read."""
        repo, event = self.repo(after.name), after.events[-1]
        if head.commit is None:
            with client.translate_errors(repo):
                client.retry(lambda: client.api().create_repo(repo, private=self.private, exist_ok=True))
            files.fault_point("hub.created")
            return None
        if not head.state.events:
            _check_unused(repo, head.commit)
        try:
            self._heads[after.name] = written = _commit(repo, head, after, content, about)
            return written
        except Exception as error:
            delay = client.retry_delay(error)
            if client.http_status(error) in (409, 412):
                time.sleep(random.uniform(0.05, 0.5))
            elif delay is not None and delay <= client.MAX_WAIT and len(unanswered) < client.TRIES - 1:
                client.back_off(len(unanswered), delay)
                unanswered.append(event)
            else:
                with client.translate_errors(repo):
                    raise
        return None

    def finish(self, name: str, version: Version | None = None, content: Mapping[str, bytes] | None = None) -> None:
        """Set the tag of a published version if it is missing."""
        if version is None:
            return
        repo = self.repo(name)
        with client.translate_errors(repo):
            index.ensure_tag(repo, version, self._heads[name] if content else self.look(name))
        files.fault_point("hub.tagged")

    def add(self, name: str, path: str, data: bytes) -> None:
        """Add a record in a commit. It contradicts nothing, so the commit names no parent."""
        from huggingface_hub import CommitOperationAdd

        repo, (kind, sha256, _) = self.repo(name), path.split("/")
        message = f"add {kind[:-1]} of {sha256[:12]}"

        def commit() -> None:
            client.api().create_commit(repo, [CommitOperationAdd(path, data)], commit_message=message)

        with client.translate_errors(repo):
            client.check_online(repo)
            client.retry(commit)
        files.fault_point("hub.recorded")
        self._heads.pop(name, None)  # main has moved

    # ---- upkeep

    def collect(self, grace: float = GRACE, dry_run: bool = False) -> list[str]:
        """Remove files under versions/, evaluations/ and signatures/ that nothing names, older than `grace` seconds.

        One commit a repository, on top of the commit that was read: if another commit came first nothing is removed
        (Conflict). Files that killed processes left half written in this machine's cache are removed too.
        """
        removed: dict[str, None] = {}  # in order; a commit whose answer was lost is noticed by the retry, counted once
        for name in self.names():
            repo = self.repo(name)
            with client.translate_errors(repo):
                client.retry(lambda r=repo, n=name: index.collect(r, self.look(n), grace, dry_run, removed))
            for path in cache.unfinished(repo, older=grace):
                removed[str(path)] = None
                if not dry_run:
                    path.unlink(missing_ok=True)
        return list(removed)

    def examine(self) -> list[Finding]:
        """Everything wrong with index, files and tags of every name; unnamed files as notes."""
        findings = []
        for name in self.names():
            repo = self.repo(name)
            try:
                head = self.look(name)
            except ArtifactError as error:
                advice = "restore it from an earlier commit; the artifacts are not affected"
                findings.append(Finding("fault", str(error), f"{repo}/{index.FILE}", advice))
                continue
            findings += index.check_files(repo, head) + index.check_tags(repo, head)
        return findings


def _check_unused(repo: str, commit: str) -> None:
    """Raise Conflict for a repository without kvq.json that holds anything but a new repository's files."""
    with client.translate_errors(repo):
        others = sorted(ask.tree(repo, commit).keys() - _INITIAL_FILES)
    if others:
        raise Conflict(
            f"{repo} has no kvq.json, but {others[0]} and {len(others) - 1} other files: it is somebody else's, or its "
            "kvq.json was deleted; restore that, or choose another name"
        )


def _commit(repo: str, head: Head, after: State, content: Mapping[str, bytes], about: Mapping[str, Any]) -> Head:
    from huggingface_hub import CommitOperationAdd

    event, written = after.events[-1], replace(head, state=after)
    added: dict[str, bytes] = {}
    if isinstance(event.change, Publish):
        place = index.folder(event.change.version)
        written = replace(written, about={**head.about, event.change.version: about})
        added |= {f"{place}/{file}": data for file, data in content.items()}
        text = content.get("README.md", f"# {event.name}\n".encode()).decode(errors="replace")
        added["README.md"] = card.for_repository(text, content, place).encode()
    added[index.FILE] = index.to_bytes(written)
    operations = [CommitOperationAdd(path, data) for path, data in added.items()]
    alias = f"{event.change.alias} " if isinstance(event.change, (Promote, Rollback)) else ""
    title = f"{event.change.kind} {alias}{event.change.version}"
    api = client.api()
    api.preupload_lfs_files(repo, operations, free_memory=False)
    files.fault_point("hub.uploaded")
    commit = api.create_commit(repo, operations, commit_message=title, parent_commit=head.commit)
    files.fault_point("hub.committed")
    return replace(written, commit=reference.check_commit(commit.oid))


def _json_files(repo: str, folder: str, commit: str) -> dict[str, str]:
    """{name: the commit} of the .json files of a folder at a commit."""
    from huggingface_hub.errors import RemoteEntryNotFoundError

    try:
        found = ask.tree(repo, commit, folder)
    except RemoteEntryNotFoundError:
        return {}
    return {PurePath(path).name: commit for path in found if path.endswith(".json")}
