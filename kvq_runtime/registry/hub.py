"""Keep artifacts on a Hugging Face Hub: one model repository a name, one commit a change.

    kvq.json                                        {"name", "events"}: see events.py
    versions/1.2.0/kvq.safetensors                  a version's artifact
    versions/1.2.0/README.md, ...                   its attachments: card and plots
    README.md                                       the newest version's card, which the Hub shows
    evaluations/<sha256>/<sha256 of file>.json      measurements of an artifact, added later; signatures/ likewise

A version exists if and only if kvq.json on main has it. A change is one commit whose parent is the commit that was
read. If another commit came first the Hub refuses it, and the change is decided again. If no answer came, main is read
before anything is tried again: the event is in it or it is not.
"""

import random
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path, PurePath
from typing import Any

from kvq_runtime.disk import files, strict_json
from kvq_runtime.errors import ArtifactError, Conflict, NotFound
from kvq_runtime.registry import events, hub_client, reference
from kvq_runtime.registry.events import Event, Promote, Publish, Rollback, State, Version
from kvq_runtime.registry.hub_client import Head
from kvq_runtime.registry.reference import ARTIFACT_FILE
from kvq_runtime.registry.registry import MAX_RECORD, Registry

INDEX = "kvq.json"
MAX_NAMES = 4096
_INITIAL_FILES = {".gitattributes", "README.md", "LICENSE"}  # the Hub's form for a new repository may create these


