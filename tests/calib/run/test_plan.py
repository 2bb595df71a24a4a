"""What a plan counts, and which model and texts it is of: names say nothing of what is in files."""

from dataclasses import replace

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from kvq_calib.evaluate.candidate import find
from kvq_calib.model import find as models
from kvq_calib.run import checkpoint
from kvq_calib.run import plan as plans
from kvq_runtime.recipe import preset

AQUA = preset("aqua-2bit")


def made(model, seq_len: int, recipe=AQUA, **settings) -> plans.Plan:
    files = models.resolve(str(model))
    return plans.make(files, (recipe,), str(model / "corpus.txt"), seq_len=seq_len, **settings)


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


def test_keys_of_a_model_with_biases_are_fitted_less_their_mean(tmp_path):
    """What a recipe has no mean for takes one; the candidates that need no fit take the biases themselves."""
    for architecture, biased in (("qwen2", True), ("qwen3", False)):
        files = models.resolve(str(tiny.save(tmp_path / architecture, architecture)))
        plan = plans.make(files, (preset("squat-2bit"),), "demo", 4, 256)
        assert (plan.recipes[0].key.predict is not None) == biased
        candidate = find("higgs-4bit", files)
        assert len(candidate.tensors) == biased * files.geometry.layers
        if biased:
            torch.testing.assert_close(
                candidate.tensors["layers.1.key.predict.mean"],
                files.tensor("model.layers.1.self_attn.k_proj.bias").float(),
            )
