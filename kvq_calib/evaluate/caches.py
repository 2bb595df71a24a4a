"""Caches that an evaluation reads through: what comes back is a KVQCache's, and what attention read of it is noted.

CountedCache   counts, in use
FullCache      counts, and encodes every token but the sinks before anything attends to it: a full encode
WitnessCache   notes row by row what each pass but the first read, with any attention

    reads       of all pairs of a query and a token up to it, the share whose token was decoded
    unread      the share whose token had been evicted
    attention   the share of attention's weight, softmax(q kᵀ · scale), that lay on decoded tokens: mean over layers,
                heads and queries, with the very keys that the queries read

A full encode is one forward pass. In each layer its keys and values go into the cache's own store; all whole blocks are
encoded there, in the recipe's block size and position, and packed; every query reads them decoded, its own token among
them. So the error of a layer is in the hidden states of the next, and a recipe that predicts across layers predicts
from what was decoded below. It is what a long context comes to, of which a recent window or an unfinished block is a
vanishing part. A window that is no multiple of the block leaves the rest of its tokens, less than a block, exact. A
recipe that is fitted to its prompt is fitted to the first half of the window, or to as many tokens as its setting if
they are fewer, and then encodes all of it. A recipe that chooses among tokens has no full encode: which it holds, reads
or keeps exact is what it is about.

S = tokens that are read · G = query heads that share a KV head.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.masking_utils import sdpa_mask

from kvq_runtime.families import FULL
from kvq_runtime.geometry import SLAB, owners
from kvq_runtime.hf import KVQCache
from kvq_runtime.hf import attention as packed
from kvq_runtime.hf.model import real_tokens, settings_of, visible
from kvq_runtime.ops.dense import PLAIN, Softmax, attention
from kvq_runtime.recipe import Recipe
from kvq_runtime.store.block_errors import Bounds
from kvq_runtime.store.decode import Pair

NAME = "kvq_counted"  # of the attention that counts
_CHOICES = {"window": "how long tokens stay exact", "select": "which tokens are held, or read"}


@dataclass
class Reads:
    """Sums over layers, rows and queries; `weight` counts a head of a query as 1."""

    pairs: float = 0
    decoded_pairs: float = 0
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
        mask      [B or 1, 1 or H, T, S], True where a query sees a token, or what is added to scores; None: causal
        evicted   older tokens of every row that are gone
        softmax   what the layer's attention has beside scores
        """
        batch, heads, queries, _ = q_BHTD.shape
        given = mask
        if mask is None:
            places = torch.arange(read, device=q_BHTD.device)
            mask = (places <= places[read - queries :, None])[None, None]
        seen = visible(mask).expand(batch, -1, queries, read)
        self.pairs += int(seen.sum()) / seen.shape[1] + batch * queries * evicted
        self.unread_pairs += batch * queries * evicted
        self.weight += batch * heads * queries
        if not decoded:
            return
        assert k_BHSD is not None, "decoded tokens without their keys"
        part = slice(decoded.start, decoded.stop)
        self.decoded_pairs += int(seen[..., part].sum()) / seen.shape[1]
        keys_BHSD = k_BHSD.float().repeat_interleave(heads // k_BHSD.shape[1], 1)
        is_decoded = keys_BHSD.new_zeros(keys_BHSD.shape[-2:])  # stored whole: else no fused kernel takes them
        is_decoded[part] = 1
        causal = given is None and queries == read
        # with values of 1 where a token was decoded, and 0 elsewhere, out comes the weight on decoded tokens
        weight_BHTD = attention(
            q_BHTD.float(), keys_BHSD, is_decoded.expand_as(keys_BHSD), None if causal else seen, scale, softmax
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

    reads   None for a recipe whose queries choose what they read, which this does not see, and where they are hidden
    bounds  of the errors of blocks; None: they are not measured
    """

    inner = "sdpa"  # the attention that answers

    def __init__(
        self, recipe, model: PreTrainedModel, tensors: Mapping[str, Tensor] | None = None, bounds: Bounds | None = None
    ):
        super().__init__(recipe, model, tensors, bounds)
        self.blocks.warned = True  # the record has the share
        self.blocks.decoder.keep = True
        self.inner = self.attention or self.inner
        config = settings_of(model.config.get_text_config(decoder=True))
        kinds, first = config.get("layer_types") or [], owners(config)
        # layers that read what the last that caches all tokens has decoded
        self._readers = {n: max(self.places.values()) for n in range(first, len(kinds)) if kinds[n] == FULL}
        chosen = any(policy.chooses_by_query for policy in recipe.policies)
        self.reads: Reads | None = None if chosen else Reads()
        self._encoded: dict[int, int] = {}
        self._evicted = self._filled = 0

    def _begin(self, attention_mask: Tensor | None) -> None:
        """Note what is encoded before the pass: a pass encodes after it has read."""
        super()._begin(attention_mask)
        self._encoded = {layer: store.encoded for layer, store in self.blocks.layers.items()}
        self._evicted = self.blocks.positions.dropped

    def _announce(self, positions_BT, cos_sin, rotary, attention: str | None) -> None:
        super()._announce(positions_BT, cos_sin, rotary, self.inner if attention == NAME else attention)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Note the layer, which its attention does not say: one module may serve several."""
        self._filled = layer_idx
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _place(self, module: Any) -> int | None:
        """The layer of ours that the queries of a module read; None: one of transformers'."""
        return self._readers.get(module.layer_idx, self.places.get(self._filled))

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float,
               **kwargs: Any) -> tuple[Tensor, None]:  # fmt: skip
        """Count what the queries of a layer read, and have its attention answer them."""
        layer = self._place(module)
        if layer is None:  # which transformers holds
            return packed.dense(module, query, key, value, mask, scale, **kwargs)
        decoded = self.decoded(self._encoded.get(layer, 0))
        if self.inner == "sdpa" or self._hands_out(module):
            self._count(query, key, key.shape[2], decoded, mask, scale, softmax=Softmax.of(kwargs))
            return packed.dense(module, query, key, value, mask, scale, **kwargs)
        if self.reads is not None:
            read, whole = self.blocks.layers[layer].length, None
            if decoded:
                whole = self.blocks.decoder.whole(layer)[0].unflatten(-1, (key.shape[1], -1)).transpose(1, 2)
            self._count(query, whole, read, decoded, None, scale, self._evicted, Softmax.of(kwargs))
        return packed.attention(module, query, key, value, mask, scale, **kwargs)

    def _hands_out(self, module: Any) -> bool:
        """True of a layer whose own module, or others, read what the cache has decoded."""
        return module.layer_idx in self._readers or getattr(self.layers[self._filled], "decodes", False)

    def decoded(self, encoded: int) -> range:
        """The tokens that are read decoded if the first `encoded` are in blocks: all of these but the sinks."""
        return range(min(self.blocks.recipe.window.sinks, encoded), encoded)

    @property
    def read_share(self) -> float:
        """The share of what was read that was decoded, or evicted; of what is held, where reads are not counted."""
        return self.held_share if self.reads is None else self.reads.shares["reads"] + self.reads.shares["unread"]

    @property
    def held_share(self) -> float:
        """The share of the tokens held that is encoded, sinks aside, in the layer with the least."""
        stores = self.blocks.layers.values()
        return min(len(self.decoded(store.encoded)) / max(store.length, 1) for store in stores)

    def _count(self, *counted: Any, **more: Any) -> None:
        if self.reads is not None:
            self.reads.count(*counted, **more)


class FullCache(CountedCache):
    """A cache that encodes all of a forward pass's tokens before it is read; for one pass over windows of `length`."""

    def __init__(
        self, recipe: Recipe, model: PreTrainedModel, tensors: Mapping[str, Tensor] | None = None,
        bounds: Bounds | None = None, *, length: int,
    ):  # fmt: skip
        super().__init__(encoding_all(recipe, length), model, tensors, bounds)
        self.blocks.encoder.together, self.blocks.decoder.keep = SLAB, False  # a layer is read once
        self.inner = "kvq"  # so that a layer takes keys and values in, and leaves it to `attend` to read them
        self.blocks.update = self._handed_out

    def _begin(self, attention_mask: Tensor | None) -> None:
        super()._begin(attention_mask)
        if self.blocks.length:
            raise RuntimeError("a full encode is one forward pass; make a cache for each")

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float,
               **kwargs: Any) -> tuple[Tensor, None]:  # fmt: skip
        """Encode a layer, and answer its queries from what comes back."""
        layer, blocks = self._place(module), self.blocks
        if layer is None or self._hands_out(module):
            return super().attend(module, query, key, value, mask, scale, **kwargs)
        blocks.take_queries(layer, query)
        keys, values = (x.unflatten(-1, (key.shape[1], -1)).transpose(1, 2) for x in self._encode(layer))
        decoded = self.decoded(blocks.layers[layer].encoded)
        self._count(query, keys, keys.shape[2], decoded, mask, scale, softmax=Softmax.of(kwargs))
        out = packed.dense(module, query, keys, values, mask, scale, **kwargs)[0]
        blocks.finish(layer)
        return out, None

    def _handed_out(self, layer: int, k_BTC: Tensor, v_BTC: Tensor) -> Pair:
        """Take in and encode a layer that does not leave it to `attend`, and give back what came of it."""
        self.blocks.take(layer, k_BTC, v_BTC)
        found = self._encode(layer)
        self._encoded[layer] = self.blocks.layers[layer].encoded
        self.blocks.finish(layer)
        return found

    def _encode(self, layer: int) -> Pair:
        """Encode what is due, and give back all keys and values, [B, T, C] each."""
        if self.blocks.policies.may_encode(layer):
            self.blocks.encoder.flush(layer)
        return self.blocks.decoder.whole(layer)


