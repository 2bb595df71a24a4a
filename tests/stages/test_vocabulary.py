"""The first layer by token: the nearest row is found, packed and read back; a calibrated table is the model's own."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file

from kvq_calib.fit import fitted_codebook as fit
from kvq_calib.model import find as models
from kvq_calib.run import calibrate as runs
from kvq_calib.run import plan as plans
from kvq_calib.run.run import Run
from kvq_calib.text import corpus
from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.codec.shared import build
from kvq_runtime.fit.statistics import Statistics
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe, Scheme
from kvq_runtime.stages import fitted_codebook
from kvq_runtime.stages.fitted_codebook import Vocabulary
from kvq_runtime.stages.predict import Mean
from kvq_runtime.stages.rotate import Hadamard
from kvq_runtime.stages.rtn import Rtn
from kvq_runtime.stages.stage import Site

GEOMETRY = Geometry(1, 2, 8)


@pytest.mark.parametrize("size, bits", [(3, 2), (256, 8), (1000, 10), (70_000, 17)])
def test_the_nearest_row_is_stored_in_as_few_bits_as_number_it(size, bits, monkeypatch):
    """Against numpy's distances, over products of several parts; single tokens and whole blocks read the same rows."""
    monkeypatch.setattr(fitted_codebook, "ROWS", 300)
    stage, random = Vocabulary(size), torch.Generator().manual_seed(size)
    table = torch.randn(size, 16, generator=random).bfloat16()
    ids = torch.randint(size, (2, 24), generator=random)
    x = table[ids].float() + 0.05 * torch.randn(2, 24, 16, generator=random)
    fields = stage.encode(x, None, {"table": table}, GEOMETRY)
    assert {name: (tuple(f.shape[1:]), f.dtype) for name, f in fields.items()} == stage.fields(
        24, 16, GEOMETRY, torch.bfloat16
    )
    assert fields["ids"].shape[1] * 8 == 24 * bits
    decoded = stage.decode(fields, 16, GEOMETRY, {"table": table})
    rows = table.float().numpy()
    nearest = [[np.square(rows - token).sum(1).argmin() for token in block] for block in x.numpy()]
    assert np.array_equal(decoded.float().numpy(), rows[np.array(nearest)])
    block, token = torch.tensor([1, 0, 1]), torch.tensor([0, 23, 13])
    assert torch.equal(stage.at(fields, block, token, 24, 16, {"table": table}), decoded[block, token])


