"""A Hub that lies: nothing of its answers becomes a path, and none is without end."""

import io
import time
from contextlib import suppress
from hashlib import sha256

import huggingface_hub
import pytest
import tiny_artifact as tiny
from hub_client import CARD, NAME, REPO, TOKEN, asked, clear
from hub_http import ENDLESS
from hub_server import Hub
from huggingface_hub import constants
from huggingface_hub.utils import _detect_agent

from kvq_runtime.registry import registry, resolve
from kvq_runtime.registry.hub import ask, client
from kvq_runtime.registry.hub import index as hub_index
from kvq_runtime.registry.hub.registry import HubRegistry

DIGEST = sha256(tiny.data()).hexdigest()
FILES = {"kvq.json": "GET .*/kvq.json", "the artifact": "GET /lfs", "a card": "GET .*/versions/1.0.0/README.md",
         "a record": "GET .*/resolve/.*/evaluations/"}  # fmt: skip
LISTS = {"the head": "GET /api/models/org/tiny-2bit$", "records": "GET .*/tree/", "names": "GET /api/models$",
         "tags": "GET .*/refs"}  # fmt: skip


@pytest.fixture
def store(hub, monkeypatch, tmp_path) -> HubRegistry:
    """A version with a card and a record, on a machine with an empty cache."""
    store = HubRegistry("org")
    store.publish(NAME, tiny.data(), attachments=CARD)
    about = {"corpus": "c" * 64, "protocol": {}, "environment": {}, "result": {}}
    store.add_evaluation({"artifact": DIGEST, **about}, NAME)
    clear(monkeypatch, tmp_path)
    hub.redirect = False
    return HubRegistry("org")


def everything(store: HubRegistry) -> None:
    """Ask for all that a Hub can be asked for, each by itself."""
    version = store.state(NAME).versions["1.0.0"]
    for question in (
        lambda: store.fetch_verified(NAME, version),
        lambda: store.attachments(NAME, version),
        lambda: store.evaluations(DIGEST, NAME),
        lambda: store.names(),
        lambda: store.examine(),
    ):
        question()


@pytest.mark.parametrize("there", [True, False], ids=["there", "new"])
@pytest.mark.parametrize("pattern", [*FILES.values()], ids=FILES)
@pytest.mark.parametrize("content", [None, b"theirs\n"], ids=["right", "wrong"])
def test_an_etag_is_no_path(pattern, there, content, hub, store, tmp_path):
    target = tmp_path / "home" / "site.pth"
    target.parent.mkdir()
    if there:
        target.write_bytes(b"mine\n")
    pattern = pattern.replace("/lfs", ".*/kvq.safetensors")
    length = {} if content is None else {"Content_Length": str(len(content))}
    etag = f'"{"../" * 40}{str(target).lstrip("/")}"'
    hub.faults.add(pattern, "lie", 99, body=content, ETag=etag, X_Linked_Etag=etag, X_Repo_Commit="../../x", **length)
    if content is None:
        everything(store)
    else:
        with pytest.raises((ValueError, RuntimeError), match="twice; expected|invalid JSON"):
            everything(store)
    assert hub.faults.happened
    assert [path.name for path in target.parent.iterdir()] == (["site.pth"] if there else [])
    assert not there or target.read_bytes() == b"mine\n"
    assert not list(tmp_path.parent.glob("x"))
    kept = [path.name for path in (tmp_path / "another-hf-cache").glob("*/blobs/*")]
    assert all(len(name) == 64 for name in kept)


