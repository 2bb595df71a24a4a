"""Make the caches of an evaluation, and count what their queries read decoded.

In use a plain KVQCache serves. `FullCache` encodes every token but the sinks before anything attends to it: a full
encode is one forward pass, in which each layer's keys and values go into the cache's own store; all whole blocks are
encoded there, in the recipe's block size and position, and packed; every query reads them decoded, its own token among
them. So the error of a layer is in the hidden states of the next, and a recipe that predicts across layers predicts
from decoded layers below. A long context comes close to this, since a recent window or an unfinished block is a
vanishing part of it. A window that is no multiple of the block leaves its last tokens, fewer than a block, exact. A
recipe that is fitted to its prompt is fitted to the first half of the window, or to as many tokens as its setting if
they are fewer, and then encodes all of it. A recipe that chooses among tokens has no full encode.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import sdpa_mask

from kvq_runtime.geometry import SLAB
from kvq_runtime.hf import KVQCache
from kvq_runtime.hf import attention as packed
from kvq_runtime.hf.model import rotary_of
from kvq_runtime.recipe import Recipe
from kvq_runtime.store.block_errors import Bounds
from kvq_runtime.store.decode import Pair

NAME = "kvq_full_encode"  # of the attention that encodes before it reads
_CHOICES = {"window": "how long tokens stay exact", "select": "which tokens are held, or read"}
Tensors = Mapping[str, Tensor]


def in_use(
    recipe: Recipe, model: PreTrainedModel, tensors: Tensors | None = None, bounds: Bounds | None = None
) -> KVQCache:
    """Make a KVQCache that decodes each block once, and gives no warning of errors beyond `bounds`."""
    cache = KVQCache(recipe, model, tensors, bounds)
    cache.blocks.warned = cache.blocks.decoder.keep = True
    return cache


class FullCache(KVQCache):
    """A cache that encodes all of a forward pass's tokens before it is read; for one pass over windows of `length`."""

    def __init__(
        self, recipe: Recipe, model: PreTrainedModel, tensors: Tensors | None = None, bounds: Bounds | None = None,
        *, length: int,
    ):  # fmt: skip
        super().__init__(encoding_all(recipe, length), model, tensors, bounds)
        self.blocks.warned, self.blocks.encoder.together = True, SLAB
        self.blocks.update = self._hand_out

    def _begin(self) -> None:
        super()._begin()
        if self.blocks.length:
            raise RuntimeError("a full encode is one forward pass; make a cache for each")

    def _announce(self, mask, positions_BT, rotary, attention: str | None) -> None:
        # as under "kvq", layers take keys and values in, and leave reading them to `attend`
        super()._announce(mask, positions_BT, rotary, "kvq" if attention == NAME else attention)

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float,
               **kwargs: Any) -> tuple[Tensor, None]:  # fmt: skip
        """Encode a layer, and answer its queries from the decoded keys and values."""
        layer, blocks = self.places.get(module.layer_idx), self.blocks
        if layer is None or getattr(self.layers[module.layer_idx], "decodes", False):  # decoded already, or 16 bits
            return packed.dense(module, query, key, value, mask, scale, **kwargs)
        blocks.take_queries(layer, query)
        keys, values = (x.unflatten(-1, (key.shape[1], -1)).transpose(1, 2) for x in self._encode(layer))
        out = packed.dense(module, query, keys, values, mask, scale, **kwargs)[0]
        blocks.finish(layer)
        return out, None

    def _hand_out(self, layer: int, k_BTC: Tensor, v_BTC: Tensor) -> Pair:
        """Encode a layer that other modules read, too, and return what they read."""
        self.blocks.take(layer, k_BTC, v_BTC)
        decoded = self._encode(layer)
        self.blocks.finish(layer)
        return decoded

    def _encode(self, layer: int) -> Pair:
        """Encode what is due, and return all keys and values, [B, T, C] each."""
        if self.blocks.policies.may_encode(layer):
            self.blocks.encoder.flush(layer)
        return self.blocks.decoder.whole(layer)


# ---- what was read ---------------------------------------------------------------------------------------------------


@dataclass
class Reads:
    """Pairs of a query and a token up to it, summed over layers and rows: all, decoded ones, evicted ones."""

    pairs: int = 0
    decoded: int = 0
    evicted: int = 0

    def add(self, other: "Reads") -> None:
        """Add other sums."""
        self.pairs += other.pairs
        self.decoded += other.decoded
        self.evicted += other.evicted

    @property
    def shares(self) -> dict[str, float]:
        """Return the shares, 0 to 1, of decoded and of evicted pairs, as records have them."""
        return {"reads": self.decoded / self.pairs, "unread": self.evicted / self.pairs}


