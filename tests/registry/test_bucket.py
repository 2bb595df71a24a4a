"""A registry in a bucket keeps what a folder keeps: moto's S3 on loopback. `make test-bucket`."""

import threading
from collections.abc import Iterator
from hashlib import sha256

import pytest

pytest.importorskip("s3fs", reason="s3fs and moto are in an environment of their own: make test-bucket")
pytest.importorskip("moto", reason="s3fs and moto are in an environment of their own: make test-bucket")

import s3fs
import tiny_artifact as tiny
from moto.server import ThreadedMotoServer

from kvq_runtime.artifact import artifact
from kvq_runtime.cli import main as cli
from kvq_runtime.errors import ArtifactError, Conflict, NotFound
from kvq_runtime.registry import bucket as module
from kvq_runtime.registry import events, mirror, resolve
from kvq_runtime.registry.bucket import BucketRegistry
from kvq_runtime.registry.local import LocalRegistry
from kvq_runtime.registry.reference import Reference, parse

NAME, URL = "tiny-2bit", "s3://models/kvq"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    running = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def system(address: str, monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[s3fs.S3FileSystem]:
    given = {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "ENDPOINT_URL": address, "DEFAULT_REGION": "us-east-1"}
    for name, value in given.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("KVQ_HOME", str(tmp_path / "home"))
    module._systems.clear()
    made = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
    made.mkdir("models")
    yield made
    made.rm("models", recursive=True)
    module._systems.clear()


@pytest.fixture
def store(system) -> BucketRegistry:
    found = resolve.open_registry(URL)
    assert isinstance(found, BucketRegistry)
    return found


def test_a_published_file_comes_back(store: BucketRegistry):
    data = tiny.data()
    version = store.publish(NAME, data, attachments={"README.md": b"# card"})
    found = resolve.resolve(NAME, URL)
    assert (found.version, found.sha256, found.size) == ("1.0.0", sha256(data).hexdigest(), len(data))
    assert found.path.read_bytes() == data and store.names() == [NAME]
    assert store.attachments(NAME, version) == {"README.md": b"# card"}
    assert artifact.to_bytes(resolve.load_artifact(f"{URL}/{NAME}@1.0.0")) == data
    assert store.about(NAME, version)["recipe"] == "tiny"
    assert parse(f"{URL}/{NAME}@production") == Reference(NAME, "alias", "production", URL)


def test_versions_aliases_and_withdrawals(store: BucketRegistry):
    first = store.publish(NAME, tiny.data(0))
    assert store.publish(NAME, tiny.data(0)) == first, "identical bytes are the existing version"
    assert store.publish(NAME, tiny.data(1)).version == "1.0.1"
    with pytest.raises(Conflict, match=r"1\.0\.1 is published with other bytes"):
        store.publish(NAME, tiny.data(2), version="1.0.1")
    for number in ("1.0.0", "1.0.1"):
        store.promote(NAME, number, force=True)
    store.rollback(NAME)
    store.yank(NAME, "1.0.1", "worse")
    state = store.state(NAME)
    assert state.at("production") == "1.0.0" and state.get("1.0.1").yanked == "worse" and len(state.events) == 6
    with pytest.raises(NotFound, match=r"no artifact other .* there are tiny-2bit"):
        store.existing("other")


def test_publishers_at_once_each_have_a_version(store: BucketRegistry, monkeypatch):
    """All read the same history before any of them writes: the store lets one, the others decide again."""
    gate, looked, look = threading.Barrier(4), threading.local(), BucketRegistry.look

    def together(self, name):
        found = look(self, name)
        if not getattr(looked, "once", False):
            looked.once = True
            gate.wait(60)
        return found

    monkeypatch.setattr(BucketRegistry, "look", together)
    looked.once, made = True, list[str]()  # this thread does not wait
    writers = [
        threading.Thread(
            target=lambda seed=seed: made.append(BucketRegistry("models/kvq").publish(NAME, tiny.data(seed)).version)
        )
        for seed in range(4)
    ]
    for one in writers:
        one.start()
    for one in writers:
        one.join()
    state = store.state(NAME)
    assert sorted(made) == sorted(state.versions) == ["1.0.0", "1.0.1", "1.0.2", "1.0.3"]
    assert {one.sha256 for one in state.versions.values()} == {sha256(tiny.data(seed)).hexdigest() for seed in range(4)}


def test_a_lost_answer_is_no_second_event(store: BucketRegistry, monkeypatch):
    """The event was written, and the answer lost: the library sends it again, and is told that it is there."""
    store.publish(NAME, tiny.data(0))
    monkeypatch.setattr(store, "claim", lambda key, data, claim=store.claim: claim(key, data) and False)
    store.yank(NAME, "1.0.0", "bad")
    assert [event.change.kind for event in store.state(NAME).events] == ["publish", "yank"]


def test_a_store_without_the_condition_is_not_used(store: BucketRegistry, monkeypatch):
    put = s3fs.S3FileSystem._pipe_file

    async def careless(self, path, data, mode="overwrite", **more):
        return await put(self, path, data, **more)

    monkeypatch.setattr(s3fs.S3FileSystem, "_pipe_file", careless)
    with pytest.raises(RuntimeError, match="does not know If-None-Match"):
        store.publish(NAME, tiny.data())


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:-1] + b"?"])
def test_a_damaged_blob_is_refused_and_nothing_of_it_kept(damage, store: BucketRegistry, system, tmp_path):
    data = tiny.data()
    version = store.publish(NAME, data)
    system.pipe_file(store.blob(version.sha256), damage(data))
    with pytest.raises(ArtifactError, match="sha256: the store sent"):
        resolve.resolve(NAME, URL)
    assert not [path for path in (tmp_path / "home").rglob("*") if path.is_file()]
    (finding,) = store.examine()
    assert finding.level == "fault" and "the store sent" in finding.what
    system.pipe_file(store.blob(version.sha256), data)
    assert resolve.resolve(NAME, URL).path.read_bytes() == data and store.examine() == []


