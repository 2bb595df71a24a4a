"""Pages of a version and of a registry: what they say, and that nothing in a registry becomes markup."""

import json
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import many_versions as many
import pytest
import tiny_artifact as tiny
from jinja2 import UndefinedError
from many_versions import greedy

from kvq_calib.report.page import known, version, wall
from kvq_calib.report.page.html import environment
from kvq_runtime.registry.local import LocalRegistry
from kvq_runtime.registry.resolve import open_registry
from kvq_runtime.registry.sound import read as read_record

EVIL = '"><script>alert(1)</script><img src=x onerror=alert(1)>\u202e'
NOW = datetime(2026, 11, 23, tzinfo=UTC)


class Reader(HTMLParser):
    """Elements with their attributes, the text of each cell, and whether every element that was opened is closed."""

    ALONE = frozenset({"meta", "br", "input"})

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


def harmless(text: str) -> Reader:
    """The page read; it has no element, attribute or address that could load or run anything but our own script."""
    read = Reader(text)
    scripts = [one for one in read.elements if one[0] == "script"]
    assert len(scripts) <= 1 and not any(attributes for _, attributes in scripts)
    assert not {"img", "iframe", "object", "embed", "link", "base", "form"} & {name for name, _ in read.elements}
    for _, attributes in read.elements:
        assert not any(name.startswith("on") or name in ("src", "style") for name in attributes)
        assert (attributes.get("href") or "#").startswith("#")
    return read


def test_a_page_says_what_is_known(store):
    first, second = many.published(store)
    found = known.of_version(store, "tiny-2bit", "1.1.0")
    text = version.page(json.loads(json.dumps(found)))
    widths = [float(width) for width in re.findall(r'<svg viewBox="0 0 ([\d.]+)', text)]
    assert len(widths) == 4 and min(widths) >= 720, "stretched to one width, a narrow picture has the larger letters"
    read = harmless(text)
    for fact in (
        "tiny-2bit@1.1.0", "+2.00%", "0.02 ± 0.0", "demo-code", "kl 0.01: KL divergence, nats, full encode: 0.02",
        "90.0% ± 4.0%", "54%", first, second, "-50.00%", "Measured on the same windows", "key.quantize.bits",
        "tiny-2bit@1.0.0", "digest of all tensors and settings",
    ):  # fmt: skip
        assert fact in read.said, fact
    assert [row["in_domain"] for row in found["losses"]] == [True, True, False]
    assert found["losses"][0]["kl"] == pytest.approx(0.02) and found["before"]["version"] == "1.0.0"
    assert [row["change"] for row in found["history"]] == ["promote", "publish", "publish"]
    assert found["sizes"][-1]["tokens"] == 131072 and found["sizes"][-1]["bytes"] < found["sizes"][-1]["of_16_bit"]


def test_the_verdict_leads_every_page_in_a_word_and_a_colour(store, kvq, tmp_path, monkeypatch):
    """And a lossy version is one to look at, though it has no bounds; the wall's rows link to pages of versions."""
    many.published(store)
    good = version.page(known.of_version(store, "tiny-2bit", "1.1.0"))
    bad = json.loads(json.dumps(known.of_version(store, "tiny-2bit", "1.1.0")))
    bad["verdict"] = {"word": "too lossy", "why": "perplexity +193.0%", "caution": "fitted on 1 sequence"}
    page = version.page(bad)
    assert page.index('class="verdict bad">too lossy') < page.index("<h2>")
    assert page.index("Caution: fitted on 1 sequence") < page.index("<h2>")
    assert (
        good.index('class="verdict') < good.index("<h2>") and 'from_pretrained("tiny-2bit@1.1.0"' in Reader(good).said
    )
    assert good.index("from_pretrained") < good.index("<h2>")
    store.publish("lossy", tiny.data(5))
    sha256 = store.state("lossy").versions["1.0.0"].sha256
    one = next(one for one in store.evaluations(next(iter(store.state("tiny-2bit").versions.values())).sha256)
               if one["protocol"].get("name", "perplexity") == "perplexity")  # fmt: skip
    figures = {"perplexity": 36.0, "reference_perplexity": 12.0, "relative": 1.93, "relative_se": 0.1, "kl": 1.08}
    result = {**one["result"], "protocols": {"full": figures}}
    result.pop("gate", None)
    store.add_evaluation({**one, "artifact": sha256, "result": result}, "lossy")
    found = wall.of_registry(store, NOW)
    (row,) = [row for row in found["versions"] if row["name"] == "lossy"]
    assert row["verdict"] == "too lossy" and row["needs"] == [f"too lossy: {row['why']}"]
    page = wall.page(found)
    assert "lossy@1.0.0" in page[page.index("To look at") : page.index("All versions")]
    assert page.index('class="verdict bad">1 too lossy') < page.index("<h2>")
    code, out, _ = kvq("report", "--registry", store.url, "--out", str(tmp_path / "pages"))
    assert code == 0 and "index.html" in out
    links = re.findall(r'href="([^"#]+)"', (tmp_path / "pages" / "index.html").read_text())
    assert sorted(set(links)) == ["lossy-v1.0.0.html", "tiny-2bit-v1.0.0.html", "tiny-2bit-v1.1.0.html"]
    assert all((tmp_path / "pages" / link).is_file() for link in links)


