"""What `benchmarks/calibration.py encode` times is the full encode, all of it, nothing beside it; and the whole fit."""

from itertools import count

import pytest
import torch

from benchmarks import calibration
from kvq_calib.evaluate.caches import FullCache, attending
from kvq_calib.evaluate.record import load_model
from kvq_calib.model import find as models
from kvq_runtime.recipe import preset

LENGTH, LAYERS = 256, 6


@pytest.fixture(scope="module")
def files():
    return models.resolve("demo")


def ticking():
    """A clock that goes on by 1 whenever it is read."""
    ticks = count()
    return lambda: float(next(ticks))


@torch.inference_mode()
def test_a_timed_cache_gives_what_a_full_encode_gives_and_times_each_layer_once(files):
    model, recipe = load_model(files), preset("higgs-head-2bit")
    tokens_BT = torch.randint(1, 2000, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    timed = calibration.TimedCache(recipe, model, {}, LENGTH, ticking())
    plain = FullCache(recipe, model, length=LENGTH)
    logits = []
    for cache in (timed, plain):
        with attending(model, cache):
            logits.append(model(tokens_BT, past_key_values=cache, use_cache=True).logits)
    assert torch.equal(*logits)
    assert timed.spent == {"encode": LAYERS, "decode": LAYERS}, "one tick a layer, between two looks at the clock"
    assert all(store.encoded == LENGTH for store in timed.blocks.layers.values())


@torch.inference_mode()
def test_recipes_that_choose_are_refused(files):
    with pytest.raises(ValueError, match="subkv-2bit chooses among tokens, or is fitted to its prompt"):
        calibration.TimedCache(preset("subkv-2bit"), load_model(files), {}, LENGTH, ticking())


@pytest.mark.slow
def test_a_row_a_recipe_and_a_row_of_what_all_share(files):
    recipes = [preset(name) for name in ("higgs-head-2bit", "aqua-1bit", "aqua-fisher-1bit")]
    rows = {row["recipe"]: row for row in calibration.encoding(files, recipes, 9, LENGTH, 2, 1, ticking())}
    assert rows.keys() == {"forward", "capture", *(recipe.name for recipe in recipes)}
    assert "fit s" not in rows["higgs-head-2bit"], "there is nothing to fit"
    layers = {"aqua-1bit": LAYERS, "aqua-fisher-1bit": 2 * LAYERS}  # bits that are shared out: a second pass
    for name, passes in layers.items():
        assert rows[name]["fit s"] == rows[name]["fit s least"] == rows[name]["fit s greatest"] == passes
    for recipe in recipes:
        row = rows[recipe.name]
        assert row["encode us"] == row["decode us"] == pytest.approx(1e6 * LAYERS / LENGTH)
    assert rows["forward"]["fit s"] >= 2 * LAYERS and "encode us" not in rows["forward"]