class WitnessCache(KVQCache):
    """A KVQCache in use, with any attention, whose rows may be padded on either side: did an answer depend on codes?

    A pass into an empty cache reads its own exact keys and values, and is not noted.

    passes   for each pass but the first, of each row, int64 [B or 1]: pairs of a token of the pass and one that it
             reads; and of these the pairs whose second is no exact token: decoded, or evicted. Where layers have
             encoded differently many, what the layer with the fewest has
    """

    def __init__(self, recipe, model: PreTrainedModel, tensors: Mapping[str, Tensor] | None = None):
        super().__init__(recipe, model, tensors)
        self.blocks.decoder.keep = True
        self.passes: list[tuple[Tensor, Tensor]] = []

    def _announce(self, positions_BT, cos_sin, rotary, attention: str | None) -> None:
        if not self._announced and positions_BT is not None and self.blocks.layers and self.blocks.length:
            self._note(positions_BT.shape[-1], positions_BT.device)
        super()._announce(positions_BT, cos_sin, rotary, attention)

    def _note(self, count: int, device: torch.device) -> None:
        """Note a pass of `count` tokens, none of which has been stored yet."""
        places = self.blocks.positions
        encoded, sinks = min(store.encoded for store in self.blocks.layers.values()), self.blocks.recipe.window.sinks
        real_BT = places.real_BT
        if real_BT is None:
            real_BT = torch.ones(1, places.length, dtype=torch.bool, device=device)
        real = real_tokens(self._mask, count)
        new_B = torch.tensor([count], device=device) if real is None else real.sum(1)
        coded_B = (real_BT[:, :encoded].sum(1) - sinks).clamp(min=0) + places.dropped
        read_B = new_B * (real_BT.sum(1) + places.dropped) + new_B * (new_B + 1) // 2
        self.passes.append((read_B, new_B * coded_B))

    def shares(self, rows: int, passes: Sequence[int] | None = None) -> list[float]:
        """Return, for each row, the share of its reads, 0 to 1, of tokens no longer exact; 0 if it read nothing.

        passes   how many of the noted passes, the first ones, count for each row; None: all
        """
        found = []
        for row in range(rows):
            noted = self.passes if passes is None else self.passes[: passes[row]]
            read, coded = (sum(int(_of_row(one[place], row)) for one in noted) for place in (0, 1))
            found.append(coded / read if read else 0.0)
        return found

    def by_pass(self, rows: int) -> list[list[float]]:
        """The same for each row and noted pass."""
        return [[float(_of_row(coded, row) / _of_row(read, row)) for read, coded in self.passes] for row in range(rows)]


