"""Announce each forward pass of a model to its cache, by hooks: real tokens, their positions, the attention in use.

A model is pickled and copied with its hooks: they are functions of this module, and an object that goes with it.
"""

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from kvq_runtime.cache import BlockCache
from kvq_runtime.hf.attention import Pass
from kvq_runtime.hf.model import cache_in, decoder_of, looks_ahead, numbered, real_tokens, rotary_module, rotary_of
from kvq_runtime.recipe import OURS, attends

DECODING = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
_slow: set[str] = set()  # recipes of which the log has said that other attention than ours is slow
_log = logging.getLogger(__name__)


class Announced:
    """A cache that hears of a forward pass: by `_begin` before the decoder, by `_announce` before its first layer.

    _decodes   the reason why the model's own attention reads decoded history at every step; None: it need not
    _open      whether a pass has begun, and has not been told to have ended
    """

    blocks: BlockCache
    get_seq_length: Callable[..., int]
    _pass: Pass
    _decodes: str | None
    _mask: Tensor | Mapping[str, Tensor | None] | None = None
    _announced = True
    _open = False
    _warned = False

    def _begin(self, attention_mask: Tensor | Mapping[str, Tensor | None] | None) -> None:
        """Start a forward pass: keep the padding mask for `_announce`."""
        self._mask, self._announced, self._open = attention_mask, False, True

    def _end(self) -> None:
        """End it. Only models with recurrent layers announce this."""
        self._open = False

    def _is_whole(self, given: dict[str, Any]) -> bool:
        """True if the decoder gets one token a row, with its position, and no token is padding or ever was.

        This waits for the device once. With the mask, transformers would wait for it once more, and we twice.
        """
        mask, positions_BT = given.get("attention_mask"), given.get("position_ids")
        if not isinstance(mask, Tensor) or positions_BT is None or self.blocks.positions.real_BT is not None:
            return False
        return positions_BT.shape[-1] == 1 and mask.ndim == 2 and bool(mask.all())

    def _announce(
        self,
        positions_BT: Tensor | None,
        cos_sin: tuple[Tensor, Tensor] | None,
        rotary: nn.Module | None,
        attention: str | None,
    ) -> None:
        """Announce to the cache which tokens are real, their positions and the attention; once per forward pass."""
        if self._announced:
            return
        self._announced = True
        self._pass.announced = attention == "kvq"
        if attention != "kvq":
            self._check_other(attention, positions_BT is not None and positions_BT.shape[-1] == 1)
        mask, self._mask = self._mask, None
        if cos_sin is not None and positions_BT is None:  # a model of images may number text in a row, as its cos shows
            positions_BT = numbered(mask, self.blocks.length, cos_sin[0])
        if positions_BT is None:
            return self.blocks.positions.announce(None, None, None, True, self._turned)
        turning = None
        if self._turned and cos_sin is not None:
            turning = rotary_of(rotary, cos_sin, positions_BT)
        if mask is None:
            return self.blocks.positions.announce(None, positions_BT, turning, True, self._turned)
        count = positions_BT.shape[-1]
        real = real_tokens(mask, count)
        alone: Tensor | bool = not (isinstance(mask, Mapping) and looks_ahead(mask, count))
        if real is not None and isinstance(mask, Tensor):
            alone = self.blocks.positions.agrees(mask, count)
        self.blocks.positions.announce(real, positions_BT, turning, alone, self._turned)

    @property
    def _turned(self) -> bool:
        """Whether the recipe undoes RoPE, or needs positions otherwise."""
        return "positions" in self.blocks.recipe.needs

    def _check_other(self, attention: str | None, step: bool) -> None:
        """Refuse other attention than ours where the recipe needs ours; else say once what it costs.

        step   whether the pass is of one token a row
        """
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
        again = step and attention in DECODING and not (self.blocks.decoder.keep or self._decodes)
        if again and recipe.name not in _slow and any(one.encoded for one in self.blocks.layers.values()):
            _slow.add(recipe.name)
            _log.warning(
                "%s under %s attention: every step decodes the whole history; steps are faster after "
                'model.set_attn_implementation("kvq")', recipe.name, attention,
            )  # fmt: skip


def hook(model: PreTrainedModel, first: nn.Module, ends: bool) -> None:
    """Put the hooks on a model, once: on its decoder, and on the attention of the first layer a cache holds.

    ends   whether the decoder announces the end of a pass, too: of models with recurrent layers nothing else does
    """
    decoder = decoder_of(model)
    if begin not in decoder._forward_pre_hooks.values():
        decoder.register_forward_pre_hook(begin, with_kwargs=True)
        first.register_forward_pre_hook(Announce(decoder), with_kwargs=True)
    if ends and end not in decoder._forward_hooks.values():
        decoder.register_forward_hook(end, with_kwargs=True)


def unhook(model: nn.Module) -> None:
    """Take the hooks off a model."""
    for module in model.modules():
        for key in [key for key, one in module._forward_hooks.items() if one is end]:
            del module._forward_hooks[key]
            module._forward_hooks_with_kwargs.pop(key, None)
        hooks = module._forward_pre_hooks
        for key in [key for key, one in hooks.items() if one is begin or isinstance(one, Announce)]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def begin(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Announce the decoder's start to the cache: a step without padding needs no mask."""
    cache = cache_in(kwargs)
    if not isinstance(cache, Announced):
        return None
    _check_given(cache.get_seq_length(), args, kwargs)
    if module.config._attn_implementation == "kvq" and cache._is_whole(kwargs):
        kwargs["attention_mask"] = None
    cache._begin(kwargs.get("attention_mask"))
    return args, kwargs


def end(_module: Any, _args: tuple, kwargs: dict[str, Any], _out: Any) -> None:
    """Announce to the cache that all layers have taken in the pass: of one that fails this is not called."""
    cache = cache_in(kwargs)
    if isinstance(cache, Announced):
        cache._end()


def _check_given(length: int, args: tuple, kwargs: dict[str, Any]) -> None:
    """Refuse a pass of no token: `generate` leaves out of a prompt as many as the cache holds; and one of all tokens
    again, as under use_cache=False."""
    given = next((kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), None)
    given = args[0] if given is None and args else given
    if not length or not isinstance(given, Tensor) or given.ndim < 2:
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
        if not isinstance(cache, Announced):
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
