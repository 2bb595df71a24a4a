"""A registry is a fold over events, each of them whole or absent, however many processes write at once."""

import os
import stat
import time
from hashlib import sha256
from pathlib import Path

import pytest
import tiny_artifact as tiny

from kvq_runtime import artifact, events, files, reference, registry, strict_json, upkeep, versions
from kvq_runtime.errors import ArtifactError, Conflict, NotFound
from kvq_runtime.local import LocalRegistry

NAME = "tiny-2bit"


@pytest.fixture
def store(tmp_path) -> LocalRegistry:
    return LocalRegistry(tmp_path / "registry")


def event_files(store: LocalRegistry, name: str = NAME) -> list[Path]:
    return sorted(store.events_folder(name).iterdir())


# ---- publish


def test_a_published_file_comes_back(store):
    data = tiny.data()
    version = store.publish(NAME, data, beside={"README.md": b"# card", "error.png": b"png"})
    found = registry.resolve(NAME, store.url)
    assert (found.version, found.sha256, found.size) == ("1.0.0", sha256(data).hexdigest(), len(data))
    assert found.path.read_bytes() == data
    assert stat.S_IMODE(found.path.stat().st_mode) == 0o444
    assert store.blob(version.files["README.md"]["sha256"]).read_bytes() == b"# card"
    assert artifact.to_bytes(registry.load_artifact(NAME, store.url)) == data
    assert store.names() == [NAME]
    assert not list((store.root / "tmp").iterdir())


def test_identical_bytes_are_the_existing_version(store):
    first = store.publish(NAME, tiny.data())
    again = store.publish(NAME, tiny.data(), version="3.0.0", beside={"README.md": b"another card"})
    assert again == first and len(event_files(store)) == 1


def test_a_version_never_changes_and_is_never_used_twice(store):
    store.publish(NAME, tiny.data(0), version="1.2.0")
    with pytest.raises(Conflict, match=r"1\.2\.0 is there with other bytes"):
        store.publish(NAME, tiny.data(1), version="1.2.0")
    store.yank(NAME, "1.2.0", "bad")
    with pytest.raises(Conflict, match=r"1\.2\.0 is there with other bytes"):
        store.publish(NAME, tiny.data(1), version="1.2.0")
    assert store.publish(NAME, tiny.data(1)).version == "1.2.1"


def test_the_next_version_says_what_changed(store):
    publish = lambda **settings: store.publish(NAME, tiny.data(**settings)).version  # noqa: E731
    assert publish() == "1.0.0"
    assert publish(seed=1) == "1.0.1"
    assert publish(environment="cuda") == "1.0.2"
    assert publish(corpus="b" * 64) == "1.1.0"
    assert publish(corpus="b" * 64, bits=3) == "1.2.0"
    assert publish(corpus="b" * 64, bits=3, model=1) == "2.0.0"
    assert publish(corpus="b" * 64, bits=3, model=1, seed=1) == "2.0.1"
    old = tiny.tiny()
    assert versions.changed(old, artifact.Artifact(**{**vars(old), "schema": 0})) == "major"


def test_only_artifacts_are_published(store):
    with pytest.raises(ArtifactError, match="^finite"):
        store.publish(NAME, tiny.resealed({tiny.WEIGHT: tiny.tiny().tensors[tiny.WEIGHT] * float("nan")}))
    assert not store.root.exists()


# ---- order of writing


def test_a_file_and_its_folder_are_synced_before_anything_relies_on_them(store, monkeypatch):
    """Record every step of a publish: data synced → named → folder synced, and all blobs before the event."""
    steps, real = [], {name: getattr(os, name) for name in ("fsync", "link", "replace")}
    path_of = lambda descriptor: os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: E731

    def named(kind):
        return lambda a, b: (steps.append((kind, str(a), str(b))), real[kind](a, b))[1]

    monkeypatch.setattr(os, "fsync", lambda fd: (steps.append(("fsync", path_of(fd))), real["fsync"](fd))[1])
    monkeypatch.setattr(os, "link", named("link"))
    monkeypatch.setattr(os, "replace", named("replace"))
    store.publish(NAME, tiny.data(), beside={"README.md": b"card"})
    moves = [i for i, step in enumerate(steps) if step[0] != "fsync"]
    assert [steps[i][0] for i in moves] == ["replace", "replace", "link"]
    for i in moves:
        _, draft, target = steps[i]
        assert steps[i - 1] == ("fsync", draft)
        assert steps[i + 1] == ("fsync", str(Path(target).parent))
    assert steps[moves[-1]][2].endswith("events/00000001.json")
    synced = {step[1] for step in steps[: moves[-1]] if step[0] == "fsync"}
    assert {str(store.root), str(store.root / "names"), str(store.events_folder(NAME).parent)} <= synced


