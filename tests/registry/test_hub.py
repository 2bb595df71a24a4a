"""A registry on a Hub: never half a version, whatever the network does; usable offline; its access rules told."""

import logging
import socket
import traceback
from hashlib import sha256

import huggingface_hub
import pytest
import tiny_artifact as tiny
from hub_client import CARD, NAME, REPO, TOKEN, asked, clear, whole_versions
from hub_server import Handler, Hub
from huggingface_hub import HfApi
from local_store import damage

from kvq_runtime.artifact import artifact
from kvq_runtime.disk import files
from kvq_runtime.errors import ArtifactError, Conflict, NotFound
from kvq_runtime.registry import hub_client, resolve
from kvq_runtime.registry.hub import HubRegistry

URL = f"hf://{REPO}"


@pytest.fixture
def store(hub) -> HubRegistry:
    return HubRegistry("org")


def test_a_published_artifact_comes_back_on_another_machine(hub, store, monkeypatch, tmp_path):
    data = tiny.data()
    version = store.publish(NAME, data, attachments=CARD)
    assert whole_versions(hub) == ["1.0.0"] and store.names() == [NAME]
    assert len(hub.repos[REPO].log) == 2  # the Hub's own first commit, and one for all of it
    assert b"![e](versions/1.0.0/error.png)" in hub.repos[REPO].files["README.md"]
    clear(monkeypatch, tmp_path)
    found = resolve.resolve(URL)
    assert (found.version, found.registry) == ("1.0.0", "hf://org") and found.path.read_bytes() == data
    assert HubRegistry("org").attachments(NAME, version) == CARD
    found.path.chmod(0o644)
    found.path.write_bytes(data[:-1] + b"?")  # damaged in the cache: received again
    assert artifact.to_bytes(resolve.load_artifact(f"{REPO}@1.0.0")) == data


# ---- faults: never half a version, and the same command again succeeds with the same digest

UPLOADS = {
    "500": ("POST .*/commit/", "status", {"status": 500}),
    "reset in mid-upload": ("PUT /lfs", "reset", {}),
    "lost answer of a commit": ("POST .*/commit/", "lost", {}),
    "lost answer of a new repository": ("POST /api/repos/create", "lost", {}),
}


@pytest.mark.parametrize("times", [1, 1000])
@pytest.mark.parametrize("pattern, kind, more", UPLOADS.values(), ids=UPLOADS)
def test_a_publish_lives_through_a_fault_or_leaves_what_was(pattern, kind, more, times, hub, store):
    if "create" not in pattern:
        store.publish(NAME, tiny.data(0))
    hub.faults.add(pattern, kind, times, **more)
    try:
        store.publish(NAME, tiny.data(1), attachments=CARD)
    except RuntimeError as error:
        assert times > 1 and "the Hub" in str(error)
    assert hub.faults.happened
    hub.faults = type(hub.faults)()
    version = store.publish(NAME, tiny.data(1), attachments=CARD)
    assert version.sha256 == sha256(tiny.data(1)).hexdigest()
    assert whole_versions(hub) == (["1.0.0"] if "create" in pattern else ["1.0.0", "1.0.1"])


@pytest.mark.parametrize("kind", ["reset", "short", "flip", "status"])
@pytest.mark.parametrize("pattern", ["GET /lfs", "GET .*/kvq.json"])
def test_a_load_lives_through_a_fault_and_keeps_nothing_wrong(kind, pattern, hub, store, monkeypatch, tmp_path):
    store.publish(NAME, tiny.data())
    clear(monkeypatch, tmp_path)
    hub.faults.add(pattern, kind, times=1000, status=503)
    with pytest.raises((ArtifactError, RuntimeError), match="the Hub sent|no answer from the Hub"):
        resolve.load_artifact(URL)
    hub.faults = type(hub.faults)()
    hub.faults.add(pattern, kind, status=503)
    assert artifact.to_bytes(resolve.load_artifact(URL)) == tiny.data()
    assert len(hub.faults.happened) == 1


def test_a_stale_head_makes_no_second_version_and_undoes_no_promote(hub, store, monkeypatch):
    """The Hub's answers lag behind its commits: the commit that was read is no parent any more."""
    left, info = [0], Handler.info

    def lagging(self, body, id):
        repo = self._repo(id)
        newest = [repo.log.pop()] if left[0] else []
        left[0] = max(0, left[0] - 1)
        info(self, body, id)
        repo.log.extend(newest)

    monkeypatch.setattr(Handler, "info", lagging)
    for seed in range(2):
        store.publish(NAME, tiny.data(seed))
    left[0] = 3
    hub.faults.add("POST .*/commit/", "lost")
    assert store.publish(NAME, tiny.data(2)).version == "1.0.2"
    assert whole_versions(hub) == ["1.0.0", "1.0.1", "1.0.2"] and len(hub.repos[REPO].log) == 4
    store.promote(NAME, "1.0.0", force=True)
    left[0] = 2
    with pytest.raises(Conflict, match="expected none"):
        store.promote(NAME, "1.0.1", force=True)
    left[0] = 0
    for action, wanted in (
        (lambda: store.promote(NAME, "1.0.1", force=True), "1.0.1"),
        (lambda: store.rollback(NAME), "1.0.0"),
    ):
        commits = len(hub.repos[REPO].log)
        hub.faults.add("POST .*/commit/", "lost")
        assert action().at("production") == wanted and len(hub.repos[REPO].log) == commits + 1


