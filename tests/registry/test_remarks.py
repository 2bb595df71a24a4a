"""Notes, tags and approvals stand beside events: none conflicts, and a kvq that knows only events reads on."""

import json
import re
import tracemalloc
from hashlib import sha256
from pathlib import PurePath

import pytest
import tiny_artifact as tiny
from hub_client import asked, hub_for
from webhook import posted_to

from kvq_runtime.disk import files, strict_json
from kvq_runtime.errors import ArtifactError, Conflict, NotFound
from kvq_runtime.registry import events, mirror, registry, remarks, resolve
from kvq_runtime.registry.hub import index
from kvq_runtime.registry.local import LocalRegistry
from kvq_runtime.registry.registry import Registry


def test_every_field_of_events_and_remarks_has_a_check():
    """A field without one would be read as anything that another publisher wrote."""
    named = {field for kind in events.KINDS.values() for field in kind.__dataclass_fields__ if field != "kind"}
    assert named | {"at"} == events._CHECKS.keys()
    assert set().union(*remarks.FIELDS.values(), remarks._HEAD) - {"schema", "kind"} == remarks._CHECKS.keys()


NAME = "tiny-2bit"
FOLDER = sha256(NAME.encode()).hexdigest()


@pytest.fixture
def store(any_registry: Registry, monkeypatch) -> Registry:
    """A registry with two versions, of each kind, the first one production; the default registry of the commands."""
    monkeypatch.setenv("KVQ_USER", "alice")
    monkeypatch.setenv("KVQ_REGISTRY", any_registry.url)
    for seed in range(2):
        any_registry.publish(NAME, tiny.data(seed), attachments={"README.md": b"---\ntags: [kvq]\n---\n"})
    any_registry.promote(NAME, "1.0.0")
    return any_registry


def production() -> str:
    """What a cache that is made now is made of."""
    return resolve.resolve(f"{NAME}@production").version


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


# ---- protected aliases


def test_a_protected_alias_waits_for_another_name(store: Registry, kvq, monkeypatch):
    assert kvq("protect", NAME, "--approvals", "1")[0] == 0
    code, out, error = kvq("promote", f"{NAME}@1.0.1")
    (proposal,) = remarks.read(resolve.open_registry(store.url), NAME, "propose").all
    said = f"production is protected and did not move: alice proposed it at {proposal.at}; 1 other name has to"
    assert code == 6 and error.splitlines()[-1] == f"kvq: {said} approve: `kvq approve {NAME}@1.0.1 --alias production`"
    assert [line.split() for line in out.splitlines()] == [
        ["name", NAME], ["alias", "production"], ["version", "1.0.0"],
    ]  # fmt: skip
    assert production() == "1.0.0"
    shown = json.loads(kvq("show", f"{NAME}@1.0.1", "--json")[1])["proposed"]
    assert [(one["alias"], one["by"], one["approved"], one["needed"]) for one in shown] == [
        ("production", "alice", [], 1)
    ]
    assert kvq("promote", f"{NAME}@1.0.1", "--json")[0] == 6  # again: no second proposal
    code, _, error = kvq("approve", f"{NAME}@1.0.1")
    assert code == 4 and "alice proposed it, and another one has to approve" in error and production() == "1.0.0"
    monkeypatch.setenv("KVQ_USER", "bob")
    assert kvq("approve", f"{NAME}@1.0.0")[0] == 0, "which is production already"
    code, out, _ = kvq("approve", f"{NAME}@1.0.1", "--json")
    assert code == 0 and json.loads(out)["version"] == "1.0.1" and production() == "1.0.1"
    state = store.current_state(NAME)
    assert len(state.events) == 4
    assert [one.what for one in remarks.read(store, NAME).all].count("propose") == 1
    assert kvq("approve", f"{NAME}@1.0.1")[0] == 0 and store.current_state(NAME) == state, "once more changes nothing"
    assert kvq("rollback", NAME)[0] == 0 and production() == "1.0.0", "what was approved before needs nobody"
    assert kvq("protect", NAME, "--approvals", "0")[0] == 0
    assert kvq("promote", f"{NAME}@1.0.1")[0] == 0 and production() == "1.0.1"


