"""Bits divided among layers, keys and values: the least there can be, within the budget, and runs that keep it."""

import itertools
import math
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from kvq_calib.cli import calibrate as cli
from kvq_calib.fit import rotate
from kvq_calib.job.job import Job
from kvq_calib.job.prepare import prepare
from kvq_calib.model import find as models
from kvq_calib.run import bit_allocation, checkpoint, gradients, passes
from kvq_calib.run import calibrate as runs
from kvq_calib.run import plan as plans
from kvq_calib.run.bit_allocation import choose
from kvq_calib.run.run import Run
from kvq_runtime.artifact import artifact
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import latent
from kvq_runtime.recipe import ROLES, Recipe, Scheme, preset
from kvq_runtime.stages.latent import Mixed
from kvq_runtime.stages.predict import Linear
from kvq_runtime.stages.rotate import Basis
from kvq_runtime.store.memory import asymptotic_bits
from kvq_runtime.vllm import plugin

GEOMETRY = Geometry(4, 2, 64)
FISHER = "aqua-fisher-1bit"

# ---- the knapsack


def tables(seed: int, places: int = 4, options: int = 4) -> tuple[list[int], list[list[float]]]:
    """Ascending costs, errors that need not fall with them."""
    generator = torch.Generator().manual_seed(seed)
    costs = torch.randint(1, 9, (options,), generator=generator).sort().values.tolist()
    return costs, torch.rand(places, options, generator=generator).tolist()


def spent(errors, picks) -> float:
    return sum(own[pick] for own, pick in zip(errors, picks, strict=True))


@pytest.mark.parametrize("scale", [1, 12])
@pytest.mark.parametrize("seed", range(3))
def test_the_choice_is_the_best_of_all(seed, scale):
    costs, errors = tables(seed)
    costs = [scale * cost for cost in costs]
    every = list(itertools.product(range(4), repeat=4))
    for bound in range(4 * costs[0], 4 * costs[-1] + 2 * scale):
        picks = choose(costs, errors, bound)
        possible = [spent(errors, other) for other in every if sum(costs[pick] for pick in other) <= bound]
        assert sum(costs[pick] for pick in picks) <= bound
        assert spent(errors, picks) == pytest.approx(min(possible), rel=1e-12)


def test_on_equal_errors_the_cheaper_is_taken_and_a_budget_below_the_cheapest_refused():
    assert choose([2, 3, 4], [[1.0, 1.0, 1.0]], 9) == [0]
    with pytest.raises(ValueError, match="cheapest options cost 4"):
        choose([2, 9], [[1.0, 0.0], [1.0, 0.0]], 3)


# ---- the settings of vLLM


def curves(weights, keys: float = 3.0) -> list[dict[str, list[dict[str, float]]]]:
    """What measuring would find if errors were a layer's weight times 4^-bits, and those of keys `keys` times that."""
    left = [4.0 ** -scheme.bits(128, GEOMETRY) for scheme in bit_allocation.vllm_settings(GEOMETRY)]
    more = {"key": keys, "value": 1.0}
    return [{role: [{"nats": weight * more[role] * part} for part in left] for role in ROLES} for weight in weights]


@pytest.mark.parametrize("asked", [1.25, 3.1, 6.0])
def test_what_is_chosen_can_be_served_and_keeps_the_budget(asked):
    first = bit_allocation.auto_vllm_recipe(asked, GEOMETRY)
    found, _ = bit_allocation.chosen(first, asked, GEOMETRY, curves([1, 3, 0.1, 1]))
    for recipe in (first, found):
        plugin.check_recipe(recipe.check(GEOMETRY))
        assert asymptotic_bits(recipe, GEOMETRY) <= asked
    assert asymptotic_bits(found, GEOMETRY) > asked - 0.6  # a step between two settings of a layer
    assert found.name == f"auto-{asked:g}bit-vllm" and Recipe.from_json(found.to_json()) == found


@pytest.mark.parametrize("asked", [0.3, 1.25, 2.1, 5.9])
def test_bits_divided_by_gradients_are_within_the_budget(asked):
    """All but less than a bit of a token; every scheme is one that calibration divides bits for."""
    found = bit_allocation.auto_recipe(asked, GEOMETRY).check(GEOMETRY)
    assert found.name == f"auto-{asked:g}bit" and all(map(plans.divides, found.schemes))
    total = found.key.quantize.budget(GEOMETRY.width) + found.key.quantize.gain
    assert asked * GEOMETRY.width - 1 < total <= asked * GEOMETRY.width


# ---- bits divided by variances


def shared(target: float, width: int = 4, gain: int = 0) -> Scheme:
    return Scheme(Mixed(tuple(range(width, -1, -1)), target=target, gain=gain, shared=True), rotate=Basis())


