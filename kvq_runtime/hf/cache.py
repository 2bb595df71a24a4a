"""Serve the compressed cache of a whole model to transformers."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kvq_runtime import families
from kvq_runtime.artifact import fingerprint, recipe_text
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.cache import BlockCache
from kvq_runtime.errors import check_type
from kvq_runtime.families import Family
from kvq_runtime.hf.attention import KVQLayer, Pass
from kvq_runtime.hf.model import (
    Served,
    check_model,
    fingerprint_of,
    hook,
    real_tokens,
)
from kvq_runtime.ops.dispatch import runs_kernel
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.recipe import OURS, Recipe, attends, weighs
from kvq_runtime.store.block_errors import Bounds, bounds_in
from kvq_runtime.store.memory import MemoryReport
from kvq_runtime.store.storage import storage_bytes

HELD = ("keys", "values", "conv_states", "recurrent_states")  # by transformers' own layers
STANDARD = {DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer}  # of caches that ours can stand in for


Mask = Tensor | Mapping[str, Tensor | None] | None


class KVQCache(Cache):
    """A transformers cache that holds packed codes: one batch of sequences, of one model.

        cache = KVQCache.from_pretrained("qwen2.5-7b-aqua-2bit@1.2.0", model=model)
        out = model.generate(**inputs, cache=cache)
        print(cache.memory_report())

    Make one with `from_pretrained`, `from_recipe` or `from_artifact`; `reset` it for the next request, or make another.
    Importing the class registers "kvq" for `attn_implementation` and `model.set_attn_implementation`. Layers that do
    not attend to all tokens (sliding windows) are held by transformers' own 16-bit layers; the others are numbered from
    0 on, in recipes too, and a prediction is from the next of them below. Raises ValueError for a
    recipe that the model's shape or RoPE does not allow, and for a model that kvq does not support (docs/models.md),
    TypeError for an argument of another type, and RuntimeError if a forward pass lacks what the recipe needs; a pass
    that fails is undone.

    Exact tokens are in the dtype of the model's values: under autocast, in autocast's. A cache can be copied and
    pickled between two forward passes, and goes on as the original would, with the same model or a copy of it.

    Making one puts a forward hook on the model, once, which does nothing unless a KVQCache is passed; the model can be
    pickled and copied with it.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: PreTrainedModel,
        tensors: Mapping[str, Tensor] | None = None,
        bounds: Bounds | None = None,
    ):
        """Make an empty cache; `from_pretrained`, `from_recipe` and `from_artifact` are what one usually calls.

        recipe    a Recipe, such as `preset("higgs-2bit")`
        model     the loaded model that the cache is for
        tensors   of an artifact, by name, if the recipe is fitted; None: keys are encoded less the bias of k_proj
        bounds    of the errors of blocks, as an artifact's calibration saw them; None: none are measured
        """
        check_type("recipe", recipe, Recipe, "a Recipe, or its name to from_recipe")
        check_model(model)
        served = Served(model)
        layers: list[Any] = served.stock
        if served.family is None:
            _check_unlisted(served, layers, recipe)
        settings, family, modules = served.settings, served.family, served.attention
        made_for = settings.get("max_position_embeddings") or 1 << 17
        if tensors is None:
            recipe, tensors = served.less_bias(recipe)
        self.blocks = BlockCache(recipe, served.geometry, tensors, made_for, model.dtype, bounds)
        if "positions" in recipe.needs and (why := served.rope_refusal()):
            raise ValueError(f"{recipe.name} undoes RoPE, but {why}; use a post-RoPE recipe")
        shared = settings.get("num_kv_shared_layers")
        self._pass, self._decodes = Pass(), _decoding(family, shared, model, recipe)
        if self._decodes and attends(recipe):
            raise ValueError(
                f"{recipe.name} needs queries or weights of attention, and {self._decodes}; use a recipe that holds "
                "and reads all tokens, and needs no queries"
            )
        self.places = {n: place for place, n in enumerate(modules)}
        for n, place in self.places.items():
            decodes = bool(self._decodes and (not shared or n == max(modules)))
            layers[n] = KVQLayer(self.blocks, place, self._pass, decodes)
        super().__init__(layers=layers)
        self._recurrent = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
        self._stock = [] if self._recurrent else [layer for layer in layers if isinstance(layer, DynamicLayer)]
        self._warned = False
        self.artifact: Artifact | None = None  # which the cache was made of
        hook(model)

    @classmethod
    def from_recipe(cls, recipe: str | Recipe, model: PreTrainedModel) -> "KVQCache":
        """Make a cache for a recipe that needs no calibration, by name, which may have settings, or as a Recipe.

            cache = KVQCache.from_recipe("kivi-2bit+window.recent=32", model=model)

        Keys of a model whose k_proj has a bias are encoded less the bias, unless the recipe predicts keys or sets
        key_bias=kept. Raises ValueError for an unknown name, a recipe that has to be fitted, or one that this model
        does not allow.
        """
        return cls(recipe_text.read(recipe) if isinstance(recipe, str) else recipe, model)

    @classmethod
    def from_pretrained(
        cls,
        reference: str | Path,
        model: PreTrainedModel,
        registry: str | Path | None = None,
        lock: str | Path | None = None,
        allow_other_weights: bool = False,
    ) -> "KVQCache":
        """Make a cache from an artifact: a folder, "org/name" of a Hub, or "name", "name@1.2.0", "name@production".

        registry             a folder, "file:///folder" or "hf://org"; None: $KVQ_REGISTRY, else $KVQ_HOME/registry
        lock                 a lock file that pins version and sha256
        allow_other_weights  load an artifact that was calibrated on other weights of the same shape
        Reference, registry and lock are those of `load_artifact`. Caches of one artifact share its tensors, however
        many there are: keep one, or what `load_artifact` returns, and the next reads no file.
        Raises ArtifactError if the file differs from the registry's record or the lock, or belongs to another model.
        """
        from kvq_runtime.registry.resolve import load_artifact  # which other caches do without

        return cls.from_artifact(load_artifact(reference, registry, lock), model, allow_other_weights)

    @classmethod
    def from_artifact(cls, artifact: Artifact, model: PreTrainedModel, allow_other_weights: bool = False) -> "KVQCache":
        """Make a cache from a loaded artifact. Raises ArtifactError if its fingerprint is that of another model.

        allow_other_weights  accept another model's weights, of the same shape and RoPE
        """
        check_type("artifact", artifact, Artifact, "what load_artifact returns, or its name to from_pretrained")
        fingerprint.check_match(artifact.fingerprint, fingerprint_of(model), allow_other_weights=allow_other_weights)
        cache = cls(artifact.recipe, model, artifact.tensors, bounds_in(artifact.fit))
        cache.artifact = artifact
        return cache

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

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens that every layer has seen."""
        return self.blocks.length

    def memory_report(self) -> MemoryReport:
        """Count the bytes held, by kind, and those of 16 bits; `print` the report, or read its fields.

        Layers that transformers' own classes hold are counted and the states of recurrent ones.
        """
        states = [getattr(layer, name, None) for layer in self.layers for name in HELD]
        parts = [part for state in states for part in (state.values() if isinstance(state, dict) else [state])]
        return self.blocks.memory_report().with_sliding(storage_bytes(x for x in parts if isinstance(x, Tensor)))

    def _begin(self) -> None:
        """Start a forward pass: undo one that stopped midway.

        Raises RuntimeError where that cannot be undone: of layers with a recurrent state.
        """
        if self._recurrent and (self.blocks.step is not None or self._pass.announced is not None):
            raise RuntimeError(
                "a forward pass stopped midway, and has changed the state of recurrent layers, which cannot be had "
                "back: reset() the cache, and begin again with the whole text"
            )
        self.blocks.settle()
        if self._stock:
            shortest = min(self.blocks.length, *(layer.get_seq_length() for layer in self._stock))
            if self.blocks.length > shortest:
                self.blocks.crop(shortest)
            for layer in self._stock:
                if layer.get_seq_length() > shortest:
                    layer.crop(shortest - layer.get_seq_length()) if shortest else _empty(layer)

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

    def reset(self) -> None:
        """Forget every token; the cache can be used again."""
        self._pass.announced = None
        self.blocks.reset()
        self._each("reset")

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the newest tokens of every row; the number is negative, as transformers passes it.

        Raises ValueError for a positive number; RuntimeError, and nothing changes, where tokens that would be needed
        are gone (H2O, sliding layers), or layers are recurrent.
        """
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 passes a tensor
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}); pass the tokens to drop as a negative number")
        self._whole("crop", tokens_to_remove)
        length = max(0, self.blocks.length + tokens_to_remove)
        for policy in self.blocks.policies:
            policy.check_crop(length)
        self._each("crop", tokens_to_remove)  # sliding layers refuse to go back to what they have dropped
        if tokens_to_remove < 0 and self.blocks.layers:
            self.blocks.crop(length)

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
        if self.blocks.layers:
            indices = torch.arange(self.blocks.rows, device=indices.device)[indices]  # as transformers: bool, -1
        self.blocks.reorder(indices)
        self._each("batch_select_indices", indices)

    def _whole(self, method: str, argument: Any) -> None:
        """Refuse what transformers' recurrent layers do not do."""
        if self._recurrent and argument:
            raise RuntimeError(
                f"{method}({argument}): this model has recurrent layers, whose state cannot be taken apart; reset() "
                "the cache, and begin again"
            )

    def _each(self, method: str, *args) -> None:
        """Call transformers' own layers, such as sliding windows, which keep their own tensors."""
        for layer in self.layers:
            recurs = isinstance(layer, LinearAttentionCacheLayerMixin)
            if recurs and method not in ("reset", "reorder_cache"):  # `_whole` has refused the others
                continue
            if not recurs and (isinstance(layer, KVQLayer) or not getattr(layer, "is_initialized", False)):
                continue
            if method == "reset" and recurs:
                _forget(layer)
            elif method == "reset" and isinstance(layer, DynamicLayer):
                _empty(layer)
            else:
                getattr(layer, method)(*args)