@pytest.mark.parametrize("needed, said", [
    (2, "alice proposed it at .*, bob approved; 1 other name has to approve: `kvq approve NAME"),
    (3, "alice proposed it at .*, bob approved; 2 other names have to approve: `kvq approve NAME"),
    (1, "alice proposed it at .*, bob approved; nobody else has to approve: `kvq promote NAME.* moves it"),
    (0, "alice proposed it at .*, bob approved; nobody else has to approve: `kvq promote NAME.* moves it"),
    (None, "no proposal is open: it was moved meanwhile; look at `kvq history .*`, then `kvq promote NAME"),
])  # fmt: skip
def test_what_is_said_of_what_came_meanwhile(needed, said, folder: LocalRegistry, kvq, monkeypatch):
    """Between a promote that only proposed, and what is read to tell of it."""
    monkeypatch.setenv("KVQ_REGISTRY", folder.url)
    folder.publish(NAME, tiny.data(1))
    remarks.protect(folder, NAME, "production", 1)
    real = remarks.propose

    def overtaken(store: Registry, state, alias: str, version: str) -> None:
        if needed is not None:
            real(store, state, alias, version)
            (proposal,) = remarks.read(store, NAME, "propose").all
            monkeypatch.setenv("KVQ_USER", "bob")
            remarks.add(store, NAME, "approve", [], proposal=proposal.digest)
            remarks.protect(store, NAME, "production", needed)

    monkeypatch.setattr(remarks, "propose", overtaken)
    code, _, error = kvq("promote", f"{NAME}@1.0.1")
    said = said.replace("NAME", f"{NAME}@1.0.1 --alias production")
    assert code == 6 and re.search(f"^kvq: production .*did not move.* {said}", error, re.MULTILINE), error


def test_other_aliases_are_free_and_a_copy_is_proposed(store: Registry, tmp_path):
    remarks.protect(store, NAME, "production", 1)
    assert store.promote(NAME, "1.0.1", alias="canary").at("canary") == "1.0.1"
    source = LocalRegistry(tmp_path / "source")
    for seed in range(2):
        source.publish(NAME, tiny.data(seed))
    source.promote(NAME, "1.0.1")
    (row,) = [one for one in mirror.mirror(source, NAME, store) if "production" in one["result"]]
    assert row["result"] == "is proposed as production, which is protected" and production() == "1.0.0"


def test_notes_of_versions_before_one_that_a_mirror_refuses(store: Registry, tmp_path):
    remarks.note(store, NAME, "1.0.0", "a note")
    remarks.note(store, NAME, "1.0.1", "another")
    other = LocalRegistry(tmp_path / "mirror")
    for seed in (0, 2):  # its 1.0.1 is another file
        other.publish(NAME, tiny.data(seed))
    with pytest.raises(Conflict):
        list(mirror.mirror(store, NAME, other))
    found = remarks.read(other, NAME)
    assert [one.said["version"] for one in found.holding("note")] == ["1.0.0"]


@pytest.mark.parametrize("kind", ["note", "tag", "untag"])
def test_what_a_mirror_copies_lifts_no_protection(kind, store: Registry, tmp_path):
    """Of whatever kind: a remark replaces only those about the same."""
    remarks.protect(store, NAME, "production", 1)
    (protection,) = remarks.read(store, NAME).all
    source = LocalRegistry(tmp_path / "source")
    for seed in range(2):
        source.publish(NAME, tiny.data(seed))
    source.promote(NAME, "1.0.1")
    said = {"text": "x"} if kind == "note" else {"tag": "x"}
    hostile = GOOD | {"kind": kind, "version": "1.0.0", **said, "replaces": [protection.digest]}
    source.add_record("remarks", FOLDER, strict_json.dumps(hostile).encode(), NAME)
    if kind == "note":
        with pytest.raises(ArtifactError, match="a note replaces nothing"):
            list(mirror.mirror(source, NAME, store))
    else:
        list(mirror.mirror(source, NAME, store))
        assert len(remarks.read(store, NAME).holding(kind)) == 1, "it was copied"
    assert remarks.read(store, NAME).approvals("production") == 1 and production() == "1.0.0"


