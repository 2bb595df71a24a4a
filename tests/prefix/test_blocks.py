"""Blocks of prefixes: the bytes of a cache, one name for one prefix."""

from dataclasses import replace

import feeding
import fitted
import pytest
import torch
from feeding import GEOMETRY, RECIPES
from kept_blocks import FEW, KEPT, REFUSED, each, files, filled, ids, rows, store

from kvq_runtime.cache import BlockCache
from kvq_runtime.geometry import Window
from kvq_runtime.prefix import block_codec, chain
from kvq_runtime.prefix.store import PrefixBlocks, check
from kvq_runtime.recipe import preset

# ---- what a block is


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in KEPT])
def test_a_block_has_the_bytes_of_the_cache(name):
    """Encoded by the store from rows, and by a cache in which the same rows arrived."""
    kept, cache, tokens, _ = filled(name)
    blocks = kept.load(tokens)
    numbers = range(min(layer.blocks for layer in cache.layers.values()))
    assert len(numbers) >= 3
    for number, ours in zip(numbers, blocks, strict=False):
        theirs = block_codec.held(cache, number)
        assert torch.equal(ours.sinks_2LSC, theirs.sinks_2LSC)
        for layer in range(GEOMETRY.layers):
            for role in (0, 1):
                for field, x in theirs.fields[layer][role].items():
                    assert torch.equal(x, ours.fields[layer][role][field]), (layer, role, field)


@pytest.mark.parametrize("name", each(FEW))
def test_decoded_rows_are_those_that_a_cache_reads(name):
    kept, cache, tokens, (keys, _) = filled(name)
    blocks = kept.load(tokens)
    encoded = min(layer.encoded for layer in cache.layers.values())
    decoded = {layer: (k.clone(), v.clone()) for layer, k, v in kept.decode(blocks)}
    sinks = kept.format.recipe.window.sinks
    for layer in range(GEOMETRY.layers):
        expected = [x[0, :encoded].clone() for x in cache.decoder.whole(layer)]
        for ours, theirs in zip(decoded[layer], expected, strict=True):
            assert torch.equal(ours.flatten(1)[:encoded], theirs)
        assert torch.equal(decoded[layer][0][:sinks], keys[layer][:sinks])
        assert decoded[layer][0].shape == (5 * kept.block, GEOMETRY.kv_heads, GEOMETRY.head_size)


