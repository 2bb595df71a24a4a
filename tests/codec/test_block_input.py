"""A codec's input against a loop over slots: copies in the sinks' places, zeros in padding, RoPE applied or undone."""

import pytest
import torch
from torch import Tensor

from kvq_runtime.codec.block_input import block_input
from kvq_runtime.ops import rope
from kvq_runtime.ops.rope import Rotary

TOKENS, HEADS, SIZE = 6, 2, 8
ROTARY = Rotary(10000.0 ** (-torch.arange(SIZE // 2) / (SIZE // 2)), 1.0, torch.float32)


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


def test_without_sources_and_tables_tokens_are_as_they_are():
    x, tables = block_input(keys(), None)
    assert torch.equal(x, keys()) and tables is None


def test_one_row_of_sources_and_a_row_for_each_are_the_same():
    source = torch.tensor([[1, 1, 2, 3, -1, 5]])
    tables = ROTARY.tables(torch.arange(TOKENS)[None])
    one = block_input(keys(), source, tables, "apply", HEADS)
    each = block_input(keys(), source.expand(3, -1), tables, "apply", HEADS)
    assert torch.equal(one[0], each[0]) and all(torch.equal(a, b) for a, b in zip(one[1], each[1], strict=True))
