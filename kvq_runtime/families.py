"""List the model families that kvq serves: plain data by `model_type`, without transformers.

In all of them a decoder has `layers`, a layer `self_attn`, and attention caches keys after RoPE and values, by KV head.
Layers that attend to all tokens are compressed; layers that slide over a window or recur stay transformers' own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvq_runtime import settings

LAYERS, ATTENTION = "layers", "self_attn"  # the decoder's name for its layers, and a layer's for its attention
FULL, RECURRENT = "full_attention", "linear_attention"
SLIDING = "sliding_attention"
Rope = Literal["full", "partial", "some layers"]
Window = Literal["none", "given", "asked"]


@dataclass(frozen=True)
class Family:
    """What differs between families.

    rope      channels of a key that RoPE turns, first half with second: all, the first ones, or none in some layers
    window    whether layers slide: never; where `sliding_window` is set; or where `use_sliding_window` is set, too
    every     without `layer_types` in config.json, every so manieth layer attends to all tokens
    period    the setting of config.json that gives another number
    others    the type of layers between
    fused     the name of one projection to queries, keys and values, in this order; "": there are k_proj and v_proj
    shared    whether values may be the projection of keys, and the last layers may read keys that others cache
    sinks     whether attention has one learned logit a head, of no token
    images    whether config.json describes a decoder of text in `text_config`, beside a tower of images
    """

    rope: Rope = "full"
    window: Window = "none"
    every: int = 1
    period: str = ""
    others: str = SLIDING
    fused: str = ""
    shared: bool = False
    sinks: bool = False
    images: bool = False


PLAIN = Family()
RECURRING = Family("partial", every=4, period="full_attention_interval", others=RECURRENT)
GEMMA3 = Family(window="given", every=6, period="sliding_window_pattern")
GEMMA4 = Family(window="given", every=6, shared=True)

FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("llama", "granite", "olmo2", "seed_oss"), PLAIN),
    **dict.fromkeys(("mistral", "ministral3", "mixtral"), Family(window="given")),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), Family(window="asked")),
    "phi3": Family("partial", window="given", fused="qkv_proj"),
    "gemma2": Family(window="given", every=2, period="sliding_window_pattern"),
    "gemma3_text": GEMMA3,
    "gemma3": replace(GEMMA3, images=True),
    "gemma4_text": GEMMA4,
    "gemma4": replace(GEMMA4, images=True),
    "olmo3": Family(window="given", every=4),
    "smollm3": Family("some layers", window="asked"),
    "glm4_moe": Family("partial"),
    "gpt_oss": Family(window="given", every=2, sinks=True),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), RECURRING),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), replace(RECURRING, images=True)),
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
        given = f"num_hidden_layers={count!r:.60}" + (f", num_kv_shared_layers={shared!r:.60}" if shared else "")
        raise ValueError(f"{given}; a whole number is needed" + (", and fewer that share" if shared else ""))
    return count - shared


def layer_types(config: Mapping[str, Any]) -> Sequence[str]:
    """Return the type of each layer, which config.json may leave to transformers.

    Raises ValueError for settings that no model has.
    """
    settings.check(config)
    owners(config)
    count, kinds, family = config["num_hidden_layers"], config.get("layer_types"), family_of(config) or PLAIN
    if isinstance(kinds, (list, tuple)):
        if len(kinds) < count:
            raise ValueError(f"layer_types has {len(kinds)} for {count} layers; one each is needed")
        return kinds
    if not _windowed(config, family):
        return [FULL] * count
    if family.window == "asked":  # above a layer, or, of Qwen 2's experts, every other one below it
        first = config.get("max_window_layers")
        first = first if type(first) is int else 0
        if config.get("model_type") == "qwen2_moe":
            return [SLIDING if n % 2 == 0 and n < first else FULL for n in range(count)]
        return [SLIDING if n >= first else FULL for n in range(count)]
    every = config.get(family.period) if family.period else None
    every = every if type(every) is int and every > 0 else family.every
    kinds = [FULL if every > 1 and n % every == every - 1 else family.others for n in range(count)]
    if family.shared and kinds:
        kinds[-1] = FULL
    return kinds


def _windowed(config: Mapping[str, Any], family: Family) -> bool:
    """Whether some layers do not attend to all tokens, where config.json does not say which."""
    if family.others != SLIDING:
        return True
    if family.window == "none" and family is not PLAIN:
        return False
    if config.get("sliding_window", 1 if family.every > 1 else None) is None:
        return False
    return bool(config.get("use_sliding_window", family.window != "asked"))


def attending(config: Mapping[str, Any]) -> Sequence[int]:
    """The layers that cache all tokens, by their number in the model; the others slide, recur, or read what a layer
    below them caches.

    config   as in config.json, which may leave out what transformers knows of its type; or with its defaults

    Raises ValueError for settings that no model has.
    """
    return [n for n, kind in enumerate(layer_types(config)[: owners(config)]) if kind == FULL]
