"""Bits billed are bytes held: the report against the tensors that a cache really owns, found by walking it."""

from dataclasses import replace

import pytest
import torch
from feeding import GEOMETRY, RECIPES, feed_in, make, tensors
from owned_bytes import owned

from kvq_runtime.cache import BlockCache
from kvq_runtime.policies.shadow_chunks import ShadowChunks
from kvq_runtime.store.decode import Decoder

several = pytest.mark.parametrize(
    "recipe",
    ["exact", "higgs-2bit", "kivi-2bit", "aqua-2bit", "svdq-shadow-2bit-v4", "squat-online-2bit", "h2o-higgs-2bit"],
    indirect=True,
)


def bits(cache: BlockCache, dtype: torch.dtype) -> float:
    schemes = [codec.bits(dtype) for pair in cache.codecs for codec in pair]
    chunks = isinstance(cache.recipe.policy("select"), ShadowChunks)
    landmarks = 8 * dtype.itemsize / 8 / 2 if chunks else 0  # of 8 keys, and no values
    return sum(schemes) / len(schemes) + landmarks


@several
def test_the_report_is_what_the_cache_owns(recipe):
    recent, block = recipe.window.recent, recipe.window.block
    x, cache = tensors(recent + 4 * block + 200), make(recipe)
    real = torch.arange(x.shape[3]) >= torch.tensor([0, 7])[:, None]
    for sizes in ([recent + block], [block, 1], [block - 1, 2], [200]):
        feed_in(cache, x, sizes, real_BT=real)
        report = cache.memory_report()
        assert report.total_bytes == sum(owned(cache).values())
        assert report.total_bytes == report.sequence_bytes + report.shared_bytes
        assert report.sequence_bytes == sum(report.parts.values())
        elements = 2 * 2 * GEOMETRY.layers * GEOMETRY.width * cache.length
        assert report.exact_bytes == 2 * elements
        assert report.all_bits == pytest.approx(8 * report.total_bytes / elements)
    cache.crop(block + 3)
    assert cache.memory_report().total_bytes == sum(owned(cache).values())
    cache.reorder(torch.tensor([1, 1, 0]))
    assert cache.memory_report().total_bytes == sum(owned(cache).values())
    cache.reset()
    assert cache.memory_report().total_bytes == sum(owned(cache).values()) == cache.memory_report().shared_bytes


@several
def test_asymptotic_bits_are_what_a_slab_takes(recipe, monkeypatch):
    """Between two full slabs nothing grows but encoded blocks: their bytes, per element, are the bits promised."""
    dtype = torch.bfloat16
    slab = 4  # blocks in place of 32, which take the same bits each
    for module in ("store.layer", "store.storage", "policies.shadow_chunks"):
        monkeypatch.setattr(f"kvq_runtime.{module}.SLAB", slab)
    recent, block = recipe.window.recent, recipe.window.block
    cache = make(recipe)
    x = tensors(recent + 2 * slab * block, rows=1).to(dtype)
    feed_in(cache, x, [recent + slab * block])
    one = cache.memory_report()
    for size in (slab * block - 1, 1):
        feed_in(cache, x, [size])
    two = cache.memory_report()
    elements = 2 * GEOMETRY.layers * GEOMETRY.width * (two.tokens - one.tokens)
    grown = two.sequence_bytes - one.sequence_bytes - two.parts["window"] + one.parts["window"]
    assert grown * 8 == pytest.approx(two.asymptotic_bits * elements)
    assert two.asymptotic_bits == pytest.approx(bits(cache, dtype))
    assert two.parts["window"] <= one.parts["window"] + 2 * 6 * 64 * 4 * (block + recent)


def test_what_is_shared_is_counted_once():
    recipe = RECIPES["aqua-2bit"]
    cache = make(recipe)
    report = cache.memory_report()
    fitted = {t.data_ptr(): t.nbytes for pair in cache.codecs for codec in pair for t in codec.tensors.values()}
    assert report.shared_bytes > sum(fitted.values())


def test_scratch_is_no_more_than_two_decoded_layers():
    cache, x = make(RECIPES["aqua-2bit"]), tensors(300, rows=1)
    feed_in(cache, x, [299, 1])
    one_layer = 2 * 300 * GEOMETRY.width * 4
    assert (
        1.5 * one_layer <= cache.memory_report().scratch_peak <= 2 * one_layer
    )  # its own, and blocks of the one below


@pytest.mark.parametrize("below", [(), (1,), (1, 2)], ids=["keys of the layer", "one below", "two below"])
def test_no_layer_is_held_decoded_that_none_above_reads(below, monkeypatch):
    plain = RECIPES["aqua-2bit"]
    key = replace(plain.key, predict=replace(plain.key.predict, below=below)) if below else RECIPES["higgs-2bit"].key
    recipe = replace(plain, key=key, value=replace(plain.value, predict=replace(plain.value.predict, below=below)))
    five, held, forget = replace(GEOMETRY, layers=5), [], Decoder.forget
    cache = make(recipe, five)

    def noted(decoder: Decoder, layer: int) -> None:
        forget(decoder, layer)
        held.append(len({key[0] for kept in (decoder._carried, decoder._fresh) for key in kept}))

    monkeypatch.setattr(Decoder, "forget", noted)
    feed_in(cache, tensors(300, rows=1, geometry=five), [299, 1])
    assert recipe.cross_layer and max(held) == len(below)
