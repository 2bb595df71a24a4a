"""Register "kvq", an attention implementation that reads a KVQCache's packed blocks."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from kvq_runtime.hf import dense
from kvq_runtime.hf.layer import Mark

# What models pass on, and does not change what a query gets: masks have what positions and kinds of tokens say. Only
# training has dropout.
HARMLESS = frozenset(
    {"dropout", "position_ids", "cache_position", "token_type_ids", "mm_token_type_ids", "use_cache", "labels"}
    | {"output_attentions", "output_hidden_states", "output_router_logits", "num_items_in_batch", "logits_to_keep"}
)
SINKS = "s_aux"  # one learned logit a head, of no token
DENSE = HARMLESS | {"is_causal", "position_bias", "cache", "softcap", SINKS}  # over whole keys and values
PACKED = HARMLESS | {SINKS}


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend to a KVQCache's packed blocks; to any other keys and values as `sdpa` does.

    The first forward pass attends to its own exact keys and values, so it is `sdpa`'s too, but for the queries whose
    weights a policy of the recipe needs, which sdpa does not hand out. Under autocast everything is in the dtype of the
    values, to which sdpa would round queries and keys too.

    Raises ValueError for an argument that is not known here, and may change the result.
    """
    mark: Mark | None = getattr(key, "_kvq", None)
    if not kwargs.keys() <= HARMLESS or sliding_window is not None:
        _check(kwargs, mark, sliding_window)
    if mark is not None and mark.current.mixed and torch.is_autocast_enabled(value.device.type):
        query, key = query.to(value.dtype), key.to(value.dtype)
        key._kvq = mark  # type: ignore[attr-defined]
        with torch.autocast(value.device.type, enabled=False):
            return attention(module, query, key, value, attention_mask, scaling, **kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    count = query.shape[2]
    weighed = 0 if mark is None else mark.blocks.weighed_first(count) if mark.first else count
    if mark is None or weighed < count:
        out = dense.attention(module, query, key, value, attention_mask, scaling, **kwargs)[0]
        if mark is not None and weighed:
            newest = None if attention_mask is None else attention_mask[:, :, -weighed:]
            mark.blocks.attend(mark.layer, query[:, :, -weighed:], newest, scale, kwargs.get(SINKS))
    else:
        out = mark.blocks.attend(mark.layer, query, attention_mask, scale, kwargs.get(SINKS))
        out = out.transpose(1, 2).contiguous()
    if mark is not None:
        mark.blocks.take_queries(mark.layer, query)
        mark.blocks.finish(mark.layer)
    return out, None


def _check(arguments: dict[str, Any], mark: Mark | None, sliding_window: int | None) -> None:
    """Raise a ValueError for arguments that this attention does not know; sdpa attends to transformers' own layers."""
    known = DENSE if mark is None else PACKED
    unknown = sorted(name for name, value in arguments.items() if value is not None and name not in known)
    if mark is not None and sliding_window is not None:
        unknown.append("sliding_window")
    if unknown:
        raise ValueError(
            f"kvq attention does not know {', '.join(unknown)}, which may change what the model computes; use "
            'model.set_attn_implementation("eager"), under which a KVQCache hands out decoded keys and values'
        )
    if mark is not None and arguments.get(SINKS) is not None and mark.blocks.weighs:
        raise ValueError(
            f"{mark.blocks.recipe.name} weighs tokens by attention, of which this model's learned sinks take a share; "
            "use a recipe that holds and reads all tokens"
        )


AttentionInterface.register("kvq", attention)
AttentionMaskInterface.register("kvq", sdpa_mask)
