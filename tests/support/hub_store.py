"""The state of a `hub_server.Hub`, in memory: repositories, commits, tags and large files."""

import hashlib
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import yaml


class Refused(Exception):
    """An error answer: HTTP status, the Hub's error code, and a message."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


@dataclass(frozen=True)
class Entry:
    """A file of a commit: `oid` is git's, `lfs` the sha256 of a large file or None."""

    oid: str
    size: int
    lfs: str | None = None

    def json(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "file", "oid": self.oid, "size": self.size, "path": path}
        return found | ({"lfs": {"oid": self.lfs, "size": self.size, "pointerSize": 134}} if self.lfs else {})


@dataclass(frozen=True)
class Commit:
    oid: str
    parent: str | None
    title: str
    date: str
    tree: Mapping[str, Entry]


@dataclass
class Repo:
    """A model repository. `gated`: visible to all, readable by users in `allowed` only."""

    id: str
    private: bool = False
    gated: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)

    def at(self, revision: str) -> Commit:
        found = self.branches.get(revision) or self.tags.get(revision) or revision
        if found not in self.commits:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.commits[found]

    def log(self, revision: str) -> list[Commit]:
        found, commit = [], self.at(revision)
        while commit is not None:
            found.append(commit)
            commit = self.commits[commit.parent] if commit.parent else None
        return found

    def touched(self, path: str, revision: str) -> Commit:
        """The last commit that changed a file."""
        log = self.log(revision)
        entry = log[0].tree[path]
        return next(c for c, before in zip(log, [*log[1:], None], strict=True)
                    if before is None or before.tree.get(path) != entry)  # fmt: skip

    def add(self, branch: str, title: str, tree: Mapping[str, Entry], date: str | None = None) -> Commit:
        parent = self.branches.get(branch)
        date = date or datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        oid = hashlib.sha1(f"{self.id} {parent} {len(self.commits)} {title} {date}".encode()).hexdigest()
        self.commits[oid] = commit = Commit(oid, parent, title, date, dict(tree))
        self.branches[branch] = oid
        return commit

    def blob(self, content: bytes) -> Entry:
        oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        self.blobs[oid] = content
        return Entry(oid, len(content))


class Store:
    """Every repository, and the users: {token: (name, role)}, role `write` or `read`."""

    def __init__(self, org: str = "org"):
        self.org, self.lock = org, threading.RLock()
        self.repos: dict[str, Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self.users: dict[str, tuple[str, str]] = {}
        self.allowed: set[str] = set()  # names of users that may read gated repositories

    def user(self, authorization: str | None) -> tuple[str, str] | None:
        if authorization is None:
            return None
        token = authorization.removeprefix("Bearer ")
        if token not in self.users:  # the worst a server can do with a token: repeat it
            raise Refused(401, f"Invalid credentials in Authorization header: {token}", None)
        return self.users[token]

    def repo(self, id: str, user: tuple[str, str] | None, write: bool = False) -> Repo:
        """A repository that this user may read, or with `write` may change; else Refused."""
        found = self.repos.get(id)
        if found is None or (found.private and user is None):
            raise Refused(401 if user is None else 404, "Repository not found", "RepoNotFound")
        if write and (user is None or user[1] != "write"):
            raise Refused(403 if user else 401, "You don't have the rights to write here with this token")
        return found

    def check_readable(self, repo: Repo, user: tuple[str, str] | None) -> None:
        if repo.gated and (user is None or user[0] not in self.allowed):
            raise Refused(401 if user is None else 403, f"Access to model {repo.id} is restricted", "GatedRepo")

    def create(self, id: str, user: tuple[str, str] | None, private: bool) -> bool:
        """Create a repository; False if it exists."""
        if user is None or user[1] != "write":
            raise Refused(403 if user else 401, f"You don't have the rights to create a model under {self.org}")
        with self.lock:
            if id in self.repos:
                return False
            repo = Repo(id, private)
            repo.add("main", "initial commit", {".gitattributes": repo.blob(b"*.safetensors filter=lfs\n")})
            self.repos[id] = repo  # only now, as who reads takes no lock
            return True

    def is_large(self, path: str, size: int) -> bool:
        return size > 0 and (path.endswith((".safetensors", ".png")) or size > 1 << 20)

    def commit(self, repo: Repo, branch: str, lines: list[dict[str, Any]]) -> Commit:
        """Apply a commit's lines, all or nothing; a parent that is not the branch's head is refused with 412."""
        import base64

        with self.lock:
            head = repo.at(branch)
            tree, summary = dict(head.tree), ""
            for line in lines:
                value = line["value"]
                match line["key"]:
                    case "header":
                        summary = value["summary"]
                        if value.get("parentCommit") not in (None, head.oid):
                            raise Refused(412, "A commit has happened since. Please refresh and try again.")
                    case "file":
                        tree[value["path"]] = repo.blob(base64.b64decode(value["content"]))
                    case "lfsFile":
                        if value["oid"] not in self.lfs:
                            raise Refused(400, f"LFS object {value['oid']} was not uploaded")
                        pointer = hashlib.sha1(value["oid"].encode()).hexdigest()
                        tree[value["path"]] = Entry(pointer, len(self.lfs[value["oid"]]), value["oid"])
                    case "deletedFile":
                        if tree.pop(value["path"], None) is None:
                            raise Refused(404, "A file with this name doesn't exist", "EntryNotFound")
            return repo.add(branch, summary, tree)

    def content(self, repo: Repo, entry: Entry) -> bytes:
        return self.lfs[entry.lfs] if entry.lfs else repo.blobs[entry.oid]

    def labels(self, repo: Repo) -> list[str]:
        """The labels that lists are filtered by: tags and library of the card."""
        entry = repo.at("main").tree.get("README.md")
        found = re.match(r"---\n(.*?)\n---", self.content(repo, entry).decode(), re.DOTALL) if entry else None
        front = yaml.safe_load(found[1]) if found else {}
        return [*front.get("tags", []), *([front["library_name"]] if "library_name" in front else [])]
