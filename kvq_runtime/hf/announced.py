"""Have a model tell its cache, before each forward pass, which tokens are real, where they stand, and who attends.

A model is pickled and copied with its hooks: they are a function of this module, and an object that goes with it.
"""

import inspect
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from kvq_runtime.cache import BlockCache
from kvq_runtime.hf.attention import EAGER, Pass
from kvq_runtime.hf.model import cache_in, decoder_of, looks_ahead, numbered, real_tokens, rotary_module, rotary_of
from kvq_runtime.ops.rope import COMPRESSED
from kvq_runtime.recipe import OURS, attends

DECODING = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
UNKNOWN = "kvq attention does not know entries that a model puts beside keys and values"
_told: set[str] = set()  # recipes of which the log has said that other attention than ours is slow
_log = logging.getLogger(__name__)


class Announced:
    """A cache that is told of a forward pass: by `_begin` before the decoder, by `_announce` before its first layer.

    _decodes   the reason why the model's own attention reads decoded history at every step; None: it need not
    _open      whether a pass has begun, and has not been told to have ended
    _pooled    whether layers hold entries, which are real and stand in a row, whatever tokens they are made of
    """

    blocks: BlockCache
    get_seq_length: Callable[..., int]
    _pass: Pass
    _decodes: str | None
    _mask: Tensor | Mapping[str, Tensor | None] | None = None
    _announced = True
    _open = False
    _pooled = False
    _warned = False

    def _begin(self, attention_mask: Tensor | Mapping[str, Tensor | None] | None) -> None:
        """Start a forward pass: keep the padding mask for `_announce`."""
        self._mask, self._announced, self._open = attention_mask, False, True

    def _end(self) -> None:
        """End it. This is told of models with recurrent layers alone."""
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
        cos_sin: Any,  # a pair; of a model that pools tokens, such a pair by type
        rotary: nn.Module | None,
        attention: str | None,
    ) -> None:
        """Announce to the cache which tokens are real, their positions and the attention; once per forward pass."""
        if self._announced:
            return
        self._announced = True
        if self._pooled and positions_BT is not None:  # entries are real, and numbered in a row
            turning = rotary_of(rotary, cos_sin[COMPRESSED], positions_BT[:, -1:])
            return self.blocks.positions.announce(None, None, turning)
        needed = self.blocks.recipe.needs & OURS
        if needed and attention != "kvq":
            raise RuntimeError(
                f"{self.blocks.recipe.name} needs {' and '.join(sorted(needed))}, which {attention} attention does "
                'not hand out; call model.set_attn_implementation("kvq")'
            )
        if attends(self.blocks.recipe) and attention != "kvq" and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.blocks.recipe.name} chooses what it reads by the queries, which {attention} attention does not "
                'hand out: all tokens are read; call model.set_attn_implementation("kvq")',
                stacklevel=2,
            )
        name = self.blocks.recipe.name
        step = positions_BT is not None and positions_BT.shape[-1] == 1  # and no text that is read whole
        again = step and attention in DECODING and not (self.blocks.decoder.keep or self._decodes)
        if again and name not in _told and any(one.encoded for one in self.blocks.layers.values()):
            _told.add(name)
            _log.warning(
                "%s under %s attention: every step decodes the whole history; steps are faster after "
                'model.set_attn_implementation("kvq")', name, attention,
            )  # fmt: skip
        self._pass.announced = attention == "kvq"
        mask, self._mask = self._mask, None
        turning, turned = None, "positions" in self.blocks.recipe.needs
        if cos_sin is not None and positions_BT is None:  # a model of images may number text in a row, as its cos shows
            positions_BT = numbered(mask, self.blocks.length, cos_sin[0])
        real = None if positions_BT is None else real_tokens(mask, positions_BT.shape[-1])
        if turned and cos_sin is not None and positions_BT is not None:
            turning = rotary_of(rotary, cos_sin, positions_BT)
        ahead = isinstance(mask, Mapping) and positions_BT is not None and looks_ahead(mask, positions_BT.shape[-1])
        told: Tensor | bool = not ahead
        if real is not None and isinstance(mask, Tensor):
            told = self.blocks.positions.agrees(mask, real.shape[1])
        self.blocks.positions.announce(real, positions_BT, turning, told, turned)