def _check_unlisted(served: Served, layers: list[Any], recipe: Recipe) -> None:
    """Refuse a model of no listed family, unless a recipe after RoPE and without a fit can serve its standard cache."""
    refusal, kinds = families.refusal(served.kind), {type(layer) for layer in layers}
    if len(layers) != served.settings["num_hidden_layers"] or not kinds <= STANDARD or DynamicLayer not in kinds:
        raise ValueError(f"{refusal}; its cache is not one of keys and values by head in every layer")
    if recipe.fitted or recipe.needs:
        raise ValueError(f"{refusal}, or a recipe after RoPE that needs no fit and no queries")
    warnings.warn(f"{refusal}; {recipe.name} was not tested with it", stacklevel=4)


def _decoding(family: Family | None, shared: Any, model: PreTrainedModel, recipe: Recipe) -> str | None:
    """The reason why a model's own attention reads a layer's decoded history at every step; None: it need not."""
    if family is None:
        return f"kvq attention was not tested with {type(model).__name__}"
    if shared:
        return f"the last layers of {type(model).__name__} read what the last of those that cache has decoded"
    if family.sinks and weighs(recipe):
        return f"{recipe.name} weighs tokens by attention, of which this model's learned sinks take a share"
    return None


def _empty(layer: DynamicLayer) -> None:
    """Forget every token of one of transformers' own layers, whose `reset` in 5.17 leaves zeros in their place."""
    layer.reset()
    layer.keys = layer.values = None  # the next update makes new ones, of no tokens
    layer.is_initialized = False


def _forget(layer: LinearAttentionCacheLayerMixin) -> None:
    """Forget the states of a recurrent layer, whose own `reset` leaves zeros, of as many rows as there were."""
    layer.reset()
    for number in range(layer.number_of_states):
        layer.conv_states[number] = layer.recurrent_states[number] = None
        layer.is_conv_states_initialized[number] = layer.is_recurrent_states_initialized[number] = False
