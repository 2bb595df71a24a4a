"""The table of docs/serve-vllm.md says of every family what this version serves, in vLLM and in LMCache."""

from pathlib import Path

import pytest

from kvq_runtime.engines import nearest
from kvq_runtime.geometry import MODELS
from kvq_runtime.lmcache.served import LMCACHE
from kvq_runtime.recipe import families
from kvq_runtime.vllm.served import VLLM

PAGE = Path(__file__).parents[2] / "docs" / "serve-vllm.md"
SHAPE = MODELS["qwen2.5-7b"]
ENGINES = {"vLLM": VLLM, "LMCache": LMCACHE}


def table() -> str:
    """Families × engines: how many of a family's recipes each serves, and why vLLM not the others."""
    lines = [f"| family | recipes | transformers | {' | '.join(ENGINES)} | why vLLM not the others |", "|---" * 6 + "|"]
    for name, recipes in families().items():
        reasons = {engine: [one.refusal(recipe, SHAPE) for recipe in recipes] for engine, one in ENGINES.items()}
        shares = [_share(found.count(None), len(recipes)) for found in reasons.values()]
        why = dict.fromkeys(reason.partition(" (")[0] for reason in reasons["vLLM"] if reason is not None)
        cells = [name.replace("_", "-"), str(len(recipes)), "all", *shares, "; ".join(why)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _share(kept: int, recipes: int) -> str:
    return "all" if kept == recipes else f"{kept}" if kept else "no"


def test_the_table_is_this_versions():
    assert table() in PAGE.read_text(), f"put this table into {PAGE.name}:\n{table()}"


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
