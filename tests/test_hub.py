"""A registry on a Hub: whole versions or none, whatever the network does and however many publish at once."""

import logging
import multiprocessing
import traceback
import warnings
from hashlib import sha256

import pytest
import tiny_artifact as tiny
from hub_client import TOKEN, asked, clear, hub_for
from hub_client import whole as versions_of
from hub_server import Hub
from huggingface_hub import HfApi, constants

from kvq_runtime import artifact, hub_index, hub_upkeep, registry, strict_json
from kvq_runtime.errors import ArtifactError, Conflict, NotFound
from kvq_runtime.hub import HubRegistry

NAME = "tiny-2bit"
REPO = f"org/{NAME}"
CARD = {"README.md": b"---\nlibrary_name: kvq\ntags: [kvq]\n---\n# card\n![e](error.png)\n", "error.png": b"png"}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with hub_for(monkeypatch, tmp_path) as hub:
        yield hub


@pytest.fixture
def store(hub) -> HubRegistry:
    return registry.open_registry("hf://org")


def whole(hub: Hub) -> list[str]:
    """Its versions, of which each has a folder and nothing else has."""
    tree, found = hub.repos[REPO].at("main").tree, versions_of(hub, NAME)
    assert {path.split("/")[1] for path in tree if path.startswith("versions/")} == set(found)
    return found


# ---- publish and load


def test_a_published_artifact_comes_back_on_another_machine(hub, store, monkeypatch, tmp_path):
    data = tiny.data()
    version = store.publish(NAME, data, beside=CARD)
    assert (version.version, version.sha256) == ("1.0.0", sha256(data).hexdigest())
    assert whole(hub) == ["1.0.0"] and store.names() == [NAME]
    assert len(hub.repos[REPO].log("main")) == 2  # the Hub's own first commit, and one for all of it
    assert hub.repos[REPO].tags == {"v1.0.0": hub.repos[REPO].branches["main"]}
    card = hub.content(hub.repos[REPO], hub.repos[REPO].at("main").tree["README.md"])
    assert b"![e](versions/1.0.0/error.png)" in card
    clear(monkeypatch, tmp_path)
    fresh = HubRegistry("org")
    found = registry.resolve(f"hf://org/{NAME}")
    assert (found.version, found.registry) == ("1.0.0", "hf://org") and found.path.read_bytes() == data
    assert found.commit == hub.repos[REPO].branches["main"]
    assert artifact.to_bytes(registry.load_artifact(f"hf://org/{NAME}@1.0.0")) == data
    assert fresh.beside(NAME, fresh.state(NAME).versions["1.0.0"]) == CARD
    assert fresh.about(NAME, version) == {
        "recipe": "tiny", "model": "tiny-model", "revision": "main", "corpus": "a" * 64, "corpus_digest": None,
    }  # fmt: skip


def test_identical_bytes_are_the_existing_version(hub, store):
    first = store.publish(NAME, tiny.data())
    commits = len(hub.repos[REPO].log("main"))
    assert store.publish(NAME, tiny.data(), version="3.0.0", beside=CARD) == first
    assert len(hub.repos[REPO].log("main")) == commits


def test_numbers_and_yanks_are_as_in_a_folder(hub, store):
    store.publish(NAME, tiny.data(0))
    assert store.publish(NAME, tiny.data(1)).version == "1.0.1"
    assert store.publish(NAME, tiny.data(1, bits=3)).version == "1.1.0"
    assert store.publish(NAME, tiny.data(1, model=1)).version == "2.0.0"
    with pytest.raises(Conflict, match=r"1\.0\.0 is there with other bytes"):
        store.publish(NAME, tiny.data(5), version="1.0.0")
    store.yank(NAME, "2.0.0", "wrong corpus")
    assert registry.resolve(NAME, "hf://org").version == "1.1.0"
    with pytest.raises(Conflict, match="is yanked"):
        store.promote(NAME, "2.0.0")
    assert whole(hub) == ["1.0.0", "1.0.1", "1.1.0", "2.0.0"]


