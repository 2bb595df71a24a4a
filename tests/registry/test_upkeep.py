"""`gc` removes only what no event names; `doctor` finds every damage and says what to do."""

import os
import time
from pathlib import Path

import pytest
import tiny_artifact as tiny
from local_store import NAME, event_files, three

from kvq_runtime.artifact import artifact
from kvq_runtime.errors import ArtifactError
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


@pytest.mark.parametrize("misnamed", ["2.json", "000000002.json", "00000000.json", "copy of 2.json"])
def test_a_misnamed_event_is_damage(misnamed, store, kvq):
    """It may be the only one that names a blob: the state without it is not given, and nothing is removed."""
    three(store)
    store.publish("sound", tiny.data(5))
    blobs = [age(path) for path in sorted((store.root / "blobs" / "sha256").iterdir())]
    path = event_files(store)[-1].rename(store.events_folder(NAME) / misnamed)
    for action in (lambda: store.state(NAME), lambda: store.publish(NAME, tiny.data(6)), store.collect):
        with pytest.raises(ArtifactError, match=f"{path}: event: not the name of one; kvq doctor says what to do"):
            action()
    assert all(one.exists() for one in blobs)
    code, out, _ = kvq("list", "--registry", store.url)
    assert code == 1 and "cannot be read" in out and "sound" in out
    found = {finding.path: finding for finding in store.examine()}
    assert found[str(path)].level == "fault" and "give it its name" in found[str(path)].advice
    for other in event_files(store):
        if other != path:
            other.unlink()
    assert store.names() == ["sound", NAME]
    with pytest.raises(ArtifactError, match="not the name of one"):
        store.collect()


def test_a_file_where_a_folder_has_to_be_is_said(store, kvq):
    version = store.publish(NAME, tiny.data())
    store.publish("sound", tiny.data(5))
    folder = store.events_folder("sound")
    folder.rename(store.root / "moved")
    folder.write_bytes(b"")
    (store.root / "evaluations").mkdir()
    records = store.root / "evaluations" / version.sha256
    records.write_bytes(b"")
    with pytest.raises(ArtifactError, match=f"{records}: no folder"):
        store.evaluations(version.sha256)
    assert store.names() == ["sound", NAME]
    code, out, _ = kvq("list", "--registry", store.url, "--json")
    assert code == 1 and out.count("cannot be read") == 1, "records are not read for it"
    with pytest.raises(ArtifactError, match=f"{folder}: no folder"):
        store.collect(grace=0)
    faults = {finding.path: finding.advice for finding in store.examine() if finding.level == "fault"}
    assert faults == dict.fromkeys([str(folder.parent), str(records)], "move it out of the registry")


def test_what_cannot_be_read_is_no_damage(store, monkeypatch):
    """Nothing is known of it: whoever published again, yanked or moved it away would harm a sound registry."""
    version = store.publish(NAME, tiny.data())
    store.publish("sound", tiny.data(5))
    store.add_record("signatures", version.sha256, b"{}\n")
    refused, (record,) = set[str](), store.root.glob("signatures/*/*")

    def guard(method):
        def guarded(self, path, *more):
            if str(self.at(path)) in refused:
                raise PermissionError(13, "Permission denied", str(self.at(path)))
            return method(self, path, *more)

        return guarded

    for method in ("entries", "content"):
        monkeypatch.setattr(LocalRegistry, method, guard(getattr(LocalRegistry, method)))
    fetch = guard(lambda self, path, *more: LocalRegistry.fetch(self, *more))
    given = lambda self, name, one, file="kvq.safetensors": fetch(self, self.blob(one.sha256), name, one, file)  # noqa: E731
    monkeypatch.setattr(LocalRegistry, "fetch_verified", given)
    assert store.examine() == []
    (event,) = event_files(store)
    for path in (event, event.parent, store.blob(version.sha256), record, record.parent):
        refused = {str(path)}
        (fault,) = [finding for finding in store.examine() if finding.level == "fault"]
        assert "by this user; change its permissions" in fault.what and fault.advice.startswith(
            "change nothing; give access"
        )
        if path in (event, event.parent):
            with pytest.raises(PermissionError):
                store.collect(grace=0)
            assert NAME in store.names() and store.blob(version.sha256).exists()


def test_doctor_lists_blobs_once(store, monkeypatch):
    """A blob that gc removes meanwhile is gone, and not something else."""
    store.publish(NAME, tiny.data())
    orphan, entries = store.blob(store.put_blob(b"orphan")), LocalRegistry.entries

    def listed(self, folder):
        found = entries(self, folder)
        if folder == "blobs/sha256":
            orphan.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(LocalRegistry, "entries", listed)
    assert store.examine() == []


@pytest.mark.parametrize("place", ["names", "evaluations"])
def test_doctor_tells_of_all_beside_a_link_that_leads_nowhere(place, store, tmp_path):
    store.publish(NAME, tiny.data())
    (store.root / "tmp" / "draft").touch()
    if place == "names":
        (store.root / place).rename(tmp_path / "moved")
    (store.root / place).symlink_to(tmp_path / "not-mounted")
    findings = store.examine()
    (fault,) = [one for one in findings if one.level == "fault"]
    assert fault.path == str(store.root / place) and "leads nowhere" in fault.what and "move it out" in fault.advice
    assert "temporary file" in [one.what for one in findings]


@pytest.mark.parametrize("place", ["names/gone", "names/gone/events"])
def test_a_link_that_leads_nowhere_is_told(place, store, tmp_path, kvq):
    store.publish(NAME, tiny.data())
    path = store.root / place
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(tmp_path / "not-mounted")
    assert store.names() == ["gone", NAME]
    code, out, _ = kvq("list", "--registry", store.url)
    assert code == 1 and "a link that leads nowhere" in out and NAME in out
    for action in (lambda: store.collect(0), lambda: store.publish("gone", tiny.data(1))):
        with pytest.raises(ArtifactError, match="leads nowhere"):
            action()
