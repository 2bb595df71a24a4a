"""Show one layer of the compressed cache to transformers, and attend to it: "kvq" reads a KVQCache's packed blocks."""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvq_runtime.cache import BlockCache
from kvq_runtime.ops import dense as whole
from kvq_runtime.recipe import weighs

# What models pass on, and does not change what a query gets: masks have what positions and kinds of tokens say. Only
# training has dropout.
HARMLESS = frozenset(
    {"dropout", "position_ids", "cache_position", "token_type_ids", "mm_token_type_ids", "use_cache", "labels"}
    | {"output_attentions", "output_hidden_states", "output_router_logits", "num_items_in_batch", "logits_to_keep"}
)
SINKS = "s_aux"  # one learned logit a head, of no token
# over whole keys and values
DENSE = HARMLESS | {"is_causal", "position_bias", "cache", "softcap", SINKS}
PACKED = HARMLESS | {"softcap", SINKS}
EAGER = 'use model.set_attn_implementation("eager"), under which a KVQCache hands out decoded keys and values'


@dataclass
class Pass:
    """The way in which one forward pass reads the layers.

    announced   whether our own attention will read the pass that the model has begun, of which no layer has been taken
                in yet; None: there is none
    attended    whether it reads this one: a pass that no model announces (a copy without hooks) is read decoded
    """

    announced: bool | None = None
    attended: bool = False