def test_only_artifacts_are_published(hub, store):
    with pytest.raises(ArtifactError, match="^finite"):
        store.publish(NAME, tiny.resealed({tiny.WEIGHT: tiny.tiny().tensors[tiny.WEIGHT] * float("nan")}))
    for name in ("../x", "a/b", "A"):
        with pytest.raises(ValueError, match="name "):
            store.publish(name, tiny.data())
    assert not hub.repos and asked(hub) == []


def _publish(seed: int) -> tuple[str, str]:
    beside = {"README.md": b"---\ntags: [kvq]\n---\n# card %d" % seed}
    version = HubRegistry("org").publish(NAME, tiny.data(seed), beside=beside)
    return version.version, version.sha256


@pytest.mark.parametrize("seeds, count", [(range(8), 8), ([0] * 8, 1)], ids=["distinct", "identical"])
def test_eight_processes_publish_at_once(seeds, count, hub, store):
    with multiprocessing.get_context("fork").Pool(8) as pool:
        published = pool.map(_publish, seeds, chunksize=1)
    state = store.state(NAME)
    assert len(set(published)) == len(state.versions) == len(state.events) == count == len(whole(hub))
    assert {(v.version, v.sha256) for v in state.versions.values()} == set(published)
    assert len(hub.repos[REPO].log("main")) == 1 + count
    assert set(hub.repos[REPO].tags) == {f"v{version}" for version in state.versions}
    assert hub_upkeep.examine(store) == []


# ---- faults: never half a version, and the same command again succeeds with the same digest

UPLOADS = {
    "429": ("POST .*/commit/", "status", {"status": 429, "Retry_After": "1"}),
    "500": ("POST .*/commit/", "status", {"status": 500}),
    "503 of the batch": ("POST .*objects/batch", "status", {"status": 503}),
    "reset in mid-upload": ("PUT /lfs", "reset", {}),
    "reset in mid-commit": ("POST .*/commit/", "reset", {}),
    "lost answer of an upload": ("PUT /lfs", "lost", {}),
    "lost answer of a commit": ("POST .*/commit/", "lost", {}),
    "lost answer of a tag": ("POST .*/tag/", "lost", {}),
    "lost answer of a new repository": ("POST /api/repos/create", "lost", {}),
}


@pytest.mark.parametrize("pattern, kind, more", UPLOADS.values(), ids=UPLOADS)
def test_a_publish_lives_through_one_fault(pattern, kind, more, hub, store):
    hub.faults.add(pattern, kind, **more)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a tag may be left for the next time
        assert store.publish(NAME, tiny.data(), beside=CARD).version == "1.0.0"
    assert len(hub.faults.happened) == 1 and whole(hub) == ["1.0.0"]
    again = store.publish(NAME, tiny.data(), beside=CARD)
    assert again.sha256 == sha256(tiny.data()).hexdigest() and len(hub.repos[REPO].log("main")) == 2
    assert list(hub.repos[REPO].tags) == ["v1.0.0"]


@pytest.mark.parametrize("pattern, kind, more", list(UPLOADS.values())[:7], ids=list(UPLOADS)[:7])
def test_a_publish_that_fails_leaves_what_was(pattern, kind, more, hub, store):
    store.publish(NAME, tiny.data(0))
    hub.faults.add(pattern, kind, times=1000, **more)
    try:
        store.publish(NAME, tiny.data(1), beside=CARD)
        assert "lost" in kind
    except RuntimeError as error:
        assert "the Hub" in str(error)
    hub.faults = type(hub.faults)()
    assert whole(hub) in (["1.0.0"], ["1.0.0", "1.0.1"])
    assert store.publish(NAME, tiny.data(1), beside=CARD).sha256 == sha256(tiny.data(1)).hexdigest()
    assert whole(hub) == ["1.0.0", "1.0.1"]


