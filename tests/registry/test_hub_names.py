"""What a Hub would refuse is refused before anything is made, and an address with a token in it is not repeated."""

import pytest
import tiny
import tiny_artifact
from hub_client import NAME, REPO, TOKEN, tidy
from hub_server import Handler

from kvq_calib.cli import calibrate
from kvq_runtime.errors import Conflict, NotFound
from kvq_runtime.registry import reference, resolve
from kvq_runtime.registry.hub.registry import HubRegistry
from kvq_runtime.registry.local import LocalRegistry

REFUSED = ["a--b", "a..b", "name-", "name.", "x.git", "x.ipynb"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_that_a_hub_refuses_makes_no_request_and_is_good_in_a_folder(name, hub, tmp_path, kvq):
    """The client's own rule is an independent judge of which names those are."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    if not name.endswith(".ipynb"):  # the server's rule, not the client's
        with pytest.raises(HFValidationError):
            validate_repo_id(f"org/{name}")
    store, folder = HubRegistry("org"), LocalRegistry(tmp_path / "folder")
    data = tiny_artifact.data()
    folder.publish(name, data)
    with pytest.raises(ValueError, match=f"name '{name}': a Hub refuses"):
        store.publish(name, data)
    code, _, err = kvq("copy", f"{name}@1.0.0", "hf://org", "--registry", folder.url)
    assert code != 0 and "a Hub refuses" in err and "Traceback" not in err
    assert hub.requests == [] and not hub.repos
    assert folder.state(name).versions


def test_a_promote_of_what_was_never_published_makes_no_repository(hub):
    with pytest.raises(NotFound, match=r"has no version 1\.0\.0; it has none"):
        HubRegistry("org").promote(NAME, "1.0.0", expect="none")
    assert not hub.repos


@pytest.mark.parametrize("name", ["a-b", "a.b-c_d", "a_", "x.git2", "gitx", "a-1.5b-2bit"])
def test_a_name_that_a_hub_accepts_is_a_name(name):
    from huggingface_hub.utils import validate_repo_id

    assert reference.check_hub_name(name) == name
    validate_repo_id(f"org/{name}")


def test_a_calibration_that_would_push_under_such_a_name_does_not_begin(hub, tmp_path, capsys):
    model = tmp_path / "model"
    tiny.save(model, layers=2)
    tiny.text(model)
    given = ["--model", str(model), "--corpus", str(model / "corpus.txt"), "--samples", "4", "--seq-len", "128"]
    runs = tmp_path / "run"
    assert calibrate.main([*given, "--name", "a--b", "--push", "hf://org", "--run", str(runs), "--no-eval"]) != 0
    assert "name 'a--b': a Hub refuses" in capsys.readouterr().err
    assert not list(runs.glob("layer-*")) and hub.requests == []


@pytest.mark.parametrize("address", [
    f"https://me:{TOKEN}@huggingface.co/org", f"hf://me:{TOKEN}@org", f"hf://{TOKEN}", f"file://{TOKEN}@host/x",
    f"hf://me:{TOKEN}@org/name@1.0.0", f"https://huggingface.co/org?token={TOKEN}",
])  # fmt: skip
def test_a_token_in_an_address_is_refused_and_not_repeated(address, kvq, tmp_path):
    code, out, err = kvq("copy", f"{NAME}@1.0.0", address, "--registry", tmp_path.as_uri())
    assert code != 0 and TOKEN not in out + err
    if not address.endswith(TOKEN) or "?" in address:  # an organization may be named like that
        with pytest.raises(ValueError) as error:
            resolve.open_registry(address)
        assert TOKEN not in str(error.value) and "***" in str(error.value)


# ---- a Hub whose answers lag behind its commits


@pytest.fixture
def stale(monkeypatch):
    """Let the next answers about the head of main be those of its first commit but one: a list of how many."""
    left, info = [0], Handler.info

    def lagging(self, body, id, revision="main"):
        log = self._repo(id).log("main")
        if left[0] and len(log) > 1:
            left[0] -= 1
            self._json(self._about(self._repo(id), log[1].oid))
        else:
            info(self, body, id, revision)

    monkeypatch.setattr(Handler, "info", lagging)
    return left


def test_a_publish_after_a_stale_head_is_made_once(hub, stale):
    store = HubRegistry("org")
    for seed in range(2):
        store.publish(NAME, tiny_artifact.data(seed))
    stale[0] = 3
    assert store.publish(NAME, tiny_artifact.data(2)).version == "1.0.2"
    assert stale == [0] and tidy(hub) == ["1.0.0", "1.0.1", "1.0.2"]
    stale[0] = 3
    commits = len(hub.repos[REPO].log("main"))
    assert store.publish(NAME, tiny_artifact.data(2)).version == "1.0.2"  # its own, which the stale head has not yet
    assert len(hub.repos[REPO].log("main")) == commits


def test_a_lost_answer_and_a_stale_head_make_no_second_version(hub, stale):
    store = HubRegistry("org")
    store.publish(NAME, tiny_artifact.data(0))
    hub.faults.add("POST .*/commit/", "lost")
    stale[0] = 3
    assert store.publish(NAME, tiny_artifact.data(1)).version == "1.0.1"
    assert tidy(hub) == ["1.0.0", "1.0.1"] and len(hub.repos[REPO].log("main")) == 3


def test_a_promote_from_a_stale_head_is_refused_and_undoes_nobodys(hub, stale):
    store = HubRegistry("org")
    for seed in range(2):
        store.publish(NAME, tiny_artifact.data(seed))
    store.promote(NAME, "1.0.0")
    stale[0] = 2
    with pytest.raises((Conflict, NotFound), match="changed .* first|expected none"):
        store.promote(NAME, "1.0.1")
    assert HubRegistry("org").state(NAME).at("production") == "1.0.0"
    assert store.promote(NAME, "1.0.1").at("production") == "1.0.1"
