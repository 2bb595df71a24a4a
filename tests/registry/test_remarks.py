"""Notes and tags stand beside events: none conflicts, and a kvq that knows only events reads on."""

import json
import tracemalloc
from hashlib import sha256
from pathlib import PurePath

import pytest
import tiny_artifact as tiny
from hub_client import asked, hub_for
from local_store import FOLDER, GOOD, NAME
from webhook import posted_to

from kvq_runtime.disk import files, strict_json
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.registry import events, mirror, registry, remarks, resolve
from kvq_runtime.registry.hub import index
from kvq_runtime.registry.local import LocalRegistry
from kvq_runtime.registry.registry import Registry


def test_every_field_of_events_and_remarks_has_a_check():
    """A field without one would be read as anything that another publisher wrote."""
    named = {field for kind in events.KINDS.values() for field in kind.__dataclass_fields__ if field != "kind"}
    assert named | {"at"} == events._CHECKS.keys()
    assert set().union(*remarks.FIELDS.values(), remarks._HEAD) - {"schema", "kind"} == remarks._CHECKS.keys()


# ---- notes and tags


def test_notes_and_tags_by_the_commands(store: Registry, kvq, tmp_path):
    assert kvq("note", f"{NAME}@1.0.1", "fitted without code")[0] == 0
    for name in ("long-context", "b"):
        assert kvq("tag", f"{NAME}@1.0.1", name)[0] == 0
    code, out, _ = kvq("tag", f"{NAME}@1.0.1", "b", "--remove", "--json")
    assert code == 0 and json.loads(out)["tags"] == ["long-context"]
    shown = json.loads(kvq("show", f"{NAME}@1.0.1", "--json")[1])
    assert shown["tags"] == ["long-context"]
    assert [(one["by"], one["text"]) for one in shown["notes"]] == [("alice", "fitted without code")]
    assert json.loads(kvq("show", f"{NAME}@1.0.0", "--json")[1])["notes"] == []
    assert "fitted without code" in kvq("show", f"{NAME}@1.0.1")[1]
    if isinstance(store, LocalRegistry):  # a Hub's search lists names when it has seen them
        assert json.loads(kvq("list", "--tag", "long-context", "--json")[1])[0]["tagged"] == ["1.0.1"]
        assert json.loads(kvq("list", "--tag", "b", "--json")[1]) == []
        assert kvq("doctor")[1].startswith("nothing is wrong")
    changes = [row["change"] for row in json.loads(kvq("history", NAME, "--json")[1])]
    assert sorted(changes) == ["note", "promote", "publish", "publish", "tag", "tag", "untag"]
    other = LocalRegistry(tmp_path / "mirror")
    for _ in range(2):
        list(mirror.mirror(store, NAME, other))
    copied = remarks.read(other, NAME)
    assert copied.tags("1.0.1") == ["long-context"] and copied.all == remarks.read(store, NAME).all


def test_an_older_kvq_reads_on(store: Registry):
    """It knows these kinds of events, and this form of a Hub's index."""
    remarks.note(store, NAME, "1.0.0", "a note")
    remarks.protect(store, NAME, "production", 1)
    store.promote(NAME, "1.0.1")
    state = store.current_state(NAME)
    assert [event.change.kind for event in state.events] == ["publish", "publish", "promote"]
    assert state.at("production") == "1.0.0"
    if not isinstance(store, LocalRegistry):
        index_json = strict_json.loads(index.to_bytes(store.look(NAME)), "index")
        assert set(index_json) == {"schema", "name", "versions", "aliases", "events"}


def test_what_changes_nothing_says_so_and_a_long_note_is_not_repeated(store: Registry, kvq):
    code, _, err = kvq("tag", f"{NAME}@1.0.0", "good", "--remove")
    assert code == 0 and f"{NAME}@1.0.0 has no tag good; nothing was changed" in err
    assert not kvq("tag", f"{NAME}@1.0.0", "good")[2]
    assert "has the tag already: good" in kvq("tag", f"{NAME}@1.0.0", "good")[2]
    assert not kvq("tag", f"{NAME}@1.0.0", "good", "--remove")[2]
    text = " ".join(["word"] * 90)
    assert kvq("note", f"{NAME}@1.0.0", text)[1].splitlines()[-1].endswith("word ...")
    assert json.loads(kvq("note", f"{NAME}@1.0.0", text, "--json")[1])["note"] == text


