"""Workers leave no trace in the bytes: not their number, and not the death of one."""

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import tiny

from kvq_calib.job.job import Job
from kvq_calib.job.prepare import prepare
from kvq_calib.job.run import run as run_job

workers = pytest.importorskip(
    "kvq_calib.run.workers", reason="the extra `scale` is not installed", exc_type=ImportError
)
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]


@pytest.fixture(autouse=True)
def not_nice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other tests, Ray's workers at their niceness of 15 would hardly run."""
    monkeypatch.setenv("RAY_worker_niceness", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.save(folder, layers=2)
    tiny.text(folder)
    return folder


def a_job(model: Path, folder: Path, **settings) -> Job:
    recipes = ("aqua-2bit", "svdq-wf-2bit-v4", "squat-2bit", "oscar-2bit")
    text = {"corpus": str(model / "corpus.txt"), "samples": 68, "seq_len": 256, "held_out": 32}
    return Job(
        model=str(model), recipes=recipes, run=str(folder), publish=False, evaluate=False, threads=1, **text, **settings
    )


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory) -> list[str]:
    return digests(a_job(model, tmp_path_factory.mktemp("alone") / "run"))


def digests(asked: Job, listener=lambda progress: None) -> list[str]:
    return [made.sha256 for made in run_job(asked, listener)[0]]


def test_one_worker_makes_the_same_bytes(model, alone, tmp_path):
    assert digests(a_job(model, tmp_path / "run", workers=1)) == alone
    assert not (tmp_path / "run" / workers.MARK).exists()


def test_two_of_which_all_are_killed_in_every_layer_make_the_same_bytes(model, alone, tmp_path):
    killed = []

    def kill(progress):
        if progress.stage == "capture" and progress.done == 1:
            killed.append(0)
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # of the last layer's, one may only now be gone
                    if child.cmdline()[:1] in (["ray::_do"], ["ray::IDLE"]):  # at work, or between two chunks
                        child.send_signal(signal.SIGKILL)
                        killed[-1] += 1

    assert digests(a_job(model, tmp_path / "run", workers=2), kill) == alone
    assert len(killed) == 2 and min(killed) >= 1


def test_results_come_in_order_errors_as_they_are_and_a_dead_workers_chunk_again(model, tmp_path):
    run = replace(prepare(a_job(model, tmp_path)), folder=tmp_path)

    def task(folder: Path, index: int) -> int:
        if index == 1 and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if index == 7:
            raise ValueError("seven is refused")
        return index

    with workers.ray_executor(run, 2) as execute:
        assert list(execute(task, tmp_path, range(6))) == list(range(6))
        assert (tmp_path / "died").exists()
        with pytest.raises(ValueError, match="seven is refused"):
            list(execute(task, tmp_path, range(6, 9)))


def test_a_worker_elsewhere_is_refused(model, tmp_path):
    run = replace(prepare(a_job(model, tmp_path)), folder=tmp_path)
    with pytest.raises(RuntimeError, match="does not see"):
        workers.check_worker(run, "mark")
    (tmp_path / workers.MARK).write_text("another")
    with pytest.raises(RuntimeError, match="does not see"):
        workers.check_worker(run, "mark")
    (tmp_path / workers.MARK).write_text("mark")
    workers.check_worker(run, "mark")
    other = replace(run.plan, environment=run.plan.environment | {"torch": "1.0"})
    with pytest.raises(RuntimeError, match=r"torch differ"):
        workers.check_worker(replace(run, plan=other), "mark")


def test_ray_says_nothing_of_its_own_start(tmp_path):
    body = f"""
from pathlib import Path
from types import SimpleNamespace
from kvq_calib.run import workers
run = SimpleNamespace(folder=Path({str(tmp_path)!r}), plan=SimpleNamespace(device="cpu", threads=1))
with workers.ray_executor(run, 1):
    print("started")"""
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("started\n", "")
