"""The errors of blocks: what is measured is what is read, and what is beyond a promise is read as it arrived."""

import copy
import logging
import math

import fitted
import pytest
import torch
from feeding import GEOMETRY, RECIPES, feed, feed_in, tensors, turned

from kvq_runtime.cache import BlockCache
from kvq_runtime.errors import ArtifactError
from kvq_runtime.store.promise import AT, LEAST, MARGIN, Check, Promise, block_errors, quantiles

NAMES = ("mean-higgs-2bit", "aqua-2bit", "kivi-2bit")
PLANTED = 1  # the block, and the layer, of the outliers


def cache_of(name: str, check: Check | None) -> BlockCache:
    recipe = RECIPES[name]
    return BlockCache(recipe, GEOMETRY, fitted.tensors(recipe, GEOMETRY) or None, check=check)


def text(name: str, blocks: int, rows: int = 2, planted: bool = False) -> torch.Tensor:
    """Keys and values of so many blocks and a window, in one block of which those of a layer are enormous."""
    window = RECIPES[name].window
    x = turned(tensors(blocks * window.block + window.recent, rows))
    if planted:
        start = PLANTED * window.block
        x[PLANTED, :, :, start : start + window.block] *= 30
    return x


def measured(name: str, x: torch.Tensor) -> dict[tuple[int, int], Promise]:
    """The promise that just holds for this text."""
    cache = cache_of(name, Check(promise(math.inf)))
    feed(cache, x, 0, x.shape[3])
    return {
        (one.layer, role == "value"): Promise(1.0, one.blocks, one.seen)
        for one in cache.health().layers
        for role in [one.role]
    }


def promise(most: float) -> dict[tuple[int, int], Promise]:
    return {(n, role): Promise(1.0, 8, (most,) * 4) for n in range(GEOMETRY.layers) for role in (0, 1)}


def test_quantiles_are_errors_that_were_seen():
    assert quantiles([float(n) for n in range(1, 201)]) == (100.0, 180.0, 198.0, 200.0)
    assert quantiles([3.0]) == (3.0,) * 4 and quantiles([]) == ()
    assert Promise.of(torch.tensor([2.0, 4.0]), 8.0).quantiles == (0.25, 0.5, 0.5, 0.5)
    assert Promise(1.0, 1, (0.0,) * 4).bound == LEAST


@pytest.mark.parametrize("name", NAMES)
def test_what_is_measured_is_the_error_of_what_is_read(name):
    """After RoPE or before it, which turns keys and keeps their length; sinks are not among it."""
    x = text(name, 3)
    cache = cache_of(name, Check(promise(math.inf)))
    feed(cache, x, 0, x.shape[3])
    block, sinks = cache.recipe.window.block, cache.recipe.window.sinks
    for one in cache.health().layers:
        read = cache.decoder.whole(one.layer)[one.role == "value"][:, : 3 * block]
        gap = (x[one.layer, int(one.role == "value"), :, : 3 * block] - read).unflatten(1, (3, block)).flatten(0, 1)
        counted = (torch.arange(3 * block) >= sinks).view(1, 3, block).expand(2, -1, -1).flatten(0, 1)
        expected = quantiles(block_errors(gap, counted).tolist())
        assert one.blocks == 6 and one.seen == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_a_planted_block_is_found_and_read_exact_by_every_way(name):
    window, good = RECIPES[name].window, measured(name, text(name, 4))
    x = text(name, 4, planted=True)
    cache, plain = cache_of(name, Check(good)), cache_of(name, None)
    for one in (cache, plain):
        feed(one, x, 0, x.shape[3])
    found = {(one.layer, one.role) for one in cache.health().layers if one.beyond}
    assert {(PLANTED, "key"), (PLANTED, "value")} <= found and not any(layer < PLANTED for layer, _ in found)
    assert cache.memory_report().beyond == cache.health().beyond >= 4
    held = 4 * window.block * GEOMETRY.width * sum(len(e) for s in cache.layers.values() for e in s.watch.exact) * 2
    assert cache.memory_report().parts["beyond"] == held
    start = PLANTED * window.block
    planted = slice(start, start + window.block)
    for role in (0, 1):
        read, codes = cache.decoder.whole(PLANTED)[role].clone(), plain.decoder.whole(PLANTED)[role].clone()
        assert torch.equal(read[:, planted], x[PLANTED, role, :, planted])
        assert not torch.equal(codes[:, planted], read[:, planted])
        elsewhere = [b for b in range(4) if b not in cache.layers[PLANTED].watch.exact[role]]
        for number in elsewhere:
            part = slice(number * window.block, (number + 1) * window.block)
            assert torch.equal(read[:, part], codes[:, part])
        cache.decoder.clear()
        plain.decoder.clear()
    q = torch.randn(2, 4, 1, GEOMETRY.head_size, generator=torch.Generator().manual_seed(3))
    q = q / x[PLANTED, 0].norm(dim=-1).mean()
    for layer in range(GEOMETRY.layers):
        k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in cache.decoder.whole(layer))
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0, enable_gqa=True)
        out = cache.attend(layer, q, None, 1.0)
        assert (out - expected).norm() <= 0.02 * expected.norm()
        cache.decoder.clear()


