"""Who may read and write a registry on a Hub, and who never sees the token."""

import logging
import traceback

import pytest
import tiny_artifact as tiny
from hub_client import CARD, NAME, REPO, TOKEN, clear, tidy
from hub_server import Hub
from huggingface_hub import constants

from kvq_runtime.errors import NotFound
from kvq_runtime.registry import resolve
from kvq_runtime.registry.hub.registry import HubRegistry


@pytest.fixture
def store(hub) -> HubRegistry:
    return resolve.open_registry("hf://org")


def test_private_gated_missing(hub, monkeypatch, tmp_path):
    store = HubRegistry("org", private=True)
    store.publish(NAME, tiny.data())
    assert hub.repos[REPO].private and store.names() == [NAME]
    clear(monkeypatch, tmp_path)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(NotFound, match="does not exist, or is private.*hf auth login"):
        resolve.resolve(f"hf://org/{NAME}")
    assert store.names() == []
    with pytest.raises(PermissionError, match="does not accept the token.*hf auth login"):
        store.publish(NAME, tiny.data(1))
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    assert resolve.resolve(f"hf://org/{NAME}").version == "1.0.0"
    with pytest.raises(PermissionError, match="the token may not do this"):
        store.publish(NAME, tiny.data(1))
    with pytest.raises(NotFound, match="no artifact other at"):
        resolve.resolve("hf://org/other")
    clear(monkeypatch, tmp_path / "third")
    hub.repos[REPO].private, hub.repos[REPO].gated = False, True
    with pytest.raises(PermissionError, match=f"is gated: accept its terms at {hub.url}/{REPO}"):
        resolve.resolve(f"hf://org/{NAME}")
    hub.allowed.add("reader")
    assert resolve.resolve(f"hf://org/{NAME}").version == "1.0.0"
    assert tidy(hub) == ["1.0.0"]


def test_the_token_is_seen_by_the_hub_alone(hub, store, monkeypatch, tmp_path, caplog, capsys):
    """A canary: in no log, error, artifact or file, and at no other origin, even where the server says it back."""
    caplog.set_level(logging.DEBUG)
    store.publish(NAME, tiny.data(), attachments=CARD)
    clear(monkeypatch, tmp_path)
    resolve.load_artifact(f"hf://org/{NAME}")
    assert TOKEN not in caplog.text
    del hub.users[TOKEN]  # from here on the server repeats the token in its errors
    for action in (lambda: store.publish(NAME, tiny.data(1)), lambda: store.names(), lambda: store.state(NAME)):
        with pytest.raises(PermissionError) as error:
            action()
        assert TOKEN not in "".join(traceback.format_exception(error.value))
    monkeypatch.setattr(hub, "user", lambda given: (_ for _ in ()).throw(Refusal(given)))
    with pytest.raises(RuntimeError, match="no answer from the Hub") as error:
        store.publish(NAME, tiny.data(1))
    assert TOKEN not in "".join(traceback.format_exception(error.value))
    # the HTTP library's own trace of what a server sends is the one place that is not ours to clean
    assert not any(TOKEN in entry.getMessage() for entry in caplog.records if not entry.name.startswith("httpcore"))
    assert TOKEN not in "".join(capsys.readouterr())
    assert any(TOKEN in (request.authorization or "") for request in hub.requests)
    assert not any(request.authorization for request in hub.requests if request.origin != "hub")
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert written and not any(TOKEN.encode() in path.read_bytes() for path in written)
    repo = hub.repos[REPO]
    assert not any(TOKEN.encode() in data for data in [*repo.blobs.values(), *hub.lfs.values()])


ACTIONS = {  # {what is done: (the request that is refused, how)}
    "list names": ("GET /api/models$", lambda store: store.names()),
    "read": ("GET /api/models/org/", lambda store: store.current_state(NAME)),
    "publish": ("POST .*/commit/", lambda store: store.publish(NAME, tiny.data(1))),
    "upload": ("POST .*objects/batch", lambda store: store.publish(NAME, tiny.data(1))),
    "promote": ("POST .*/commit/", lambda store: store.promote(NAME, "1.0.0")),
    "add a record": ("POST .*/commit/", lambda store: store.add_record("evaluations", "0" * 64, b"{}", NAME)),
    "collect garbage": ("GET .*/tree/", lambda store: store.collect()),
    "ask whose token it is": ("GET /api/whoami", lambda store: store.check_writable()),
}


@pytest.mark.parametrize("status, kind", [(403, PermissionError), (500, RuntimeError), (503, RuntimeError)])
@pytest.mark.parametrize("pattern, action", ACTIONS.values(), ids=ACTIONS)
def test_a_refusal_that_repeats_the_token_is_quoted_without_it(pattern, action, status, kind, hub, store, caplog):
    caplog.set_level(logging.DEBUG, "kvq_runtime")
    store.publish(NAME, tiny.data())
    hub.faults.add(pattern, "status", times=1000, status=status)
    with pytest.raises(kind) as error:
        action(store)
    told = "".join(traceback.format_exception(error.value))
    assert "an injected fault, for Bearer <token>" in told  # the server's words are quoted, so it could have been there
    assert TOKEN not in told and TOKEN not in caplog.text


def test_a_tag_that_is_refused_is_told_without_the_token(hub, store):
    hub.faults.add("POST .*/tag/", "status", times=1000, status=403)
    with pytest.warns(UserWarning, match="v1.0.0 was not set") as told:
        store.publish(NAME, tiny.data())
    messages = " ".join(str(one.message) for one in told)
    assert "Bearer <token>" in messages and TOKEN not in messages


class Refusal(Exception):
    """Not ours: the handler fails, and the connection ends."""


def test_the_endpoint_is_read_at_each_call(hub, store, monkeypatch, tmp_path):
    store.publish(NAME, tiny.data())
    with Hub() as other:
        other.users = hub.users
        monkeypatch.setenv("HF_ENDPOINT", other.url)
        clear(monkeypatch, tmp_path)
        with pytest.raises(NotFound, match=other.url):
            resolve.resolve(f"hf://org/{NAME}")
        store.publish(NAME, tiny.data(3))
        assert set(other.repos) == {REPO}
    assert constants.ENDPOINT not in (hub.url, other.url)
