"""Events that nobody wrote, files that were changed: refused by name, never read as an older state."""

from pathlib import Path

import pytest
import tiny_artifact as tiny
from local_store import NAME, event_files, three

from kvq_runtime.artifact import artifact
from kvq_runtime.disk import strict_json
from kvq_runtime.errors import ArtifactError
from kvq_runtime.registry import events, resolve
from kvq_runtime.registry.local import LocalRegistry
from kvq_runtime.registry.lock import Lock, write_lock


@pytest.fixture
def store(tmp_path) -> LocalRegistry:
    return LocalRegistry(tmp_path / "registry")


GOOD = {"schema": 1, "number": 2, "name": NAME, "at": "2026-01-31T12:00:00Z"}
EVENTS = {
    "torn": (b'{"schema":1,"numb', "invalid JSON"),
    "empty": (b"", "invalid JSON"),
    "a list": (b"[]", "expected schema 1"),
    "newer": (
        GOOD | {"schema": 2, "kind": "yank", "version": "1.0.0", "reason": "x"},
        "a newer kvq may have written it",
    ),
    "true is no schema": (
        GOOD | {"schema": True, "kind": "yank", "version": "1.0.0", "reason": "x"},
        "expected schema 1",
    ),
    "nor is 1.0": (GOOD | {"schema": 1.0, "kind": "yank", "version": "1.0.0", "reason": "x"}, "expected schema 1"),
    "unknown kind": (GOOD | {"kind": "delete", "version": "1.0.0"}, "kind 'delete'"),
    "unknown key": (GOOD | {"kind": "yank", "version": "1.0.0", "reason": "x", "y": 1}, r"unknown keys \['y'\]"),
    "other name": (
        GOOD | {"name": "../x", "kind": "yank", "version": "1.0.0", "reason": "x"},
        "expected .*, got",
    ),
    "other number": (
        GOOD | {"number": 3, "kind": "yank", "version": "1.0.0", "reason": "x"},
        "expected .*, got",
    ),
    "climbing alias": (GOOD | {"kind": "promote", "alias": "../../x", "version": "1.0.0"}, "alias '../../x'"),
    "climbing version": (GOOD | {"kind": "promote", "alias": "production", "version": "../x"}, "version '../x'"),
    "climbing digest": (
        GOOD | {"kind": "publish", "version": "2.0.0", "sha256": "../" + "a" * 61, "size": 1, "files": {}},
        "sha256 '../",
    ),
    "climbing file": (
        GOOD
        | {"kind": "publish", "version": "2.0.0", "sha256": "a" * 64, "size": 1}
        | {"files": {"../../.bashrc": {"sha256": "a" * 64, "size": 1}}},
        "file name '../../.bashrc'",
    ),
    "climbing digest of a file": (
        GOOD
        | {"kind": "publish", "version": "2.0.0", "sha256": "a" * 64, "size": 1}
        | {"files": {"README.md": {"sha256": "/etc/passwd", "size": 1}}},
        "sha256 '/etc/passwd'",
    ),
    "version used twice": (
        GOOD | {"kind": "publish", "version": "1.0.0", "sha256": "a" * 64, "size": 1, "files": {}},
        "contradicts the events before it: .*other bytes",
    ),
    "unknown version": (
        GOOD | {"kind": "promote", "alias": "production", "version": "9.0.0"},
        "contradicts.*no version",
    ),
    **{
        f"reason: {what}": (GOOD | {"kind": "yank", "version": "1.0.0", "reason": reason}, "use one line of 1 to 500")
        for what, reason in {
            "a number": 7,
            "an object": {"x": 1},
            "nothing": None,
            "empty": "",
            "blank": " ",
            "two lines": "a\nb",
            "long": "x" * 501,
            "an escape": "\x1b[2J",
        }.items()
    },
    "local time": (GOOD | {"at": "yesterday", "kind": "yank", "version": "1.0.0", "reason": "x"}, "at 'yesterday'"),
}


