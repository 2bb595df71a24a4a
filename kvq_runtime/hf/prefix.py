"""Keep the prefixes of a loaded model's prompts, and generate from them: prefix/store.py for transformers."""

import re
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from kvq_runtime.artifact import fingerprint, recipe_text
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.errors import check_type
from kvq_runtime.hf.attention import KVQLayer
from kvq_runtime.hf.cache import KVQCache
from kvq_runtime.hf.model import (
    CACHE,
    decoder_of,
    fingerprint_of,
    frequencies,
    geometry_of,
    held,
    rotary_module,
)
from kvq_runtime.ops import rope
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.prefix import block_codec, chain
from kvq_runtime.prefix.block_file import Block
from kvq_runtime.prefix.block_folder import Memory
from kvq_runtime.prefix.store import PrefixBlocks, check
from kvq_runtime.recipe import Recipe
from kvq_runtime.registry.resolve import load_artifact
from kvq_runtime.store.memory import human

PLACEHOLDER = "(image|video|audio)_token_(id|index)"  # in a configuration


class PrefixStore:
    """Encoded prefixes of prompts, on disk or in memory, from which a model goes on without computing them again.

        store = PrefixStore("prefixes", "qwen2.5-7b-aqua-2bit", model=model, budget="20GB")
        out = store.generate(**inputs, max_new_tokens=100)    # the second time, and after a restart, from the store

    or, in steps, `cache = store.load(input_ids)`, `model.generate(input_ids, cache=cache)`,
    `store.put(cache, output[0])`. What is kept are whole blocks of 128 tokens, packed as the cache holds them; what a
    prompt shares with another is kept once. docs/prefix.md has the guarantees.

    path      a folder, which processes may share; None: this process' memory
    recipe    an Artifact, a Recipe, or text: the name of a recipe, or a reference to an artifact
    model     the loaded model
    budget    bytes in the folder, or in memory: a number, or text such as "20GB"; the least recently used go first
    salt      of a tenant: what is put under one is found under no other
    registry  where a reference is looked up, as for `load_artifact`
    allow_other_weights  take an artifact that was calibrated on other weights of the same shape

    Raises ValueError for a recipe whose blocks cannot be kept (fitted to the prompt, dependent on arrival, choosing
    tokens), for a model with layers that do not attend to all tokens, whose RoPE varies
    with length, or that has changed since; ArtifactError for an artifact of another model, and for a folder that others
    can write to; OSError if the disk refuses.
    """

    def __init__(
        self,
        path: str | Path | None,
        recipe: str | Artifact | Recipe,
        model: PreTrainedModel,
        budget: str | int = "20GB",
        *,
        salt: str = "",
        registry: str | Path | None = None,
        allow_other_weights: bool = False,
    ):
        found: Any = recipe
        if isinstance(recipe, str):
            found = recipe_text.read(recipe) if recipe_text.written(recipe) else load_artifact(recipe, registry)
        artifact = found if isinstance(found, Artifact) else None
        if artifact is not None:
            fingerprint.check_match(
                artifact.fingerprint, fingerprint_of(model), allow_other_weights=allow_other_weights
            )
            found = artifact.recipe
        found = check_type("recipe", found, Recipe, "an Artifact, a Recipe, or the name of one")
        check(found)
        self.model, self.recipe, self._artifact = model, found, artifact
        self._path = path
        layers = self._empty().layers
        others = [n for n, one in enumerate(layers) if not isinstance(one, KVQLayer)]
        if others:
            raise ValueError(
                f"layers {others} of {type(model).__name__} do not attend to all tokens, or recur as well: what "
                "they hold at the end of a prefix is not kept, so that nothing could go on from it"
            )
        turning = rope.settings(model.config.get_text_config(decoder=True).to_dict()).get("rope_type")
        if turning in rope.VARYING_TYPES:
            raise ValueError(
                f"rope_type={turning} turns keys by the length of the whole text, so that a prefix has other keys in a "
                "longer one; no prefix is kept of it"
            )
        self._glance, self._others = _glance(model), _placeholders(model.config)
        self._blocks = PrefixBlocks(
            path, found, geometry_of(model), artifact.tensors if artifact else None,
            model=weights_digest(model), dtype=model.dtype, rotary=_rotary(model, found), salt=salt, budget=budget,
        )  # fmt: skip

    def __repr__(self) -> str:
        shelf, budget = self._blocks.shelf, human(self._blocks.budget)
        place = (
            f"{human(shelf.size)} of {budget} in memory" if isinstance(shelf, Memory) else f"{budget} in {self._path}"
        )
        moved = {what: self._blocks.tally[what] for what in ("read", "written")}
        said = "".join(f", {human(size)} {what}" for what, size in moved.items() if size)
        return f"PrefixStore({self.recipe.name}, {place}{said})"

    def longest(self, input_ids: Tensor | Iterable[int]) -> int:
        """Return how many of these tokens, from the first on, are kept. Nothing is read."""
        return self._blocks.longest(self._known(input_ids))

    def load(self, input_ids: Tensor | Iterable[int], recent: int | None = None) -> KVQCache:
        """A cache with the kept blocks that a prompt, [T] or [1, T], begins with, for the model to go on from.

        recent   newest tokens that are left to the model, to be exact; None: as many as the recipe's window keeps.
                 One token at least is left, as its logits are what generation begins with
        With nothing kept the cache is empty. A damaged block is a miss, and a warning in the log.
        """
        cache = self._empty()
        blocks = self._found(input_ids, recent)
        if blocks:
            block_codec.fill(cache.blocks, blocks, self.model.device)
            for layer in cache.layers:
                setattr(layer, "is_initialized", True)  # noqa: B010  # not every class of transformers' declares it
        return cache

    def load_decoded(self, input_ids: Tensor | Iterable[int], recent: int | None = None) -> DynamicCache:
        """The same, decoded into transformers' own 16-bit cache, for code that takes no other."""
        cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        blocks = self._found(input_ids, recent)
        for layer, k_THD, v_THD in self._blocks.decode(blocks, self.model.device) if blocks else ():
            cache.update(k_THD.transpose(0, 1)[None].clone(), v_THD.transpose(0, 1)[None].clone(), layer)
        return cache

    def put(self, cache: Cache, tokens: Tensor | Iterable[int], row: int = 0) -> int:
        """Keep the whole blocks of a cache; returns how many tokens are kept now.

        cache    a KVQCache of this recipe, whose blocks are kept as they are, or a DynamicCache, which is encoded
        tokens   that the cache holds, [T] or [1, T], without padding; one more, as `generate` returns, does no harm
        row      of the batch
        Tokens whose block is kept already are not encoded again. OSError: the disk refused; what was kept stays.
        """
        if isinstance(cache, KVQCache):
            if cache.blocks.recipe != self.recipe or cache.blocks.geometry != geometry_of(self.model):
                raise ValueError(f"the cache is of {cache.blocks.recipe.name}, the store of {self.recipe.name}")
            return self._blocks.put_cache(self._known(tokens), cache.blocks, row)
        layers: list[Any] = [*cache.layers]
        if len(layers) != geometry_of(self.model).layers or any(type(layer) is not DynamicLayer for layer in layers):
            raise ValueError(f"{type(cache).__name__} cannot be kept; give a KVQCache or a DynamicCache of this model")
        token_T = self._known(tokens)[: cache.get_seq_length()]
        if not len(token_T):
            return 0
        keys = [layer.keys[row].transpose(0, 1) for layer in layers]
        values = [layer.values[row].transpose(0, 1) for layer in layers]
        return self._blocks.put(token_T, keys, values)

    def generate(self, input_ids: Tensor, **settings: Any) -> Any:
        """`model.generate` of one prompt [1, T], from what is kept of it; then keep prompt and answer.

        A disk that refuses is a warning in the log, once until it takes a block, and costs no answer.
        """
        mask = settings.get("attention_mask")
        if len(input_ids) != 1 or (mask is not None and not bool(mask.all())):
            raise ValueError(f"input_ids of shape {list(input_ids.shape)}; give one prompt at a time, without padding")
        cache = self.load(input_ids)
        rows = self._rows(settings)
        if cache.blocks.rows and rows > 1:
            cache.batch_repeat_interleave(rows)
        generate: Any = self.model.generate
        out = generate(input_ids, **{CACHE: cache}, **settings)
        text = out if isinstance(out, Tensor) else out.sequences
        try:
            # of several rows, beams or samples, the prompt is what all have
            self.put(cache, text[0] if cache.blocks.rows == 1 else input_ids)
        except OSError as error:
            self._blocks.refused(error)
        return out

    def _rows(self, settings: dict[str, Any]) -> int:
        """Return the rows that transformers makes of one prompt: beams or samples."""
        config = settings.get("generation_config") or self.model.generation_config
        asked = [settings.get(name, getattr(config, name, None)) for name in ("num_beams", "num_return_sequences")]
        return max(number or 1 for number in asked)

    def _empty(self) -> KVQCache:
        if self._artifact is not None:
            return KVQCache.from_artifact(self._artifact, self.model, allow_other_weights=True)  # they were compared
        return KVQCache(self.recipe, self.model)

    def _known(self, tokens: Tensor | Iterable[int]) -> Tensor:
        """The tokens, [T], whose keys and values follow from tokens and model: those before an image or a sound.

        ValueError: the model is another than it was.
        """
        token_T = chain.token_row(tokens)
        (adapters, sample), (now, found) = self._glance, _glance(self.model)
        if adapters != now or not torch.equal(sample, found):
            raise ValueError(
                "the model's weights, or its adapters in use, are others than when this PrefixStore was made; go back "
                "to those, or make another PrefixStore"
            )
        others = torch.isin(token_T, self._others).nonzero()
        return token_T[: int(others[0])] if len(others) else token_T

    def _found(self, input_ids: Tensor | Iterable[int], recent: int | None) -> list[Block]:
        token_T = chain.token_row(input_ids)  # once: it may be an iterator
        left = self.recipe.window.recent if recent is None else recent
        if left < 0:
            raise ValueError(f"recent={recent}; use a number of tokens, 0 or more")
        return self._blocks.load(self._known(token_T), len(token_T) - max(1, left))


