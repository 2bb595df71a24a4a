"""Whatever an engine refuses, it names a recipe near to it that it serves."""

import pytest

from kvq_runtime.engines import nearest
from kvq_runtime.geometry import MODELS
from kvq_runtime.lmcache.served import LMCACHE
from kvq_runtime.recipe import families
from kvq_runtime.vllm.served import VLLM

SHAPE = MODELS["qwen2.5-7b"]
ENGINES = {"vLLM": VLLM, "LMCache": LMCACHE}


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_the_nearest_recipe_can_be_served(engine):
    """For every recipe that is refused, one that is not, needs no calibration, and has bits like its own."""
    plain = nearest.plain(engine, SHAPE)
    assert all(engine.refusal(recipe, SHAPE) is None and not recipe.fitted for recipe in plain)
    offered = {nearest.bits(recipe, SHAPE) for recipe in plain}
    for recipe in (recipe for recipes in families().values() for recipe in recipes):
        if engine.refusal(recipe, SHAPE) is not None:
            near, wanted = nearest.nearest(engine, recipe, SHAPE), nearest.bits(recipe.of_vocabulary(1 << 17), SHAPE)
            assert near in plain
            assert all(abs(nearest.bits(near, SHAPE) - wanted) <= abs(bits - wanted) for bits in offered)
            assert abs(nearest.bits(near, SHAPE) - wanted) < 1.1 or 5 < wanted < 16  # where there is little
