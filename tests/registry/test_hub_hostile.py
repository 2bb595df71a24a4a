"""A Hub that lies: nothing of its answers becomes a path, none is without end, and no other host gets the token."""

import time
from contextlib import suppress
from hashlib import sha256
from threading import Event

import huggingface_hub
import pytest
import tiny_artifact as tiny
from hub_client import CARD, NAME, REPO, TOKEN, asked, clear
from hub_server import ENDLESS, Hub
from huggingface_hub import constants
from huggingface_hub.utils import _detect_agent

from kvq_calib.model import find
from kvq_calib.text import corpus
from kvq_runtime.disk import strict_json
from kvq_runtime.errors import NotFound
from kvq_runtime.registry import hub_client, registry, resolve
from kvq_runtime.registry.hub import HubRegistry

DIGEST = sha256(tiny.data()).hexdigest()
FILES = {"kvq.json": "GET .*/kvq.json", "the artifact": "GET /lfs", "a card": "GET .*/versions/1.0.0/README.md",
         "a record": "GET .*/resolve/.*/evaluations/"}  # fmt: skip
LISTS = {"the head": "GET /api/models/org/tiny-2bit$", "names": "GET /api/models$"}
ABOUT = {"artifact": DIGEST, "protocol": {}, "environment": {}, "result": {}}


@pytest.fixture
def store(hub, monkeypatch, tmp_path) -> HubRegistry:
    """A version with a card and a record, on a machine with an empty cache."""
    store = HubRegistry("org")
    store.publish(NAME, tiny.data(), attachments=CARD)
    store.add_evaluation(ABOUT | {"corpus": "c" * 64}, NAME)
    clear(monkeypatch, tmp_path)
    return HubRegistry("org")


def everything(store: HubRegistry) -> None:
    """Ask for all that a Hub can be asked for."""
    version = store.state(NAME).versions["1.0.0"]
    store.fetch(NAME, version)
    store.attachments(NAME, version)
    store.evaluations(DIGEST, NAME)
    store.names()


@pytest.mark.parametrize("pattern", [*FILES.values()], ids=FILES)
@pytest.mark.parametrize("content", [None, b"theirs\n"], ids=["right", "wrong"])
def test_a_header_is_no_path(pattern, content, hub, store, tmp_path):
    target = tmp_path / "home" / "site.pth"
    target.parent.mkdir()
    target.write_bytes(b"mine\n")
    length = {} if content is None else {"Content_Length": str(len(content))}
    etag = f'"{"../" * 40}{str(target).lstrip("/")}"'
    hub.faults.add(pattern, "lie", 99, body=content, ETag=etag, X_Linked_Etag=etag, X_Repo_Commit="../../x", **length)
    if content is None:
        everything(store)
    else:
        with pytest.raises((ValueError, RuntimeError), match="the Hub sent"):
            everything(store)
    assert hub.faults.happened
    assert [path.name for path in target.parent.iterdir()] == ["site.pth"] and target.read_bytes() == b"mine\n"
    assert not list(tmp_path.parent.glob("x"))
    assert all(len(path.name) == 64 for path in (tmp_path / "another-home").glob("hub/blobs/*"))


@pytest.mark.parametrize("sha", ["../../../../x", "C" * 40, None])
def test_a_head_is_a_commit(sha, hub, store, tmp_path, kvq):
    body = strict_json.dumps({"id": REPO, "sha": sha, "siblings": []}).encode()
    hub.faults.add(LISTS["the head"], "lie", 99, body=body, Content_Length=str(len(body)))
    code, _, error = kvq("pull", f"hf://org/{NAME}", "-o", tmp_path / "out")
    assert code == 1 and "commit" in error and "another form" in error and "check HF_ENDPOINT" in error
    assert not list((tmp_path / "another-home").rglob("*.json"))


def test_paths_that_a_hub_lists_become_no_paths(hub, store, tmp_path):
    evil = {"../../x": b"theirs", f"evaluations/{DIGEST}/../../../y.json": b"theirs", "/etc/z": b"theirs"}
    hub.repos[REPO].add("by hand", hub.repos[REPO].files | evil)
    everything(store)
    assert not {"x", "y.json", "z"} & {path.name for path in tmp_path.parent.rglob("*")}


@pytest.mark.parametrize("pattern", [*FILES.values(), *LISTS.values()], ids=[*FILES, *LISTS])
def test_an_answer_without_end_is_left(pattern, hub, store):
    hub.faults.add(pattern, "endless", 99)
    with pytest.raises(RuntimeError, match="sends more than the [0-9]+ bytes that are .*check HF_ENDPOINT"):
        everything(store)
    assert hub.faults.happened and hub.faults.sent < ENDLESS