@pytest.mark.parametrize("given, message", EVENTS.values(), ids=EVENTS.keys())
def test_a_strange_event_is_refused_and_named(given, message, store):
    store.publish(NAME, tiny.data())
    path = store.events_folder(NAME) / "00000002.json"
    path.write_bytes(given if isinstance(given, bytes) else strict_json.dumps(given).encode())
    for action in (lambda: resolve.resolve(NAME, store.url), lambda: store.publish(NAME, tiny.data(1))):
        with pytest.raises(ArtifactError, match=f"{path}: event: .*{message}"):
            action()
    with pytest.raises(ArtifactError, match=str(path)):  # what it names is not known: nothing may be removed
        store.collect(grace=0)
    faults = [finding for finding in store.examine() if finding.level == "fault"]
    assert faults and all(finding.advice for finding in faults)


def test_an_event_that_is_a_link_is_refused(store, tmp_path):
    store.publish(NAME, tiny.data())
    (tmp_path / "elsewhere.json").write_bytes(event_files(store)[0].read_bytes())
    event_files(store)[0].unlink()
    (store.events_folder(NAME) / "00000001.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ArtifactError, match="symbolic link"):
        resolve.resolve(NAME, store.url)


def test_a_missing_event_is_an_error_and_not_an_older_state(store):
    three(store)
    event_files(store)[1].unlink()
    with pytest.raises(ArtifactError, match=r"00000002\.json: event: missing"):
        store.state(NAME)


# ---- blobs


def reseal(store: LocalRegistry, mutant: bytes, tmp_path: Path) -> Path:
    """Make registry and lock say that the mutant is what was published."""
    digest = store.put_blob(mutant)
    for path in event_files(store):
        path.unlink()
    change = events.Publish("1.0.0", digest, len(mutant))
    first = store.events_folder(NAME) / "00000001.json"
    first.write_bytes(events.Event(1, NAME, "2026-01-31T12:00:00Z", change).to_bytes())
    lock = tmp_path / "kvq.lock"
    write_lock(lock, Lock(NAME, store.url, NAME, "1.0.0", digest, len(mutant), "b" * 64))
    return lock


def test_registry_and_lock_resealed_to_a_mutant_do_not_help_it(store, tmp_path):
    good = tiny.data()
    store.publish(NAME, good)
    about, entries, _ = tiny.parts(good)
    head = strict_json.dumps({"__metadata__": {"kvq": strict_json.dumps(about)}, **entries}).encode()
    name = f'"{tiny.WEIGHT}"'.encode()
    mutants = {
        "header: .*truncated": good[:-1],
        "content: ": good[:-1] + bytes([good[-1] ^ 1]),
        "tensors: foreign": tiny.resealed({"layers.0.key.predict.spy": tiny.tiny().tensors[tiny.WEIGHT]}),
        "tensors: .*, expected": tiny.resealed({tiny.WEIGHT: tiny.tiny().tensors[tiny.WEIGHT].view(8, 32)}),
        "finite: ": tiny.resealed({tiny.WEIGHT: tiny.tiny().tensors[tiny.WEIGHT] / 0}),
        "schema: ": tiny.resealed(schema=99),
        "header: tensor name '../../x'": tiny.with_header(head.replace(name, b'"../../x"'), tiny.parts(good)[2]),
        "header: 1073741824 bytes long": (1 << 30).to_bytes(8, "little") + good[8:],
    }
    for message, mutant in mutants.items():
        lock = reseal(store, mutant, tmp_path)
        with pytest.raises(ArtifactError, match=message):
            resolve.load_artifact(NAME, store.url)
        with pytest.raises(ArtifactError, match=message):
            resolve.load_artifact(NAME, store.url, lock)


def test_a_damaged_blob_is_refused_and_mended_by_publishing_it_again(store):
    data = tiny.data()
    path = store.blob(store.publish(NAME, data).sha256)
    path.chmod(0o644)
    path.write_bytes(tiny.data(1))
    with pytest.raises(ArtifactError, match="sha256: the file has"):
        resolve.load_artifact(NAME, store.url)
    with pytest.raises(ArtifactError, match="give one, --artifact-version"):
        store.publish(NAME, tiny.data(2))
    assert store.publish(NAME, data).version == "1.0.0"
    assert artifact.to_bytes(resolve.load_artifact(NAME, store.url)) == data
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ArtifactError, match="symbolic link"):
        resolve.load_artifact(NAME, store.url)
