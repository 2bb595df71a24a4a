"""Read what a cache needs from a loaded model: shape, fingerprint, rotation, and, by a hook, each forward pass.

From the mask of a forward pass: which tokens are padding. A model of text hands its decoder [B, all tokens]; a model of
images hands it a mask by the type of layer, [B, 1, T, all tokens], bool or what is added to scores, or [B, all tokens]
under flash attention.
"""

import copy
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel, __version__
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvq_runtime import families
from kvq_runtime.artifact import fingerprint
from kvq_runtime.codec.key_bias import centred, nonzero, tensors
from kvq_runtime.families import ATTENTION, FULL, LAYERS, Family
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import rope
from kvq_runtime.ops.dispatch import runs_kernel
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.recipe import Recipe
from kvq_runtime.store.positions import Positions

LISTED = "docs/models.md lists the families that are served"
# the argument by which models and `generate` take a cache; transformers 5.24 renamed it
CACHE = "cache" if tuple(map(int, __version__.split(".")[:2])) >= (5, 24) else "past_key_values"


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a call, by either name; None: there is none."""
    return arguments.get(CACHE) if arguments.get(CACHE) is not None else arguments.get("past_key_values")


def check_model(model: Any) -> None:
    """Raise TypeError for an object that is no loaded model, and ValueError for a model that no cache can serve."""
    if not isinstance(model, nn.Module) or not hasattr(model, "get_decoder") or not hasattr(model, "config"):
        raise TypeError(
            f"model is of type {type(model).__name__}; give the loaded transformers model itself, as "
            "AutoModelForCausalLM.from_pretrained returns it"
        )
    name = type(model).__name__
    encodes = getattr(model.config, "is_encoder_decoder", False)
    if encodes or not isinstance(getattr(decoder_of(model), LAYERS, None), nn.ModuleList):
        raise ValueError(f"{name} is no decoder alone with layers as Llama has; {LISTED}")
    layout = getattr(model, "hf_device_map", None) or {}
    on = {str(torch.device("cuda", place) if isinstance(place, int) else place) for place in layout.values()}
    computing = sorted(on - {"cpu", "disk"})  # weights that accelerate keeps there compute elsewhere
    if len(computing) > 1:
        raise ValueError(
            f"the layers of {name} are on {' and '.join(computing)}; kvq needs them on one device: load the model with "
            'device_map={"": 0}'
        )


def decoder_of(model: Any) -> Any:
    """Return the module that has the layers."""
    return model.get_decoder()


def settings_of(config: Any) -> dict[str, Any]:
    """Return a decoder's configuration as a dict: a setting of another name in its file has the common name, too."""
    settings = config.to_dict()
    renamed = {
        n: settings[other] for n, other in config.attribute_map.items() if other in settings and n not in settings
    }
    kinds = getattr(config, "layer_types", None)
    return settings | renamed | ({} if kinds is None else {"layer_types": kinds})


