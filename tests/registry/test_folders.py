"""What `from_pretrained` and `load_artifact` take in Hugging Face libraries: folders, org/name, revision."""

import gc
import logging
import threading
from hashlib import sha256

import pytest
import tiny_artifact as tiny
from hub_client import NAME, REPO, TOKEN, asked, clear

from kvq_runtime.artifact import artifact
from kvq_runtime.cli.main import main
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.registry import reference, resolve
from kvq_runtime.registry.hub.registry import HubRegistry
from kvq_runtime.registry.local import LocalRegistry


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


def digest(found) -> str:
    return sha256(artifact.to_bytes(found)).hexdigest()


ZERO, ONE = (sha256(tiny.data(seed)).hexdigest() for seed in (0, 1))


@pytest.mark.parametrize("where", [NAME, f"./{NAME}", f"{NAME}/", f"../{{}}/{NAME}"])
def test_a_folder_that_pull_wrote_is_loaded(where, store, tmp_path):
    assert digest(resolve.load_artifact(where.format(tmp_path.name))) == ONE
    for registry in (None, store.url):
        assert digest(resolve.load_artifact(tmp_path / NAME, registry)) == ONE
        assert digest(resolve.load_artifact(f"./{NAME}", registry)) == ONE


def test_a_name_is_one_of_the_registry_that_is_given_or_pinned(store, tmp_path):
    assert digest(resolve.load_artifact(NAME, store.url)) == ZERO
    assert digest(resolve.load_artifact(f"{NAME}@1.0.0")) == ZERO
    assert main(["pull", NAME, "-o", "out", "--lock", "kvq.lock"]) == 0
    assert digest(resolve.load_artifact(NAME, lock="kvq.lock")) == ZERO
    pinned = resolve.load_artifact(NAME, lock="kvq.lock")
    assert (
        resolve.load_artifact("out", lock="kvq.lock") is pinned and main(["verify", "out", "--lock", "kvq.lock"]) == 0
    )
    with pytest.raises(ArtifactError, match=r"lock: .*kvq\.safetensors has sha256"):
        resolve.load_artifact(f"./{NAME}", lock="kvq.lock")


def test_commands_take_a_folder(store, tmp_path, capsys):
    assert main(["show", f"./{NAME}", "--json"]) == 0 and ONE in capsys.readouterr().out
    assert main(["verify", NAME]) == 0 and "not compared: a path" in capsys.readouterr().out
    assert main(["pull", NAME, "-o", NAME]) == 0  # again, into the same folder: from the registry
    assert (tmp_path / NAME / "kvq.safetensors").read_bytes() == tiny.data(0)


def test_what_is_no_artifact_says_what_would_be_one(store, tmp_path):
    (tmp_path / "empty").mkdir()
    for given in (tmp_path / "empty", "./empty", "empty/"):
        with pytest.raises(NotFound, match=r"empty.*a folder without kvq\.safetensors, which kvq pull -o"):
            resolve.load_artifact(given)
    for given in ("./none", "/none/at/all", "a/b/c"):
        with pytest.raises(ValueError, match=r"there is no such folder; use the path of a folder that holds kvq\."):
            resolve.load_artifact(given)
    (tmp_path / "lock.json").write_text("{}")
    with pytest.raises(ValueError, match=r"lock.json': a file, but no \.safetensors; use the path of a folder"):
        resolve.resolve(f"{tmp_path}/lock.json")
    with pytest.raises(ValueError, match=r"is one of hf://org, but registry is file:"):
        resolve.load_artifact("org/name", store.url)


@pytest.mark.parametrize("recipe, answer", [("higgs-2bit", r'KVQCache\.from_recipe\("higgs-2bit", model\)'),
                                            ("aqua-2bit", "kvq-calibrate --recipe aqua-2bit")])  # fmt: skip
def test_the_name_of_a_recipe_is_answered_with_what_makes_one(recipe, answer, store):
    with pytest.raises(NotFound, match=f"no artifact {recipe} in .*is a recipe.*{answer}"):
        resolve.load_artifact(recipe)


@pytest.mark.parametrize("given, by, value", [
    (None, "default", ""), ("main", "default", ""), ("1.2.0", "version", "1.2.0"), ("v1.2.0", "version", "1.2.0"),
    ("production", "alias", "production"), ("a" * 40, "commit", "a" * 40),
])  # fmt: skip
def test_a_revision_is_what_stands_after_at(given, by, value):
    found = reference.at_revision(reference.parse("org/name"), given)
    assert found == reference.Reference("name", by, value, "hf://org")


