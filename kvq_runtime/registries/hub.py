"""Keep artifacts on a Hugging Face Hub: one model repository a name, one commit a change.

    kvq.json                                        what there is: see hub_index.py
    versions/1.2.0/kvq.safetensors                  a version's artifact
    versions/1.2.0/README.md, ...                   its card and plots
    README.md                                       the newest version's card, which the Hub shows
    evaluations/<sha256>/<sha256 of file>.json      what was measured of an artifact later; signatures/ likewise

A version exists if and only if kvq.json on main has it. A change is one commit whose parent is the commit that was
read; if another came first the Hub refuses it. A publish then decides again; a promote stops and asks. When no answer
came, main is read before anything is tried again: the event is there or it is not. The git tag v1.2.0 is a convenience.
"""

import warnings
from collections.abc import Callable, Mapping
from hashlib import sha256 as hash_of
from pathlib import Path, PurePath
from typing import Any

from kvq_runtime import describe, faults, files, reference
from kvq_runtime.errors import ArtifactError
from kvq_runtime.reference import Lock
from kvq_runtime.registries import changes, hub_api, hub_cache, hub_change, hub_index, hub_records, hub_tags
from kvq_runtime.registries.changes import Kind, Registry
from kvq_runtime.registries.events import Change, State, Version
from kvq_runtime.registries.hub_index import ARTIFACT, Index, Seen, folder