@pytest.mark.parametrize("wait, tries", [("60", hub_client.TRIES), ("61", 1)])
def test_a_hub_that_asks_for_more_than_a_minute_is_not_waited_for(wait, tries, hub, store):
    store.publish(NAME, tiny.data())
    hub.faults.add("POST .*/commit/", "status", times=1000, status=429, Retry_After=wait)
    with pytest.raises(RuntimeError, match=r"the Hub limits the rate of requests \(429\)"):
        store.yank(NAME, "1.0.0", "bad")
    assert len(hub.faults.happened) == tries


# ---- offline, and a Hub that is gone


def test_a_warm_load_asks_once_for_an_alias_and_nothing_with_a_lock_or_offline(hub, store, tmp_path, monkeypatch, kvq):
    store.publish(NAME, tiny.data(), attachments=CARD)
    store.promote(NAME, "1.0.0", force=True)
    lock = tmp_path / "kvq.lock"
    assert kvq("pull", URL, "-o", tmp_path / "out", "--lock", lock)[0] == 0
    hub.requests.clear()
    resolve.load_artifact(URL, lock=lock)
    assert asked(hub) == []
    resolve.load_artifact(f"{URL}@production")
    assert len(asked(hub)) == 1
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for given in ("", "@production", "@1.0.0"):
        assert resolve.resolve(f"{URL}{given}").version == "1.0.0"
    assert store.evaluations(store.state(NAME).get("1.0.0").sha256, NAME) == []
    clear(monkeypatch, tmp_path)
    with pytest.raises(RuntimeError, match="offline.*kvq pull once while online"):
        resolve.load_artifact(URL, lock=lock)
    with pytest.raises(RuntimeError, match="offline"):
        store.names()
    assert len(asked(hub)) == 1


def test_a_hub_that_takes_a_request_and_says_nothing_is_given_up(hub, store, monkeypatch):
    """huggingface_hub itself would wait for ever."""
    monkeypatch.setattr(hub_client, "SILENCE", 0.1)
    huggingface_hub.close_session()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(64)
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(RuntimeError, match="no answer from the Hub at .* after 5 tries|took too long"):
            store.publish(NAME, tiny.data())


def test_a_cache_that_cannot_be_written_forgets(hub, store, monkeypatch, tmp_path):
    store.publish(NAME, tiny.data())
    clear(monkeypatch, tmp_path)
    monkeypatch.setattr(files, "save", lambda *given: (_ for _ in ()).throw(OSError("full")))
    assert resolve.resolve(URL).version == "1.0.0" and hub_client.load_head("org", NAME) is None


# ---- edited by hand


def edit(hub: Hub, changes: dict[str, bytes | None]) -> None:
    edited = hub.repos[REPO].files | changes
    hub.repos[REPO].add("by hand", {path: data for path, data in edited.items() if data is not None})


def test_an_index_that_was_edited_by_hand_is_refused(hub, store):
    for seed in range(2):
        store.publish(NAME, tiny.data(seed))
    index = hub.repos[REPO].files["kvq.json"]
    edits = {
        "invalid JSON": b'{"schema":1',
        "expected the events of": index.replace(b'],"name":"tiny-2bit"', b'],"name":"x"'),
        "file name": index.replace(b'"files":{}', b'"files":{"../../x":{"sha256":"%s","size":1}}' % (b"a" * 64)),
        "expected .*, got": index.replace(b'"number":2', b'"number":3'),
    }
    for message, data in edits.items():
        assert data != index
        edit(hub, {"kvq.json": data})
        for action in (lambda: resolve.resolve(URL), lambda: store.publish(NAME, tiny.data(5))):
            with pytest.raises(ArtifactError, match=f"{REPO} at .*kvq.json: .*{message}"):
                action()
    assert [*damage(store)] == [NAME]


def test_a_repository_of_something_else_is_left_alone(hub, store):
    HfApi(endpoint=hub.url).create_repo(REPO)
    edit(hub, {"README.md": b"---\nlicense: mit\n---\n"})
    store.publish(NAME, tiny.data())
    edit(hub, {"kvq.json": None})  # its numbers would be used again
    commits = len(hub.repos[REPO].log)
    with pytest.raises(Conflict, match="has no kvq.json, but versions/1.0.0/kvq.safetensors"):
        store.publish(NAME, tiny.data(1))
    with pytest.raises(NotFound, match=f"no artifact {NAME} in hf://org"):
        resolve.resolve(URL)
    assert len(hub.repos[REPO].log) == commits


