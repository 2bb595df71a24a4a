"""What is fitted on what: a whole run against numpy, and against runs whose held-out text or sinks were replaced.

Six sequences of two blocks, in chunks of two: four are fitted on, two are held out; the first 4 tokens are sinks.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvq_calib.model import find as models
from kvq_calib.model.streamed import Layer
from kvq_calib.run import calibrate as runs
from kvq_calib.run import plan as plans
from kvq_calib.run.run import Run
from kvq_calib.text import corpus
from kvq_runtime.artifact import artifact
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.artifact.recipe_text import read
from kvq_runtime.geometry import ROLES
from kvq_runtime.hf import KVQCache
from kvq_runtime.recipe import Recipe
from kvq_runtime.recipes import aqua, rtn
from kvq_runtime.stages.predict import Linear
from kvq_runtime.store import block_errors
from kvq_runtime.store.block_errors import BlockErrors

SAMPLES, HELD_OUT, SEQ_LEN, SINKS, GROUP = 6, 2, 256, 4, 16
FITTED = SAMPLES - HELD_OUT
BY_HAND = aqua.aqua("by-hand", rtn.scheme(2, GROUP), rtn.scheme(4, GROUP), "")

Array = np.ndarray


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.save(folder, layers=2)
    tiny.text(folder)
    return folder


def calibrated(model: Path, folder: Path, *recipes: Recipe) -> list[Artifact]:
    files = models.resolve(str(model))
    settings = {"samples": SAMPLES, "seq_len": SEQ_LEN, "held_out": HELD_OUT, "dtype": "float32"}
    made = replace(plans.make(files, recipes, str(model / "corpus.txt"), **settings), chunk=2)
    assert made.fitted_chunks == 2 and len(made.chunks) == 3
    assert all(recipe.window.sinks == SINKS for recipe in recipes)
    return list(runs.calibrate(Run(made, files, folder)).values())


# ---- against numpy


def projections(model: Path) -> list[dict[str, Array]]:
    """Keys before RoPE and values of each layer, [sequences, tokens, channels], as transformers runs the model."""
    tokens = corpus.select(str(model / "corpus.txt"), model, SAMPLES, SEQ_LEN, seed=0).tokens_BT.long()
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found: list[dict[str, Array]] = [{} for _ in whole.model.layers]

    def keep(number: int, role: str) -> Callable:
        return lambda _module, _inputs, out: found[number].update({role: out.detach().numpy()})

    for number, layer in enumerate(whole.model.layers):
        layer.self_attn.k_proj.register_forward_hook(keep(number, "key"))
        layer.self_attn.v_proj.register_forward_hook(keep(number, "value"))
    with torch.no_grad():
        whole(tokens)
    return found


@pytest.fixture(scope="module")
def projected(model) -> list[dict[str, Array]]:
    return projections(model)


@pytest.fixture(scope="module")
def made(model, tmp_path_factory) -> Artifact:
    return calibrated(model, tmp_path_factory.mktemp("run"), BY_HAND)[0]


def bfloat16(x: Array) -> Array:
    """Rounded to bfloat16."""
    return torch.from_numpy(np.ascontiguousarray(x, np.float32)).bfloat16().float().numpy()


def rounded(x: Array, bits: int) -> Array:
    """Rounded to nearest between the ends of each group of 16 channels, which are kept in 16 bits."""
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    low = groups.min(-1, keepdims=True).astype(np.float16).astype(np.float32)
    step = ((groups.max(-1, keepdims=True) - low) / (2**bits - 1)).astype(np.float16).astype(np.float32)
    codes = np.clip(np.round((groups - low) / step), 0, 2**bits - 1)
    return (low + step * codes).reshape(x.shape)


def of_fitted(x: Array) -> Array:
    """The tokens that a fit sees, [tokens, channels], float64: those of the first sequences, without sinks."""
    return x[:FITTED, SINKS:].reshape(-1, x.shape[-1]).astype(np.float64)


def of_held_out(x: Array) -> Array:
    """The tokens that a fit is measured on, likewise."""
    return x[FITTED:, SINKS:].reshape(-1, x.shape[-1]).astype(np.float64)


def predicted(z: Array, tensors: dict[str, Tensor]) -> Array:
    weight, bias = (tensors[name].float().numpy() for name in ("weight", "bias"))
    return bfloat16(z @ weight + bfloat16(bias))


def check(
    found: Artifact, layer: int, role: str, x: Array, inputs: list[Array], fitted_on: list[Array] | None = None
) -> Array:
    """Compare one scheme's tensors and measures with those by hand; returns what is decoded, centred, as inputs are.

    inputs      what its prediction reads: decoded keys and values, centred
    fitted_on   what it is fitted on in their place
    """
    start = f"layers.{layer}.{role}.predict."
    tensors = {name.removeprefix(start): t for name, t in found.tensors.items() if name.startswith(start)}
    mean = of_fitted(x).mean(0)
    np.testing.assert_allclose(tensors["mean"].numpy(), mean, rtol=1e-5, atol=1e-6)
    centred = (x - tensors["mean"].numpy()).astype(np.float32)
    assert sorted(tensors) == (["bias", "mean", "weight"] if inputs else ["mean"])
    if inputs:
        z = np.concatenate(inputs, -1)
        rows, target = of_fitted(np.concatenate(fitted_on or inputs, -1)), of_fitted(centred)
        away, off = rows - rows.mean(0), target - target.mean(0)
        covariance = away.T @ away / len(rows)
        damped = covariance + 1e-3 * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
        weight, stored = np.linalg.solve(damped, away.T @ off / len(rows)), tensors["weight"].double().numpy()
        assert np.linalg.norm(stored - weight) < 2**-8 * np.linalg.norm(weight), (
            "apart by more than bfloat16's rounding"
        )
        np.testing.assert_allclose(tensors["bias"].numpy(), target.mean(0) - rows.mean(0) @ stored, rtol=0, atol=1e-4)
        prediction = predicted(z, tensors)
        decoded = bfloat16(prediction + bfloat16(rounded(centred - prediction, 2)))
    else:
        prediction, decoded = np.zeros_like(centred), rounded(centred, 4)
    energy, variance, left, error = (
        np.square(of_held_out(part)).sum() for part in (x, centred, centred - prediction, centred - decoded)
    )
    noted = found.fit["layers"][layer][role]
    assert noted["mean_energy"] == pytest.approx(1 - variance / energy, rel=1e-5)
    assert noted["explained_variance"] == pytest.approx(1 - left / variance, rel=1e-3)
    assert noted["relative_error"] == pytest.approx(error / variance, rel=2e-4)
    return bfloat16(decoded)


def test_a_run_fits_what_numpy_fits_to_the_decoded_layer_below(projected, made):
    """Means, W and b on the fitted sequences from the sinks on; errors on the held-out ones."""
    first, second = projected
    key = check(made, 0, "key", first["key"], [])
    value = check(made, 0, "value", first["value"], [])
    own = check(made, 1, "key", second["key"], [key])
    check(made, 1, "value", second["value"], [own, value])


@pytest.mark.parametrize("fit, depths", [("clean", 2), pytest.param("decoded", 4, marks=pytest.mark.slow)])
def test_a_prediction_from_some_layers_reads_each_of_them(tmp_path, fit, depths):
    """The topmost layer's; fitted on what is decoded there, or on what it is decoded from, without its mean."""
    (model := tmp_path / "model").mkdir()
    tiny.save(model, layers=depths + 1)
    tiny.text(model)
    scheme = replace(BY_HAND.key, predict=Linear(below=tuple(range(1, depths + 1)), fit=fit))
    (found,) = calibrated(model, tmp_path / "run", replace(BY_HAND, key=scheme, value=scheme))
    exact: dict[str, list[Array]] = {"key": [], "value": []}
    decoded: dict[str, list[Array]] = {"key": [], "value": []}
    for layer, both in enumerate(projections(model)):
        for role, x in both.items():
            exact[role].append(bfloat16(x - found.tensors[f"layers.{layer}.{role}.predict.mean"].numpy()))
        for role, x in both.items():
            inputs, clean = (
                [*([part["key"][layer]] if role == "value" and layer else []), *part[role][:layer][::-1]]
                for part in (decoded, exact)
            )
            decoded[role].append(check(found, layer, role, x, inputs, clean if fit == "clean" else None))