def test_a_protection_of_another_alias_lifts_none(store: Registry):
    remarks.protect(store, NAME, "production", 1)
    remarks.add(store, NAME, "protect", list(remarks.read(store, NAME).all), alias="canary", approvals=0)
    found = remarks.read(store, NAME)
    assert found.approvals("production") == 1 and found.approvals("canary") == 0


@pytest.mark.parametrize("protected", [True, False])
def test_a_mirror_goes_on_where_it_cannot_yank(protected, store: Registry, tmp_path):
    """An alias of the target still points there; without a change the dry run says what is done then."""
    source = LocalRegistry(tmp_path / "source")
    for seed in range(2):
        source.publish(NAME, tiny.data(seed))
    source.promote(NAME, "1.0.1")
    source.yank(NAME, "1.0.0", "bad")
    if protected:
        remarks.protect(store, NAME, "production", 1)
        expected = ["is proposed as production, which is protected"]
        expected += ["not yanked: production, which is protected, points to it"]
    else:
        store.promote(NAME, "1.0.0", alias="canary")
        expected = ["is production", "not yanked: canary points to it"]
    dry = [row["result"] for row in mirror.mirror(source, NAME, store, dry_run=True)]
    assert dry[2:] == [f"would be: {one}" for one in expected]
    assert [row["result"] for row in mirror.mirror(source, NAME, store)][2:] == expected
    assert store.current_state(NAME).get("1.0.0").yanked is None


def test_two_approvals_are_of_two_others(store: Registry, monkeypatch):
    remarks.protect(store, NAME, "production", 2)
    store.promote(NAME, "1.0.1")
    for name, moved in (("bob", "1.0.0"), (" bob ", "1.0.0"), ("alice ", None), ("carol", "1.0.1")):
        monkeypatch.setenv("KVQ_USER", name)
        if moved is None:
            with pytest.raises(Conflict, match="another one has to approve"):
                remarks.approve(store, NAME, "1.0.1", "production")
        else:
            assert remarks.approve(store, NAME, "1.0.1", "production").at("production") == moved


def test_protection_is_decided_of_the_present(store: Registry, monkeypatch):
    """Not of the head that was last seen, which is read where the Hub does not answer for a moment."""
    remarks.protect(store, NAME, "production", 1)
    store.state(NAME)
    old = store.last_commit(NAME)
    remarks.protect(store, NAME, "production", 0)
    monkeypatch.setattr(index, "main_or_last_known", lambda repo: old)
    remarks.protect(store, NAME, "production", 1)
    store.current_state(NAME)
    assert remarks.read(store, NAME).approvals("production") == 1


def test_any_number_of_protections_is_lifted(folder: LocalRegistry, monkeypatch):
    for second in range(65):
        monkeypatch.setattr(remarks.events, "now", lambda s=second: f"2026-01-31T12:{s // 60:02}:{s % 60:02}Z")
        remarks.add(folder, NAME, "protect", [], alias="production", approvals=1)
    assert len(remarks.read(folder, NAME).holding("protect")) == 65
    remarks.protect(folder, NAME, "production", 0)
    assert remarks.read(folder, NAME).approvals("production") == 0 and folder.examine() == []


