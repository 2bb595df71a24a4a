"""Serve the compressed cache of a whole model to transformers, and have the model tell it what it needs."""

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionCacheLayerMixin

from kvq_runtime.artifact import fingerprint, recipe_text
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.cache import BlockCache
from kvq_runtime.geometry import attending
from kvq_runtime.hf.attention import KVQLayer, LatentLayer, Pass
from kvq_runtime.hf.model import (
    LISTED,
    attention_modules,
    check_model,
    check_rope,
    fingerprint_of,
    geometry_of,
    looks_ahead,
    numbered,
    real_tokens,
    rotary_module,
    rotary_of,
)
from kvq_runtime.recipe import OURS, Recipe, attends
from kvq_runtime.registry.resolve import load_artifact
from kvq_runtime.store.memory import MemoryReport, human
from kvq_runtime.store.promise import Check, Health
from kvq_runtime.store.storage import storage_bytes

HELD = ("keys", "values", "conv_states", "recurrent_states")  # by transformers' own layers
DECODING = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")
_told: set[str] = set()  # recipes of which the log has said that other attention than ours is slow
_log = logging.getLogger(__name__)


class KVQCache(Cache):
    """A transformers cache that holds packed codes: one batch of sequences, of one model.

        cache = KVQCache.from_pretrained("qwen2.5-7b-aqua-2bit@1.2.0", model=model)
        out = model.generate(**inputs, past_key_values=cache)
        print(cache.memory_report())

    Make one with `from_pretrained`, `from_recipe` or `from_artifact`; `reset` it for the next request, or make another.
    Importing the class registers "kvq" for `attn_implementation` and `model.set_attn_implementation`. Layers that do
    not attend to all tokens (sliding windows) are held by transformers' own 16-bit layers; the others are numbered from
    0 on, in recipes too, and a prediction is from the next of them below. Raises ValueError for a
    recipe that the model's shape or RoPE does not allow, and for a model that kvq does not take (docs/models.md),
    TypeError for what is no recipe or no model, and RuntimeError if a forward pass lacks what the recipe needs; a pass
    that fails is undone.

    Exact tokens are in the dtype of the model's values: under autocast, in autocast's. A cache can be copied and
    pickled between two forward passes, and goes on as the original would, with the same model or a copy of it.

    Making one puts two forward pre-hooks on the model, once, which do nothing unless a KVQCache is passed; the model
    can be pickled and copied with them. `KVQCache.unhook(model)` takes them off.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: PreTrainedModel,
        tensors: Mapping[str, Tensor] | None = None,
        check: Check | None = None,
    ):
        """Make an empty cache; `from_pretrained`, `from_recipe` and `from_artifact` are what one usually calls.

        recipe    a Recipe, such as `preset("higgs-2bit")`
        model     the loaded model that the cache is for
        tensors   of an artifact, by name, if the recipe is fitted
        check     what is asked of blocks, as the errors of which are measured; None: they are not
        """
        if not isinstance(recipe, Recipe):
            raise TypeError(f"recipe is of type {type(recipe).__name__}; give a Recipe, or its name to from_recipe")
        check_model(model)
        config = model.config.get_text_config(decoder=True)
        geometry, held = geometry_of(model), attending(config.to_dict())
        stock = DynamicCache(config=config).layers
        if [n for n, layer in enumerate(stock) if type(layer) is DynamicLayer] != list(held):
            raise ValueError(
                f"transformers gives layers of {type(model).__name__} other caches than its layer_types say; {LISTED}"
            )
        made_for = getattr(config, "max_position_embeddings", None)
        self.blocks = BlockCache(recipe, geometry, tensors, None, made_for or 1 << 17, model.dtype, made_for, check)
        self.places = {layer: place for place, layer in enumerate(held)}
        modules = attention_modules(model, held)
        if "positions" in recipe.needs:
            check_rope(model, modules, recipe.name)
        self._pass, self._decodes = Pass(), _decoding(config, type(model).__name__)
        if self._decodes and attends(recipe):
            raise ValueError(
                f"{recipe.name} needs queries or weights of attention, and {self._decodes}; use a recipe that holds "
                "and reads all tokens, and needs no queries"
            )
        latent, shared = getattr(config, "kv_lora_rank", None), getattr(config, "num_kv_shared_layers", None)
        kind = LatentLayer if latent else KVQLayer
        layers = [
            kind(self.blocks, self.places[n], self._pass, bool(latent or (shared and n == held[-1])))
            if n in self.places else layer
            for n, layer in enumerate(stock)
        ]  # fmt: skip
        super().__init__(layers=layers)  # type: ignore[arg-type]
        self._stock = [layer for layer in layers if isinstance(layer, DynamicLayer)]
        self._recurrent = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
        self.artifact: Artifact | None = None  # which the cache was made of
        self._mask: Tensor | Mapping[str, Tensor | None] | None = None
        self._announced = True
        self._warned = False
        _hook(model, modules[0])

    @classmethod
    def from_recipe(cls, recipe: str | Recipe, model: PreTrainedModel, health: bool = False) -> "KVQCache":
        """Make a cache for a recipe that needs no calibration, by name, which may have settings, or as a Recipe.

            cache = KVQCache.from_recipe("kivi-2bit+window.recent=32", model=model)

        health   measure the errors of blocks, which costs a decoding of each; nothing is promised of them

        Raises ValueError for an unknown name, a recipe that has to be fitted, or one that this model does not allow.
        """
        check = Check() if health else None
        return cls(recipe_text.read(recipe) if isinstance(recipe, str) else recipe, model, check=check)

    @classmethod
    def from_pretrained(
        cls,
        reference: str | Path,
        model: PreTrainedModel,
        registry: str | Path | None = None,
        lock: str | Path | None = None,
        allow_other_weights: bool = False,
        *,
        strict: bool = False,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
    ) -> "KVQCache":
        """Make a cache from an artifact: a folder, "org/name" of a Hub, or "name", "name@1.2.0", "name@production".

        registry             a folder, "file:///folder" or "hf://org"; None: $KVQ_REGISTRY, else $KVQ_HOME/registry
        lock                 a lock file that pins version and sha256
        allow_other_weights  load an artifact that was calibrated on other weights of the same shape
        strict               raise a RuntimeError for a block whose error is beyond what calibration promised
        revision             a version, its tag, an alias, or a commit of a Hub: what may stand after @
        cache_dir            where files of a Hub are kept; None: where huggingface_hub keeps them
        token                of a Hub; None: that of huggingface_hub
        local_files_only     make no request: use what the cache has
        All but the third are as for `load_artifact`, which says what each may be. Caches of one artifact share its
        tensors, however many there are: keep one, or what `load_artifact` returns, and the next reads no file.
        Raises ArtifactError if the file differs from the registry's record or the lock, or belongs to another model.
        """
        artifact = load_artifact(
            reference, registry, lock, revision=revision, cache_dir=cache_dir, token=token,
            local_files_only=local_files_only,
        )  # fmt: skip
        return cls.from_artifact(artifact, model, allow_other_weights, strict)

    @classmethod
    def from_artifact(
        cls, artifact: Artifact, model: PreTrainedModel, allow_other_weights: bool = False, strict: bool = False
    ) -> "KVQCache":
        """Make a cache from a loaded artifact. Raises ArtifactError if its fingerprint is that of another model.

        allow_other_weights  accept another model's weights, of the same shape and RoPE
        strict               as for `from_pretrained`; ValueError for an artifact that promises nothing
        """
        if not isinstance(artifact, Artifact):
            raise TypeError(
                f"artifact is of type {type(artifact).__name__}; give what load_artifact returns, or its name to "
                "from_pretrained"
            )
        fingerprint.check_match(artifact.fingerprint, fingerprint_of(model), allow_other_weights=allow_other_weights)
        check = Check.of(artifact.fit, artifact.recipe.name, strict)
        cache = cls(artifact.recipe, model, artifact.tensors, check if check.promises else None)
        cache.artifact = artifact
        return cache

    def __repr__(self) -> str:
        report = self.memory_report()
        if not report.tokens:
            return f"KVQCache({report.recipe}, empty)"
        held = f"{report.batch} x {report.tokens:,} tokens, {human(report.total_bytes)}"
        return f"KVQCache({report.recipe}, {held}; 16 bit: {human(report.exact_bytes)})"

    @property
    def attention(self) -> str | None:
        """The attention for `model.set_attn_implementation` that the recipe needs: "kvq"; None if any will do."""
        return "kvq" if attends(self.blocks.recipe) else None

    @property
    def refusal(self) -> str | None:
        """The reason why, on a GPU under "kvq" attention, some layer's history is decoded at every step; or None.

        None: packed codes of all layers are attended to directly.
        """
        return self._decodes or self.blocks.refusal

    def memory_report(self) -> MemoryReport:
        """Bytes held, by kind, and what 16 bits would hold; `print` it, or read its fields.

        Layers that transformers' own classes hold are counted, the state of recurrent ones among them.
        """
        own = [layer for layer in self.layers if not isinstance(layer, KVQLayer)]
        found = [getattr(layer, name, None) for layer in own for name in HELD]
        parts = [part for one in found for part in (one.values() if isinstance(one, dict) else [one])]
        return self.blocks.memory_report().with_sliding(storage_bytes(x for x in parts if isinstance(x, Tensor)))

    def health(self) -> Health:
        """The health of the blocks that are held, by what calibration promised; `print` it, or read its fields.

        An artifact promises something, unless it is older than promises. A recipe without one promises nothing, and is
        measured where `from_recipe` was asked for `health`. `prometheus()` is its text.
        """
        return self.blocks.health()

    def _begin(self, attention_mask: Tensor | Mapping[str, Tensor | None] | None) -> None:
        """Start a forward pass: undo one that stopped midway, and keep the padding mask for `_announce`.

        Raises RuntimeError where that cannot be undone: of layers with a recurrent state.
        """
        if self._recurrent and (self.blocks.step is not None or not self._announced):
            raise RuntimeError(
                "a forward pass stopped midway, and has changed the state of recurrent layers, which cannot be had "
                "back: reset() the cache, and begin again with the whole text"
            )
        self.blocks.settle()
        if self._stock:
            shortest = min([self.blocks.length, *(layer.get_seq_length() for layer in self._stock)])
            if self.blocks.length > shortest:
                self.blocks.crop(shortest)
            for layer in self._stock:
                if layer.get_seq_length() > shortest:
                    layer.crop(shortest - layer.get_seq_length()) if shortest else _empty(layer)
        self._mask, self._announced = attention_mask, False

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
        needed = self.blocks.recipe.needs & OURS
        if needed and attention != "kvq":
            raise RuntimeError(
                f"{self.blocks.recipe.name} needs {' and '.join(sorted(needed))}, which {attention} attention does "
                'not hand out; call model.set_attn_implementation("kvq")'
            )
        if self.attention not in (None, attention) and not self._warned:
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
        self.blocks.positions.announce(real, positions_BT if turned else None, turning, not ahead)

    def reset(self) -> None:
        """Forget every token; the cache can be used again."""
        self._announced = True
        self.blocks.reset()
        self._each("reset")

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest tokens of every row; the number is negative, as transformers passes it.

        Raises ValueError for a positive number, RuntimeError where tokens that would be needed have been evicted (H2O),
        or layers have a recurrent state.
        """
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 passes a tensor
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}); pass the tokens to drop as a negative number")
        self._whole("crop", tokens_to_remove)
        if tokens_to_remove < 0 and self.blocks.layers:
            self.blocks.crop(max(0, self.blocks.length + tokens_to_remove))
        self._each("crop", tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows in this order, int64 [rows]; rows may be repeated or left out (beam search)."""
        self.blocks.reorder(beam_idx)
        self._each("reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, copies side by side."""
        self._whole("batch_repeat_interleave", repeats)
        if self.blocks.layers:
            rows = torch.arange(self.blocks.rows)
            self.blocks.reorder(rows.repeat_interleave(repeats))
        self._each("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, int64, in this order."""
        self._whole("batch_select_indices", indices.tolist())
        self.blocks.reorder(indices)
        self._each("batch_select_indices", indices)

    @staticmethod
    def unhook(model: PreTrainedModel) -> None:
        """Take kvq's hooks off a model, as if no cache had been made of it; the next cache puts them on again.

        Caches of this model that are still in use get no padding and positions any more.
        """
        for module in model.modules():
            hooks = module._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if hook is _begin or isinstance(hook, _Announce)]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)

    def _whole(self, method: str, given: Any) -> None:
        """Refuse what transformers' recurrent layers do not do."""
        if self._recurrent and given:
            raise RuntimeError(
                f"{method}({given}): this model has recurrent layers, whose state cannot be taken apart; reset() the "
                "cache, and begin again"
            )

    def _each(self, method: str, *args) -> None:
        """Call transformers' own layers (such as sliding windows), which keep their own tensors."""
        for layer in self.layers:
            filled = getattr(layer, "is_initialized", False)
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                filled = method in ("reset", "reorder_cache")  # `_whole` has refused the others
            if not filled or isinstance(layer, KVQLayer):
                continue
            if method == "reset" and isinstance(layer, DynamicLayer):
                _empty(layer)
            else:
                getattr(layer, method)(*args)


