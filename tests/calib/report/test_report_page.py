"""Pages of a version and of a registry: what they say, and that nothing in a registry becomes markup."""

import base64
import json
import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import many_versions as many
import pytest
import tiny_artifact as tiny
from jinja2 import UndefinedError

from kvq_calib.report import registry_page, version_page
from kvq_calib.report.html import environment
from kvq_runtime.registry.evaluation_records import parse as read_record
from kvq_runtime.registry.local import LocalRegistry
from kvq_runtime.registry.resolve import open_registry

EVIL = '"><script>alert(1)</script><img src=x onerror=alert(1)>\u202e'
NOW = datetime(2026, 11, 23, tzinfo=UTC)


class Reader(HTMLParser):
    """Elements with their attributes, the text of each cell, and whether every element that was opened is closed."""

    ALONE = frozenset({"meta", "img"})

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open, f"{self.open} is not closed"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.ALONE:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & set(self.open):
            self.text.append(data)

    @property
    def said(self) -> str:
        return " ".join(" ".join(self.text).split())


@pytest.fixture
def store(tmp_path: Path) -> LocalRegistry:
    return LocalRegistry(tmp_path / "registry")


SVG = "data:image/svg+xml;base64,"


def harmless(text: str) -> Reader:
    """The page read; no element, attribute or address of it, or of its pictures, could load or run anything."""
    read = Reader(text)
    assert not {"script", "iframe", "object", "embed", "link", "base", "form", "svg"} & {
        name for name, _ in read.elements
    }
    for name, attributes in read.elements:
        assert not any(one.startswith("on") or one == "style" for one in attributes)
        assert (attributes.get("href") or "#").startswith("#") and ("src" in attributes) == (name == "img")
        if name == "img":
            assert attributes["src"].startswith(SVG)
            picture = ElementTree.fromstring(base64.b64decode(attributes["src"].removeprefix(SVG)))
            for element in picture.iter():
                assert not element.tag.endswith("script")
                assert not any(one.startswith("on") for one in element.attrib)
                links = [value for one, value in element.attrib.items() if one.endswith("href")]
                assert all(link.startswith("#") for link in links)
    return read


def test_a_page_says_what_is_known(store):
    second = many.published(store)[1]
    found = version_page.of_version(store, "tiny-2bit", "1.1.0")
    text = version_page.page(json.loads(json.dumps(found)))
    read = harmless(text)
    for fact in (
        "tiny-2bit@1.1.0", "+2.00%", "0.02 ± 0.0", "demo-code", "kl 0.01: KL divergence, nats, full encode: 0.02",
        second, "tiny-2bit@1.0.0", "all checks of kvq verify passed", 'from_pretrained("tiny-2bit@1.1.0"',
    ):  # fmt: skip
        assert fact in read.said, fact
    assert [row["in_domain"] for row in found["losses"]] == [True, True, False]
    assert found["losses"][0]["kl"] == pytest.approx(0.02)
    assert [row["change"] for row in found["history"]] == ["promote", "publish", "publish"]
    assert found["sizes"][-1]["tokens"] == "131,072"
    assert text.count("<img") == 3 and text.index('class="verdict') < text.index("<h2>")
    assert text == version_page.page(json.loads(json.dumps(found))), "pictures are the same bytes again"


def test_a_verdict_is_of_the_record_whose_losses_are_shown(store):
    sha256 = store.publish("tiny-2bit", tiny.data()).sha256
    other = many.record(sha256, 0.9, windows=40)
    other["protocol"]["text"]["source"] = "code"
    for record in (other, many.record(sha256, 0.02)):
        store.add_evaluation(record)
    (row,) = registry_page.of_registry(store, NOW)["versions"]
    assert (row["verdict"], row["kl"]) == ("usable", 0.02), "on the text of the fit, though others are longer"
    part = many.record(store.publish("part", tiny.data(3)).sha256, 0.02)
    for figures in part["result"]["protocols"].values():
        del figures["perplexity"]
    store.add_evaluation(part)
    found = version_page.of_version(store, "part", "1.0.0")
    assert (found["verdict"]["word"], found["losses"]) == ("not measured", []), "half a record is none"


def test_a_damaged_version_has_a_page_and_exit_code_1(store, kvq_report):
    second = many.published(store)[1]
    blob = store.blob(second)
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes()[:-8] + b"damaged!")
    code, _, err = kvq_report("tiny-2bit@1.1.0", "--registry", store.url, "--out", "page.html")
    assert code == 1 and "sha256" in err
    read = harmless(Path("page.html").read_text())
    assert "fetch it again" in read.said and "tiny-2bit@1.1.0 damaged" in read.said
    assert "+2.00%" in read.said, "records are still there"
    assert kvq_report("--registry", store.url, "--out", "wall.html")[0] == 0, "headers alone are read"


