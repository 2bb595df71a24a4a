"""A local Hub, as small as the real `huggingface_hub` client permits.

It has the routes, headers and error codes that the installed client uses, and nothing else of huggingface.co: no
quotas, scanning, Xet, caches or eventual consistency. A test that passes shows what our code and the real client do,
not what the real service does.

Large files are served by a second server, another origin, as the real ones are by a CDN. Without Xet the client needs
HF_HUB_DISABLE_XET, since it does not negotiate.
"""

import hashlib
import json
import re
import socket
import threading
from typing import Any
from urllib.parse import unquote

from hub_http import Exchange, Faults, Request, Server
from hub_store import Refused, Repo, Store
from patience import PATIENCE

_ID = r"(?P<id>[^/]+/[^/]+)"


class Hub(Store):
    """The server: `with Hub() as hub: ... hub.url`. `requests` has every request it received."""

    def __init__(self, org: str = "org"):
        super().__init__(org)
        self.faults = Faults()
        self.requests: list[Request] = []
        self.connected, self.change = 0, threading.Condition()
        self.redirect = True  # large files are on the other server
        handlers = [type("Handler", (Handler,), {"hub": self, "origin": name}) for name in ("hub", "cdn")]
        self._servers = [Server(("127.0.0.1", 0), handler) for handler in handlers]
        self.url, self.cdn = (f"http://127.0.0.1:{server.server_address[1]}" for server in self._servers)

    def __enter__(self) -> "Hub":
        for server in self._servers:
            server.hub = self
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def rest(self) -> None:
        """Wait until no client is connected: requests of a killed client are still being handled."""
        for server in self._servers:  # connections are accepted in order
            with socket.create_connection(server.server_address[:2]) as last:
                last.shutdown(socket.SHUT_WR)
                last.recv(1)
        with self.change:
            assert self.change.wait_for(lambda: not self.connected, PATIENCE), f"{self.connected} are still connected"