def _of_row(counts_B: Tensor, row: int) -> Tensor:
    return counts_B[row if len(counts_B) > 1 else 0]


def refusal(recipe: Recipe) -> str | None:
    """Return the reason why a recipe has no full encode, or None."""
    for policy in recipe.policies:
        if not policy.fits_prompt:
            return f"it chooses {_CHOICES.get(policy.slot, 'among tokens')}, so that no full encode is its own"
    return None


def encodes(recipe: Recipe, length: int) -> bool:
    """True if anything of a window can be encoded: in a full encode or, for a recipe that has none, in use."""
    window = recipe.window
    if refusal(recipe) is not None:
        return length > window.recent + window.block
    return length // window.block * window.block > window.sinks


def nothing(recipe: Recipe, length: int, full: bool = False) -> str:
    """The sentence for texts in which nothing was encoded that was read afterwards, in use or in a full encode."""
    window = recipe.window
    exact = 0 if full else window.recent
    return (f"nothing was encoded: texts of {length} tokens are shorter than {exact} recent tokens and a block of "
            f"{window.block}, or all sinks; use longer ones")  # fmt: skip


def fit_tokens(recipe: Recipe, length: int) -> int | None:
    """Return how many first tokens of a window a recipe is fitted to, if it is fitted to its prompt; else None."""
    online: Any = recipe.policy("online")
    if online is None:
        return None
    half = max(1, length // 2)
    return half if online.fit_tokens == "prompt" else min(half, online.fit_tokens)


def encoding_all(recipe: Recipe, length: int) -> Recipe:
    """The recipe without a recent window, and fitted to a part of the window if it is fitted to its prompt.

    Raises ValueError for one that has no full encode.
    """
    reason = refusal(recipe)
    if reason is not None:
        raise ValueError(f"{recipe.name}: {reason}")
    fitted = fit_tokens(recipe, length)
    policies = tuple(replace(one, fit_tokens=fitted) if one.slot == "online" else one for one in recipe.policies)
    return replace(recipe.with_exact(recent=0), policies=policies)


_at_work: ContextVar[Any] = ContextVar("the cache of the forward pass")


@contextmanager
def attending(model: PreTrainedModel, cache: Cache) -> Iterator[None]:
    """Give the model our attention for the length of a forward pass, if the cache's recipe needs it, or counts."""
    name = cache.attention if isinstance(cache, KVQCache) else None
    name = NAME if isinstance(cache, CountedCache) else name
    if name is None:
        yield
        return
    before, token = model.config._attn_implementation or "eager", _at_work.set(cache)
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(before)
        _at_work.reset(token)


@contextmanager
def answering(cache: CountedCache, attention: Mapping[int, Any], calls: Mapping[str, Any], rotary: Any, first: bool):
    """Have a cache answer some layers of a model that runs one layer at a time, of which it holds one.

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
        cache._end()
    finally:
        for n, module in attention.items():
            module.config._attn_implementation = before[n]
        _at_work.reset(token)


def _attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _at_work.get().attend(module, query, key, value, attention_mask, scale, **kwargs)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
