"""A run that the machine cannot end does not begin: what it needs is compared with what is free, to the byte."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import tiny

from kvq_calib.evaluate import quality_checks
from kvq_calib.job.job import Job
from kvq_calib.job.prepare import preflight, prepare
from kvq_calib.model import find
from kvq_calib.run import plan as plans
from kvq_runtime.errors import NotFound
from kvq_runtime.recipe import preset

PLENTY = 1 << 50


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny-model"
    folder.mkdir()
    tiny.save(folder, layers=2)
    tiny.text(folder)
    return folder


@pytest.fixture
def job(model, tmp_path) -> Job:
    folder = str(tmp_path / "runs" / "run")
    corpus = str(model / "corpus.txt")
    return Job(str(model), corpus=corpus, samples=4, seq_len=128, run=folder, evaluate=False)


@pytest.fixture
def machine(monkeypatch):
    """Set how many bytes of disk and of memory are free; the list has the folders whose disk was looked at."""
    looked: list[Path] = []

    def free(disk: int = PLENTY, memory: int = PLENTY) -> list[Path]:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: looked.append(path) or SimpleNamespace(free=disk))
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=memory))
        return looked

    return free


def test_a_disk_that_is_one_byte_too_small_is_refused(job, machine, tmp_path):
    work = prepare(job)
    needs = work.plan.needs(work.files)["disk"]
    looked = machine(disk=needs)
    assert preflight(job, work) == []
    machine(disk=needs - 1)
    with pytest.raises(RuntimeError, match=rf"^the run needs {needs / 1e9:.1f} GB in {work.folder}, and .* are free"):
        preflight(job, work)
    assert looked == [tmp_path, tmp_path], "the run's folder is not there yet: the nearest one above it"


def test_names_that_are_none_are_told_before_a_model_is_fetched(job, monkeypatch):
    monkeypatch.setattr(find, "resolve", lambda *_: pytest.fail("a model is fetched"))
    with pytest.raises(NotFound, match="no recipe 'aqua-9bit'"):
        prepare(replace(job, recipes=("aqua-9bit",)))
    with pytest.raises(NotFound, match="nosuch"):
        quality_checks.check_drift(quality_checks.DriftCheck("demo", ["nosuch"]))


@pytest.mark.parametrize(
    ("here", "asked", "threads"),
    [(8, {}, 8), (8, {"workers": 3}, 2), (2, {"workers": 5}, 1), (8, {"threads": 3}, 3)],
)
def test_all_cores_are_used_and_none_is_shared(here: int, asked: dict, threads: int, job, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", str(here))
    work = prepare(replace(job, **asked))
    assert work.plan.threads == work.plan.environment["threads"] == threads


def test_memory_that_is_one_byte_too_small_is_refused(job, machine):
    work = prepare(job)
    needs = work.plan.needs(work.files)
    both = needs["layer"] + needs["chunk"]
    machine(memory=both)
    assert preflight(job, work) == []
    machine(memory=both - 1)
    with pytest.raises(RuntimeError, match=rf"^a layer and a chunk need {both / 1e9:.1f} GB on cpu, and .* are free"):
        preflight(job, work)


def test_what_a_run_needs_is_what_its_files_and_weights_take(job):
    """The terms by hand, of a model of hidden width 64, an MLP of 96 and 2 KV heads of 16, in float32."""
    work = prepare(job)
    tokens, hidden, width, size = 4 * 128, 64, 32, 4
    projections = hidden * (2 * hidden + 2 * width) + (hidden + 2 * width)  # q, o, k, v; biases of q, k, v
    layer = (projections + 3 * hidden * 96 + 2 * hidden) * size
    captured, decoded = tokens * 2 * width * size, tokens * 2 * width * 2
    found = work.plan.needs(work.files)
    assert found["layer"] == layer
    assert (
        found["disk"] == 2 * tokens * hidden * size + captured + 3 * decoded
    )  # of this layer, of the one it reads, and one more


def test_what_gradients_keep_is_counted(job, monkeypatch):
    """Of each layer the hidden states above it: 256 tokens, of 384 that the run fits on."""
    monkeypatch.setattr(plans, "BEGINNING", 200)
    work = prepare(replace(job, recipes=("aqua-fisher-2bit",)))
    plain = replace(work.plan, recipes=tuple(map(preset, ["aqua-2bit"])))
    found, less = work.plan.needs(work.files)["disk"], plain.needs(work.files)["disk"]
    read = 4 * 128 * 2 * 32 * 2 * (work.plan.depth - plain.depth)  # decoded layers below
    assert found - less == 256 * 64 * 4 * 2 + read


def test_a_folder_that_cannot_be_written_is_named_before_a_run(job, machine, tmp_path):
    machine()
    (tmp_path / "file").write_text("")
    blocked = replace(job, run=str(tmp_path / "file" / "run"))
    with pytest.raises(RuntimeError, match=rf"{tmp_path}/file: nothing can be written there; .*--run DIR"):
        preflight(blocked, prepare(blocked))
