"""Blocks of prefixes: the bytes of a cache, one name for one prefix, and nothing that is not checked."""

import json
import os
import random
import stat
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import feeding
import fitted
import forked
import mutate
import pytest
import safetensors.torch
import torch
from feeding import GEOMETRY, RECIPES

from kvq_runtime.cache import BlockCache
from kvq_runtime.disk import strict_json
from kvq_runtime.engines import kept as kept_options
from kvq_runtime.errors import ArtifactError
from kvq_runtime.geometry import Window
from kvq_runtime.ops import lossless
from kvq_runtime.prefix import block_file, chain, coder, upkeep
from kvq_runtime.prefix.shelf import SLACK, Folder, Memory, all_blocks, parse_bytes
from kvq_runtime.prefix.store import PrefixBlocks, check
from kvq_runtime.recipe import preset

REFUSED = {name for name, recipe in RECIPES.items() if recipe.policies}
KEPT = [name for name in RECIPES if name not in REFUSED]
FEW = (
    "exact", "exact-coded", "exact-pre", "higgs-2bit", "aqua-2bit", "kivi-2bit", "squat-pre-2bit", "svdq-2bit",
    "rest-1bit",
)  # fmt: skip
QUICK = (
    "exact",
    "exact-coded",
    "aqua-2bit",
    "kivi-2bit",
    "rest-1bit",
)  # of which `make test` runs what the others are put through as well


def each(names) -> list:
    """Recipes as parameters; all but a few are slow."""
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


def store(path=None, name: str = "rtn-2bit", model: str = "m", **settings) -> PrefixBlocks:
    recipe = RECIPES[name]
    tensors = fitted.tensors(recipe, GEOMETRY)
    dtype = settings.pop("dtype", torch.bfloat16)
    return PrefixBlocks(path, recipe, GEOMETRY, tensors, model=model, dtype=dtype, rotary=feeding.rotary(), **settings)


