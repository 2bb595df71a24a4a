"""A registry in a folder: durable in order, read whole at every point, and every damage found."""

import os
import stat
from pathlib import Path

import pytest
import tiny_artifact as tiny
from hub_client import CARD
from local_store import NAME, damage, three

from kvq_runtime.artifact import artifact
from kvq_runtime.cli import main as cli
from kvq_runtime.disk import files, strict_json
from kvq_runtime.errors import ArtifactError
from kvq_runtime.registry import events, resolve
from kvq_runtime.registry.local import LocalRegistry
from kvq_runtime.registry.lock import Lock, write_lock


@pytest.fixture
def store(tmp_path) -> LocalRegistry:
    return LocalRegistry(tmp_path / "registry")


# ---- order of writing


def test_a_file_and_its_folder_are_synced_before_anything_relies_on_them(store, monkeypatch):
    """Record every step of a publish: data synced → named → folder synced, and all blobs before the event."""
    steps, real = [], {name: getattr(os, name) for name in ("fsync", "link", "replace")}

    def named(kind):
        return lambda a, b: (steps.append((kind, str(a), str(b))), real[kind](a, b))[1]

    def synced(descriptor):
        steps.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        real["fsync"](descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "link", named("link"))
    monkeypatch.setattr(os, "replace", named("replace"))
    version = store.publish(NAME, tiny.data(), attachments={"README.md": b"card"})
    moves = [i for i, step in enumerate(steps) if step[0] != "fsync"]
    assert [steps[i][0] for i in moves] == ["replace", "replace", "link"]
    for i in moves:
        _, draft, target = steps[i]
        assert steps[i - 1] == ("fsync", draft)
        assert steps[i + 1] == ("fsync", str(Path(target).parent))
        assert stat.S_IMODE(Path(target).stat().st_mode) == 0o444
    assert steps[moves[-1]][2].endswith("events/00000001.json")
    synced = {step[1] for step in steps[: moves[-1]] if step[0] == "fsync"}
    assert {str(store.root), str(store.root / "names"), str(store.events_folder(NAME).parent)} <= synced
    assert store.blob(version.files["README.md"]["sha256"]).read_bytes() == b"card"
    assert not list((store.root / "tmp").iterdir())


@pytest.mark.filterwarnings("ignore:.* is yanked:UserWarning")
def test_a_reader_finds_it_whole_at_every_point(store, tmp_path, monkeypatch, capsys):
    """The writer stands still at each of its fault points, one between any two of its steps, and is read there."""
    data, target, seen = [tiny.data(seed) for seed in range(3)], LocalRegistry(tmp_path / "target"), []
    three(store)
    store.promote(NAME, "1.0.1", force=True)
    store.yank(NAME, "1.0.0", "bad")

    def read() -> list[str]:
        reader, found = LocalRegistry(target.root), []
        for name in reader.names():
            state = reader.state(name)
            assert [event.number for event in state.events] == list(range(1, len(state.events) + 1))
            for version in state.versions.values():
                assert reader.fetch(name, version).read_bytes() in data
            found += [*state.versions, *(f"{alias} {state.at(alias)}" for alias in state.aliases)]
        return found

    def point(name: str) -> None:
        now = read()
        lost = [one for one in (seen[-1] if seen else []) if one not in now and "production" not in one]
        assert not lost, f"at {name}"
        seen.append(now)

    monkeypatch.setattr(files, "fault_point", point)
    cli.main(["copy", NAME, target.url, "--registry", store.url])
    target.promote(NAME, "1.0.2", force=True)
    target.promote(NAME, "1.0.1", force=True)
    target.rollback(NAME)
    monkeypatch.undo()
    assert len(seen) > 30 and seen[0] == [] and len({tuple(now) for now in seen}) >= 4
    assert set(seen[-1]) <= set(read())


# ---- damage


