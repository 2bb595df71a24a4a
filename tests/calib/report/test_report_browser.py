"""Pages in a real browser: light and dark, narrow and wide, sorting and filtering, and that nothing is loaded.

It has no window, and is asked over its DevTools protocol what a page shows, logs and looks like.
"""

import base64
import io
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import many_versions as many
import numpy as np
import pytest
import tiny_artifact as tiny
from matplotlib.image import imread

from kvq_calib.report.page import known, version, wall
from kvq_calib.report.page.html import environment
from kvq_runtime.registry.local import LocalRegistry
from kvq_runtime.registry.sound import read

HERE = Path(__file__).parents[3] / "build" / "chromium"  # by make browser
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--no-first-run", "--hide-scrollbars", "--disable-dev-shm-usage", "--remote-debugging-port=0",
)  # fmt: skip
PATIENCE = 60.0  # seconds
pytestmark = pytest.mark.slow


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


@pytest.fixture(scope="module")
def page():
    with browser() as found:
        yield found


def light(page: Page) -> float:
    """How light the picture is in the mean, 0 to 1; it must show something."""
    seen = imread(io.BytesIO(page.picture()), format="png")[..., :3]
    assert np.std(seen) > 0.02, "an empty picture"
    return float(seen.mean())


def saved(text: str, folder: Path) -> str:
    path = folder / "page.html"
    path.write_text(text)
    return path.as_uri()


def test_a_version_is_legible_in_light_and_dark_wide_and_narrow(page, tmp_path):
    store = LocalRegistry(tmp_path / "registry")
    many.published(store)
    address = saved(version.page(known.of_version(store, "tiny-2bit", "1.1.0")), tmp_path)
    for scheme, least, most in (("light", 0.85, 1.0), ("dark", 0.05, 0.3)):
        for width in (1200, 400):
            page.show(address, scheme, width)
            assert page.problems == []
            assert least < light(page) < most
            assert page.run("document.documentElement.scrollWidth") <= width, "tables scroll, the page does not"
    page.show(address, "dark", media="print")
    assert light(page) > 0.85, "on paper it is light"
    colours = "getComputedStyle(document.querySelector({})).{}"
    assert page.run(colours.format("'svg text'", "fill")) != page.run(colours.format("'section'", "backgroundColor"))
    assert page.run("document.querySelectorAll('section').length") == page.run(
        "document.querySelectorAll('nav a').length"
    )
    assert page.run("performance.getEntriesByType('resource').length") == 0


def test_names_of_points_lie_on_no_other_name_and_no_mark(page, tmp_path):
    store = LocalRegistry(tmp_path / "registry")
    many.published(store)
    names = ("aqua-2bit", "kivi-2bit", "auto-2.1bit", "higgs-2bit", "rtn-2bit", "aqua-3bit", "kivi-4bit", "quarot-2bit")
    beside = [read(many.record(name, 0.03 / 1.4**n, recipe=name, bits=2 + n / 9)) for n, name in enumerate(names)]
    page.show(saved(version.page(known.of_version(store, "tiny-2bit", "1.1.0", beside)), tmp_path))
    boxes, marks = (
        page.run(f"""Array.from(document.querySelectorAll('#frontier svg {kind}'), (one) => {{
            const box = one.getBoundingClientRect();
            return [box.left, box.top, box.right, box.bottom, one.textContent]}})""")
        for kind in ("text", "use")
    )
    assert len([mark for mark in marks if mark[2] - mark[0] > 6]) > len(names), "markers, and two rings"
    assert {"tiny-2bit@1.1.0 (this version)", "auto-2.1bit (recommended)"} <= {box[4] for box in boxes}
    for place, one in enumerate(boxes):
        for other in [*boxes[:place], *marks]:
            across = min(one[2], other[2]) - max(one[0], other[0])
            down = min(one[3], other[3]) - max(one[1], other[1])
            assert across <= 1 or down <= 4, f"{one[4]} lies on {other[4]}"


