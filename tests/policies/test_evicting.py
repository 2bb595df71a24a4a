"""A policy as its author writes it, TOVA's, in terms of `Evicting`: a fixed budget, chosen by the newest query alone.

Source: Oren et al., 2024 (TOVA, arXiv 2401.06104), section 3; there by layer, here one set for all layers.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from feeding import GEOMETRY, make, rotary, tensors, turned
from heavy import BLOCK, EXACT, GROUP, RECENT, SCALE, SINKS, drive, held, queries

from kvq_runtime.ops.rope import rotate
from kvq_runtime.policies.evict import Evicting
from kvq_runtime.store.memory import Sizes

BUDGET = 26


@dataclass(frozen=True)
class Tova(Evicting):
    """Hold `tokens` tokens, of which `encoded` at most are in blocks, for good."""

    kind: ClassVar[str] = "tova"
    newest: ClassVar[int] = 1
    adds: ClassVar[bool] = False
    tokens: int = BUDGET
    encoded: int = 0

    def budget(self, tokens, window):
        old = max(0, tokens - window.recent)
        return old, min(old, max(self.tokens - window.recent, window.sinks))

    def blocks(self, held, window):
        return min(held, self.encoded) // window.block

    def score(self, mass_BT, queries_BT):
        return mass_BT

    def held_share(self):
        return 0.0


@pytest.mark.parametrize("encoded", [0, BLOCK])
@pytest.mark.parametrize("short", [0, 5])
def test_the_tokens_held_are_those_that_the_newest_query_attends_to(encoded, short):
    total = 60
    x, q, real = tensors(total), queries(total), torch.arange(total) >= torch.tensor([0, short])[:, None]
    tables = rotary().tables((real.cumsum(1) - 1).clamp(min=0))
    for keys in x[:, 0]:
        keys.copy_(rotate(keys.unflatten(-1, (GEOMETRY.kv_heads, -1)), *tables).flatten(-2))
    cache = make(replace(EXACT, policies=(Tova(encoded=encoded),)))
    known: list[list[int]] = [[], []]
    start = frozen = 0
    for stop in (10, 11, 34, 35, 36, 37, 45, *range(46, total + 1)):
        drive(cache, x, q, stop, real if short else None)
        for row in (0, 1):
            known[row] += range(start, stop)
            keys = x[:, 0, row, known[row]].unflatten(-1, (GEOMETRY.kv_heads, -1)).repeat_interleave(GROUP, 2)
            s = torch.einsum("lhd,lthd->lht", q[:, row, :, stop - 1], keys) * SCALE
            p = s.masked_fill(~real[row, known[row]], -torch.inf).softmax(-1).sum((0, 1)).tolist()
            rank = dict(zip(known[row], p, strict=True)) | dict.fromkeys(real[row].nonzero()[:SINKS, 0].tolist(), 1e9)
            stake = [token for token in known[row][frozen:] if token < stop - RECENT]
            best = sorted(stake, key=lambda token: -rank[token] if real[row, token] else 1)
            best = sorted(best[: BUDGET - RECENT - frozen])
            known[row] = known[row][:frozen] + best + list(range(max(0, stop - RECENT), stop))
        frozen, start = cache.layers[0].encoded, stop
        assert frozen == encoded * (stop > RECENT + BLOCK)
        for row, (ours, theirs) in enumerate(zip(held(cache), known, strict=True)):
            assert [t for t in ours if real[row, t]] == [t for t in theirs if real[row, t]]
    assert cache.positions.length == BUDGET


def test_one_more_token_of_a_fixed_budget_costs_nothing():
    recipe = replace(EXACT, policies=(Tova(),))
    x, q, sizes = turned(tensors(80)), queries(80), Sizes(recipe, GEOMETRY, torch.float32)
    cache, found = make(recipe), []
    for stop in (60, 79, 80):
        drive(cache, x, q, stop)
        found.append(cache.memory_report())
    assert found[1].sequence_bytes == found[2].sequence_bytes <= sizes.at(80, 2).sequence_bytes
    assert sizes.at(79).total_bytes == sizes.at(80).total_bytes
    assert found[2].asymptotic_bits == 0
