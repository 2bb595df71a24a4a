"""Changes of a registry are told, signed; an address that does not answer changes nothing."""

import hashlib
import hmac
import json
from collections.abc import Iterator

import pytest
import tiny_artifact as tiny
from webhook import free_port, posted_to

from kvq_runtime.registry.local import LocalRegistry

NAME, SECRET = "tiny-2bit", "a secret of ours"


class Listener:
    """What was posted, as (headers, body), and the answers that are given, one after the other; then 200."""

    def __init__(self):
        self.heard, self.answers = list[tuple[dict[str, str], bytes]](), list[int]()


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    found = Listener()

    def hear(headers: dict[str, str], body: bytes) -> int:
        found.heard.append((headers, body))
        return found.answers.pop(0) if found.answers else 200

    with posted_to(hear) as address:
        monkeypatch.setenv("KVQ_WEBHOOK", f"{address}hook?token=hidden")
        monkeypatch.setenv("KVQ_WEBHOOK_SECRET", SECRET)
        yield found


def test_every_change_is_told_and_signed(listener: Listener, tmp_path):
    store = LocalRegistry(tmp_path)
    for seed in range(2):
        store.publish(NAME, tiny.data(seed))
    store.publish(NAME, tiny.data(1))  # no change
    store.promote(NAME, "1.0.1", force=True)
    store.promote(NAME, "1.0.0", force=True)
    store.yank(NAME, "1.0.1", "worse")
    told = [json.loads(body) for _, body in listener.heard]
    assert [one["event"] for one in told] == [event.to_json() for event in store.state(NAME).events]
    assert {one["registry"] for one in told} == {store.url}
    for head, body in listener.heard:
        own = hmac.new(SECRET.encode(), body, hashlib.sha256).hexdigest()
        assert head["X-Kvq-Signature-256"] == f"sha256={own}"
        assert head["X-Kvq-Delivery"] == hashlib.sha256(body).hexdigest()


def test_an_answer_that_fails_is_asked_for_once_more(listener: Listener, tmp_path, caplog):
    listener.answers += [503]
    LocalRegistry(tmp_path).publish(NAME, tiny.data())
    assert len(listener.heard) == 2 and listener.heard[0][1] == listener.heard[1][1] and not caplog.text


@pytest.mark.parametrize("code", [500, 307])
def test_a_change_stands_whatever_comes_of_it(code: int, listener: Listener, tmp_path, caplog):
    """A redirect is not followed."""
    listener.answers += [code, code]
    store = LocalRegistry(tmp_path)
    store.publish(NAME, tiny.data())
    assert len(listener.heard) == 2 and list(store.state(NAME).versions) == ["1.0.0"]
    assert "not told of the change, which stands" in caplog.text
    assert "hidden" not in caplog.text and SECRET not in caplog.text


@pytest.mark.parametrize(("name", "value", "said"), [
    ("KVQ_WEBHOOK_SECRET", "", "without KVQ_WEBHOOK_SECRET"), ("KVQ_WEBHOOK", "file:///etc/passwd", "no http:// or"),
    ("KVQ_WEBHOOK", "https://user:hidden@host/x", "without a user"), ("KVQ_WEBHOOK", "http://[::1/x", "no http:// or"),
    ("KVQ_WEBHOOK", "http://host:abc/", "no http:// or"),
])  # fmt: skip
def test_without_a_secret_or_an_address_nothing_is_told(name, value, said, listener, tmp_path, caplog, monkeypatch):
    monkeypatch.setenv(name, value)
    LocalRegistry(tmp_path).publish(NAME, tiny.data())
    assert not listener.heard and said in caplog.text and "hidden" not in caplog.text


def test_an_address_where_nobody_listens(tmp_path, caplog, monkeypatch):
    with free_port() as port:
        monkeypatch.setenv("KVQ_WEBHOOK", f"http://127.0.0.1:{port}/")
        monkeypatch.setenv("KVQ_WEBHOOK_SECRET", SECRET)
        LocalRegistry(tmp_path).publish(NAME, tiny.data())
    assert "which stands" in caplog.text
