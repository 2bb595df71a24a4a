"""Register "kvq", an attention implementation that reads a KVQCache's packed blocks."""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvq_runtime.hf.layer import Turn


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend to a KVQCache's packed blocks; to any other keys and values as `sdpa` does.

    The first forward pass attends to its own exact keys and values, so it is `sdpa`'s too, unless the recipe needs the
    weights.
    """
    turn: Turn | None = getattr(key, "_kvq", None)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if turn is None or (turn.first and turn.blocks.hitters is None):
        out = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)[0]
    else:
        out = turn.blocks.attend(turn.layer, query, attention_mask, scale).transpose(1, 2).contiguous()
    if turn is not None and turn.first and turn.blocks.votes is not None:  # sdpa hands out no weights
        last = None if attention_mask is None else attention_mask[:, :, -1:]
        turn.blocks.attend(turn.layer, query[:, :, -1:], last, scale)
    if turn is not None:
        turn.blocks.hear(turn.layer, query)
        turn.blocks.finish(turn.layer)
    return out, None


AttentionInterface.register("kvq", attention)
AttentionMaskInterface.register("kvq", sdpa_mask)
