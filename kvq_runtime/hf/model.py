"""Read from a loaded model what a cache asks of it: its shape, its fingerprint, the rotation in use; refuse others.

From the mask of a forward pass: which tokens are padding, where they stand, whether one sees a later one. A model of
text hands its decoder [B, all tokens]; a model of images hands it a mask by the type of layer, [B, 1, T, all tokens],
bool or what is added to scores, or [B, all tokens] under flash attention.
"""

import copy
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.cache_utils import DynamicIndexedLayer
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from kvq_runtime.artifact import fingerprint
from kvq_runtime.geometry import ENTRIES, INDEXED, POOLED, WHOLE, Geometry, attending, caching, joined, visits
from kvq_runtime.ops import rope
from kvq_runtime.ops.rope import Rotary

LISTED = "docs/models.md lists the architectures that work"
# the argument by which models and `generate` take a cache; transformers 5.24 renamed it
CACHE = "cache" if "cache" in inspect.signature(LlamaAttention.forward).parameters else "past_key_values"


CACHES = CACHE, "past_key_values", "layer_past"  # the last: of GPT-NeoX's and Falcon's layers
LAYERS = "layers", "h", "blocks"  # names that decoders have for the list of theirs
# settings that a configuration computes, or has other numbers of in its file
COMPUTED = "num_hidden_layers", "layer_types", "n_input_layers", "n_output_layers"