@pytest.mark.parametrize("step", ["fsync", "link", "replace"])
def test_a_publish_that_dies_at_any_step_leaves_the_old_state(step, store, monkeypatch):
    store.publish(NAME, tiny.data(0))
    calls = 0
    for fatal in range(12):
        real, calls = getattr(os, step), 0

        def dies(*given, real=real, fatal=fatal):
            nonlocal calls
            calls += 1
            if calls > fatal:
                raise KeyboardInterrupt
            return real(*given)

        with monkeypatch.context() as patched:
            patched.setattr(os, step, dies)
            try:
                store.publish(NAME, tiny.data(1))
                break
            except KeyboardInterrupt:
                state = store.state(NAME)  # readable, and either the old state or the new one, whole
                assert list(state.versions) in (["1.0.0"], ["1.0.0", "1.0.1"])
                assert all(artifact.load(store.fetch(NAME, v), v.sha256, v.size) for v in state.versions.values())
    assert fatal > 0
    assert store.publish(NAME, tiny.data(1)).version == "1.0.1"
    assert len(event_files(store)) == 2


def test_a_lost_race_is_decided_again(store):
    store.publish(NAME, tiny.data(0))
    seen = []

    def decide(state):
        seen.append(len(state.events))
        if len(seen) == 1:
            store.publish(NAME, tiny.data(1))  # somebody else, in between
        return events.Yank("1.0.0", "late")

    assert store.change(NAME, decide).versions["1.0.0"].yanked == "late"
    assert seen == [1, 2] and len(event_files(store)) == 3


# ---- aliases


def three(store: LocalRegistry) -> LocalRegistry:
    for seed in range(3):
        store.publish(NAME, tiny.data(seed))
    return store


def chosen(store: LocalRegistry, given: str = NAME) -> tuple[str, str]:
    found = registry.resolve(given, store.url)
    return found.version, found.chosen_because


def test_a_name_alone_is_production_else_the_newest(store):
    three(store)
    assert chosen(store) == ("1.0.2", "newest of 3 not yanked; no version is production")
    store.promote(NAME, "1.0.1")
    assert chosen(store) == ("1.0.1", "production points to it")
    assert chosen(store, f"{NAME}@1.0.0") == ("1.0.0", "asked for by number")
    assert chosen(store, f"{NAME}@production")[0] == "1.0.1"
    digest = sha256(tiny.data(2)).hexdigest()
    assert chosen(store, f"{NAME}@sha256:{digest}") == ("1.0.2", "asked for by digest")
    for given, message in (("@2.0.0", "has no version 2.0.0; it has 1.0.0, 1.0.1, 1.0.2"), ("@beta", "no alias beta")):
        with pytest.raises(NotFound, match=message):
            registry.resolve(NAME + given, store.url)
    with pytest.raises(NotFound, match=f"no artifact other in .*; there are {NAME}"):
        registry.resolve("other", store.url)


def test_newest_is_by_number_and_not_by_text(store):
    for seed, version in enumerate(["1.10.0", "1.9.0", "1.2.0"]):
        store.publish(NAME, tiny.data(seed), version=version)
    assert chosen(store)[0] == "1.10.0"


def test_rollback_undoes_promote(store):
    three(store)
    states = []
    for version in ("1.0.0", "1.0.1", "1.0.0", "1.0.2"):
        states.append(store.state(NAME).aliases)
        store.promote(NAME, version)
    while states[1:]:
        assert store.rollback(NAME).aliases == states.pop()
    with pytest.raises(NotFound, match="had no earlier version to go back to"):
        store.rollback(NAME)


