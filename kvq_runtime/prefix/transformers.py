"""Keep the prefixes of a loaded model's prompts, and go on from them: `prefix/store.py` for transformers."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvq_runtime.artifact import recipe_text
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.errors import check_type
from kvq_runtime.hf.attention import KVQLayer
from kvq_runtime.hf.cache import KVQCache
from kvq_runtime.hf.model import Served, decoder_of, geometry_of, held, rotary_module, rotary_of
from kvq_runtime.ops import rope
from kvq_runtime.prefix import block, chain
from kvq_runtime.prefix.store import PrefixBlocks, check_recipe
from kvq_runtime.recipe import Recipe
from kvq_runtime.registry.resolve import load_artifact

PLACEHOLDER = "(image|video|audio)_token_(id|index)"  # in a configuration


class PrefixStore:
    """Encoded prefixes of prompts in a folder, from which a model goes on without computing them again.

        store = PrefixStore("prefixes", "qwen2.5-7b-aqua-2bit", model, budget="20GB")
        cache = store.load(input_ids)    # empty the first time; later, and after a restart, what is kept
        output = model.generate(input_ids, cache=cache, max_new_tokens=100)
        store.put(cache, output[0])

    Whole blocks of 128 tokens are kept, packed as the cache holds them: docs/prefix.md.

    path     a folder, which processes may share
    recipe   an Artifact, a Recipe, or text: the name of a recipe, or a reference to an artifact
    model    the loaded model
    budget   bytes in the folder: a number, or text such as "20GB"; the least recently used blocks go first
    salt     of a tenant: blocks that are put under one are found under no other

    Raises ValueError for a recipe or a model that cannot be kept, ArtifactError for an artifact of another model or a
    folder that others can write to, and OSError if the disk refuses.
    """

    def __init__(
        self, path: str | Path, recipe: str | Artifact | Recipe, model: Any, budget: str | int = "20GB", salt: str = ""
    ):
        source: Any = recipe
        if isinstance(recipe, str):
            source = recipe_text.read(recipe) if recipe_text.is_recipe(recipe) else load_artifact(recipe)
        self._artifact = source if isinstance(source, Artifact) else None
        self.model = model
        if self._artifact is None:
            source = check_type("recipe", source, Recipe, "an Artifact, a Recipe, or the name of one")
            self.recipe, self._tensors = Served(model).less_bias(source)
        else:
            self.recipe, self._tensors = source.recipe, source.tensors
        check_recipe(self.recipe)
        others = [n for n, layer in enumerate(self._empty().layers) if not isinstance(layer, KVQLayer)]
        if others:
            raise ValueError(f"layers {others} of {type(model).__name__} do not attend to all tokens; none is kept")
        config = model.config.get_text_config(decoder=True).to_dict()
        kind = rope.settings(config).get("rope_type")
        if kind in rope.VARYING_TYPES:
            raise ValueError(f"rope_type={kind} rotates keys by the length of the whole text; no prefix of it is kept")
        turned = "positions" in self.recipe.needs
        rotary = rotary_of(rotary_module(decoder_of(model)), model.dtype) if turned else None
        self._digest = weights_digest(model)
        self._blocks = PrefixBlocks(
            path, self.recipe, geometry_of(model), self._tensors,
            model=self._digest, dtype=model.dtype, rotary=rotary, budget=budget,
        ).of_tenant(salt)  # fmt: skip

    def load(self, input_ids: Tensor | Iterable[int]) -> KVQCache:
        """Return a cache with the kept blocks that a prompt, [T] or [1, T], begins with.

        The newest tokens, as many as the recipe's window keeps exact and at least one, are left to the model. With
        nothing kept the cache is empty. A damaged block is a miss, and a warning in the log.
        """
        cache, token_T = self._empty(), chain.token_row(input_ids)
        computed = max(1, self.recipe.window.recent)
        blocks = self._blocks.load(self._text(token_T)[: max(0, len(token_T) - computed)])
        if blocks:
            block.fill(cache.blocks, blocks, self.model.device)
            for layer in cache.layers:
                setattr(layer, "is_initialized", True)  # noqa: B010  # not every class of transformers' declares it
        return cache

    def put(self, cache: KVQCache, tokens: Tensor | Iterable[int], row: int = 0) -> int:
        """Keep the encoded blocks of a cache; return how many tokens are kept now.

        tokens   in the cache, [T] or [1, T], without padding; one more, as `generate` returns, does no harm
        row      of the batch
        Raises ValueError for a cache of another recipe, and OSError if the disk refuses; what was kept stays.
        """
        check_type("cache", cache, KVQCache, "a KVQCache, as `load` returns it")
        if cache.blocks.recipe != self.recipe or cache.blocks.geometry != geometry_of(self.model):
            raise ValueError(f"the cache is of {cache.blocks.recipe.name}, the store of {self.recipe.name}")
        return self._blocks.put_cache(self._text(tokens), cache.blocks, row)

    def _empty(self) -> KVQCache:
        if self._artifact is not None:
            return KVQCache.from_artifact(self._artifact, self.model)
        return KVQCache(self.recipe, self.model, self._tensors)

    def _text(self, tokens: Tensor | Iterable[int]) -> Tensor:
        """Return the tokens [T] before the first image or sound: keys and values follow from those and the model.

        Raises ValueError if the model has changed.
        """
        token_T = chain.token_row(tokens)
        if weights_digest(self.model) != self._digest:
            raise ValueError(
                "the model's weights, or its adapters in use, have changed since; make another PrefixStore for them"
            )
        config = vars(self.model.config)
        ids = [value for name, value in config.items() if re.fullmatch(PLACEHOLDER, name) and isinstance(value, int)]
        placeholders = torch.isin(token_T, torch.tensor(ids, dtype=torch.int64)).nonzero()
        return token_T[: int(placeholders[0])] if len(placeholders) else token_T


@torch.no_grad()
def weights_digest(model: Any) -> str:
    """Digest a loaded model: all on which its keys and values depend.

    These are its configuration, samples of weights and saved buffers, the frequencies of RoPE in use, a quantization at
    load time, and of PEFT's adapters which are in use, and their settings: scaling, rank, alpha, merged or not.
    """
    adapters = [
        (name, sorted(module.active_adapters), getattr(module, "disable_adapters", None), _settings(module))
        for name, module in model.named_modules()
        if isinstance(getattr(module, "active_adapters", None), (list, tuple))
    ]
    rotary = rotary_of(rotary_module(decoder_of(model)), model.dtype)
    turned = rotary and ([f"{x:.4g}" for x in rotary.frequencies_K.tolist()], rotary.scaling)  # alike on every device
    quantized = model.config.to_dict().get("quantization_config")
    weights = ((name, held(model, name, x)) for name, x in model.state_dict().items() if isinstance(x, Tensor))
    config = model.config.get_text_config(decoder=True).to_dict()
    return chain.model_digest(config, weights, repr((adapters, turned, quantized)))


def _settings(module: nn.Module) -> str:
    """Return a module's attributes as JSON, for objects their type; without those of torch."""
    own = {name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"}
    return json.dumps(own, sort_keys=True, default=lambda value: type(value).__name__)