@pytest.mark.parametrize("kind", ["reset", "short", "flip", "drip", "status"])
def test_a_load_lives_through_one_fault(kind, hub, store, monkeypatch, tmp_path):
    store.publish(NAME, tiny.data())
    clear(monkeypatch, tmp_path)
    hub.faults.add("GET /lfs", kind, status=503)
    assert artifact.to_bytes(registry.load_artifact(f"hf://org/{NAME}")) == tiny.data()
    assert len(hub.faults.happened) == 1


@pytest.mark.parametrize("kind", ["reset", "short", "flip"])
def test_a_load_that_fails_keeps_nothing_that_is_wrong(kind, hub, store, monkeypatch, tmp_path):
    store.publish(NAME, tiny.data())
    clear(monkeypatch, tmp_path)
    hub.faults.add("GET /lfs", kind, times=100)
    with pytest.raises((ArtifactError, RuntimeError), match="sha256: the Hub sent|could not be asked"):
        registry.load_artifact(f"hf://org/{NAME}")
    hub.faults = type(hub.faults)()
    assert artifact.to_bytes(registry.load_artifact(f"hf://org/{NAME}")) == tiny.data()


def test_a_lost_answer_of_a_promote_is_looked_up(hub, store):
    for seed in range(3):
        store.publish(NAME, tiny.data(seed))
    store.promote(NAME, "1.0.0")
    for action, wanted in ((lambda: store.promote(NAME, "1.0.1"), "1.0.1"), (lambda: store.rollback(NAME), "1.0.0")):
        commits = len(hub.repos[REPO].log("main"))
        hub.faults.add("POST .*/commit/", "lost")
        assert action().at("production") == wanted
        assert len(hub.repos[REPO].log("main")) == commits + 1


# ---- aliases


def test_a_stale_promote_loses_and_asks(hub, store):
    for seed in range(3):
        store.publish(NAME, tiny.data(seed))
    store.promote(NAME, "1.0.0", expect="none")
    store.promote(NAME, "1.0.1", expect="1.0.0")
    with pytest.raises(Conflict, match=r"is 1\.0\.1, 1\.0\.0 was expected.*--expect 1\.0\.1"):
        store.promote(NAME, "1.0.2", expect="1.0.0")
    assert store.rollback(NAME).at("production") == "1.0.0"


@pytest.mark.parametrize(
    "other, says", [("promote", "somebody moved it"), ("publish", "somebody changed tiny-2bit first")]
)
def test_a_promote_that_is_overtaken_stops_and_asks(other, says, hub, store, monkeypatch):
    for seed in range(2):
        store.publish(NAME, tiny.data(seed))
    real, raced = HfApi.create_commit, []

    def overtaken(self, *given, **more):
        if not raced:
            raced.append(1)
            rival = HubRegistry("org")
            rival.promote(NAME, "1.0.0") if other == "promote" else rival.publish(NAME, tiny.data(7))
        return real(self, *given, **more)

    monkeypatch.setattr(HfApi, "create_commit", overtaken)
    with pytest.raises(Conflict, match=says):
        store.promote(NAME, "1.0.1")
    assert store.state(NAME).at("production") == ("1.0.0" if other == "promote" else None)
    assert store.promote(NAME, "1.0.1").at("production") == "1.0.1"


# ---- what is asked of the network


def pinned(tmp_path, version: str = "") -> str:
    """A lock file."""
    from kvq_runtime import cli

    lock = str(tmp_path / "kvq.lock")
    assert cli.main(["pull", f"hf://org/{NAME}{version}", "-o", str(tmp_path / "out"), "--lock", lock]) == 0
    return lock


def test_a_warm_load_asks_nothing_with_a_lock_and_once_for_an_alias(hub, store, tmp_path, capsys):
    store.publish(NAME, tiny.data(), beside=CARD)
    store.promote(NAME, "1.0.0")
    lock = pinned(tmp_path)
    hub.requests.clear()
    registry.load_artifact(f"hf://org/{NAME}", lock=lock)
    assert asked(hub) == []
    registry.load_artifact(f"hf://org/{NAME}@production")
    assert len(asked(hub)) == 1
    store.publish(NAME, tiny.data(1))
    store.promote(NAME, "1.0.1")
    found = registry.resolve(f"hf://org/{NAME}", lock=lock)
    assert found.version == "1.0.0" and found.chosen_because == f"pinned by {lock}"