def rows(count: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> tuple[list, list]:
    """Keys and values of every layer, [T, H, D] each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, GEOMETRY.layers, count, GEOMETRY.kv_heads, GEOMETRY.head_size)
    keys, values = torch.randn(shape, generator=generator).to(dtype)
    return list(keys), list(values)


def ids(count: int, first: int = 5) -> list[int]:
    return [(first + 7 * n) % 97 for n in range(count)]


def filled(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[PrefixBlocks, BlockCache, list[int], tuple]:
    """A store and a cache that were given the same tokens: five blocks and a rest."""
    kept = store(name=name, dtype=dtype)
    count = 5 * kept.block + 3
    tokens, (keys, values) = ids(count), rows(count, dtype=dtype)
    assert kept.put(tokens, keys, values) == 5 * kept.block
    cache = BlockCache(kept.format.recipe, GEOMETRY, kept.coder.tensors or None)
    cache.positions.announce(None, None, feeding.rotary())
    for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
        cache.update(layer, k.flatten(1)[None], v.flatten(1)[None])
    return kept, cache, tokens, (keys, values)


def size_of(count: int) -> int:
    """Bytes of the files of so many tokens; the first has sinks, so that it is larger than the others."""
    kept, (keys, values) = store(), rows(count)
    kept.put(ids(count), keys, values)
    return kept.shelf.size  # type: ignore[attr-defined]


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.safetensors"))


# ---- what a block is


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in KEPT])
def test_a_block_has_the_bytes_of_the_cache(name):
    """Encoded by the store from rows, and by a cache in which the same rows arrived."""
    kept, cache, tokens, _ = filled(name)
    blocks = kept.load(tokens)
    numbers = range(min(layer.blocks for layer in cache.layers.values()))
    assert len(numbers) >= 3
    for number, ours in zip(numbers, blocks, strict=False):
        theirs = coder.held(cache, number)
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
    whole = BlockCache(recipe.with_exact(recent=0), GEOMETRY, kept.coder.tensors or None)
    loaded = BlockCache(kept.coder.recipe, GEOMETRY, kept.coder.tensors)
    coder.fill(loaded, kept.load(tokens, size), "cpu")
    loaded.reset()
    coder.fill(loaded, kept.load(tokens, size), "cpu")
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
    run = kept.coder.encode_run(0, dict(enumerate(pairs)))
    assert len(run) == 5
    for number, ours in enumerate(run):
        span = slice(number * kept.block, (number + 1) * kept.block)
        alone = kept.coder.encode(number, {layer: (k[span], v[span]) for layer, (k, v) in enumerate(pairs)})
        assert torch.equal(ours.sinks_2LSC, alone.sinks_2LSC) and ours.exact.keys() == alone.exact.keys()
        for layer in range(GEOMETRY.layers):
            for one, other in zip(ours.fields[layer], alone.fields[layer], strict=True):
                assert one.keys() == other.keys() and all(torch.equal(x, other[field]) for field, x in one.items())


def test_blocks_before_one_with_nan_are_kept_and_runs_end_where_a_block_is_kept():
    kept, (keys, values) = store(name="rest-1bit"), rows(1200)
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


def test_codes_of_a_file_take_fewer_bytes_and_need_the_fit_alone_to_be_read(tmp_path):
    """Without a fit's tensors a block is checked; with those of another fit it is no block; none is longer than raw."""
    kept, (keys, values) = store(tmp_path, "rest-1bit"), rows(2 * store(name="rest-1bit").block)
    count = kept.put(ids(2 * kept.block), keys, values)
    (first, second), form = kept.load(ids(count)), kept.format
    raw = sum(part["codes"].numel() for pair in second.fields.values() for part in pair)
    _, path = (kept.shelf.path(one) for one in chain.names(kept.root, chain.token_row(ids(count)), kept.block))  # type: ignore[attr-defined]
    data = path.read_bytes()
    assert len(data) < 0.8 * raw and first.fields.keys() == second.fields.keys() and not [*upkeep.damaged(tmp_path)]
    assert form.data_bytes(1) == raw + 5 and form.largest() > form.data_bytes(0)
    assert not any(replace(form, tensors=None).read(data)[1].fields[0][0])
    other = replace(form, tensors=fitted.tensors(form.recipe, GEOMETRY, 1))
    with pytest.raises(ArtifactError, match="coded: the codes are others|coded: something is left"):
        other.read(data)
    short = {layer: tuple({"codes": one["codes"][:-1]} for one in pair) for layer, pair in second.fields.items()}
    with pytest.raises(ValueError, match="codes of layer 0: torch.int8 .*; a block has"):
        form.to_bytes(replace(second, fields=short), form.read(data)[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_of_a_file_take_fewer_bytes_and_are_the_same(tmp_path, dtype):
    """Checked without a fit, also by `verify`; and minus zero stays."""
    kept, plain = (store(tmp_path, name, dtype=dtype) for name in ("exact-coded", "exact"))
    count = 2 * kept.block
    keys, values = rows(count, dtype=dtype)
    keys[1][3, 0, 2] = -0.0
    assert kept.put(ids(count), keys, values) == plain.put(ids(count), keys, values) == count
    assert kept.tally["written"] < 0.9 * plain.tally["written"] and not [*upkeep.damaged(tmp_path)]
    found, exact = (one.load(ids(count))[1].fields for one in (kept, plain))
    for layer, pair in exact.items():
        for one, own in zip(found[layer], pair, strict=True):
            assert torch.equal(one["x"].view(torch.uint8), own["x"].view(torch.uint8))
    name = chain.names(kept.root, chain.token_row(ids(count)), kept.block)[1]
    data = kept.shelf.get(name, 1 << 20) or b""
    link, tensors = kept.format.read(data)[0], safetensors.torch.load(data)
    bad = torch.full_like(keys[0].flatten(1)[: kept.block], float("nan"))
    numbers = [bad for layer in range(GEOMETRY.layers) for _ in range(2)]
    for given, why in ((tensors["lossless"][:-4], "lossless: "), (lossless.encode(numbers), "finite: lossless")):
        about = block_file._about(link)
        about["content"] = block_file._content(about, {"lossless": given})
        told = safetensors.torch.save({"lossless": given}, {"kvq": strict_json.dumps(about)})
        with pytest.raises(ArtifactError, match=why):
            kept.format.read(told)


def test_threads_keep_the_same_bytes(tmp_path):
    given, (keys, values) = ids(1200), rows(1200)
    found = []
    for threads in (1, 3):
        kept = store(tmp_path / str(threads), "rest-1bit", threads=threads)
        assert kept.put(given, keys, values) == 1200 // kept.block * kept.block == len(kept.load(given)) * kept.block
        found.append({path.name: path.read_bytes() for path in (tmp_path / str(threads)).rglob("*.safetensors")})
    assert found[0] == found[1] and len(found[0]) > 3
    with pytest.raises(ValueError, match="threads=0; use 1 or more"):
        store(name="rest-1bit", threads=0)


def test_threads_are_those_that_the_process_may_use(monkeypatch):
    for own, expected in ({3}, 1), ({*range(64)}, 8):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, own=own: own, raising=False)
        assert store().threads == expected


def test_an_engine_sets_its_threads(tmp_path):
    options = {"path": str(tmp_path / "kept"), "recipe": "rtn-2bit", "threads": 3}
    folder = Path(__file__).parents[2] / "artifacts" / "demo-model"
    config = json.loads((folder / "config.json").read_text())
    served = kept_options.Served(config, str(folder), None, torch.bfloat16, None, feeding.rotary)
    assert [one.threads for one in kept_options.opened(kept_options.settings(options, "o", "w"), served, "w", 1)] == [3]
    with pytest.raises(ValueError, match="o: threads=0; use a number, 1 or more"):
        kept_options.settings(options | {"threads": 0}, "o", "w")


def test_without_the_library_verify_checks_the_digest_alone(tmp_path, monkeypatch):
    kept, (keys, values) = store(tmp_path, "exact-coded"), rows(48)
    kept.put(ids(48), keys, values)
    monkeypatch.setitem(sys.modules, "constriction", None)
    assert not [*upkeep.damaged(tmp_path)]
    path = files(tmp_path)[1]
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert [(one.path, one.fault[:8]) for one in upkeep.damaged(tmp_path)] == [(path, "content:")]


def test_nothing_is_encoded_after_a_block_that_is_gone(tmp_path, monkeypatch):
    kept, (keys, values) = store(tmp_path, threads=3), rows(1200)
    tokens, half, encoded = ids(1200), 3 * kept.block, []
    kept.put(tokens[:half], keys, values)
    kept.shelf.drop(chain.names(kept.root, chain.token_row(tokens), kept.block)[2])
    encode = kept.coder.encode
    monkeypatch.setattr(kept.coder, "encode", lambda *given: encoded.append(given[0]) or encode(*given))
    assert kept.put(tokens, [one[half:] for one in keys], [one[half:] for one in values], half) == 2 * kept.block
    assert not encoded


def test_a_block_that_a_write_evicts_ends_what_is_kept(tmp_path, monkeypatch):
    """It was there when threads were given work ahead."""
    kept, (keys, values), put = store(tmp_path, threads=3), rows(1200), Folder.put
    tokens = ids(1200)
    names = chain.names(kept.root, chain.token_row(tokens), kept.block)
    kept.put(tokens, keys, values)
    kept.shelf.drop(names[0])

    def evicting(self, name, data):
        put(self, name, data)
        self.drop(names[2])

    monkeypatch.setattr(Folder, "put", evicting)
    assert kept.put(tokens, keys, values) == 2 * kept.block == kept.longest(tokens)


def test_a_disk_that_refuses_in_the_middle_leaves_what_was_kept(tmp_path, monkeypatch):
    kept, (keys, values), put = store(tmp_path, "rest-1bit", threads=2), rows(1200), Folder.put
    written = []

    def full(self, name, data):
        if len(written) == 2:
            raise OSError("no space")
        written.append(name)
        put(self, name, data)

    monkeypatch.setattr(Folder, "put", full)
    with pytest.raises(OSError, match="no space"):
        kept.put(ids(1200), keys, values)
    assert (
        kept.longest(ids(1200)) == 2 * kept.block
        and written == chain.names(kept.root, chain.token_row(ids(1200)), kept.block)[:2]
    )


def test_a_stream_longer_than_its_codes_is_not_decoded():
    """However right its digest is."""
    kept, (keys, values) = store(name="rest-1bit"), rows(store(name="rest-1bit").block)
    kept.put(ids(kept.block), keys, values)
    (data,), form = kept.shelf._held.values(), kept.format  # type: ignore[attr-defined]
    link, tensors = form.read(data)[0], safetensors.torch.load(data)
    for given in (
        torch.zeros(form.data_bytes(1) + 1, dtype=torch.uint8),
        tensors["coded"][None],
        tensors["coded"].int(),
    ):
        bad, about = tensors | {"coded": given.contiguous()}, block_file._about(link)
        about["content"] = block_file._content(about, bad)
        with pytest.raises(ArtifactError, match="tensors: coded is not at most"):
            form.from_bytes(safetensors.torch.save(bad, {"kvq": strict_json.dumps(about)}), link)


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


# ---- a damaged, foreign or malicious file


def test_any_damaged_byte_is_a_miss_and_is_said(tmp_path, caplog):
    kept, (keys, values) = store(tmp_path), rows(48)
    kept.put(ids(48), keys, values)
    path = kept.shelf.path(chain.names(kept.root, chain.token_row(ids(48)), 16)[1])  # type: ignore[attr-defined]
    whole = path.read_bytes()
    assert not [*upkeep.damaged(tmp_path)]
    generator = torch.Generator().manual_seed(0)
    for place in [0, 7, 8, 20, len(whole) - 1, *torch.randint(0, len(whole), (40,), generator=generator).tolist()]:
        caplog.clear()
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        assert [one.path for one in upkeep.damaged(tmp_path)] == [path]
        assert len(kept.load(ids(48))) == 1 and "damaged, and removed" in caplog.text
        assert not path.exists()
        path.write_bytes(whole)
    for torn in (b"", whole[:4], whole[:100], whole[:-1], whole + b"\0", whole * 3):
        path.write_bytes(torn)
        assert len(kept.load(ids(48))) == 1
    assert kept.put(ids(48), keys, values) == 48 and path.read_bytes() == whole  # written again


@pytest.mark.slow
def test_no_mutant_of_a_block_decodes_to_what_is_not_finite(tmp_path, monkeypatch):
    """300 changes of bytes and of tensors, the latter with the digest made again: missing, the same, or finite."""
    monkeypatch.setattr("kvq_runtime.prefix.store._log.warning", lambda *_: None)
    stores, counts, means = [], Counter(), {}
    for name in FEW:
        kept = store(tmp_path / name, name)
        keys, values = rows(2 * kept.block)
        kept.put(ids(2 * kept.block), keys, values)
        names, shelf = chain.names(kept.root, chain.token_row(ids(2 * kept.block)), kept.block), kept.shelf
        paths = [shelf.path(one) for one in names]  # type: ignore[attr-defined]
        stores.append((kept, [(path, path.read_bytes()) for path in paths]))
        found = kept.load(ids(2 * kept.block))
        means[id(kept)] = {layer: [x.clone() for x in pair] for layer, *pair in kept.decode(found)}
    for number in range(300):
        draw = random.Random(number)
        kept, written = draw.choice(stores)
        place = draw.randrange(2)
        path, good = written[place]
        data = _resealed(good, draw) if number % 2 else mutate.some_bytes(good, written[1 - place][1], draw)
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        found = kept.load(ids(2 * kept.block))
        if len(found) <= place:
            counts["missing"] += 1
            assert not path.exists(), number
        else:
            counts["decoded"] += 1
            for layer, *pair in kept.decode(found):
                assert all(bool(x.isfinite().all()) for x in pair), number
                assert number % 2 or all(map(torch.equal, pair, means[id(kept)][layer])), "no check told of the change"
        for path, good in written:
            path.unlink(missing_ok=True)
            path.write_bytes(good)
    assert counts["missing"] > 100 and counts["decoded"] > 50


def _resealed(good: bytes, draw: random.Random) -> bytes:
    """The file with other bytes in a tensor, and the right digest."""
    start = 8 + int.from_bytes(good[:8], "little")
    about = strict_json.loads(strict_json.loads(good[8:start], "header")["__metadata__"]["kvq"], "kvq")
    tensors = safetensors.torch.load(good)
    name = draw.choice([*tensors])
    data = tensors[name].view(-1).view(torch.uint8)
    begin = draw.randrange(len(data)) & ~3
    fill = draw.choice((b"\x00\x7c", b"\xff\x7b", b"\x80\x7f", b"\xff", draw.randbytes(8))) * 200
    stop = min(len(data), begin + draw.choice((1, 8, 200)))
    data[begin:stop] = torch.frombuffer(bytearray(fill[: stop - begin]), dtype=torch.uint8)
    about["content"] = block_file._content({n: v for n, v in about.items() if n != "content"}, tensors)
    return safetensors.torch.save(tensors, {"kvq": strict_json.dumps(about)})


def test_a_block_of_another_place_is_a_miss(tmp_path):
    """Files that are whole, under each other's names: verify and load see it."""
    kept, (keys, values) = store(tmp_path), rows(48)
    kept.put(ids(48), keys, values)
    names = chain.names(kept.root, chain.token_row(ids(48)), 16)
    paths = [kept.shelf.path(name) for name in names]  # type: ignore[attr-defined]
    data = [path.read_bytes() for path in paths]
    paths[1].write_bytes(data[2])
    assert [one.path for one in upkeep.damaged(tmp_path)] == [paths[1]]
    assert len(kept.load(ids(48))) == 1


def test_a_file_without_end_a_link_or_a_folder_is_a_miss(tmp_path):
    kept, (keys, values) = store(tmp_path), rows(16)
    kept.put(ids(16), keys, values)
    (path,) = files(tmp_path)
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # a terabyte that is never read
    assert kept.load(ids(16)) == []
    path.with_name("elsewhere").write_bytes(data)
    path.symlink_to(path.with_name("elsewhere"))
    assert kept.load(ids(16)) == []
    path.mkdir()
    path.joinpath("theirs").write_bytes(b"theirs")
    assert kept.load(ids(16)) == [] and not path.exists()
    path.mkdir()
    assert kept.put(ids(16), keys, values) == 16 and len(kept.load(ids(16))) == 1  # a folder is put aside
    assert [one.read_bytes() for one in tmp_path.rglob("theirs")] == [b"theirs"]


# ---- one folder, many processes


def test_files_are_the_user_s_alone(tmp_path):
    old = os.umask(0)
    try:
        kept, (keys, values) = store(tmp_path / "new" / "root"), rows(16)
        kept.put(ids(16), keys, values)
    finally:
        os.umask(old)
    for path in (tmp_path / "new" / "root").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ArtifactError, match="chmod go-w"):
        store(shared)


def test_the_budget_holds_and_the_oldest_goes_first(tmp_path):
    two = size_of(32)
    kept = store(tmp_path, budget=2 * two + 100)
    texts = [ids(32, first=first) for first in (1, 2, 3)]
    keys, values = rows(32)
    kept.put(texts[0], keys, values)
    kept.put(texts[1], keys, values)
    assert [kept.longest(text) for text in texts] == [32, 32, 0]
    kept.load(texts[0])  # used: the other one is older now
    kept.put(texts[2], keys, values)
    assert [kept.longest(text) for text in texts] == [32, 0, 32]
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 2 * two + 100
    long, (keys, values) = store(tmp_path, budget=4 * kept.format.largest()), rows(96)
    assert long.put(ids(96, first=9), keys, values) == 64  # the blocks that surely fit, from the first on
    assert long.longest(ids(96, first=9)) == 64


def test_of_one_prefix_the_end_goes_first(tmp_path):
    kept, (keys, values) = store(tmp_path), rows(64)
    kept.put(ids(64), keys, values)
    upkeep.collect(tmp_path, budget=size_of(32) + 100)
    assert kept.longest(ids(64)) == 32 == 16 * len(files(tmp_path))


def test_memory_holds_its_budget():
    shelf = Memory(100)
    for name in ("a", "b", "c"):
        shelf.put(name, bytes(40))
    assert (shelf.has("a"), shelf.has("b"), shelf.size) == (False, True, 80)
    shelf.used(["b"])
    shelf.put("d", bytes(40))
    assert shelf.has("b") and not shelf.has("c")
    shelf.drop("b")
    assert shelf.size == 40


def test_a_name_put_twice_is_held_once():
    """It takes its own place: what else is held stays, and its bytes are counted once."""
    shelf = Memory(100)
    for name, size in (("a", 40), ("b", 40), ("b", 60)):
        shelf.put(name, bytes(size))
    assert (shelf.has("a"), shelf.size) == (True, 100) and shelf.get("b", 100) == bytes(60)
    shelf.drop("b")
    assert (shelf.has("a"), shelf.size) == (True, 40)


def test_one_process_keeps_a_folder_within_its_budget(tmp_path):
    """At every moment, also where a sixteenth of the budget is several files and the folder is nearly full."""
    shelf, kept = Folder(tmp_path, {}, "0" * 64, 1600), []
    for number in range(60):
        shelf.put(f"{number:064x}", bytes(30))
        kept.append(sum(one.size for one in all_blocks(tmp_path)))
    assert max(kept) <= 1600 and kept[-1] > 1600 - 1600 // SLACK - 30


@pytest.mark.parametrize("text, size", [("20GB", 20 * 10**9), ("1.5 MiB", 3 << 19), (7, 7), ("512kb", 512000)])
def test_a_budget_in_words(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "20", "GB", "-1GB", "20 parsecs", 0, True])
def test_what_is_no_budget_is_refused(text):
    with pytest.raises(ValueError, match="budget"):
        parse_bytes(text)


