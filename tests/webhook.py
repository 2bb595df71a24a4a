"""An address on loopback that is told things, and patience."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

PATIENCE = 300  # seconds; on two quiet cores a run takes fifteen


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def until(what, seconds: float = PATIENCE, pause: float = 0.2):
    """Ask until there is an answer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := what():
            return found
        time.sleep(pause)
    raise AssertionError(f"nothing after {seconds} s")


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
        yield f"http://127.0.0.1:{server.server_port}/", heard
        server.shutdown()
        thread.join()