def cache_in(given: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a call, by whatever name; None: there is none."""
    return next((given[name] for name in CACHES if given.get(name) is not None), None)


def cache_name(module: Any) -> str | None:
    """The argument by which a module of a model is handed a cache; None: it is handed none."""
    whole = getattr(module, "_orig_mod", module)  # which torch.compile wraps
    parameters = inspect.signature(type(whole).forward).parameters
    return next((name for name in CACHES if name in parameters), None)


def check_model(model: PreTrainedModel) -> None:
    """Raise TypeError for what is no loaded model, and ValueError, a sentence, for one that no cache can be made for.

    Asked are the configuration and the modules, not the name: a decoder alone, whose layers cache keys and values by
    head, on one device.
    """
    if not isinstance(model, nn.Module) or not hasattr(model, "get_decoder") or not hasattr(model, "config"):
        raise TypeError(
            f"model is of type {type(model).__name__}; give the loaded transformers model itself, as "
            "AutoModelForCausalLM.from_pretrained returns it"
        )
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} has an encoder and attention across to it; kvq takes decoders alone; {LISTED}")
    if layers_name(decoder_of(model)) is None:
        raise ValueError(f"{name} has no decoder with layers as Llama has; {LISTED}")
    if (own := _own_cache(decoder_of(model))) is not None:
        raise ValueError(f"{name} takes no cache but its own {own}; {LISTED}")
    devices = _devices(model)
    if len(devices) > 1:
        raise ValueError(
            f"the layers of {name} are on {' and '.join(devices)}; kvq needs them on one device: load the model with "
            'device_map={"": 0}'
        )


def decoder_of(model: Any) -> Any:
    """The module that has the layers: transformers' own answer, or what stands in it (Llama 4), or under its head
    (ModernBERT, which calls a projection its decoder)."""
    found = model.get_decoder()
    own = found, getattr(found, "model", found), getattr(model, "base_model", found)
    return next((one for one in own if layers_name(one)), found)


def layers_name(decoder: Any) -> str | None:
    """The decoder's name for the list of its layers; None if it has no such list."""
    return next((name for name in LAYERS if isinstance(getattr(decoder, name, None), nn.ModuleList)), None)


def _own_cache(decoder: Any) -> str | None:
    """The name of the class of cache that a decoder asks for, if it is of its own (MiniMax); None: any will do."""
    given = inspect.signature(type(decoder).forward).parameters.get(str(cache_name(decoder)))
    asked = get_args(given.annotation) if given is not None else ()
    own = (one for one in asked if isinstance(one, type) and one.__module__ == type(decoder).__module__)
    return next((one.__name__ for one in own), None)


def layers_of(decoder: Any) -> Any:
    """The layers of a decoder that has them."""
    return getattr(decoder, str(layers_name(decoder)))


def attention_of(layer: Any, number: int = 0, count: int = 1) -> Any:
    """The attention of a layer, of `count` the one of this number, wherever it stands in it; None if not as many are
    handed a cache.

    Mixers that recur are handed one too, and attention across to images.
    """
    own = getattr(layer, "self_attn", None)
    if own is not None and not isinstance(own, nn.ModuleList):
        return own if count == 1 else None
    handed = [] if layer is None else [part for part in layer.modules() if cache_name(part)]
    found = [one for one in handed if any(hasattr(one, name) for name in ("is_causal", *fingerprint.FUSED))]
    return found[number] if len(found) == count else None


def own_code(model: PreTrainedModel) -> str | None:
    """The reason why no function, as that of "kvq", can stand in the place of a model's attention; None if one can."""
    decoder = type(decoder_of(model))
    takes = decoder._can_set_attn_implementation()
    return None if takes else f"{decoder.__name__} attends by code of its own, for which transformers takes no function"


def indexed(model: PreTrainedModel) -> bool:
    """True if layers of a model read tokens that are chosen by keys of an indexer."""
    return not {*INDEXED}.isdisjoint(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())


def settings_of(config: Any) -> dict[str, Any]:
    """A decoder's configuration as a dict: what its type calls otherwise, or computes, has the common name too."""
    found = config.to_dict()
    computed = {name: getattr(config, name, None) for name in COMPUTED}
    named = {name: found[own] for name, own in config.attribute_map.items() if own in found and name not in found}
    return found | named | {name: value for name, value in computed.items() if value is not None}


def _devices(model: PreTrainedModel) -> list[str]:
    """Return the devices that layers compute on; weights that accelerate keeps on a CPU or disk compute elsewhere."""
    layout = getattr(model, "hf_device_map", None)
    if not layout:
        return []
    found = {str(torch.device("cuda", place) if isinstance(place, int) else place) for place in layout.values()}
    return sorted(found - {"cpu", "disk"}) or ["cpu"]


def geometry_of(model: PreTrainedModel) -> Geometry:
    """The shape of a loaded model's cache: of its layers that attend to all tokens.

    Raises ValueError if its configuration lacks it, or there are no such layers.
    """
    config = model.config.get_text_config(decoder=True)
    try:
        return Geometry.from_config(settings_of(config))
    except KeyError as error:
        raise ValueError(f"{type(config).__name__} does not say {error.args[0]}, as Llama's does; {LISTED}") from None


def fingerprint_of(model: PreTrainedModel) -> fingerprint.Fingerprint:
    """The fingerprint of a loaded model: shape, RoPE, and a probe of its key and value projections.

    Raises ValueError for a model without a k_proj and a v_proj, or one projection to both, in every layer.
    """
    check_model(model)
    config = settings_of(model.config.get_text_config(decoder=True))
    attention = attention_modules(model)

    def weight(layer: int, name: str) -> Tensor:
        def of(module: nn.Module) -> Tensor:
            return held(module, "weight", module.weight).detach()  # type: ignore[arg-type]

        parts = dict(attention[layer].named_modules())
        own = (parts[one] for one in fingerprint.names(joined(config), name) if one in parts)
        projection: Any = next(own, None)
        if projection is None and config.get(fingerprint.ONE):
            projection = attention[layer].k_proj
        fused = next((one for one in fingerprint.FUSED if hasattr(attention[layer], one)), None)
        if projection is None and fused is not None and joined(config) != ENTRIES:
            return fingerprint.of_fused(of(getattr(attention[layer], fused)), config, fused, name)
        if projection is None or not hasattr(projection, "weight"):
            raise ValueError(
                f"{type(attention[layer]).__name__} has no {name}; no artifact is of such a model; {LISTED}"
            )
        return of(projection)

    return fingerprint.from_config(config, weight)


def held(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """A parameter or buffer of a module, by its dotted name; what accelerate offloads, from where it keeps it."""
    if not tensor.is_meta:
        return tensor
    place, _, own = name.rpartition(".")
    hook: Any = getattr(module.get_submodule(place), "_hf_hook", None)
    maps = [getattr(one, "weights_map", None) for one in getattr(hook, "hooks", (hook,))]
    kept: list[Any] = [one for one in maps if one is not None]
    if not kept:
        raise ValueError(f"{name} of {type(module).__name__} has no values yet; load the weights first")
    return kept[0][own]


def rotary_module(decoder: Any) -> Any:
    """The module that makes a decoder's rotations, whatever it is called; None if there is none."""
    name = rotary_name(decoder)
    return None if name is None else getattr(decoder, name)


def rotary_name(decoder: Any) -> str | None:
    """The decoder's name of it."""
    return next((name for name, child in decoder.named_children() if frequencies(child) is not None), None)


def frequencies(rotary: Any) -> tuple[Tensor, float] | None:
    """inv_freq and scaling of the layers that cache all tokens, or entries, whose positions count entries; None of a
    module that has no such."""
    kind = _turned(rotary)
    if kind is None:
        return None
    start = f"{kind}_" if kind else ""
    scaling, found = float(getattr(rotary, f"{start}attention_scaling", 1.0)), getattr(rotary, f"{start}inv_freq")
    return torch.as_tensor(found) * _rate(rotary) if kind == rope.COMPRESSED else torch.as_tensor(found), scaling


def _turned(rotary: Any) -> str | None:
    """The type of layers that cache all tokens, by which a module has their inv_freq; "": it is that of all layers."""
    by_type = (kind for kind in (*WHOLE, rope.COMPRESSED) if hasattr(rotary, f"{kind}_inv_freq"))
    return "" if hasattr(rotary, "inv_freq") else next(by_type, None)


def _rate(rotary: Any) -> int:
    """The tokens of an entry."""
    return rotary.config.compress_rates[POOLED]


def turns(rotary: Any, x: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the layers that cache all tokens, as the model's module gives them, for the dtype of `x`."""
    if hasattr(rotary, "mrope_section"):  # of time, height and width, or more, which text has the same
        positions_BT = positions_BT.expand(len(rotary.mrope_section), *positions_BT.shape)
    kind = _turned(rotary)
    if kind == rope.COMPRESSED:
        cos, sin = rotary(x, positions_BT * _rate(rotary), kind)
        return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    return rotary(x, positions_BT, *([kind] if kind else []))


def rotary_of(module: nn.Module | None, cos_sin: tuple[Tensor, Tensor], positions_BT: Tensor) -> Rotary:
    """The model's rotation, checked against the cos that this forward pass uses."""
    found = frequencies(module)
    if found is None:
        raise RuntimeError("the model has no rotary embedding with inv_freq; use a post-RoPE recipe without a mean")
    cos = cos_sin[0]
    turning = Rotary(found[0].float(), found[1], cos.dtype)
    if positions_BT.shape[-1] > 1:
        expected = turning.tables(positions_BT)[0]
        used = cos[..., : expected.shape[-1]].expand_as(expected)
        if not torch.allclose(used.float(), expected.float(), rtol=0, atol=2**-6):
            raise RuntimeError(
                "the cos in use is not that of the model's inv_freq and positions; use a post-RoPE recipe"
            )
    return turning


def attention_modules(model: PreTrainedModel) -> dict[int, Any]:
    """{number of a layer: its attention module} of those that attend to all tokens.

    Raises ValueError, a sentence, for a layer that a cache cannot hold.
    """
    name, geometry, found = type(model).__name__, geometry_of(model), {}
    layers = dict(enumerate(layers_of(decoder_of(model))))
    settings = settings_of(model.config.get_text_config(decoder=True))
    if (why := _unheld(settings)) is not None:
        raise ValueError(f"{name} {why}; {LISTED}")
    each = caching(settings)
    for layer in attending(settings):
        module = attention_of(layers.get(place_of(settings, layer)), layer % each, each)
        if not isinstance(module, nn.Module) or cache_name(module) is None:
            raise ValueError(f"layer {layer} of {name} has no attention that takes {CACHE}, as Llama's; {LISTED}")
        if getattr(module, "kv_lora_rank", None) and not hasattr(module, "expand_kv"):
            raise ValueError(
                f"layer {layer} of {name} has a latent, but no expand_kv that makes keys of cached ones, as DeepSeek "
                f"V3's; {LISTED}"
            )
        if not getattr(module, "is_causal", True):
            raise ValueError(f"layer {layer} of {name} attends in both directions; kvq takes decoders alone; {LISTED}")
        own = (getattr(module, projection, None) for projection in fingerprint.PROJECTIONS.values())
        keys, values = (getattr(one, "out_features", geometry.width) for one in own)
        if keys + values != 2 * geometry.width or (keys != values and not joined(settings)):
            raise ValueError(
                f"k_proj and v_proj of layer {layer} of {name} are {keys} and {values} wide, not {geometry.kv_heads} "
                f"heads of {geometry.head_size} as its configuration says; kvq takes layers of one shape alone"
            )
        found[layer] = module
    return found


def place_of(settings: Mapping[str, Any], layer: int) -> int:
    """The place in its decoder of a layer, by its number in a pass."""
    return visits(settings)[layer] // caching(settings)


def _unheld(settings: Mapping[str, Any]) -> str | None:
    """Say what a model does with a cache's layers that ours do not support, by its configuration; None: nothing."""
    if settings.get("recurrent_kv_cache_mode") == "last_loop":
        return "reads keys and values of a layer before that caches them (recurrent_kv_cache_mode=last_loop)"
    if any(source != layer for layer, source in enumerate(settings.get("kv_source_layers") or ())):
        return "has layers that read the latents of another one, and keys of an indexer beside (kv_source_layers)"
    left = f"where transformers {transformers.__version__} leaves them when rows change; take 5.24"
    if settings.get("indexer_budget") and not hasattr(DynamicIndexedLayer(), "indexer_position_ids"):
        return f"keeps positions {left}"
    if settings.get("compress_rates") and "reorder_cache" not in vars(DeepseekV4CSACache):
        return f"keeps entries {left}"
    return None


def rotary_of_config(config: Any, dtype: torch.dtype) -> Rotary:
    """The rotation of a model that is not loaded, from its decoder's configuration; ValueError if it varies."""
    settings = rope.settings(config.to_dict())
    kind = settings.get("rope_type", "default")
    if kind not in rope.FIXED_TYPES:
        raise ValueError(f"rope_type={kind}; known without a model are {', '.join(rope.FIXED_TYPES)}")
    config = copy.copy(config)
    config.rope_parameters = settings
    module = LlamaRotaryEmbedding(config)
    return Rotary(torch.as_tensor(module.inv_freq).float(), float(module.attention_scaling), dtype)


def rotary_of_folder(folder: Path, dtype: torch.dtype) -> Rotary:
    """The same by the config.json of a model's folder."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return rotary_of_config(config.get_text_config(decoder=True), dtype)


def real_tokens(mask: Any, count: int) -> Tensor | None:
    """Mark the newest tokens that are no padding, bool [B, count]; None: all, or it is not told.

    mask   as the model gets it, [B, all tokens]; or as its decoder does from a model of images, by the type of layer
    """
    if isinstance(mask, Mapping):
        mask = _of_all(mask)
        if mask is not None and not isinstance(mask, Tensor):
            raise RuntimeError("this attention hands a cache no mask of a model of images; use sdpa or eager attention")
        if mask is not None and mask.ndim == 4:
            mask = visible(mask)[:, 0, -1]  # to the newest query, which sees all that is real
    if mask is None or mask.ndim != 2:
        return None
    return mask[:, -count:].bool()


def _of_all(masks: Mapping[str, Any]) -> Any:
    """The mask of layers that attend to all tokens."""
    return next((masks[kind] for kind in WHOLE if kind in masks), None)


def visible(mask: Tensor) -> Tensor:
    """A mask as bool, of one that is added to scores too."""
    return mask if mask.dtype == torch.bool else mask >= 0


def looks_ahead(mask: Mapping[str, Any], count: int) -> bool:
    """True if one of the newest tokens sees a later one, as those of an image may."""
    whole = _of_all(mask)
    if count < 2 or not isinstance(whole, Tensor) or whole.ndim != 4:
        return False
    return bool(visible(whole)[..., -count:].triu(1).any())


def numbered(mask: Any, length: int, x: Tensor) -> Tensor:
    """Positions of a pass of text, [B, T], in a row behind `length` tokens, or behind the row's padding.

    x   [..., B, T, C], of the pass
    """
    rows, count = x.shape[-3:-1]
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] == length + count:
        return (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -count:]
    return torch.arange(length, length + count, device=x.device).expand(rows, count)
