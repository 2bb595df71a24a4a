"""Count what attention reads from a cache: which share of it came out of encoded blocks.

    reads       of all pairs of a query and a token up to it, the share whose token was decoded
    unread      the share whose token had been evicted
    attention   the share of attention's weight, softmax(q kᵀ · scale), that lay on decoded tokens: mean over layers,
                heads and queries, with the very keys that the queries read

S = tokens that are read · G = query heads that share a KV head.
"""

from collections.abc import Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from kvq_runtime.hf import KVQCache
from kvq_runtime.hf import attention as packed
from kvq_runtime.ops.dense import PLAIN, Softmax, attention

NAME = "kvq_counted"  # of the attention that counts


@dataclass
class Reads:
    """Sums over layers, rows and queries; `weight` counts a head of a query as 1."""

    pairs: int = 0
    decoded_pairs: int = 0
    unread_pairs: int = 0
    weight: float = 0.0
    decoded_weight: float = 0.0

    def add(self, other: "Reads") -> None:
        """Take other sums in."""
        for name, more in asdict(other).items():
            setattr(self, name, getattr(self, name) + more)

    def count(
        self, q_BHTD: Tensor, k_BHSD: Tensor | None, read: int, decoded: range, mask: Tensor | None, scale: float,
        evicted: int = 0, softmax: Softmax = PLAIN,
    ) -> None:  # fmt: skip
        """Count the queries of one layer.

        k         the keys that they read, needed where any is decoded
        read      tokens, the queries' own among them, which are the newest
        decoded   which of them came out of encoded blocks
        mask      bool [B or 1, 1, T, S], True where a query sees a token; None: causal
        evicted   older tokens of every row that are gone
        softmax   what the layer's attention has beside scores
        """
        batch, heads, queries, _ = q_BHTD.shape
        given = mask
        if mask is None:
            places = torch.arange(read, device=q_BHTD.device)
            mask = (places <= places[read - queries :, None])[None, None]
        visible = mask.expand(batch, 1, queries, read)
        self.pairs += int(visible.sum()) + batch * queries * evicted
        self.unread_pairs += batch * queries * evicted
        self.weight += batch * heads * queries
        if not decoded:
            return
        assert k_BHSD is not None, "decoded tokens without their keys"
        part = slice(decoded.start, decoded.stop)
        self.decoded_pairs += int(visible[..., part].sum())
        keys_BHSD = k_BHSD.float().repeat_interleave(heads // k_BHSD.shape[1], 1)
        is_decoded = keys_BHSD.new_zeros(keys_BHSD.shape[-2:])  # stored whole: else no fused kernel takes them
        is_decoded[part] = 1
        causal = given is None and queries == read
        # with values of 1 where a token was decoded, and 0 elsewhere, out comes the weight on decoded tokens
        weight_BHTD = attention(
            q_BHTD.float(), keys_BHSD, is_decoded.expand_as(keys_BHSD), None if causal else visible, scale, softmax
        )
        self.decoded_weight += float(weight_BHTD[..., 0].sum(dtype=torch.float64))

    @property
    def shares(self) -> dict[str, float]:
        """The shares that the file's head lists, 0 to 1."""
        return {
            "attention": self.decoded_weight / self.weight,
            "reads": self.decoded_pairs / self.pairs,
            "unread": self.unread_pairs / self.pairs,
        }


class CountedCache(KVQCache):
    """A cache for evaluation, in use: what it holds and gives back is a KVQCache's, and what is read is counted.

    reads   None for a recipe whose queries choose what they read, which this does not see
    """

    inner = "sdpa"  # the attention that answers

    def __init__(self, recipe, model: PreTrainedModel, tensors: Mapping[str, Tensor] | None = None):
        super().__init__(recipe, model, tensors)
        self.blocks.decoder.keep = True
        self.inner = self.attention or self.inner
        chosen = any(policy.chooses_by_query for policy in recipe.policies)
        self.reads: Reads | None = None if chosen else Reads()
        self._encoded: dict[int, int] = {}
        self._evicted = 0

    def _begin(self, attention_mask: Tensor | None) -> None:
        """Note what is encoded before the pass: a pass encodes after it has read."""
        super()._begin(attention_mask)
        self._encoded = {layer: store.encoded for layer, store in self.blocks.layers.items()}
        self._evicted = self.blocks.positions.dropped

    def _announce(self, positions_BT, cos_sin, rotary, attention: str | None) -> None:
        super()._announce(positions_BT, cos_sin, rotary, self.inner if attention == NAME else attention)

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float,
               **kwargs: Any) -> tuple[Tensor, None]:  # fmt: skip
        """Count what the queries of a layer read, and have its attention answer them."""
        layer = self.places.get(module.layer_idx)
        if layer is None:  # which transformers holds
            return packed.dense(module, query, key, value, mask, scale, **kwargs)
        decoded = self.decoded(self._encoded.get(layer, 0))
        if self.inner == "sdpa":
            self._count(query, key, key.shape[2], decoded, mask, scale, softmax=Softmax.of(kwargs))
            return packed.dense(module, query, key, value, mask, scale, **kwargs)
        if self.reads is not None:
            read, whole = self.blocks.layers[layer].length, None
            if decoded:
                whole = self.blocks.decoder.whole(layer)[0].unflatten(-1, (key.shape[1], -1)).transpose(1, 2)
            self._count(query, whole, read, decoded, None, scale, self._evicted, Softmax.of(kwargs))
        return packed.attention(module, query, key, value, mask, scale, **kwargs)

    def decoded(self, encoded: int) -> range:
        """The tokens that are read decoded if the first `encoded` are in blocks: all of these but the sinks."""
        return range(min(self.blocks.recipe.window.sinks, encoded), encoded)

    def _count(self, *counted: Any, **more: Any) -> None:
        if self.reads is not None:
            self.reads.count(*counted, **more)


_at_work: ContextVar[CountedCache] = ContextVar("the cache of the forward pass")


@contextmanager
def counting(model: PreTrainedModel, cache: CountedCache):
    """Have a cache's own `attend` answer the model's queries for the length of a forward pass."""
    before, token = model.config._attn_implementation or "eager", _at_work.set(cache)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        _at_work.reset(token)


@contextmanager
def answering(cache: CountedCache, attention: Mapping[int, Any], calls: Mapping[str, Any], rotary: Any, first: bool):
    """The same for some layers of a model that runs one layer at a time, of which the cache holds one.

    attention   modules of the layers, by number
    calls       what the decoder calls that one with, positions and their cosines and sines among it
    rotary      the decoder's
    first       whether the model's first layer is among those that run
    """
    before, token = {n: module.config._attn_implementation for n, module in attention.items()}, _at_work.set(cache)
    for module in attention.values():
        module.config._attn_implementation = NAME
    if first:
        cache._begin(None)
    cache._announce(calls.get("position_ids"), calls.get("position_embeddings"), rotary, NAME)
    try:
        yield cache
    finally:
        for n, module in attention.items():
            module.config._attn_implementation = before[n]
        _at_work.reset(token)


def _attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _at_work.get().attend(module, query, key, value, attention_mask, scale, **kwargs)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
