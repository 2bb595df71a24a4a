"""Whatever an engine refuses, it names a recipe near to it that it serves."""

import pytest

from kvq_runtime.engines import source
from kvq_runtime.geometry import MODELS
from kvq_runtime.lmcache.chunk import LMCACHE
from kvq_runtime.recipe import families
from kvq_runtime.vllm.served import VLLM

SHAPE = MODELS["qwen2.5-7b"]
ENGINES = {"vLLM": VLLM, "LMCache": LMCACHE}


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_the_nearest_recipe_can_be_served(engine):
    """For every recipe that is refused, one that is not, needs no calibration, and has bits like its own."""
    plain = engine.plain(SHAPE)
    assert all(engine.refusal(recipe) is None and not recipe.fitted for recipe in plain)
    offered = {source.bits(recipe, SHAPE) for recipe in plain}
    for recipe in (recipe for recipes in families().values() for recipe in recipes):
        if engine.refusal(recipe) is not None:
            near, wanted = engine.nearest(recipe, SHAPE), source.bits(recipe.of_vocabulary(1 << 17), SHAPE)
            assert near in plain
            assert all(abs(source.bits(near, SHAPE) - wanted) <= abs(bits - wanted) for bits in offered)
            assert abs(source.bits(near, SHAPE) - wanted) < 1.1 or 5 < wanted < 16  # where there is little