def test_revisions_in_a_folder(store):
    store.publish(NAME, tiny.data(2))
    assert digest(resolve.load_artifact(NAME, store.url, revision="1.0.0")) == ZERO
    assert digest(resolve.load_artifact(NAME, store.url, revision="v1.0.0")) == ZERO
    for revision, message in (("a" * 40, "has no commits"), ("v1.0", "alias 'v1.0'")):
        with pytest.raises(ValueError, match=message):
            resolve.load_artifact(NAME, store.url, revision=revision)
    with pytest.raises(ValueError, match=r"revision='1\.0\.0', but .* has one"):
        resolve.load_artifact(f"{NAME}@1.0.1", store.url, revision="1.0.0")
    with pytest.raises(ValueError, match="a file has none"):
        resolve.load_artifact(f"./{NAME}", revision="1.0.0")


# ---- a Hub


def test_org_and_name_mean_the_hub_at_a_revision(hub):
    store = HubRegistry("org")
    store.publish(NAME, tiny.data(0))
    commit = hub.repos[REPO].branches["main"]
    store.publish(NAME, tiny.data(1))
    assert digest(resolve.load_artifact(REPO)) == ONE
    assert digest(resolve.load_artifact(f"{REPO}@1.0.0")) == ZERO
    for revision in ("v1.0.0", "1.0.0", commit):
        assert digest(resolve.load_artifact(REPO, revision=revision)) == ZERO
    found = resolve.resolve(REPO, revision=commit)
    assert (found.commit, found.registry) == (commit, "hf://org") and f"at commit {commit[:12]}" in found.chosen_because
    with pytest.raises(NotFound):
        resolve.load_artifact(REPO, revision="b" * 40)


def test_cache_dir_and_local_files_only(hub, monkeypatch, tmp_path):
    HubRegistry("org").publish(NAME, tiny.data(0))
    clear(monkeypatch, tmp_path)
    with pytest.raises(RuntimeError, match=r"offline \(local_files_only\) and not in the cache"):
        resolve.load_artifact(REPO, local_files_only=True)
    assert digest(resolve.load_artifact(REPO, cache_dir=tmp_path / "mine")) == ZERO
    assert any((tmp_path / "mine").rglob("kvq.safetensors")) and not (tmp_path / "another-hf-cache").exists()
    before = len(asked(hub))
    assert digest(resolve.load_artifact(REPO, cache_dir=str(tmp_path / "mine"), local_files_only=True)) == ZERO
    assert len(asked(hub)) == before
    with pytest.raises(RuntimeError, match="not in the cache"):
        resolve.load_artifact(REPO, local_files_only=True)


def test_a_token_that_is_given_is_sent_and_never_shown(hub, monkeypatch, tmp_path):
    HubRegistry("org").publish(NAME, tiny.data(0))
    hub.repos[REPO].private = True
    monkeypatch.delenv("HF_TOKEN")
    clear(monkeypatch, tmp_path)
    with pytest.raises(NotFound, match="it does not exist, or is private") as refused:
        resolve.load_artifact(REPO)
    assert digest(resolve.load_artifact(REPO, token=TOKEN)) == ZERO
    clear(monkeypatch, tmp_path / "again")
    with pytest.raises((NotFound, PermissionError)) as refused:
        resolve.load_artifact(REPO, token="hf_wrong" + "x" * 20)
    assert "hf_wrong" not in str(refused.value)


# ---- once a process


def test_an_artifact_is_loaded_once_while_somebody_holds_it(store, caplog):
    caplog.set_level(logging.INFO, "kvq_runtime")
    one = resolve.load_artifact(f"{NAME}@1.0.0")
    (store.root.parent / "copy.safetensors").write_bytes(tiny.data(0))
    assert resolve.load_artifact(store.root.parent / "copy.safetensors") is one  # the same bytes, elsewhere
    assert resolve.load_artifact(f"./{NAME}") is not one
    said = [(record.name, record.getMessage()) for record in caplog.records]
    assert all(name == "kvq_runtime.registry.resolve" for name, _ in said)
    assert said[0][1] == (f"{NAME}@1.0.0: {NAME} 1.0.0 from {store.url}, asked for by number, sha256 {ZERO[:12]}")
    assert said[1][1].endswith(f"sha256 {ZERO[:12]}, in memory already")
    del one
    gc.collect()
    resolve.load_artifact(f"{NAME}@1.0.0")
    assert "in memory" not in caplog.records[-1].getMessage()


def test_threads_load_a_file_once(store, monkeypatch):
    loads, found, load = [], [], artifact.load
    monkeypatch.setattr(artifact, "load", lambda *given: loads.append(given) or load(*given))
    threads = [threading.Thread(target=lambda: found.append(resolve.load_artifact(NAME, store.url))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len({id(one) for one in found}) == 1 and len(loads) == 1


def test_a_yanked_version_still_warns_when_it_is_in_memory(store):
    store.publish(NAME, tiny.data(2))
    one = resolve.load_artifact(f"{NAME}@1.0.0")
    store.yank(NAME, "1.0.0", "wrong corpus")
    with pytest.warns(UserWarning, match=r"1\.0\.0 is yanked: wrong corpus"):
        assert resolve.load_artifact(f"{NAME}@1.0.0") is one
