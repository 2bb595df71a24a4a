"""Attention as transformers calls it, over whole keys and values: sdpa, and what sdpa leaves out."""

from typing import Any

from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvq_runtime.ops import dense


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as `sdpa` does, and to a cap on scores and learned logits of no token too, which it drops or refuses."""
    softmax = dense.Softmax.of(kwargs)
    if softmax.plain:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)[0], None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return dense.attention(query, key, value, attention_mask, scale, softmax).transpose(1, 2).contiguous(), None