def test_every_damage_is_found_with_its_path(store):
    three(store)
    version = store.publish("card", tiny.data(5), attachments=CARD)
    store.add_record("signatures", version.sha256, b"{}\n")
    assert damage(store) == {}
    blobs = {version.version: store.blob(version.sha256) for version in store.state(NAME).versions.values()}
    blobs["1.0.0"].unlink()
    card, (record,) = store.blob(version.files["README.md"]["sha256"]), store.root.glob("signatures/*/*")
    for path in (blobs["1.0.1"], card, record):
        path.chmod(0o644)
        path.write_bytes(b"rot")
    found = damage(store)
    expected = {"card 1.0.0": (card, record), f"{NAME} 1.0.0": [blobs["1.0.0"]], f"{NAME} 1.0.1": [blobs["1.0.1"]]}
    assert found.keys() == expected.keys()
    for place, paths in expected.items():
        assert all(str(path) in error for path, error in zip(paths, found[place], strict=True))


def test_a_link_that_leads_nowhere_is_told(store, tmp_path, kvq):
    """A share that is not mounted is no empty registry."""
    version = store.publish(NAME, tiny.data())
    (store.root / "names").rename(tmp_path / "moved")
    (store.root / "names").symlink_to(tmp_path / "not-mounted")
    code, _, error = kvq("list", "--registry", store.url)
    assert code == 1 and "a link that leads nowhere" in error
    with pytest.raises(ArtifactError, match="leads nowhere"):
        store.publish("gone", tiny.data(1))
    assert store.blob(version.sha256).exists()


def test_records_that_changed_or_moved_are_refused(store):
    first, other = (store.publish(NAME, tiny.data(seed)).sha256 for seed in range(2))
    about = {"corpus": "c" * 64, "protocol": {}, "environment": {}, "result": {"perplexity": 12.5}}
    digest = store.add_evaluation({"artifact": first, **about})
    path = store.root / "evaluations" / first / f"{digest}.json"
    moved = store.root / "evaluations" / other / path.name
    moved.parent.mkdir()
    path.rename(moved)
    with pytest.raises(ArtifactError, match=f"{moved}: evaluation: is about .*, but stored with another artifact"):
        store.evaluations(other)
    moved.rename(path)
    path.chmod(0o644)
    path.write_text(path.read_text().replace("12.5", "1.25"))
    with pytest.raises(ArtifactError, match=f"{path}: sha256: not that of its name"):
        store.evaluations(first)


def test_registry_and_lock_resealed_to_a_mutant_do_not_help_it(store, tmp_path):
    good = tiny.data()
    about, entries, _ = tiny.parts(good)
    head = strict_json.dumps({"__metadata__": {"kvq": strict_json.dumps(about)}, **entries}).encode()
    name = f'"{tiny.WEIGHT}"'.encode()
    mutants = {
        "content: ": good[:-1] + bytes([good[-1] ^ 1]),
        "tensors: foreign": tiny.resealed({"layers.0.key.predict.spy": tiny.tiny().tensors[tiny.WEIGHT]}),
        "finite: ": tiny.resealed({tiny.WEIGHT: tiny.tiny().tensors[tiny.WEIGHT] / 0}),
        "header: tensor name '../../x'": tiny.with_header(head.replace(name, b'"../../x"'), tiny.parts(good)[2]),
    }
    for number, (message, mutant) in enumerate(mutants.items()):
        digest, lock = store.put_blob(mutant), tmp_path / "kvq.lock"
        change = events.Publish(f"1.0.{number}", digest, len(mutant))
        store.change(NAME, lambda state, change=change: change)
        write_lock(lock, Lock(NAME, store.url, NAME, change.version, digest, len(mutant), "b" * 64))
        for given in ({}, {"lock": lock}):
            with pytest.raises(ArtifactError, match=message):
                resolve.load_artifact(NAME, store.url, **given)


def test_a_damaged_blob_is_refused_and_mended_by_publishing_it_again(store):
    data = tiny.data()
    path = store.blob(store.publish(NAME, data).sha256)
    path.chmod(0o644)
    path.write_bytes(tiny.data(1))
    with pytest.raises(ArtifactError, match="give one, --artifact-version"):
        store.publish(NAME, tiny.data(2))
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ArtifactError, match="symbolic link"):
        resolve.load_artifact(NAME, store.url)
    assert store.publish(NAME, data).version == "1.0.0"
    assert artifact.to_bytes(resolve.load_artifact(NAME, store.url)) == data