def test_a_budget_below_one_block_is_refused():
    with pytest.raises(ValueError, match="one block of rtn-2bit"):
        store(budget=100)


def test_two_writers_of_one_prefix_and_a_reader(tmp_path):
    """Processes put the same and their own prefixes while others load and evict: every block that is found is whole."""
    keys, values = rows(64)
    budget = 20 * store().format.largest()

    def work(seed: int) -> int:
        kept, decoded = store(tmp_path, budget=budget), 0
        for turn in range(12):
            tokens = [*ids(32), *ids(32, first=10 * seed + turn)]
            kept.put(tokens, keys, values)
            found = kept.load(tokens)
            for _, k, _ in kept.decode(found) if found else ():
                assert bool(torch.isfinite(k).all())
                decoded += 1
        assert decoded >= GEOMETRY.layers, "nothing that was put was ever found"
        return 0

    children = [forked.process(work, seed) for seed in (1, 2, 3)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert not [*upkeep.damaged(tmp_path)] and not [*tmp_path.rglob("*.tmp")]
    assert sum(one.size for one in all_blocks(tmp_path)) <= budget + 3 * budget // SLACK


def test_threads_share_a_store_in_memory():
    kept, (keys, values), failed = store(), rows(64), []

    def work(seed: int) -> None:
        try:
            kept.put(ids(64, first=seed), keys, values)
            assert len(kept.load(ids(64, first=seed))) == 4
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


# ---- the command


def test_list_verify_and_gc(tmp_path, kvq, as_json):
    kept, (keys, values) = store(tmp_path, salt="secret"), rows(48)
    kept.put(ids(48), keys, values)
    (row,) = as_json("prefix", "list", tmp_path)
    size = sum(path.stat().st_size for path in files(tmp_path))
    assert (row["recipe"], row["blocks"], row["tokens"], row["bytes"]) == ("rtn-2bit", 3, 48, size)
    assert row["idle_seconds"] < 60 and "secret" not in "".join(map(str, tmp_path.rglob("*")))
    assert as_json("prefix", "verify", tmp_path)["blocks"] == 3
    path = files(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-1])
    code, out, _ = kvq("prefix", "verify", tmp_path)
    assert code == 1 and str(path) in out and "truncated" in out
    assert [one["path"] for one in as_json("prefix", "gc", tmp_path, "--damaged", "--dry-run")] == [str(path)]
    assert path.exists()
    kvq("prefix", "gc", tmp_path, "--damaged")
    assert not path.exists() and kvq("prefix", "verify", tmp_path)[0] == 0
    dead = forked.process(lambda: None)
    dead.start()
    dead.join()
    drafts = path.parent / "tmp"
    old, own = drafts / f".{dead.pid}-{'a' * 16}.tmp", drafts / f".{os.getpid()}-{'a' * 16}.tmp"
    for draft in (old, own):
        draft.write_bytes(b"half")
    assert as_json("prefix", "gc", tmp_path) == []  # too young: it may be another machine's
    assert as_json("prefix", "gc", tmp_path, "--grace", "0s")[0]["bytes"] == 4
    assert own.exists() and not old.exists()
    kvq("prefix", "gc", tmp_path, "--budget", "1B")
    assert not files(tmp_path)
    assert kvq("prefix", "list", tmp_path / "nowhere")[0] == 3
    assert kvq("prefix", "gc", tmp_path, "--budget", "some")[0] == 2


