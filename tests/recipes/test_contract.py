"""The contract of every recipe: each law is checked for a recipe of every class, on random keys and values.

The cache is fed directly, without a model; `feeding.small` gives each recipe blocks of a few tokens.
"""

from itertools import chain

import gaussian_rate
import pytest
import torch
from feeding import error, every_recipe, feed, feed_in, make, read, rotary, same, state, tensors

from kvq_runtime.cache import BlockCache
from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.recipe import ROLES, Recipe
from kvq_runtime.stages.exact import Exact


def lossy(recipe: Recipe, layer: int, role: int) -> bool:
    return not isinstance(recipe.at(layer)[role].quantize, Exact)


def encoded(cache: BlockCache) -> int:
    return cache.layers[0].encoded


def blocks(found: list[dict]) -> list[dict]:
    return [{name: field for name, field in held.items() if name not in ("window", "sinks")} for held in found]


# ---- a token is encoded once (invariant 1) ----


@every_recipe
def test_every_token_is_encoded_once_and_stays_as_it_was(recipe, monkeypatch):
    counted: dict[tuple[int, str], int] = {}
    encode = Codec.encode

    def counting(self, x_NTC, context):
        counted[self.layer, self.role] = counted.get((self.layer, self.role), 0) + x_NTC.shape[:2].numel()
        assert x_NTC.shape[1] == self.block
        return encode(self, x_NTC, context)

    monkeypatch.setattr(Codec, "encode", counting)
    recent, block = recipe.window.recent, recipe.window.block
    x, cache = tensors(recent + 3 * block + 8), make(recipe)
    feed_in(cache, x, [recent + block])
    early = blocks(state(cache))
    feed_in(cache, x, [1, 1, block - 3, 2, 1, block, 5])
    assert encoded(cache) == 3 * block
    assert counted == {(layer, role): 2 * encoded(cache) for layer in range(3) for role in ROLES}
    for before, now in zip(early, state(cache), strict=True):
        assert all(torch.equal(field, now[name][:, : field.shape[1]]) for name, field in before.items())
    assert cache.reencoded == 0


@every_recipe
def test_a_crop_below_the_window_decodes_the_survivors_of_one_block(recipe):
    recent, block = recipe.window.recent, recipe.window.block
    x, cache = tensors(recent + 3 * block), make(recipe)
    feed_in(cache, x, [recent + 3 * block])
    before, first = read(cache), blocks(state(cache))
    cache.crop(block + 5)
    assert (cache.length, encoded(cache), cache.reencoded) == (block + 5, block, 5)
    assert same(blocks(state(cache)), [{name: field[:, :1] for name, field in held.items()} for held in first])
    for one, two in zip(before, read(cache), strict=True):
        for whole, cropped in zip(one, two, strict=True):
            assert error(cropped, whole[:, : block + 5]) < 0.02  # the matrix products have another number of rows
    feed_in(cache, x, [2 * block - 5, 1, recent - 1])
    assert (cache.length, encoded(cache), cache.reencoded) == (recent + 3 * block, 3 * block, 5)


@every_recipe
def test_a_block_that_is_cut_again_and_again_loses_no_more(recipe):
    """Its tokens are rounded each time with others, as those of another question."""
    recent, block, cache = recipe.window.recent, recipe.window.block, make(recipe)
    total, kept = recent + 4 * block, block + 5
    x = tensors(total)
    feed_in(cache, x, [total])
    cache.crop(kept)
    first = read(cache)
    for turn, length in enumerate([block + 9, 2 * block + 3, kept, block + 11, 3 * block + 7, block + 9, kept]):
        other = 3 * tensors(total, seed=turn)
        feed_in(cache, other, [total - cache.length])
        cache.crop(length)
    for one, two in zip(first, read(cache), strict=True):
        for before, now in zip(one, two, strict=True):
            assert error(now, before) < 0.02
    cache.reorder(torch.tensor([1]))
    feed_in(cache, x[:, :, 1:], [total - kept])
    cache.crop(kept)
    for one, two in zip(first, read(cache), strict=True):
        assert all(error(now, before[1:]) < 0.02 for before, now in zip(one, two, strict=True))


# ---- the same tensors make the same blocks (invariant 2) ----


