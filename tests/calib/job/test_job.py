"""The settings of a job, one name each, whichever group they are in; a fine-tune gets its base's artifact where that
keeps the bounds on it, and one of its own where it does not.
"""

import logging
import shutil
from dataclasses import fields

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_artifact import tiny

from kvq_calib.cli import calibrate
from kvq_calib.job import prepare, run
from kvq_calib.job.job import Evaluation, Job, Machine, Publication, Text, What
from kvq_calib.job.run import _publish
from kvq_calib.model import find as models
from kvq_runtime.artifact import fingerprint
from kvq_runtime.artifact.artifact import to_bytes
from kvq_runtime.errors import ArtifactError
from kvq_runtime.registry.resolve import load_artifact, open_registry

GIVEN = {"model": "demo", "bits": [2.5], "samples": 4, "device": "cuda", "also": ["none"], "push": "hf://org"}
SETTINGS = {"model": "demo", "samples": 8, "held_out": 2, "seq_len": 256, "eval_windows": 2, "also": ["none"]}


def test_settings_by_name_and_by_group_are_the_same_job():
    grouped = Job(
        What("demo", bits=(2.5,)),
        Text(samples=4),
        Machine("cuda"),
        Evaluation(also=("none",)),
        Publication(push="hf://org"),
    )
    assert Job.from_settings(**GIVEN) == grouped == Job.from_settings(**grouped.settings)
    assert hash(grouped) == hash(Job.from_settings(**GIVEN)), "it is a key"


def test_changed_settings_leave_the_others():
    job = Job.from_settings(**GIVEN)
    changed = job.with_settings(samples=5, max_kl=0.5)
    assert (changed.text, changed.evaluation) == (Text(samples=5), Evaluation(also=("none",), max_kl=0.5))
    assert (changed.what, changed.machine, changed.publication) == (job.what, job.machine, job.publication)


def test_a_setting_is_of_one_group():
    names = [setting.name for group in (What, Text, Machine, Evaluation, Publication) for setting in fields(group)]
    assert len(set(names)) == len(names) == len(Job(What("demo")).settings)


def test_a_setting_that_is_none_is_refused():
    with pytest.raises(TypeError, match="a Job has no setting sampels, seqlen$"):
        Job.from_settings(model="demo", sampels=4, seqlen=128)


