"""What is a bucket's own: conditions, requests and damage there, of moto's S3 on loopback. `make test-bucket`."""

import pytest

pytest.importorskip("s3fs", reason="s3fs and moto are in an environment of their own: make test-bucket")
pytest.importorskip("moto", reason="s3fs and moto are in an environment of their own: make test-bucket")

import s3fs
import tiny_artifact as tiny

from kvq_runtime.cli import main as cli
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.registry import bucket as module
from kvq_runtime.registry import resolve
from kvq_runtime.registry.bucket import BucketRegistry
from kvq_runtime.registry.reference import parse

NAME, URL = "tiny-2bit", "s3://models/kvq"


@pytest.fixture
def store(bucket_registry: BucketRegistry) -> BucketRegistry:
    return bucket_registry


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
    assert not [path for path in (tmp_path / "kvq-home").rglob("*") if path.is_file()]
    (finding,) = store.examine()
    assert finding.level == "fault" and "the store sent" in finding.what
    system.pipe_file(store.blob(version.sha256), data)
    assert resolve.resolve(NAME, URL).path.read_bytes() == data and store.examine() == []


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
