"""The tasks of a flow, called without Prefect's engine, make the bytes that a run in this process makes."""

from dataclasses import replace
from uuid import uuid4

import pytest
import tiny

from kvq_calib.job import prepare, run
from kvq_calib.job.job import Job


@pytest.mark.slow
def test_tasks_make_the_bytes_of_a_run_and_resume_it(tmp_path, monkeypatch):
    from kvq_calib.flow import flow

    shown = []
    monkeypatch.setattr(flow, "update_progress_artifact", lambda id, progress, text: shown.append((progress, text)))
    model = tiny.with_text(tmp_path)
    settings = {"corpus": f"{model}/corpus.txt", "samples": 4, "seq_len": 128, "evaluate": False, "checkpoint_every": 0}
    here = Job(model=str(model), **settings, run=str(tmp_path / "here"))
    there = replace(here, run=str(tmp_path / "there"))
    (expected,), _ = run.run(here)
    with flow._sharing(there, prepare.prepare(there)):
        assert flow.prepare.fn(there, 0) == 0
        flow.layer.fn(there, 0, 0, uuid4())
    assert flow.prepare.fn(there, 0) == 1, "another process goes on where the first stopped"
    flow.layer.fn(there, 1, 0, uuid4())
    assert flow.prepare.fn(there, 1) is None
    (made,) = flow._publish(there)
    assert made.sha256 == expected.sha256 and shown[-1] == (100.0, f"{model}: 2 of 2 layers")
