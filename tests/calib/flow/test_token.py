"""A flow has the Hub's token while it publishes, and at no other time."""

import os

import pytest

from kvq_calib.cli import calibrate
from kvq_calib.flow import server
from kvq_runtime.errors import NotFound


@pytest.mark.parametrize("before", [None, "hf_of_the_shell"])
def test_the_token_is_there_for_as_long_as_it_is_needed(before, tmp_path, monkeypatch):
    from huggingface_hub import get_token

    for name in server.TOKENS:
        monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv("HF_TOKEN", before)
    (tmp_path / "hf-token").write_text("hf_canary\n")
    monkeypatch.setenv(server.TOKEN_FILE, str(tmp_path / "hf-token"))

    @server.publishing()
    def publish() -> str | None:
        return get_token()

    for _ in range(2):
        assert publish() == "hf_canary"
        assert os.environ.get("HF_TOKEN") == before
    with pytest.raises(RuntimeError, match="no answer"), server.publishing():
        assert get_token() == "hf_canary"
        raise RuntimeError("no answer")
    assert os.environ.get("HF_TOKEN") == before


@pytest.mark.parametrize("words", [[], ["--models", "list.yaml"]])
def test_a_calibration_without_prefect_has_it_and_one_with_it_leaves_it_to_its_tasks(words, tmp_path, monkeypatch):
    seen = []
    (tmp_path / "hf-token").write_text("hf_canary")
    monkeypatch.setenv(server.TOKEN_FILE, str(tmp_path / "hf-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for name in ("_calibrate", "_each"):
        monkeypatch.setattr(calibrate, name, lambda *given: seen.append(os.environ.get("HF_TOKEN")) or 0)
    assert calibrate.main(words) == calibrate.main([*words, "--prefect"]) == 0
    assert seen == ["hf_canary", None] and "HF_TOKEN" not in os.environ


@pytest.mark.parametrize("kept", [None, ""])
def test_without_a_token_to_give_the_environment_stays(kept, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_shell")
    if kept is not None:
        (tmp_path / "hf-token").write_text(kept)
    for path in (str(tmp_path / "hf-token"), ""):
        monkeypatch.setenv(server.TOKEN_FILE, path)
        with server.publishing():
            assert os.environ["HF_TOKEN"] == "hf_of_the_shell"


@pytest.mark.slow
@pytest.mark.xdist_group("prefect")
def test_the_steps_that_publish_have_it_and_those_that_compute_do_not(tmp_path, monkeypatch):
    from kvq_calib.flow import flow
    from pipelines import flows

    seen = {}
    (tmp_path / "hf-token").write_text("hf_canary")
    monkeypatch.setenv(server.TOKEN_FILE, str(tmp_path / "hf-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    saw = lambda name: lambda *given, **more: seen.update({name: os.environ.get("HF_TOKEN")})  # noqa: E731
    monkeypatch.setattr(flow, "_work", lambda asked: None)
    monkeypatch.setattr(flow, "_round", lambda work, number: "work")
    monkeypatch.setattr(flow.preparation, "preflight", saw("preflight"))
    for name in ("begin", "evaluate"):
        monkeypatch.setattr(flow.job, name, saw(name))
    monkeypatch.setattr(flow.job, "publish", lambda *given: [saw("publish")()])
    for name in ("artifacts", "start", "first_unfinished"):
        monkeypatch.setattr(flow.stages, name, saw(name))
    monkeypatch.setattr(flows.measure.models, "resolve", saw("drift"))
    flow.prepare.fn("asked", 0)
    flow._publish("asked")
    with pytest.raises(NotFound, match="no artifact name"):
        flows.check.fn(["name"], "model", "text", flows.Bounds(1.05, None), 0)
    with_token = {"preflight", "publish", "artifacts", "evaluate", "drift"}
    assert seen == {name: "hf_canary" if name in with_token else None for name in seen}
    assert set(seen) == with_token | {"begin", "start", "first_unfinished"}
