"""Encode every token but the sinks before anything attends to it: the full encode of a window, in one forward pass.

In each layer the pass's keys and values go into the cache's own store; all whole blocks are encoded there, in the
recipe's block size and position, and packed; every query reads them decoded, its own token among them. So the error of
a layer is in the hidden states of the next, and a recipe that predicts across layers predicts from what was decoded
below. It is what a long context comes to, of which a recent window or an unfinished block is a vanishing part.

A window that is no multiple of the block leaves the rest of its tokens, less than a block, exact; what is decoded is
counted (`reads.py`). A recipe that is fitted to its prompt is fitted to the first half of the window, or to as many
tokens as its setting if they are fewer, and then encodes all of it. A recipe that chooses among tokens has no full
encode: which it holds, reads or keeps exact is what it is about.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from kvq_calib.evaluate.reads import CountedCache
from kvq_runtime.geometry import SLAB
from kvq_runtime.hf.attention import dense
from kvq_runtime.ops.dense import Softmax
from kvq_runtime.recipe import Recipe
from kvq_runtime.store.decode import Pair

_CHOICES = {"window": "how long tokens stay exact", "select": "which tokens are held, or read"}


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


class FullCache(CountedCache):
    """A cache that encodes all of a forward pass's tokens before it is read; for one pass over windows of `length`."""

    def __init__(
        self, recipe: Recipe, model: PreTrainedModel, tensors: Mapping[str, Tensor] | None = None, *, length: int
    ):
        super().__init__(encoding_all(recipe, length), model, tensors)
        self.blocks.encoder.together, self.blocks.decoder.keep = SLAB, False  # a layer is read once
        self.inner = "kvq"  # so that a layer takes keys and values in, and leaves it to `attend` to read them

    def _begin(self, attention_mask: Tensor | None) -> None:
        super()._begin(attention_mask)
        if self.blocks.length:
            raise RuntimeError("a full encode is one forward pass; make a cache for each")

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float,
               **kwargs: Any) -> tuple[Tensor, None]:  # fmt: skip
        """Encode a layer, and answer its queries from what comes back."""
        layer, blocks = self.places.get(module.layer_idx), self.blocks
        if layer is None:
            return super().attend(module, query, key, value, mask, scale, **kwargs)
        blocks.take_queries(layer, query)
        keys, values = (x.unflatten(-1, (key.shape[1], -1)).transpose(1, 2) for x in self._encode(layer))
        decoded = self.decoded(blocks.layers[layer].encoded)
        self._count(query, keys, keys.shape[2], decoded, mask, scale, softmax=Softmax.of(kwargs))
        out = dense(module, query, keys, values, mask, scale, **kwargs)[0]
        blocks.finish(layer)
        return out, None

    def _encode(self, layer: int) -> Pair:
        """Encode what is due, and give back all keys and values, [B, T, C] each."""
        if all([policy.may_encode(layer) for policy in self.blocks.policies]):
            self.blocks.encoder.flush(layer)
        return self.blocks.decoder.whole(layer)