def test_rollback_passes_over_yanked_versions(store):
    three(store)
    for version in ("1.0.0", "1.0.1", "1.0.2"):
        store.promote(NAME, version)
    store.yank(NAME, "1.0.1", "bad")
    assert store.rollback(NAME).at("production") == "1.0.0"


def test_a_stale_promote_loses_and_asks(store):
    three(store)
    store.promote(NAME, "1.0.0", expect="none")
    store.promote(NAME, "1.0.1", expect="1.0.0")
    with pytest.raises(Conflict, match=r"is 1\.0\.1, 1\.0\.0 was expected.*--expect 1\.0\.1"):
        store.promote(NAME, "1.0.2", expect="1.0.0")
    assert store.promote(NAME, "1.0.1", expect="1.0.0").at("production") == "1.0.1"  # it is what was asked for
    assert len(event_files(store)) == 5


def test_a_promote_that_is_overtaken_loses(store, monkeypatch):
    three(store)
    real, raced = files.claim, []

    def claim(path, data, temporary):
        if not raced:
            raced.append(path)
            store.promote(NAME, "1.0.0")
        return real(path, data, temporary)

    monkeypatch.setattr(files, "claim", claim)
    with pytest.raises(Conflict, match=r"is 1\.0\.0, none was expected: somebody moved it"):
        store.promote(NAME, "1.0.2")
    assert store.state(NAME).at("production") == "1.0.0"


def test_yanked_versions_are_chosen_only_by_number(store):
    three(store)
    store.yank(NAME, "1.0.2", "wrong corpus")
    assert chosen(store)[0] == "1.0.1"
    assert registry.resolve(f"{NAME}@1.0.2", store.url).yanked == "wrong corpus"
    with pytest.warns(UserWarning, match=r"1\.0\.2 is yanked: wrong corpus"):
        registry.load_artifact(f"{NAME}@1.0.2", store.url)
    with pytest.raises(Conflict, match="is yanked"):
        store.promote(NAME, "1.0.2")
    store.promote(NAME, "1.0.0")
    with pytest.raises(Conflict, match="is production; promote another version there first"):
        store.yank(NAME, "1.0.0", "bad")
    with pytest.raises(Conflict, match="is yanked already"):
        store.yank(NAME, "1.0.2", "again")
    with pytest.raises(ValueError, match="reason"):
        store.yank(NAME, "1.0.0", "  ")


# ---- names and paths

CLIMBING = [
    "../x",
    "..",
    "a/../../b",
    "/etc/passwd",
    "a/b",
    "",
    ".hidden",
    "A",
    "a\n",
    "a\0",
    "é",
    "x" * 97,
    "a.safetensors",
]


@pytest.mark.parametrize("name", CLIMBING)
def test_a_name_that_is_none_touches_nothing(name, store):
    for action in (
        lambda: store.publish(name, tiny.data()),
        lambda: store.state(name),
        lambda: store.promote(name, "1.0.0"),
        lambda: store.yank(name, "1.0.0", "x"),
    ):
        with pytest.raises(ValueError, match="name "):
            action()
    if not name.endswith(".safetensors"):
        with pytest.raises(ValueError, match="name "):
            registry.resolve(name, store.url)
    assert not store.root.exists()


@pytest.mark.parametrize(
    "given", ["a@", "a@1.0", "a@01.0.0", "a@../b", "a@sha256:12", "a@Production", "a@1.0.0\n", "a@b@c"]
)
def test_a_reference_that_is_none_is_refused(given):
    with pytest.raises(ValueError, match=r"; use "):
        reference.parse(given)


@pytest.mark.parametrize("name", ["../README.md", "a/b", "", ".x", "kvq.safetensors"])
def test_files_beside_a_version_stay_beside_it(name, store):
    with pytest.raises(ValueError, match="file name"):
        store.publish(NAME, tiny.data(), beside={name: b""})
    assert not store.root.exists()