def test_a_damaged_cache_is_fetched_again_by_the_digest(store: BucketRegistry):
    version = store.publish(NAME, tiny.data(), attachments={"README.md": b"# card"})
    path = store.fetch(NAME, version, "README.md")
    path.chmod(0o644)
    path.write_bytes(b"# cord")
    assert store.attachments(NAME, version) == {"README.md": b"# card"}


def test_damaged_events_are_named(store: BucketRegistry, system):
    store.publish(NAME, tiny.data(0))
    store.publish(NAME, tiny.data(1))
    first = f"{store.events_folder(NAME)}/00000001.json"
    kept = system.cat_file(first)
    for data in (b"{", b"x" * (1 << 17)):
        system.pipe_file(first, data)
        with pytest.raises(ArtifactError, match=r"s3://.*00000001\.json"):
            store.state(NAME)
    system.rm_file(first)
    with pytest.raises(ArtifactError, match="missing, though later ones"):
        store.state(NAME)
    (fault,) = [one for one in store.examine() if one.level == "fault"]
    assert fault.what == "event 1 of 2 is missing" and "from a version of the bucket, or a copy" in fault.advice
    with pytest.raises(ArtifactError):
        store.collect(0)
    system.pipe_file(first, kept)
    assert list(store.state(NAME).versions) == ["1.0.0", "1.0.1"]


def test_a_misnamed_event_is_damage(store: BucketRegistry, system):
    version = store.publish(NAME, tiny.data(0))
    folder = store.events_folder(NAME)
    system.mv(f"{folder}/00000001.json", f"{folder}/1.json")
    for action in (lambda: store.state(NAME), lambda: store.collect(-1)):
        with pytest.raises(ArtifactError, match=r"s3://.*/1\.json: event: not the name of one"):
            action()
    assert store.names() == [NAME] and store.has(f"blobs/sha256/{version.sha256}")
    assert [one.path for one in store.examine() if one.level == "fault"] == [f"s3://{folder}/1.json"]


def test_what_the_store_refuses_is_no_damage(store: BucketRegistry, monkeypatch):
    cat, refused = s3fs.S3FileSystem._cat_file, list[str]()

    async def guarded(self, path, **more):
        if any(part in path for part in refused):
            raise PermissionError("ExpiredToken")
        return await cat(self, path, **more)

    monkeypatch.setattr(s3fs.S3FileSystem, "_cat_file", guarded)
    version = store.publish(NAME, tiny.data())
    for part in (version.sha256, "00000001.json"):
        refused[:] = [part]
        (fault,) = [finding for finding in store.examine() if finding.level == "fault"]
        assert "the store refuses: ExpiredToken" in fault.what and fault.advice.startswith("change nothing")
    with pytest.raises(PermissionError):
        store.collect(-1)


