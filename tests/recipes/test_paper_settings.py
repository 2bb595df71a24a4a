"""Settings of the papers, held against what the papers say: bits by hand, windows, what is exact."""

import pytest

from kvq_runtime.geometry import MODELS, ROLES, Geometry
from kvq_runtime.recipe import Window, preset
from kvq_runtime.stages.exact import Exact
from kvq_runtime.store.memory import asymptotic_bits, scheme_bits

QWEN, LLAMA = MODELS["qwen2.5-7b"], MODELS["llama-3.1-8b"]


def bits(name: str, geometry: Geometry = LLAMA, layer: int = 1) -> list[float]:
    """Of keys and of values."""
    return [scheme_bits(preset(name), layer, role, geometry) for role in ROLES]


@pytest.mark.parametrize("width", [3, 4])
def test_aqua_keeps_qwens_first_layer_exact(width):
    name = f"aqua-{width}bit-first-16bit"
    assert all(scheme.quantize == Exact() and scheme.predict is None for scheme in preset(name).layers[0])
    rest = width + 16 / QWEN.width  # one scale a token
    assert asymptotic_bits(preset(name), QWEN) == pytest.approx((27 * rest + 16) / 28)
    assert preset(name).key == preset(f"aqua-{width}bit").key


@pytest.mark.parametrize("width", [2, 3, 4])
def test_quantos_groups(width):
    assert bits(f"quanto-{width}bit") == [width + 2 * 16 / 64] * 2
    assert bits(f"quanto-{width}bit-1024") == [width + 2 * 16 / 1024] * 2


@pytest.mark.parametrize("start", ["svdq-shadow", "svdq-shadow-online"])
@pytest.mark.parametrize("width", [2.25, 1.75, 1.25])
def test_svdq_with_selection_has_the_published_bits(start, width):
    """And a landmark for 8 keys, which the paper does not count; values in 16 bits or 4 and a range for a token."""
    for suffix, value in (("", 16), ("-v4", 4 + 2 * 16 / 1024)):
        assert bits(f"{start}-{width:g}bit{suffix}") == [width + 16 / 8, value]
    recipe = preset(f"{start}-{width:g}bit")
    assert recipe.policy("select").budget == 2048 and recipe.fits_prompt == ("online" in start)


def test_squat_with_its_short_window():
    for name in ("squat-2bit-paper", "squat-pre-2bit-paper", "squat-online-2bit-paper", "squat-pre-online-2bit-paper"):
        short = preset(f"{name}-r32")
        assert short.window == Window(0, 32, 32) == preset("kivi-2bit-r32").window
        assert (short.key, short.value, short.policies) == (preset(name).key, preset(name).value, preset(name).policies)
        assert (short.key.feedback.rank, short.key.feedback.lam, short.key.feedback.blocks) == (5, 1e-3, 2)


def test_gear_of_rank_2_in_groups_of_32():
    low_rank = 2 * 16 * (1 / 128 + 1 / 128)  # rank, float16, factors of tokens of a block and of channels of a head
    assert bits("gear-l-2bit-r2-g32") == [2 + 32 / 32 + low_rank] * 2
    outliers = [a - b for a, b in zip(bits("gear-2bit"), bits("gear-l-2bit"), strict=True)]
    found = [a - b for a, b in zip(bits("gear-2bit-r2-g32"), bits("gear-l-2bit-r2-g32"), strict=True)]
    assert found == pytest.approx(outliers) and min(found) > 0.4


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize(("suffix", "share"), [("", 0.2), ("-50", 0.5)])
def test_aqua_with_h2o_at_every_width(width, suffix, share):
    for name, plain in ((f"aqua-h2o-{width}bit", f"aqua-{width}bit"), (f"h2o-higgs-{width}bit", f"higgs-{width}bit")):
        recipe = preset(name + suffix)
        assert asymptotic_bits(recipe, LLAMA) == pytest.approx(share * asymptotic_bits(preset(plain), LLAMA))
        assert (recipe.key, recipe.value, recipe.layers) == tuple(
            getattr(preset(plain), n) for n in ("key", "value", "layers")
        )