def test_divided_bits_cost_the_least_that_they_can():
    """Against every way to give 4 places of 2 channels so many bits."""
    geometry, random = Geometry(2, 1, 2), np.random.default_rng(3)
    notes = [{role: sorted(np.exp(3 * random.normal(size=2)), reverse=True) for role in ROLES} for _ in range(2)]
    found = bit_allocation.divided(Recipe("r", shared(2.0), shared(2.0), "pre"), geometry, notes)
    targets = [found.scheme(layer, role).quantize for layer in range(2) for role in ROLES]
    own = [round(stage.target * 2) for stage in targets]
    assert not any(stage.shared for stage in targets) and sum(own) == 16 and min(own) >= 1
    d = [latent.distortion(bits) for bits in range(5)]

    def least(a: float, b: float, total: int) -> float:
        return min(a * d[i] + b * d[j] for i, j in product(range(5), repeat=2) if i + j == total)

    places = [notes[layer][role] for layer in range(2) for role in ROLES]
    table = [[least(a, b, total) for total in range(9)] for a, b in places]
    best = min(spent(table, bits) for bits in product(range(9), repeat=4) if sum(bits) == 16)
    assert spent(table, own) == pytest.approx(best)


def test_a_draft_has_no_gains_and_whole_predictors_where_bits_are_divided():
    four = Linear(storage="gptq4")
    gained = Scheme(Mixed(target=1.0, codebook="trellis", gain=3, shared=True), predict=four, rotate=Basis())
    own = replace(gained, quantize=replace(gained.quantize, shared=False))
    plain = Scheme(Mixed(target=1.0, codebook="trellis", shared=True), predict=Linear(), rotate=Basis())
    found = bit_allocation._drafted(Recipe("r", gained, gained, "pre", {2: (own, gained)}))
    assert found == Recipe("r", plain, plain, "pre", {2: (own, plain)})


# ---- runs


def a_run(model: Path, folder: Path, *recipes: Recipe) -> Run:
    files = models.resolve(str(model))
    made = plans.make(files, recipes, str(model / "corpus.txt"), samples=6, seq_len=256, held_out=2)
    return Run(made, files, folder)


def test_bases_in_another_metric_have_no_bits_to_divide(model, tmp_path):
    scheme = Scheme(Mixed(target=1.0, shared=True), predict=Linear(), rotate=Basis())
    with pytest.raises(ValueError, match="without bases in the metric of gradients"):
        a_run(model, tmp_path, Recipe("other", scheme, scheme, "pre"))


def test_the_draft_is_fitted_to_a_few_sequences_and_its_variances_are_as_of_others(model, tmp_path, monkeypatch):
    """Three of four sequences: what the fourth says changes nothing. A prediction from I inputs, fitted to n tokens,
    leaves 1 - I / n as much of them as of others."""
    monkeypatch.setattr(plans, "BEGINNING", 3 * 256)
    recipe = preset(FISHER)
    whole = a_run(model, tmp_path / "run", recipe, preset("aqua-2bit"))
    stream, tokens_file = runs.start(whole), checkpoint.folder_of(whole.folder, -1) / passes.TOKENS
    first, second = bit_allocation.rounds(whole)
    assert (second.plan, second.folder) == (whole.plan, whole.folder)
    assert [one.name for one in first.plan.recipes] == [FISHER]
    notes = []
    for folder in ("one", "two"):
        part = replace(first, folder=whole.folder / folder)
        runs.start(part)
        runs.fit_layer(part, stream, 0)
        notes.append((checkpoint.record(part.folder, 0) or {})["variances"][FISHER])
        tokens = checkpoint.load(tokens_file)["tokens"].clone()
        tokens[3:] = tokens[3:].flip(1)
        checkpoint.save({"tokens": tokens}, tokens_file)
    assert notes[0] == notes[1]
    (folder := tmp_path / "layer").mkdir()
    collected = runs._capture(part, stream, 1, folder, {})
    _, _, work = runs._fit_recipe(part, stream, 1, part.plan.recipes[0], collected, folder)
    found, width = runs._variances(work, collected), part.plan.geometry.width
    count = 3 * (256 - part.plan.recipes[0].window.sinks)
    for role, inputs in (("key", 2), ("value", 3)):
        moment_HDD = gradients.moment(part, 1, role, recipe)  # type: ignore[arg-type]
        cost = float(moment_HDD.diagonal(dim1=-2, dim2=-1).mean())
        latent_C = work.fits[role].statistics.directions(rotate.metric(recipe.scheme(1, role).rotate))[0]
        assert found[role] == pytest.approx((cost * latent_C / (1 - inputs * width / count)).tolist())