@pytest.mark.parametrize("width", [16, 64, 96])
def test_a_table_in_four_bits_is_each_row_rounded_in_runs_of_64(width):
    """By numpy: 16 levels from the least to the largest of a run; the nearest of these rows is stored and read back."""
    geometry, random = Geometry(1, 1, width), torch.Generator().manual_seed(width)
    table = 3 * torch.randn(500, width, generator=random) + 1
    scheme = Scheme(Vocabulary(storage="rtn4"))
    recipe = Recipe("packed", scheme, scheme, "pre")
    codec = Codec(recipe, 0, "key", geometry, {})
    stage, tensors = fit.solve(scheme.quantize, Statistics(torch.zeros(width), {fit.EveryToken(): table}), codec)
    assert stage.size == 500
    site = Site(scheme, "key", 0, "pre", recipe.window)
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == stage.tensors(site, geometry)
    held = sum(t.numel() * t.element_size() for t in tensors.values())
    assert held == 500 * (-(-width // 64)) * (min(64, width) // 2 + 4)
    rows = np.concatenate([levels(run) for run in np.split(table.numpy(), range(64, width, 64), axis=1)], axis=1)
    ids = torch.randint(500, (2, 24), generator=random)
    fields = stage.encode(table[ids], None, tensors, geometry)
    decoded = stage.decode(fields, width, geometry, tensors)
    nearest = [[np.square(rows - token).sum(1).argmin() for token in block] for block in table[ids].numpy()]
    np.testing.assert_allclose(decoded.float().numpy(), rows[np.array(nearest)], rtol=2**-7, atol=2**-7)
    assert torch.equal(stage.at(fields, torch.tensor([1]), torch.tensor([5]), 24, width, tensors), decoded[1, 5:6])


def levels(run_VC: np.ndarray) -> np.ndarray:
    """Each row at the nearest of 16 even levels between its least and its largest number, those in float16."""
    low = run_VC.min(1, keepdims=True).astype(np.float16).astype(np.float32)
    step = ((run_VC.max(1, keepdims=True) - low) / 15).astype(np.float16).astype(np.float32)
    return low + step * np.clip(np.rint((run_VC - low) / step), 0, 15)


def test_a_storage_that_there_is_none_of_is_refused():
    with pytest.raises(ValueError, match="storage='int8'; use one of .*rtn4"):
        Vocabulary(storage="int8")


@pytest.mark.parametrize(
    ("scheme", "position", "message"),
    [
        (Scheme(Vocabulary(), predict=Mean()), "post", 'use position "pre"'),
        (Scheme(Vocabulary(), rotate=Hadamard()), "pre", "needs no rotation"),
        (Scheme(Vocabulary(), axis="channel"), "pre", "needs no rotation"),
    ],
)
def test_where_it_cannot_be(scheme, position, message):
    with pytest.raises(ValueError, match=message):
        Recipe("r", scheme, scheme, position).check(GEOMETRY)


def test_it_is_of_the_first_layer_alone():
    scheme = Scheme(Vocabulary(), predict=Mean())
    with pytest.raises(ValueError, match="layer 1 key: only the first layer"):
        Recipe("r", scheme, scheme, "pre").check(replace(GEOMETRY, layers=2))
    with pytest.raises(ValueError, match="use 2 to 262144 tokens"):
        Vocabulary(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.save(folder, layers=2)
    tiny.text(folder)
    return folder


@pytest.mark.parametrize("predicted, storage", [(True, "bf16"), (False, "bf16"), (True, "rtn4")])
def test_a_calibrated_table_is_the_norm_and_projection_of_every_embedding(model, tmp_path, predicted, storage):
    """By hand from the weights; and the first layer of a text is decoded to what it was, by its own tokens."""
    files = models.resolve(str(model))
    first = Scheme(Vocabulary(storage=storage), predict=Mean() if predicted else None)
    recipe = Recipe("by-token", Scheme(Rtn(4, 16)), Scheme(Rtn(4, 16)), "pre", {0: (first, first)}, "tokens")
    plan = plans.make(files, (recipe,), str(model / "corpus.txt"), samples=4, seq_len=256, held_out=0)
    made = runs.calibrate(Run(plan, files, tmp_path / "run"))["by-token"]
    weights = {n: t.double().numpy() for n, t in load_file(files.path / "model.safetensors").items()}
    embedding = weights["model.embed_tokens.weight"]
    assert made.recipe.scheme(0, "key").quantize.size == len(embedding)
    start, epsilon = "model.layers.0.", files.config["rms_norm_eps"]
    normed = embedding / np.sqrt(np.square(embedding).mean(1, keepdims=True) + epsilon)
    normed = normed * weights[start + "input_layernorm.weight"]
    tokens = corpus.select(str(model / "corpus.txt"), files.path, 2, 256, seed=5).tokens_BT.numpy()
    codecs = build(made.recipe, files.geometry, made.tensors)[0]
    for codec, role, name in zip(codecs, ("key", "value"), ("k_proj", "v_proj"), strict=True):
        by_hand = normed @ weights[f"{start}self_attn.{name}.weight"].T
        by_hand = by_hand + weights.get(f"{start}self_attn.{name}.bias", 0.0)
        mean = made.tensors[f"layers.0.{role}.predict.mean"].double().numpy() if predicted else 0.0
        quantizer = codec.scheme.quantize
        assert isinstance(quantizer, Vocabulary)
        table = quantizer.rows(codec.fitted, files.geometry.width, slice(None))
        off = np.abs(table.double().numpy() - (by_hand - mean)).max(1)
        exact = 2**-8 * np.abs(by_hand - mean).max(1)
        assert (off <= exact + (np.ptp(by_hand - mean, axis=1) / 29 if storage == "rtn4" else 1e-4)).all()
        x = torch.tensor(by_hand[tokens]).float().view(-1, 128, files.geometry.width)
        decoded = codec.restore(codec.decode(codec.encode(x, Context()), Context()).float(), Context())
        bound = 2**-16 if storage == "bf16" else 0.005
        assert float((decoded - x).square().sum() / x.square().sum()) < bound