def test_a_tag_that_was_removed_is_given_again(store: Registry, monkeypatch):
    monkeypatch.setattr(remarks.events, "now", lambda: "2026-01-31T12:00:00Z")  # all in one second
    for _ in range(2):
        assert remarks.tag(store, NAME, "1.0.0", "good") == ["good"]
        assert remarks.tag(store, NAME, "1.0.0", "good") == ["good"]
        assert remarks.tag(store, NAME, "1.0.0", "good", remove=True) == []
    assert len(remarks.read(store, NAME).all) == 4, "what is so already is not written"


def test_a_tag_and_its_removal_at_once_leave_the_tag(store: Registry):
    """Who removes has not seen the tag that came meanwhile."""
    remarks.tag(store, NAME, "1.0.0", "good")
    seen = remarks.read(store, NAME).holding("tag", tag="good")
    remarks.add(store, NAME, "untag", seen, version="1.0.0", tag="good")
    remarks.add(store, NAME, "tag", seen, version="1.0.0", tag="good")
    assert remarks.read(store, NAME).tags("1.0.0") == ["good"]


@pytest.mark.parametrize("given, said", [
    (["note", f"{NAME}@1.0.0", "a\nb"], "use one line of 1 to 500"), (["note", f"{NAME}@1.0.0", "x" * 501], "500"),
    (["tag", f"{NAME}@1.0.0", "A b"], "use 1 to 32 of a-z"), (["note", NAME, "x"], "name the version"),
    (["list", "--tag", "A b"], "use 1 to 32 of a-z"),
    (["protect", NAME, "--approvals", "17"], "from 0 to 16"), (["protect", NAME, "--approvals", "-1"], "whole number"),
])  # fmt: skip
def test_what_cannot_be_said_is_refused(given, said, store: Registry, kvq):
    try:
        code, _, error = kvq(*given)
    except SystemExit as ended:  # argparse's own
        code, error = ended.code, said
    assert code == 2 and said in error and remarks.read(store, NAME).all == ()


def test_no_version_no_note(store: Registry, kvq, monkeypatch):
    assert kvq("note", f"{NAME}@9.0.0", "x")[0] == 3
    with pytest.raises(NotFound):
        remarks.tag(store, NAME, "9.0.0", "x")
    monkeypatch.setenv("KVQ_USER", "a\nb")
    with pytest.raises(ValueError, match="in KVQ_USER"):
        remarks.note(store, NAME, "1.0.0", "x")


# ---- files


DAMAGED = {
    "newer": (GOOD | {"schema": 2, "kind": "note", "version": "1.0.0", "text": "x"}, "a newer kvq"),
    "unknown key": (GOOD | {"kind": "note", "version": "1.0.0", "text": "x", "y": 1}, "unknown keys"),
    "other name": (GOOD | {"kind": "note", "version": "1.0.0", "text": "x", "name": "other"}, "stored with another"),
    "control": (GOOD | {"kind": "note", "version": "1.0.0", "text": "\u001b[2J"}, "use one line"),
    "no count": (GOOD | {"kind": "protect", "alias": "production", "approvals": True}, "whole number"),
    "replaces": (GOOD | {"kind": "tag", "version": "1.0.0", "tag": "x", "replaces": ["../x"]}, "sha256 '../x'"),
    "replaces something": (
        GOOD | {"kind": "approve", "proposal": "0" * 64, "replaces": ["0" * 64]},
        "replaces nothing",
    ),
    "too many": (GOOD | {"kind": "tag", "version": "1.0.0", "tag": "x", "replaces": ["0" * 64] * 65}, "64 at most"),
    "too long": (GOOD | {"kind": "note", "version": "1.0.0", "text": "x" * 8192}, "at most 8192 are allowed"),
    "no list": (GOOD | {"kind": "tag", "version": "1.0.0", "tag": "x", "replaces": {}}, "a list of digests"),
    "at": (GOOD | {"kind": "tag", "version": "1.0.0", "tag": "x", "at": "now"}, "use a UTC time"),
}