class Handler(Exchange):
    """What every route of ROUTES answers."""

    def _route(self, path: str, body: bytes) -> None:
        for method, pattern, name in ROUTES:
            found = re.fullmatch(pattern, path)
            if method in (self.command, self.command.replace("HEAD", "GET")) and found:
                given = {key: unquote(value) for key, value in found.groupdict().items() if value is not None}
                getattr(self, name)(body=body, **given)
                return
        raise Refused(404, f"no route {self.line}")

    # ---- who and what

    def _user(self) -> tuple[str, str] | None:
        return self.hub.user(self.headers.get("Authorization"))

    def _repo(self, id: str, write: bool = False) -> Repo:
        return self.hub.repo(id, self._user(), write)

    def whoami(self, body: bytes) -> None:
        user = self._user()
        if user is None:
            raise Refused(401, "Invalid username or password.")
        access = {"displayName": "test", "role": user[1]}
        self._json({"type": "user", "name": user[0], "orgs": [{"name": self.hub.org}],
                    "auth": {"type": "access_token", "accessToken": access}})  # fmt: skip

    def card(self, body: bytes) -> None:
        self._json({"errors": [], "warnings": []})

    def create(self, body: bytes) -> None:
        given = json.loads(body)
        private = given.get("private", False) or given.get("visibility") == "private"
        id = f"{given['organization']}/{given['name']}"
        status = 200 if self.hub.create(id, self._user(), private) else 409
        self._json({"url": f"{self.hub.url}/{id}", "id": id, "name": id}, status)

    def models(self, body: bytes) -> None:
        user, wanted = self._user(), self.query.get("filter", [])
        author = self.query.get("author", [""])[0]
        found = [repo for id, repo in sorted(self.hub.repos.items()) if id.startswith(f"{author}/")]
        found = [repo for repo in found if user or not repo.private]
        self._paged([self._about(r, "main") for r in found if set(wanted) <= set(self.hub.labels(r))])

    def _about(self, repo: Repo, revision: str) -> dict[str, Any]:
        commit = repo.at(revision)
        return {"id": repo.id, "sha": commit.oid, "private": repo.private, "gated": repo.gated, "downloads": 0,
                "tags": self.hub.labels(repo), "siblings": [{"rfilename": path} for path in commit.tree]}  # fmt: skip

    def info(self, body: bytes, id: str, revision: str = "main") -> None:
        self._json(self._about(self._repo(id), revision))

    def refs(self, body: bytes, id: str) -> None:
        repo, found = self._repo(id), {"converts": []}
        for kind, short, names in (("branches", "heads", repo.branches), ("tags", "tags", repo.tags)):
            found[kind] = [{"name": n, "ref": f"refs/{short}/{n}", "targetCommit": c} for n, c in names.items()]
        self._json(found)

    def log(self, body: bytes, id: str, revision: str) -> None:
        log = self._repo(id).log(revision)
        self._paged([{"id": c.oid, "title": c.title, "message": "", "date": c.date, "authors": []} for c in log])

    def tree(self, body: bytes, id: str, revision: str, path: str = "") -> None:
        repo = self._repo(id)
        commit, folder = repo.at(revision), f"{path}/" if path else ""
        found = {name: entry for name, entry in sorted(commit.tree.items()) if name.startswith(folder)}
        if path and not found:
            raise Refused(404, f"{path} does not exist", "EntryNotFound")
        rows = [entry.json(name) for name, entry in found.items()]
        if self.query.get("expand") == ["true"] or self.query.get("expand") == ["True"]:
            for row in rows:
                last = repo.touched(row["path"], revision)
                row["lastCommit"] = {"id": last.oid, "title": last.title, "date": last.date}
        self._paged(rows)

    # ---- changes

    def tag(self, body: bytes, id: str, revision: str) -> None:
        repo, name = self._repo(id, write=True), json.loads(body)["tag"]
        with self.hub.lock:
            if name in repo.tags:
                raise Refused(409, "Tag reference exists already")
            repo.tags[name] = repo.at(revision).oid
        self._json({})

    def untag(self, body: bytes, id: str, revision: str) -> None:
        self._repo(id, write=True).tags.pop(revision)
        self._json({})

    def preupload(self, body: bytes, id: str, revision: str) -> None:
        tree, files = self._repo(id, write=True).at(revision).tree, []
        for given in json.loads(body)["files"]:
            path, large = given["path"], self.hub.is_large(given["path"], given["size"])
            row = {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            there = tree.get(path)
            files.append(row | ({"oid": there.lfs or there.oid} if there else {}))
        self._json({"files": files})

    def batch(self, body: bytes, id: str) -> None:
        self._repo(id, write=True)
        objects = []
        for given in json.loads(body)["objects"]:
            upload = {"href": f"{self.hub.cdn}/lfs/{given['oid']}"}
            verify = {"href": f"{self.hub.url}/{id}.git/info/lfs/objects/verify"}
            there = given["oid"] in self.hub.lfs
            objects.append(given | ({} if there else {"actions": {"upload": upload, "verify": verify}}))
        self._json({"transfer": "basic", "objects": objects})

    def put(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refused(400, "the content is not what its digest says")
        self.hub.lfs[oid] = body
        self._send(b"", 200, {})

    def verify(self, body: bytes, id: str) -> None:
        given = json.loads(body)
        if len(self.hub.lfs.get(given["oid"], b"")) != given["size"]:
            raise Refused(404, "the object is not here")
        self._json({})

    def commit(self, body: bytes, id: str, revision: str) -> None:
        repo = self._repo(id, write=True)
        commit = self.hub.commit(repo, revision, [json.loads(line) for line in body.splitlines()])
        self._json({"commitOid": commit.oid, "commitUrl": f"{self.hub.url}/{id}/commit/{commit.oid}"})

    # ---- files

    def resolve(self, body: bytes, id: str, revision: str, path: str) -> None:
        repo = self._repo(id)
        commit = repo.at(revision)
        self.hub.check_readable(repo, self._user())
        entry = commit.tree.get(path)
        if entry is None:
            raise Refused(404, f"{path} does not exist", "EntryNotFound")
        headers = {"X-Repo-Commit": commit.oid, "Accept-Ranges": "bytes", "ETag": f'"{entry.lfs or entry.oid}"'}
        if entry.lfs and self.hub.redirect:
            headers |= {"X-Linked-Size": str(entry.size), "X-Linked-Etag": f'"{entry.lfs}"'}
            self._send(b"", 302, headers | {"Location": f"{self.hub.cdn}/lfs/{entry.lfs}"}, faulty=False)
        else:
            self._bytes(self.hub.content(repo, entry), headers)

    def large(self, body: bytes, oid: str) -> None:
        if oid not in self.hub.lfs:
            raise Refused(404, "no such object")
        self._bytes(self.hub.lfs[oid], {"ETag": f'"{oid}"', "Accept-Ranges": "bytes"})

    def _bytes(self, data: bytes, headers: dict[str, str]) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not asked:
            self._send(data, 200, headers)
            return
        start, stop = int(asked[1]), min(int(asked[2] or len(data) - 1), len(data) - 1)
        if start > stop:
            raise Refused(416, "Range not satisfiable")
        self._send(data[start : stop + 1], 206, headers | {"Content-Range": f"bytes {start}-{stop}/{len(data)}"})


_MODEL = rf"/api/models/{_ID}"
_REV = r"(?P<revision>[^/]+)"
ROUTES = [
    ("GET", "/api/whoami-v2", "whoami"),
    ("POST", "/api/validate-yaml", "card"),
    ("POST", "/api/repos/create", "create"),
    ("GET", "/api/models", "models"),
    ("GET", _MODEL, "info"),
    ("GET", rf"{_MODEL}/revision/{_REV}", "info"),
    ("GET", rf"{_MODEL}/refs", "refs"),
    ("GET", rf"{_MODEL}/commits/{_REV}", "log"),
    ("GET", rf"{_MODEL}/tree/{_REV}(/(?P<path>.+))?", "tree"),
    ("POST", rf"{_MODEL}/tag/{_REV}", "tag"),
    ("DELETE", rf"{_MODEL}/tag/{_REV}", "untag"),
    ("POST", rf"{_MODEL}/preupload/{_REV}", "preupload"),
    ("POST", rf"{_MODEL}/commit/{_REV}", "commit"),
    ("POST", rf"/{_ID}\.git/info/lfs/objects/batch", "batch"),
    ("POST", rf"/{_ID}\.git/info/lfs/objects/verify", "verify"),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", "put"),
    ("GET", r"/lfs/(?P<oid>[0-9a-f]{64})", "large"),
    ("GET", rf"/{_ID}/resolve/{_REV}/(?P<path>.+)", "resolve"),
]
