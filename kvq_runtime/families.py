"""List the model families that kvq serves: plain data by `model_type`, without transformers.

In all of them a decoder has `layers`, a layer `self_attn`, and attention caches keys after RoPE and values, by KV head.
Layers that attend to all tokens are compressed; layers that slide over a window or recur stay transformers' own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

MAX_LAYERS = 1 << 12
# settings of config.json: {name: the least, and the most that any model has, with room}
SIZES = {
    **dict.fromkeys(("num_hidden_layers", "num_kv_shared_layers"), (0, MAX_LAYERS)),
    "num_attention_heads": (1, 1 << 12),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), (0, 1 << 12)),
    "hidden_size": (1, 1 << 20),
    **dict.fromkeys(("head_dim", "global_head_dim"), (0, 1 << 14)),
    "sliding_window": (0, 1 << 28),
}
LAYERS, ATTENTION = "layers", "self_attn"  # the decoder's name for its layers, and a layer's for its attention
FULL, RECURRENT = "full_attention", "linear_attention"
SLIDING = "sliding_attention"
Rope = Literal["full", "partial", "some layers"]
Mixed = Literal["never", "asked", "always"]


@dataclass(frozen=True)
class Family:
    """What differs between families.

    rope      channels of a key that RoPE turns, first half with second: all, the first ones, or none in some layers
    mixed     whether layers are of several types, which `layer_types` lists: never, where `use_sliding_window` is set,
              or always
    fused     the name of one projection to queries, keys and values, in this order; "": there are k_proj and v_proj
    shared    whether values may be the projection of keys, and the last layers may read keys that others cache
    sinks     whether attention has one learned logit a head, of no token
    """

    rope: Rope = "full"
    mixed: Mixed = "never"
    fused: str = ""
    shared: bool = False
    sinks: bool = False


FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("llama", "granite", "olmo2", "seed_oss", "mistral", "ministral3", "mixtral"), Family()),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), Family(mixed="asked")),
    "phi3": Family("partial", fused="qkv_proj"),
    **dict.fromkeys(("gemma2", "gemma3_text", "gemma3", "olmo3"), Family(mixed="always")),
    **dict.fromkeys(("gemma4_text", "gemma4"), Family(mixed="always", shared=True)),
    "smollm3": Family("some layers", mixed="asked"),
    "glm4_moe": Family("partial"),
    "gpt_oss": Family(mixed="always", sinks=True),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe"), Family("partial", mixed="always")
    ),
}
SERVED = ", ".join(FAMILIES)


def family_of(config: Mapping[str, Any]) -> Family | None:
    """Return the family of a configuration as in config.json; None of a model that is not listed."""
    return FAMILIES.get(str(config.get("model_type")))


def refusal(config: Mapping[str, Any]) -> str:
    """Say that a model is not of a listed family, and which are."""
    kind = config.get("model_type")
    return f"model_type={kind!r:.60} is not a family that kvq serves; use a model of {SERVED}"


def owners(config: Mapping[str, Any]) -> int:
    """The number of layers, the first ones, that cache keys and values; those above them read what the last of their
    type has (Gemma 4's E2B and E4B)."""
    count, shared = config["num_hidden_layers"], config.get("num_kv_shared_layers") or 0
    if type(count) is not int or type(shared) is not int or not 0 <= shared < max(1, count):
        text = f"num_hidden_layers={count!r:.60}" + (f", num_kv_shared_layers={shared!r:.60}" if shared else "")
        raise ValueError(f"{text}; a whole number is needed" + (", and fewer that share" if shared else ""))
    return count - shared


def lists_layers(config: Mapping[str, Any]) -> bool:
    """True if a configuration says which layers attend to all tokens; False if only transformers knows."""
    mixed = (family_of(config) or Family()).mixed
    return config.get("layer_types") is not None or mixed == "never" or (mixed == "asked" and not _slides(config))


def layer_types(config: Mapping[str, Any]) -> Sequence[str]:
    """Return the type of each layer. Raises ValueError for settings that no model has, or that are not complete."""
    check(config)
    owners(config)
    count, kinds = config["num_hidden_layers"], config.get("layer_types")
    if isinstance(kinds, (list, tuple)):
        if len(kinds) < count:
            raise ValueError(f"layer_types has {len(kinds)} for {count} layers; one each is needed")
        return kinds
    if not lists_layers(config):
        raise ValueError(f"config.json of {config['model_type']} has no layer_types; read it by AutoConfig")
    return [SLIDING if _slides(config) else FULL] * count


def _slides(config: Mapping[str, Any]) -> bool:
    """Whether some layers, or all, slide over a window."""
    asked = (family_of(config) or Family()).mixed == "asked"
    return config.get("sliding_window") is not None and bool(config.get("use_sliding_window", not asked))


def attending(config: Mapping[str, Any]) -> Sequence[int]:
    """The layers that cache all tokens, by their number in the model; the others slide, recur, or read what a layer
    below them caches.

    Raises ValueError for settings that no model has, or that are not complete.
    """
    return [n for n, kind in enumerate(layer_types(config)[: owners(config)]) if kind == FULL]


def check(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a setting of another type, or of a size that no model has: loops and memory are as large as
    settings say. None says nothing."""
    if not isinstance(given := config.get("layer_types"), list | tuple | None):
        raise ValueError(f"layer_types={given!r:.60}; a list with one for each layer is needed")
    given = config.get("per_layer_config")
    if given is not None and (not isinstance(given, Mapping) or len(given) > MAX_LAYERS):
        raise ValueError(f"per_layer_config={given!r:.60}; an object of at most {MAX_LAYERS} is needed")
    by_layer = (given or {}).values()
    for part in (config, *(each for each in by_layer if isinstance(each, Mapping))):
        for name, bounds in SIZES.items():
            check_number(name, part.get(name), bounds)


def check_number(name: str, value: Any, bounds: tuple[int, int]) -> None:
    """Raise ValueError unless this setting is None, or a whole number within these bounds."""
    least, most = bounds
    if value is not None and (type(value) is not int or not least <= value <= most):
        raise ValueError(f"{name!s:.60}={value!r:.60}; a whole number from {least} to {most} is needed")
