"""A local Hub, as small as the real `huggingface_hub` client permits, with faults to inject.

It has the routes, headers and error codes that the installed client uses, and nothing else of huggingface.co: no
quotas, Xet, caches or eventual consistency. A test shows what our code and the real client do, not the real service.
Large files are served by a second server, another origin, as the real ones are by a CDN.
"""

import base64
import hashlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from patience import PATIENCE

ENDLESS = 64 << 20  # bytes after which a test that nobody stopped has failed
Files = dict[str, bytes]


class Refused(Exception):
    """An error answer: HTTP status, a message, and the Hub's error code."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


def large(path: str, data: bytes) -> bool:
    return bool(data) and path.endswith((".safetensors", ".png"))


@dataclass
class Repo:
    """A model repository; `log`: (id, title, files) of the commits of main; `gated`: for users in `Hub.allowed`."""

    id: str
    private: bool = False
    gated: bool = False
    log: list[tuple[str, str, Files]] = field(default_factory=list)

    @property
    def head(self) -> str:
        return self.log[-1][0]

    @property
    def files(self) -> Files:
        return self.log[-1][2]

    def at(self, revision: str) -> Files:
        found = [files for commit, _, files in self.log if revision in (commit, "main")]
        if not found:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found[-1]

    def add(self, title: str, files: Mapping[str, bytes]) -> str:
        oid = hashlib.sha1(f"{self.id} {len(self.log)} {title}".encode()).hexdigest()
        self.log.append((oid, title, dict(files)))
        return oid


@dataclass
class Fault:
    """A failure that strikes `times` requests which match a pattern, as `METHOD /path`.

    status   answer with this status        lost     handle the request, and cut the connection before the answer
    reset    cut the connection midway      short    announce the whole body and send half of it
    flip     change one bit of the body     lie      answer with other headers, or another body
    endless  repeat the body without end    trickle, framing, heads   send single bytes without end
    """

    pattern: str
    kind: str
    times: int = 1
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None


class Faults:
    def __init__(self):
        self._waiting: list[Fault] = []
        self.happened: list[str] = []
        self.sent = 0  # bytes of endless bodies

    def add(
        self, pattern: str, kind: str, times: int = 1, status: int = 500, body: bytes | None = None, **headers: str
    ) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self._waiting.append(Fault(pattern, kind, times, status, named, body))

    def take(self, request: str) -> Fault | None:
        for fault in self._waiting:
            if fault.times and re.search(fault.pattern, request):
                fault.times -= 1
                self.happened.append(f"{fault.kind} {request}")
                return fault
        return None


@dataclass(frozen=True)
class Request:
    origin: str
    line: str
    authorization: str | None


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    hub: "Hub"

    def process_request(self, request, client_address) -> None:
        self._count(1)
        super().process_request(request, client_address)

    def shutdown_request(self, request) -> None:
        super().shutdown_request(request)
        self._count(-1)

    def _count(self, change: int) -> None:
        with self.hub.change:
            self.hub.connected += change
            self.hub.change.notify_all()

    def handle_error(self, request, client_address) -> None:
        """Ignore clients that disconnect."""


class Hub:
    """The server: `with Hub() as hub: ... hub.url`. `users`: {token: (name, role)}, role `write` or `read`."""

    def __init__(self, org: str = "org"):
        self.org, self.lock, self.change = org, threading.RLock(), threading.Condition()
        self.repos: dict[str, Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self.users: dict[str, tuple[str, str]] = {}
        self.allowed: set[str] = set()
        self.faults, self.requests, self.connected = Faults(), list[Request](), 0
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


class Cut(Exception):
    """Close the connection without an answer."""


class Handler(BaseHTTPRequestHandler):
    """A connection; every route of ROUTES is a method."""

    hub: Hub
    origin: str
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms for an acknowledgement

    def log_message(self, *_: object) -> None:
        """Print nothing: `hub.requests` is the log."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        self.line, self.query = f"{self.command} {unquote(parts.path)}", parse_qs(parts.query)
        self.hub.requests.append(Request(self.origin, self.line, self.headers.get("Authorization")))
        self.fault = self.hub.faults.take(self.line) or Fault("", "")
        try:
            body = self._body()
            if self.fault.kind == "status":  # the worst a server can do with a token: repeat it
                raise Refused(self.fault.status, f"an injected fault, for {self.headers.get('Authorization', '')}")
            for method, pattern, name in ROUTES:
                found = re.fullmatch(pattern, unquote(parts.path))
                if method == self.command and found:
                    getattr(self, name)(body=body, **{k: v for k, v in found.groupdict().items() if v is not None})
                    return
            raise Refused(404, f"no route {self.line}")
        except Refused as refused:
            headers = {"X-Error-Message": refused.message} | ({"X-Error-Code": refused.code} if refused.code else {})
            self.fault = Fault("", "", headers=self.fault.headers)
            self._send(json.dumps({"error": refused.message}).encode(), refused.status, headers | self.fault.headers)
        except Cut:
            self.close_connection = True
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    do_POST = do_PUT = do_GET

    def _body(self) -> bytes:
        length = int(self.headers.get("Content-Length") or 0)
        if length and self.fault.kind == "reset":
            self.rfile.read(length // 2)
            raise Cut
        return self.rfile.read(length)

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(json.dumps(value).encode(), status, {"Content-Type": "application/json"})

    def _send(self, data: bytes, status: int, headers: dict[str, str]) -> None:
        fault = self.fault
        if fault.kind == "lost":
            raise Cut
        if fault.kind == "lie":
            data, headers = data if fault.body is None else fault.body, headers | fault.headers
        if fault.kind in ("endless", "trickle", "framing", "heads"):
            self._send_without_end(data or b"{}")
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if fault.kind == "flip":
            data = data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
        half = fault.kind in ("reset", "short")
        self.wfile.write(data[: len(data) // 2] if half else data)
        self.close_connection = self.close_connection or half
        if fault.kind == "reset":
            self.wfile.flush()
            time.sleep(0.05)
            raise Cut

    def _send_without_end(self, data: bytes) -> None:
        kind, pieces = self.fault.kind, {"trickle": b" ", "framing": b"a", "heads": b"X-Y: z\r\n"}
        self.send_response(200)
        if kind == "framing":  # a chunk's size, whose extension does not end
            self.send_header("Transfer-Encoding", "chunked")
        elif kind != "heads":
            self.send_header("Content-Length", str(1 << 40))
        if kind == "heads":
            self.flush_headers()
        else:
            self.end_headers()
        self.wfile.write(b"1;" if kind == "framing" else b"")
        while self.hub.faults.sent < ENDLESS:
            piece = pieces.get(kind) or data * (1 + (1 << 16) // len(data))
            self.wfile.write(piece)
            self.hub.faults.sent += len(piece)
            time.sleep(0 if kind == "endless" else 0.05)
        raise Cut

    # ---- who and what

    def _user(self) -> tuple[str, str] | None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in self.hub.users:
            raise Refused(401, f"Invalid credentials in Authorization header: {token}")
        return self.hub.users.get(token)

    def _repo(self, id: str, write: bool = False) -> Repo:
        found, user = self.hub.repos.get(id), self._user()
        if found is None or (found.private and user is None):
            raise Refused(401 if user is None else 404, "Repository not found", "RepoNotFound")
        if write and (user is None or user[1] != "write"):
            raise Refused(403 if user else 401, "You don't have the rights to write here with this token")
        return found

    def whoami(self, body: bytes) -> None:
        user = self._user()
        if user is None:
            raise Refused(401, "Invalid username or password.")
        access = {"displayName": "test", "role": user[1]}
        auth = {"type": "access_token", "accessToken": access}
        self._json({"type": "user", "name": user[0], "orgs": [{"name": self.hub.org}], "auth": auth})

    def card(self, body: bytes) -> None:
        self._json({"errors": [], "warnings": []})

    def create(self, body: bytes) -> None:
        given, user = json.loads(body), self._user()
        id = f"{given['organization']}/{given['name']}"
        if user is None or user[1] != "write":
            raise Refused(403 if user else 401, f"You don't have the rights to create a model under {self.hub.org}")
        with self.hub.lock:
            new = id not in self.hub.repos
            if new:
                repo = Repo(id, given.get("private", False) or given.get("visibility") == "private")
                repo.add("initial commit", {".gitattributes": b"*.safetensors filter=lfs\n"})
                self.hub.repos[id] = repo
        self._json({"url": f"{self.hub.url}/{id}", "id": id, "name": id}, 200 if new else 409)

    def models(self, body: bytes) -> None:
        """Answer in pages of one, so that every list is paged."""
        user, start = self._user(), int(self.query.get("cursor", ["0"])[0])
        author, wanted = self.query["author"][0], set(self.query.get("filter", []))
        found = [repo for id, repo in sorted(self.hub.repos.items()) if id.startswith(f"{author}/")]
        found = [repo for repo in found if (user or not repo.private) and wanted <= _labels(repo)]
        rest = "&".join(f"{key}={value}" for key, values in self.query.items() for value in values if key != "cursor")
        more = f'<{self.hub.url}/api/models?{rest}&cursor={start + 1}>; rel="next"'
        headers = {"Link": more} if start + 1 < len(found) else {}
        rows = [{"id": repo.id, "sha": repo.head} for repo in found[start : start + 1]]
        self._send(json.dumps(rows).encode(), 200, headers)

    def info(self, body: bytes, id: str) -> None:
        repo, rows = self._repo(id), []
        for path, data in repo.files.items():
            row: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": _git(data)}
            if large(path, data):
                row["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            rows.append(row)
        self._json({"id": repo.id, "sha": repo.head, "private": repo.private, "tags": [], "siblings": rows})

    # ---- changes

    def preupload(self, body: bytes, id: str, revision: str) -> None:
        files, rows = self._repo(id, write=True).at(revision), []
        for given in json.loads(body)["files"]:
            mode = "lfs" if large(given["path"], b"x" * min(given["size"], 1)) else "regular"
            row = {"path": given["path"], "uploadMode": mode, "shouldIgnore": False}
            there = files.get(given["path"])
            digest = _git if mode == "regular" else lambda data: hashlib.sha256(data).hexdigest()
            rows.append(row | ({"oid": digest(there)} if there is not None else {}))
        self._json({"files": rows})

    def batch(self, body: bytes, id: str) -> None:
        self._repo(id, write=True)
        objects = []
        for given in json.loads(body)["objects"]:
            actions = {"upload": {"href": f"{self.hub.cdn}/lfs/{given['oid']}"}}
            objects.append(given | ({} if given["oid"] in self.hub.lfs else {"actions": actions}))
        self._json({"transfer": "basic", "objects": objects})

    def put(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            raise Refused(400, "the content is not what its digest says")
        self.hub.lfs[oid] = body
        self._send(b"", 200, {})

    def commit(self, body: bytes, id: str, revision: str) -> None:
        """Apply a commit's lines, all or nothing; a parent that is not the head is refused with 412."""
        repo = self._repo(id, write=True)
        with self.hub.lock:
            files, title = dict(repo.at(revision)), ""
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    title = value["summary"]
                    if value.get("parentCommit") not in (None, repo.head):
                        raise Refused(412, "A commit has happened since. Please refresh and try again.")
                elif line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                else:
                    files[value["path"]] = self.hub.lfs[value["oid"]]
            oid = repo.add(title, files)
        self._json({"commitOid": oid, "commitUrl": f"{self.hub.url}/{id}/commit/{oid}"})

    # ---- files

    def resolve(self, body: bytes, id: str, revision: str, path: str) -> None:
        repo, user = self._repo(id), self._user()
        data = repo.at(revision).get(path)
        if repo.gated and (user is None or user[0] not in self.hub.allowed):
            raise Refused(401 if user is None else 403, f"Access to model {repo.id} is restricted", "GatedRepo")
        if data is None:
            raise Refused(404, f"{path} does not exist", "EntryNotFound")
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest() if large(path, data) else _git(data)}"'}
        if large(path, data):
            self.hub.lfs[headers["ETag"].strip('"')] = data
            self._send(b"", 302, headers | {"Location": f"{self.hub.cdn}/lfs/{hashlib.sha256(data).hexdigest()}"})
        else:
            self._send(data, 200, headers)

    def download(self, body: bytes, oid: str) -> None:
        self._send(self.hub.lfs[oid], 200, {"ETag": f'"{oid}"'})


def _git(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _labels(repo: Repo) -> set[str]:
    """The labels that lists are filtered by: tags and library of the card."""
    found = re.match(r"---\n(.*?)\n---", repo.files.get("README.md", b"").decode(), re.DOTALL)
    front = yaml.safe_load(found[1]) if found else {}
    return {*front.get("tags", []), front.get("library_name", "")}


_ID, _REV = r"(?P<id>[^/]+/[^/]+)", r"(?P<revision>[^/]+)"
ROUTES = [
    ("GET", "/api/whoami-v2", "whoami"),
    ("POST", "/api/validate-yaml", "card"),
    ("POST", "/api/repos/create", "create"),
    ("GET", "/api/models", "models"),
    ("GET", rf"/api/models/{_ID}(/revision/main)?", "info"),
    ("POST", rf"/api/models/{_ID}/preupload/{_REV}", "preupload"),
    ("POST", rf"/api/models/{_ID}/commit/{_REV}", "commit"),
    ("POST", rf"/{_ID}\.git/info/lfs/objects/batch", "batch"),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", "put"),
    ("GET", r"/lfs/(?P<oid>[0-9a-f]{64})", "download"),
    ("GET", rf"/{_ID}/resolve/{_REV}/(?P<path>.+)", "resolve"),
]