@torch.no_grad()
def weights_digest(model: PreTrainedModel) -> str:
    """sha256 of a configuration, of 64 evenly spaced elements of every parameter and of every buffer that is saved, and
    of the adapters in use (PEFT's): what changes none has the same."""
    digest = sha256(chain.config_json(model.config.get_text_config(decoder=True).to_dict()))
    for name, tensor in sorted(_tensors(model).items()):
        flat = held(model, name, tensor.detach()).reshape(-1)
        places = torch.arange(64, device=flat.device) * max(1, flat.numel()) // 64
        sample = flat[places].cpu() if flat.numel() else torch.zeros(0)
        digest.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update((sample if sample.dtype in (torch.int32, torch.int64) else sample.float()).numpy().data)
    digest.update(_adapters(model).encode())
    return digest.hexdigest()


@torch.no_grad()
def _glance(model: PreTrainedModel) -> tuple[str, Tensor]:
    """The adapters in use, and a few elements of each of these tensors: what is asked at each call, in a few ms.

    What accelerate offloads is not asked again.
    """
    flats = [tensor.reshape(-1) for tensor in _tensors(model).values() if not tensor.is_meta]
    few = [torch.zeros(1, dtype=torch.float32), *(flat[:: max(1, flat.numel() // 4)][:4].float() for flat in flats)]
    return _adapters(model), torch.cat([part.to(few[-1].device) for part in few]).cpu().view(torch.int32)


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters, and buffers that are saved, as quantized weights are."""
    found: dict[str, Tensor] = dict(model.named_parameters())
    for place, module in model.named_modules():
        for name in module._buffers.keys() - module._non_persistent_buffers_set:
            buffer = module._buffers[name]
            if buffer is not None:
                found[f"{place}.{name}" if place else name] = buffer
    return found


def _adapters(model: PreTrainedModel) -> str:
    """PEFT's adapters that are in use, by module."""
    found = [(name, getattr(one, "active_adapters", None), one) for name, one in model.named_modules()]
    return "".join(
        f"\0{name}\0{sorted(active)}\0{getattr(one, 'disable_adapters', None)}"
        for name, active, one in found if isinstance(active, (list, tuple))
    )  # fmt: skip


def _placeholders(config: Any) -> Tensor:
    """The tokens of a configuration that stand for what a model of images or sounds puts in their places."""
    found = {name: value for name, value in vars(config).items() if re.fullmatch(PLACEHOLDER, name)}
    return torch.tensor([value for value in found.values() if isinstance(value, int)], dtype=torch.int64)


def _rotary(model: Any, recipe: Recipe) -> Rotary | None:
    """The model's rotation, where a recipe needs it; making a cache has checked that it is one of ours."""
    if "positions" not in recipe.needs:
        return None
    found = frequencies(rotary_module(decoder_of(model)))
    assert found is not None
    return Rotary(found[0].float(), found[1], model.dtype)
