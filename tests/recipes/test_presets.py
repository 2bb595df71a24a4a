"""What presets' names stand for never changes, since artifacts, plans and published figures are known by them; and
settings of the papers, held against what the papers say: bits by hand, windows, what is exact.
"""

import json
from dataclasses import replace

import pytest

from kvq_runtime.artifact.recipe_text import read
from kvq_runtime.geometry import MODELS, ROLES, Geometry
from kvq_runtime.recipe import Window, preset, presets
from kvq_runtime.stages.exact import Exact
from kvq_runtime.store.memory import asymptotic_bits, scheme_bits
from scripts import make_golden

DIGESTS = json.loads(make_golden.PRESETS.read_text())
QWEN, LLAMA = MODELS["qwen2.5-7b"], MODELS["llama-3.1-8b"]


def test_every_preset_is_what_it_was_and_a_new_one_is_written_down():
    """After a new preset: run scripts/make_golden.py. A line that would have to change means another name."""
    found = {name: make_golden.digest(recipe) for name, recipe in presets().items()}
    assert {name: DIGESTS.get(name) for name in found} == found
    assert DIGESTS.keys() == found.keys()


def bits(name: str, geometry: Geometry = LLAMA, layer: int = 1) -> list[float]:
    """Of keys and of values."""
    return [scheme_bits(read(name), layer, role, geometry) for role in ROLES]


def test_aqua_keeps_qwens_first_layer_exact():
    name, width = "aqua-2bit-first-16bit", 2
    assert all(scheme.quantize == Exact() and scheme.predict is None for scheme in preset(name).layers[0])
    rest = width + 16 / QWEN.width  # one scale a token
    assert asymptotic_bits(preset(name), QWEN) == pytest.approx((27 * rest + 16) / 28)
    assert preset(name).key == preset("aqua-2bit").key


@pytest.mark.parametrize("online", ["on", "none"])
@pytest.mark.parametrize(("width", "schedule"), [(2.25, "8,4,4,2"), (1.75, "8,4,2,0"), (1.25, "4,4,2,0")])
def test_svdq_with_selection_has_the_published_bits(online, width, schedule):
    """And a landmark for 8 keys, which the paper does not count; values in 16 bits or 4 and a range for a token."""
    more = f"+key.quantize.bits={schedule},0,0,0,0+policies.first_tokens={online}"
    four = "+value.quantize=rtn+value.quantize.bits=4+value.quantize.group=all"
    for suffix, value in (("", 16), (four, 4 + 2 * 16 / 1024)):
        recipe = read(f"svdq-shadow-online-2.25bit{more}{suffix}")
        assert bits(f"svdq-shadow-online-2.25bit{more}{suffix}") == [width + 16 / 8, value]
        assert recipe.policy("select").budget == 2048 and recipe.fits_prompt == (online == "on")


def test_squat_has_the_papers_settings_and_kivis_short_window():
    for name in ("squat-2bit-paper", "squat-pre-2bit-paper", "squat-online-2bit-paper"):
        feedback = preset(name).key.feedback
        assert (feedback.rank, feedback.lam, feedback.blocks, feedback.normalize) == (5, 1e-3, 2, "paper")
        assert preset(name).window == preset("kivi-2bit").window
    assert preset("kivi-2bit-r32").window == Window(0, 32, 32)


def test_gear_of_rank_2_in_groups_of_32():
    low_rank = 2 * 16 * (1 / 128 + 1 / 128)  # rank, float16, factors of tokens of a block and of channels of a head
    alone, more = "+all.correct=low_rank", "+all.quantize.group=32+all.correct.rank=2"
    assert bits(f"gear-2bit{alone}{more}") == [2 + 32 / 32 + low_rank] * 2
    outliers = [a - b for a, b in zip(bits("gear-2bit"), bits(f"gear-2bit{alone}"), strict=True)]
    found = [a - b for a, b in zip(bits(f"gear-2bit{more}"), bits(f"gear-2bit{alone}{more}"), strict=True)]
    assert found == pytest.approx(outliers) and min(found) > 0.4


@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize("share", [0.2, 0.5])
def test_aqua_with_h2o_at_every_width(width, share):
    for plain in (f"aqua-{width}bit", f"higgs-{width}bit"):
        recipe = read(f"{plain}+policies.heavy=on+policies.heavy.share={share}")
        assert asymptotic_bits(recipe, LLAMA) == pytest.approx(share * asymptotic_bits(preset(plain), LLAMA))
        assert (recipe.key, recipe.value, recipe.layers) == tuple(
            getattr(preset(plain), n) for n in ("key", "value", "layers")
        )
    for name, plain in (("aqua-h2o-2bit", "aqua-2bit"), ("h2o-higgs-2bit", "higgs-2bit")):
        assert read(f"{plain}+policies.heavy=on+name=x") == replace(preset(name), name="x")
