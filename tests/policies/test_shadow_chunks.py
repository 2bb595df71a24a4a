"""Reading by chunks: which are chosen, that attention is that over them, what it costs and what is billed."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
from feeding import GEOMETRY, RECIPES, error, feed_in, make, rotary, same, state, tensors, turned
from generating import kvq
from models import prompt, random_model
from tiers import together
from torch import Tensor

from kvq_runtime.cache import BlockCache
from kvq_runtime.codec.codec import Codec
from kvq_runtime.hf.model import CACHE
from kvq_runtime.policies.shadow_chunks import ShadowChunks
from kvq_runtime.recipe import Recipe, preset

GROUP, SCALE = 2, GEOMETRY.head_size**-0.5
HEADS, D = GEOMETRY.kv_heads, GEOMETRY.head_size
BASES = ("svdq-2bit+policies.chunks=on", "svdq-shadow-2bit-v4")
ONLINE = ("svdq-shadow-online-2.25bit",)  # each row has a basis of its own
OTHERS = (*ONLINE, "exact", "rtn-2bit", "higgs-2bit", "polar-3bit", "mean-higgs-2bit", "turboquant-3bit")


def recipe(name: str = BASES[0], **select) -> Recipe:
    fit = (policy for policy in RECIPES[name].policies if policy.fits_prompt)
    return replace(RECIPES[name], policies=(ShadowChunks(**select), *fit))


def queries(new: int, seed: int = 1, rows: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(GEOMETRY.layers, rows, GROUP * HEADS, new, D, generator=generator)


def data(total: int, real: Tensor | None = None) -> Tensor:
    """Keys that drift along the text, so that chunks differ, and a few chunks that are no cluster at all."""
    x = tensors(total)
    x[:, 0] += (
        2 * torch.randn(GEOMETRY.layers, 2, total // 16 + 1, GEOMETRY.width).repeat_interleave(16, 2)[:, :, :total]
    )
    x[:, 0, :, 40:48] *= torch.tensor([1.0, -1.0]).repeat(4)[:, None] * 2
    return turned(x)


def heads(x_BTC: Tensor) -> Tensor:
    return x_BTC.unflatten(-1, (HEADS, D)).transpose(1, 2)


def expected(cache: BlockCache, x: Tensor, q: Tensor, layer: int, read: Tensor, exact: Tensor) -> Tensor:
    """Softmax attention written out: decoded tokens where `read` [B, H, T], with their own keys where `exact`."""
    new, total = q.shape[3], x.shape[3]
    k, v = (heads(t.clone()) for t in cache.decoder.whole(layer))
    k = torch.where(exact[..., None], heads(x[layer, 0]), k)
    seen = torch.ones(new, total, dtype=torch.bool).tril(total - new) & read[:, :, None, None]
    s = torch.einsum("bhgtd,bhnd->bhgtn", q[layer].unflatten(1, (HEADS, GROUP)), k) * SCALE
    return torch.einsum("bhgtn,bhnd->bhgtd", s.masked_fill(~seen, -torch.inf).softmax(-1), v).flatten(1, 2)


def chunks(x: Tensor, q: Tensor, layer: int, encoded: int, select: ShadowChunks, sinks: int, real: Tensor) -> tuple:
    """Which chunks are outliers and which are chosen, {(row, head): {chunk}} each: loops over the paper's sentences."""
    found: tuple[dict, dict] = ({}, {})
    keys, new = heads(x[layer, 0]), q.shape[3]
    for row in range(len(keys)):
        rank = real[row].cumsum(0)
        for head in range(HEADS):
            marks, cosines = {}, {}
            for chunk in range(encoded // select.chunk):
                slots = range(chunk * select.chunk, (chunk + 1) * select.chunk)
                slots = [t for t in slots if real[row, t] and rank[t] > sinks]
                if slots:
                    marks[chunk] = keys[row, head, slots].mean(0)
                    cosines[chunk] = min(
                        float(keys[row, head, t] @ marks[chunk] / keys[row, head, t].norm() / marks[chunk].norm())
                        for t in slots
                    )
            out = set(sorted(cosines, key=cosines.__getitem__)[: select.outliers])
            rest = [chunk for chunk in marks if chunk not in out]
            best: dict[int, float] = {}
            for query in range(head * GROUP, (head + 1) * GROUP):
                total = torch.zeros(len(rest))
                for t in range(new):
                    if real[row, real.shape[1] - new + t]:
                        total += torch.stack([q[layer, row, query, t] @ marks[c] * SCALE for c in rest]).softmax(0)
                for chunk, score in zip(rest, total.tolist(), strict=True):
                    best[chunk] = max(best.get(chunk, -math.inf), score)
            found[0][row, head] = out
            found[1][row, head] = set(sorted(rest, key=best.__getitem__, reverse=True)[: select.count])
    return found


def fill(recipe: Recipe, sizes: list[int], new: int, real: Tensor | None = None) -> tuple[BlockCache, Tensor]:
    """A cache with passes of these sizes in it, told of `new` more tokens."""
    total = sum(sizes) + new
    x, cache = data(total), make(recipe)
    feed_in(cache, x, sizes, real_BT=real)
    positions = torch.arange(total - new, total)[None]
    if real is not None:
        positions = (real.cumsum(1) - 1).clamp(min=0)[:, -new:]
    cache.positions.announce(None if real is None else real[:, -new:], positions, rotary())
    return cache, x


@pytest.mark.parametrize("name, new", together([*BASES, *OTHERS], [1, 5]))
def test_with_a_budget_for_all_it_is_plain_attention(name, new):
    """Over all decoded tokens; outliers, if there are any, with their own keys."""
    for outliers in (0, 3):
        chosen = recipe(name, budget=4096, outliers=outliers)
        cache, x = fill(chosen, [90, 1, 30], new)
        q = queries(new)
        for layer in range(3):
            cache.take(layer, *x[layer, :, :, -new:].unbind(0))
            out = cache.attend(layer, q[layer], None, SCALE)
            held = cache.policies[0].chunks[layer].chunk_BHO
            exact = torch.zeros(2, HEADS, x.shape[3], dtype=torch.bool)
            held = held.repeat_interleave(8, 2) * 8 + torch.arange(8).repeat(outliers)
            exact.scatter_(2, held.long(), True)
            plain = expected(cache, x, q, layer, torch.ones_like(exact), exact)
            assert error(out, plain) < 6e-3
            cache.finish(layer)


@pytest.mark.parametrize("name, new, short", together(BASES, [1, 5], [0, 5, 43]))
def test_the_chunks_read_are_those_of_the_paper(name, new, short):
    """Landmarks, outliers, scores and top k from exact keys; the output is attention over just these and the window."""
    select = ShadowChunks(budget=24, outliers=2)
    chosen, total = replace(RECIPES[name], policies=(select,)), 140 + new
    real = torch.arange(total) >= torch.tensor([0, short])[:, None]
    cache, x = fill(chosen, [100, 1, 39], new, real if short else None)
    q, sinks = queries(new), chosen.window.sinks
    mask = torch.ones(new, total, dtype=torch.bool).tril(total - new) & real[:, None, None]
    for layer in range(3):
        encoded = cache.layers[layer].encoded
        assert encoded >= 112
        outliers, picked = chunks(x, q, layer, encoded, select, sinks, real)
        cache.take(layer, *x[layer, :, :, -new:].unbind(0))
        policy = cache.policies[0]
        held = policy.chunks[layer]
        scaled = (q[layer] * SCALE).unflatten(1, (HEADS, GROUP))
        best, usable = policy.path.choose(cache.layers[layer], held, scaled)
        out = cache.attend(layer, q[layer], mask if short else None, SCALE)
        read = torch.zeros(2, HEADS, total, dtype=torch.bool)
        read[..., encoded:] = True
        exact = torch.zeros_like(read)
        for (row, head), places in outliers.items():
            assert set(held.chunk_BHO[row, head].tolist()) == places
            assert set(best[row, head][usable[row, head]].tolist()) == picked[row, head]
            for chunk in places | picked[row, head]:
                read[row, head, chunk * 8 : chunk * 8 + 8] = True
            for chunk in places:
                exact[row, head, chunk * 8 : chunk * 8 + 8] = True
            read[row, head, real[row].nonzero()[:sinks, 0]] = True
        read &= real[:, None]
        found = expected(cache, x, q, layer, read, exact)
        asked = real[:, -new:]
        assert error(out.transpose(1, 2)[asked], found.transpose(1, 2)[asked]) < 6e-3
        cache.finish(layer)


def test_only_what_is_chosen_is_decoded(monkeypatch):
    """Tokens that go through a codec are bounded by the budget, however long the text is."""
    counted = []
    tokens = Codec.tokens

    def counting(self, fields, block_N, place_N, channels):
        counted.append(len(place_N))
        return tokens(self, fields, block_N, place_N, channels)

    monkeypatch.setattr(Codec, "tokens", counting)
    filled = [fill(recipe(budget=32, outliers=1), [total], 1) for total in (200, 1400)]
    monkeypatch.setattr(Codec, "decode", None)
    found = []
    for cache, x in filled:
        counted.clear()
        cache.take(0, *x[0, :, :, -1:].unbind(0))
        cache.attend(0, queries(1)[0], None, SCALE)
        found.append(sum(counted))
        assert cache.decoder.scratch_peak < 2 * 2 * HEADS * D * 4 * (32 + 8 + 4 + 40)
    assert found == [2 * HEADS * (32 + 32 + 8)] * 2  # rows and heads; keys of chosen, values of chosen and outliers


def state_of(cache: BlockCache) -> list[Tensor]:
    return [part for _, held in sorted(cache.policies[0].chunks.items()) for part in held]


def test_outliers_are_those_of_the_tokens_however_they_came():
    caches, x = [make(recipe(outliers=2)) for _ in range(2)], data(200)
    feed_in(caches[0], x, [200])
    feed_in(caches[1], x, [31, 1, 60, *[1] * 20, 88])
    assert same(*(state(cache) for cache in caches))
    assert all(torch.equal(a, b) for a, b in zip(*map(state_of, caches), strict=True))


def test_outliers_follow_rows_crops_and_passes_that_fail():
    x, rows = data(200), torch.tensor([1, 0, 1])
    cache, other = make(recipe(outliers=2)), make(recipe(outliers=2))
    feed_in(cache, x, [100])
    before = [part.clone() for part in state_of(cache)]
    broken = x.clone()
    broken[2, 0, 1, 170] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        feed_in(cache, broken, [100])
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(cache), strict=True))
    cache.reorder(rows)
    feed_in(other, x[:, :, rows], [100])
    for each in (cache, other):
        feed_in(each, x[:, :, rows], [70])
    assert all(torch.equal(a, b) for a, b in zip(state_of(cache), state_of(other), strict=True))
    cache.crop(40)
    assert all(int(held.chunk_BHO.max()) < 32 // 8 for held in cache.policies[0].chunks.values())
    report = cache.memory_report()
    assert report.parts["chunks"] == sum(part.nbytes for held in cache.policies[0].chunks.values() for part in held[1:])


def test_recipes_whose_tokens_cannot_be_decoded_one_by_one():
    refused = {"aqua-2bit": "no prediction", "kivi-2bit": "schemes per token", "mean-higgs-2bit": "after RoPE"}
    for name, why in refused.items():
        with pytest.raises(ValueError, match=why):
            replace(preset(name), policies=(ShadowChunks(),), position="post").check()
    with pytest.raises(ValueError, match="chunks of 24 do not divide the blocks"):
        recipe(chunk=24).check()
    assert Recipe.from_json(preset(BASES[1]).to_json()) == preset(BASES[1])


# ---- with a model ----


def test_other_attention_reads_all_tokens_and_says_so_once():
    model, ids = random_model("llama"), prompt(2, 80)
    cache, plain = kvq("svdq-shadow-2bit-v4", model), kvq("svdq-2bit-v4", model)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="svdq-shadow-2bit-v4 chooses what it reads .* sdpa attention does not"):
            model(ids[:, :60], **{CACHE: cache})
        model(ids[:, :60], **{CACHE: plain})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            one = model(ids[:, 60:], **{CACHE: cache}).logits
        assert torch.equal(one, model(ids[:, 60:], **{CACHE: plain}).logits)