def test_a_verdict_is_of_the_record_whose_losses_are_shown(store):
    sha256 = store.publish("tiny-2bit", tiny.data()).sha256
    other = many.record(sha256, 0.9, windows=40)
    other["protocol"]["text"]["source"] = "code"
    for record in (other, many.record(sha256, 0.02)):
        store.add_evaluation(record)
    (row,) = wall.of_registry(store, NOW)["versions"]
    assert (row["verdict"], row["kl"]) == ("usable", 0.02), "on the text of the fit, though others are longer"
    part = many.record(store.publish("part", tiny.data(3)).sha256, 0.02)
    for figures in part["result"]["protocols"].values():
        del figures["perplexity"]
    store.add_evaluation(part)
    found = known.of_version(store, "part", "1.0.0")
    assert (found["verdict"]["word"], found["losses"]) == ("not measured", []), "half a record is none"


def test_what_was_not_measured_names_its_command(store):
    store.publish("bare", tiny.data())
    read = harmless(version.page(known.of_version(store, "bare", "1.0.0")))
    for command in (
        "eval bare@1.0.0 --model tiny-model",
        "--layers",
        "--tasks",
        "--protocol decode",
        "compare --model tiny-model",
    ):
        assert command in read.said
    assert "There is no version before it" in read.said


def test_a_damaged_version_has_a_page_and_exit_code_1(store, kvq_report):
    second = many.published(store)[1]
    blob = store.blob(second)
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes()[:-8] + b"damaged!")
    code, _, err = kvq_report("tiny-2bit@1.1.0", "--registry", store.url, "--out", "page.html")
    assert code == 1 and "sha256" in err
    read = harmless(Path("page.html").read_text())
    assert "not reached" in read.said and "fetch it again" in read.said and "cannot be compared" in read.said
    assert "+2.00%" in read.said, "records are still there"
    assert kvq_report("--registry", store.url, "--out", "wall.html")[0] == 0, "headers alone are read"


def test_a_file_or_device_that_is_there_gets_the_page_of_a_registry(store, kvq_report, tmp_path):
    many.published(store)
    (tmp_path / "page").touch()
    for path in (tmp_path / "page", Path("/dev/null")):
        code, out, err = kvq_report("--registry", store.url, "--out", path)
        assert code == 0 and str(path) in out and not err
    assert (tmp_path / "page").read_text().startswith("<!doctype html>")


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
    pages = [version.page(known.of_version(store, "tiny-2bit", "1.0.0", [beside]))]
    pages.append(wall.page(wall.of_registry(store, NOW)))
    for page in pages:
        read = harmless(page)
        assert "<script>alert(1)</script>" in read.said and "\u202e" not in page
    assert pages[0].count("<script") == 0
    assert "held 1, 2" in harmless(pages[0]).said


