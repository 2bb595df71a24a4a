"""Faults between a client and a Hub: each strikes a number of times, at requests that match a pattern."""

import re
import threading
from dataclasses import dataclass, field

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
KINDS = ("status", "reset", "short", "flip", "drip", "lost", "lie", "endless", "trickle", "heads")
ENDLESS = 64 << 20  # bytes after which a test that nobody stopped has failed


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
