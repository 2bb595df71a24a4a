"""Announce each forward pass of a model to its cache, by two hooks: real tokens, their positions, the attention in use.

A model is pickled and copied with its hooks: a function of this module, and an object that goes with the model.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from kvq_runtime.cache import BlockCache
from kvq_runtime.hf.attention import Pass
from kvq_runtime.hf.model import cache_in, decoder_of, looks_ahead, numbered, real_tokens, rotary_module, rotary_of
from kvq_runtime.recipe import OURS, attends

Mask = Tensor | Mapping[str, Tensor | None] | None


class HookedCache:
    """A cache that hooks call: `_begin` before the decoder, `_announce` before the first layer that the cache holds."""

    blocks: BlockCache
    _pass: Pass
    _mask: Mask = None
    _announced = True
    _warned = False

    def _begin(self, attention_mask: Mask) -> None:
        """Start a forward pass: keep the padding mask for `_announce`."""
        self._mask, self._announced, self._pass.begun = attention_mask, False, True

    def _announce(
        self,
        positions_BT: Tensor | None,
        cos_sin: tuple[Tensor, Tensor] | None,
        rotary: nn.Module | None,
        attention: str | None,
    ) -> None:
        """Announce to the blocks which tokens are real, their positions and the attention; once per forward pass."""
        if self._announced:
            return
        mask, self._mask, self._announced = self._mask, None, True
        positions, turned = self.blocks.positions, "positions" in self.blocks.recipe.needs
        self._pass.announced = attention == "kvq"
        if attention != "kvq":
            self._check_other(attention)
        if cos_sin is not None and positions_BT is None:  # a model of images may number text in a row, as its cos shows
            positions_BT = numbered(mask, self.blocks.length, cos_sin[0])
        if positions_BT is None:
            return positions.announce(None, None, None, True, turned)
        count, real, alone = positions_BT.shape[-1], None, True
        if mask is not None:
            real = real_tokens(mask, count)
            if isinstance(mask, Mapping):
                alone = not looks_ahead(mask, count)
            elif real is not None:
                alone = positions.agrees(mask, count)
        rotation = rotary_of(rotary, cos_sin, positions_BT) if turned and cos_sin is not None else None
        positions.announce(real, positions_BT, rotation, alone, turned)

    def _check_other(self, attention: str | None) -> None:
        """Refuse other attention than ours where the recipe needs ours; warn once where it would read less under it."""
        recipe = self.blocks.recipe
        if needed := recipe.needs & OURS:
            raise RuntimeError(
                f"{recipe.name} needs {' and '.join(sorted(needed))}, which {attention} attention does not hand out; "
                'call model.set_attn_implementation("kvq")'
            )
        if attends(recipe) and not self._warned:
            self._warned = True
            warnings.warn(
                f"{recipe.name} chooses what it reads by the queries, which {attention} attention does not hand out: "
                'all tokens are read; call model.set_attn_implementation("kvq")',
                stacklevel=2,
            )


def hook(model: PreTrainedModel, first: nn.Module) -> None:
    """Put the hooks on a model, once: on its decoder, and on the attention of the first layer that a cache holds."""
    decoder = decoder_of(model)
    if begin not in decoder._forward_pre_hooks.values():
        decoder.register_forward_pre_hook(begin, with_kwargs=True)
        first.register_forward_pre_hook(Announce(decoder), with_kwargs=True)


def unhook(model: nn.Module) -> None:
    """Take the hooks off a model."""
    for module in model.modules():
        hooks = module._forward_pre_hooks
        for key in [key for key, found in hooks.items() if found is begin or isinstance(found, Announce)]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def begin(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Announce the decoder's start to the cache.

    A step without padding needs no mask: to find that out waits for the device once, to read the mask thrice.
    """
    cache = cache_in(kwargs)
    if not isinstance(cache, HookedCache):
        return None
    if cache.blocks.length:
        _check_new_tokens(cache.blocks.length, args, kwargs)
    mask, positions_BT = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if (
        isinstance(mask, Tensor)
        and mask.ndim == 2
        and positions_BT is not None
        and positions_BT.shape[-1] == 1
        and cache.blocks.positions.real_BT is None
        and module.config._attn_implementation == "kvq"
        and bool(mask.all())
    ):
        kwargs["attention_mask"] = mask = None
    cache._begin(mask)
    return args, kwargs


def _check_new_tokens(length: int, args: tuple, kwargs: dict[str, Any]) -> None:
    """Refuse a pass of no token, as of a prompt that the cache holds whole, and one of all tokens again."""
    given = args[0] if args else kwargs.get("input_ids")
    given = kwargs.get("inputs_embeds") if given is None else given
    if not isinstance(given, Tensor) or given.ndim < 2:
        return
    if kwargs.get("use_cache") is False and given.shape[1] > length:
        raise ValueError(
            f"the cache holds {length:,} tokens, and use_cache=False would have it take in the whole text again at "
            "every step; pass use_cache=True to generate()"
        )
    if not given.shape[1]:
        raise ValueError(
            f"the cache holds {length:,} tokens, and the prompt has none beyond them: reset() the cache for another "
            "text, or pass all of the text that it holds, and more"
        )


class Announce:
    """Announce to the cache the arguments of the first attention module."""

    def __init__(self, decoder: nn.Module):
        self.decoder = decoder

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        cache = cache_in(kwargs)
        if not isinstance(cache, HookedCache):
            return
        positions, cos_sin = kwargs.get("position_ids"), kwargs.get("position_embeddings")
        if positions is not None and positions.ndim == 3:  # of time, height and width, which text has the same
            positions = positions[0]
        hidden = kwargs.get("hidden_states")
        if positions is None and cos_sin is None and hidden is not None:  # of a model without RoPE
            positions = numbered(cache._mask, cache.blocks.length, hidden)
        config: Any = getattr(module, "config", self.decoder.config)
        cos_sin = cos_sin if isinstance(cos_sin, tuple) else None
        cache._announce(positions, cos_sin, rotary_module(self.decoder), config._attn_implementation)
