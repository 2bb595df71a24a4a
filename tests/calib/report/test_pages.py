"""Pages of a version and of a registry: one file that loads nothing, in which nothing of a registry is markup."""

import base64
import html
import json
import re
import shlex
import symtable
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import many_versions as many
import pytest
import tiny_artifact as tiny

from kvq_calib.report import pages, plots
from kvq_runtime.registry.local import LocalRegistry

EVIL = '"><script>alert(1)</script><img src=x onerror=alert(1)>\u202e'
NOW = datetime(2026, 11, 23, tzinfo=UTC)
SVG = "data:image/svg+xml;base64,"


class Reader(HTMLParser):
    """Elements with their attributes, and the text; every element that was opened is closed."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open, f"{self.open} is not closed"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)

    @property
    def said(self) -> str:
        return " ".join(" ".join(self.text).split())


def harmless(text: str) -> Reader:
    """Read a page; no element, attribute or address of it, or of its pictures, could load or run anything."""
    page = Reader(text)
    unsafe = {"script", "iframe", "object", "embed", "link", "base", "form", "svg"}
    assert not unsafe & {name for name, _ in page.elements}
    for name, attributes in page.elements:
        assert not any(one.startswith("on") or one == "style" for one in attributes)
        if name == "img":
            assert (attributes["src"] or "").startswith(SVG)
            picture = ElementTree.fromstring(base64.b64decode((attributes["src"] or "").removeprefix(SVG)))
            assert not any(element.tag.endswith("script") for element in picture.iter())
    policy = next(given["content"] for _, given in page.elements if given.get("http-equiv"))
    assert policy is not None and "default-src 'none'" in policy and "script-src" not in policy
    return page


@pytest.fixture
def quick(monkeypatch) -> None:
    """Draw nothing: most of the time of a page."""
    monkeypatch.setattr(plots, "svg", lambda figure: b"<svg/>")


@pytest.fixture
def store(tmp_path: Path) -> LocalRegistry:
    return LocalRegistry(tmp_path / "registry")


def test_a_page_says_what_is_known(store):
    second = many.published(store)[1]
    page, faults = pages.of_version(store, "tiny-2bit", "1.1.0")
    said = harmless(page).said
    for fact in (
        "too lossy", "+2.00% ± 0.20%", "kl 0.01: KL divergence, nats, full encode: 0.02", second,
        "tiny-2bit@1.0.0", 'from_pretrained("tiny-2bit@1.1.0"', "131,072",
    ):  # fmt: skip
        assert fact in said, fact
    assert not faults and page.count("<img") == 1 and page == pages.of_version(store, "tiny-2bit", "1.1.0")[0]


def test_commands_and_code_of_a_page_lack_nothing(store, quick):
    """An unmeasured version of a GGUF file: what is to be loaded, and measured on which text, stands there."""
    provenance = {"model": "my model.gguf", "corpus": {"source": "my-text.jsonl"}}
    store.publish("tiny-2bit", tiny.resealed(provenance=provenance))
    page = html.unescape(pages.of_version(store, "tiny-2bit", "1.0.0")[0])
    code, command = re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)
    given = ["--model", "my model.gguf", "--corpus", "my-text.jsonl", "--registry", store.url]
    assert shlex.split(command) == ["kvq", "eval", "tiny-2bit@1.0.0", *given]
    assert 'folder = resolve("my model.gguf").path' in code and f'model=model, registry="{store.url}")' in code
    symbols = symtable.symtable(code, "page", "exec").get_symbols()
    assert {one.get_name() for one in symbols if not (one.is_assigned() or one.is_imported())} == {"print"}


def test_a_verdict_is_of_the_record_on_the_text_of_the_fit(store, quick):
    sha256 = store.publish("tiny-2bit", tiny.data()).sha256
    other = many.record(sha256, 0.9, windows=40)
    other["protocol"]["text"]["source"] = "code"
    for record in (other, many.record(sha256, 0.02)):
        store.add_evaluation(record)
    assert "usable +2.00%" in harmless(pages.of_registry(store, NOW)[0]).said
    assert "usable perplexity +2.0%" in harmless(pages.of_version(store, "tiny-2bit", "1.0.0")[0]).said


def test_damage_has_a_page_and_is_told(store, quick):
    first, second = many.published(store)
    blob = store.blob(second)
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes()[:-8] + b"damaged!")
    page, (fault,) = pages.of_version(store, "tiny-2bit", "1.1.0")
    assert "sha256" in fault and "Cannot be read" in harmless(page).said and "+2.00%" in page
    assert not pages.of_registry(store, NOW)[1], "no file is read"
    next((store.root / "evaluations" / first).iterdir()).write_text("{}")
    page, (fault,) = pages.of_registry(store, NOW)
    assert "tiny-2bit 1.0.0" in fault and "cannot be read" in harmless(page).said
    (store.events_folder("tiny-2bit") / "00000002.json").write_text("{}")
    page, (fault,) = pages.of_registry(store, NOW)
    assert "tiny-2bit" in fault and "Cannot be read" in harmless(page).said


def test_nothing_of_a_registry_becomes_markup(store):
    provenance = {"model": EVIL, "corpus": {"source": EVIL}, "environment": EVIL}
    data = tiny.resealed(provenance=provenance, fit={"layers": [{EVIL: EVIL}, EVIL]})
    published = store.publish("tiny-2bit", data, attachments={"README.md": f"# {EVIL}".encode()})
    record = many.record(published.sha256, 0.5, recipe=EVIL, gate={"bounds": {EVIL: 0.5}, "failed": [EVIL]})
    record["protocol"]["text"]["source"] = record["protocol"]["model"]["id"] = EVIL
    store.add_evaluation(record)
    for broken in ({"kl": EVIL}, {"windows": [EVIL]}, {"relative": None}):  # left out
        bad = many.record(published.sha256, 0.5)
        bad["result"]["protocols"]["full"] |= broken
        store.add_evaluation(bad)
    store.yank("tiny-2bit", "1.0.0", f"because {EVIL[:-1]}")
    for page, _ in (pages.of_version(store, "tiny-2bit", "1.0.0"), pages.of_registry(store, NOW)):
        assert "<script>alert(1)</script>" in harmless(page).said and "\u202e" not in page


def test_a_registry_has_a_row_a_version(tmp_path):
    store = many.registry(tmp_path / "registry", names=3, versions=3)
    page, faults = pages.of_registry(store, NOW, linked=True)
    said = harmless(page).said
    assert not faults and "3 names, 9 versions" in said and "drifted: 2.00 times" in said
    assert len(re.findall(r'<td><a href="model-00\d-tiny-2bit-v1\.\d\.0\.html">', page)) == 9
    assert page.count("production") == 3


def test_the_command_writes_pages(store, quick, kvq, monkeypatch, tmp_path):
    many.published(store)
    monkeypatch.chdir(tmp_path)
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    code, out, err = kvq("report", "tiny-2bit", "--registry", store.url, "--json", "--open")
    page = Path("tiny-2bit-v1.0.0.html")  # production is what the name means
    assert (code, err) == (0, "") and json.loads(out)["page"] == str(page) and page.is_file()
    assert opened == [page.absolute().as_uri()]
    assert kvq("report", "--registry", store.url, "--out", "pages")[0] == 0
    links = re.findall(r'href="([^"#]+)"', Path("pages/index.html").read_text())
    assert sorted(links) == ["tiny-2bit-v1.0.0.html", "tiny-2bit-v1.1.0.html"]
    assert all((Path("pages") / link).is_file() for link in links)
    store.blob(store.state("tiny-2bit").versions["1.1.0"].sha256).unlink()
    assert kvq("report", "tiny-2bit@1.1.0", "--registry", store.url)[0] == 1
    assert kvq("report")[0] == kvq("report", page.absolute())[0] == 2
    assert kvq("report", "none", "--registry", store.url)[0] == 3