def encoded_by_layer(cache: KVQCache) -> tuple[dict[int, int], int]:
    """Return how many tokens of each layer are in blocks, and how many tokens were evicted."""
    return {layer: store.encoded for layer, store in cache.blocks.layers.items()}, cache.blocks.positions.dropped


def count_reads(cache: KVQCache, before: tuple[dict[int, int], int], tokens: range) -> Reads | None:
    """Count what a pass of these tokens has read; `before`: `encoded_by_layer` before it.

    A pass reads the blocks that were encoded before it, a full encode its own. None for a recipe whose queries choose
    what they read.
    """
    if any(policy.chooses_by_query for policy in cache.blocks.recipe.policies):
        return None
    layers, rows, sinks = cache.blocks.layers, cache.blocks.rows, cache.blocks.recipe.window.sinks
    encoded, dropped = before
    pairs, decoded = len(layers) * sum(token + 1 for token in tokens), 0
    for layer, store in layers.items():
        if isinstance(cache, FullCache):
            decoded += sum(max(0, min(token + 1, store.encoded) - sinks) for token in tokens)
        else:
            decoded += len(tokens) * max(0, encoded.get(layer, 0) - sinks)
    return Reads(rows * pairs, rows * decoded, rows * len(layers) * len(tokens) * dropped)


def encoded_share(cache: KVQCache) -> float:
    """Return the share of a row's tokens that are encoded or evicted, sinks aside, in the layer with the fewest."""
    encoded, dropped = encoded_by_layer(cache)
    fewest = max(0, min(encoded.values(), default=0) - cache.blocks.recipe.window.sinks)
    return (fewest + dropped) / max(1, cache.blocks.positions.seen)


def refusal(recipe: Recipe) -> str | None:
    """Return the reason why a recipe has no full encode, or None."""
    for policy in recipe.policies:
        if not policy.fits_prompt:
            return f"it chooses {_CHOICES.get(policy.slot, 'among tokens')}, so that no full encode is its own"
    return None


def encodes(recipe: Recipe, length: int) -> bool:
    """Return whether anything of a window is encoded, in a full encode or, for a recipe that has none, in use."""
    window = recipe.window
    if refusal(recipe) is not None:
        return length > window.recent + window.block
    return length // window.block * window.block > window.sinks


def fit_tokens(recipe: Recipe, length: int) -> int | None:
    """Return how many first tokens of a window a recipe is fitted to, if it is fitted to its prompt; else None."""
    online: Any = recipe.policy("online")
    if online is None:
        return None
    half = max(1, length // 2)
    return half if online.fit_tokens == "prompt" else min(half, online.fit_tokens)


def encoding_all(recipe: Recipe, length: int) -> Recipe:
    """Return the recipe of a full encode: without a recent window, and fitted to `fit_tokens`.

    Raises ValueError for a recipe that has no full encode.
    """
    reason = refusal(recipe)
    if reason is not None:
        raise ValueError(f"{recipe.name}: {reason}")
    fitted = fit_tokens(recipe, length)
    policies = tuple(replace(one, fit_tokens=fitted) if one.slot == "online" else one for one in recipe.policies)
    return replace(recipe.with_exact(recent=0), policies=policies)


# ---- attention -------------------------------------------------------------------------------------------------------

_active: ContextVar[Any] = ContextVar("the full cache of the forward pass")


@contextmanager
def attending(model: PreTrainedModel, cache: Cache) -> Iterator[None]:
    """Give the model the attention that the cache needs for the length of a forward pass."""
    name = NAME if isinstance(cache, FullCache) else cache.attention if isinstance(cache, KVQCache) else None
    if name is None:
        yield
        return
    before, token = model.config._attn_implementation or "eager", _active.set(cache)
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(before)
        _active.reset(token)


@contextmanager
def answering(cache: FullCache, attention: Mapping[int, Any], calls: Mapping[str, Any], rotary: Any, first: bool):
    """Have a cache answer the attention of a layer of a model that runs one layer at a time.

    attention   modules of the layers that run, by number
    calls       the arguments of the layer's forward, positions and their cosines and sines among them
    rotary      the decoder's
    first       whether the model's first layer is among those that run
    """
    before, token = {n: module.config._attn_implementation for n, module in attention.items()}, _active.set(cache)
    for module in attention.values():
        module.config._attn_implementation = NAME
    if first:
        cache._begin()
        cos_sin = calls.get("position_embeddings")
        turning = rotary_of(rotary, cos_sin[0].dtype) if isinstance(cos_sin, tuple) else None
        cache._announce(None, calls.get("position_ids"), turning, NAME)
    try:
        yield cache
    finally:
        for n, module in attention.items():
            module.config._attn_implementation = before[n]
        _active.reset(token)


def _attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _active.get().attend(module, query, key, value, attention_mask, scale, **kwargs)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
