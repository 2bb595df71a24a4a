"""Show one layer of the compressed cache to transformers, and attend to it: "kvq" reads a KVQCache's packed blocks."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache

from kvq_runtime.cache import BlockCache
from kvq_runtime.geometry import LATENTS
from kvq_runtime.ops import dense as whole
from kvq_runtime.recipe import weighs

# What models pass on, and does not change what a query gets: masks have what positions and kinds of tokens say. Only
# training has dropout.
HARMLESS = frozenset(
    {"dropout", "position_ids", "cache_position", "token_type_ids", "mm_token_type_ids", "use_cache", "labels"}
    | {"output_attentions", "output_hidden_states", "output_router_logits", "num_items_in_batch", "logits_to_keep"}
)
HIDDEN = -1e4  # and less: what hides a token, where it is added to its score
SINKS = "s_aux"  # one learned logit a head, of no token
# over whole keys and values
DENSE = HARMLESS | {"is_causal", "position_bias", "cache", "softcap", "indices", "block_indices", SINKS}
PACKED = HARMLESS | {"softcap", SINKS}
EAGER = 'use model.set_attn_implementation("eager"), under which a KVQCache hands out decoded keys and values'


@dataclass
class Pass:
    """The way in which one forward pass reads the layers.

    announced   whether the model has announced that our own attention will read the next pass
    attended    whether it reads this one: a pass that no model announces (a copy without hooks) is read decoded
    mixed       whether keys and values are of two dtypes, or autocast is on, which would round what we multiply
    """

    announced: bool = False
    attended: bool = False
    mixed: bool = False

    def begin(self, key_states: Tensor, value_states: Tensor) -> None:
        """The first layer of a pass takes up what was announced."""
        self.attended, self.announced = self.announced, False
        mixed = key_states.dtype != value_states.dtype
        self.mixed = mixed or torch.is_autocast_enabled(key_states.device.type)


@dataclass(frozen=True)
class Mark:
    """The mark that our attention finds on what a layer has stored, keys and values; `first`: its first ones."""

    blocks: BlockCache
    layer: int
    first: bool
    current: Pass


class KVQLayer(CacheLayerMixin):
    """One layer's view of the shared BlockCache, and of the pass under way.

    Keys are stored in the dtype of the values: under autocast RoPE leaves them in float32, and attention rounds them to
    autocast's dtype, which the values have.

    decodes   hand out all decoded under our own attention too, as other modules read what this one does
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False
    indexer_keys: Tensor | None = None  # [B, T, I] by which a model chooses what its queries read, as they are
    indexer_position_ids: Tensor | None = None  # [axes, B, T], which Qwen 4 keeps beside them

    def __init__(self, blocks: BlockCache, index: int, current: Pass, decodes: bool = False):
        super().__init__()
        self.blocks, self.index, self.current, self.decodes = blocks, index, current, decodes
        self._leads = index == 0
        self._marks = {first: Mark(blocks, index, first, current) for first in (True, False)}

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the store of the layer is made at the first update."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Take in keys and values [B, H, T, D] and return all of them, history decoded.

        Under our own attention the new ones are returned, with a mark by which it finds the others.
        """
        if self._leads:
            self.current.begin(key_states, value_states)
        if self.current.mixed:
            with torch.autocast(key_states.device.type, enabled=False):
                return self._update(key_states, value_states)
        return self._update(key_states, value_states)

    def _update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        first = self.index not in self.blocks.layers
        if first:
            self._check(key_states, value_states)
        self.is_initialized = True
        k_BTC, v_BTC = key_states.transpose(1, 2).flatten(2), value_states.transpose(1, 2).flatten(2)
        if k_BTC.requires_grad or v_BTC.requires_grad:
            k_BTC, v_BTC = k_BTC.detach(), v_BTC.detach()
        if self.current.mixed:
            k_BTC = k_BTC.to(v_BTC.dtype)
        if self.current.attended and not self.decodes:
            self._check_read()
            self.blocks.take(self.index, k_BTC, v_BTC)
            key_states = key_states.view_as(key_states)  # the mark stays off the caller's tensors
            value_states = value_states.view_as(value_states)
            key_states._kvq = value_states._kvq = self._marks[first]  # type: ignore[attr-defined]
            return key_states, value_states
        keys, values = self.blocks.update(self.index, k_BTC, v_BTC)
        if keys is not k_BTC:
            heads = key_states.shape[1]
            key_states, value_states = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (keys, values))
        if self.decodes:  # code of a model's own may want them as transformers' cache has them
            return key_states.contiguous(), value_states.contiguous()
        return key_states, value_states

    def _check_read(self) -> None:
        """Refuse a pass in which a layer below has taken in what attention has not been asked for since."""
        step = self.blocks.step
        if step is not None and not self._leads and (unread := step.taken - step.done - {self.index}):
            self.blocks.settle()
            raise ValueError(
                f"kvq attention does not know keys and values that a model changes behind a cache, or reads by code of "
                f"its own, as those of layer {min(unread)}; {EAGER}"
            )

    def _check(self, key_states: Tensor, value_states: Tensor) -> None:
        """Refuse the first keys and values if they are not of the shape that the cache was made for."""
        geometry = self.blocks.geometry
        for name, x in (("keys", key_states), ("values", value_states)):
            if (x.shape[1], x.shape[3]) != (geometry.kv_heads, geometry.head_size):
                raise ValueError(
                    f"layer {self.index} caches {name} of {x.shape[1]} heads of {x.shape[3]}; the configuration says "
                    f"{geometry.kv_heads} heads of {geometry.head_size}, and kvq takes layers of one shape alone"
                )

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Take in the keys of an indexer [B, T, I], by which it chooses what queries read; return all, none rounded."""
        held, length = self.indexer_keys, self.blocks.length  # more are held of a pass that stopped midway
        new = indexer_key_states.detach()
        self.indexer_keys = torch.cat([held[:, :length], new], 1) if held is not None and length else new
        self.keys = new.new_empty(1, 1, self.indexer_keys.shape[1], 0)  # GLM 5.3 asks it how many tokens there are
        return self.indexer_keys

    def update_index(self, idx_k: Tensor) -> Tensor:
        """The same of MiniMax M3's indexer, [B, 1, T, I]."""
        return self.update_indexer(idx_k[:, 0])[:, None]

    def reset(self) -> None:
        """Forget an indexer's keys: what else a layer holds, `blocks` holds."""
        self.indexer_keys = self.indexer_position_ids = None

    def crop(self, tokens_to_remove: int) -> None:
        """Keep those of as many tokens as `blocks` holds, which has been cropped."""
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[:, : self.blocks.length]
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[..., : self.blocks.length]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep those of these rows, in this order."""
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[beam_idx.to(self.indexer_keys.device)]
        if self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[:, beam_idx.to(self.indexer_position_ids.device)]

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat those of every row, copies side by side."""
        if self.indexer_keys is not None:
            self.reorder_cache(torch.arange(len(self.indexer_keys)).repeat_interleave(repeats))

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


