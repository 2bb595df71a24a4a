"""Activations in memory: the bytes of files, whenever a run is killed, and no more lost than since a checkpoint."""

import re
import shutil
from pathlib import Path

import pytest
import tiny
import torch

from kvq_calib.job.job import Job
from kvq_calib.job.prepare import prepare
from kvq_calib.model import find as models
from kvq_calib.run import calibrate as runs
from kvq_calib.run import checkpoint
from kvq_calib.run import plan as plans
from kvq_calib.run import run as execution
from kvq_calib.run.run import InFiles, InMemory, Run
from kvq_runtime.artifact import artifact
from kvq_runtime.artifact.recipe_text import read

LAYERS = 5
RECIPES = ("aqua-2bit+all.predict.fit=clean+name=agnostic", "aqua-2bit+all.predict.below=1,2")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.save(folder, layers=LAYERS)
    tiny.text(folder)
    return folder


class EachLayer(InMemory):
    """A checkpoint after each layer, however long it takes."""

    def finished(self, run, layer, depth, last):
        self._due = 0.0
        super().finished(run, layer, depth, last)


def a_run(model: Path, folder: Path, held: InFiles, listener=lambda _: None, names=RECIPES) -> Run:
    files = models.resolve(str(model))
    given = {"samples": 6, "seq_len": 256, "held_out": 2}
    made = plans.make(files, tuple(map(read, names)), str(model / "corpus.txt"), **given)
    return Run(made, files, folder, listener, activations=held)


def digests(run: Run) -> dict[str, bytes]:
    return {name: artifact.to_bytes(made) for name, made in runs.calibrate(run).items()}


@pytest.fixture(scope="module")
def of_files(model, tmp_path_factory) -> dict[str, bytes]:
    return digests(a_run(model, tmp_path_factory.mktemp("files"), InFiles()))


class Killed(BaseException):
    """Stands for a process that ends at this point."""


def stop_in(layer: int):
    """A listener that ends the run in a layer."""

    def listen(progress) -> None:
        if progress.layer == layer and progress.stage.endswith("values"):
            raise Killed

    return listen


def chunks_of(folder: Path) -> list[str]:
    """Files of activations, but those that all begins with."""
    found = [path for path in folder.rglob("*-?????.safetensors") if path.parent.name != "layer-start"]
    return [path.name for path in found]


def test_memory_makes_the_bytes_of_files_and_writes_no_activations(model, of_files, tmp_path, monkeypatch):
    written, save = [], checkpoint.save

    def noted(tensors, path):
        written.append(path)
        save(tensors, path)

    monkeypatch.setattr(checkpoint, "save", noted)
    held = InMemory(every=3600)
    assert digests(a_run(model, tmp_path, held)) == of_files
    layers = [path.name for path in written if path.parent.name != "layer-start.partial"]
    assert set(layers) == {"fit.safetensors"} and len(layers) == LAYERS
    assert not held._tensors and not chunks_of(tmp_path)


@pytest.mark.parametrize("again", [InFiles, lambda: InMemory(3600)], ids=["files", "memory"])
def test_killed_after_a_checkpoint_it_goes_on_behind_it_to_the_same_bytes(again, model, of_files, tmp_path):
    begun: list[int] = []
    with pytest.raises(Killed):
        digests(a_run(model, tmp_path, EachLayer(), stop_in(3)))
    assert [path.name for path in tmp_path.glob("kept-*")] == ["kept-0002"] and not [*tmp_path.glob("layer-*/capture*")]
    names = {path.name.partition("-")[0] for path in (tmp_path / "kept-0002").glob("*.safetensors")}
    assert names == {"layer"}  # of layer 1 what layer 3 reads two layers down, of layer 2
    run = a_run(model, tmp_path, again(), lambda said: begun.append(said.layer))
    assert digests(run) == of_files
    assert min(begun) == 3 and not chunks_of(tmp_path) and not [*tmp_path.glob("kept-*")]


def test_what_was_not_written_is_done_again(model, of_files, tmp_path):
    """Layers whose activations a killed process held alone are removed, the last checkpoint before them is taken."""
    begun: list[int] = []
    with pytest.raises(Killed):
        digests(a_run(model, tmp_path, EachLayer(), stop_in(1)))
    with pytest.raises(Killed):
        digests(a_run(model, tmp_path, InMemory(every=3600), stop_in(3)))
    assert (tmp_path / "layer-0002").is_dir() and checkpoint.newest(tmp_path, LAYERS) == 0
    shutil.copytree(tmp_path / "layer-0002", tmp_path / "layer-0002.partial")  # of a rewind that was killed
    assert digests(a_run(model, tmp_path, InMemory(3600), lambda said: begun.append(said.layer))) == of_files
    assert begun[0] == 1


