"""A protected alias waits for others: who may move it, what approvals count, and what a mirror makes of it."""

import json
import re

import pytest
import tiny_artifact as tiny
from local_store import FOLDER, GOOD, NAME, production

from kvq_runtime.disk import strict_json
from kvq_runtime.errors import ArtifactError, Conflict, NotFound
from kvq_runtime.registry import mirror, remarks, resolve
from kvq_runtime.registry.hub import index
from kvq_runtime.registry.local import LocalRegistry
from kvq_runtime.registry.registry import Registry


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