class HubRegistry(Registry):
    """An organization or user of a Hub. `private`: repositories that a publish creates; None: as the Hub does."""

    def __init__(self, org: str, private: bool | None = None):
        self.org, self.private = reference.check_org(org), private
        self._seen: dict[str, Seen] = {}

    @property
    def url(self) -> str:
        """Its address, hf://org."""
        return f"hf://{self.org}"

    def repo(self, name: str) -> str:
        """The repository of a name."""
        return f"{self.org}/{reference.check_name(name)}"

    def names(self) -> list[str]:
        """Every name: models of the organization whose card has the tag kvq, as the Hub's own index has them now."""
        with hub_api.asking(f"{self.org}/*"):
            hub_api.check_online(self.url)
            found = [model.id.rpartition("/")[2] for model in hub_api.api().list_models(author=self.org, filter="kvq")]
        return sorted(name for name in found if reference.is_name(name))

    def _instead(self, name: str) -> str:
        return "its repository holds no kvq.json; kvq push and kvq-calibrate --push publish there"

    def commit(self, name: str) -> str:
        """The commit that was last read of a name."""
        return (self._seen[name].commit or "") if name in self._seen else ""

    # ---- reading

    def state(self, name: str) -> State:
        """What kvq.json on main adds up to; offline, what it was when it was last read."""
        return self._look(name).index.state

    def about(self, name: str, version: Version) -> dict[str, Any]:
        """What kvq.json says of a version."""
        seen = self._seen.get(name)
        if seen is None or version.version not in seen.index.about:
            seen = self._look(name)
        return dict(seen.index.about[version.version])

    def now(self, name: str) -> State:
        """What main says now."""
        with hub_api.asking(self.repo(name)):
            return self.look(name).index.state

    def look(self, name: str) -> Seen:
        """What main says now; no repository is no error. Never from the cache alone."""
        from huggingface_hub.errors import RepositoryNotFoundError

        repo = self.repo(name)
        try:
            return self._look(name, self._head(repo))
        except RepositoryNotFoundError:
            return Seen(None, Index(State(name)))

    def _head(self, repo: str) -> str:
        hub_api.check_online(repo)
        head = hub_api.patiently(lambda: hub_api.api().model_info(repo, expand=["sha"]).sha)
        if head is None:
            raise ArtifactError(f"{repo} has no commit; the Hub makes one with every repository, delete this one")
        hub_cache.note_read(repo, head)
        return head

    def _look(self, name: str, at: str = "") -> Seen:
        """kvq.json at a commit, or on main; one request where it is in the cache and has not changed."""
        repo = self.repo(name)
        with hub_api.asking(repo):
            self._seen[name] = seen = self.at(name, at or self._main(repo))
        return seen

    def at(self, name: str, commit: str) -> Seen:
        """What a commit says; a commit without kvq.json says that nothing is there."""
        from huggingface_hub.errors import RemoteEntryNotFoundError

        repo = self.repo(name)
        try:
            path = hub_api.file(repo, hub_index.FILE, commit)
        except RemoteEntryNotFoundError:
            return Seen(commit, Index(State(name)))
        data = files.read(path.resolve(), hub_index.LIMIT)
        return Seen(commit, hub_index.from_bytes(data, name, f"{repo} at {commit[:12]}"))

    def _main(self, repo: str) -> str:
        """The commit of main; where nobody can be asked, the one that was last read."""
        last = hub_cache.last_read(repo)
        if last is not None and hub_api.offline():
            return last
        try:
            return self._head(repo)
        except Exception as error:
            if last is None or hub_api.passing(error) is None:
                raise
            text = "the Hub could not be asked; aliases and versions are as they were when it last answered"
            warnings.warn(f"{repo}: {text} ({hub_api.redacted(error)})", stacklevel=5)
            return last

    def check_writable(self) -> None:
        """Ask who the token belongs to, and whether it may write here."""
        hub_api.check_writable(self.org)

    def held(self, lock: Lock) -> Path | None:
        """The pinned file, if it is in the cache: no request."""
        return hub_cache.artifact(self.repo(lock.name), lock.version, lock.sha256, lock.size)

    def fetch(self, name: str, version: Version) -> Path:
        """A version's file, from the cache or downloaded; what is downloaded must have the right digest."""
        found = hub_cache.artifact(self.repo(name), version.version, version.sha256, version.size)
        return found or self._download(name, f"{folder(version.version)}/{ARTIFACT}", version.sha256, version.size)

    def whole(self, name: str, version: Version) -> Path:
        """`fetch`, and again if the file was damaged where it lay."""
        found = self.fetch(name, version)
        if files.digest(found) == (version.sha256, version.size):
            return found
        found.unlink()
        return self.fetch(name, version)

    def beside(self, name: str, version: Version) -> dict[str, bytes]:
        """The files beside a version."""
        found = {}
        for file, entry in version.files.items():
            path = self._download(name, f"{folder(version.version)}/{file}", entry["sha256"], entry["size"])
            found[file] = files.read(path, entry["size"])
        return found

    def _download(self, name: str, file: str, sha256: str, size: int) -> Path:
        repo = self.repo(name)
        commit = self.commit(name) or self._look(name).commit or "main"
        found = ("", 0)
        for force in (False, True):  # a damaged file of the cache, or of the way here, is fetched once more
            with hub_api.asking(repo):
                path = hub_api.file(repo, file, commit, force).resolve()
            found = files.digest(path)
            if found == (sha256, size):
                return path
            path.unlink()
        raise ArtifactError(
            f"{repo}/{file}: sha256: the Hub sent {found[0]}, {found[1]} bytes; {sha256}, {size} bytes are expected, "
            "twice; nothing was kept"
        )

    # ---- changing

    def change(self, name: str, decide: Callable[[State], Change | None]) -> State:
        """Make one change that brings no file."""
        return hub_change.change(self, name, decide, {}, {}).index.state

    def publish(
        self, name: str, data: bytes, version: str | None = None, beside: Mapping[str, bytes] | None = None
    ) -> Version:
        """Publish in one commit: the artifact, the files beside it, the card, kvq.json; then the tag."""
        beside = beside or {}
        fitted, decide = changes.publication(self, data, version, beside)
        about = describe.summary({"recipe": {"name": fitted.recipe.name}, "provenance": fitted.provenance})
        self._seen[name] = after = hub_change.change(self, name, decide, {ARTIFACT: data, **beside}, about)
        found = changes.same(after.index.state, hash_of(data).hexdigest())
        assert found is not None, "the change that was committed is in the state"
        self._tag(name, found, after)
        return found

    def settle(self, name: str, version: Version) -> None:
        """Make the tag of a version that main has, if it is missing."""
        with hub_api.asking(self.repo(name)):
            self._tag(name, version, self.look(name))

    def _tag(self, name: str, version: Version, seen: Seen) -> None:
        with hub_api.asking(self.repo(name)):
            hub_tags.mend(self, name, version, seen)
        faults.point("hub.tagged")

    # ---- records

    def add_record(self, kind: Kind, sha256: str, data: bytes, name: str) -> str:
        """Add a record, in a commit of its own."""
        digest = hub_records.add(self.repo(name), kind, sha256, data)
        self._seen.pop(name, None)  # main has moved
        return digest

    def records(self, kind: Kind, sha256: str, name: str) -> list[tuple[PurePath, bytes]]:
        """Every record of an artifact, on main; offline, those of the cache."""
        if hub_api.offline():
            return hub_records.cached(self.repo(name), kind, sha256)
        return hub_records.read(self.repo(name), kind, sha256, self.commit(name) or self._look(name).commit or "main")