@pytest.mark.parametrize("fields, said", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_remark_is_refused_by_name(fields, said, folder: LocalRegistry):
    """Not passed over: it may be what protects an alias."""
    folder.add_record("remarks", FOLDER, strict_json.dumps(fields).encode(), NAME)
    with pytest.raises(ArtifactError, match=said):
        folder.promote(NAME, "1.0.0")
    (finding,) = folder.examine()
    assert finding.level == "fault" and "restore it from a backup" in finding.advice
    assert folder.state(NAME).at("production") is None


def test_a_remark_that_was_changed_is_refused(folder: LocalRegistry):
    remarks.protect(folder, NAME, "production", 1)
    (path,) = (folder.root / "remarks" / FOLDER).iterdir()
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b'"approvals":1', b'"approvals":0'))
    with pytest.raises(ArtifactError, match="the file was changed"):
        folder.promote(NAME, "1.0.0")


def test_a_damaged_remark_on_a_hub_is_told(store: Registry, monkeypatch):
    """A promote fails of it, so that doctor says why."""
    store.add_record("remarks", FOLDER, strict_json.dumps(DAMAGED["newer"][0]).encode(), NAME)
    monkeypatch.setattr(store, "names", lambda: [NAME])  # a Hub's search lists names when it has seen them
    with pytest.raises(ArtifactError, match="a newer kvq"):
        store.promote(NAME, "1.0.1")
    (finding,) = [one for one in store.examine() if one.level == "fault"]
    assert "a newer kvq may have written it" in finding.what and "restore it from a backup" in finding.advice


@pytest.mark.parametrize("limit, most", [("MAX_REMARKS", 2), ("BYTES", 400)])
def test_protections_without_end_are_left_and_notes_are_not_counted(limit, most, store: Registry, monkeypatch):
    for number in range(3):
        remarks.note(store, NAME, "1.0.0", f"note {number}")
    monkeypatch.setattr(registry, limit, most)
    assert store.promote(NAME, "1.0.1", alias="canary").at("canary") == "1.0.1"
    for number in range(3):
        remarks.add(store, NAME, "protect", [], alias="production", approvals=number)
    with pytest.raises(RuntimeError, match=f"remarks/{FOLDER}: more than .* records or .* bytes of them; remove some"):
        store.promote(NAME, "1.0.1")


def test_records_that_are_kept_have_a_smaller_limit(folder: LocalRegistry, monkeypatch):
    """An evaluation takes more memory than a remark, and all of an artifact's are read at once."""
    monkeypatch.setattr(folder, "listed", lambda *given: ((PurePath(f"{n}.json"), b"{}") for n in range(4097)))
    with pytest.raises(RuntimeError, match="more than 4096 records"):
        folder.records("evaluations", "0" * 64, NAME)
    assert len(folder.records("remarks", "0" * 64, NAME)) == 4097


def test_a_mirror_reads_all_remarks_once(folder: LocalRegistry, tmp_path, monkeypatch):
    """Not once for each version, of which there may be a hundred."""
    for seed in (1, 2):
        folder.publish(NAME, tiny.data(seed))
    for version in ("1.0.0", "1.0.1", "1.0.2"):
        remarks.note(folder, NAME, version, "a note")
    remarks.tag(folder, NAME, "1.0.2", "good")
    remarks.note(folder, NAME, "1.0.2", "another note")
    read, listed = list[str](), LocalRegistry.listed

    def counted(self: LocalRegistry, name: str, of: str):
        read.extend([self.root.name] if of.startswith("remarks/") else [])
        return listed(self, name, of)

    monkeypatch.setattr(LocalRegistry, "listed", counted)
    other = LocalRegistry(tmp_path / "other")
    mirror.copy(folder, NAME, folder.state(NAME).get("1.0.0"), other)
    assert [one.said["version"] for one in remarks.read(other, NAME).all] == ["1.0.0"]
    read.clear()
    list(mirror.mirror(folder, NAME, other))
    assert read.count("registry") == 1 and read.count("other") == 2, "what is there, and what is protected"
    assert remarks.read(other, NAME).all == remarks.read(folder, NAME).all


def test_thousands_of_remarks_of_others_are_read_one_by_one(folder: LocalRegistry, monkeypatch):
    """8 MB of notes and tags: a promote neither refuses nor keeps them, and what protects the alias is found."""
    place = folder.root / "remarks" / FOLDER
    files.make_folder(place)
    for number in range(4200):
        said = {"kind": "note", "text": f"{number}"} if number % 2 else {"kind": "tag", "tag": f"{number}"}
        data = strict_json.dumps(GOOD | said | {"version": "1.0.0"}).encode().ljust(2048)
        (place / f"{sha256(data).hexdigest()}.json").write_bytes(data)
    remarks.protect(folder, NAME, "production", 1)
    tracemalloc.start()
    found = remarks.read(folder, NAME, *remarks.OF_ALIASES, alias="production")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [one.what for one in found.all] == ["protect"] and peak < 4 << 20
    assert folder.promote(NAME, "1.0.0").at("production") is None
    monkeypatch.setenv("KVQ_USER", "bob")
    assert remarks.approve(folder, NAME, "1.0.0", "production").at("production") == "1.0.0"


