"""Heavy hitters: which tokens are held, that attention is that over the held ones, and what is billed."""

import math
from dataclasses import replace

import pytest
import torch
from feeding import GEOMETRY, make, rotary, tensors, turned
from heavy import BLOCK, EXACT, GROUP, RECENT, SCALE, SHARE, SINKS, drive, held, queries
from torch import Tensor

from kvq_runtime.codec.codec import Codec
from kvq_runtime.ops.rope import rotate
from kvq_runtime.recipe import preset
from kvq_runtime.recipes.h2o import HeavyHitters

PRE = replace(EXACT, name="h2o-small-pre", position="pre")


class Oracle:
    """The rule in plain words, row by row: exact keys, attention over the tokens that are held, then the choice."""

    def __init__(self, x: Tensor, q: Tensor, real: Tensor, newest: float = 0.0, share: float = SHARE):
        self.newest, self.share = newest, share
        self.x, self.q, self.real, self.rows = x, q, real, x.shape[2]
        self.held: list[list[int]] = [[] for _ in range(self.rows)]
        self.mass: list[dict[int, float]] = [{} for _ in range(self.rows)]
        self.asked: list[dict[int, int]] = [{} for _ in range(self.rows)]
        self.encoded, self.decided, self.seen = 0, 0, 0

    def step(self, stop: int) -> Tensor:
        """Take in the tokens up to `stop`; the output of attention, [L, B, heads, new, D]."""
        start, self.seen = self.seen, stop
        out = torch.zeros(*self.q.shape[:3], stop - start, GEOMETRY.head_size)
        for row in range(self.rows):
            self.held[row] += range(start, stop)
            for token in range(start, stop):
                self.mass[row][token], self.asked[row][token] = 0.0, 0
            for query in range(start, stop):
                if self.real[row, query]:
                    out[:, row, :, query - start] = self._ask(row, query)
        recent = max(RECENT, math.ceil(self.newest * stop))
        left = max(0, stop - recent) // BLOCK * BLOCK
        if left > self.decided:
            count = min(left, max(math.ceil(self.share * (left + recent)) - recent, SINKS)) - self.encoded
            for row in range(self.rows):
                self._choose(row, left, count)
            self.decided, self.encoded = left, self.encoded + count // BLOCK * BLOCK
        return out

    def _ask(self, row: int, query: int) -> Tensor:
        seen = [token for token in self.held[row] if token <= query and self.real[row, token]]
        heads = self.q.shape[2]
        k, v = (
            self.x[:, i, row, seen].unflatten(-1, (GEOMETRY.kv_heads, -1)).repeat_interleave(GROUP, 2) for i in (0, 1)
        )
        p = (torch.einsum("lhd,lthd->lht", self.q[:, row, :, query], k) * SCALE).softmax(-1)
        assert p.shape[1] == heads
        for token, mass in zip(seen, p.sum((0, 1)).tolist(), strict=True):
            self.mass[row][token] += mass
            self.asked[row][token] += 1
        return torch.einsum("lht,lthd->lhd", p, v)

    def _choose(self, row: int, left: int, count: int) -> None:
        held, sinks = self.held[row], self.real[row].nonzero()[:SINKS, 0].tolist()
        stake = [token for token in held[self.encoded :] if token < left]

        def rank(token: int) -> float:
            if not self.real[row, token]:
                return -1.0
            return math.inf if token in sinks else self.mass[row][token] / self.asked[row][token]

        best = sorted(stake, key=rank, reverse=True)[:count]
        self.held[row] = held[: self.encoded] + sorted(best) + [token for token in held if token >= left]


HALVES = replace(EXACT, name="h2o-small-halves", policies=(HeavyHitters(SHARE, recent=SHARE / 2),))


