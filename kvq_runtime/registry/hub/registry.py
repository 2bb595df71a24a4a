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

from collections.abc import Callable, Mapping
from hashlib import sha256 as hash_of
from pathlib import Path, PurePath
from typing import Any

from kvq_runtime.artifact import stated
from kvq_runtime.disk import faults, files
from kvq_runtime.errors import NotFound
from kvq_runtime.registry import reference
from kvq_runtime.registry.events import Change, State, Version
from kvq_runtime.registry.hub import ask, cache, client, records, snapshot, tags
from kvq_runtime.registry.hub.commit import commit_change
from kvq_runtime.registry.hub.index import ARTIFACT, folder
from kvq_runtime.registry.hub.snapshot import Snapshot
from kvq_runtime.registry.lock import Lock
from kvq_runtime.registry.registry import Kind, Registry, prepare_publish


class HubRegistry(Registry):
    """A registry in an organization or user account of a Hub.

    org       the organization or user
    private   whether repositories that a publish creates are private; None is the Hub's default
    Every request may raise NotFound, PermissionError or RuntimeError: see `client.translate_errors`.
    """

    def __init__(self, org: str, private: bool | None = None):
        self.org, self.private = reference.check_org(org), private
        self._snapshots: dict[str, Snapshot] = {}  # last read of each name

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

    def _hint(self, name: str) -> str:
        return "its repository has no kvq.json; kvq push and kvq-calibrate --push publish there"

    def last_commit(self, name: str) -> str:
        """The commit of main that was last read of a name; "" before the first read."""
        return (self._snapshots[name].commit or "") if name in self._snapshots else ""

    # ---- reading

    def state(self, name: str) -> State:
        """The state according to kvq.json on main; offline, according to the commit that was last read."""
        return self._read(name).state

    def state_at(self, name: str, commit: str) -> State:
        """The state according to kvq.json at a commit; NotFound if the commit has none."""
        state = self._read(name, commit).state
        if not state.events:
            raise NotFound(f"{self.repo(name)} has no kvq.json at commit {commit}; kvq history {name} lists versions")
        return state

    def current_state(self, name: str) -> State:
        """The state according to kvq.json on main, never from the cache alone; empty without a repository."""
        with client.translate_errors(self.repo(name)):
            return self.look(name).state

    def about(self, name: str, version: Version) -> dict[str, Any]:
        """Recipe, model and corpus of a version, from kvq.json."""
        head = self._snapshots.get(name)
        if head is None or version.version not in head.index.about:
            head = self._read(name)
        return dict(head.index.about[version.version])

    def look(self, name: str) -> Snapshot:
        """Main, asked of the Hub; raises huggingface_hub's errors, but not for a missing repository."""
        from huggingface_hub.errors import RepositoryNotFoundError

        repo = self.repo(name)
        try:
            return self._read(name, snapshot.head(repo))
        except RepositoryNotFoundError:
            return snapshot.missing(repo)

    def _read(self, name: str, commit: str = "") -> Snapshot:
        """The snapshot at a commit, or of main; one request if the cache has kvq.json and main has not moved."""
        repo = self.repo(name)
        with client.translate_errors(repo):
            self._snapshots[name] = head = snapshot.read(repo, commit or snapshot.head_or_last_known(repo))
        return head

    def check_writable(self) -> None:
        """Ask the Hub who the token belongs to; raise PermissionError if it may not write here."""
        ask.check_writable(self.org)

    def pinned_file(self, lock: Lock) -> Path | None:
        """The file that a lock pins if the cache has it, without a request; else None."""
        return cache.blob(self.repo(lock.name), lock.sha256, lock.size)

    def fetch(self, name: str, version: Version) -> Path:
        """A version's file, from the cache or downloaded; only a download's digest is checked here."""
        path = cache.blob(self.repo(name), version.sha256, version.size)
        return path or self._download(name, f"{folder(version.version)}/{ARTIFACT}", version.sha256, version.size)

    def fetch_verified(self, name: str, version: Version) -> Path:
        """`fetch`, with the digest of a cached file checked; a damaged one is downloaded again."""
        return self._whole(name, f"{folder(version.version)}/{ARTIFACT}", version.sha256, version.size)

    def attachments(self, name: str, version: Version) -> dict[str, bytes]:
        """The files published with a version, by name."""
        contents = {}
        for file, entry in version.files.items():
            path = self._whole(name, f"{folder(version.version)}/{file}", entry["sha256"], entry["size"])
            contents[file] = files.read(path, entry["size"])
        return contents

    def _whole(self, name: str, file: str, sha256: str, size: int) -> Path:
        """A file from the cache if its digest is right there, else downloaded."""
        path = cache.blob(self.repo(name), sha256, size)
        if path is not None and files.digest(path) == (sha256, size):
            return path
        return self._download(name, file, sha256, size)

    def _download(self, name: str, file: str, sha256: str, size: int) -> Path:
        commit = self.last_commit(name) or self._read(name).commit
        with client.translate_errors(self.repo(name)):
            return cache.download(self.repo(name), file, commit or "", size, sha256)

    # ---- changing

    def change(self, name: str, decide: Callable[[State], Change | None]) -> State:
        """Make one change without files, as one commit."""
        return self._commit(name, decide, {}, {}).state

    def _commit(
        self, name: str, decide: Callable[[State], Change | None], content: Mapping[str, bytes], about: dict[str, Any]
    ) -> Snapshot:
        return commit_change(self.repo(name), lambda: self.look(name), decide, content, about, self.private)

    def publish(
        self, name: str, data: bytes, version: str | None = None, attachments: Mapping[str, bytes] | None = None
    ) -> Version:
        """Publish in one commit: artifact, attachments, card and kvq.json; then set the tag."""
        attachments = attachments or {}
        artifact, decide = prepare_publish(self, data, version, attachments)
        about = stated.summary({"recipe": {"name": artifact.recipe.name}, "provenance": artifact.provenance})
        self._snapshots[name] = head = self._commit(name, decide, {ARTIFACT: data, **attachments}, about)
        published = head.state.with_digest(hash_of(data).hexdigest())
        assert published is not None, "the change that was committed is in the state"
        self._ensure_tag(name, published, head)
        return published

    def finish_publish(self, name: str, version: Version) -> None:
        """Set the tag of a published version if it is missing."""
        with client.translate_errors(self.repo(name)):
            self._ensure_tag(name, version, self.look(name))

    def _ensure_tag(self, name: str, version: Version, head: Snapshot) -> None:
        with client.translate_errors(self.repo(name)):
            tags.ensure(self.repo(name), version, head)
        faults.point("hub.tagged")

    # ---- records

    def add_record(self, kind: Kind, sha256: str, data: bytes, name: str) -> str:
        """Add a record in a commit; returns its digest."""
        digest = records.add(self.repo(name), kind, sha256, data)
        self._snapshots.pop(name, None)  # main has moved
        return digest

    def records(self, kind: Kind, sha256: str, name: str) -> list[tuple[PurePath, bytes]]:
        """(path, content) of every record of an artifact on main; offline, of those in the cache."""
        if client.is_offline():
            return records.read_cached(self.repo(name), kind, sha256)
        commit = self.last_commit(name) or self._read(name).commit or ""
        return records.read(self.repo(name), kind, sha256, commit)