def test_what_is_exact_goes_with_its_block():
    """Rows are chosen, tokens cropped, a cache copied, a pass undone."""
    name = "mean-higgs-2bit"
    x, window = text(name, 4, planted=True), RECIPES[name].window
    cache = cache_of(name, Check(measured(name, text(name, 4))))
    feed(cache, x, 0, x.shape[3])
    beyond = cache.health().beyond
    other = copy.deepcopy(cache)
    cache.reorder(torch.tensor([1, 1, 0]))
    assert cache.health().beyond == beyond * 3 // 2
    start = PLANTED * window.block
    assert torch.equal(
        cache.layers[PLANTED].watch.exact[0][PLANTED], x[PLANTED, 0, [1, 1, 0], start : start + window.block]
    )
    cache.crop((PLANTED + 1) * window.block)
    assert cache.health().beyond == beyond * 3 // 2 and cache.health().blocks == 3 * 2 * 3 * 2
    cut = (PLANTED + 1) * window.block - 3  # in the middle of the block: what stays of it are its exact tokens
    cache.crop(cut)
    assert cache.health().beyond == 0 and not any(cache.layers[PLANTED].watch.exact)
    assert torch.equal(cache.layers[PLANTED].window_2BTC[0, 0], x[PLANTED, 0, 1, start:cut])
    assert other.health().beyond == beyond
    more = torch.cat([x, x[..., : window.block, :] * 50], 3)
    before = other.health()
    with pytest.raises(RuntimeError, match="update that one"), torch.no_grad():
        other.update(0, *more[0, :, :, x.shape[3] :].unbind(0))
        raise RuntimeError("update that one")
    other.settle()
    assert other.health() == before


@pytest.mark.parametrize("name", ["mean-higgs-2bit", "aqua-2bit"])
def test_strict_refuses_and_leaves_the_cache_as_it_was(name):
    x, good = text(name, 4, planted=True), measured(name, text(name, 4))
    cache = cache_of(name, Check(good, strict=True))
    with pytest.raises(
        RuntimeError, match=r"layer 1, block 1: the error of its keys is .* promised at most .*strict=True"
    ):
        feed(cache, x, 0, x.shape[3])
    assert cache.length == 0 and not cache.layers
    feed(cache, text(name, 4), 0, x.shape[3])
    assert cache.health().beyond == 0


@pytest.mark.parametrize("name", ["mean-higgs-2bit", "aqua-2bit"])
def test_padding_is_not_measured(name):
    """A row behind padding that is whole blocks has the errors that it has alone."""
    window = RECIPES[name].window
    x = text(name, 4, 1)
    alone = cache_of(name, Check(promise(math.inf)))
    feed(alone, x, 0, x.shape[3])
    padded = torch.cat([torch.zeros_like(x[..., : window.block, :]), x], 3)
    real = torch.arange(padded.shape[3])[None] >= window.block
    cache = cache_of(name, Check(promise(math.inf)))
    feed(cache, padded, 0, padded.shape[3], real)
    for one, other in zip(cache.health().layers, alone.health().layers, strict=True):
        assert one.blocks == other.blocks + 1 and one.seen[-1] == pytest.approx(other.seen[-1], rel=0.05)


