"""SnapKV: the tokens of a prompt that its last queries vote for, computed in plain torch; all later ones are held."""

from dataclasses import replace

import pytest
import torch
from feeding import GEOMETRY, make, same, state, tensors, turned
from heavy import EXACT, GROUP, SCALE, SINKS, WINDOW, drive, held, queries
from torch import Tensor

from kvq_runtime.recipe import Recipe
from kvq_runtime.recipes.snapkv import PromptVotes

TOKENS, NEWEST, KERNEL = 30, 6, 5
SNAP = replace(EXACT, name="snapkv-small", policies=(PromptVotes(TOKENS, NEWEST, KERNEL),))


def attention(x: Tensor, q: Tensor, row: int, tokens: list[int], asking: list[int]) -> tuple[Tensor, Tensor]:
    """Causal weights [L, heads, queries, tokens] of one row over these tokens, and what queries get."""
    k, v = (x[:, role, row, tokens].unflatten(-1, (GEOMETRY.kv_heads, -1)).transpose(1, 2) for role in (0, 1))
    k, v = (part.repeat_interleave(GROUP, 1) for part in (k, v))
    scores = q[:, row, :, asking] @ k.mT * SCALE
    later = torch.tensor(tokens)[None] > torch.tensor(asking)[:, None]
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return weights, weights @ v


def expected(x: Tensor, q: Tensor, row: int, prompt: list[int], pool: str) -> list[int]:
    """The tokens of a prompt that are held."""
    weights, _ = attention(x, q, row, prompt, prompt[-NEWEST:])
    votes = weights[..., :-NEWEST].sum((0, 1, 2)).tolist()
    half = KERNEL // 2
    around = [votes[max(0, i - half) : i + half + 1] for i in range(len(votes))]
    scores = [max(near) if pool == "max" else sum(near) / KERNEL for near in around]
    ranked = sorted(range(SINKS, len(votes)), key=lambda i: -scores[i])
    best = [*range(SINKS), *ranked[: TOKENS - NEWEST - SINKS]]
    return [prompt[i] for i in sorted(best)] + prompt[-NEWEST:]


@pytest.mark.parametrize("pool", ["max", "avg"])
@pytest.mark.parametrize("short", [0, 23])
def test_the_last_queries_of_a_prompt_choose_what_is_held(pool, short):
    prompt, total = 80, 110
    x, q = turned(tensors(total)), queries(total)
    real = torch.arange(total) >= torch.tensor([0, short])[:, None]
    cache = make(replace(SNAP, policies=(PromptVotes(TOKENS, NEWEST, KERNEL, pool),)))
    drive(cache, x, q, prompt, real if short else None)
    rows = [expected(x, q, row, real[row, :prompt].nonzero()[:, 0].tolist(), pool) for row in (0, 1)]
    assert held(cache) == rows and rows[0] != rows[1] and cache.positions.dropped == prompt - TOKENS
    for stop in (81, 82, 100, total):
        start = cache.length
        out = drive(cache, x, q, stop, real if short else None)
        for row in (0, 1):
            rows[row] += range(start, stop)
            wanted = attention(x, q, row, rows[row], [*range(start, stop)])[1]
            torch.testing.assert_close(out[:, row], wanted, rtol=1e-4, atol=1e-4)
        assert held(cache) == rows, "what comes after the prompt is held"
    assert cache.layers[0].blocks == (TOKENS + total - prompt - WINDOW.recent) // WINDOW.block


def test_undo_crop_and_rows():
    x, q, rows = turned(tensors(100)), queries(100), torch.tensor([1, 1, 0])
    cache, other = make(SNAP), make(SNAP)
    drive(cache, x, q, 80, layers=2)  # stops midway
    broken = x.clone()
    broken[2, 1, 0, 40, 3] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinity in the model's values"):
        drive(cache, broken, q, 80)
    assert cache.length == 0
    for each in (cache, other):
        drive(each, x, q, 80)
    assert same(state(cache), state(other)) and held(cache) == held(other)
    before = held(cache)
    drive(cache, x, q, 85)
    cache.crop(80)
    assert held(cache) == before
    with pytest.raises(RuntimeError, match="crop to 50 tokens; snapkv-small has dropped 50 of the first 74"):
        cache.crop(50)
    cache.reorder(rows)
    drive(cache, x[:, :, rows], q[:, rows], 85)
    drive(other, x, q, 85)
    assert held(cache) == [held(other)[row] for row in rows]
    cache.crop(0)
    drive(cache, x, q, 80)
    assert held(cache) == before


def test_settings():
    assert Recipe.from_json(SNAP.to_json()) == SNAP
    for wrong in ({"tokens": 32}, {"newest": 0}, {"kernel": 4}, {"pool": "sum"}):
        with pytest.raises(ValueError, match='an odd kernel, and the pool "max" or "avg"'):
            PromptVotes(**wrong)
