"""What a plan counts, and which model and texts it is of: names say nothing of what is in files."""

from dataclasses import replace

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from kvq_calib.model import find as models
from kvq_calib.run import checkpoint
from kvq_calib.run import plan as plans
from kvq_runtime.recipe import preset

AQUA = preset("aqua-2bit")


def made(model, seq_len: int, recipe=AQUA, **settings) -> plans.Plan:
    files = models.resolve(str(model))
    return plans.make(files, (recipe,), str(model / "corpus.txt"), seq_len=seq_len, **settings)


@pytest.mark.parametrize("held_out, expected", [(20, range(10, 14)), (3, range(10, 12)), (0, range(4))])
def test_settings_are_measured_on_a_few_chunks_that_are_held_out(model, held_out, expected):
    """Four chunks of two sequences, or what is held out, whose last chunk may be shorter."""
    plan = made(model, 4096, samples=20 + held_out, held_out=held_out)
    assert plan.chunk == 2 and plan.measured_chunks == expected


def test_sequences_of_sinks_alone_are_refused(model):
    recipe = replace(AQUA, window=replace(AQUA.window, sinks=130))
    assert made(model, 131, recipe, samples=2).seq_len == 131
    with pytest.raises(ValueError, match="seq_len=130 is shorter"):
        made(model, 130, recipe, samples=2)


def test_another_model_or_text_of_the_same_name_is_another_plan(tmp_path):
    """A training writes to a folder again, or to one of that name elsewhere; the name of a text says as little."""

    def digest(parent: str, seed: int = 0, text: int = 0) -> str:
        folder = tiny.save(tmp_path / parent / "checkpoint-100", seed=seed)
        source = tiny.text(tmp_path, 2000, text)
        files = models.resolve(str(folder))
        return plans.make(files, (AQUA,), str(source), 4, 256).digest

    first = digest("a")
    assert digest("b") == first, "another place, the same bytes"
    assert len({first, digest("a", seed=1), digest("b", text=1)}) == 3


def test_one_matrix_that_changed_is_another_plan(tmp_path):
    folder = tiny.save(tmp_path / "model")
    before = plans.make(models.resolve(str(folder)), (AQUA,), "demo", 4, 256)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1.5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    after = plans.make(models.resolve(str(folder)), (AQUA,), "demo", 4, 256)
    assert after.digest != before.digest and replace(after, weights=before.weights) == before


def test_a_folder_says_that_it_is_of_other_weights(model, tmp_path):
    plan = made(model, 256, samples=4)
    checkpoint.open_run(plan, tmp_path)
    with pytest.raises(ValueError, match=r"\(weights differ\)"):
        checkpoint.open_run(replace(plan, weights="0" * 64), tmp_path)
    with pytest.raises(ValueError, match=r"\(texts differ\)"):
        checkpoint.open_run(replace(plan, texts={}), tmp_path)


def test_the_device_is_told_by_its_own_name(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda device=None: {"cuda:1": "the second"}.get(device, "first")
    )
    assert plans.environment("cuda:1", "float32", 1)["device"] == "the second"


@pytest.mark.parametrize("seed", [-1, 1 << 32])
def test_a_seed_that_not_every_fit_takes_is_refused_before_any(model, seed):
    with pytest.raises(ValueError, match=rf"seed={seed}; use a whole number from 0 to 4294967295"):
        made(model, 256, samples=4, seed=seed)
