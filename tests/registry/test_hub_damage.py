"""A registry on a Hub that was edited by hand: refused, found, and left alone where it is not ours."""

import threading
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest
import tiny_artifact as tiny
from hub_client import CARD, NAME, REPO, clear, tidy
from hub_server import Hub
from huggingface_hub import HfApi

from kvq_runtime.disk import strict_json
from kvq_runtime.errors import ArtifactError, Conflict, NotFound
from kvq_runtime.registry import resolve
from kvq_runtime.registry.hub import cache
from kvq_runtime.registry.hub import index as hub_index
from kvq_runtime.registry.hub.registry import HubRegistry


@pytest.fixture
def store(hub) -> HubRegistry:
    return resolve.open_registry("hf://org")


def test_a_missing_tag_is_made_again_and_a_moved_one_is_an_error(hub, store):
    store.publish(NAME, tiny.data(0))
    made = hub.repos[REPO].tags.pop("v1.0.0")
    store.publish(NAME, tiny.data(1))
    store.promote(NAME, "1.0.1")
    assert [finding.what for finding in store.examine()] == ["tag v1.0.0 is missing"]
    store.publish(NAME, tiny.data(0))
    assert hub.repos[REPO].tags["v1.0.0"] == made
    hub.repos[REPO].tags["v1.0.0"] = hub.repos[REPO].branches["main"]
    with pytest.raises(Conflict, match=r"tag v1\.0\.0 was moved"):
        store.publish(NAME, tiny.data(0))
    assert [finding.level for finding in store.examine()] == ["fault"]
    assert resolve.resolve(f"hf://org/{NAME}@1.0.0").sha256 == sha256(tiny.data(0)).hexdigest()


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
    "torn": (lambda r, t: t.update({hub_index.FILE: r.blob(b'{"schema":1')}), "invalid JSON"),
    "newer": (replace(b'"schema":1,"versions"', b'"schema":2,"versions"'), "a newer kvq may have written it"),
    "another name": (
        replace(b'"name":"tiny-2bit","schema":1,"versions"', b'"name":"x","schema":1,"versions"'),
        "expected versions and events of",
    ),
    "an alias": (replace(b'"aliases":{"production":"1.0.0"}', b'"aliases":{"production":"1.0.1"}'), "by hand"),
    "a climbing file": (
        replace(b'"files":{}', b'"files":{"../../x":{"sha256":"%s","size":1}}' % (b"a" * 64)),
        "file name",
    ),
    "a model that is no text": (replace(b'"model":"tiny-model"', b'"model":["tiny"]'), "model .*expected text"),
    "a lost event": (lambda r, t: _drop_event(r, t), "expected .*, got"),
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
    for action in (lambda: resolve.resolve(f"hf://org/{NAME}"), lambda: store.publish(NAME, tiny.data(5))):
        with pytest.raises(ArtifactError, match=f"{REPO} at .*kvq.json: .*{message}"):
            action()
    assert "fault" in [finding.level for finding in store.examine()]


def test_a_repository_of_something_else_is_left_alone(hub, store):
    HfApi(endpoint=hub.url).create_repo(REPO)
    edit(hub, lambda repo, tree: tree.update({"README.md": repo.blob(b"---\nlicense: mit\n---\n")}))
    store.publish(NAME, tiny.data())
    edit(hub, lambda repo, tree: tree.pop(hub_index.FILE))  # its numbers would be used again
    with pytest.raises(Conflict, match="has no kvq.json, but versions/1.0.0/kvq.safetensors"):
        store.publish(NAME, tiny.data(1))
    commits = len(hub.repos[REPO].log("main"))
    with pytest.raises(NotFound, match="has no kvq.json"):
        resolve.resolve(f"hf://org/{NAME}")
    assert len(hub.repos[REPO].log("main")) == commits


def test_a_file_that_was_replaced_by_hand_is_refused_and_found(hub, store, monkeypatch, tmp_path):
    store.publish(NAME, tiny.data(0))
    store.publish("other", tiny.data(1))
    other = hub.repos["org/other"].at("main").tree["versions/1.0.0/kvq.safetensors"]
    edit(hub, lambda repo, tree: tree.update({"versions/1.0.0/kvq.safetensors": other}))
    clear(monkeypatch, tmp_path)
    with pytest.raises(ArtifactError, match="sha256: the Hub sent .* twice; .*nothing was kept"):
        resolve.resolve(f"hf://org/{NAME}")
    assert [finding.what for finding in store.examine()] == ["file is not the one that was published"]


def test_gc_removes_only_what_is_old_and_unnamed(hub, store):
    store.publish(NAME, tiny.data(), attachments=CARD)
    edit(
        hub,
        lambda repo, tree: tree.update(
            {"versions/9.0.0/kvq.safetensors": repo.blob(b"x"), "notes.md": repo.blob(b"n")}
        ),
    )
    assert [finding.what for finding in store.examine()] == ["no event names it"]
    assert store.collect() == []
    unnamed = [f"{REPO}/versions/9.0.0/kvq.safetensors"]
    assert store.collect(grace=0, dry_run=True) == unnamed
    assert store.collect(grace=0) == unnamed
    assert tidy(hub) == ["1.0.0"] and "notes.md" in hub.repos[REPO].at("main").tree
    assert store.collect(grace=0) == []


def test_threads_that_point_a_link_at_once_each_succeed(hub, tmp_path, monkeypatch):
    """Both have their drafts before either takes its place."""
    gate, replace, kept = threading.Barrier(2), Path.replace, tmp_path / "blob"
    kept.write_bytes(b"x")
    link = cache._link(REPO, "versions/1.0.0/kvq.safetensors", "a" * 40)

    def together(self: Path, target):
        gate.wait(60)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", together)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(cache._point, link, kept) for _ in range(2)]:
            done.result(60)
    assert link.resolve() == kept and list(link.parent.iterdir()) == [link]


def test_gc_sweeps_drafts_of_links(hub, store, monkeypatch):
    """Of a process that was killed before one took its place; a file of the repository is left, whatever its name."""
    store.publish(NAME, tiny.data(), attachments=CARD)
    path = store.fetch(NAME, store.state(NAME).get("1.0.0"))
    folder = cache._link(REPO, "versions/1.0.0/kvq.safetensors", store.last_commit(NAME)).parent
    folder.mkdir(parents=True, exist_ok=True)
    theirs = folder / ".notes.tmp"
    theirs.symlink_to(path)
    with monkeypatch.context() as killed:
        killed.setattr(Path, "replace", lambda self, target: None)
        cache._point(folder / "kvq.safetensors", path)
    (draft,) = [one for one in folder.iterdir() if one.name.startswith(".kvq.safetensors.")]
    assert store.collect() == [] and draft.is_symlink()
    assert store.collect(grace=0) == [str(draft)] and not draft.is_symlink() and theirs.is_symlink() and path.exists()
