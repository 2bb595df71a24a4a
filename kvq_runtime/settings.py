"""Refuse settings of a model, as in its config.json, that no model has: loops and memory are as large as they say."""

from collections.abc import Mapping
from typing import Any

LAYERS = 1 << 12
# {setting: the least, and the most that any model has, with room}; "swa_" before it: of layers that slide
SIZES = {
    **dict.fromkeys(("num_hidden_layers", "num_kv_shared_layers"), (0, LAYERS)),
    "num_attention_heads": (1, 1 << 12),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), (0, 1 << 12)),
    "hidden_size": (1, 1 << 20),
    **dict.fromkeys(("head_dim", "global_head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim"), (0, 1 << 14)),
    **dict.fromkeys(("index_head_dim", "indexer_head_dim"), (0, 1 << 14)),
    **dict.fromkeys(("index_topk_freq", "index_skip_topk_offset"), (0, LAYERS)),
    "sliding_window_size": (0, 1 << 28),
}
TOKENS = 1, 1 << 28  # of an entry, or of a window


def check(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a setting that is of another type, or of a size that no model has. None says nothing."""
    for name in ("layer_types", "compress_ratios", "kv_source_layers"):
        if not isinstance(given := config.get(name), list | tuple | None):
            raise ValueError(f"{name}={given!r:.60}; a list with one for each layer is needed")
    for name in ("per_layer_config", "compress_rates"):
        given = config.get(name)
        if given is not None and (not isinstance(given, Mapping) or len(given) > LAYERS):
            raise ValueError(f"{name}={given!r:.60}; an object of at most {LAYERS} is needed")
    by_layer = (config.get("per_layer_config") or {}).values()
    for part in (config, *(one for one in by_layer if isinstance(one, Mapping))):
        for name, value in part.items():
            check_number(name, value, SIZES.get(str(name).removeprefix("swa_")))
    for name, value in (config.get("compress_rates") or {}).items():
        check_number(name, value, TOKENS)


def check_number(name: Any, value: Any, among: tuple[int, int] | None) -> None:
    """The same of one setting that is a whole number; `among`: the least and the most, or None: any value will do."""
    if among is None or value is None:
        return
    least, most = among
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name!s:.60}={value!r:.60}; a whole number from {least} to {most} is needed")
