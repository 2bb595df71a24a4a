"""Announce each forward pass of a model to its cache, by a hook on its decoder: real tokens, positions, attention.

The hook is a function of this module, so that a model is pickled and copied with it.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvq_runtime.cache import BlockCache
from kvq_runtime.hf.attention import Pass
from kvq_runtime.hf.model import cache_in, decoder_of, real_tokens, rotary_module, rotary_of
from kvq_runtime.ops.dispatch import runs_kernel
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.recipe import OURS, attends

Mask = Tensor | Mapping[str, Tensor | None] | None


class HookedCache:
    """A cache that the hook calls before the decoder runs: `_begin`, then `_announce`."""

    blocks: BlockCache
    _pass: Pass
    _warned = False

    def _begin(self) -> None:
        """Start a forward pass."""

    def _announce(self, mask: Mask, positions_BT: Tensor | None, rotary: Rotary | None, attention: str | None) -> None:
        """Announce to the blocks which tokens are real, their positions and rotation, and the attention in use."""
        if attention != "kvq":
            self._check_other(attention)
        positions, real, alone = self.blocks.positions, None, True
        if mask is not None and positions_BT is not None:
            count = positions_BT.shape[-1]
            real = real_tokens(mask, count)
            if isinstance(mask, Mapping):
                alone = count == 1  # of several, those of an image may see later ones
            elif real is not None:
                alone = positions.agrees(mask, count)
        if rotary is None and positions_BT is not None and positions_BT.shape[-1] == 1 and runs_kernel(positions_BT):
            positions_BT = None  # to compare them would wait for a GPU at each step
        positions.announce(real, positions_BT, rotary, alone)
        self._pass.announced = attention == "kvq"

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


def hook(model: PreTrainedModel) -> None:
    """Put the hook on a model's decoder, once."""
    decoder = decoder_of(model)
    if begin not in decoder._forward_pre_hooks.values():
        decoder.register_forward_pre_hook(begin, with_kwargs=True)


def begin(decoder: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Announce the decoder's next pass to the cache among its arguments; refuse one of no token, or of all again.

    A step without padding needs no mask: to find that out waits for the device once, to read the mask thrice.
    """
    cache = cache_in(kwargs)
    if not isinstance(cache, HookedCache):
        return None
    tokens = args[0] if args else kwargs.get("input_ids")
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    count = tokens.shape[1] if isinstance(tokens, Tensor) and tokens.ndim > 1 else None
    length = cache.blocks.length
    if length and count is not None and count > length and kwargs.get("use_cache") is False:
        raise ValueError(
            f"the cache holds {length:,} tokens, and use_cache=False would have it take in the whole text again at "
            "every step; pass use_cache=True to generate()"
        )
    if length and count == 0:
        raise ValueError(
            f"the cache holds {length:,} tokens, and the prompt has none beyond them: reset() the cache "
            "for another text, or pass all of the text that it holds, and more"
        )
    cache._begin()
    attention, mask = decoder.config._attn_implementation, kwargs.get("attention_mask")
    if (
        isinstance(mask, Tensor)
        and mask.ndim == 2
        and count == 1
        and cache.blocks.positions.real_BT is None
        and attention == "kvq"
        and bool(mask.all())
    ):
        kwargs["attention_mask"] = mask = None
    positions_BT, turned = kwargs.get("position_ids"), "positions" in cache.blocks.recipe.needs
    if positions_BT is None and tokens is not None and count is not None:  # decoders number them so
        positions_BT = torch.arange(length, length + count, device=tokens.device)[None]
    elif positions_BT is not None and positions_BT.ndim == 3:
        positions_BT = _positions_of_text(positions_BT, turned)
    rotary = rotary_of(rotary_module(decoder), decoder.dtype) if turned else None
    cache._announce(mask, positions_BT, rotary, attention)
    return args, kwargs


def _positions_of_text(positions_ABT: Tensor, turned: bool) -> Tensor:
    """Take the first of several axes, such as time, height and width; text has the same number on each."""
    if turned and not bool((positions_ABT == positions_ABT[0]).all()):
        raise RuntimeError(
            "tokens of an image have a position on each of several axes, by which kvq does not undo RoPE; use a "
            "post-RoPE recipe without a mean"
        )
    return positions_ABT[0]