def test_answers_are_read_from_records_of_tasks(store):
    """As `kvq eval --tasks` writes them: a record of their own, with an accuracy, or with metrics by name."""
    published = store.publish("tiny-2bit", tiny.data())
    own = many.tasks(needle=0.25) | {"reference": {"needle": {"accuracy": 1.0, "se": 0.0}}}
    named = {"tasks": {"arc": {"metrics": {"acc,none": {"value": 0.5, "se": 0.1}, "ppl,none": {"value": 17.5}}}}}
    for number, part in enumerate((own, named, {"tasks": {"gsm8k": {"reason": "why"}}}, {"reason": "why"})):
        store.add_evaluation(many.asked(published.sha256, part, seed=number))
    found = known.of_version(store, "tiny-2bit", "1.0.0")
    rows = {(row["task"], row["metric"]): row for row in found["tasks"]}
    assert set(rows) == {("needle", "accuracy"), ("arc", "acc,none"), ("arc", "ppl,none")}
    assert rows["needle", "accuracy"]["of_16_bit"] == 1.0 and len(rows["needle", "accuracy"]["cells"]) == 6
    read = harmless(version.page(found))
    assert "25.0% ± 4.0% 100.0%" in read.said and "50.0% ± 10.0%" in read.said and "17.5" in read.said
    assert found["losses"] == [] and "kvq eval tiny-2bit@1.0.0 --model tiny-model" in read.said


def test_greedy_text_is_read_from_records_that_followed_it(store):
    published = store.publish("tiny-2bit", tiny.data())
    bins = [
        {"from": 2 * n, "to": 2 * n + 2, "kl": n / 64, "kl_se": 0.25, "kl_worst": n / 32, "entropy": 2 - n / 8,
         "decoded": n / 8} for n in range(8)
    ]  # fmt: skip
    windows = [{"first": 5, "kl": 0.1}, {"first": None, "kl": 0.0}]
    part = {"kl": 0.05, "kl_se": 0.01, "top1": 0.875, "trend": {"kl_per_1000": 1.5, "se": 0.5}, "windows": windows}
    figures = part | {"bins": bins}
    broken = (part, part | {"bins": [EVIL]}, part | {"bins": [bins[0] | {"entropy": EVIL}]}, part | {"bins": []})
    others = [greedy(published.sha256, one) for one in broken] + [greedy(published.sha256, figures, model=EVIL)]
    short = greedy(published.sha256, {"reason": f"nothing was encoded {EVIL}"})
    for record in (greedy(published.sha256, figures), *others, short):
        store.add_evaluation(record)
    found = known.of_version(store, "tiny-2bit", "1.0.0")
    assert sorted("reason" in one for one in found["greedy"]) == [False, True], "what has another form is left out"
    assert found["losses"] == [] and found["tasks"] == []
    read = harmless(version.page(json.loads(json.dumps(found))))
    for fact in (
        "5, least 5; 1 of 2 never", "0.05 ± 0.01", "+1.5 ± 0.5", "87.50%", "88% at the end", "14 to 16", "0.109 ± 0.2",
        "tiny-model (4.07M parameters). Greedy text of the 16-bit model, from 2.00 nats of entropy to 1.12: 2 windows, "
        "256 tokens of prose, held-out part, continued to 272.", "nothing was encoded \"><script>alert(1)</script>",
    ):  # fmt: skip
        assert fact in read.said, fact


@pytest.mark.parametrize("name", ["perplexity", "tasks"])
@pytest.mark.parametrize("shape", [{}, {"protocols": 3}, {"protocols": {"in-use": {"tasks": [1]}}}, {"layers": 5},
                                   {"protocols": {"full": []}}])  # fmt: skip
def test_a_record_of_another_form_is_left_out(store, shape, name):
    published = store.publish("tiny-2bit", tiny.data())
    strange = many.record(published.sha256, 0.5)
    store.add_evaluation({**strange, "protocol": strange["protocol"] | {"name": name}, "result": shape})
    found = known.of_version(store, "tiny-2bit", "1.0.0")
    assert found["losses"] == [] and found["tasks"] == []
    harmless(version.page(found))
    assert wall.of_registry(store, NOW)["versions"][0]["kl"] is None


