"""A flow has the Hub's token while it publishes, and at no other time."""

import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from kvq_calib.job import prepare, run
from kvq_runtime.registry.hub import client


@pytest.mark.parametrize("before", [None, "hf_of_the_shell"])
def test_the_token_is_there_for_as_long_as_it_is_needed(before, tmp_path, monkeypatch):
    from huggingface_hub import get_token

    for name in client.TOKENS:
        monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv("HF_TOKEN", before)
    (tmp_path / "hf-token").write_text("hf_canary\n")
    monkeypatch.setenv(client.TOKEN_FILE, str(tmp_path / "hf-token"))

    @client.publishing()
    def publish() -> str | None:
        return get_token()

    for _ in range(2):
        assert publish() == "hf_canary"
        assert os.environ.get("HF_TOKEN") == before
    with pytest.raises(RuntimeError, match="no answer"), client.publishing():
        assert get_token() == "hf_canary"
        raise RuntimeError("no answer")
    assert os.environ.get("HF_TOKEN") == before


@pytest.mark.parametrize("kept", [None, ""])
def test_without_a_token_to_give_the_environment_stays(kept, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_shell")
    if kept is not None:
        (tmp_path / "hf-token").write_text(kept)
    for path in (str(tmp_path / "hf-token"), ""):
        monkeypatch.setenv(client.TOKEN_FILE, path)
        with client.publishing():
            assert os.environ["HF_TOKEN"] == "hf_of_the_shell"


@pytest.mark.slow
@pytest.mark.xdist_group("prefect")
def test_the_steps_that_publish_have_it_and_those_that_compute_do_not(tmp_path, monkeypatch):
    """In a flow's tasks and in a job without Prefect: checks and writes of registries have the token."""
    from kvq_calib.flow import flow
    from pipelines import flows

    seen = {}
    (tmp_path / "hf-token").write_text("hf_canary")
    monkeypatch.setenv(client.TOKEN_FILE, str(tmp_path / "hf-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)

    def record(name, result=None):
        return lambda *given, **more: seen.update({name: os.environ.get("HF_TOKEN")}) or result

    monkeypatch.setattr(prepare, "_check_settings", record("check", ()))
    monkeypatch.setattr(prepare, "_check_machine", record("check", ()))
    for name in ("begin", "evaluate"):
        monkeypatch.setattr(run, name, record(name, []))
    monkeypatch.setattr(run.sections, "license_of", record("publish"))
    for name in ("fit", "artifacts", "start", "first_unfinished"):
        monkeypatch.setattr(run.calibrate, name, record(name, {}))
    monkeypatch.setattr(run.calibrate, "seconds", lambda work: {})
    monkeypatch.setattr(run, "executor", lambda *given: nullcontext())
    monkeypatch.setattr(run, "replace", lambda work, **more: work)
    monkeypatch.setattr(flows.held_out, "_versions", record("drift"))
    job = SimpleNamespace(publication=SimpleNamespace(targets=()), evaluation=SimpleNamespace(baselines=()))
    work = SimpleNamespace(files=SimpleNamespace(path=tmp_path), claimed=nullcontext)
    monkeypatch.setattr(flow, "_work", lambda job: work)
    monkeypatch.setattr(flow, "_round", lambda work, number: work)
    flow.prepare.fn(job, 0)
    assert flow._publish(job) == [] and run.complete(job, work) == ([], {})
    with pytest.raises(TypeError):  # no versions were found
        flows.check.fn(["name"], "model", "text", flows.Bounds(1.05, None), 0)
    with_token = {"check", "publish", "drift"}
    assert seen == {name: "hf_canary" if name in with_token else None for name in seen}
    assert set(seen) == with_token | {"begin", "evaluate", "fit", "artifacts", "start", "first_unfinished"}