class HubRegistry(Registry):
    """A registry in an organization or user account of a Hub.

    org       the organization or user
    private   whether repositories that a publish creates are private; None is the Hub's default
    Every request may raise NotFound, PermissionError or RuntimeError: see `hub_client.call`.
    """

    access = "; a private or gated one needs `hf auth login`, or HF_TOKEN"

    def __init__(self, org: str, private: bool | None = None):
        self.org, self.private = reference.check_org(org), private
        self._heads: dict[str, Head] = {}  # last read of each name

    @property
    def url(self) -> str:
        """The address, hf://org."""
        return f"hf://{self.org}"

    def repo(self, name: str) -> str:
        """Return the repository of a name."""
        return f"{self.org}/{reference.check_name(name)}"

    def check_writable(self) -> None:
        """Raise PermissionError if the token may not write here; fine-grained tokens are not checked."""
        hub_client.check_online(self.url)
        if not hub_client.token():
            raise PermissionError(f"{self.url}: no token to write with: `hf auth login`, or set HF_TOKEN")
        user = hub_client.call(f"{self.org}/*", lambda api: api.whoami())
        owners = [user.get("name"), *(group.get("name") for group in user.get("orgs", []))]
        if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise PermissionError(f"{self.url}: the token is read-only; create one with write access")
        if self.org not in owners:
            raise PermissionError(f"{self.url}: {owners[0]} is not a member of it; ask to be added, or push elsewhere")

    # ---- reading

    def names(self) -> list[str]:
        """List the models of the organization whose card has the tag kvq, as the Hub's search knows them now."""
        if hub_client.is_offline():
            raise RuntimeError(f"{self.url}: offline (HF_HUB_OFFLINE), and only the Hub lists names; name one to show")
        listed = lambda api: islice(api.list_models(author=self.org, filter="kvq"), MAX_NAMES)  # noqa: E731
        pairs = hub_client.call(f"{self.org}/*", lambda api: [model.id.partition("/") for model in listed(api)])
        return sorted(name for owner, _, name in pairs if owner == self.org and reference.is_name(name))

    def state(self, name: str) -> State:
        """Return the state at the head of main, empty without a repository; offline, the last known one."""
        try:
            return self._parsed(name, self._ask(name))
        except NotFound:
            return State(name)

    def _ask(self, name: str) -> Head:
        """Ask for the head of main, and for kvq.json if the commit is new; NotFound without a repository."""
        repo, cached = self.repo(name), hub_client.load_head(self.org, name)
        if cached is not None and hub_client.is_offline():
            return cached
        ask = lambda api: api.model_info(repo, files_metadata=True, timeout=hub_client.SILENCE)  # noqa: E731
        head, git_digest = hub_client.call(repo, lambda api: _head(ask(api)))
        if cached is not None and cached.commit == head.commit:
            return cached
        if INDEX in head.files:
            try:
                data = hub_client.read(repo, INDEX, head.commit, head.files[INDEX], git_digest)
            except NotFound as error:  # a listed file, so that this is no new repository
                raise ArtifactError(str(error)) from None
            head = replace(head, index=data.decode(errors="replace"))
        return head

    def _parsed(self, name: str, head: Head) -> State:
        """Fold the events of a head, and remember it."""
        where = f"{self.repo(name)} at {head.commit[:12]}: {INDEX}"
        self._heads[name] = head
        state = State(name)
        if head.index:
            index = strict_json.loads(head.index, where)
            strict_json.keys(index, {"name", "events"}, where)
            if index["name"] != name or not isinstance(index["events"], list):
                raise ArtifactError(f"{where}: expected the events of {name}, got those of {index['name']!r:.120}")
            try:
                parsed = (events.from_json(event, number, name) for number, event in enumerate(index["events"], 1))
                state = events.fold(name, parsed)
            except ArtifactError as error:
                raise ArtifactError(f"{where}: {error}; restore it from an earlier commit") from None
        hub_client.save_head(self.org, name, head)
        state.commit = head.commit
        return state

    def fetch(self, name: str, version: Version, file: str = ARTIFACT_FILE) -> Path:
        """Return a file of a version, checked, from the cache or downloaded."""
        sha256, size = version.content[file]
        return self._fetch(name, f"versions/{version.version}/{file}", sha256, size)

    def _fetch(self, name: str, path: str, sha256: str, size: int) -> Path:
        cached = hub_client.blob(sha256, size)
        if cached is not None and files.digest(cached) == (sha256, size):
            return cached
        return hub_client.download(self.repo(name), path, self._last_head(name).commit, sha256, size)

    def _last_head(self, name: str) -> Head:
        """Return the head that was read last; NotFound without a repository."""
        if name not in self._heads:
            self.existing(name)
        return self._heads[name]

    def list_records(self, name: str, folder: str) -> Iterator[tuple[PurePath, bytes]]:
        """Yield path and content of the records in a folder of main; offline, of those in the cache."""
        for path, size in sorted(self._last_head(name).files.items()):
            sha256 = PurePath(path).stem
            if PurePath(path).parent == PurePath(folder) and reference.is_sha256(sha256):
                if size > MAX_RECORD:
                    raise ArtifactError(f"{self.repo(name)}/{path}: {size} bytes are too many; delete it")
                if not hub_client.is_offline() or hub_client.blob(sha256, size):
                    data = files.read(self._fetch(name, path, sha256, size), MAX_RECORD)
                    yield PurePath(path), data

    # ---- changing

    def write(self, state: State, event: Event, content: Mapping[str, bytes]) -> bool:
        """Commit an event, and with a publish its files and card, on top of the commit that was read."""
        from huggingface_hub import CommitOperationAdd

        name, repo = state.name, self.repo(state.name)
        if not state.commit:
            hub_client.call(repo, lambda api: api.create_repo(repo, private=self.private, exist_ok=True))
            files.fault_point("hub.created")
            return False
        others = sorted(self._heads[name].files.keys() - _INITIAL_FILES)
        if event.number == 1 and others:
            raise Conflict(
                f"{repo} has no {INDEX}, but {others[0]} and {len(others) - 1} other files: it is somebody else's, or "
                f"its {INDEX} was deleted; restore that, or choose another name"
            )
        added: dict[str, bytes] = {}
        if isinstance(event.change, Publish):
            folder = f"versions/{event.change.version}"
            added = {f"{folder}/{file}": data for file, data in content.items()}
            text = content.get("README.md", f"# {name}\n".encode()).decode(errors="replace")
            added["README.md"] = for_repository(text, content, folder).encode()
        index = strict_json.record({"name": name, "events": [event.to_json() for event in state.events]})
        added[INDEX] = index
        alias = f"{event.change.alias} " if isinstance(event.change, (Promote, Rollback)) else ""
        title = f"{event.change.kind} {alias}{event.change.version}"

        def commit(api: Any) -> str:
            operations = [CommitOperationAdd(path, data) for path, data in added.items()]
            return api.create_commit(repo, operations, commit_message=title, parent_commit=state.commit).oid

        try:
            oid = hub_client.call(repo, commit, repeatable=False, uploaded=sum(map(len, added.values())))
        except Conflict:
            time.sleep(random.uniform(0.05, 0.5))
            return False
        files.fault_point("hub.committed")
        sizes = {**self._heads[name].files} | {path: len(data) for path, data in added.items()}
        self._parsed(name, Head(reference.check_commit(oid), sizes, index.decode()))
        state.commit = oid
        return True

    def add(self, name: str, path: str, data: bytes) -> None:
        """Add a record in a commit. It contradicts nothing, so the commit names no parent."""
        from huggingface_hub import CommitOperationAdd

        repo, (kind, sha256, _) = self.repo(name), path.split("/")
        title = f"add {kind[:-1]} of {sha256[:12]}"
        commit = lambda api: api.create_commit(repo, [CommitOperationAdd(path, data)], commit_message=title)  # noqa: E731
        hub_client.call(repo, commit)
        files.fault_point("hub.recorded")
        self._heads.pop(name, None)  # main has moved


def _head(info: Any) -> tuple[Head, str]:
    """Convert the Hub's information on a repository to a head without its index, and git's digest of that."""
    paths = {str(file.rfilename): int(file.size or 0) for file in info.siblings or []}
    digest = next((str(file.blob_id) for file in info.siblings or [] if file.rfilename == INDEX), "")
    return Head(reference.check_commit(info.sha), paths), digest


def for_repository(text: str, files: Iterable[str], folder: str) -> str:
    """Adapt a version's card to be the card of its repository.

    files    attachments: links to them become links into `folder`
    Library name and tag kvq are added, which HubRegistry.names() searches for.
    """
    from huggingface_hub import ModelCard

    for file in files:
        text = text.replace(f"]({file})", f"]({folder}/{file})")
    card: Any = ModelCard(text if text.startswith("---\n") else f"---\nlibrary_name: kvq\n---\n{text}")
    card.data.library_name = "kvq"
    card.data.tags = list(dict.fromkeys([*(card.data.tags or []), "kvq"]))
    return str(card)