class JoinedLayer(KVQLayer):
    """A layer that caches one row of a token (`geometry.joined`): its first half is stored as keys are, so that RoPE
    can be undone there, the second as values.

    Of multi-head latent attention the row is the rotary key, after RoPE, and then the latent that the model makes keys
    and values of, for all heads. Source: DeepSeek-AI, 2024 (V2), 2.1. Of others it is a head's key and then its value.
    """

    def __init__(self, what: str, *given: Any):
        super().__init__(*given)
        self.what = what

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Take in keys and values [B, H, T, D], or latents and rotary keys; return all, history decoded, in their
        dtypes."""
        stored = super().update(*halves(self.what, key_states, value_states))
        keys, values = parts(self.what, *stored, key_states.shape[-1])
        return keys.to(key_states.dtype), values.to(value_states.dtype)


class PooledLayer(DeepseekV4CSACache):
    """A layer that caches one entry for some tokens: `entries` holds them, rotary channels first, as of latents.

    The window, the entries of its indexer, and tokens that are yet to be pooled are transformers' own.
    """

    _layer_type = None  # by which transformers would take the class for its own

    def __init__(self, config: Any, entries: JoinedLayer):
        super().__init__(config)
        self.entries, self.turned = entries, config.qk_rope_head_dim

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Take in entries [B, T, R + P], rotary channels last, or an indexer's; return all, history decoded."""
        if name != "compressor":
            return super().update_compressor_states(name, compressed)
        self.entry_count[name] += compressed.shape[1]
        return pooled(self.entries, compressed[:, None], self.turned)[:, 0]