def test_bytes_of_a_withdrawn_version_that_are_published_again_stay_withdrawn(tmp_path):
    target, data = open_registry(tmp_path.as_uri()), to_bytes(tiny())
    given = target, "a", data, None, {"README.md": b"---\ntags: [kvq]\n---\n# a\n"}, None
    assert (first := _publish(*given)).new and first.yanked is None
    target.yank("a", "1.0.0", "wrong text")
    again = _publish(*given)
    assert (again.new, again.reference, again.yanked) == (False, "a@1.0.0", "wrong text")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A registry with an artifact of the embedded model, and a fine-tune: the model with other weights."""
    folder = tmp_path_factory.mktemp("home")
    registry = (folder / "registry").as_uri()
    base = Job.from_settings(**SETTINGS, registry=registry, run=str(folder / "run"))
    run.run(base)
    shutil.copytree(models.resolve("demo").path, folder / "tuned")
    tensors = load_file(folder / "tuned" / "model.safetensors")
    drawn = torch.Generator().manual_seed(0)
    for name, x in tensors.items():
        if x.ndim > 1:
            tensors[name] = (x + 0.02 * x.float().std() * torch.randn(x.shape, generator=drawn)).to(x.dtype)
    save_file(tensors, folder / "tuned" / "model.safetensors")
    return folder


def job(home, name: str, **changed) -> Job:
    own = {"model": str(home / "tuned"), "corpus": "demo", "reuse": "demo-aqua-2bit", "name": name}
    return Job.from_settings(**SETTINGS | own | {"registry": (home / "registry").as_uri(),
                                                 "run": str(home / name)} | changed)  # fmt: skip


def test_what_keeps_the_bounds_is_published_for_the_fine_tune(home):
    asked = job(home, "kept", max_kl=1.0)
    (done,), spent = run.run(asked)
    assert spent == {} and not done.failed and not list((home / "kept").glob("layer-0*")), "nothing was fitted"
    base, made = (load_artifact(name, (home / "registry").as_uri()) for name in ("demo-aqua-2bit", "kept"))
    files = models.resolve(home / "tuned")
    assert made.tensors.keys() == base.tensors.keys() and made.recipe == base.recipe
    assert all(torch.equal(x, base.tensors[name]) for name, x in made.tensors.items())
    fingerprint.check_match(made.fingerprint, files.fingerprint())
    with pytest.raises(ArtifactError, match="weights of layer"):
        fingerprint.check_match(base.fingerprint, files.fingerprint())
    assert made.provenance["model"] == "tuned" and made.provenance["reused"]["model"] == "demo"
    card = next((home / "kept").rglob("README.md")).read_text()
    assert "`demo-aqua-2bit`, fitted to `demo`; losses are this model's" in card
    again, _ = run.run(asked)
    assert again[0].sha256 == done.sha256 and not again[0].places[0].new


@pytest.mark.slow
def test_what_does_not_is_fitted(home, caplog):
    with caplog.at_level(logging.WARNING):
        (done,), spent = run.run(job(home, "own", max_kl=1e-9))
    assert "demo-aqua-2bit is not reused: " in caplog.text and "calibrating" in caplog.text
    assert spent["aqua-2bit"] > 0 and done.failed, "no recipe diverges by nothing: its own does not keep it either"


@pytest.mark.parametrize("changed, why", [
    ({}, "give --max-kl or --max-perplexity-ratio, and at most one --recipe"),
    ({"max_kl": 1.0, "recipes": ["aqua-2bit", "aqua-3bit"], "name": None}, "and at most one --recipe"),
    ({"max_kl": 1.0, "reuse": "nothing"}, "no artifact nothing in"),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_the_work(home, changed, why):
    asked = job(home, "refused").with_settings(**changed)
    with pytest.raises((ValueError, ArtifactError), match=why):
        prepare.preflight(asked, prepare.prepare(asked))


def test_the_command_fits_what_is_to_be_reused_unless_told(home, capsys):
    given = ["--model", "demo", "--registry", (home / "registry").as_uri(), "--reuse", "demo-aqua-2bit"]
    args = calibrate.parser().parse_args(given)
    assert calibrate._job(args).what.recipes == ("aqua-2bit",) and calibrate._job(args).what.reuse == "demo-aqua-2bit"
    assert calibrate.main([*given, "--max-kl", "1", "--prefect"]) == 2
    assert "leave out --prefect" in capsys.readouterr().err


def test_the_caution_is_of_the_fit_that_is_reused(home, capsys):
    """Not of the few sequences that it is measured on."""
    where = ["--registry", (home / "registry").as_uri(), "--corpus", "demo", "--seq-len", "256", "--also", "none"]
    fitted = ["--model", "demo", *where, "--samples", "9", "--held-out", "1", "--no-eval", "--name", "wide"]
    assert calibrate.main(fitted) == 0 and "CAUTION" not in capsys.readouterr().out
    given = ["--model", str(home / "tuned"), *where, "--samples", "4", "--held-out", "1", "--max-kl", "1"]
    for base, warned in (("wide", False), ("demo-aqua-2bit", True)):
        assert calibrate.main([*given, "--reuse", base, "--run", str(home / base), "--name", f"of-{base}"]) == 0
        out, err = capsys.readouterr()
        assert "nothing was fitted" in err and "CAUTION" not in err
        assert ("CAUTION" in out) == warned, out
    assert "fitted on 6 sequences (8 less 2 held out)" in out