@pytest.mark.parametrize("sha", ["../../../../x", "c" * 39, "C" * 40, 7, None, ["c" * 40]])
def test_a_head_is_a_commit(sha, hub, store, tmp_path, kvq):
    body = hub_index.strict_json.dumps({"id": REPO, "sha": sha}).encode()
    hub.faults.add(LISTS["the head"], "lie", 99, body=body, Content_Length=str(len(body)))
    lock = tmp_path / "kvq.lock"
    code, _, said = kvq("pull", f"hf://org/{NAME}", "-o", tmp_path / "out", "--lock", lock)
    assert code == 1 and "commit" in said and "another form" in said and "check HF_ENDPOINT" in said
    assert not lock.exists() and not list((tmp_path / "another-hf-cache").rglob("main"))


def test_a_link_in_the_cache_that_leads_elsewhere_is_not_read(hub, store, tmp_path):
    store.state(NAME)
    (link,) = (tmp_path / "another-hf-cache").rglob("kvq.json")
    mine = tmp_path / "mine.json"
    mine.write_bytes(link.read_bytes())
    link.unlink()
    link.symlink_to(mine)
    before = len(asked(hub))
    HubRegistry("org").state(NAME)
    assert [line for line in asked(hub)[before:] if "kvq.json" in line]
    assert mine.exists() and link.resolve().parent.name == "blobs"


@pytest.mark.parametrize("pattern", [*FILES.values(), *LISTS.values()], ids=[*FILES, *LISTS])
def test_an_answer_without_end_is_left(pattern, hub, store):
    hub.faults.add(pattern.replace("/lfs", ".*/kvq.safetensors"), "endless", 99)
    with pytest.raises(RuntimeError, match="sends more than the [0-9]+ bytes that are expected; check HF_ENDPOINT"):
        everything(store)
    assert hub.faults.happened and hub.faults.sent < ENDLESS


@pytest.mark.parametrize(("limit", "most"), [("MAX_RECORDS", 2), ("BYTES", 300)])
def test_records_without_end_are_left(limit, most, hub, store, monkeypatch):
    """Each is small, and there is always one more."""
    for number in range(3):
        about = {"corpus": f"{number:064}", "protocol": {}, "environment": {}, "result": {}}
        store.add_evaluation({"artifact": DIGEST, **about}, NAME)
    assert len(HubRegistry("org").evaluations(DIGEST, NAME)) == 4
    monkeypatch.setattr(registry, limit, most)
    with pytest.raises(RuntimeError, match=f"evaluations/{DIGEST}: more than .* records or .* bytes of them"):
        HubRegistry("org").evaluations(DIGEST, NAME)