def test_registry_addresses(tmp_path, monkeypatch):
    assert registry.open_registry(None).root == tmp_path / "kvq-home" / "registry"
    assert registry.open_registry(f"file://{tmp_path}/a%20b").root == tmp_path / "a b"
    assert registry.open_registry(str(tmp_path)).root == tmp_path
    monkeypatch.setenv("KVQ_REGISTRY", f"file://{tmp_path}/other")
    assert registry.open_registry().root == tmp_path / "other"
    assert registry.open_registry("hf://org").url == registry.open_registry("hf://org/").url == "hf://org"
    for url in ("hf://", "hf://a/b", "hf://../x"):
        with pytest.raises(ValueError, match="organization"):
            registry.open_registry(url)
    for url in ("https://example.org/x", "file://host/x"):
        with pytest.raises(ValueError, match="use file:///folder"):
            registry.open_registry(url)


# ---- events that nobody wrote

GOOD = {"schema": 1, "number": 2, "name": NAME, "at": "2026-01-31T12:00:00Z"}
EVENTS = {
    "torn": (b'{"schema":1,"numb', "not the JSON"),
    "empty": (b"", "not the JSON"),
    "a list": (b"[]", "schema 1 is meant"),
    "newer": (
        GOOD | {"schema": 2, "kind": "yank", "version": "1.0.0", "reason": "x"},
        "a newer kvq may have written it",
    ),
    "true is no schema": (
        GOOD | {"schema": True, "kind": "yank", "version": "1.0.0", "reason": "x"},
        "schema 1 is meant",
    ),
    "nor is 1.0": (GOOD | {"schema": 1.0, "kind": "yank", "version": "1.0.0", "reason": "x"}, "schema 1 is meant"),
    "unknown kind": (GOOD | {"kind": "delete", "version": "1.0.0"}, "kind 'delete'"),
    "unknown key": (GOOD | {"kind": "yank", "version": "1.0.0", "reason": "x", "y": 1}, r"unknown keys \['y'\]"),
    "other name": (GOOD | {"name": "../x", "kind": "yank", "version": "1.0.0", "reason": "x"}, "in the place of"),
    "other number": (GOOD | {"number": 3, "kind": "yank", "version": "1.0.0", "reason": "x"}, "in the place of"),
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
        "contradicts those before it: .*other bytes",
    ),
    "unknown version": (
        GOOD | {"kind": "promote", "alias": "production", "version": "9.0.0"},
        "contradicts.*no version",
    ),
    "local time": (GOOD | {"at": "yesterday", "kind": "yank", "version": "1.0.0", "reason": "x"}, "at 'yesterday'"),
}


@pytest.mark.parametrize("given, message", EVENTS.values(), ids=EVENTS.keys())
def test_a_strange_event_is_refused_and_named(given, message, store):
    store.publish(NAME, tiny.data())
    path = store.events_folder(NAME) / "00000002.json"
    path.write_bytes(given if isinstance(given, bytes) else strict_json.dumps(given).encode())
    for action in (lambda: registry.resolve(NAME, store.url), lambda: store.publish(NAME, tiny.data(1))):
        with pytest.raises(ArtifactError, match=f"{path}: event: .*{message}"):
            action()
    with pytest.raises(ArtifactError, match=str(path)):  # what it names is not known: nothing may be removed
        upkeep.collect(store, grace=0)
    faults = [finding for finding in upkeep.examine(store) if finding.level == "fault"]
    assert faults and all(finding.advice for finding in faults)


def test_an_event_that_is_a_link_is_refused(store, tmp_path):
    store.publish(NAME, tiny.data())
    (tmp_path / "elsewhere.json").write_bytes(event_files(store)[0].read_bytes())
    event_files(store)[0].unlink()
    (store.events_folder(NAME) / "00000001.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(ArtifactError, match="symbolic link"):
        registry.resolve(NAME, store.url)


def test_a_missing_event_is_an_error_and_not_an_older_state(store):
    three(store)
    event_files(store)[1].unlink()
    with pytest.raises(ArtifactError, match=r"00000002\.json: event: missing"):
        store.state(NAME)


# ---- damaged blobs, locks


def reseal(store: LocalRegistry, mutant: bytes, tmp_path: Path) -> Path:
    """Make registry and lock say that the mutant is what was published."""
    digest = store.put_blob(mutant)
    for path in event_files(store):
        path.unlink()
    change = events.Publish("1.0.0", digest, len(mutant))
    first = store.events_folder(NAME) / "00000001.json"
    first.write_bytes(events.Event(1, NAME, "2026-01-31T12:00:00Z", change).to_bytes())
    lock = tmp_path / "kvq.lock"
    reference.write_lock(lock, reference.Lock(NAME, store.url, NAME, "1.0.0", digest, len(mutant)))
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
        "tensors: .* is expected": tiny.resealed({tiny.WEIGHT: tiny.tiny().tensors[tiny.WEIGHT].view(8, 32)}),
        "finite: ": tiny.resealed({tiny.WEIGHT: tiny.tiny().tensors[tiny.WEIGHT] / 0}),
        "schema: ": tiny.resealed(schema=99),
        "header: tensor name '../../x'": tiny.with_header(head.replace(name, b'"../../x"'), tiny.parts(good)[2]),
        "header: 1073741824 bytes long": (1 << 30).to_bytes(8, "little") + good[8:],
    }
    for message, mutant in mutants.items():
        lock = reseal(store, mutant, tmp_path)
        with pytest.raises(ArtifactError, match=message):
            registry.load_artifact(NAME, store.url)
        with pytest.raises(ArtifactError, match=message):
            registry.load_artifact(NAME, store.url, lock)


