"""An address on loopback that is told things, and a port that nobody else gets."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer


@contextmanager
def free_port() -> Iterator[int]:
    """A port to start a server on; the system gives it to nobody who asks for any."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: then both may hold it
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@contextmanager
def listening() -> Iterator[tuple[str, list[str]]]:
    """An address that is posted to, and the texts that were."""
    heard: list[str] = []

    def hear(_headers: dict[str, str], body: bytes) -> int:
        heard.append(json.loads(body)["text"])
        return 200

    with posted_to(hear) as address:
        yield address, heard


@contextmanager
def posted_to(hear: Callable[[dict[str, str], bytes], int]) -> Iterator[str]:
    """An address whose posts, headers and body, are heard; what that returns is answered."""

    class Listener(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(hear(dict(self.headers), self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_header("Location", "/elsewhere")  # of redirects
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *given):
            pass

    with HTTPServer(("127.0.0.1", 0), Listener) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()
