"""Estimated bytes against those of caches that are filled, and of a large model against a pencil."""

import fitted
import pytest
import torch
from feeding import GEOMETRY, feed_in, filled, make, tensors

from kvq_runtime.artifact import recipe_text
from kvq_runtime.geometry import MODELS, Geometry
from kvq_runtime.recipe import preset
from kvq_runtime.store.memory import Sizes

SMALL = Geometry(layers=2, kv_heads=2, head_size=32)
EIGHT = MODELS["llama-3.1-8b"]
NAMES = ("exact", "higgs-2bit", "kivi-2bit", "aqua-2bit", "squat-2bit", "svdq-2bit", "svdq-online-2bit",
         "svdq-shadow-2bit-v4", "h2o-higgs-2bit", "snapkv", "polar-paper", "subkv-2bit")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_an_estimate_is_what_a_cache_holds_within_2_percent(name):
    recipe = preset(name)
    try:
        sizes = Sizes(recipe.check(SMALL), SMALL)
    except ValueError:
        pytest.skip("not for such small heads")
    for tokens in (500, 1501, 2600):
        held, report = sizes.at(tokens), filled(recipe, SMALL, tokens, fitted.tensors(recipe, SMALL) or None)
        assert held.total_bytes == pytest.approx(report.total_bytes, rel=0.02), tokens
        assert (
            held.shared_bytes == pytest.approx(report.shared_bytes, rel=0.02) and held.exact_bytes == report.exact_bytes
        )


def test_rows_hold_as_much_each_and_share_what_is_fitted():
    recipe = preset("aqua-2bit")
    cache = make(recipe)
    feed_in(cache, tensors(900, rows=3).to(torch.bfloat16), [899, 1])
    report, held = cache.memory_report(), Sizes(recipe, GEOMETRY).at(900, 3)
    assert held.total_bytes == pytest.approx(report.total_bytes, rel=0.02) and held.exact_bytes == report.exact_bytes


def test_a_large_model_by_pencil():
    """Llama 3.1 8B: 32 layers, C = 1024. KIVI: 3 bits; AQUA-KV: 31 layers of a C x C and a 2C x C map in 16 bits."""
    tokens, elements = 131072, 2 * 32 * 1024
    kivi = Sizes(preset("kivi-2bit"), EIGHT).at(tokens)
    blocks, window = 1024, 256  # 1023 blocks in slabs of 32
    assert (
        kivi.sequence_bytes == blocks * 128 * elements * 3 // 8 + window * elements * 2 and kivi.exact_bytes == 16 << 30
    )
    maps = 31 * 3 * 1024 * 1024 * 2
    assert Sizes(preset("aqua-2bit"), EIGHT).shared == pytest.approx(maps, rel=0.05)


def test_sixteen_bits_and_more_never_save():
    assert Sizes(preset("exact"), SMALL).smaller_from() is None
    assert Sizes(recipe_text.read("exact+policies.chunks=on"), SMALL).smaller_from() is None


@pytest.mark.parametrize("name, rows", [("higgs-2bit", 1), ("aqua-2bit", 1), ("kivi-2bit", 2)])
def test_a_cache_is_smaller_than_16_bit_from_where_its_report_says(name, rows):
    """Filled around the length that the report names: larger just before it, smaller from there on."""
    recipe = preset(name)
    cache = make(recipe)
    x = tensors(2048, rows=rows).to(torch.bfloat16)
    feed_in(cache, x, [270])
    start = cache.memory_report().smaller_than_16bit_from
    assert start is not None and 272 < start < 1500
    feed_in(cache, x, [start - 271])
    before = cache.memory_report()
    assert before.tokens == start - 1 and before.total_bytes >= before.exact_bytes
    assert "LARGER than 16 bit" in str(before)
    feed_in(cache, x, [1])
    for more in (0, 1, recipe.window.block):
        feed_in(cache, x, [more] if more else [])
        report = cache.memory_report()
        assert report.total_bytes < report.exact_bytes and report.smaller_than_16bit_from == start
        assert "LARGER" not in str(report)