# ---- against runs with something else in the place of what must not count


CHANNEL = "aqua-2bit+key.axis=channel+value.axis=channel"
PRESETS = [read(text) for text in (CHANNEL, "svdq-2bit")]
OTHERS = (BY_HAND, *(replace(one, window=replace(one.window, sinks=SINKS)) for one in PRESETS))


@pytest.fixture(scope="module")
def undisturbed(model, tmp_path_factory) -> list[Artifact]:
    return calibrated(model, tmp_path_factory.mktemp("run"), *OTHERS)


def test_nothing_is_fitted_to_held_out_text(model, undisturbed, tmp_path, monkeypatch):
    """In its place, the same letter over and over: tensors and settings keep their bytes, what is measured does not."""
    select = corpus.select

    def planted(*given):
        batch = select(*given)
        tokens = batch.tokens_BT.clone()
        tokens[FITTED:] = 7
        return replace(batch, tokens_BT=tokens)

    monkeypatch.setattr(corpus, "select", planted)
    for one, other in zip(undisturbed, calibrated(model, tmp_path, *OTHERS), strict=True):
        assert artifact.to_bytes(replace(one, fit={})) == artifact.to_bytes(replace(other, fit={}))
        for layer, changed in zip(one.fit["layers"], other.fit["layers"], strict=True):
            assert all(layer[role]["mean_energy"] != changed[role]["mean_energy"] for role in ("key", "value"))