def _decoding(config: Any, name: str) -> str | None:
    """The reason why a model's own attention reads a layer's decoded history at every step; None: it need not."""
    if getattr(config, "kv_lora_rank", None):
        return f"{name} makes keys and values of decoded latents by itself"
    if getattr(config, "num_kv_shared_layers", None):
        return f"the last layers of {name} read what the last of those that cache has decoded"
    return None


def _empty(layer: DynamicLayer) -> None:
    """Forget every token of one of transformers' own layers, whose `reset` in 5.17 leaves zeros in their place."""
    layer.reset()
    layer.keys = layer.values = None  # the next update makes new ones, of no tokens
    layer.is_initialized = False


def _hook(model: PreTrainedModel, first: nn.Module) -> None:
    """Put the pre-hooks on a model, once: on its decoder, and on the attention of the first layer a cache holds."""
    decoder = model.get_decoder()
    if _begin not in decoder._forward_pre_hooks.values():
        decoder.register_forward_pre_hook(_begin, with_kwargs=True)
        first.register_forward_pre_hook(_Announce(decoder), with_kwargs=True)


# A model is pickled and copied with its hooks: they are a function of this module, and an object that goes with it.


def _begin(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Announce the decoder's start to the cache: a step without padding needs no mask."""
    cache = kwargs.get("past_key_values")
    if isinstance(cache, KVQCache):
        if module.config._attn_implementation == "kvq" and cache._is_whole(kwargs):
            kwargs["attention_mask"] = None
        cache._begin(kwargs.get("attention_mask"))
        return args, kwargs
    return None


class _Announce:
    """Announce to the cache the arguments of the first attention module."""

    def __init__(self, decoder: nn.Module):
        self.decoder = decoder

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("past_key_values")
        if isinstance(cache, KVQCache):
            config: Any = getattr(module, "config", self.decoder.config)
            positions = kwargs.get("position_ids")
            if positions is not None and positions.ndim == 3:  # of time, height and width, which text has the same
                positions = positions[0]
            cos_sin, rotary = kwargs.get("position_embeddings"), rotary_module(self.decoder)
            cache._announce(positions, cos_sin, rotary, config._attn_implementation)
