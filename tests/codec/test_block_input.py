"""A codec's input against a loop over slots: copies in the sinks' places, zeros in padding, RoPE applied or undone.
Blocks that are prepared together are what they are alone, wherever padding and sinks lie.
"""

from dataclasses import replace

import pytest
import torch
from feeding import RECIPES, feed, make, tensors
from torch import Tensor

from kvq_runtime.codec.block_input import block_input
from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.ops import rope
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.store.encode import Encoder
from kvq_runtime.store.layer import LayerStore, Run

TOKENS, HEADS, SIZE = 6, 2, 8
ROTARY = Rotary(10000.0 ** (-torch.arange(SIZE // 2) / (SIZE // 2)), 1.0, torch.float32)
LENGTH = 300


def keys(rows: int = 3) -> Tensor:
    return torch.randn(rows, TOKENS, HEADS * SIZE, generator=torch.Generator().manual_seed(0))


def slow(x_NTC: Tensor, source: list[list[int]], turn: str | None) -> tuple[Tensor, Tensor]:
    """Slot by slot: the token that it holds, turned by that token's position."""
    rows, places = [], []
    for row, tokens in zip(x_NTC, source, strict=True):
        for token in tokens:
            x = row[token].clone() if token >= 0 else torch.zeros_like(row[0])
            cos, sin = ROTARY.tables(torch.tensor([[max(token, 0)]]))
            if turn is not None:
                turned = {"apply": rope.rotate, "undo": rope.unrotate}[turn]
                x = turned(x.view(1, 1, HEADS, SIZE), cos, sin).flatten()
            rows.append(x)
            places.append(cos[0, 0])
    return torch.stack(rows).view(len(source), -1, HEADS * SIZE), torch.stack(places).view(len(source), -1, SIZE // 2)


@pytest.mark.parametrize("first", [0, 5, 40_000])
def test_keys_by_segment_do_not_depend_on_their_position(first):
    """From before RoPE and from after it they are the same, wherever the text stands, and read back what they were."""
    x, rotary = keys(), replace(ROTARY, scaling=1.25)
    tables = rotary.tables(torch.arange(first, first + TOKENS)[None])
    before, angles = block_input(x, None, tables, "apply", HEADS, segment=3)
    at_zero, _ = block_input(x, None, ROTARY.tables(torch.arange(TOKENS)[None]), "apply", HEADS, segment=3)
    torch.testing.assert_close(before, at_zero, atol=0.02, rtol=0)  # angles of 40,000 are float32
    after = rope.rotate(x.unflatten(-1, (HEADS, -1)), *tables).flatten(-2)
    undone, same = block_input(after, None, tables, "undo", HEADS, segment=3)
    torch.testing.assert_close(undone, before)
    torch.testing.assert_close(same, angles)
    back = rope.rotate(undone.unflatten(-1, (HEADS, -1)), *rope.of_middles(tables, 3)).flatten(-2)
    torch.testing.assert_close(back, after)
    middle = x.unflatten(1, (2, 3))[:, :, 1]  # which is not turned
    torch.testing.assert_close(before.unflatten(1, (2, 3))[:, :, 1], middle, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("turn", ["apply", "undo", None])
@pytest.mark.parametrize(
    "source",
    [
        [[2, 2, 2, 3, 4, 5]] * 3,  # two sinks, no padding
        [[-1, -1, 3, 3, 4, 5], [-1, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, -1]],
    ],
)
def test_every_slot_holds_the_token_that_its_source_names(source, turn):
    tables = ROTARY.tables(torch.arange(TOKENS)[None])
    given = torch.tensor(source[:1] if source[0] == source[1] else source)
    x, rope_NSK = block_input(keys(), given, tables, turn, HEADS)
    expected, cos = slow(keys(), source, turn)
    torch.testing.assert_close(x, expected)
    assert rope_NSK is not None
    torch.testing.assert_close(rope_NSK[0], cos)


def real(*gaps: range) -> Tensor:
    """Two rows, of which the first is padded there."""
    real_BT = torch.ones(2, LENGTH, dtype=torch.bool)
    for gap in gaps:
        real_BT[0, gap.start : gap.stop] = False
    return real_BT


PADDED = {
    "none": None,
    "left": real(range(37)),
    "right": real(range(250, 300)),
    "everywhere": real(range(5), range(40, 43), range(90, 120)),
}


@pytest.mark.parametrize("padding", PADDED)
@pytest.mark.parametrize("sinks", [0, 40], ids=lambda count: f"{count} sinks")
@pytest.mark.parametrize("name", ["kivi-2bit", "squat-pre-2bit", "aqua-2bit"])
def test_blocks_of_a_prompt(name: str, sinks: int, padding: str, monkeypatch: pytest.MonkeyPatch):
    recipe, prepared = RECIPES[name], list[int]()
    recipe = replace(recipe, window=replace(recipe.window, sinks=sinks))
    together, prepare = Encoder._inputs, Encoder._input

    def compared(self: Encoder, store: LayerStore, role: int, run: Run) -> tuple[Tensor, Context]:
        x_NTC, context = together(self, store, role, run)
        alone = [prepare(self, store, role, block, 1) for block in range(*run)]
        assert torch.equal(x_NTC, torch.cat([x_BnTC for x_BnTC, _ in alone], 1).flatten(0, 1))
        for place, part in enumerate(context.rope or ()):
            assert torch.equal(part, torch.cat([rope[place] for _, rope in alone if rope], 1).flatten(0, 1))
        assert (context.rope is None) == (alone[0][1] is None)
        return x_NTC, context

    monkeypatch.setattr(Codec, "one_launch", lambda self, x: True)
    monkeypatch.setattr(Encoder, "together", 32)
    monkeypatch.setattr(Encoder, "_inputs", compared)
    monkeypatch.setattr(Encoder, "_input", lambda self, *given: prepared.append(given[-1]) or prepare(self, *given))
    feed(make(recipe), tensors(LENGTH, rows=2), 0, LENGTH, PADDED[padding])
    assert (max(prepared) > 1) == (padding != "right")