def test_a_batch_of_no_rows_has_nothing_to_tell():
    name = "aqua-2bit"
    cache, x = cache_of(name, Check(promise(0.0))), text(name, 4, 1)[:, :, :0]
    feed(cache, x, 0, x.shape[3])
    assert cache.layers[0].blocks == 4 and cache.health().blocks == 0 == cache.memory_report().beyond


def test_what_decodes_to_no_number_is_beyond():
    name = "mean-higgs-2bit"
    cache, x = cache_of(name, Check(promise(1e6))), text(name, 4, 1)
    keys = cache.codecs[0][0].tensors["predict.mean"]
    cache.codecs[0][0]._own["predict"]["mean"] = torch.full_like(keys, math.nan)
    feed(cache, x, 0, x.shape[3])
    assert {(one.layer, one.role): one.beyond for one in cache.health().layers if one.beyond} == {(0, "key"): 4}


def test_it_is_said_once(caplog):
    name = "mean-higgs-2bit"
    x, cache = text(name, 4, planted=True), cache_of(name, Check(measured(name, text(name, 4))))
    with caplog.at_level(logging.WARNING):
        feed_in(cache, x, [x.shape[3] - 1, 1])
        cache.reset()
        feed(cache, x, 0, x.shape[3])
    said = [one.getMessage() for one in caplog.records]
    assert len(said) == 1 and "4 of 36 blocks are beyond" in said[0] and "layer 1, 2 of 6 blocks" in said[0]


def test_the_limit_is_told_beside_what_was_promised():
    name = "mean-higgs-2bit"
    cache = cache_of(name, Check(measured(name, text(name, 4))))
    feed(cache, text(name, 4, planted=True), 0, text(name, 4).shape[3])
    health = cache.health()
    lines = str(health).splitlines()[1:]
    for one, line in zip(health.layers, lines, strict=True):
        assert one.bound == max(LEAST, MARGIN * one.promised[AT])
        assert line.endswith(f": {one.beyond} beyond the limit of {one.bound:.3g}")


def test_without_a_promise_errors_are_told_and_nothing_is_kept():
    name = "kivi-2bit"
    cache = cache_of(name, Check())
    feed(cache, text(name, 4, planted=True), 0, text(name, 4).shape[3])
    health = cache.health()
    assert not health.promised and health.beyond == 0 and all(one.seen for one in health.layers)
    assert "nothing is promised" in str(health) and "limit" not in str(health)
    assert cache.memory_report().parts["beyond"] == 0
    assert cache_of(name, None).health().layers == ()


def test_as_prometheus_reads_it():
    name = "mean-higgs-2bit"
    cache = cache_of(name, Check(measured(name, text(name, 4))))
    feed(cache, text(name, 4, planted=True), 0, text(name, 4).shape[3])
    lines = cache.health().prometheus().splitlines()
    assert f'kvq_blocks_beyond{{recipe="{RECIPES[name].name}",layer="1",role="key"}} 2' in lines
    assert sum(line.startswith("kvq_block_error_promised{") for line in lines) == 4 * 2 * GEOMETRY.layers
    assert all(line.startswith("#") or line.rpartition(" ")[2].replace(".", "").isalnum() for line in lines)


def test_what_an_artifact_states_is_checked():
    good = {"spread": 2.0, "blocks": 5, "quantiles": [0.1, 0.2, 0.3, 0.4]}
    check = Check.of({"layers": [{"key": {"promise": good}, "value": {"relative_error": 0.1}}, {"key": 0.5}]})
    assert list(check.promises) == [(0, 0)] and check.promises[0, 0].bound == pytest.approx(MARGIN * 0.3)
    assert Check.of({}).promises == {} == Check.of({"layers": 3}).promises
    for bad in (
        {},
        good | {"spread": 0},
        good | {"quantiles": [0.1]},
        good | {"quantiles": ["x"] * 4},
        [1],
        good | {"blocks": "5"},
    ):
        with pytest.raises(ArtifactError, match="fit: promise"):
            Check.of({"layers": [{"key": {"promise": bad}}]})
    with pytest.raises(ValueError, match="promises nothing"):
        Check.of({"layers": []}, "demo", strict=True)
