"""Choosing bits by layer: the choice is the best there is, the budget is kept, and what matters more gets more."""

import itertools

import pytest
import torch

from kvq_calib.run import budget
from kvq_calib.run.budget import choose
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import ROLES, Recipe
from kvq_runtime.store.memory import asymptotic_bits
from kvq_runtime.vllm import plugin

GEOMETRY = Geometry(4, 2, 64)

# ---- the knapsack


def tables(seed: int, places: int = 4, options: int = 4) -> tuple[list[list[int]], list[list[float]]]:
    """Costs in no order, errors that need not fall with them."""
    generator = torch.Generator().manual_seed(seed)
    costs = torch.randint(1, 9, (places, options), generator=generator).tolist()
    return costs, torch.rand(places, options, generator=generator).tolist()


def spent(table, picks) -> float:
    return sum(own[pick] for own, pick in zip(table, picks, strict=True))


@pytest.mark.parametrize("scale", [1, 12])
@pytest.mark.parametrize("seed", range(5))
def test_the_choice_is_the_best_of_all(seed, scale):
    costs, errors = tables(seed)
    costs = [[scale * cost for cost in own] for own in costs]
    every = list(itertools.product(range(4), repeat=4))
    least, most = sum(map(min, costs)), sum(map(max, costs))
    for bound in range(least, most + 2 * scale):
        picks = choose(costs, errors, bound)
        possible = [spent(errors, other) for other in every if spent(costs, other) <= bound]
        assert spent(costs, picks) <= bound
        assert spent(errors, picks) == pytest.approx(min(possible), rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_more_bits_never_promise_more_error(seed):
    costs, errors = tables(seed, places=24, options=9)
    bounds = range(sum(map(min, costs)), sum(map(max, costs)) + 1, 5)
    promised = [spent(errors, choose(costs, errors, bound)) for bound in bounds]
    assert promised == sorted(promised, reverse=True) and promised[-1] < promised[0]
    assert promised[-1] == pytest.approx(sum(map(min, errors)))


def test_on_equal_errors_the_cheaper_is_taken():
    assert choose([[4, 2, 3]], [[1.0, 1.0, 1.0]], 9) == [1]


def test_a_budget_below_the_cheapest_is_refused():
    with pytest.raises(ValueError, match="cheapest options cost 5"):
        choose([[2, 9], [3, 9]], [[1.0, 0.0], [1.0, 0.0]], 4)


# ---- bits of a recipe


def curves(weights, keys: float = 3.0) -> list[dict[str, list[float]]]:
    """What measuring would find if every layer's error were its weight times 4^-bits, and that of its keys `keys` times
    as much: own first, as measured."""
    left = [4.0 ** -scheme.bits(128, GEOMETRY) for scheme in budget.served_options(GEOMETRY)]
    more = {"key": keys, "value": 1.0}
    return [{role: [0.0, *(weight * more[role] * part for part in left)] for role in ROLES} for weight in weights]


def bits_of(recipe: Recipe, layer: int) -> float:
    return sum(recipe.scheme(layer, role).bits(128, GEOMETRY) for role in ROLES) / 2


def test_a_layer_a_hundred_times_as_sensitive_gets_more_bits():
    """By theory ½ log₂ 100 = 3.3 bits more; settings are a bit apart, the two dearest four."""
    chosen, _ = budget.allocated(budget.served(3, GEOMETRY), 3, GEOMETRY, curves([1, 1, 100, 1]))
    others = [bits_of(chosen, layer) for layer in (0, 1, 3)]
    assert bits_of(chosen, 2) - max(others) >= 2
    assert max(others) - min(others) <= 1


@pytest.mark.parametrize("keys", [100, 0.01])
def test_what_is_a_hundred_times_as_sensitive_of_a_layer_gets_more_bits(keys):
    """Keys, or values: the same 3.3 bits, in every layer; and what is promised is the error of what was chosen."""
    first, notes = budget.served(3, GEOMETRY), curves([1, 1, 1, 1], keys=keys)
    chosen, promised = budget.allocated(first, 3, GEOMETRY, notes)
    expected = 0.0
    for layer in range(4):
        bits = {role: chosen.scheme(layer, role).bits(128, GEOMETRY) for role in ROLES}
        assert bits["key"] - bits["value"] == pytest.approx(3.32 if keys > 1 else -3.32, abs=1.2)
        expected += keys * 4.0 ** -bits["key"] + 4.0 ** -bits["value"]
    assert promised == pytest.approx(expected)


# ---- for an engine


@pytest.mark.parametrize("asked", [1.25, 2.5, 3.1, 6.0])
def test_what_is_chosen_for_an_engine_can_be_served_by_it(asked):
    """Whatever was measured: every layer, keys and values, from pages of its own."""
    first = budget.served(asked, GEOMETRY)
    chosen, promised = budget.allocated(first, asked, GEOMETRY, curves([1, 3, 0.1, 1]))
    for recipe in (first, chosen):
        assert plugin.refusal(recipe.check(GEOMETRY)) is None
        assert asymptotic_bits(recipe, GEOMETRY) <= asked
    assert asymptotic_bits(chosen, GEOMETRY) > asked - 0.6  # a step between two settings of a layer
    assert promised > 0 and chosen.name == f"auto-{asked:g}bit-vllm" and sorted(chosen.layers) == [0, 1, 2, 3]
    assert Recipe.from_json(chosen.to_json()) == chosen


def test_a_budget_that_an_engine_cannot_have_is_refused():
    with pytest.raises(ValueError, match=r"--bits 0.5; this model, for vllm, can have 1\.\d+ to 8\.\d+"):
        budget.served(0.5, GEOMETRY)


@pytest.mark.parametrize("asked", [0.3, 0.5, 1.25, 2.1, 5.9])
def test_bits_shared_out_by_gradients_are_within_the_budget(asked):
    """All but less than a bit of a token; every scheme is one that calibration shares out."""
    found = budget.shared(asked, GEOMETRY).check(GEOMETRY)
    assert found.name == f"auto-{asked:g}bit" and all(scheme.quantize.shared for scheme in found.schemes)
    spent = found.key.quantize.budget(GEOMETRY.width) + found.key.quantize.gain
    assert asked * GEOMETRY.width - 1 < spent <= asked * GEOMETRY.width


@pytest.mark.parametrize("asked", [0.01, 9.0, float("nan")])
def test_bits_that_a_model_cannot_have_are_refused(asked):
    with pytest.raises(ValueError, match="this model can have"):
        budget.shared(asked, GEOMETRY)