def test_nothing_is_removed_through_a_link(tmp_path, kvq):
    """Somebody's model is not a set of blocks, whatever leads to it."""
    root, model = tmp_path / "root", tmp_path / "model"
    kept, (keys, values) = store(root), rows(16)
    kept.put(ids(16), keys, values)
    (model / "tmp").mkdir(parents=True)
    dead = forked.process(lambda: None)
    dead.start()
    dead.join()
    theirs = [
        model / name for name in (f"{'b' * 64}.safetensors", "model.safetensors", f"tmp/.{dead.pid}-{'a' * 16}.tmp")
    ]
    for path in [*theirs, model / "about.json"]:
        path.write_bytes(b"{}")
    (root / ("a" * 64)).symlink_to(model)
    (root / ("c" * 64)).mkdir()
    (root / ("c" * 64) / "about.json").write_bytes(b"{}")
    (root / ("c" * 64) / "tmp").symlink_to(model / "tmp")
    (root / ("c" * 64) / f"{'d' * 64}.safetensors").symlink_to(model / "model.safetensors")
    assert kvq("prefix", "gc", root, "--budget", "1B", "--damaged", "--grace", "0s")[0] == 0
    assert not files(root / kept.shelf.place.name) and all(path.exists() for path in theirs)  # type: ignore[attr-defined]
    store(root, budget=kept.format.largest()).put(ids(16), keys, values)  # which makes room, too
    assert all(path.exists() for path in theirs)
    (tmp_path / "linked").symlink_to(root)
    root.chmod(0o777)
    for place in (tmp_path / "linked", root):
        for action in ("list", "verify", "gc"):
            assert kvq("prefix", action, place)[0] == 1


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 10**11, "kv_heads": 1, "head_size": 16},
        {"layers": 2, "kv_heads": 10**12, "head_size": 1 << 40},
    ],
    ids=["layers", "width"],
)
def test_a_set_of_a_model_that_cannot_be_is_a_fault(change, tmp_path, kvq):
    kept, (keys, values) = store(tmp_path), rows(16)
    kept.put(ids(16), keys, values)
    (about,) = tmp_path.glob("*/about.json")
    about.write_text(strict_json.dumps(strict_json.loads(about.read_bytes(), "about") | {"geometry": change}))
    code, out, _ = kvq("prefix", "verify", tmp_path)
    assert code == 1 and "at most 4096 layers and 1048576 channels" in " ".join(out.split())
    assert "cannot be read" in kvq("prefix", "list", tmp_path)[1]


def test_a_damaged_about_is_a_fault(tmp_path, kvq):
    kept, (keys, values) = store(tmp_path), rows(16)
    kept.put(ids(16), keys, values)
    (about,) = tmp_path.glob("*/about.json")
    about.write_text(about.read_text().replace('"m"', '"n"'))
    assert "folder's name" in kvq("prefix", "verify", tmp_path)[1]
    about.write_text("{")
    assert kvq("prefix", "verify", tmp_path)[0] == 1 and "cannot be read" in kvq("prefix", "list", tmp_path)[1]