@pytest.mark.slow
def test_what_a_draft_has_found_is_read_once(model, tmp_path):
    """Layers above the first are given what it was: nothing of the draft is looked for again."""
    recipe = preset(FISHER)
    run = a_run(model, tmp_path / "run", recipe)
    stream = runs.start(run)
    draft, last = bit_allocation.rounds(run)
    runs.start(draft)
    for layer in range(3):
        runs.fit_layer(draft, stream, layer)
    expected = runs._divided(last, recipe, 0)
    runs.fit_layer(last, stream, 0)
    shutil.rmtree(draft.folder)
    runs.fit_layer(last, stream, 1)
    fitted = Recipe.from_json((checkpoint.record(run.folder, 1) or {})["recipes"][FISHER])
    for role in ROLES:
        assert fitted.scheme(1, role).quantize.target == expected.scheme(1, role).quantize.target
        assert runs._divided(last, recipe, 2).scheme(2, role) == expected.scheme(2, role)


def asked(model: Path, folder: Path, **settings) -> Job:
    given = {"recipes": ("auto",), "engine": "vllm", "samples": 6, "seq_len": 128, "held_out": 2, "publish": False}
    given |= {"bits": (3.0,), "corpus": str(model / "corpus.txt"), "run": str(folder)} | settings
    return Job(model=str(model), **given)


def test_a_run_for_vllm_measures_every_setting_once_and_chooses(model, tmp_path):
    work, name = prepare(asked(model, tmp_path)), "auto-3bit-vllm"
    made = runs.calibrate(work)[name]
    geometry, settings = work.plan.geometry, bit_allocation.vllm_settings(work.plan.geometry)
    assert asymptotic_bits(made.recipe, geometry) <= 3.0 == made.fit["budget"]["bits"]
    assert made.recipe.position == "post" and sorted(made.recipe.layers) == [0, 1, 2]
    stream = runs.start(work)
    tokens_BT = checkpoint.load(checkpoint.folder_of(work.folder, -1) / passes.TOKENS)["tokens"][4:]
    captured = stream.layer(0).forward(stream.embed(tokens_BT))
    v_NTC = captured.v_NTC[:, 4:].double() - made.tensors["layers.0.value.predict.mean"].double()
    for layer in range(3):
        note = (checkpoint.record(work.folder, layer) or {})["settings"][name]
        for role in ROLES:
            place = settings.index(made.recipe.scheme(layer, role))
            assert made.fit["layers"][layer][role] == note[role][place]
            # the recipe's own fit is one of them
            own = (checkpoint.record(work.folder, layer) or {})["fit"][name][role]
            among = note[role][settings.index(work.plan.recipes[0].scheme(layer, role))]
            assert among["relative_error"] == pytest.approx(own["relative_error"], rel=1e-5)
    # half of E[e M eᵀ], the error being white: its square by the mean of M's diagonal
    cost = float(gradients.moment(work, 0, "value", work.plan.recipes[0]).diagonal(dim1=-2, dim2=-1).mean()) / 2
    measures = made.fit["layers"][0]["value"]
    squared = measures["relative_error"] * float(v_NTC.square().sum(-1).mean())
    assert measures["nats"] == pytest.approx(cost * squared, rel=1e-2)
    assert artifact.to_bytes(runs.artifacts(work)[name]) == artifact.to_bytes(made)


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--recipe", "auto", "--bits", "9"], "--bits 9; this model can have"),
        (["--recipe", "auto", "--bits", "nan"], "can have"),
        (["--recipe", "auto"], "--bits 2.1"),
        (["--bits", "2"], "--recipe auto"),
        (["--recipe", "auto", "--bits", "2", "--bits", "2"], "each once"),
    ],
)
def test_what_cannot_be_is_refused(model, capsys, arguments, says):
    given = ["--model", str(model), "--corpus", str(model / "corpus.txt"), "--samples", "4", "--seq-len", "128"]
    assert cli.main([*given, *arguments]) == 2
    assert says in capsys.readouterr().err


def test_what_an_engine_cannot_serve_is_refused_before_a_run(model, tmp_path):
    with pytest.raises(ValueError, match="cannot serve aqua-2bit"):
        prepare(asked(model, tmp_path, bits=(), recipes=("aqua-2bit",)))
    with pytest.raises(ValueError, match="--for llama.cpp; use one of"):
        prepare(asked(model, tmp_path, engine="llama.cpp"))
    with pytest.raises(ValueError, match="kernels read latents of a basis a head.*use fisher-head-3bit"):
        prepare(asked(model, tmp_path, bits=(), recipes=("aqua-fisher-2bit",), engine="kernel"))


def test_a_budget_for_a_kernel_is_a_basis_of_each_head():
    """Within the budget, gains included, whatever divides it; too little or too much says what can be."""
    made = bit_allocation.auto_kernel_recipe(2.3, GEOMETRY)
    stage, width = made.key.quantize, GEOMETRY.width
    assert made.name == "auto-2.3bit-kernel" and made.key == made.value and made.position == "segment"
    assert stage.budget(width, 2) + 2 * stage.gain == math.floor(2.3 * width)
    with pytest.raises(ValueError, match="this model, for a kernel, can have"):
        bit_allocation.auto_kernel_recipe(0.1, GEOMETRY)
