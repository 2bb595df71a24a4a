"""An address on loopback that is posted to, and a port that nobody else gets."""

import json
import socket
import threading
from collections.abc import Iterator
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

    class Listener(BaseHTTPRequestHandler):
        def do_POST(self):
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *given):
            pass

    with HTTPServer(("127.0.0.1", 0), Listener) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/", heard
        finally:
            server.shutdown()
            thread.join()