def test_nothing_depends_on_exact_sinks(model, undisturbed, tmp_path, monkeypatch):
    """Keys and values of a thousand in their place: the artifact keeps its bytes, measures and all."""

    def planted(real: Callable) -> Callable:
        def run(self, *given):
            captured = real(self, *given)
            k_NTC, v_NTC = captured.k_NTC.clone(), captured.v_NTC.clone()
            k_NTC[:, :SINKS], v_NTC[:, :SINKS] = 1e3, -1e3
            return replace(captured, k_NTC=k_NTC, v_NTC=v_NTC)

        return run

    monkeypatch.setattr(Layer, "forward", planted(Layer.forward))
    for one, other in zip(undisturbed, calibrated(model, tmp_path, *OTHERS), strict=True):
        assert artifact.to_bytes(one) == artifact.to_bytes(other), one.recipe.name


# ---- bounds of block errors


def test_bounds_are_of_the_errors_that_a_cache_has_in_the_held_out_sequences(model, made, monkeypatch):
    """Two sequences of two blocks: four errors of keys and of values in each layer, in a cache without a window."""
    tokens = corpus.select(str(model / "corpus.txt"), model, SAMPLES, SEQ_LEN, seed=0).tokens_BT.long()[FITTED:]
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    seen: dict[tuple[int, int], list[float]] = {}
    add, measured = BlockErrors.add, block_errors.block_errors

    def noted(self, layer, role, *given):
        def kept(*gap):
            errors_N = measured(*gap)
            seen.setdefault((layer, role), []).extend(errors_N.tolist())
            return errors_N

        monkeypatch.setattr(block_errors, "block_errors", kept)
        return add(self, layer, role, *given)

    monkeypatch.setattr(BlockErrors, "add", noted)
    cache = KVQCache.from_artifact(replace(made, recipe=made.recipe.with_exact(recent=0)), whole)
    with torch.no_grad():
        whole(tokens, past_key_values=cache)
    assert len(seen) == 2 * len(made.fit["layers"])
    for (layer, role), errors in seen.items():
        logs = np.log(errors)
        limit = logs.mean() + 10.2145 * logs.std(ddof=1) * np.sqrt(1 + 1 / 4)  # t at 0.999, of 3 degrees of freedom
        assert len(errors) == 4
        assert made.fit["layers"][layer][ROLES[role]]["block_error"] == pytest.approx(np.exp(limit), rel=0.02)