def settings_of_folder(folder: Path) -> dict[str, Any]:
    """Return the configuration of the decoder in a model's folder, as `settings_of`."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return settings_of(config.get_text_config(decoder=True))


def geometry_of(model: PreTrainedModel) -> Geometry:
    """Return the shape of a loaded model's cache, of the layers that attend to all tokens.

    Raises ValueError if its configuration does not say it, or there are no such layers.
    """
    return Served(model).geometry


class Served:
    """A loaded model as a cache reads it.

    family     None: it is not listed         settings   of its decoder
    stock      the layers of transformers' own cache
    geometry   of the layers that attend to all tokens, `layers`, by their numbers in the model
    """

    def __init__(self, model: PreTrainedModel):
        config = model.config.get_text_config(decoder=True)
        self.model, self.name, self.decoder = model, type(model).__name__, decoder_of(model)
        self.kind, self.settings = {"model_type": model.config.model_type}, settings_of(config)
        self.family: Family | None = families.family_of(self.kind)
        self.stock = DynamicCache(config=config).layers
        self.layers = [n for n, layer in enumerate(self.stock) if type(layer) is DynamicLayer]
        try:
            self.geometry = Geometry.from_config(self.settings, self.layers)
        except KeyError as error:
            who = type(config).__name__
            raise ValueError(f"{who} does not say {error.args[0]}, as Llama's does; {LISTED}") from None

    @cached_property
    def attention(self) -> dict[int, Any]:
        """{number of a layer: its attention module}. Raises ValueError for a layer that a cache cannot hold."""
        modules, stack = {}, getattr(self.decoder, LAYERS)
        for n in self.layers:
            module = getattr(stack[n], ATTENTION, None) if n < len(stack) else None
            if not isinstance(module, nn.Module) or not getattr(module, "is_causal", True):
                raise ValueError(f"layer {n} of {self.name} has no causal {ATTENTION}, as Llama's has; {LISTED}")
            modules[n] = module
        return modules

    def less_bias(self, recipe: Recipe) -> tuple[Recipe, dict[str, Tensor]]:
        """Return a recipe without an artifact as this model takes it, and its tensors (`codec/key_bias.py`)."""
        attention = [*self.attention.values()]
        projections: dict[int, Any] = {n: getattr(module, "k_proj", None) for n, module in enumerate(attention)}
        biases = {n: bias for n, module in projections.items() if (bias := getattr(module, "bias", None)) is not None}
        if not biases or hasattr(attention[0], "k_norm") or self.rope_refusal() is not None:
            return recipe, tensors(recipe, self.geometry, {})
        known = nonzero({n: held(projections[n], "bias", bias) for n, bias in biases.items()})
        recipe = centred(recipe, known)
        return recipe, tensors(recipe, self.geometry, known)

    def rope_refusal(self) -> str | None:
        """Return the reason why the RoPE of the compressed layers cannot be undone; None if it can."""
        if self.family is None:
            return families.refusal(self.kind)
        kind = rope.settings(self.settings).get("rope_type", "default")
        if kind in rope.VARYING_TYPES:
            return f"rope_type={kind} changes with length"
        if self.family.rope == "some layers":
            turned = self.settings["no_rope_layers"]
            if (still := next((n for n in self.layers if not turned[n]), None)) is not None:
                return f"layer {still} ({self.settings['model_type']}) has no RoPE"
        if rotary_of(rotary_module(self.decoder), self.model.dtype) is None:
            return f"{type(self.decoder).__name__} has no rotary_emb with one inv_freq for all compressed layers"
        return None


def fingerprint_of(model: PreTrainedModel) -> fingerprint.Fingerprint:
    """Return the fingerprint of a loaded model: shape, RoPE, and a probe of its key and value projections.

    PEFT's adapters in use count as the merged ones do.
    Raises ValueError for a model of another family than the listed ones, and for one without these projections.
    """
    check_model(model)
    served = Served(model)
    family, config, attention = served.family, served.settings, served.attention
    if family is None:
        raise ValueError(families.refusal(served.kind))

    def weight(layer: int, name: str) -> Tensor:
        projection = getattr(attention[layer], family.fused or name, None)
        if projection is None and family.shared and config.get(fingerprint.KEYS_AS_VALUES):
            projection = attention[layer].k_proj
        if projection is None or not hasattr(projection, "weight"):
            raise ValueError(
                f"{type(attention[layer]).__name__} has no {name}; no artifact is of such a model; {LISTED}"
            )
        adapted = getattr(projection, "merged", None) is False and not projection.disable_adapters
        if adapted and projection.active_adapters:
            projection = copy.deepcopy(projection)
            projection.merge()
        matrix = held(projection, "weight", projection.weight).detach()
        return fingerprint.of_fused(matrix, config, name) if family.fused else matrix

    return fingerprint.from_config(config, weight)


def held(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """A parameter or buffer of a module, by its dotted name; what accelerate offloads, from where it keeps it."""
    if not tensor.is_meta:
        return tensor
    place, _, last = name.rpartition(".")
    hook: Any = getattr(module.get_submodule(place), "_hf_hook", None)
    maps = [getattr(each, "weights_map", None) for each in getattr(hook, "hooks", (hook,))]
    kept: list[Any] = [weights for weights in maps if weights is not None]
    if not kept:
        raise ValueError(f"{name} of {type(module).__name__} has no values yet; load the weights first")
    return kept[0][last]


def rotary_module(decoder: Any) -> Any:
    """Return the module that makes a decoder's rotations; None if there is none."""
    return getattr(decoder, "rotary_emb", None)


def rotary_of(module: nn.Module | None, dtype: torch.dtype) -> Rotary | None:
    """The rotation of the layers that attend to all tokens, for hidden states of this dtype; None: it has no inv_freq.

    module   of the decoder, or None
    """
    start = "" if hasattr(module, "inv_freq") else f"{FULL}_"
    if (frequencies := getattr(module, f"{start}inv_freq", None)) is None:
        return None
    scaling = float(getattr(module, f"{start}attention_scaling", 1.0))
    return Rotary(torch.as_tensor(frequencies).float(), scaling, dtype)