def test_a_file_that_was_replaced_by_hand_is_refused_and_found(hub, store, monkeypatch, tmp_path):
    store.publish(NAME, tiny.data(0))
    edit(hub, {"versions/1.0.0/kvq.safetensors": tiny.data(1)})
    clear(monkeypatch, tmp_path)
    with pytest.raises(ArtifactError, match="sha256: the Hub sent .* twice; .*nothing was kept"):
        resolve.resolve(URL)
    assert "the Hub sent" in str(damage(store))


# ---- access


def test_private_gated_missing(hub, monkeypatch, tmp_path):
    store = HubRegistry("org", private=True)
    store.publish(NAME, tiny.data())
    assert hub.repos[REPO].private and store.names() == [NAME]
    clear(monkeypatch, tmp_path)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(NotFound, match="a private or gated one needs `hf auth login`"):
        resolve.resolve(URL)
    assert store.names() == []
    (tmp_path / "token").write_text(f"{TOKEN}\n")  # what `make flows-up` keeps
    monkeypatch.setenv(hub_client.TOKEN_FILE, str(tmp_path / "token"))
    assert store.names() == [NAME] and hub_client.token() == TOKEN
    monkeypatch.delenv(hub_client.TOKEN_FILE)
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    assert resolve.resolve(URL).version == "1.0.0"
    with pytest.raises(PermissionError, match="the token may not do this"):
        store.publish(NAME, tiny.data(1))
    clear(monkeypatch, tmp_path / "third")
    hub.repos[REPO].private, hub.repos[REPO].gated = False, True
    with pytest.raises(PermissionError, match=f"is gated: accept its terms at {hub.url}/{REPO}"):
        resolve.resolve(URL)
    hub.allowed.add("reader")
    assert resolve.resolve(URL).version == "1.0.0" and whole_versions(hub) == ["1.0.0"]


def test_who_may_not_write_is_refused_before_a_publish(hub, monkeypatch):
    HubRegistry("org").check_writable()
    assert not hub.repos
    with pytest.raises(PermissionError, match="me is not a member of it"):
        HubRegistry("elsewhere").check_writable()
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    with pytest.raises(PermissionError, match="the token is read-only"):
        HubRegistry("org").check_writable()
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(PermissionError, match="no token to write with"):
        HubRegistry("org").check_writable()


# ---- the token


def test_the_token_is_seen_by_the_hub_alone(hub, store, monkeypatch, tmp_path, caplog, capsys):
    """A canary: in no log, error, artifact or file, and at no other origin, even where the server says it back."""
    caplog.set_level(logging.DEBUG)
    store.publish(NAME, tiny.data(), attachments=CARD)
    clear(monkeypatch, tmp_path)
    resolve.load_artifact(URL)
    assert TOKEN not in caplog.text
    del hub.users[TOKEN]  # from here on the server repeats the token in its errors
    for action in (lambda: store.publish(NAME, tiny.data(1)), lambda: store.names(), lambda: store.state(NAME)):
        with pytest.raises(PermissionError) as error:
            action()
        assert TOKEN not in "".join(traceback.format_exception(error.value))
    # the HTTP library's own trace of what a server sends is the one place that is not ours to clean
    assert not any(TOKEN in entry.getMessage() for entry in caplog.records if not entry.name.startswith("httpcore"))
    assert TOKEN not in "".join(capsys.readouterr())
    assert any(TOKEN in (request.authorization or "") for request in hub.requests)
    assert not any(request.authorization for request in hub.requests if request.origin != "hub")
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert written and not any(TOKEN.encode() in path.read_bytes() for path in written)
    assert not any(TOKEN.encode() in data for data in hub.repos[REPO].files.values())


@pytest.mark.parametrize("status, kind", [(403, PermissionError), (500, RuntimeError)])
def test_a_refusal_that_repeats_the_token_is_quoted_without_it(status, kind, hub, store, caplog):
    caplog.set_level(logging.DEBUG, "kvq_runtime")
    store.publish(NAME, tiny.data())
    hub.faults.add("POST .*objects/batch", "status", times=1000, status=status)
    with pytest.raises(kind) as error:
        store.publish(NAME, tiny.data(1))
    told = "".join(traceback.format_exception(error.value))
    assert "an injected fault, for Bearer <token>" in told  # the server's words are quoted, so it could have been there
    assert TOKEN not in told and TOKEN not in caplog.text


@pytest.mark.parametrize("address", [f"hf://me:{TOKEN}@org/name@1.0.0", f"https://huggingface.co/org?token={TOKEN}"])
def test_a_token_in_an_address_or_reference_is_not_repeated(address, kvq, tmp_path, hub, monkeypatch):
    for given in (("copy", f"{NAME}@1.0.0", address), ("show", address), ("history", address)):
        code, out, error = kvq(*given, "--registry", tmp_path.as_uri())
        assert code != 0 and TOKEN not in out + error
    monkeypatch.setenv("HF_ENDPOINT", hub.url.replace("//", f"//me:{TOKEN}@"))
    hub.faults.add("GET /api/models/", "status", 5, status=404)
    code, _, error = kvq("show", URL)
    assert code and error and TOKEN not in error