def test_a_damaged_blob_is_refused_and_mended_by_publishing_it_again(store):
    data = tiny.data()
    path = store.blob(store.publish(NAME, data).sha256)
    path.chmod(0o644)
    path.write_bytes(tiny.data(1))
    with pytest.raises(ArtifactError, match="sha256: the file has"):
        registry.load_artifact(NAME, store.url)
    with pytest.raises(ArtifactError, match="name yours with --version"):
        store.publish(NAME, tiny.data(2))
    assert store.publish(NAME, data).version == "1.0.0"
    assert artifact.to_bytes(registry.load_artifact(NAME, store.url)) == data
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ArtifactError, match="symbolic link"):
        registry.load_artifact(NAME, store.url)


def test_a_lock_pins_what_the_reference_meant(store, tmp_path):
    three(store)
    found = registry.resolve(NAME, store.url)
    lock = tmp_path / "kvq.lock"
    reference.write_lock(lock, reference.Lock(NAME, store.url, NAME, found.version, found.sha256, found.size))
    store.promote(NAME, "1.0.0")
    assert registry.resolve(NAME, store.url).version == "1.0.0"
    pinned = registry.resolve(NAME, lock=lock)  # the registry is the lock's, too
    assert (pinned.version, pinned.sha256, pinned.chosen_because) == ("1.0.2", found.sha256, f"pinned by {lock}")
    with pytest.raises(ArtifactError, match=f"lock: .* pins {NAME}, not {NAME}@1.0.0"):
        registry.resolve(f"{NAME}@1.0.0", store.url, lock)
    copy = tmp_path / "kvq.safetensors"
    copy.write_bytes(tiny.data(2))
    registry.load_artifact(copy, lock=lock)
    copy.write_bytes(tiny.data(1))
    with pytest.raises(ArtifactError, match=r"lock: .*kvq\.safetensors has sha256 .* pins"):
        registry.load_artifact(copy, lock=lock)
    with pytest.raises(NotFound, match=r"no such file; kvq pull REFERENCE --lock"):
        registry.resolve(NAME, lock=tmp_path / "none.lock")


LOCK = {"reference": NAME, "registry": "file:///x", "name": NAME, "version": "1.0.0", "sha256": "a" * 64, "size": 1}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"name": "../x"}, "name '../x'"),
        ({"sha256": "../" + "a" * 61}, "sha256 '../"),
        ({"version": "latest"}, "version 'latest'"),
        ({"size": "1"}, "size must be a whole number"),
        ({"command": "rm"}, r"unknown keys \['command'\]"),
    ],
)
def test_a_strange_lock_is_refused(change, message, tmp_path):
    path = tmp_path / "kvq.lock"
    path.write_text(strict_json.dumps(LOCK | change))
    with pytest.raises(ArtifactError, match=f"lock: {path}: .*{message}"):
        reference.read_lock(path)


# ---- evaluations


def record(store: LocalRegistry, perplexity: float = 12.5) -> dict:
    digest = registry.resolve(NAME, store.url).sha256
    result = {"perplexity": perplexity}
    return {"artifact": digest, "corpus": "c" * 64, "protocol": {"steps": 32}, "environment": {}, "result": result}


