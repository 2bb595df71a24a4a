"""The HTTP of a `hub_server.Hub`: read a request, inject a fault if one matches, send an answer.

A fault strikes a number of times, at requests that match a pattern.
"""

import json
import re
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

from hub_store import Refused

# status   answer with this status instead (429: with Retry-After)
# reset    cut the connection: in mid-upload if there is a body to read, else in mid-download
# short    announce the whole body and send half of it
# flip     send the body with one bit changed
# drip     send the body in small pieces, slowly
# lost     handle the request, and cut the connection before the answer
# lie      answer with these headers beside, and with `body` if there is one
# endless  send the same body again and again, without end
# trickle  send a byte at a time, without end
# heads    send a line of a header at a time, without end
KINDS = ("status", "reset", "short", "flip", "drip", "lost", "lie", "endless", "trickle", "framing", "framing", "heads")
ENDLESS = 64 << 20  # bytes after which a test that nobody stopped has failed
PAGE = 2  # entries a page: small, so that every list is paged


@dataclass
class Fault:
    pattern: str
    kind: str
    times: int = 1
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None


class Faults:
    """Pending faults; each is used up by requests that it matches, as `METHOD /path`."""

    def __init__(self):
        self._waiting: list[Fault] = []
        self._lock = threading.Lock()
        self.happened: list[str] = []
        self.sent = 0  # bytes of endless bodies

    def add(
        self, pattern: str, kind: str, times: int = 1, status: int = 500, body: bytes | None = None, **headers: str
    ) -> None:
        assert kind in KINDS
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self._waiting.append(Fault(pattern, kind, times, status, named, body))

    def take(self, request: str) -> Fault | None:
        with self._lock:
            for fault in self._waiting:
                if fault.times and re.search(fault.pattern, request):
                    fault.times -= 1
                    self.happened.append(f"{fault.kind} {request}")
                    return fault
        return None


@dataclass(frozen=True)
class Request:
    """A request as received, for tests that count requests or search them for secrets."""

    origin: str
    line: str
    authorization: str | None
    range: str | None


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    hub: Any  # a hub_server.Hub

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


class Cut(Exception):
    """Close the connection without an answer."""


class Exchange(BaseHTTPRequestHandler):
    """A connection: read requests and send the answers of `_route`."""

    hub: Any  # a hub_server.Hub
    origin: str
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms for an acknowledgement

    def log_message(self, *_: object) -> None:
        """Print nothing: `hub.requests` is the log."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        self.line = f"{self.command} {unquote(parts.path)}"
        self.hub.requests.append(Request(self.origin, self.line, *map(self.headers.get, ("Authorization", "Range"))))
        self.fault = self.hub.faults.take(self.line)
        try:
            if self.fault and self.fault.kind == "status":
                self._body()
                repeated = self.headers.get("Authorization", "")  # the worst a server can do with a token
                raise Refused(self.fault.status, f"an injected fault, for {repeated}")
            self.query = parse_qs(parts.query)
            self._route(parts.path, self._body())
        except Refused as refused:
            self._refuse(refused)
        except Cut:
            self._cut()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def _route(self, path: str, body: bytes) -> None:
        raise NotImplementedError

    def _body(self) -> bytes:
        length = int(self.headers.get("Content-Length") or 0)
        if length and self.fault and self.fault.kind == "reset":
            self.rfile.read(length // 2)
            raise Cut
        return self.rfile.read(length)

    def _cut(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def _refuse(self, refused: Refused) -> None:
        headers = {"X-Error-Message": refused.message} | ({"X-Error-Code": refused.code} if refused.code else {})
        extra = self.fault.headers if self.fault else {}
        self._send(json.dumps({"error": refused.message}).encode(), refused.status, headers | extra, faulty=False)

    def _json(self, value: Any, status: int = 200, **headers: str) -> None:
        self._send(json.dumps(value).encode(), status, {"Content-Type": "application/json", **headers})

    def _paged(self, values: list[Any]) -> None:
        start = int(self.query.get("cursor", ["0"])[0])
        rest = {key: value for key, value in self.query.items() if key != "cursor"}
        link = f"{self.hub.url}{urlsplit(self.path).path}?{urlencode(rest | {'cursor': start + PAGE}, doseq=True)}"
        more = {"Link": f'<{link}>; rel="next"'} if start + PAGE < len(values) else {}
        self._json(values[start : start + PAGE], **more)

    def _without_end(self, kind: str, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name, value)
        if kind == "framing":  # a chunk's size, whose extension does not end
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"1;")
        elif kind != "heads":
            self.send_header("Content-Length", str(1 << 40))
            self.end_headers()
        while self.hub.faults.sent < ENDLESS:
            piece = {
                "endless": data * (1 + (1 << 16) // len(data)),
                "trickle": b" ",
                "framing": b"a",
                "heads": b"X-Y: z\r\n",
            }[kind]
            if kind == "heads":
                self.flush_headers()
            self.wfile.write(piece)
            self.hub.faults.sent += len(piece)
            time.sleep(0 if kind == "endless" else 0.05)
        raise Cut

    def _send(self, data: bytes, status: int, headers: dict[str, str], faulty: bool = True) -> None:
        fault = self.fault if faulty and self.fault else Fault("", "")
        if fault.kind == "lost":
            raise Cut
        if fault.kind == "lie":
            data = data if fault.body is None else fault.body
            headers = {name: value for name, value in headers.items() if name not in fault.headers} | fault.headers
        if fault.kind in ("endless", "trickle", "framing", "heads"):
            self._without_end(fault.kind, data or b"{}", headers)
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault.kind == "flip":
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        if fault.kind in ("reset", "short"):
            self.wfile.write(data[: len(data) // 2])
            if fault.kind == "reset":
                self.wfile.flush()
                time.sleep(0.05)
                raise Cut
            self.close_connection = True
            return
        pieces = 8 if fault.kind == "drip" else 1
        size = max(1, -(-len(data) // pieces))
        for start in range(0, len(data), size):
            self.wfile.write(data[start : start + size])
            self.wfile.flush()
            time.sleep(0.1 if fault.kind == "drip" else 0)