def test_a_policy_allows_the_page_its_own_style_and_script_alone():
    page = wall.page({"kvq": "1", "registry": "here", "made": "now", "versions": [], "faults": []})
    policy = next(a["content"] for n, a in Reader(page).elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", rules["style-src"]) and "unsafe" not in policy
    assert "http" not in page.replace('http-equiv="', "")


def test_a_template_that_asks_for_what_is_not_given_fails():
    with pytest.raises(UndefinedError, match="title"):
        environment().get_template("page.html").render(kvq="1")


def test_the_frontier_takes_other_versions_and_given_records(store, kvq_report, tmp_path):
    many.published(store)
    other = store.publish("another", tiny.data(7))
    store.add_evaluation(many.record(other.sha256, 0.001, recipe="kivi-2bit", bits=3.0))
    elsewhere = many.record("higgs-2bit", 0.1, recipe="higgs-2bit", bits=2.1)
    found = known.of_version(store, "tiny-2bit", "1.1.0", [read_record(elsewhere)])
    assert [one["name"] for one in found["compared"]] == ["tiny-2bit", "another", "tiny-2bit", "higgs-2bit"]
    assert "another@1.0.0" in harmless(version.page(found)).said
    unknown = many.record("rtn-2bit", 0.1, recipe="rtn-2bit", bits=2.0)
    unknown["result"]["protocols"]["full"] |= {"kl": None, "windows": {}}
    beside = known.of_version(store, "tiny-2bit", "1.1.0", [read_record(one) for one in (elsewhere, unknown)])
    assert "Not drawn, for their divergence was not measured: rtn-2bit." in harmless(version.page(beside)).said
    assert "Not drawn" not in harmless(version.page(found)).said
    foreign = {**elsewhere, "protocol": {**elsewhere["protocol"], "model": {"id": "else"}}}
    given = tmp_path / "compare.json"
    for bad in ([foreign], {"no": "list"}, ["x"]):
        given.write_text(json.dumps(bad))
        code, _, err = kvq_report("tiny-2bit", "--registry", store.url, "--compare", given)
        assert code == 2 and "kvq compare" in err


def test_a_registry_has_a_row_a_version(tmp_path):
    store = many.registry(tmp_path / "registry", names=24, versions=3)
    found = wall.of_registry(store, NOW)
    rows = found["versions"]
    assert len(rows) == 72 and sum(row["production"] for row in rows) == 24
    assert [row["version"] for row in rows[:3]] == ["1.2.0", "1.1.0", "1.0.0"]
    assert rows[0]["losses"] == pytest.approx([0.001, 0.0015, 0.00225])
    drifted = next(row for row in rows if row["drift"] is not None)
    assert drifted["drift"] == pytest.approx(2) and drifted["week"] == 202614
    assert drifted["days"] == (NOW - datetime.fromisoformat(drifted["published"])).days
    text = wall.page(found)
    read = harmless(text)
    assert len(re.findall(r"<tr[^>]*>\s*<td>model-\d+-tiny-2bit</td>", text)) == 72
    assert "drifted: 2.00 times" in read.said and "24 names, 72 versions" in read.said
    assert len(wall.current(rows)) == 24


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


def test_a_page_is_written_into_a_pipe_and_through_a_link_and_over_neither(store, kvq_report):
    many.published(store)
    os.mkfifo("pipe")
    with ThreadPoolExecutor(1) as beside:
        read = beside.submit(subprocess.run, ["timeout", "20", "cat", "pipe"], capture_output=True, text=True)
        code, out, _ = kvq_report("tiny-2bit", "--registry", store.url, "--out", "pipe")
        assert code == 0 and Path("pipe").is_fifo()
        assert read.result().stdout.startswith("<!doctype html>") and f"{len(read.result().stdout.encode())}" in out
    Path("link.html").symlink_to("page.html")
    for _ in range(2):
        assert kvq_report("tiny-2bit", "--registry", store.url, "--out", "link.html")[0] == 0
        assert Path("link.html").is_symlink() and Path("page.html").read_text().startswith("<!doctype html>")


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
    assert "+2.00%" in read.said and "hf://org" in read.said and "Measured on the same windows" in read.said
    assert kvq_report("--registry", "hf://org")[0] == 0
    assert "1 name, 2 versions" in harmless(Path("registry.html").read_text()).said


@pytest.mark.parametrize(("count", "columns"), [(2, 2), (5, 5), (6, 3), (7, 4), (9, 5)])
def test_no_tile_stands_alone_in_a_second_row(count, columns):
    parts: Any = environment().get_template("parts.html").module
    page = parts.tiles([(number, "said") for number in range(count)]).strip()
    assert page.startswith(f'<div class="tiles of-{columns}">') and page.count('class="tile"') == count
    assert count <= columns or count - columns > 1
