"""Names, references, addresses and folders: what each means, and that what is none touches nothing."""

import gc
import logging
import threading
from hashlib import sha256

import pytest
import tiny_artifact as tiny
from local_store import NAME

from kvq_runtime.artifact import artifact
from kvq_runtime.cli.main import main
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.registry import reference, resolve
from kvq_runtime.registry.local import LocalRegistry

ZERO, ONE = (sha256(tiny.data(seed)).hexdigest() for seed in (0, 1))


@pytest.fixture
def store(tmp_path, monkeypatch) -> LocalRegistry:
    """The default registry, of one version, with another artifact in the folder NAME of the working directory."""
    monkeypatch.chdir(tmp_path)
    registry = LocalRegistry(tmp_path / "registry")
    monkeypatch.setenv("KVQ_REGISTRY", registry.url)
    registry.publish(NAME, tiny.data(0))
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "kvq.safetensors").write_bytes(tiny.data(1))
    return registry


def digest(loaded) -> str:
    return sha256(artifact.to_bytes(loaded)).hexdigest()


CLIMBING = ["../x", "/etc/passwd", "a/b", "", "A", "a\n", "a\0", "x" * 97, "a.safetensors", "a--b", "a..b", "x.git"]


@pytest.mark.parametrize("name", CLIMBING)
def test_a_name_that_is_none_touches_nothing(name, tmp_path):
    store = LocalRegistry(tmp_path / "registry")
    for action in (
        lambda: store.publish(name, tiny.data()),
        lambda: store.state(name),
        lambda: store.promote(name, "1.0.0", force=True),
        lambda: store.yank(name, "1.0.0", "x"),
    ):
        with pytest.raises(ValueError, match="name "):
            action()
    if not name.endswith(".safetensors"):
        with pytest.raises(ValueError, match="name "):
            resolve.resolve(name, store.url)
    assert not store.root.exists()


FILE_NAMES = ["conftest.py", "kvq.lock", "kvq.safetensors", "../a.png", ".a.png", "a.png\n", 7]


@pytest.mark.parametrize("name", FILE_NAMES)
def test_only_names_of_a_short_list_stand_beside_an_artifact(name, tmp_path):
    store = LocalRegistry(tmp_path / "registry")
    with pytest.raises(ValueError, match="file name .*use README.md, or a picture"):
        store.publish(NAME, tiny.data(), attachments={name: b"theirs\n"})
    assert not store.root.exists()


def test_a_reference_that_is_none_is_refused():
    for given in ("a@", "a@1.0", "a@01.0.0", "a@../b", "a@Production", "a@1.0.0\n", f"a@sha256:{'A' * 64}"):
        with pytest.raises(ValueError, match=r"; use "):
            reference.parse(given)


def test_registry_addresses(tmp_path, monkeypatch):
    assert resolve.open_registry(None).root == tmp_path / "kvq-home" / "registry"
    assert resolve.open_registry(f"file://{tmp_path}/a%20b").root == tmp_path / "a b"
    assert resolve.open_registry(str(tmp_path)).root == tmp_path
    monkeypatch.setenv("KVQ_REGISTRY", f"file://{tmp_path}/other")
    assert resolve.open_registry().root == tmp_path / "other"
    assert resolve.open_registry("hf://org").url == resolve.open_registry("hf://org/").url == "hf://org"
    assert reference.parse("org/name@1.2.0") == reference.Reference("name", "version", "1.2.0", "hf://org")
    for url in ("hf://", "hf://a/b", "hf://../x"):
        with pytest.raises(ValueError, match="organization"):
            resolve.open_registry(url)
    for url in ("https://example.org/x", "file://host/x"):
        with pytest.raises(ValueError, match="use file:///folder"):
            resolve.open_registry(url)
    with pytest.raises(ValueError, match="use hf://word for that organization"):
        resolve.open_registry("word")


# ---- folders


@pytest.mark.parametrize("where", [NAME, f"./{NAME}", f"{NAME}/", f"../{{}}/{NAME}"])
def test_a_folder_that_pull_wrote_is_loaded(where, store, tmp_path):
    assert digest(resolve.load_artifact(where.format(tmp_path.name))) == ONE
    assert digest(resolve.load_artifact(tmp_path / NAME, store.url)) == ONE


def test_a_name_is_one_of_the_registry_that_is_given_or_pinned(store, tmp_path):
    assert digest(resolve.load_artifact(NAME, store.url)) == ZERO
    assert digest(resolve.load_artifact(f"{NAME}@1.0.0")) == ZERO
    assert main(["pull", NAME, "-o", "out", "--lock", "kvq.lock"]) == 0
    pinned = resolve.load_artifact(NAME, lock="kvq.lock")
    assert digest(pinned) == ZERO
    assert resolve.load_artifact("out", lock="kvq.lock") is pinned
    with pytest.raises(ArtifactError, match=r"lock: .*kvq\.safetensors has sha256"):
        resolve.load_artifact(f"./{NAME}", lock="kvq.lock")


def test_what_is_no_artifact_says_what_would_be_one(store, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "kvq.safetensors").symlink_to("gone")
    for given in (tmp_path / "empty", "./empty", "empty/", "org/name"):  # no Hub is asked for what exists
        with pytest.raises(NotFound, match=r"(empty|name).*a folder without kvq\.safetensors, which .*; write it"):
            resolve.load_artifact(given)
    (tmp_path / "org" / "file").write_bytes(b"")
    with pytest.raises(ValueError, match=r"org/file.*: a file, but no \.safetensors; use"):
        resolve.load_artifact("org/file")
    for given in ("./none", "a/b/c"):
        with pytest.raises(ValueError, match=r"there is no such folder; use the path of a folder that holds kvq\."):
            resolve.load_artifact(given)
    with pytest.raises(ValueError, match=r"is one of a Hub, but registry is file:"):
        resolve.load_artifact("org/other", store.url)


@pytest.mark.parametrize("recipe, answer", [("higgs-2bit", r'KVQCache\.from_recipe\("higgs-2bit", model\)'),
                                            ("aqua-2bit", "kvq-calibrate --recipe aqua-2bit")])  # fmt: skip
def test_the_name_of_a_recipe_is_answered_with_what_makes_one(recipe, answer, store):
    with pytest.raises(NotFound, match=f"no artifact {recipe} in .*is a recipe.*{answer}"):
        resolve.load_artifact(recipe)


# ---- once a process


def test_an_artifact_is_loaded_once_while_somebody_holds_it(store, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "kvq_runtime")
    first = resolve.load_artifact(f"{NAME}@1.0.0")
    (store.root.parent / "copy.safetensors").write_bytes(tiny.data(0))
    assert resolve.load_artifact(store.root.parent / "copy.safetensors") is first  # the same bytes, elsewhere
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == f"{NAME}@1.0.0: {NAME} 1.0.0 from {store.url}, asked for by number, sha256 {ZERO[:12]}"
    assert said[1].endswith(f"sha256 {ZERO[:12]}")
    store.publish(NAME, tiny.data(2))
    store.yank(NAME, "1.0.0", "wrong corpus")
    with pytest.warns(UserWarning, match=r"1\.0\.0 is yanked: wrong corpus"):
        assert resolve.load_artifact(f"{NAME}@1.0.0") is first
    del first
    gc.collect()
    loads, found, load = [], [], artifact.load
    monkeypatch.setattr(artifact, "load", lambda *given: loads.append(given) or load(*given))
    threads = [threading.Thread(target=lambda: found.append(resolve.load_artifact(NAME, store.url))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(one) for one in found}) == 1 and len(loads) == 1