def test_an_object_is_no_folder(store: BucketRegistry, system):
    version = store.publish(NAME, tiny.data())
    store.put(f"signatures/{version.sha256}", b"")
    with pytest.raises(ArtifactError, match="no folder"):
        store.signatures(version.sha256, NAME)
    assert [one.what for one in store.examine()] == ["no folder"]


def test_a_publish_that_dies_before_its_event_leaves_the_old_state_and_gc_its_blobs(store: BucketRegistry, monkeypatch):
    store.publish(NAME, tiny.data(0))
    with monkeypatch.context() as patched:
        patched.setattr(store, "write", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.publish(NAME, tiny.data(1))
    assert list(store.state(NAME).versions) == ["1.0.0"]
    store.put("blobs/sha256/README", b"not ours")
    found = {one.what: one for one in store.examine()}
    note = found.pop("no event names it")
    assert note.level == "note" and [*found] == ["not a blob"]
    store.remove("blobs/sha256/README")
    assert store.collect(3600) == [] and store.collect(-1, dry_run=True) == [note.path]
    assert store.collect(-1) == [note.path] and store.examine() == []
    assert store.publish(NAME, tiny.data(1)).version == "1.0.1"


def test_records_are_added_once(store: BucketRegistry):
    version = store.publish(NAME, tiny.data())
    for _ in range(2):
        store.add_record("signatures", version.sha256, b"{}\n", NAME)
    assert store.signatures(version.sha256, NAME) == [b"{}\n"] and store.evaluations(version.sha256) == []


def test_mirrors_and_the_command(store: BucketRegistry, tmp_path, capsys):
    folder = LocalRegistry(tmp_path / "folder")
    for seed in range(2):
        folder.publish(NAME, tiny.data(seed))
    folder.promote(NAME, "1.0.0", force=True)
    folder.yank(NAME, "1.0.1", "worse")
    list(mirror.mirror(folder, NAME, store))
    assert store.state(NAME).versions.keys() == folder.state(NAME).versions.keys()
    assert store.state(NAME).at("production") == "1.0.0" and store.state(NAME).get("1.0.1").yanked == "worse"
    for words in (["list", "--registry", URL], ["history", f"{URL}/{NAME}"], ["show", f"{URL}/{NAME}@1.0.0"],
                  ["doctor", "--registry", URL], ["gc", "--registry", URL], ["verify", f"{URL}/{NAME}"],
                  ["copy", "--all", URL, (tmp_path / "back").as_uri()]):  # fmt: skip
        assert cli.main(words) == 0, (words, capsys.readouterr())
    assert LocalRegistry(tmp_path / "back").state(NAME).at("production") == "1.0.0"
    assert cli.main(["copy", "--all", f"{URL}/{NAME}", (tmp_path / "one").as_uri()]) == 0
    assert len(LocalRegistry(tmp_path / "one").state(NAME).versions) == 2
    said = capsys.readouterr().out
    assert "1.0.0" in said and f"nothing is wrong with {URL}" in said


def test_what_goes_wrong_is_a_sentence(store: BucketRegistry, system, monkeypatch, capsys):
    with pytest.raises(RuntimeError, match="no such bucket"):
        BucketRegistry("elsewhere/x").check_writable()
    with pytest.raises(NotFound, match="no such bucket"):
        BucketRegistry("elsewhere/x").names()
    (fault,) = BucketRegistry("elsewhere/x").examine()
    assert (fault.level, fault.what, fault.path) == ("fault", "there is no such bucket", "s3://elsewhere/x")
    with pytest.raises(ValueError, match="use s3://bucket"):
        parse("s3://models")
    store.check_writable()
    for url in ("s3://", "s3://A", "s3://models/../x", "s3://models//x"):
        with pytest.raises(ValueError, match=r"use s3://bucket"):
            resolve.open_registry(url)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    module._systems.clear()
    assert cli.main(["list", "--registry", URL]) != 0
    assert "AWS_ENDPOINT_URL" in capsys.readouterr().err
    with pytest.raises(ValueError, match="has no commits"):
        store.read(NAME, "a" * 40)


def test_events_read_as_they_were_written(store: BucketRegistry, system):
    store.publish(NAME, tiny.data())
    data = system.cat_file(f"{store.events_folder(NAME)}/00000001.json")
    assert events.from_bytes(data, 1, NAME) == store.state(NAME).events[0]
