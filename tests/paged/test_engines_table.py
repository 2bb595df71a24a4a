"""The table of docs/serve-vllm.md says of every family what this version serves."""

from pathlib import Path

from kvq_runtime.geometry import MODELS
from kvq_runtime.recipe import families
from kvq_runtime.vllm import served

PAGE = Path(__file__).parents[2] / "docs" / "serve-vllm.md"
SHAPE = MODELS["qwen2.5-7b"]


def table() -> str:
    """Families × engines: how many of a family's recipes vLLM serves, and why not the others."""
    lines = ["| family | recipes | transformers | vLLM | why not the others |", "|---|---|---|---|---|"]
    for name, recipes in families().items():
        reasons = [served.refusal(recipe, SHAPE) for recipe in recipes]
        why = dict.fromkeys(reason.partition(" (")[0] for reason in reasons if reason is not None)
        kept = reasons.count(None)
        share = "all" if kept == len(recipes) else f"{kept}" if kept else "no"
        lines.append(f"| {name.replace('_', '-')} | {len(recipes)} | all | {share} | {'; '.join(why)} |")
    return "\n".join(lines)


def test_the_table_is_this_versions():
    assert table() in PAGE.read_text(), f"put this table into {PAGE.name}:\n{table()}"


def test_the_nearest_recipe_can_be_served():
    """For every recipe that is refused, one that is not, needs no calibration, and has bits like its own."""
    plain = served.plain(SHAPE)
    assert all(served.refusal(recipe, SHAPE) is None and not recipe.fitted for recipe in plain)
    for recipe in (recipe for recipes in families().values() for recipe in recipes):
        if served.refusal(recipe, SHAPE) is not None:
            near, wanted = served.nearest(recipe, SHAPE), served.bits(recipe.of_vocabulary(1 << 17), SHAPE)
            assert near in plain
            assert abs(served.bits(near, SHAPE) - wanted) < 1.1 or wanted > 5  # there is little between 5 and 16 bits
