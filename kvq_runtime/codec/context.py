"""What a block is predicted from."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Context:
    """The decoded tokens that a block is predicted from.

    rope    cos and sin of its tokens, [N, T, K] each, where keys are encoded after RoPE with their mean removed
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