def test_a_remark_is_received_once(tmp_path, monkeypatch):
    """Its digest is known, so that another commit does not make it another one; damage in the cache does."""
    monkeypatch.setenv("KVQ_USER", "alice")
    with hub_for(monkeypatch, tmp_path) as hub:
        store = resolve.open_registry("hf://org")
        store.publish(NAME, tiny.data())

        def received() -> int:
            before = len(asked(hub))
            remarks.read(resolve.open_registry("hf://org"), NAME)
            return sum("/resolve/" in line and "/remarks/" in line for line in asked(hub)[before:])

        for number in range(3):
            remarks.note(store, NAME, "1.0.0", f"note {number}")
            assert received() == 1
        (kept, *_) = [one.digest for one in remarks.read(store, NAME).all]
        (blob,) = (tmp_path / "hf-cache").glob(f"**/blobs/{kept}")
        blob.chmod(0o644)
        blob.write_bytes(b"{}")
        assert received() == 1


def test_a_kind_of_a_later_kvq_is_passed_over(folder: LocalRegistry):
    later = GOOD | {"kind": "pin", "version": "1.0.0", "until": 7}
    folder.add_record("remarks", FOLDER, strict_json.dumps(later).encode(), NAME)
    assert remarks.read(folder, NAME).all == () and folder.examine() == []
    assert folder.promote(NAME, "1.0.0").at("production") == "1.0.0"


def test_remarks_are_told(folder: LocalRegistry, monkeypatch):
    heard = list[bytes]()
    with posted_to(lambda head, body: heard.append(body) or 200) as address:
        monkeypatch.setenv("KVQ_WEBHOOK", address)
        monkeypatch.setenv("KVQ_WEBHOOK_SECRET", "a secret of ours")
        remarks.protect(folder, NAME, "production", 1)
        remarks.note(folder, NAME, "1.0.0", "a note")
        folder.promote(NAME, "1.0.0")
    told = [json.loads(body)["event"] for body in heard]
    assert [(one["kind"], one["name"], one["by"]) for one in told] == [
        (kind, NAME, "alice") for kind in ("protect", "note", "propose")
    ]


# ---- links


@pytest.mark.parametrize("place", ["names", "evaluations", "signatures", "remarks"])
def test_doctor_tells_of_all_beside_a_link_that_leads_nowhere(place, folder: LocalRegistry, tmp_path):
    files.make_folder(folder.root / "tmp")
    (folder.root / "tmp" / "draft").touch()
    if place == "names":
        (folder.root / place).rename(tmp_path / "moved")
    (folder.root / place).symlink_to(tmp_path / "not-mounted")
    findings = folder.examine()
    (fault,) = [one for one in findings if one.level == "fault"]
    assert fault.path == str(folder.root / place) and "leads nowhere" in fault.what and "move it out" in fault.advice
    assert "temporary file" in [one.what for one in findings]


@pytest.mark.parametrize("place", ["names/gone", "names/gone/events", "remarks"])
def test_a_link_that_leads_nowhere_is_told(place, folder: LocalRegistry, tmp_path, kvq):
    path = folder.root / place
    files.make_folder(path.parent)
    path.symlink_to(tmp_path / "not-mounted")
    if place == "remarks":
        with pytest.raises(ArtifactError, match="leads nowhere"):
            folder.promote(NAME, "1.0.0")
        return
    assert folder.names() == ["gone", NAME]
    code, out, _ = kvq("list", "--registry", folder.url)
    assert code == 1 and "a link that leads nowhere" in out and NAME in out
    code, out, _ = kvq("doctor", "--registry", folder.url)
    assert code == 1 and "a link that leads nowhere" in out and "move it out of the registry" in out
    with pytest.raises(ArtifactError, match="leads nowhere"):
        folder.collect(0)
    with pytest.raises(ArtifactError, match="leads nowhere"):
        folder.publish("gone", tiny.data(1))