@every_recipe
def test_blocks_do_not_depend_on_how_tokens_arrive(recipe):
    recent, block = recipe.window.recent, recipe.window.block
    total = recent + 3 * block + 3
    x = tensors(total)
    caches = [make(recipe) for _ in range(3)]
    sizes = torch.randint(1, 2 * block, (total,), generator=torch.Generator().manual_seed(1)).tolist()
    feed_in(caches[0], x, [total])
    feed_in(caches[1], x, [2 * block + recent - 1] + [1] * (total - 2 * block - recent + 1))
    while (left := total - caches[2].length) > 0:
        feed_in(caches[2], x, [min(left, sizes.pop())])
    assert encoded(caches[0]) == 3 * block
    assert same(state(caches[0]), state(caches[1]))
    assert same(state(caches[0]), state(caches[2]))


@every_recipe
def test_a_layer_read_alone_is_rebuilt_from_those_below(recipe):
    """What is carried from layer to layer saves work, and changes nothing."""
    recent, block = recipe.window.recent, recipe.window.block
    x, cache, other = tensors(recent + 3 * block), make(recipe), make(recipe)
    for start, stop in ((0, recent + 2 * block), (recent + 2 * block, recent + 3 * block)):
        expected = feed(cache, x, start, stop)
        for layer in range(3):
            other.decoder.clear()
            found = feed(other, x, start, stop, layers=[layer])[0]
            assert all(torch.equal(a, b) for a, b in zip(expected[layer], found, strict=True))
    assert same(state(cache), state(other))


# ---- what is stored is really rounded, and no worse than it should be (invariant 4) ----