def test_files_of_a_run_that_is_killed_are_taken_into_memory(model, of_files, tmp_path):
    with pytest.raises(Killed):
        digests(a_run(model, tmp_path, InFiles(), stop_in(2)))
    begun: list[int] = []
    assert digests(a_run(model, tmp_path, EachLayer(), lambda said: begun.append(said.layer))) == of_files
    assert begun[0] == 2 and not chunks_of(tmp_path)


@pytest.mark.slow
def test_files_and_then_memory_that_is_lost(model, of_files, tmp_path):
    """The newest checkpoint is the layer's that was in files, if nothing was written after it."""
    with pytest.raises(Killed):
        digests(a_run(model, tmp_path, InFiles(), stop_in(1)))
    with pytest.raises(Killed):
        digests(a_run(model, tmp_path, InMemory(3600), stop_in(3)))
    begun: list[int] = []
    assert digests(a_run(model, tmp_path, InMemory(3600), lambda said: begun.append(said.layer))) == of_files
    assert begun[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("torn", [True, False])
def test_killed_while_an_older_checkpoint_is_removed(torn, model, of_files, tmp_path, monkeypatch):
    """Also one that was removed in part; in memory, in files and in memory again nothing is missed."""
    removed = checkpoint._remove_kept
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(checkpoint, "_remove_kept", lambda *_, **__: None)
        digests(a_run(model, tmp_path, EachLayer(), stop_in(2)))
    assert removed is checkpoint._remove_kept and len([*tmp_path.glob("kept-*")]) == 2
    if torn:
        (tmp_path / "kept-0000" / "done.json").unlink()
    for held, layer in ((InFiles(), 3), (InMemory(3600), 4)):
        with pytest.raises(Killed):
            digests(a_run(model, tmp_path, held, stop_in(layer)))
    assert digests(a_run(model, tmp_path, EachLayer())) == of_files


def test_a_damaged_checkpoint_is_named(model, tmp_path):
    with pytest.raises(Killed):
        digests(a_run(model, tmp_path, EachLayer(), stop_in(2), ("aqua-2bit",)))
    victim = next((tmp_path / "kept-0001").glob("*hidden*"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"x")
    with pytest.raises(RuntimeError, match=f"{re.escape(str(victim))} is missing or damaged; delete"):
        digests(a_run(model, tmp_path, InMemory(), names=("aqua-2bit",)))


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_the_same_command_goes_on(model, tmp_path, monkeypatch):
    names = ("aqua-2bit",)
    whole = digests(a_run(model, tmp_path / "whole", InMemory(), names=names))

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(checkpoint, "keep", full)
        digests(a_run(model, tmp_path / "full", EachLayer(), names=names))
    assert not [*(tmp_path / "full").glob("kept-*")]
    assert digests(a_run(model, tmp_path / "full", InMemory(), names=names)) == whole


def test_a_checkpoint_is_not_written_more_often_than_its_share_allows(tmp_path, monkeypatch):
    now, taken = [0.0], []
    monkeypatch.setattr(execution.time, "monotonic", lambda: now[0])

    def keep(run, layer, held):
        taken.append(layer)
        now[0] += 30.0

    monkeypatch.setattr(checkpoint, "keep", keep)
    held = InMemory(every=300)
    for layer in range(20):
        held.save({"hidden": torch.zeros(2)}, tmp_path / f"layer-{layer:04d}.partial" / "hidden-00000.safetensors")
        now[0] += 100.0
        held.finished(tmp_path, layer, 1, last=False)
    assert taken == [2, 8, 14]  # after 300 s, then after 19 times the 30 s that one takes
    assert [path.name for path in held._tensors] == ["hidden-00000.safetensors"], "of the newest layer alone"


def a_job(model, folder, **settings) -> Job:
    text = {"corpus": str(model / "corpus.txt"), "samples": 6, "seq_len": 256, "held_out": 2}
    return Job(str(model), run=str(folder), **text, **settings)


@pytest.mark.parametrize(
    "given, kind",
    [({}, InMemory), ({"checkpoint_every": 60.0}, InMemory), ({"checkpoint_every": 0.0}, InFiles),
     ({"workers": 2}, InFiles)],
)  # fmt: skip
def test_where_activations_are_held(given, kind, model, tmp_path):
    assert type(prepare(a_job(model, tmp_path, **given)).activations) is kind


def test_they_are_files_where_memory_has_no_room(model, tmp_path, monkeypatch):
    job = a_job(model, tmp_path)
    needs = prepare(job).plan.needs(models.resolve(str(model)))
    for room, kind in ((1.1, InMemory), (0.9, InFiles)):
        free = 2 * room * (2 * needs["held"] + needs["layer"] + needs["chunk"])
        monkeypatch.setattr("psutil.virtual_memory", lambda free=free: type("Memory", (), {"available": free}))
        assert type(prepare(job).activations) is kind