class HybridLayer(LinearAttentionLayer, KVQLayer):
    """A layer that attends and recurs (Falcon H1): its states, which transformers resets and reorders, are 16-bit."""

    is_compileable = False  # type: ignore[assignment]
    offload = prefetch = KVQLayer.offload  # type: ignore[assignment]

    def __init__(self, states: int, *given: Any):
        KVQLayer.__init__(self, *given)
        LinearAttentionLayer.__init__(self, number_of_states=states)

    def lazy_initialization(self, *keys_and_values: Tensor, **states: Any) -> None:
        """Make states; the store of the layer is made at the first update."""
        if states:
            LinearAttentionLayer.lazy_initialization(self, **states)


def pooled(entries: Any, rows: Tensor, turned: int) -> Tensor:
    """Have a layer take in entries, [B, 1, T, R + P], and return all that it gives.

    Their last channels, `turned` of them, RoPE turns in pairs side by side: a layer gets them first, by half.
    """
    rest, rotary = rows.tensor_split([-turned], -1)
    rotary, rest = entries.update(rotary.unflatten(-1, (-1, 2)).mT.flatten(-2), rest)
    return torch.cat([rest, rotary.unflatten(-1, (2, -1)).mT.flatten(-2)], -1)


def halves(what: str, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
    """Share the row of what a cache gets, F and L wide, between stored keys and values, [..., (F + L) / 2] each."""
    first, last = (value_states, key_states) if what == LATENTS else (key_states, value_states)
    keys, values = torch.cat([first.to(last.dtype), last], -1).chunk(2, -1)
    return keys, values


def parts(what: str, keys: Tensor, values: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """What a cache got, of such halves; `width`: of keys, or of latents."""
    row = torch.cat([keys, values], -1)
    return (row[..., -width:], row[..., :-width]) if what == LATENTS else (row[..., :width], row[..., width:])


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
    mark = mark_of(module, key, value, attention_mask, sliding_window, kwargs)
    if mark is not None and attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = _seen(attention_mask)
    if mark is not None and mark.current.mixed and torch.is_autocast_enabled(value.device.type):
        query, key = query.to(value.dtype), key.to(value.dtype)
        key._kvq = mark  # type: ignore[attr-defined]
        with torch.autocast(value.device.type, enabled=False):
            return attention(module, query, key, value, attention_mask, scaling, **kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    count = query.shape[2]
    # of a prompt those that policies weigh: the others may attend to the pass's own keys and values, which are exact
    weighed = 0 if mark is None else min(count, mark.blocks.policies.newest) if mark.first else count
    if mark is None or weighed < count:
        out = dense(module, query, key, value, attention_mask, scaling, **kwargs)[0]
        if mark is not None and weighed:
            newest = None if attention_mask is None else attention_mask[:, :, -weighed:]
            mark.blocks.attend(mark.layer, query[:, :, -weighed:], newest, scale, whole.Softmax.of(kwargs))
    else:
        out = mark.blocks.attend(mark.layer, query, attention_mask, scale, whole.Softmax.of(kwargs))
        out = out.transpose(1, 2).contiguous()
    if mark is not None:
        mark.blocks.take_queries(mark.layer, query)
        mark.blocks.finish(mark.layer)
    return out, None


def mark_of(module: Any, key: Tensor, value: Tensor, mask: Any, window: int | None, given: dict[str, Any]) -> Any:
    """The Mark of keys and values; None: no layer of ours holds them. Raises ValueError for what is not known here."""
    mark: Mark | None = getattr(key, "_kvq", None)
    if mark is not getattr(value, "_kvq", None):
        raise ValueError(
            f"kvq attention does not know keys or values that {type(module).__name__} changes behind a cache; {EAGER}"
        )
    if mark is not None and mask is not None and mask.ndim == 4 and mask.shape[1] > 1:
        raise ValueError(f"kvq attention does not know masks by head, as {type(module).__name__} makes; {EAGER}")
    if not given.keys() <= HARMLESS or window is not None:
        _check(given, mark, window)
    return mark


def dense(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as `sdpa` does, and to a cap on scores and learned logits of no token too, which it drops or refuses; and
    to the tokens alone that a model has chosen."""
    attention_mask = chosen(module, query, key, attention_mask, kwargs)
    softmax = whole.Softmax.of(kwargs)
    causal = getattr(module, "is_causal", True) and kwargs.get("is_causal") is not False
    later = attention_mask is None and causal and 1 < query.shape[2] < key.shape[2]  # which sdpa takes for the first
    if softmax.plain and not later:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)[0], None
    factor = scaling if scaling is not None else query.shape[-1] ** -0.5
    return whole.attention(query, key, value, attention_mask, factor, softmax).transpose(1, 2).contiguous(), None


def chosen(module: Any, query: Tensor, key: Tensor, mask: Any, given: dict[str, Any]) -> Any:
    """A mask of the tokens alone that a model has chosen for each query, [B, 1, T, S] or by query head, where `given`
    names tokens or blocks, which are taken from there; elsewhere `mask` itself."""
    if (blocks := given.pop("block_indices", None)) is not None:
        places = given["position_ids"].expand(len(query), -1)
        return module.indexer.build_block_mask(blocks, mask, key.shape[2], query.dtype, query.device, places)
    if (indices_BTK := given.pop("indices", None)) is None:
        return mask
    among = torch.zeros(mask.shape, dtype=torch.bool, device=mask.device)
    among = among.expand(len(indices_BTK), -1, -1, -1).scatter(-1, indices_BTK[:, None].long(), True)
    return among & mask if mask.dtype == torch.bool else mask.masked_fill(~among, torch.finfo(mask.dtype).min)


def _seen(mask: Tensor) -> Tensor:
    """The tokens that a mask of the caller's own, which is added to scores, leaves to see; ValueError: it weighs."""
    seen = mask == 0
    if not bool((seen | (mask <= HIDDEN)).all()):
        raise ValueError(
            f"kvq attention does not know a mask that weighs tokens, by other numbers than 0 and -inf; {EAGER}"
        )
    return seen


def _check(arguments: dict[str, Any], mark: Mark | None, sliding_window: int | None) -> None:
    """Raise a ValueError for arguments that this attention does not know; sdpa attends to transformers' own layers."""
    known = DENSE if mark is None else PACKED
    unknown = sorted(name for name, value in arguments.items() if value is not None and name not in known)
    if mark is not None and sliding_window is not None:
        unknown.append("sliding_window")
    if unknown:
        raise ValueError(
            f"kvq attention does not know {', '.join(unknown)}, which may change what the model computes; {EAGER}"
        )
    if mark is not None and arguments.get(SINKS) is not None and weighs(mark.blocks.recipe):
        raise ValueError(
            f"{mark.blocks.recipe.name} weighs tokens by attention, of which this model's learned sinks take a share; "
            "use a recipe that holds and reads all tokens"
        )


AttentionInterface.register("kvq", attention)
AttentionMaskInterface.register("kvq", sdpa_mask)