class KVQLayer(CacheLayerMixin):
    """One layer's view of the shared BlockCache, and of the pass under way.

    Keys are stored in the dtype of the values: under autocast RoPE leaves them in float32, and attention rounds them to
    autocast's dtype, which the values have.

    decodes   hand out all decoded under our own attention too, as other modules read what this one does
    first     whether the newest keys and values are the layer's first
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, blocks: BlockCache, index: int, current: Pass, decodes: bool = False):
        super().__init__()
        self.blocks, self.index, self.current, self.decodes = blocks, index, current, decodes
        self.first = True

    @torch.compiler.disable  # it counts on the host, so that a compiled model would be compiled anew for every length
    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Take in keys and values [B, H, T, D] and return all of them, history decoded.

        Under our own attention the new ones are returned, and attention reads the others from this layer.
        """
        device = key_states.device.type
        if device != "meta" and torch.is_autocast_enabled(device):  # which would round what we multiply
            with torch.autocast(device, enabled=False):
                return KVQLayer.update(self, key_states, value_states)  # type: ignore[attr-defined]
        current = self.current
        if self.index == 0:  # the first layer of a pass takes up what was announced
            current.attended, current.announced = bool(current.announced), None
        self.first = self.index not in self.blocks.layers
        if self.first:
            self._check(key_states, value_states)
            self.is_initialized = True
        k_BTC, v_BTC = key_states.transpose(1, 2).flatten(2), value_states.transpose(1, 2).flatten(2)
        if k_BTC.requires_grad or v_BTC.requires_grad:
            k_BTC, v_BTC = k_BTC.detach(), v_BTC.detach()
        if k_BTC.dtype != v_BTC.dtype:
            k_BTC = k_BTC.to(v_BTC.dtype)
        if current.attended and not self.decodes:
            self.blocks.take(self.index, k_BTC, v_BTC)
            _newest.set((self, key_states))
            return key_states, value_states
        keys, values = self.blocks.update(self.index, k_BTC, v_BTC)
        if keys is not k_BTC:
            heads = key_states.shape[1]
            key_states, value_states = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (keys, values))
        if self.decodes:  # code of a model's own may want them as transformers' cache has them
            return key_states.contiguous(), value_states.contiguous()
        return key_states, value_states

    def _check(self, key_states: Tensor, value_states: Tensor) -> None:
        """Refuse the first keys and values if they are not of the shape that the cache was made for."""
        geometry = self.blocks.geometry
        for name, x in (("keys", key_states), ("values", value_states)):
            if (x.shape[1], x.shape[3]) != (geometry.kv_heads, geometry.head_size):
                raise ValueError(
                    f"layer {self.index} caches {name} of {x.shape[1]} heads of {x.shape[3]}; the configuration says "
                    f"{geometry.kv_heads} heads of {geometry.head_size}, and kvq takes layers of one shape alone"
                )

    def _held_by_blocks(self, *_: Any) -> None:
        """Do nothing: `blocks` holds what the layer holds, and is reset, cropped and reordered by the cache."""

    lazy_initialization = reset = crop = reorder_cache = _held_by_blocks  # type: ignore[assignment]

    def get_seq_length(self) -> int:
        """Tokens that the layer has seen, held or not, with those of a pass that it has taken in and is under way."""
        step = self.blocks.step
        return self.blocks.length + (step.count if step is not None and self.index in step.taken else 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys that the next query attends to, offset of the first)."""
        return self.blocks.length + query_length, 0

    def get_max_length(self) -> int:
        """No bound."""
        return -1

    @property
    def batch_size(self) -> int:
        """Rows held, or -1 before the first update."""
        return self.blocks.layers[self.index].rows if self.index in self.blocks.layers else -1

    def offload(self) -> None:
        """Refused: the packed cache stays on its device."""
        raise RuntimeError("a KVQCache is not offloaded: it is small already; use offloading=False")

    prefetch = offload


# the layer that has taken in keys and values last, and the keys, by which attention knows them
_newest: ContextVar[tuple[KVQLayer, Tensor] | None] = ContextVar("the newest keys of a KVQLayer", default=None)


@torch.compiler.disable
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
    newest = _newest.get()
    layer = newest[0] if newest is not None and newest[1] is key else None
    if layer is not None:
        _newest.set(None)
    if not kwargs.keys() <= HARMLESS or sliding_window is not None:
        _check(kwargs, layer, sliding_window)
    if layer is None:
        return dense(module, query, key, value, attention_mask, scaling, **kwargs)
    if attention_mask is not None and (attention_mask.dtype != torch.bool or attention_mask.shape[1] > 1):
        raise ValueError(f"kvq attention takes masks of bool, one for all heads, as transformers makes; {EAGER}")
    if torch.is_autocast_enabled(value.device.type):
        query, key = query.to(value.dtype), key.to(value.dtype)
        with torch.autocast(value.device.type, enabled=False):
            return _attend(layer, module, query, key, value, attention_mask, scaling, kwargs)
    return _attend(layer, module, query, key, value, attention_mask, scaling, kwargs)


def _attend(
    layer: KVQLayer, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    scaling: float | None, arguments: dict[str, Any],
) -> tuple[Tensor, None]:  # fmt: skip
    """Answer the queries of what a layer has taken in, and have it encode what is due."""
    blocks, place, count = layer.blocks, layer.index, query.shape[2]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    softmax = whole.Softmax.of(arguments) if "softcap" in arguments or SINKS in arguments else whole.PLAIN
    # of a prompt those that policies weigh: the others may attend to the pass's own keys and values, which are exact
    weighed = min(count, blocks.policies.newest) if layer.first else count
    if weighed < count:
        out = dense(module, query, key, value, mask, scaling, **arguments)[0]
        if weighed:
            newest = None if mask is None else mask[:, :, -weighed:]
            blocks.attend(place, query[:, :, -weighed:], newest, scale, softmax)
    else:
        out = blocks.attend(place, query, mask, scale, softmax).transpose(1, 2).contiguous()
    if blocks.policies:
        blocks.take_queries(place, query)
    blocks.finish(place)
    return out, None


def dense(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as `sdpa` does, and with a cap on scores and learned logits of no token too, which it drops or refuses."""
    softmax = whole.Softmax.of(kwargs)
    causal = getattr(module, "is_causal", True) and kwargs.get("is_causal") is not False
    later = attention_mask is None and causal and 1 < query.shape[2] < key.shape[2]  # which sdpa takes for the first
    if softmax.plain and not later:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)[0], None
    factor = scaling if scaling is not None else query.shape[-1] ** -0.5
    return whole.attention(query, key, value, attention_mask, factor, softmax).transpose(1, 2).contiguous(), None


def _check(arguments: dict[str, Any], layer: KVQLayer | None, sliding_window: int | None) -> None:
    """Raise a ValueError for arguments that this attention does not know; sdpa attends to transformers' own layers."""
    known = DENSE if layer is None else PACKED
    unknown = sorted(name for name, value in arguments.items() if value is not None and name not in known)
    if layer is not None and sliding_window is not None:
        unknown.append("sliding_window")
    if unknown:
        raise ValueError(
            f"kvq attention does not know {', '.join(unknown)}, which may change what the model computes; {EAGER}"
        )
    if layer is not None and arguments.get(SINKS) is not None and weighs(layer.blocks.recipe):
        raise ValueError(
            f"{layer.blocks.recipe.name} weighs tokens by attention, of which this model's learned sinks take a share; "
            "use a recipe that holds and reads all tokens"
        )


AttentionInterface.register("kvq", attention)
AttentionMaskInterface.register("kvq", sdpa_mask)