@every_recipe
def test_tokens_that_come_one_by_one_are_rounded_like_those_of_a_prompt(recipe):
    sinks, recent, block = recipe.window.sinks, recipe.window.recent, recipe.window.block
    prompt = -(-max(sinks, 1) // block) * block + 2 * block
    x, cache = tensors(prompt + recent + 2 * block, rows=1), make(recipe)
    feed_in(cache, x, [prompt, recent + block - 1] + [1] * (block + 1))
    assert encoded(cache) == prompt + 2 * block
    for layer, pair in enumerate(read(cache)):
        for role, out in enumerate(pair):
            wrong = (out - x[layer, role])[0].norm(dim=-1)
            early, late = wrong[sinks:prompt], wrong[prompt : prompt + 2 * block]
            if lossy(recipe, layer, role):
                assert (early > 0).all() and (late > 0).all()
                assert 0.6 < float(early.square().mean().sqrt() / late.square().mean().sqrt()) < 1.6
            elif role == 1 or recipe.position == "post":
                assert not wrong.any()


@every_recipe
def test_the_error_is_of_the_size_of_the_bits(recipe, monkeypatch):
    """Relative to what is rounded, mean and prediction taken away, as far as a Gaussian's at these bits."""
    rounded: dict[tuple[int, str], float] = {}
    residual = Codec.residual

    def watching(self, x_NTC, context):
        found = residual(self, x_NTC, context)
        rounded[self.layer, self.role] = rounded.get((self.layer, self.role), 0.0) + float(found.square().sum())
        return found

    monkeypatch.setattr(Codec, "residual", watching)
    size = max(200, recipe.window.recent + recipe.window.block)
    x, cache = tensors(size), make(recipe)
    feed_in(cache, x, [size])
    for layer, pair in enumerate(read(cache)):
        for role, out in enumerate(pair):
            codec, count = cache.codecs[layer][role], cache.layers[layer].encoded
            if not lossy(recipe, layer, role):
                continue
            whole = float(x[layer, role, :, :count].square().sum())
            energy = whole if recipe.fits_prompt else rounded.get((layer, codec.role), whole)
            found = float((out - x[layer, role])[:, :count].norm())
            assert found < gaussian_rate.most(codec) * energy**0.5, (layer, role)


# ---- a token alone is what it is in its block, where its stage says so ----


@every_recipe
def test_a_token_alone_has_the_fields_that_it_has_in_its_block(recipe):
    """By `by_token` vLLM's pages have any length, and ShadowKV reads single tokens."""
    block, cache = recipe.window.block, make(recipe)
    x, tables = tensors(block), [table.expand(2, -1, -1) for table in rotary().tables(torch.arange(block)[None])]
    for codec, x_BTC in zip(chain(*cache.codecs), x.flatten(0, 1), strict=True):
        if codec.scheme.by_token and not recipe.fits_prompt:
            spans = [slice(None), *(slice(n, n + 1) for n in range(block))]
            contexts = [
                Context(rope=(tables[0][:, span], tables[1][:, span]), predicted=x_BTC[:, span].bfloat16() / 2)
                for span in spans
            ]
            whole, *alone = [codec.encode(x_BTC[:, span], of) for span, of in zip(spans, contexts, strict=True)]
            for name, field in whole.items():
                found = torch.cat([fields[name] for fields in alone], 1)
                assert torch.isclose(found.float(), field.float(), 0.01).float().mean() > 0.98, (codec.layer, name)


# ---- what is exact (invariants 5 and 9) ----


@every_recipe
def test_prompt_sinks_and_recent_tokens_are_exact(recipe):
    dtype = torch.bfloat16
    sinks, recent, block = recipe.window.sinks, recipe.window.recent, recipe.window.block
    x, cache = tensors(recent + 3 * block).to(dtype), make(recipe)
    for layer, out in enumerate(feed(cache, x, 0, 7)):
        assert torch.equal(torch.stack(out), x[layer, :, :, :7])
    for size in (1, block, recent, 2, block + 1, 1, 1):
        start, stop = cache.length, cache.length + size
        for layer, pair in enumerate(feed(cache, x, start, stop)):
            for role, out in enumerate(pair):
                assert out.dtype == dtype and out.shape == x[layer, role, :, :stop].shape
                assert torch.equal(out[:, :sinks], x[layer, role, :, : min(sinks, stop)])
                newest = max(0, start - recent)
                assert torch.equal(out[:, newest:], x[layer, role, :, newest:stop])
    assert encoded(cache) >= 2 * block


# ---- padding, reordering, cropping, using again (invariant 6) ----


def mask(tokens: int, *padding: int) -> torch.Tensor:
    return torch.arange(tokens) >= torch.tensor(padding)[:, None]


@every_recipe
def test_padded_slots_never_matter(recipe):
    """Whatever stands in a padded slot, every real token of every row is stored and read the same."""
    recent, block = recipe.window.recent, recipe.window.block
    total = recent + 4 * block
    real = mask(total, 0, block + 3)
    x = tensors(total)
    other = torch.where(real[:, :, None], x, 300 * torch.randn(x.shape))
    found = []
    for given in (x, other):
        cache = make(recipe)
        feed_in(cache, given, [2 * block, recent, 1, 2 * block - 1], real_BT=real)
        found.append((read(cache), blocks(state(cache)), [held["sinks"] for held in state(cache)]))
    (one, codes, kept), (two, others, again) = found
    assert same(codes, others)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    for a, b in zip(one, two, strict=True):
        for half_a, half_b in zip(a, b, strict=True):
            assert torch.equal(half_a[real], half_b[real])


@every_recipe
def test_rows_of_unequal_length_lose_no_more_than_rows_alone(recipe):
    sinks, recent, block = recipe.window.sinks, recipe.window.recent, recipe.window.block
    total = recent + 4 * block
    x, real = tensors(total), mask(total, 0, 2 * block - 3)
    cache, alone = make(recipe), make(recipe)
    feed_in(cache, x, [2 * block - 1, 1, 2, total - 2 * block - 2], real_BT=real)
    feed_in(alone, x, [total])
    for layer, pair in enumerate(read(cache)):
        for role, (out, best) in enumerate(zip(pair, read(alone)[layer], strict=True)):
            target = x[layer, role]
            row = real[1].nonzero()[:, 0]
            assert torch.equal(out[1, row[:sinks]], target[1, row[:sinks]])
            assert torch.equal(out[:, -recent:], target[:, -recent:])
            assert error(out[real], target[real]) < 1.4 * error(best, target) + 1e-6


@every_recipe
def test_reordered_rows_are_other_rows(recipe):
    recent, block = recipe.window.recent, recipe.window.block
    x, rows = tensors(recent + 4 * block, rows=3), torch.tensor([2, 0, 0])
    real = mask(x.shape[3], 0, 3, block)
    cache, other = make(recipe), make(recipe)
    feed_in(cache, x, [recent + 2 * block, 3], real_BT=real)
    cache.reorder(rows)
    feed_in(other, x[:, :, rows], [recent + 2 * block, 3], real_BT=real[rows])
    assert same(blocks(state(cache)), blocks(state(other)))
    start = cache.length
    for one, two in zip(
        feed(cache, x[:, :, rows], start, start + block, real[rows]),
        feed(other, x[:, :, rows], start, start + block, real[rows]),
        strict=True,
    ):
        assert all(
            torch.equal(a[real[rows][:, : a.shape[1]]], b[real[rows][:, : a.shape[1]]])
            for a, b in zip(one, two, strict=True)
        )
    assert same(state(cache), state(other))


@every_recipe
def test_a_reset_cache_is_a_new_one(recipe):
    recent, block = recipe.window.recent, recipe.window.block
    x, cache, other = tensors(recent + 2 * block), make(recipe), make(recipe)
    feed_in(cache, tensors(100, rows=3, seed=5), [80, 1, 19])
    cache.crop(20)
    cache.reset()
    assert cache.length == 0 and cache.memory_report().sequence_bytes == 0
    for each in (cache, other):
        feed_in(each, x, [recent, 2 * block])
    assert same(state(cache), state(other))
    assert cache.memory_report() == other.memory_report()


# ---- bad numbers and interrupted passes (invariant 8) ----


@every_recipe
def test_rows_of_nothing_but_zeros_or_a_constant(recipe):
    recent, block = recipe.window.recent, recipe.window.block
    for value in (0.0, 3.0, 1e-7):
        x, cache = torch.full((3, 2, 2, recent + block, 64), value), make(recipe)
        feed_in(cache, x, [recent + block])
        assert all(bool(torch.isfinite(out).all()) for pair in read(cache) for out in pair)


@every_recipe
def test_a_bad_number_is_refused_by_name_and_leaves_no_trace(recipe):
    recent, block = recipe.window.recent, recipe.window.block
    start, stop = recent + block + 1, 2 * recent + 8 * block
    x, cache, other = tensors(stop), make(recipe), make(recipe)
    feed_in(cache, x, [start])
    before = state(cache)
    for bad in (torch.nan, torch.inf, -torch.inf):
        broken = x.clone()
        broken[1, 1, 0, start + block, 7] = bad
        with pytest.raises(ValueError, match="layer 1, from token .* on: NaN or infinity in the model's values"):
            feed(cache, broken, start, stop)
        assert cache.length == start and same(before, state(cache))
    feed(cache, x, start, stop)
    feed_in(other, x, [start, stop - start])
    assert cache.reencoded == 0 and same(state(cache), state(other))


@every_recipe
def test_numbers_too_large_for_the_scales_are_refused_and_never_decoded_to_nan(recipe):
    total = recipe.window.recent + 2 * recipe.window.block
    x, cache, other = tensors(total), make(recipe), make(recipe)
    try:
        feed_in(cache, x * 1e9, [total])
    except ValueError as error:
        assert "are too large for the scales" in str(error) and cache.length == 0
        feed_in(cache, x, [total])
        feed_in(other, x, [total])
        assert same(state(cache), state(other))
    else:
        assert all(bool(torch.isfinite(out).all()) for pair in read(cache) for out in pair)


@every_recipe
def test_a_forward_pass_that_stops_midway_is_undone_by_the_next(recipe):
    recent, block = recipe.window.recent, recipe.window.block
    x, cache, other = tensors(3 * recent + 3 * block), make(recipe), make(recipe)
    wrong = tensors(x.shape[3], seed=9)
    sizes = [recent + block - 2, 1, recent, 1, block + recent]
    for stopped, size in zip((1, 2, 2, 1, 2), sizes, strict=True):
        start = cache.length
        feed(cache, wrong, start, start + size, layers=range(stopped))
        if stopped == 2:
            feed(cache, wrong, start, start + min(3, recent), layers=[0])
        assert cache.length == start
        feed(cache, x, start, start + size)
        feed(other, x, start, start + size)
    assert cache.reencoded == 0
    assert same(state(cache), state(other))
    for one, two in zip(read(cache), read(other), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
