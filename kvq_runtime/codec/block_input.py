"""Prepare tokens for a codec: fill the slots that hold no token of their own, and bring keys to the recipe's position.

A slot of an exact sink holds a copy of the first token after the sinks, one of padding zeros, so that the scales of a
block are those of tokens that are really encoded. Cache, calibration and error measurement all prepare tokens here.

S = slots that are filled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvq_runtime.ops import rope
from kvq_runtime.ops.rope import Pair


@dataclass(frozen=True)
class BlockRun:
    """A run of blocks that a reader takes packed: fields [B, n, ...], without the first tokens of the first block."""

    fields: Mapping[str, Tensor]
    first: int
    tokens: int


@dataclass(frozen=True)
class Context:
    """The decoded tokens that a block is predicted from.

    rope    cos and sin of its tokens, [N, T, K] each, where keys are encoded after RoPE with their mean removed; in a
            recipe by segment those of the angles from the segment's middle
    keys    this layer's decoded keys, centred; for values
    below   the decoded (keys, values) of the layers underneath, centred, nearest first

    predicted   what is predicted from them, where it has been computed; `decode` adds to it in place
    """

    rope: tuple[Tensor, Tensor] | None = None
    keys: Tensor | None = None
    below: Sequence[tuple[Tensor, Tensor]] = ()
    predicted: Tensor | None = None


def side_by_side(contexts: Sequence[Context]) -> Context:
    """Rotations of blocks, and what is predicted of them, in one."""
    ropes = [context.rope for context in contexts if context.rope is not None]
    predicted = [context.predicted for context in contexts if context.predicted is not None]
    return Context(
        rope=(torch.cat([cos for cos, _ in ropes]), torch.cat([sin for _, sin in ropes])) if ropes else None,
        predicted=torch.cat(predicted) if predicted else None,
    )


def block_input(
    x_NTC: Tensor,
    source_NS: Tensor | None,
    tables: Pair | None = None,
    turn: Literal["apply", "undo"] | None = None,
    kv_heads: int = 1,
    segment: int = 0,
) -> tuple[Tensor, Pair | None]:
    """Return the tokens [N, S, C] as a codec encodes them, and their cos and sin, [N, S, K] each, if there are any.

    source   the token that each slot holds, an index into T, the same for all rows if its first dimension is 1;
             -1: none, so zeros, at position 0. None: every slot holds its own
    tables   cos and sin of the T tokens, [N or 1, T, K] each
    turn     "apply": x are keys before RoPE, wanted after it · "undo": the other way, in float32 · None: as they are
    segment  tokens of a segment, of keys that are wanted relative to its middle: "apply" turns by the angle from there,
             "undo" takes the middle's angle off keys after RoPE, and cos and sin are of the angle from there
    """
    middle = rope.of_middles(tables, segment) if segment and tables is not None else None
    if source_NS is not None:
        source_NS = source_NS.to(x_NTC.device)
        x_NTC = _filled(x_NTC, source_NS, 0.0)
    if tables is None:
        return x_NTC, None
    if source_NS is not None:
        tables = (_filled(tables[0], source_NS, 1.0), _filled(tables[1], source_NS, 0.0))
    if middle is not None:
        tables = rope.between(tables, middle)
    if turn is not None:
        rotate = rope.rotate if turn == "apply" else rope.unrotate
        angles = middle if turn == "undo" and middle is not None else tables
        x_NTC = rotate(x_NTC.unflatten(-1, (kv_heads, -1)), *angles).flatten(-2)
    cos, sin = (table.expand(len(x_NTC), -1, -1) for table in tables)
    return x_NTC, (cos, sin)


def _filled(x_NTC: Tensor, source_NS: Tensor, empty: float) -> Tensor:
    """Return the rows of `x` that `source` names; `empty` for -1."""
    index_NS = source_NS.clamp(min=0)
    if len(source_NS) == 1:
        taken = x_NTC.index_select(1, index_NS[0])
    else:
        rows = max(len(x_NTC), len(source_NS))
        index = index_NS[..., None].expand(rows, -1, x_NTC.shape[-1])
        taken = x_NTC.expand(rows, -1, -1).gather(1, index)
    return taken.where((source_NS >= 0)[..., None], empty)
