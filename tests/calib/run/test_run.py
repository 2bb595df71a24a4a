"""A run is its plan: whoever does it, however often it is killed, the artifact has the same bytes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from filelock import FileLock
from patience import held, until

from kvq_calib.model import find as models
from kvq_calib.run import calibrate as runs
from kvq_calib.run import checkpoint
from kvq_calib.run import plan as plans
from kvq_calib.run.run import Run
from kvq_runtime.artifact import artifact
from kvq_runtime.artifact.recipe_text import read
from kvq_runtime.recipe import preset

RECIPES = ("aqua-2bit", "aqua-2bit+all.predict.fit=clean+name=agnostic", "aqua-2bit+position=post",
           "aqua-2bit+all.predict.below=1,2", "svdq-wf-2bit-v4")  # fmt: skip
DEEP = RECIPES[3]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.save(folder, layers=4)
    tiny.text(folder)
    return folder


def a_run(model: Path, folder: Path, names=RECIPES, **settings) -> Run:
    files = models.resolve(str(model))
    given = {"samples": 10, "seq_len": 256, "held_out": 2} | settings
    made = plans.make(files, tuple(read(name) for name in names), str(model / "corpus.txt"), **given)
    return Run(made, files, folder)


def digests(fitted) -> dict[str, bytes]:
    return {name: artifact.to_bytes(made) for name, made in fitted.items()}


@pytest.fixture(scope="module")
def undisturbed(model, tmp_path_factory) -> dict[str, bytes]:
    return digests(runs.calibrate(a_run(model, tmp_path_factory.mktemp("run"))))


@pytest.mark.slow
def test_two_threads_make_the_same_bytes_again(model, tmp_path):
    first, again = (
        digests(runs.calibrate(a_run(model, tmp_path / name, ("svdq-wf-2bit-v4",), threads=2))) for name in "ab"
    )
    assert first == again


class Killed(BaseException):
    """Stands for a process that ends at this point: nothing that follows is run."""


def test_interrupted_in_a_layer_it_resumes_to_the_same_tensors(model, undisturbed, tmp_path):
    work, seen = a_run(model, tmp_path, ("aqua-2bit",)), []

    def stop(progress):
        if progress.layer == 2 and progress.stage.endswith("values"):
            raise Killed

    with pytest.raises(Killed):
        runs.calibrate(Run(work.plan, work.files, work.folder, stop))
    (tmp_path / "layer-0002.partial" / "left-over").touch()
    found = runs.calibrate(Run(work.plan, work.files, work.folder, lambda said: seen.append(said.layer)))["aqua-2bit"]
    expected = artifact.from_bytes(undisturbed["aqua-2bit"])
    assert sorted({*seen}) == [2, 3] and found.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(found.tensors[name], expected.tensors[name]) for name in expected.tensors)
    assert found.fit == expected.fit and not (tmp_path / "layer-0002" / "left-over").exists()


@pytest.mark.slow
def test_interrupted_in_every_stage_of_every_layer_it_resumes_to_the_same_bytes(model, undisturbed, tmp_path):
    stages = 0

    def stop_later(progress):
        nonlocal seen
        seen += 1
        if seen > limit:
            raise Killed

    for limit in (0, 3, 11, 20, 33, 47):
        seen = 0
        work = a_run(model, tmp_path / str(limit))
        broken = Run(work.plan, work.files, work.folder, stop_later)
        with pytest.raises(Killed):
            runs.calibrate(broken)
        begun = []
        again = Run(work.plan, work.files, work.folder, lambda p, begun=begun: begun.append(p.layer))
        assert digests(runs.calibrate(again)) == undisturbed, f"stopped after {limit} units"
        stages += begun[0] > 0
    assert stages > 0, "no run went on above the first layer"


@pytest.mark.slow
def test_killed_with_signal_9_it_resumes_to_the_same_bytes(model, undisturbed, tmp_path):
    program = (
        "import sys; from kvq_calib.cli.calibrate import main; "
        f"sys.exit(main(['--model', {str(model)!r}, '--corpus', {str(model / 'corpus.txt')!r}, '--samples', '10', "
        f"'--seq-len', '256', '--held-out', '2', '--run', {str(tmp_path / 'run')!r}, '--json', '--no-eval', "
        + ", ".join(f"'--recipe', '{name}'" for name in RECIPES)
        + "]))"
    )
    hold = tmp_path / "hold"
    hold.touch()
    command = [sys.executable, "-c", held(hold, "name.endswith('layer-0002')") + program]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: (tmp_path / "run" / "layer-0001").is_dir() or child.poll() is not None, pause=0.005)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    assert not (tmp_path / "run" / "layer-0002").exists()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    import hashlib

    published = {row["recipe"]: row["sha256"] for row in json.loads(done.stdout)}
    assert published == {name: hashlib.sha256(data).hexdigest() for name, data in undisturbed.items()}


def test_a_second_run_of_the_same_plan_is_refused_while_the_first_works(model, tmp_path):
    work = a_run(model, tmp_path)
    with FileLock(tmp_path / "lock"), pytest.raises(checkpoint.AlreadyRunning, match="already running"):
        runs.calibrate(work)


def test_a_run_folder_of_another_plan_or_environment_is_refused(model, tmp_path):
    runs.calibrate(a_run(model, tmp_path, ("aqua-2bit",), samples=4))
    with pytest.raises(ValueError, match="seed"):
        runs.calibrate(a_run(model, tmp_path, ("aqua-2bit",), samples=4, seed=1))
    with pytest.raises(ValueError, match="environment"):
        runs.calibrate(a_run(model, tmp_path, ("aqua-2bit",), samples=4, threads=2))


def test_a_damaged_checkpoint_is_named(model, tmp_path):
    work = a_run(model, tmp_path, ("aqua-2bit", DEEP), samples=4)

    def stop(progress):
        if progress.layer == 2:
            raise Killed

    with pytest.raises(Killed):
        runs.calibrate(Run(work.plan, work.files, work.folder, stop))
    folder = tmp_path / "layer-0001"
    victims = sorted(path for path in folder.iterdir() if path.name != "done.json")
    assert {path.name.split("-")[0] for path in victims} >= {"aqua", "hidden"}
    for victim in victims:
        good = victim.read_bytes()
        os.chmod(victim, 0o644)
        victim.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(RuntimeError, match=f"{re.escape(str(victim))} is missing or damaged"):
            checkpoint.verify(tmp_path, 1)
        victim.write_bytes(good)
    below = tmp_path / "layer-0000"
    read = below / f"{work.plan.recipes[1].name}-value-00000.safetensors"  # which layer 2 reads
    for victim in (below / "fit.safetensors", read):  # the first no layer reads, and the artifact has
        good = victim.read_bytes()
        os.chmod(victim, 0o644)
        victim.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(RuntimeError, match=f"{re.escape(str(victim))} is missing or damaged"):
            runs.calibrate(work)
        victim.write_bytes(good)
    victim = next(folder.glob("hidden-*"))
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(RuntimeError, match="damaged"):
        runs.calibrate(work)


def test_a_finished_run_gives_nothing_that_was_damaged_since(model, tmp_path):
    """Of each layer, the last one too; and notes that are no JSON are named as tensors are."""
    work = a_run(model, tmp_path, ("mean-higgs-2bit",), samples=4)
    runs.calibrate(work)
    fits, notes = (sorted(tmp_path.glob(f"layer-0*/{name}")) for name in ("fit.safetensors", "done.json"))
    assert len(fits) == len(notes) == 4
    for victim in (*fits, *notes, tmp_path / "plan.json"):
        good = victim.read_bytes()
        for bad in (good[:-1] + bytes([good[-1] ^ 1]) if victim in fits else b"null", good[: len(good) // 2]):
            victim.write_bytes(bad)
            with pytest.raises(RuntimeError, match=f"{re.escape(str(victim))} is missing or damaged; delete"):
                runs.calibrate(work)
        victim.write_bytes(good)
    runs.calibrate(work)
    notes[-1].unlink()
    with pytest.raises(RuntimeError, match=f"{re.escape(str(notes[-1]))} is missing or damaged; delete"):
        runs.calibrate(work)


def test_a_finished_run_holds_no_activations(model, tmp_path, monkeypatch):
    """Also if it was killed when all was finished but that they are deleted."""
    work, thin = a_run(model, tmp_path, ("aqua-2bit",), samples=4), checkpoint.thin

    def killed(run, layer, depth, last):
        if last:
            raise Killed
        thin(run, layer, depth, last)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(checkpoint, "thin", killed)
        runs.calibrate(work)
    assert list(tmp_path.rglob("*-?????.safetensors"))
    runs.calibrate(work)
    assert not list(tmp_path.rglob("*-?????.safetensors"))
    assert sum(path.stat().st_size for path in tmp_path.rglob("*")) < 1 << 20


def test_what_is_kept_is_read(model, tmp_path, monkeypatch):
    """Hidden states above the last layer, its decoded values, and what nothing predicts from are not written; what is,
    has the dtype that a cache carries."""
    kept, read, decoded, save, load = set(), set(), set(), checkpoint.save, checkpoint.load

    def saving(tensors, path):
        kept.add(_place(path))
        decoded.update(x.dtype for x in tensors.values() if re.search("-(key|value)-", path.name))
        save(tensors, path)

    monkeypatch.setattr(checkpoint, "save", saving)
    monkeypatch.setattr(checkpoint, "load", lambda path, *args: (read.add(_place(path)), load(path, *args))[1])
    runs.calibrate(
        a_run(model, tmp_path, ("aqua-2bit", "aqua-2bit+all.predict.below=1,2", "mean-higgs-2bit"), samples=4)
    )
    assert kept == read and decoded == {torch.bfloat16}
    assert {name for layer, name in kept if layer == "layer-0003"} >= {"aqua-2bit-key-00000.safetensors"}


def _place(path: Path) -> tuple[str, str]:
    return path.parent.name.removesuffix(".partial"), path.name


def test_the_clean_fit_is_no_better_on_decoded_inputs(undisturbed):
    specific, agnostic = (artifact.from_bytes(undisturbed[name]).fit["layers"] for name in ("aqua-2bit", "agnostic"))
    errors = [
        (s["value"]["relative_error"], a["value"]["relative_error"]) for s, a in zip(specific, agnostic, strict=True)
    ]
    assert all(clean >= 0.98 * own for own, clean in errors) and errors[0][0] == errors[0][1]
    assert sum(clean for _, clean in errors) > sum(own for own, _ in errors), "they are the same fit"


def test_the_bits_that_the_fit_finds_are_in_the_recipe(undisturbed):
    """Every layer has its own schedule, with the total that was asked for."""
    made = artifact.from_bytes(undisturbed["svdq-wf-2bit-v4"])
    asked, geometry = preset("svdq-wf-2bit-v4"), made.fingerprint.geometry
    assert sorted(made.recipe.layers) == list(range(geometry.layers))
    schedules = {key.quantize.counts for key, _ in made.recipe.layers.values()}
    assert len(schedules) > 2 and () not in schedules
    for layer in range(geometry.layers):
        for role in ("key", "value"):
            found, wanted = made.recipe.scheme(layer, role), asked.scheme(layer, role)
            assert found.bits(128, geometry) == wanted.bits(128, geometry)
    for layer in made.fit["layers"]:
        assert layer["key"]["relative_error"] < 0.12, "no better than two bits for every channel"


@pytest.mark.parametrize(
    "context, says",
    [
        (torch.device("meta"), "default device meta"),
        (torch.autocast("cpu", dtype=torch.bfloat16), "autocast is on"),
    ],
)
def test_a_caller_s_default_device_and_autocast_are_refused_before_the_work(context, says, model, tmp_path):
    work = a_run(model, tmp_path, ("aqua-2bit",))
    with context, pytest.raises(RuntimeError, match=says):
        runs.calibrate(work)
    assert not (tmp_path / "plan.json").exists()