def test_damaged_records_and_a_missing_file_have_a_page(store, kvq_report):
    second = many.published(store)[1]
    next((store.root / "evaluations" / second).iterdir()).write_text("{}")
    code, _, err = kvq_report("tiny-2bit@1.1.0", "--registry", store.url)
    assert code == 1 and "evaluations" in err and "attachments" not in err
    store.blob(second).unlink()
    code, _, err = kvq_report("tiny-2bit@1.1.0", "--registry", store.url)
    read = harmless(Path("tiny-2bit-v1.1.0.html").read_text())
    assert code == 1 and "The file does not load" in read.said and "tiny-2bit@1.1.0 damaged" in read.said
    code, _, err = kvq_report("--registry", store.url)
    assert code == 1 and "tiny-2bit 1.1.0" in err
    assert "cannot be read" in harmless(Path("registry.html").read_text()).said


def test_nothing_of_a_registry_becomes_markup(store):
    provenance = {
        "model": {"id": EVIL, "revision": EVIL},
        "corpus": {"source": EVIL, EVIL: EVIL},
        "environment": EVIL,
        "held": [1, 2],
    }
    data = tiny.resealed(provenance=provenance, fit={"layers": [{EVIL: EVIL}, EVIL]})
    published = store.publish("tiny-2bit", data, attachments={"README.md": f"# {EVIL}</pre>{EVIL}".encode()})
    record = many.record(published.sha256, 0.5, recipe=EVIL, gate={"bounds": {EVIL: 0.5}, "failed": [EVIL]})
    record["protocol"]["text"]["source"] = record["protocol"]["model"]["id"] = EVIL
    record["result"]["texts"] = {EVIL: record["result"]["texts"]["demo-code"]}
    record["protocol"]["texts"] = {EVIL: record["protocol"]["texts"]["demo-code"]}
    record["result"]["layers"][0][EVIL] = 0.5
    store.add_evaluation(record)
    store.add_evaluation(many.asked(published.sha256, many.tasks(**{EVIL: 0.5}), model={"id": EVIL}))
    for broken in ({"kl": EVIL}, {"windows": [EVIL]}, {"relative": None}):
        bad = many.record(published.sha256, 0.5)
        bad["result"]["protocols"]["full"] |= broken
        store.add_evaluation(bad)
    store.yank("tiny-2bit", "1.0.0", f"because {EVIL[:-1]}")
    beside = read_record({**record, "artifact": EVIL})
    pages = [version_page.page(version_page.of_version(store, "tiny-2bit", "1.0.0", [beside]))]
    pages.append(registry_page.page(registry_page.of_registry(store, NOW)))
    for page in pages:
        read = harmless(page)
        assert "<script>alert(1)</script>" in read.said and "\u202e" not in page


@pytest.mark.parametrize("name", ["perplexity", "tasks"])
@pytest.mark.parametrize("shape", [{}, {"protocols": 3}, {"protocols": {"in-use": {"tasks": [1]}}}, {"layers": 5},
                                   {"protocols": {"full": []}}])  # fmt: skip
def test_a_record_of_another_form_is_left_out(store, shape, name):
    published = store.publish("tiny-2bit", tiny.data())
    strange = many.record(published.sha256, 0.5)
    store.add_evaluation({**strange, "protocol": strange["protocol"] | {"name": name}, "result": shape})
    found = version_page.of_version(store, "tiny-2bit", "1.0.0")
    assert found["losses"] == []
    harmless(version_page.page(found))
    assert registry_page.of_registry(store, NOW)["versions"][0]["kl"] is None