def test_all_remarks_are_gone_through_once(folder: LocalRegistry):
    """Not once for each proposal: others may make thousands of them."""

    class Counted(tuple):
        times = 0

        def __iter__(self):
            Counted.times += 1
            return super().__iter__()

    for version in ("1.0.0", "1.0.1"):
        remarks.add(folder, NAME, "propose", [], alias="production", version=version, after=0)
    for one in remarks.read(folder, NAME).all:
        remarks.add(folder, NAME, "approve", [], proposal=one.digest)
    remarks.protect(folder, NAME, "production", 1)
    found = remarks.Remarks(Counted(remarks.read(folder, NAME).all))
    assert not found.may_move(folder.state(NAME), "production", "1.0.0")
    first = Counted.times
    for one in found.proposals(folder.state(NAME)):
        assert found.approved_by(one) == [] and found.approvals("production") == 1
    assert Counted.times == first


def test_an_approval_of_one_s_own_counts_for_nothing(store: Registry):
    """Whatever wrote it."""
    remarks.protect(store, NAME, "production", 1)
    store.promote(NAME, "1.0.1")
    state = store.current_state(NAME)
    (proposal,) = remarks.read(store, NAME).proposals(state)
    remarks.add(store, NAME, "approve", [], proposal=proposal.digest)
    assert store.promote(NAME, "1.0.1").at("production") == "1.0.0" == production()


def test_a_proposal_lapses_when_the_alias_moves(store: Registry, monkeypatch):
    store.publish(NAME, tiny.data(2))
    remarks.protect(store, NAME, "production", 1)
    for version in ("1.0.1", "1.0.2"):
        store.promote(NAME, version)
    monkeypatch.setenv("KVQ_USER", "bob")
    remarks.approve(store, NAME, "1.0.2", "production")
    with pytest.raises(Conflict, match="nobody has proposed it"):
        remarks.approve(store, NAME, "1.0.1", "production")
    assert production() == "1.0.2"


@pytest.mark.parametrize("rival, wins", [("1.0.1", "1.0.1"), ("1.0.2", "1.0.2")])
def test_two_who_approve_at_once(rival, wins, store: Registry, monkeypatch):
    """The rival's approval and its promote come between this one's approval and its promote: one event, of one."""
    store.publish(NAME, tiny.data(2))
    remarks.protect(store, NAME, "production", 1)
    for version in ("1.0.1", "1.0.2"):
        store.promote(NAME, version)
    real, came = type(store).change, []

    def overtaken(self, *given, **more):
        if not came:
            came.append(1)
            monkeypatch.setenv("KVQ_USER", "carol")
            remarks.approve(resolve.open_registry(store.url), NAME, rival, "production")
        return real(self, *given, **more)

    monkeypatch.setenv("KVQ_USER", "bob")
    monkeypatch.setattr(type(store), "change", overtaken)
    if rival == "1.0.1":
        assert remarks.approve(store, NAME, "1.0.1", "production").at("production") == wins
    else:
        with pytest.raises(Conflict, match="somebody moved it"):
            remarks.approve(store, NAME, "1.0.1", "production")
    assert production() == wins and len(store.current_state(NAME).events) == 5


def test_what_no_event_could_do_is_not_proposed(store: Registry):
    remarks.protect(store, NAME, "production", 1)
    store.yank(NAME, "1.0.1", "bad")
    with pytest.raises(Conflict, match="yanked"):
        store.promote(NAME, "1.0.1")
    with pytest.raises(NotFound):
        store.promote(NAME, "9.0.0")
    assert [one.what for one in remarks.read(store, NAME).all] == ["protect"]


# ---- files


GOOD = {"schema": 1, "name": NAME, "at": "2026-01-31T12:00:00Z", "by": "eve", "replaces": []}
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


@pytest.fixture
def folder(tmp_path, monkeypatch) -> LocalRegistry:
    monkeypatch.setenv("KVQ_USER", "alice")
    found = LocalRegistry(tmp_path / "registry")
    found.publish(NAME, tiny.data())
    return found


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