@pytest.mark.parametrize(("limit", "most"), [("MAX_RECORDS", 2), ("MAX_RECORD_BYTES", 300)])
def test_records_without_end_are_left(limit, most, hub, store, monkeypatch):
    """Each is small, and there is always one more."""
    for number in range(3):
        store.add_evaluation(ABOUT | {"corpus": f"{number:064}"}, NAME)
    assert len(HubRegistry("org").evaluations(DIGEST, NAME)) == 4
    monkeypatch.setattr(registry, limit, most)
    with pytest.raises(RuntimeError, match=f"evaluations/{DIGEST}: more than .* records or .* bytes of them"):
        HubRegistry("org").evaluations(DIGEST, NAME)


@pytest.mark.parametrize("kind", ["trickle", "framing", "heads"])
@pytest.mark.parametrize("pattern", [FILES["kvq.json"], LISTS["the head"]], ids=["kvq.json", "the head"])
def test_an_answer_that_comes_byte_by_byte_is_left(kind, pattern, hub, store, monkeypatch):
    monkeypatch.setattr(hub_client, "SILENCE", 0.5)
    huggingface_hub.close_session()
    hub.faults.add(pattern, kind, 99)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="bytes a second|too long"):
        resolve.resolve(f"hf://org/{NAME}")
    assert time.monotonic() - began < 60


def test_a_renewal_of_the_token_without_end_is_left(hub, store, monkeypatch):
    """As of a login by browser, whose token the library renews at the Hub whenever it is read."""
    monkeypatch.setattr(hub_client, "SILENCE", 0.1)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: Event().wait(5))
    for request in (store.check_writable, lambda: store.state(NAME)):
        with pytest.raises(RuntimeError, match="took too long; check HF_ENDPOINT"):
            request()


def test_a_redirect_without_end_is_left(hub, store):
    hub.faults.add(FILES["kvq.json"], "status", 99, status=302, Location=f"{hub.url}/{REPO}/resolve/main/kvq.json")
    with pytest.raises(RuntimeError, match="redirects without end"):
        resolve.resolve(f"hf://org/{NAME}")


@pytest.mark.parametrize("body", [b"<html>no</html>", b'[{"id":4}]'])
@pytest.mark.parametrize("pattern", LISTS.values(), ids=LISTS)
def test_an_answer_of_another_form_is_one_sentence(pattern, body, hub, store, kvq, monkeypatch):
    monkeypatch.setenv("KVQ_REGISTRY", "hf://org")
    hub.faults.add(pattern, "lie", 99, body=body, Content_Length=str(len(body)))
    for command in (("list",), ("show", NAME)):
        code, _, error = kvq(*command)
        assert code in (0, 1) and "Traceback" not in error and error.count("\n") <= 2
        assert code == 0 or "the Hub at" in error, (command, error)


def test_the_token_does_not_follow_to_a_next_page_or_redirect_elsewhere(hub, store):
    with Hub() as other:
        hub.faults.add(LISTS["names"], "lie", 1, Link=f'<{other.url}/api/models?author=org>; rel="next"')
        with pytest.raises(RuntimeError, match="names another address, which gets no token"):
            store.names()
        assert not other.requests
        for pattern in (FILES["kvq.json"], LISTS["the head"]):
            hub.faults.add(pattern, "status", 99, status=302, Location=f"{other.url}/api/models/{REPO}")
            with suppress(RuntimeError, ValueError):
                store.state(NAME)
            hub.faults = type(hub.faults)()
        assert other.requests and not any(request.authorization for request in other.requests)
    assert any(TOKEN in (request.authorization or "") for request in hub.requests)


def test_the_hub_is_asked_nothing_about_the_environment(hub, store, monkeypatch, tmp_path):
    """With telemetry, huggingface_hub asks for names of environment variables, and sends which of them it found."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "none.json"))
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(_detect_agent, "_registry", None)
    with pytest.raises(NotFound):
        find.resolve("org/model")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
    with pytest.raises(RuntimeError):
        corpus.pin("org/dataset")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
    HubRegistry("org").publish(NAME, tiny.data(1))
    everything(store)
    assert {"GET /api/models/org/model/revision/main", "GET /api/datasets/org/dataset"} <= {*asked(hub)}
    assert asked(hub) and not [line for line in asked(hub) if "harness" in line]