def test_offline_from_the_cache(hub, store, tmp_path, monkeypatch, capsys):
    store.publish(NAME, tiny.data())
    store.promote(NAME, "1.0.0")
    lock = pinned(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    for given in (NAME, f"{NAME}@production", f"{NAME}@1.0.0"):
        assert registry.resolve(f"hf://org/{given}").version == "1.0.0"
    registry.load_artifact(f"hf://org/{NAME}", lock=lock)
    clear(monkeypatch, tmp_path)
    with pytest.raises(RuntimeError, match="offline.*kvq pull it once online"):
        registry.load_artifact(f"hf://org/{NAME}", lock=lock)
    assert asked(hub) == []


def test_a_file_that_was_damaged_in_the_cache_is_refused_and_fetched_again(hub, store, tmp_path, capsys):
    store.publish(NAME, tiny.data())
    lock = pinned(tmp_path)
    path = registry.resolve(f"hf://org/{NAME}", lock=lock).path
    path.write_bytes(tiny.data()[:-1] + b"?")
    with pytest.raises(ArtifactError, match="sha256: .*fetch it again"):
        registry.load_artifact(f"hf://org/{NAME}", lock=lock)
    pinned(tmp_path)
    registry.load_artifact(f"hf://org/{NAME}", lock=lock)


@pytest.mark.parametrize("times", [1, 2])
def test_an_index_that_was_damaged_on_its_way_is_fetched_again(times, hub, store, monkeypatch, tmp_path):
    store.publish(NAME, tiny.data())
    clear(monkeypatch, tmp_path)
    hub.faults.add(f"GET .*/{hub_index.FILE}", "flip", times)
    if times == 2:
        with pytest.raises(ArtifactError, match="damaged, twice; nothing was kept"):
            registry.load_artifact(f"hf://org/{NAME}")
    assert artifact.to_bytes(registry.load_artifact(f"hf://org/{NAME}")) == tiny.data()
    assert len(hub.faults.happened) == times


def test_a_hub_that_is_gone_is_a_warning_where_the_cache_knows(hub, store, monkeypatch, tmp_path):
    store.publish(NAME, tiny.data())
    store.promote(NAME, "1.0.0")
    registry.resolve(f"hf://org/{NAME}")
    hub.faults.add("GET /api/models", "status", times=1000, status=503)
    with pytest.warns(UserWarning, match="as they were when it last answered"):
        assert registry.resolve(f"hf://org/{NAME}").version == "1.0.0"
    with pytest.raises(RuntimeError, match="could not be asked"):
        store.promote(NAME, "1.0.0", expect="none")
    clear(monkeypatch, tmp_path)
    with pytest.raises(RuntimeError, match="could not be asked"):
        registry.resolve(f"hf://org/{NAME}")


# ---- who may


def test_private_gated_missing(hub, monkeypatch, tmp_path):
    store = HubRegistry("org", private=True)
    store.publish(NAME, tiny.data())
    assert hub.repos[REPO].private and store.names() == [NAME]
    clear(monkeypatch, tmp_path)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(NotFound, match="not there, or it is private.*hf auth login"):
        registry.resolve(f"hf://org/{NAME}")
    assert store.names() == []
    with pytest.raises(PermissionError, match="does not accept the token.*hf auth login"):
        store.publish(NAME, tiny.data(1))
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    assert registry.resolve(f"hf://org/{NAME}").version == "1.0.0"
    with pytest.raises(PermissionError, match="the token may not do this"):
        store.publish(NAME, tiny.data(1))
    with pytest.raises(NotFound, match="no artifact other at"):
        registry.resolve("hf://org/other")
    clear(monkeypatch, tmp_path / "third")
    hub.repos[REPO].private, hub.repos[REPO].gated = False, True
    with pytest.raises(PermissionError, match=f"is gated: accept its terms at {hub.url}/{REPO}"):
        registry.resolve(f"hf://org/{NAME}")
    hub.allowed.add("reader")
    assert registry.resolve(f"hf://org/{NAME}").version == "1.0.0"
    assert whole(hub) == ["1.0.0"]


def test_the_token_is_seen_by_the_hub_alone(hub, store, monkeypatch, tmp_path, caplog, capsys):
    """A canary: in no log, error, artifact or file, and at no other origin, even where the server says it back."""
    caplog.set_level(logging.DEBUG)
    store.publish(NAME, tiny.data(), beside=CARD)
    clear(monkeypatch, tmp_path)
    registry.load_artifact(f"hf://org/{NAME}")
    assert TOKEN not in caplog.text
    del hub.users[TOKEN]  # from here on the server repeats the token in its errors
    for action in (lambda: store.publish(NAME, tiny.data(1)), lambda: store.names(), lambda: store.state(NAME)):
        with pytest.raises(PermissionError) as error:
            action()
        assert TOKEN not in "".join(traceback.format_exception(error.value))
    monkeypatch.setattr(hub, "user", lambda given: (_ for _ in ()).throw(Refusal(given)))
    with pytest.raises(RuntimeError, match="could not be asked") as error:
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


class Refusal(Exception):
    """Not ours: the handler fails, and the connection ends."""


def test_the_endpoint_is_read_at_each_call(hub, store, monkeypatch, tmp_path):
    store.publish(NAME, tiny.data())
    with Hub() as other:
        other.users = hub.users
        monkeypatch.setenv("HF_ENDPOINT", other.url)
        clear(monkeypatch, tmp_path)
        with pytest.raises(NotFound, match=other.url):
            registry.resolve(f"hf://org/{NAME}")
        store.publish(NAME, tiny.data(3))
        assert set(other.repos) == {REPO}
    assert constants.ENDPOINT not in (hub.url, other.url)


# ---- tags, and what nobody wrote


def test_a_missing_tag_is_made_again_and_a_moved_one_is_an_error(hub, store):
    store.publish(NAME, tiny.data(0))
    made = hub.repos[REPO].tags.pop("v1.0.0")
    store.publish(NAME, tiny.data(1))
    store.promote(NAME, "1.0.1")
    assert [finding.what for finding in hub_upkeep.examine(store)] == ["tag v1.0.0 is missing"]
    store.publish(NAME, tiny.data(0))
    assert hub.repos[REPO].tags["v1.0.0"] == made
    hub.repos[REPO].tags["v1.0.0"] = hub.repos[REPO].branches["main"]
    with pytest.raises(Conflict, match=r"tag v1\.0\.0 was moved"):
        store.publish(NAME, tiny.data(0))
    assert [finding.level for finding in hub_upkeep.examine(store)] == ["fault"]
    assert registry.resolve(f"hf://org/{NAME}@1.0.0").sha256 == sha256(tiny.data(0)).hexdigest()


def edit(hub: Hub, change) -> None:
    """Commit another kvq.json, or other files, by hand."""
    repo = hub.repos[REPO]
    tree = dict(repo.at("main").tree)
    change(repo, tree)
    repo.add("main", "by hand", tree)


def replace(old: bytes, new: bytes):
    def change(repo, tree):
        data = repo.blobs[tree[hub_index.FILE].oid]
        assert old in data
        tree[hub_index.FILE] = repo.blob(data.replace(old, new))

    return change


EDITS = {
    "torn": (lambda r, t: t.update({hub_index.FILE: r.blob(b'{"schema":1')}), "not the JSON"),
    "newer": (replace(b'"schema":1,"versions"', b'"schema":2,"versions"'), "a newer kvq may have written it"),
    "another name": (
        replace(b'"name":"tiny-2bit","schema":1,"versions"', b'"name":"x","schema":1,"versions"'),
        "about",
    ),
    "an alias": (replace(b'"aliases":{"production":"1.0.0"}', b'"aliases":{"production":"1.0.1"}'), "by hand"),
    "a climbing file": (
        replace(b'"files":{}', b'"files":{"../../x":{"sha256":"%s","size":1}}' % (b"a" * 64)),
        "file name",
    ),
    "a lost event": (lambda r, t: _drop_event(r, t), "in the place of"),
}


def _drop_event(repo, tree):
    given = strict_json.loads(repo.blobs[tree[hub_index.FILE].oid], "test")
    given["events"] = given["events"][1:]
    tree[hub_index.FILE] = repo.blob(strict_json.dumps(given).encode())


@pytest.mark.parametrize("change, message", EDITS.values(), ids=EDITS)
def test_an_index_that_was_edited_by_hand_is_refused(change, message, hub, store):
    for seed in range(2):
        store.publish(NAME, tiny.data(seed))
    store.promote(NAME, "1.0.0")
    edit(hub, change)
    for action in (lambda: registry.resolve(f"hf://org/{NAME}"), lambda: store.publish(NAME, tiny.data(5))):
        with pytest.raises(ArtifactError, match=f"{REPO} at .*kvq.json: .*{message}"):
            action()
    assert "fault" in [finding.level for finding in hub_upkeep.examine(store)]


def test_a_repository_of_something_else_is_left_alone(hub, store):
    HfApi(endpoint=hub.url).create_repo(REPO)
    edit(hub, lambda repo, tree: tree.update({"README.md": repo.blob(b"---\nlicense: mit\n---\n")}))
    store.publish(NAME, tiny.data())
    edit(hub, lambda repo, tree: tree.pop(hub_index.FILE))  # its numbers would be used again
    with pytest.raises(Conflict, match="has no kvq.json, but versions/1.0.0/kvq.safetensors"):
        store.publish(NAME, tiny.data(1))
    commits = len(hub.repos[REPO].log("main"))
    with pytest.raises(NotFound, match="holds no kvq.json"):
        registry.resolve(f"hf://org/{NAME}")
    assert len(hub.repos[REPO].log("main")) == commits


def test_a_file_that_was_replaced_by_hand_is_refused_and_found(hub, store, monkeypatch, tmp_path):
    store.publish(NAME, tiny.data(0))
    store.publish("other", tiny.data(1))
    other = hub.repos["org/other"].at("main").tree["versions/1.0.0/kvq.safetensors"]
    edit(hub, lambda repo, tree: tree.update({"versions/1.0.0/kvq.safetensors": other}))
    clear(monkeypatch, tmp_path)
    with pytest.raises(ArtifactError, match="sha256: the Hub sent .* twice; nothing was kept"):
        registry.resolve(f"hf://org/{NAME}")
    assert [finding.what for finding in hub_upkeep.examine(store)] == ["file is not the one that was published"]


def test_gc_removes_only_what_is_old_and_unnamed(hub, store):
    store.publish(NAME, tiny.data(), beside=CARD)
    edit(
        hub,
        lambda repo, tree: tree.update(
            {"versions/9.0.0/kvq.safetensors": repo.blob(b"x"), "notes.md": repo.blob(b"n")}
        ),
    )
    assert [finding.what for finding in hub_upkeep.examine(store)] == ["no event names it"]
    assert hub_upkeep.collect(store) == []
    unnamed = [f"{REPO}/versions/9.0.0/kvq.safetensors"]
    assert hub_upkeep.collect(store, grace=0, dry_run=True) == unnamed
    assert hub_upkeep.collect(store, grace=0) == unnamed
    assert whole(hub) == ["1.0.0"] and "notes.md" in hub.repos[REPO].at("main").tree
    assert hub_upkeep.collect(store, grace=0) == []


def test_evaluations_are_beside_the_artifact(hub, store):
    digest = store.publish(NAME, tiny.data()).sha256
    record = {"artifact": digest, "corpus": "c" * 64, "protocol": {}, "environment": {}, "result": {"perplexity": 12.5}}
    assert store.evaluations(digest, NAME) == []
    assert store.add_evaluation(record, NAME) == store.add_evaluation(record, NAME)
    assert store.evaluations(digest, NAME) == [record]
    assert hub_upkeep.examine(store) == [] and hub_upkeep.collect(store, grace=0) == []