@pytest.mark.parametrize("name", each(FEW))
def test_a_cache_goes_on_from_loaded_blocks_as_from_its_own(name):
    """The same steps after them give the same keys and values, and the same blocks."""
    kept, _, tokens, (keys, values) = filled(name)
    recipe, size = kept.format.recipe, 2 * kept.block
    whole = BlockCache(recipe.with_exact(recent=0), GEOMETRY, kept.codec.tensors or None)
    loaded = BlockCache(kept.codec.recipe, GEOMETRY, kept.codec.tensors)
    block_codec.fill(loaded, kept.load(tokens, size), "cpu")
    loaded.reset()
    block_codec.fill(loaded, kept.load(tokens, size), "cpu")
    assert loaded.length == size

    def feed(cache, start: int, stop: int) -> list:
        cache.positions.announce(None, None, feeding.rotary())
        spans = [
            (k[start:stop].flatten(1)[None], v[start:stop].flatten(1)[None]) for k, v in zip(keys, values, strict=True)
        ]
        return [[x.clone() for x in cache.update(layer, *span)] for layer, span in enumerate(spans)]

    feed(whole, 0, size)
    for start, stop in ((size, size + 3), (size + 3, len(tokens))):
        for ours, theirs in zip(feed(loaded, start, stop), feed(whole, start, stop), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    loaded.crop(size - 3)
    assert loaded.length == size - 3


@pytest.mark.parametrize("name", each(FEW))
def test_a_cache_is_kept_as_it_is(name):
    """What `put_cache` keeps, blocks and the whole blocks of the window, is what `put` makes of the rows."""
    kept, cache, tokens, _ = filled(name)
    again = store(name=name)
    assert again.put_cache(tokens, cache) == kept.longest(tokens) == 5 * kept.block
    assert again.shelf._held == kept.shelf._held  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", each(FEW))
def test_a_block_does_not_depend_on_those_it_is_encoded_with(name):
    kept, (keys, values) = store(name=name), rows(5 * store(name=name).block)
    pairs = [(k.flatten(1), v.flatten(1)) for k, v in zip(keys, values, strict=True)]
    run = kept.codec.encode(0, dict(enumerate(pairs)))
    assert len(run) == 5
    for number, ours in enumerate(run):
        span = slice(number * kept.block, (number + 1) * kept.block)
        (alone,) = kept.codec.encode(number, {layer: (k[span], v[span]) for layer, (k, v) in enumerate(pairs)})
        assert torch.equal(ours.sinks_2LSC, alone.sinks_2LSC)
        for layer in range(GEOMETRY.layers):
            for one, other in zip(ours.fields[layer], alone.fields[layer], strict=True):
                assert one.keys() == other.keys() and all(torch.equal(x, other[field]) for field, x in one.items())


def test_a_run_is_whole_blocks():
    kept, (keys, values) = store(), rows(2 * store().block)
    pairs = dict(enumerate((k.flatten(1), v.flatten(1)) for k, v in zip(keys, values, strict=True)))
    short = {layer: (k[:-1], v[:-1]) for layer, (k, v) in pairs.items()}
    with pytest.raises(ValueError, match=rf"blocks are \[{kept.block}, "):
        kept.codec.encode(0, short)


def test_blocks_before_one_with_nan_are_kept_and_runs_end_where_a_block_is_kept():
    kept, (keys, values) = store(name="aqua-2bit"), rows(1200)
    size, whole = kept.block, [layer.clone() for layer in keys]
    values[0][4 * size + 3, 0, 0], keys[2][3 * size, 1, 5] = float("nan"), float("inf")
    with pytest.raises(ValueError, match="layer 2, block 3: NaN or infinity in the keys"):
        kept.put(ids(1200), keys, values)
    assert kept.longest(ids(1200)) == 3 * size
    assert kept.put(ids(1200), whole, [layer.nan_to_num() for layer in values]) == 1200 // size * size
    names, held = chain.names(kept.root, chain.token_row(ids(1200)), size), dict(kept.shelf._held)  # type: ignore[attr-defined]
    for number in (1, 3, 4):
        kept.shelf.drop(names[number])
    assert kept.put(ids(1200), whole, [layer.nan_to_num() for layer in values]) == 1200 // size * size
    assert dict(kept.shelf._held) == held  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", each(FEW))
def test_blocks_of_the_middle_decode_as_in_the_whole(name):
    """From a token on: positions go on counting, and no sink is put where it is not."""
    kept, _, tokens, _ = filled(name, torch.float32)
    whole = {layer: (k.clone(), v.clone()) for layer, k, v in kept.decode(kept.load(tokens))}
    for start in (kept.block, 3 * kept.block):
        blocks = kept.load(tokens, start=start)
        assert len(blocks) == 5 - start // kept.block == (kept.checked(tokens, start=start) - start) // kept.block
        for layer, *pair in kept.decode(blocks, start=start):
            for ours, theirs in zip(pair, whole[layer], strict=True):
                assert torch.allclose(ours, theirs[start:], rtol=0.02, atol=0.02)
    with pytest.raises(ValueError, match="multiples of"):
        kept.load(tokens, start=3)


def test_tenants_of_a_tenant(tmp_path):
    """A salt inside a salt is another one than the two in a row, and needs both."""
    kept, (keys, values) = store(tmp_path, salt="a"), rows(32)
    kept.under("bc").put(ids(32), keys, values)
    assert kept.under("bc").longest(ids(32)) == 32 and kept.under("") is kept
    others = [kept, kept.under("b"), store(tmp_path, salt="ab").under("c"), store(tmp_path).under("bc")]
    others += [store(tmp_path, salt=salt) for salt in ("abc", "1:abc")]  # of an operator who chose what a tenant has
    assert not any(other.longest(ids(32)) for other in others)
    assert not kept.under("x").under("bc").longest(ids(32)) and not kept.under("bc").under("bc").longest(ids(32))


def test_sinks_longer_than_a_block_stay_exact():
    recipe = replace(RECIPES["rtn-2bit"], window=Window(sinks=20, recent=4, block=16))
    kept = PrefixBlocks(None, recipe, GEOMETRY, model="m", dtype=torch.bfloat16)
    keys, values = rows(48)
    kept.put(ids(48), keys, values)
    for layer, k, _ in kept.decode(kept.load(ids(48), start=16), start=16):
        assert torch.equal(k[:4], keys[layer][16:20]) and not torch.equal(k[4:], keys[layer][20:])
    for layer, k, v in kept.decode(kept.load(ids(48))):
        assert torch.equal(k[:20], keys[layer][:20]) and torch.equal(v[:20], values[layer][:20])
        assert not torch.equal(k[20:], keys[layer][20:])


@pytest.mark.parametrize("name", ["subkv-2bit", "h2o", "squat-online-2bit", "svdq-shadow-2bit-v4"])
def test_what_cannot_be_kept_is_refused_with_the_reason(name):
    with pytest.raises(ValueError, match=f"{name} .*; use the"):
        check(preset(name))


def test_every_other_recipe_is_kept():
    assert len(KEPT) > 100 and all(recipe.policies for name, recipe in RECIPES.items() if name in REFUSED)


# ---- which blocks are found


def test_prompts_share_what_they_begin_with(tmp_path):
    kept, (keys, values) = store(tmp_path), rows(64)
    one, other = ids(64), [*ids(40), *ids(24, first=50)]
    kept.put(one, keys, values)
    assert (kept.longest(other), len(files(tmp_path))) == (32, 4)
    kept.put(other, keys, values)
    assert (kept.longest(other), len(files(tmp_path))) == (64, 6)
    assert kept.longest(one[1:]) == 0 and kept.longest(one[:31]) == 16 and kept.longest([]) == 0


def test_rows_of_a_suffix_are_enough_for_its_blocks(tmp_path):
    whole, parts, (keys, values) = store(), store(), rows(64)
    whole.put(ids(64), keys, values)
    parts.put(ids(32), [k[:32] for k in keys], [v[:32] for v in values])
    assert parts.put(ids(64), [k[32:] for k in keys], [v[32:] for v in values], start=32) == 64
    assert parts.shelf._held == whole.shelf._held  # type: ignore[attr-defined]
    assert store().put(ids(64), [k[32:] for k in keys], [v[32:] for v in values], start=32) == 0  # not reachable
    with pytest.raises(ValueError, match="multiple of 16"):
        parts.put(ids(64), keys, values, start=5)


@pytest.mark.parametrize(
    "change", [{"salt": "b"}, {"model": "another"}, {"dtype": torch.float32}, {"name": "rtn-4bit"}]
)
def test_another_tenant_model_dtype_or_recipe_finds_nothing(tmp_path, change):
    kept, (keys, values) = store(tmp_path, salt="a"), rows(32)
    kept.put(ids(32), keys, values)
    assert store(tmp_path, salt="a").longest(ids(32)) == 32
    assert store(tmp_path, **{"salt": "a"} | change).longest(ids(32)) == 0


def test_another_fit_finds_nothing(tmp_path):
    recipe, (keys, values) = RECIPES["aqua-2bit"], rows(32)
    made = [
        PrefixBlocks(
            tmp_path, recipe, GEOMETRY, fitted.tensors(recipe, GEOMETRY, seed), model="m", rotary=feeding.rotary()
        )
        for seed in (0, 1)
    ]
    made[0].put(ids(32), keys, values)
    assert [one.longest(ids(32)) for one in made] == [32, 0]


def test_tokens_are_compared_and_not_their_hash_alone(tmp_path, monkeypatch, caplog):
    """Two prompts of one name: what is found under it is not taken for the other's."""
    monkeypatch.setattr(chain, "name", lambda previous, tokens: "ab" * 32)
    kept, (keys, values) = store(tmp_path), rows(16)
    kept.put(ids(16), keys, values)
    assert kept.load(ids(16, first=6)) == []
    assert "other tokens" in caplog.text


@pytest.mark.parametrize("given", [[-1], [1 << 31], torch.ones(2, 3, dtype=torch.long), torch.ones(3), [True]])
def test_what_are_no_token_ids_is_refused(given):
    with pytest.raises(ValueError, match="token"):
        store().longest(given)


def test_rows_that_cannot_be_are_refused():
    kept, (keys, values) = store(), rows(32)
    with pytest.raises(ValueError, match="autocast"):
        kept.put(ids(32), [k.float() for k in keys], [v.float() for v in values])
    with pytest.raises(ValueError, match="3"):
        kept.put(ids(32), keys[:2], values[:2])
    keys[1][20, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="layer 1, block 1: NaN"):
        kept.put(ids(32), keys, values)
    assert kept.longest(ids(32)) == 16


def test_a_padded_cache_is_refused():
    kept, cache, tokens, _ = filled("rtn-2bit")
    cache.positions.real_BT = torch.ones(1, cache.length, dtype=torch.bool)
    with pytest.raises(ValueError, match="padded"):
        kept.put_cache(tokens, cache)
