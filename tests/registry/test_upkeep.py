"""`gc` removes only what no event names; `doctor` finds every damage and says what to do."""

import os
import time
from pathlib import Path

import pytest
import tiny_artifact as tiny
from local_store import NAME, event_files, three

from kvq_runtime.artifact import artifact
from kvq_runtime.registry import events, resolve
from kvq_runtime.registry.local import LocalRegistry


@pytest.fixture
def store(tmp_path) -> LocalRegistry:
    return LocalRegistry(tmp_path / "registry")


def age(path: Path, hours: float = 48) -> Path:
    past = time.time() - hours * 3600
    os.utime(path, (past, past))
    return path


def test_gc_removes_only_what_is_old_and_unnamed(store):
    store.publish(NAME, tiny.data(), attachments={"README.md": b"card"})
    named = [age(path) for path in sorted((store.root / "blobs" / "sha256").iterdir())]
    orphan, young = store.blob(store.put_blob(b"orphan")), store.blob(store.put_blob(b"young"))
    torn = store.root / "tmp" / ".1-2.tmp"
    torn.write_bytes(b"half")
    age(orphan), age(torn)
    assert store.collect(dry_run=True) == [str(torn), str(orphan)]
    assert torn.exists() and orphan.exists()
    assert store.collect() == [str(torn), str(orphan)]
    assert all(path.exists() for path in [*named, young]) and not torn.exists() and not orphan.exists()
    assert store.collect(grace=0) == [str(young)]
    resolve.load_artifact(NAME, store.url)


@pytest.mark.parametrize("linked", ["blobs", "blobs/sha256", "tmp"])
def test_gc_removes_nothing_through_a_link(linked, store, tmp_path, kvq):
    store.publish(NAME, tiny.data())
    theirs = tmp_path / "theirs"
    (theirs / "sha256").mkdir(parents=True)
    mine = [
        age(theirs / name)
        for name in ("a" * 64, ".1-2.tmp", "sha256/" + "a" * 64)
        if (theirs / name).write_bytes(b"") == 0
    ]
    place = store.root / linked
    place.rename(place.with_name("moved"))
    place.symlink_to(theirs)
    code, _, said = kvq("gc", "--registry", store.url, "--grace", "0s")
    assert code == 1 and f"{place}: a link" in said
    assert all(path.exists() for path in mine)


def test_gc_and_doctor_leave_what_is_no_blob(store):
    store.publish(NAME, tiny.data())
    blobs = store.root / "blobs" / "sha256"
    (blobs / "notes.txt").write_bytes(b"mine")
    (blobs / ("b" * 64)).mkdir()
    (blobs / ("c" * 64)).symlink_to(blobs / "notes.txt")
    (store.root / "tmp" / ".x.tmp").mkdir()
    there = sorted(path for path in store.root.rglob("*"))
    assert store.collect(grace=0) == [] and sorted(store.root.rglob("*")) == there
    found = {Path(one.path).name: one.what for one in store.examine() if one.what == "not a blob"}
    assert found.keys() == {"notes.txt", "b" * 64, "c" * 64}


def test_doctor_names_missing_events_by_ranges(store, kvq):
    three(store)
    folder = store.events_folder(NAME)
    (folder / "99999999.json").write_bytes(b"{}")
    (folder / "00000002.json").unlink()
    faults = [one.what for one in store.examine() if one.level == "fault"]
    last = len(event_files(store)) - 1
    assert faults[:2] == ["event 2 of 99999999 is missing", f"events {last + 2} to 99999998 of 99999999 are missing"]
    code, out, _ = kvq("doctor", "--registry", store.url)
    assert code == 1 and "99999998" in out


def test_doctor_sees_that_the_first_event_is_missing(store):
    three(store)
    event_files(store)[0].unlink()
    assert any(one.what.startswith("event 1 of ") for one in store.examine())


def test_gc_gives_a_blob_back_that_was_named_meanwhile(store, monkeypatch):
    store.publish("other", tiny.data(0))
    data = tiny.data(1)
    orphan = age(store.blob(store.put_blob(data)))
    real, looked = LocalRegistry.named, []

    def named(given):
        found = real(given)
        if not looked:  # an event names the blob between the two looks
            looked.append(1)
            change = events.Publish("1.0.0", orphan.name, len(data))
            store.change(NAME, lambda state: None if state.versions else change)
        return found

    monkeypatch.setattr(LocalRegistry, "named", named)
    assert store.collect() == []
    assert artifact.to_bytes(resolve.load_artifact(NAME, store.url)) == data


def test_gc_finishes_what_a_killed_gc_left(store):
    data = tiny.data()
    path = store.blob(store.publish(NAME, data).sha256)
    path.rename(age(path).parent.parent.parent / "tmp" / f".{path.name}.tmp")
    store.collect()
    assert path.read_bytes() == data


def test_doctor_names_every_damage_and_says_what_to_do(store):
    assert store.examine() == []
    three(store)
    store.publish("gone", tiny.data(5))
    assert store.examine() == []
    blobs = {version.version: store.blob(version.sha256) for version in store.state(NAME).versions.values()}
    blobs["1.0.0"].unlink()
    blobs["1.0.1"].chmod(0o644)
    blobs["1.0.1"].write_bytes(b"rot")
    event_files(store)[1].unlink()
    (store.events_folder(NAME) / "notes.txt").write_text("x")
    (store.root / "names" / "Bad Name").mkdir()
    (store.root / "tmp" / ".torn.tmp").write_bytes(b"")
    found = {(finding.level, Path(finding.path).name): finding for finding in store.examine()}
    assert set(found) == {
        ("fault", "00000002.json"),
        ("fault", "notes.txt"),
        ("fault", "Bad Name"),
        ("fault", blobs["1.0.0"].name),
        ("note", blobs["1.0.1"].name),  # its event is the one that is missing: whose it is is not known
        ("note", ".torn.tmp"),
    }
    assert "may name it" in found["note", blobs["1.0.1"].name].advice
    assert all(finding.advice for finding in found.values())


def test_doctor_sees_a_wrong_digest(store):
    path = store.blob(store.publish(NAME, tiny.data(), attachments={"README.md": b"card"}).files["README.md"]["sha256"])
    path.chmod(0o644)
    path.write_bytes(b"CARD")
    assert [(f.level, f.path) for f in store.examine()] == [("fault", str(path))]