def test_a_policy_allows_the_page_its_own_style_and_script_alone():
    page = registry_page.page({"kvq": "1", "registry": "here", "made": "now", "versions": [], "faults": []})
    policy = next(a["content"] for n, a in Reader(page).elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", rules["style-src"]) and "unsafe" not in policy
    assert "script-src" not in rules and rules["img-src"] == "data:"
    assert "http" not in page.replace('http-equiv="', "")


def test_a_template_that_asks_for_what_is_not_given_fails():
    with pytest.raises(UndefinedError, match="title"):
        environment().get_template("page.html").render(kvq="1")


def test_the_frontier_takes_other_versions_and_given_records(store, kvq_report, tmp_path):
    many.published(store)
    other = store.publish("another", tiny.data(7))
    store.add_evaluation(many.record(other.sha256, 0.001, recipe="kivi-2bit", bits=3.0))
    elsewhere = many.record("higgs-2bit", 0.1, recipe="higgs-2bit", bits=2.1)
    found = version_page.of_version(store, "tiny-2bit", "1.1.0", [read_record(elsewhere)])
    assert [one["name"] for one in found["compared"]] == [
        "tiny-2bit@1.1.0",
        "another@1.0.0",
        "tiny-2bit@1.0.0",
        "higgs-2bit",
    ]
    assert "another@1.0.0" in harmless(version_page.page(found)).said
    foreign = {**elsewhere, "protocol": {**elsewhere["protocol"], "model": {"id": "else"}}}
    given = tmp_path / "compare.json"
    for bad in ([foreign], {"no": "list"}, ["x"]):
        given.write_text(json.dumps(bad))
        code, _, err = kvq_report("tiny-2bit", "--registry", store.url, "--compare", given)
        assert code == 2 and "kvq compare" in err


def test_a_registry_has_a_row_a_version(tmp_path):
    store = many.registry(tmp_path / "registry", names=24, versions=3)
    found = registry_page.of_registry(store, NOW)
    rows = found["versions"]
    assert len(rows) == 72 and sum(row["production"] for row in rows) == 24
    assert [row["version"] for row in rows[:3]] == ["1.2.0", "1.1.0", "1.0.0"]
    drifted = next(row for row in rows if row["drift"] is not None)
    assert drifted["drift"] == pytest.approx(2) and drifted["week"] == 202614
    assert drifted["days"] == (NOW - datetime.fromisoformat(drifted["published"])).days
    text = registry_page.page(found)
    read = harmless(text)
    assert len(re.findall(r"<tr>\s*<td>model-\d+-tiny-2bit</td>", text)) == 72
    assert "drifted: 2.00 times" in read.said and "24 names, 72 versions" in read.said


def test_a_name_that_cannot_be_read_is_a_line(tmp_path, kvq_report):
    store = many.registry(tmp_path / "registry", names=2)
    (store.events_folder("model-001-tiny-2bit") / "00000002.json").write_text("{}")
    code, _, err = kvq_report("--registry", store.url, "--out", "wall.html")
    assert code == 1 and "model-001-tiny-2bit" in err
    assert "cannot be read" in Reader(Path("wall.html").read_text()).said


@pytest.fixture
def kvq_report(kvq, monkeypatch, tmp_path):
    """Run `kvq report` in a folder of its own; the command is there whether its package was installed anew or not."""
    from kvq_calib.cli import commands
    from kvq_runtime.cli import main as cli

    monkeypatch.chdir(tmp_path)
    plain = cli.parser

    def parser():
        top = plain()
        subparsers = next(action for action in top._actions if action.dest == "command")
        if "report" not in (subparsers.choices or {}):
            commands.add_report(subparsers)
        return top

    monkeypatch.setattr(cli, "parser", parser)
    return lambda *arguments: kvq("report", *arguments)


def test_the_command_writes_a_page_or_prints_the_data(store, kvq_report, monkeypatch):
    many.published(store)
    code, out, err = kvq_report("tiny-2bit", "--registry", store.url)
    assert (code, err) == (0, "") and "tiny-2bit-v1.0.0.html" in out, "production is what the name means"
    assert Path("tiny-2bit-v1.0.0.html").read_text().startswith("<!doctype html>")
    code, out, err = kvq_report("tiny-2bit@1.1.0", "--registry", store.url, "--json")
    assert (code, err) == (0, "") and json.loads(out)["version"] == "1.1.0"
    assert not Path("tiny-2bit-v1.1.0.html").exists()
    code, out, _ = kvq_report("--registry", store.url, "--json", "--out", "wall.html")
    assert code == 0 and len(json.loads(out)["versions"]) == 2 and Path("wall.html").exists()
    code, out, _ = kvq_report("--registry", store.url, "--out", "pages")
    assert code == 0 and "index.html" in out
    links = re.findall(r'href="([^"#]+)"', Path("pages/index.html").read_text())
    assert sorted(links) == ["tiny-2bit-v1.0.0.html", "tiny-2bit-v1.1.0.html"]
    assert all((Path("pages") / link).is_file() for link in links)
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: bool(opened.append(address)) or len(opened) > 1)
    for _ in range(2):
        code, _, err = kvq_report("tiny-2bit", "--registry", store.url, "--open")
        assert code == 0 and ("no browser was found" in err) == (len(opened) == 1)
    assert opened[0] == Path("tiny-2bit-v1.0.0.html").absolute().as_uri()
    code, out, _ = kvq_report("tiny-2bit@1.1.0", "--registry", store.url, "--json", "--open")
    assert code == 0 and json.loads(out) and opened[2] == Path("tiny-2bit-v1.1.0.html").absolute().as_uri()
    path = store.fetch("tiny-2bit", store.state("tiny-2bit").versions["1.0.0"])
    copy = Path("copy.safetensors")
    copy.write_bytes(path.read_bytes())
    assert kvq_report(copy)[0] == 0
    assert "a registry keeps the history" in Reader(Path("copy.html").read_text()).said


def test_the_command_says_what_is_wrong(store, kvq_report, tmp_path):
    many.published(store)
    assert kvq_report()[0] == 2
    assert kvq_report("none", "--registry", store.url)[0] == 3
    assert kvq_report("tiny-2bit@9.0.0", "--registry", store.url)[0] == 3
    assert kvq_report("tiny-2bit", "--registry", tmp_path / "no-folder")[0] == 3
    assert kvq_report("--registry", store.url, "--compare", "x.json")[0] == 2


def test_a_registry_on_a_hub_has_pages_too(hub, kvq_report):
    many.published(open_registry("hf://org"))
    code, _, err = kvq_report("hf://org/tiny-2bit@1.1.0")
    assert (code, err) == (0, "")
    read = harmless(Path("tiny-2bit-v1.1.0.html").read_text())
    assert "+2.00%" in read.said and "hf://org" in read.said
    assert kvq_report("--registry", "hf://org")[0] == 0
    assert "1 name, 2 versions" in harmless(Path("registry.html").read_text()).said