def test_a_registry_sorts_and_filters(page, tmp_path):
    store = many.registry(tmp_path / "registry", names=12, versions=2)
    address = saved(wall.page(wall.of_registry(store, datetime(2026, 11, 23, tzinfo=UTC))), tmp_path)
    page.show(address)
    assert page.problems == [] and page.run("document.querySelector('.tools').hidden") is False
    table = "Array.from(document.querySelectorAll('.sorted {}'))"
    head = table.format("th") + ".find((head) => head.textContent === '{}')"
    cells = table.format("tbody tr:not([hidden])") + f".map((row) => row.cells[{head}.cellIndex].textContent)"
    page.run(head.format("KL, nats") + ".click()")
    losses = [float(text) for text in page.run(cells.format("KL, nats"))]
    assert losses == sorted(losses) and len(losses) == 24 and losses[0] < losses[-1]
    page.run(head.format("KL, nats") + ".click()")
    assert page.run(cells.format("KL, nats")) == [f"{loss:.3g}" for loss in sorted(losses, reverse=True)]
    page.run(head.format("drift") + ".click()")
    drifts = page.run(cells.format("drift"))
    assert drifts[0] == "2.00" and drifts[-1] == "", "what is not known is last"
    type_ = "const box = document.querySelector('input'); box.value = '{}'; box.dispatchEvent(new Event('input'))"
    page.run("{" + type_.format("model-003 tiny") + "}")
    assert set(page.run(cells.format("name"))) == {"model-003-tiny-2bit"}
    assert page.run("document.querySelector('output').textContent") == "2 of 24"
    page.show(address + "#production")
    assert len(page.run(cells.format("name"))) == 12


def test_what_is_to_look_at_is_seen_without_scrolling(page, tmp_path):
    """In two lines on a screen of 1200 pixels; on a narrow one as long as it needs, and in the window."""
    store = LocalRegistry(tmp_path / "registry")
    sha256 = store.publish("llama-3.1-8b-aqua-zipcache-2bit", tiny.data()).sha256
    for kl, seed in ((0.3, 0), (0.5, 202614)):
        store.add_evaluation(many.record(sha256, kl, seed=seed))
    found = wall.of_registry(store, datetime(2026, 11, 23, tzinfo=UTC))
    (row,) = found["versions"]
    assert ["too lossy" in row["needs"][0], "drifted" in row["needs"][1]] == [True, True]
    address = saved(wall.page(found | {"versions": [row, row | {"needs": []}]}), tmp_path)
    for width, lines in ((1200, 2), (400, 6)):
        page.show(address, width=width)
        (left, right, height), (*_, empty) = page.run("""Array.from(
            document.querySelectorAll('.sorted tbody td:last-child'), (cell) => {
                const box = cell.getBoundingClientRect();
                return [box.left, box.right, box.height]})""")
        assert 0 <= left < right <= width and 10 < height < 24 * lines
        assert empty == 0, "nothing to look at takes no room"


class _Heard(BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self):
        self.asked.append(self.path)
        self.send_response(204)
        self.end_headers()

    def log_message(self, format, *args):
        pass


def test_the_policy_stops_what_would_slip_through(page, tmp_path):
    """Markup is forced into a page, as if escaping had failed: it neither runs nor loads; without a policy it does."""
    heard = type("Heard", (_Heard,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), heard)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        there = f"http://127.0.0.1:{server.server_port}"
        evil = f"<script>document.title='run'; fetch('{there}/fetch').catch(() => 0)</script><img src='{there}/image'>"
        evil += f"<p style='color: red' onclick='0'>x</p><link rel=stylesheet href='{there}/style'>"
        page_of = environment().from_string("{% extends 'page.html' %}{% block body %}{{ evil|safe }}{% endblock %}")
        text = page_of.render(title="title", kvq="1", evil=evil)
        page.show(saved(text, tmp_path))
        assert page.run("document.title") == "title" and heard.asked == []
        assert any("Content Security Policy" in problem for problem in page.problems)
        without = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
        assert without != text
        page.show(saved(without, tmp_path))
        assert page.run("document.title") == "run" and {"/image", "/style"} <= set(heard.asked)
    finally:
        server.shutdown()
        server.server_close()