def test_evaluations_are_records_that_never_change(store):
    store.publish(NAME, tiny.data())
    first = store.add_evaluation(record(store))
    assert store.add_evaluation(record(store)) == first
    second = store.add_evaluation(record(store, 13.0))
    found = store.evaluations(record(store)["artifact"])
    assert sorted(one["result"]["perplexity"] for one in found) == [12.5, 13.0] and first != second
    with pytest.raises(ArtifactError, match="unknown keys"):
        store.add_evaluation(record(store) | {"host": "mine"})
    with pytest.raises(ArtifactError, match="sha256 '../x'"):
        store.add_evaluation(record(store) | {"artifact": "../x"})
    path = store.root / "evaluations" / record(store)["artifact"] / f"{first}.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    path.chmod(0o644)
    path.write_text(path.read_text().replace("12.5", "1.25"))
    with pytest.raises(ArtifactError, match="evaluation: sha256 is"):
        store.evaluations(record(store)["artifact"])
    assert [finding.path for finding in upkeep.examine(store) if finding.level == "fault"] == [str(path)]


# ---- gc and doctor


def age(path: Path, hours: float = 48) -> Path:
    past = time.time() - hours * 3600
    os.utime(path, (past, past))
    return path


def test_gc_removes_only_what_is_old_and_unnamed(store):
    store.publish(NAME, tiny.data(), beside={"README.md": b"card"})
    named = [age(path) for path in sorted((store.root / "blobs" / "sha256").iterdir())]
    orphan, young = store.blob(store.put_blob(b"orphan")), store.blob(store.put_blob(b"young"))
    torn = store.root / "tmp" / ".1-2.tmp"
    torn.write_bytes(b"half")
    age(orphan), age(torn)
    assert upkeep.collect(store, dry_run=True) == [torn, orphan]
    assert torn.exists() and orphan.exists()
    assert upkeep.collect(store) == [torn, orphan]
    assert all(path.exists() for path in [*named, young]) and not torn.exists() and not orphan.exists()
    assert upkeep.collect(store, grace=0) == [young]
    registry.load_artifact(NAME, store.url)


def test_gc_gives_a_blob_back_that_was_named_meanwhile(store, monkeypatch):
    store.publish("other", tiny.data(0))
    data = tiny.data(1)
    orphan = age(store.blob(store.put_blob(data)))
    real, looked = upkeep.named_blobs, []

    def named(given):
        found = real(given)
        if not looked:  # an event names the blob between the two looks
            looked.append(1)
            change = events.Publish("1.0.0", orphan.name, len(data))
            store.change(NAME, lambda state: None if state.versions else change)
        return found

    monkeypatch.setattr(upkeep, "named_blobs", named)
    assert upkeep.collect(store) == []
    assert artifact.to_bytes(registry.load_artifact(NAME, store.url)) == data


def test_gc_finishes_what_a_killed_gc_left(store):
    data = tiny.data()
    path = store.blob(store.publish(NAME, data).sha256)
    path.rename(age(path).parent.parent.parent / "tmp" / f".{path.name}.tmp")
    upkeep.collect(store)
    assert path.read_bytes() == data


def test_doctor_names_every_damage_and_says_what_to_do(store):
    assert upkeep.examine(store) == []
    three(store)
    store.publish("gone", tiny.data(5))
    assert upkeep.examine(store) == []
    blobs = {version.version: store.blob(version.sha256) for version in store.state(NAME).versions.values()}
    blobs["1.0.0"].unlink()
    blobs["1.0.1"].chmod(0o644)
    blobs["1.0.1"].write_bytes(b"rot")
    event_files(store)[1].unlink()
    (store.events_folder(NAME) / "notes.txt").write_text("x")
    (store.root / "names" / "Bad Name").mkdir()
    (store.root / "tmp" / ".torn.tmp").write_bytes(b"")
    found = {(finding.level, Path(finding.path).name): finding for finding in upkeep.examine(store)}
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
    path = store.blob(store.publish(NAME, tiny.data(), beside={"README.md": b"card"}).files["README.md"]["sha256"])
    path.chmod(0o644)
    path.write_bytes(b"CARD")
    assert [(f.level, f.path) for f in upkeep.examine(store)] == [("fault", str(path))]