def test_a_limit_is_of_all_pages_of_a_list(hub, store, monkeypatch):
    sizes, read = [], ask._json
    monkeypatch.setattr(ask, "_json", lambda *given: sizes.append((found := read(*given))[1]) or found)
    path = f"/api/models/{REPO}/tree/main"
    rows = [*ask.pages(path, {"recursive": "true"})]
    assert len(sizes) > 1
    monkeypatch.setattr(ask, "ANSWER", sum(sizes))
    assert [*ask.pages(path, {"recursive": "true"})] == rows
    monkeypatch.setattr(ask, "ANSWER", sum(sizes[: len(sizes) // 2]) - 1)
    with pytest.raises(RuntimeError, match="bytes that are expected"):
        list(ask.pages(path, {"recursive": "true"}))


def test_a_limit_is_of_all_tries_of_a_file(hub, store):
    """What was received before counts."""
    address = f"{hub.url}/{REPO}/resolve/main/kvq.json"
    ask.append(address, whole := io.BytesIO(), 1 << 16)
    size = len(whole.getvalue())
    begun = io.BytesIO()
    begun.write(whole.getvalue()[: size - 4])
    with pytest.raises(RuntimeError, match="more than the 3 bytes that are expected"):
        ask.append(address, begun, size - 1)
    begun.seek(size - 4)
    ask.append(address, begun, size)
    assert begun.getvalue() == whole.getvalue()


@pytest.mark.parametrize("kind", ["trickle", "framing", "heads"])
@pytest.mark.parametrize("pattern", [FILES["kvq.json"], LISTS["the head"]], ids=["kvq.json", "the head"])
def test_an_answer_that_comes_byte_by_byte_is_left(kind, pattern, hub, store, monkeypatch):
    for module, name in ((constants, "HF_HUB_ETAG_TIMEOUT"), (client, "SILENCE")):
        monkeypatch.setattr(module, name, 0.3)
    huggingface_hub.close_session()
    hub.faults.add(pattern, kind, 99)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="bytes a second|to begin"):
        resolve.resolve(f"hf://org/{NAME}")
    assert time.monotonic() - began < 30 and len(hub.faults.happened) == 1


def test_a_redirect_without_end_is_left(hub, store):
    hub.faults.add(FILES["kvq.json"], "status", 99, status=302, Location=f"{hub.url}/{REPO}/resolve/main/kvq.json")
    with pytest.raises(RuntimeError, match="redirects without end"):
        resolve.resolve(f"hf://org/{NAME}")


@pytest.mark.parametrize("body", [b"<html>no</html>", b'""', b'{"tags":3}', b'[{"id":4}]', b"[[]]", b"[NaN]"])
@pytest.mark.parametrize("pattern", LISTS.values(), ids=LISTS)
def test_an_answer_of_another_form_is_one_sentence(pattern, body, hub, store, kvq, monkeypatch):
    monkeypatch.setenv("KVQ_REGISTRY", "hf://org")
    hub.faults.add(pattern, "lie", 99, body=body, Content_Length=str(len(body)))
    for command in (("list",), ("show", NAME), ("doctor",)):
        code, _, said = kvq(*command)
        assert code in (0, 1) and "Traceback" not in said and said.count("\n") <= 2
        assert code == 0 or "the Hub at" in said, (command, said)


@pytest.mark.parametrize("link", ["{other}", "{hub}//{host}"])
def test_the_token_does_not_follow_to_a_next_page_elsewhere(link, hub, store):
    """Nor where the path begins as a host does."""
    with Hub() as other:
        link = link.format(other=other.url, hub=hub.url, host=other.url.removeprefix("http://"))
        hub.faults.add(LISTS["names"], "lie", 1, Link=f'<{link}/api/models?author=org>; rel="next"')
        with suppress(RuntimeError):  # there is no such page
            store.names()
        assert not other.requests
    assert any(TOKEN in (request.authorization or "") for request in hub.requests)


def test_an_address_with_a_token_is_quoted_without_it(hub, store, monkeypatch, kvq):
    monkeypatch.setenv("HF_ENDPOINT", hub.url.replace("//", "//me:hf_" + "secret" * 3 + "@"))
    for pattern, status in (("GET /api/models/", 500), ("GET /api/models/", 404), ("kvq.json", 403)):
        hub.faults.add(pattern, "status", 5, status=status)
        code, _, said = kvq("show", f"hf://org/{NAME}")
        assert code and said and "secret" not in said


@pytest.mark.parametrize("given", ["hf_{}@x", "n@hf_{}", "hf://hf_{}/n", "org/n@hf_{}", "hf_{}"])
def test_a_token_that_stands_in_a_reference_is_not_repeated(given, kvq, tmp_path):
    secret = "Secret" * 3
    (tmp_path / "r").mkdir()
    for command in (("show",), ("history",), ("copy",), ("promote",)):
        to = ["hf://org"] if command == ("copy",) else []
        code, _, said = kvq(*command, given.format(secret), *to, "--registry", (tmp_path / "r").as_uri())
        assert code and said and secret not in said


def test_the_hub_is_asked_nothing_about_the_environment(hub, store, monkeypatch, tmp_path):
    """With telemetry, huggingface_hub asks for names of environment variables, and sends which of them it found."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "none.json"))
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(_detect_agent, "_registry", None)
    HubRegistry("org").publish(NAME, tiny.data(1))
    everything(store)
    assert asked(hub) and not [line for line in asked(hub) if "harness" in line]