def hook(model: PreTrainedModel, first: nn.Module) -> None:
    """Put the pre-hooks on a model, once: on its decoder, and on the attention of the first layer a cache holds."""
    decoder = decoder_of(model)
    if begin not in decoder._forward_pre_hooks.values():
        decoder.register_forward_pre_hook(begin, with_kwargs=True)
        first.register_forward_pre_hook(_Announce(decoder), with_kwargs=True)


def hook_end(model: PreTrainedModel) -> None:
    """Have a model's decoder tell a cache the end of a pass, too: nothing else does that goes through all layers."""
    decoder = decoder_of(model)
    if end not in decoder._forward_hooks.values():
        decoder.register_forward_hook(end, with_kwargs=True)


def unhook(model: nn.Module) -> None:
    """Take the hooks off a model."""
    for module in model.modules():
        for key in [key for key, one in module._forward_hooks.items() if one is end]:
            del module._forward_hooks[key]
            module._forward_hooks_with_kwargs.pop(key, None)
        hooks = module._forward_pre_hooks
        for key in [key for key, one in hooks.items() if one is begin or isinstance(one, _Announce)]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def begin(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Announce the decoder's start to the cache: a step without padding needs no mask."""
    cache = cache_in(kwargs)
    if isinstance(cache, Announced):
        _check_given(cache.get_seq_length(), args, kwargs)
        ours = module.config._attn_implementation == "kvq"
        if ours and cache._pooled:
            raise ValueError(f"{UNKNOWN}; {EAGER}")
        if ours and cache._is_whole(kwargs):
            kwargs["attention_mask"] = None
        cache._begin(None if cache._pooled else kwargs.get("attention_mask"))
        return args, kwargs
    return None


def end(_module: Any, _args: tuple, kwargs: dict[str, Any], _out: Any) -> None:
    """Announce to the cache that all layers have taken in the pass: of one that fails this is not called."""
    cache = cache_in(kwargs)
    if isinstance(cache, Announced):
        cache._end()


def _check_given(length: int, args: tuple, kwargs: dict[str, Any]) -> None:
    """Refuse a pass of no token: `generate` leaves out of a prompt as many as the cache holds; and one of all tokens
    again, as under use_cache=False, which MPT's configuration has."""
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


class _Announce:
    """Announce to the cache the arguments of the first attention module."""

    def __init__(self, decoder: nn.Module):
        self.decoder = decoder

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        cache = cache_in(kwargs)
        if isinstance(cache, Announced):
            config: Any = getattr(module, "config", self.decoder.config)
            if args:  # Qwen 4 gives its layers' attention some by place
                named = inspect.signature(type(module).forward).parameters
                kwargs = dict(zip(named, (module, *args), strict=False)) | kwargs
            positions = kwargs.get("position_ids")
            if positions is not None and positions.ndim == 3:  # of time, height and width, which text has the same
                positions = positions[0]
            turned, rotary = kwargs.get("position_embeddings"), rotary_module(self.decoder)
            hidden = kwargs.get("hidden_states")
            if positions is None and turned is None and hidden is not None:  # of a model without RoPE (BLOOM)
                positions = numbered(cache._mask, cache.blocks.length, hidden)
            cos_sin = (turned.real, turned.imag) if isinstance(turned, Tensor) else turned  # cos + i sin (Llama 4)
            if cos_sin is not None and not cache._pooled and hidden is not None:
                cos, sin = (part[..., -hidden.shape[1] :, :] for part in cos_sin)  # those before are an indexer's
                cos_sin = cos, sin
            cache._announce(positions, cos_sin, rotary, config._attn_implementation)
