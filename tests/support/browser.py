"""A real browser without a window, asked over its DevTools protocol: what a page shows, logs and looks like."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

HERE = Path(__file__).parents[2] / "build" / "chromium"  # by make browser
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--no-first-run", "--hide-scrollbars", "--disable-dev-shm-usage", "--remote-debugging-port=0",
)  # fmt: skip
PATIENCE = 60.0  # seconds


class Page:
    """One page of the browser; `problems` are what it logged: refused loads, errors of scripts."""

    def __init__(self, socket: Any):
        self._socket, self._number, self.problems = socket, 0, []
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            said = self._hear()
            if said.get("id") == self._number:
                assert "error" not in said, f"{method}: {said}"
                return said["result"]

    def _hear(self) -> dict[str, Any]:
        said = json.loads(self._socket.recv(timeout=PATIENCE))
        if said.get("method") == "Log.entryAdded":
            self.problems.append(said["params"]["entry"]["text"])
        if said.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(said["params"]["exceptionDetails"]))
        return said

    def show(self, address: str, scheme: str = "light", width: int = 1200, media: str = "screen") -> None:
        """Load an address on a screen or in print, with a preference for light or dark; wait until it is there."""
        self.problems.clear()
        preferred = [{"name": "prefers-color-scheme", "value": scheme}]
        self._ask("Emulation.setEmulatedMedia", media=media, features=preferred)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._ask("Emulation.setDeviceMetricsOverride", **size)
        self._ask("Page.navigate", url="about:blank")
        self._ask("Page.navigate", url=address)
        end = time.monotonic() + PATIENCE
        while self.run("document.readyState + location.href") != f"complete{address}":
            assert time.monotonic() < end, f"{address} did not load"
            time.sleep(0.02)

    def run(self, script: str) -> Any:
        """The value of an expression in the page; the page's own policy does not hold for it."""
        return self._ask("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def picture(self, whole: bool = False) -> bytes:
        """What it looks like, a PNG: what a window shows of it, or all of it."""
        return base64.b64decode(self._ask("Page.captureScreenshot", captureBeyondViewport=whole)["data"])


@contextmanager
def browser() -> Iterator[Page]:
    """A page of a new browser; skips the test where there is none."""
    places = f"{os.environ['PATH']}{os.pathsep}{HERE}"
    program = next((found for name in NAMES if (found := shutil.which(name, path=places))), None)
    if program is None:
        pytest.skip(f"none of {', '.join(NAMES)} is here, for the tests of pages: make browser")
    from websockets.sync.client import connect

    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        arguments = [program, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port, path = _address(Path(folder) / "DevToolsActivePort", process)
            with connect(f"ws://127.0.0.1:{port}{path}", max_size=None) as whole:
                whole.send(json.dumps({"id": 1, "method": "Target.createTarget", "params": {"url": "about:blank"}}))
                target = _answer(whole, 1)["targetId"]
                with connect(f"ws://127.0.0.1:{port}/devtools/page/{target}", max_size=None) as socket:
                    yield Page(socket)
        finally:
            process.terminate()
            process.wait(timeout=PATIENCE)


def _answer(socket: Any, number: int) -> dict[str, Any]:
    while True:
        said = json.loads(socket.recv(timeout=PATIENCE))
        if said.get("id") == number:
            return said["result"]


def _address(file: Path, process: subprocess.Popen) -> tuple[str, str]:
    """Port and path that the browser writes once it listens."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        lines = file.read_text().splitlines() if file.exists() else []
        if len(lines) >= 2:
            return lines[0], lines[1]
        time.sleep(0.05)
    raise AssertionError(f"the browser did not begin to listen; it ended with {process.poll()}")
