"""Register "kvq", an attention implementation that reads a KVQCache's packed blocks."""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvq_runtime.hf.layer import Mark


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

    The first forward pass attends to its own exact keys and values, so it is `sdpa`'s too, but for the queries whose
    weights a policy of the recipe needs, which sdpa does not hand out.
    """
    mark: Mark | None = getattr(key, "_kvq", None)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    count = query.shape[2]
    weighed = 0 if mark is None else mark.blocks.weighed_first(count) if mark.first else count
    if mark is None or weighed < count:
        out = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)[0]
        if mark is not None and weighed:
            newest = None if attention_mask is None else attention_mask[:, :, -weighed:]
            mark.blocks.attend(mark.layer, query[:, :, -weighed:], newest, scale)
    else:
        out = mark.blocks.attend(mark.layer, query, attention_mask, scale).transpose(1, 2).contiguous()
    if mark is not None:
        mark.blocks.take_queries(mark.layer, query)
        mark.blocks.finish(mark.layer)
    return out, None


AttentionInterface.register("kvq", attention)
AttentionMaskInterface.register("kvq", sdpa_mask)