def rotary_of_config(config: Any, dtype: torch.dtype) -> Rotary:
    """Return the rotation of a model that is not loaded, from its decoder's configuration; ValueError if it varies."""
    settings = rope.settings(config.to_dict())
    kind = settings.get("rope_type", "default")
    if kind not in rope.FIXED_TYPES:
        raise ValueError(f"rope_type={kind}; known without a model are {', '.join(rope.FIXED_TYPES)}")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = copy.copy(config)
    config.rope_parameters = settings
    module = LlamaRotaryEmbedding(config)
    return Rotary(torch.as_tensor(module.inv_freq).float(), float(module.attention_scaling), dtype)


def real_tokens(mask: Any, count: int) -> Tensor | None:
    """Mark the newest tokens that are no padding, bool [B, count]; None: all, or it is not told.

    mask   as the model gets it, [B, all tokens]; or as its decoder does from a model of images, by the type of layer
    """
    if isinstance(mask, Mapping):
        mask = mask.get(FULL)
        if mask is not None and not isinstance(mask, Tensor):
            raise RuntimeError("this attention hands a cache no mask of a model of images; use sdpa or eager attention")
        if mask is not None and mask.ndim == 4:
            mask = mask[:, 0, -1]  # to the newest query, which sees all that is real
            mask = mask if mask.dtype == torch.bool else mask >= 0  # added to scores
    if mask is None or mask.ndim != 2:
        return None
    return mask[:, -count:].bool()


def hook(model: PreTrainedModel) -> None:
    """Have a model's decoder announce each forward pass to its KVQCache, by one hook, which is pickled with it."""
    decoder = decoder_of(model)
    if announce_pass not in decoder._forward_pre_hooks.values():
        decoder.register_forward_pre_hook(announce_pass, with_kwargs=True)


@torch.compiler.disable
def announce_pass(decoder: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Announce the decoder's next pass to the cache among its arguments; refuse one of no token, or of tokens that the
    cache holds. A whole text, as assisted decoding hands on once, goes on behind these.

    A step without padding needs no mask: to find that out waits for the device once, to read the mask thrice.
    """
    cache = cache_in(kwargs)
    if not hasattr(cache, "_announce"):  # another's
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
    if length and count and (first := _first_position(cache.blocks.positions, kwargs, count)) < length:
        rest = _behind(length, count, args, kwargs) if first == 0 and count > length else None
        if rest is None:
            raise ValueError(
                f"the cache holds {length:,} tokens, and this pass would take in again those from position {first:,} "
                "on: crop() the cache to what it has in common with the prompt, or make one for each text"
            )
        args, kwargs, count = (), rest, count - length
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


def _first_position(held: Positions, kwargs: Mapping[str, Any], count: int) -> int:
    """Return the least first position of a pass, of the rows in which each token's is its number; else, or if it is not
    told, how many are held. A step of one token on a GPU is not asked: it would wait for the device."""
    positions_BT, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if positions_BT is None or positions_BT.ndim != 2 or (count == 1 and runs_kernel(positions_BT)):
        return held.seen
    first_B = positions_BT[:, 0]
    real = mask if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2) else real_tokens(mask, count)
    for real_BT in (real, held.real_BT):
        first_B = first_B if real_BT is None else first_B.where(real_BT.bool().all(1), held.seen)
    if held.positions_BT is not None:
        first_B = first_B.where(held.positions_BT[:, -1] + 1 == held.seen, held.seen)
    return int(first_B.min())


def _behind(length: int, count: int, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of a pass over a whole text without its first `length` tokens; None: it has others."""
    named = {"input_ids": args[0]} if args else {}
    texts = ("input_ids", "inputs_embeds", "position_ids")
    named |= {name: kwargs[name] for name in texts if kwargs.get(name) is not None}
    mask, known = kwargs.get("attention_mask"), {*named, "attention_mask"}
    others = any(isinstance(x, (Tensor, Mapping)) for name, x in kwargs.items() if name not in known)
    masked = mask is not None and (isinstance(mask, Mapping) or mask.shape[1:] != (count,))
    if len(args) > 1 or others or masked or not bool((named["position_ids"][:, length] == length).all()):
        return None
    return kwargs | {name: x[:, length:] for name, x in named.items()}


def _positions_of_text(positions_ABT: Tensor, turned: bool) -> Tensor:
    """Take the first of several axes, such as time, height and width; text has the same number on each."""
    if turned and not bool((positions_ABT == positions_ABT[0]).all()):
        raise RuntimeError(
            "tokens of an image have a position on each of several axes, by which kvq does not undo RoPE; use a "
            "post-RoPE recipe without a mean"
        )
    return positions_ABT[0]