@pytest.mark.parametrize("recipe", [EXACT, PRE, HALVES], ids=["post", "pre", "halves"])
@pytest.mark.parametrize("short", [0, 5, 33])
def test_the_tokens_held_are_those_with_the_largest_mass(recipe, short):
    """A prompt, single tokens, chunks: the sets, and attention over them at their own positions, are the oracle's."""
    total = 96
    x, q = turned(tensors(total)), queries(total)
    real = torch.arange(total) >= torch.tensor([0, short])[:, None]
    if short:
        tables = rotary().tables((real.cumsum(1) - 1).clamp(min=0))
        x = tensors(total)
        for keys in x[:, 0]:
            keys.copy_(rotate(keys.unflatten(-1, (GEOMETRY.kv_heads, -1)), *tables).flatten(-2))
    newest = SHARE / 2 if recipe is HALVES else 0.0
    cache, oracle, start = make(recipe), Oracle(x, q, real, newest), 0
    for stop in (47, 48, 49, 53, 54, 55, 60, 77, 78, 90, 91, 92, 93, 94, 95, 96):
        found = drive(cache, x, q, stop, real if short else None)
        expected = oracle.step(stop)
        asked = real[:, start:stop]
        torch.testing.assert_close(
            found.transpose(2, 3)[:, asked], expected.transpose(2, 3)[:, asked], rtol=1e-4, atol=1e-4
        )
        for row, (ours, theirs) in enumerate(zip(held(cache), oracle.held, strict=True)):
            assert [t for t in ours if real[row, t]] == [t for t in theirs if real[row, t]]
        assert cache.length == stop and cache.positions.length == len(oracle.held[0])
        assert cache.layers[0].encoded == oracle.encoded
        start = stop
    assert cache.positions.dropped > 40 and oracle.encoded >= (1 if newest else 2) * BLOCK
    assert held(cache)[0] != held(cache)[1]


def test_tokens_are_chosen_before_they_are_encoded(monkeypatch):
    """Codecs never see a token that is dropped, and what they see are the keys before RoPE at the tokens' positions."""
    plain, total = tensors(120), 120
    x, q, seen = turned(plain), queries(total), []
    encode = Codec.encode

    def watching(self, x_NTC, context):
        if (self.layer, self.role) == (2, "key"):
            seen.append(x_NTC.clone())
        return encode(self, x_NTC, context)

    monkeypatch.setattr(Codec, "encode", watching)
    cache = make(PRE)
    for stop in (60, 61, 90, *range(91, 121)):
        drive(cache, x, q, stop)
    encoded = cache.layers[0].encoded
    assert len(seen) == encoded // BLOCK > 3
    for row in range(2):
        tokens = held(cache)[row][SINKS:encoded]
        torch.testing.assert_close(torch.cat(seen, 1)[row, SINKS:], plain[2, 0, row, tokens], rtol=1e-4, atol=1e-4)


def test_what_was_dropped_cannot_be_cropped_back():
    cache, total = make(EXACT), 100
    x, q = tensors(total), queries(total)
    drive(cache, x, q, 90)
    drive(cache, x, q, 94)
    before = held(cache)
    cache.crop(91)
    assert cache.length == 91 and held(cache) == [row[:-3] for row in before]
    drive(cache, x, q, 94)
    assert held(cache) == before
    with pytest.raises(RuntimeError, match="crop to 50 tokens; h2o-small has dropped .* of the first 88"):
        cache.crop(50)
    assert cache.length == 94
    cache.crop(0)
    drive(cache, x, q, 94)
    assert cache.length == 94 and cache.layers[0].encoded >= BLOCK


def test_a_pass_that_stops_midway_counts_no_attention():
    x, q = tensors(100), queries(100)
    cache, other = make(EXACT), make(EXACT)
    for each in (cache, other):
        drive(each, x, q, 60)
    drive(cache, x, q, 80, layers=1)
    for each in (cache, other):
        drive(each, x, q, 80)
    assert held(cache) == held(other) and torch.equal(cache.policies[0].got_2BW, other.policies[0].got_2BW)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
def test_shares_that_cannot_be(share):
    with pytest.raises(ValueError, match="use a number over 0 and at most 1"):
        HeavyHitters(share)


def test_the_papers_halves():
    """Of 8192 tokens a fifth: 819 heavy and 819 of the newest, to within a block; without, the newest are 128."""
    for policy, recent in ((HeavyHitters(0.2, recent=0.1), 820), (HeavyHitters(0.2), 128)):
        window = preset("h2o").window
        old, heavy = policy.budget(8192, window)
        assert 0 <= 8192 - old - recent < window.block and old % window.block == 0
        assert heavy + recent == pytest.approx(0.2 * 8192, abs=0.2 * window.block + 1)
        blocks, exact = policy.chosen(8192, window)
        assert blocks * window.block + exact == heavy + 8192 - old
    with pytest.raises(ValueError, match="recent=0.2; use at least 0 and less than share=0.2"):
        HeavyHitters(0.2, recent=0.2)
