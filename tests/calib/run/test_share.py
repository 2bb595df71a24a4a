"""Bits shared out among layers, keys and values: costs by hand, the least there can be, a run that meets its sum."""

import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from kvq_calib.fit import rotate
from kvq_calib.fit.scheme import Known
from kvq_calib.fit.statistics import LayerQueries
from kvq_calib.model import find as models
from kvq_calib.run import budget, checkpoint, passes, share
from kvq_calib.run import calibrate as runs
from kvq_calib.run import plan as plans
from kvq_calib.run.run import Run
from kvq_runtime.artifact import artifact
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import latent
from kvq_runtime.recipe import ROLES, Recipe, Role, Scheme, preset
from kvq_runtime.stages.latent import Mixed
from kvq_runtime.stages.predict import Linear, Mean
from kvq_runtime.stages.rotate import Basis, OutputBasis, QueryBasis
from kvq_runtime.store.memory import asymptotic_bits

GEOMETRY = Geometry(2, 2, 4)


def shared(target: float, width: int = 4, gain: int = 0) -> Scheme:
    return Scheme(Mixed(tuple(range(width, -1, -1)), target=target, gain=gain, shared=True), rotate=Basis())


def test_a_cost_is_what_noise_adds_to_the_stream():
    """Noise on values through W, and noise on keys through scores that move attention among values: by hand."""
    random = np.random.default_rng(0)
    weight, energy = random.normal(size=(24, 16)), 7.0  # two query heads to a KV head of 4 channels
    queries = random.normal(size=(500, 4, 4)) * [1, 2, 3, 4]
    values = random.normal(size=(4000, 8)) * np.arange(1, 9)
    moment = np.stack([np.einsum("nhi,nhj->ij", q, q) / q.shape[0] / 2 for q in (queries[:, :2], queries[:, 2:])])
    summed = LayerQueries(torch.tensor(moment), torch.tensor(moment), 0.0, (torch.ones(0), torch.ones(0)))
    found = share.costs(torch.tensor(weight), summed, torch.tensor(values.var(0)), energy, GEOMETRY)
    parts = [weight[:, 4 * head : 4 * head + 4] for head in range(4)]
    noise = random.normal(size=(200_000, 8))  # of variance 1 in every channel
    added = [np.square(noise[:, head // 2 * 4 :][:, :4] @ parts[head].T).sum(1).mean() for head in range(4)]
    assert found["value"] == pytest.approx(sum(added) / 8 / energy, rel=0.02)
    spread = [(values[:, head // 2 * 4 :][:, :4].var(0) * np.square(parts[head]).sum(0)).sum() for head in range(4)]
    scores = [np.square(queries[:, head] @ noise[:500, head // 2 * 4 :][:, :4].T).mean() / 4 for head in range(4)]
    assert found["key"] == pytest.approx(np.mean(spread) * sum(scores) / 8 / energy, rel=0.1)


def test_shared_bits_cost_the_least_that_they_can():
    """Against every way to give 4 places of 2 channels so many bits."""
    geometry, random = Geometry(2, 1, 2), np.random.default_rng(3)
    notes = [{role: sorted(np.exp(3 * random.normal(size=2)), reverse=True) for role in ROLES} for _ in range(2)]
    recipe = Recipe("r", shared(2.0), shared(2.0), "pre")
    found = share.shared_out(recipe, geometry, notes)
    targets = [found.scheme(layer, role).quantize for layer in range(2) for role in ROLES]
    assert not any(stage.shared for stage in targets)
    own = [round(stage.target * 2) for stage in targets]
    assert sum(own) == 16 and min(own) >= 1
    d = [latent.distortion(bits) for bits in range(5)]
    places = [notes[layer][role] for layer in range(2) for role in ROLES]
    curves = [  # least cost of a place by its bits
        {
            total: min(a * d[i] + b * d[j] for i, j in product(range(5), repeat=2) if i + j == total)
            for total in range(9)
        }
        for a, b in places
    ]
    best = min(
        sum(curve[bits] for curve, bits in zip(curves, split, strict=True))
        for split in product(range(9), repeat=4)
        if sum(split) == 16
    )
    assert sum(curve[bits] for curve, bits in zip(curves, own, strict=True)) == pytest.approx(best)


def test_a_place_that_is_worth_nothing_still_stores_a_bit_and_only_what_is_shared_changes():
    geometry = Geometry(2, 1, 8)
    alone = Scheme(Mixed(target=4.0), rotate=Basis())
    recipe = Recipe("r", shared(1.0, gain=3), shared(1.0, gain=3), "pre", {0: (alone, shared(1.0, gain=3))})
    notes = [{"value": [1e-30] * 8}, {"key": [9.0] * 8, "value": [4.0] * 8}]
    found = share.shared_out(recipe, geometry, notes)
    assert found.scheme(0, "key") == alone
    own = [found.scheme(*place).quantize for place in ((0, "value"), (1, "key"), (1, "value"))]
    assert own[0].budget(8) == 1 and sum(stage.budget(8) for stage in own) == 3 * (8 - 3)
    assert sum(stage.target for stage in own) == pytest.approx(3.0)


def test_a_draft_has_no_gains_and_whole_predictors_where_bits_are_shared():
    """Keys, values and single layers alike; what has a target of its own stays as it is."""
    four = Linear(storage="gptq4")
    gained = Scheme(Mixed(target=1.0, codebook="trellis", gain=3, shared=True), predict=four, rotate=Basis())
    own = replace(gained, quantize=replace(gained.quantize, shared=False))
    plain = Scheme(Mixed(target=1.0, codebook="trellis", shared=True), predict=Linear(), rotate=Basis())
    found = share.drafted(Recipe("r", gained, gained, "pre", {2: (own, gained), 3: (plain, plain)}))
    assert found == Recipe("r", plain, plain, "pre", {2: (own, plain), 3: (plain, plain)})


def test_a_recipe_is_fitted_beside_another_as_alone(model, tmp_path):
    two, three = (preset(f"aqua-fisher-{bits}bit") for bits in (2, 3))
    both = runs.calibrate(a_run(model, tmp_path / "both", two, three))
    alone = runs.calibrate(a_run(model, tmp_path / "alone", three))
    assert artifact.to_bytes(both[three.name]) == artifact.to_bytes(alone[three.name])


def test_what_another_fit_has_summed_changes_next_to_nothing(model, tmp_path, monkeypatch):
    recipe, known = preset("aqua-fisher-2bit"), []
    moment = passes.RecipeWork.known

    def seen(work: passes.RecipeWork, role: Role) -> Known | None:
        known.append(moment(work, role))
        return known[-1]

    monkeypatch.setattr(passes.RecipeWork, "known", seen)
    found = runs.calibrate(a_run(model, tmp_path / "known", recipe))[recipe.name]
    places = [[] if one is None else [*one.places] for one in known[len(known) // 2 :]]
    assert places[:4] == [[], [], [], [(1, "key"), (1, "value")]]  # layers 0 and 1
    assert places[4] == [(1, "key"), (2, "value"), (2, "key")] and len(places[5]) == 4  # values 1 below are new
    monkeypatch.setattr(passes.RecipeWork, "known", lambda work, role: None)
    expected = runs.calibrate(a_run(model, tmp_path / "summed", recipe))[recipe.name]
    assert found.recipe == expected.recipe and found.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        if tensor.dtype == torch.uint8:  # codes on the edge between two may fall on either side
            assert (found.tensors[name] != tensor).float().mean() < 0.05, name
        else:
            torch.testing.assert_close(found.tensors[name].float(), tensor.float(), rtol=1e-2, atol=1e-3)


def test_the_draft_is_fitted_to_a_few_sequences_and_by_what_shares_alone(model, tmp_path, monkeypatch):
    """Three of four sequences: what the fourth says changes nothing of the draft, nor do those held out."""
    monkeypatch.setattr(plans, "BEGINNING", 3 * 256)
    other = preset("aqua-2bit")
    whole = a_run(model, tmp_path / "run", everywhere("shared-1bit", 1.0), other)
    stream, changed = runs.start(whole), checkpoint.folder_of(whole.folder, -1) / passes.TOKENS
    first, second, *more = budget.rounds(whole)
    assert not more and (second.plan, second.folder) == (whole.plan, whole.folder)
    assert [recipe.name for recipe in first.plan.recipes] == ["shared-1bit"]
    notes = []
    for folder in ("one", "two"):
        part = replace(first, folder=whole.folder / folder)
        runs.start(part)
        runs.fit_layer(part, stream, 0)
        notes.append((checkpoint.record(part.folder, 0) or {})["variances"]["shared-1bit"])
        tokens = checkpoint.load(changed)["tokens"].clone()
        tokens[3:] = tokens[3:].flip(1)
        checkpoint.save({"tokens": tokens}, changed)
    assert notes[0] == notes[1]


def test_what_a_prediction_leaves_is_counted_as_of_tokens_that_it_has_not_seen(model, tmp_path):
    """Least squares to n tokens leaves 1 - I / n as much of them as of others, of I inputs: by hand."""
    recipe = everywhere("shared-1bit", 1.0)
    whole = a_run(model, tmp_path / "run", recipe)
    stream, part = runs.start(whole), next(budget.rounds(whole))
    runs.start(part)
    (folder := tmp_path / "layer").mkdir()
    runs.fit_layer(part, stream, 0)
    collected = runs._capture(part, stream, 1, folder, {})
    _, _, work = runs._fit_recipe(part, stream, 1, recipe, collected, folder)
    found = runs._variances(work, collected)
    count, width = 4 * (256 - 4), part.plan.geometry.width
    weight = part.files.tensor("model.layers.1.self_attn.o_proj.weight")
    assert collected.queries is not None
    variance_C = collected.moments[4][1].variance_C
    cost = share.costs(weight, collected.queries, variance_C, collected.energy, part.plan.geometry)
    for role, inputs in (("key", 2), ("value", 3)):
        latent_C = work.fits[role].statistics.directions(rotate.metric(recipe.scheme(1, role).rotate))[0]
        expected = (cost[role] * latent_C / (1 - inputs * width / count)).tolist()
        assert found[role] == pytest.approx(expected)  # type: ignore[index]


def test_what_a_draft_has_found_is_read_once(model, tmp_path):
    """Layers above the first are given what it was: nothing of the draft is looked for again."""
    recipe = everywhere("shared-1bit", 1.0)
    run = a_run(model, tmp_path / "run", recipe)
    rounds = budget.rounds(run)
    stream, draft = runs.start(run), next(rounds)
    runs.start(draft)
    for layer in range(3):
        runs.fit_layer(draft, stream, layer)
    given = budget.given(run, recipe, 0)
    runs.fit_layer(run, stream, 0)
    shutil.rmtree(draft.folder)
    runs.fit_layer(run, stream, 1)
    fitted = Recipe.from_json((checkpoint.record(run.folder, 1) or {})["recipes"]["shared-1bit"])
    for role in ROLES:
        assert fitted.scheme(1, role).quantize.target == given.scheme(1, role).quantize.target
        assert budget.given(run, recipe, 2).scheme(2, role) == given.scheme(2, role)


def test_there_must_be_a_target_to_share():
    with pytest.raises(ValueError, match="no target to share"):
        Mixed(shared=True)


def everywhere(name: str, target: float) -> Recipe:
    stage = Mixed(target=target, gain=3, shared=True)
    predict = Linear(both=True)
    key, value = (Scheme(stage, predict=predict, rotate=rotate) for rotate in (QueryBasis(), OutputBasis()))
    first = tuple(replace(scheme, predict=Mean()) for scheme in (key, value))
    return Recipe(name, key, value, "pre", {0: first}, "shared")  # type: ignore[dict-item]


def a_run(model: Path, folder: Path, *recipes: Recipe) -> Run:
    files = models.resolve(str(model))
    made = plans.make(files, recipes, str(model / "corpus.txt"), samples=6, seq_len=256, held_out=2)
    return Run(made, files, folder)


def test_the_energy_of_the_stream_leaves_massive_activations_of_sinks_out(model, tmp_path, monkeypatch):
    """In a real model the first token's is tens of thousands of times that of others."""
    run = a_run(model, tmp_path / "run", everywhere("shared-1bit", 1.0))
    stream, energies, under = runs.start(run), [], passes.under

    def massive(of, stream, layer, index):
        hidden = under(of, stream, layer, index)
        if index < run.plan.fitted_chunks:
            energies.append(hidden[:, 4:].double().square().sum(-1).flatten())
        hidden[:, :4] *= 300
        return hidden

    monkeypatch.setattr(passes, "under", massive)
    (folder := tmp_path / "layer").mkdir()
    collected = runs._capture(run, stream, 0, folder, {})
    assert collected.energy == pytest.approx(float(torch.cat(energies).mean()), rel=1e-6)


@pytest.mark.slow
def test_a_run_meets_the_sum_and_fits_every_place_with_its_part(model, tmp_path):
    recipe = everywhere("shared-1bit", 1.0)
    made = runs.calibrate(a_run(model, tmp_path / "one", recipe))["shared-1bit"]
    geometry = made.fingerprint.geometry
    stages = [made.recipe.scheme(layer, role).quantize for layer in range(3) for role in ROLES]
    assert asymptotic_bits(made.recipe, geometry) == asymptotic_bits(recipe, geometry) == pytest.approx(1.0)
    assert len({stage.target for stage in stages}) > 1 and not any(stage.shared for stage in stages)
    assert made.tensors["layers.1.key.predict.weight"].shape[0] == 2 * geometry.width
    assert "layers.1.key.rotate.dual" in made.tensors and "layers.2.value.quantize.gain_ends" in made.tensors
    again = runs.calibrate(a_run(model, tmp_path / "two", recipe))["shared-1bit"]
    assert artifact.to_bytes(again) == artifact.to_bytes(made)
    other = everywhere("shared-2bit", 2.0)
    among = runs.calibrate(a_run(model, tmp_path / "three", other, recipe))
    assert artifact.from_bytes(artifact.to_bytes(among["shared-1bit"])).recipe == made.recipe
