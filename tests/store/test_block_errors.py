"""The share of blocks beyond nearly all errors of a calibration: what is measured is the error of what is read."""

import copy
import logging
import math

import fitted
import pytest
import torch
from feeding import GEOMETRY, RECIPES, feed, tensors, turned

from kvq_calib.fit.scheme import quantile_of
from kvq_runtime.cache import BlockCache
from kvq_runtime.errors import ArtifactError
from kvq_runtime.store import block_errors
from kvq_runtime.store.block_errors import bounds_in

NAMES = ("mean-higgs-2bit", "aqua-2bit", "kivi-2bit")
SITES = [(layer, role) for layer in range(GEOMETRY.layers) for role in (0, 1)]
PLANTED = 1  # the block, and the layer, of the outliers


def cache_of(name: str, bounds=None) -> BlockCache:
    recipe = RECIPES[name]
    return BlockCache(recipe, GEOMETRY, fitted.tensors(recipe, GEOMETRY) or None, bounds=bounds)


def text(name: str, blocks: int, rows: int = 2, planted: bool = False) -> torch.Tensor:
    """Keys and values of so many blocks and a window, in one block of which those of a layer are enormous."""
    window = RECIPES[name].window
    x = turned(tensors(blocks * window.block + window.recent, rows))
    if planted:
        start = PLANTED * window.block
        x[PLANTED, :, :, start : start + window.block] *= 30
    return x


def exact_errors(name: str, x: torch.Tensor) -> dict[tuple[int, int], torch.Tensor]:
    """The errors of a text's blocks as they are read, after RoPE, sinks left out, by layer and role."""
    cache, window = cache_of(name), RECIPES[name].window
    feed(cache, x, 0, x.shape[3])
    blocks = cache.layers[0].blocks
    counted = (torch.arange(blocks * window.block) >= window.sinks).view(1, blocks, -1).expand(x.shape[2], -1, -1)
    found = {}
    for layer, role in SITES:
        gap = (x[layer, role] - cache.decoder.whole(layer)[role])[:, : blocks * window.block]
        gap = gap.unflatten(1, (blocks, window.block)).flatten(0, 1)
        found[layer, role] = block_errors.block_errors(gap, counted.flatten(0, 1))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_block_is_beyond_where_what_is_read_is_off_by_more(name):
    """Before RoPE or after it, which turns keys and keeps their length."""
    x = text(name, 4)
    errors = exact_errors(name, x)
    for share in (0.0, 0.5, 1.0):
        bounds = {site: float(found.sort().values[int(share * (len(found) - 1))]) for site, found in errors.items()}
        cache = cache_of(name, {site: bound * 1.02 for site, bound in bounds.items()})
        feed(cache, x, 0, x.shape[3])
        expected = sum(int((errors[site] > bound * 1.02).sum()) for site, bound in bounds.items()) / (8 * len(SITES))
        assert cache.memory_report().beyond == pytest.approx(expected, abs=0.05)


def test_a_planted_block_is_counted_and_said_once(caplog):
    name = "mean-higgs-2bit"
    bounds = {site: 1.01 * float(errors.max()) for site, errors in exact_errors(name, text(name, 4)).items()}
    cache, plain, x = cache_of(name, bounds), cache_of(name), text(name, 4, planted=True)
    with caplog.at_level(logging.WARNING):
        for one in (cache, plain):
            feed(one, x, 0, x.shape[3])
        assert cache.memory_report().beyond == 4 / 48 and not caplog.records, "a few are normal"
        cache.reset()
        x[PLANTED] *= 30
        for _ in range(2):
            feed(cache, x, 0, x.shape[3])
            cache.reset()
    (said,) = [one.getMessage() for one in caplog.records]
    assert said.startswith(
        "mean-higgs-2bit: the errors of 33.3% of the blocks are beyond 99.9% of those in calibration"
    )
    assert plain.memory_report().beyond is None
    assert cache.memory_report().total_bytes == cache_of(name).memory_report().total_bytes, "nothing is kept for it"


def test_blocks_of_a_pass_that_is_undone_are_not_counted():
    name = "aqua-2bit"
    cache, x = cache_of(name, dict.fromkeys(SITES, 1.0)), text(name, 4)
    feed(cache, x, 0, x.shape[3] - 1)
    before = cache.encoder.errors.blocks, int(cache.encoder.errors.beyond)
    with pytest.raises(RuntimeError, match="update that one"):
        feed(cache, x, x.shape[3] - 1, x.shape[3], layers=[0, 2])
    assert (cache.encoder.errors.blocks, int(cache.encoder.errors.beyond)) == before
    other = copy.deepcopy(cache)
    feed(other, x, x.shape[3] - 1, x.shape[3])
    assert other.encoder.errors.blocks > before[0] == cache.encoder.errors.blocks


def test_padding_is_not_measured():
    """A row behind padding that is whole blocks has as many blocks beyond as it has alone."""
    name = "mean-higgs-2bit"
    block, x = RECIPES[name].window.block, text(name, 4, 1)
    bounds = {site: 1.02 * float(errors.median()) for site, errors in exact_errors(name, x).items()}
    alone, cache = cache_of(name, bounds), cache_of(name, bounds)
    feed(alone, x, 0, x.shape[3])
    padded = torch.cat([torch.zeros_like(x[..., :block, :]), x], 3)
    feed(cache, padded, 0, padded.shape[3], torch.arange(padded.shape[3])[None] >= block)
    assert int(cache.encoder.errors.beyond) == int(alone.encoder.errors.beyond) > 0


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 20])
def test_one_in_a_thousand_of_further_blocks_is_beyond_the_quantile_however_few_are_known(count):
    """Over 20,000 draws of a calibration and one more block each, whose errors are log-normal."""
    logs = torch.randn(20_000, count + 1, dtype=torch.float64)
    beyond = sum(float(row[-1].exp()) > quantile_of(row[:-1].exp()) for row in logs)
    assert 5 <= beyond <= 40  # 20 expected, of deviation 4.5


def test_bounds_are_checked_when_read():
    assert bounds_in({"layers": [{"key": {"block_error": 0.25}, "value": {"relative_error": 0.1}}, {"key": 0.5}]}) == {
        (0, 0): 0.25
    }
    assert bounds_in({}) == {} == bounds_in({"layers": 3})
    for bad in (-1, math.nan, "0.1", True, [0.1]):
        with pytest.raises(ArtifactError, match="block_error of layer 0 keys is"):
            bounds_in({"layers": [{"key": {"block_error": bad}}]})
