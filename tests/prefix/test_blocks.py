"""Blocks of prefixes: the bytes of a cache, one name for one prefix."""

import feeding
import pytest
import torch
from feeding import GEOMETRY
from kept_blocks import EACH, contents, decoded, files, filled, ids, rows, store

from kvq_runtime.cache import BlockCache
from kvq_runtime.prefix import block, chain
from kvq_runtime.prefix.store import check_recipe
from kvq_runtime.recipe import preset

# ---- what a block is


@pytest.mark.parametrize("name", EACH)
def test_blocks_are_those_of_a_cache(name, tmp_path):
    """Their bytes, encoded by the store from rows and by a cache in which the rows arrived; their decoded rows."""
    kept, cache, tokens, (keys, _) = filled(tmp_path / "a", name)
    blocks = kept.load(tokens)
    encoded = min(layer.encoded for layer in cache.layers.values())
    assert encoded >= 3 * kept.block
    for number in range(encoded // kept.block):
        theirs = block.encoded_block(cache, number)
        assert torch.equal(blocks[number].sinks_2LSC, theirs.sinks_2LSC)
        for layer in range(GEOMETRY.layers):
            for role in (0, 1):
                for field, x in theirs.fields[layer][role].items():
                    assert torch.equal(x, blocks[number].fields[layer][role][field]), (layer, role, field)
    sinks = kept.codec.recipe.window.sinks
    for layer, pair in decoded(kept, blocks).items():
        expected = [x[0, :encoded].clone() for x in cache.decoder.whole(layer)]
        for ours, theirs in zip(pair, expected, strict=True):
            assert torch.equal(ours.flatten(1)[:encoded], theirs)
        assert torch.equal(pair[0][:sinks], keys[layer][:sinks])
        assert pair[0].shape == (5 * kept.block, GEOMETRY.kv_heads, GEOMETRY.head_size)
    assert store(tmp_path / "b", name).put_cache(tokens, cache) == encoded  # as they are
    assert contents(tmp_path / "b").items() <= contents(tmp_path / "a").items()


@pytest.mark.parametrize("name", EACH)
def test_a_cache_goes_on_from_loaded_blocks_as_from_its_own(name, tmp_path):
    """The same steps after them give the same keys and values."""
    kept, _, tokens, (keys, values) = filled(tmp_path, name)
    recipe, size = kept.codec.recipe, 2 * kept.block
    whole = BlockCache(recipe.with_exact(recent=0), GEOMETRY, kept.codec.tensors or None)
    loaded = BlockCache(kept.codec.recipe, GEOMETRY, kept.codec.tensors)
    block.fill(loaded, kept.load(tokens[:size]), "cpu")
    loaded.reset()
    block.fill(loaded, kept.load(tokens[:size]), "cpu")
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


@pytest.mark.parametrize("name", EACH)
def test_a_block_depends_neither_on_its_run_nor_on_the_blocks_before(name, tmp_path):
    """Encoded alone it is the same; decoded from a token on, positions go on counting, and no sink is added."""
    kept, _, tokens, (keys, values) = filled(tmp_path, name, torch.float32)
    count = 5 * kept.block
    pairs = {
        layer: (k[:count].flatten(1), v[:count].flatten(1))
        for layer, (k, v) in enumerate(zip(keys, values, strict=True))
    }
    run = kept.codec.encode(0, pairs)
    for number in (0, 3):
        span = slice(number * kept.block, (number + 1) * kept.block)
        (alone,) = kept.codec.encode(number, {layer: (k[span], v[span]) for layer, (k, v) in pairs.items()})
        assert torch.equal(run[number].sinks_2LSC, alone.sinks_2LSC)
        for layer in range(GEOMETRY.layers):
            for one, other in zip(run[number].fields[layer], alone.fields[layer], strict=True):
                assert one.keys() == other.keys() and all(torch.equal(x, other[field]) for field, x in one.items())
    whole, start = decoded(kept, kept.load(tokens)), 3 * kept.block
    blocks = kept.load(tokens, start=start)
    assert len(blocks) == 2
    for layer, pair in decoded(kept, blocks, start).items():
        for ours, theirs in zip(pair, whole[layer], strict=True):
            assert torch.allclose(ours, theirs[start:], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", ["subkv-2bit", "h2o", "squat-online-2bit"])
def test_recipes_whose_blocks_mean_nothing_elsewhere_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} is fitted to each prompt, or .*; use a"):
        check_recipe(preset(name))


# ---- which blocks are kept, and found


def test_prompts_share_what_they_begin_with(tmp_path):
    kept, (keys, values) = store(tmp_path), rows(64)
    one, other = ids(64), [*ids(40), *ids(24, first=50)]
    kept.put(one, keys, values)
    assert (kept.longest(other), len(files(tmp_path))) == (32, 4)
    kept.put(other, keys, values)
    assert (kept.longest(other), len(files(tmp_path))) == (64, 6)
    assert kept.longest(one[1:]) == 0 and kept.longest(one[:31]) == 16 and kept.longest([]) == 0


def test_rows_of_a_suffix_are_enough_for_its_blocks(tmp_path):
    whole, parts, (keys, values) = store(tmp_path / "a"), store(tmp_path / "b"), rows(64)
    whole.put(ids(64), keys, values)
    parts.put(ids(32), [k[:32] for k in keys], [v[:32] for v in values])
    later = [k[32:] for k in keys], [v[32:] for v in values]
    assert parts.put(ids(64), *later, start=32) == 64
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert store(tmp_path / "c").put(ids(64), *later, start=32) == 0  # without its beginning it could not be found


def test_blocks_before_one_with_nan_are_kept(tmp_path):
    kept, (keys, values) = store(tmp_path, "aqua-2bit"), rows(200)
    size, whole = kept.block, [layer.clone() for layer in keys]
    keys[2][3 * size, 1, 5] = float("inf")
    with pytest.raises(ValueError, match="block 3: NaN or infinity"):
        kept.put(ids(200), keys, values)
    assert kept.longest(ids(200)) == 3 * size
    assert kept.put(ids(200), whole, values) == 200 // size * size


@pytest.mark.parametrize(
    "change", [{"model": "another"}, {"dtype": torch.float32}, {"name": "rtn-4bit"}, {"seed": 1}, {"salt": "b"}]
)
def test_another_model_dtype_recipe_fit_or_tenant_finds_nothing(tmp_path, change):
    (keys, values), given = rows(32), {"name": "mean-higgs-2bit"}

    def opened(salt: str = "a", **settings):
        return store(tmp_path, **given | settings).of_tenant(salt)

    opened().put(ids(32), keys, values)
    assert opened().longest(ids(32)) == 32 and opened(**change).longest(ids(32)) == 0
    assert opened("").longest(ids(32)) == 0 and opened().of_tenant("a").longest(ids(32)) == 0


def test_tokens_are_compared_and_not_their_hash_alone(tmp_path, monkeypatch, caplog):
    """Two prompts of one name: what is found under it is not taken for the other's."""
    monkeypatch.setattr(chain, "block_names", lambda root, tokens_T, block: ["ab" * 32] * (len(tokens_T) // block))
    kept, (keys, values) = store(tmp_path), rows(16)
    kept.put(ids(16), keys, values)
    assert kept.load(ids(16, first=6)) == []
    assert "other tokens" in caplog.text


def test_tokens_rows_and_caches_that_cannot_be_kept_are_refused(tmp_path):
    for row in ([-1], [1 << 31], torch.ones(2, 3, dtype=torch.long), torch.ones(3), [True]):
        with pytest.raises(ValueError, match="token"):
            chain.token_row(row)
    kept, cache, tokens, (keys, values) = filled(tmp_path, "rtn-2bit")
    with pytest.raises(ValueError, match="autocast"):
        kept.put(tokens, [k.float() for k in keys], [v.float() for v in values])
    cache.positions.real_BT = torch.ones(1, cache.length, dtype=torch.bool)
    with pytest.raises(ValueError, match="padded"):
        kept.put_cache(tokens, cache)
    with pytest.raises(ValueError, match="keys and values of float64; bfloat16, float16, float32 are kept"):
        store(tmp_path, dtype=torch.float64)
