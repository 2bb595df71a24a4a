"""Refuse settings of a model, as in its config.json, that no model has: loops and memory are as large as they say."""

from collections.abc import Mapping
from typing import Any

LAYERS = 1 << 12
# {setting: the least, and the most that any model has, with room}
SIZES = {
    **dict.fromkeys(("num_hidden_layers", "num_kv_shared_layers"), (0, LAYERS)),
    "num_attention_heads": (1, 1 << 12),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), (0, 1 << 12)),
    "hidden_size": (1, 1 << 20),
    **dict.fromkeys(("head_dim", "global_head_dim"), (0, 1 << 14)),
    "sliding_window": (0, 1 << 28),
}


def check(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a setting that is of another type, or of a size that no model has. None says nothing."""
    if not isinstance(given := config.get("layer_types"), list | tuple | None):
        raise ValueError(f"layer_types={given!r:.60}; a list with one for each layer is needed")
    given = config.get("per_layer_config")
    if given is not None and (not isinstance(given, Mapping) or len(given) > LAYERS):
        raise ValueError(f"per_layer_config={given!r:.60}; an object of at most {LAYERS} is needed")
    by_layer = (given or {}).values()
    for part in (config, *(one for one in by_layer if isinstance(one, Mapping))):
        for name, among in SIZES.items():
            if part.get(name) is not None:
                check_number(name, part[name], among)


def check_number(name: Any, value: Any, among: tuple[int, int] | None) -> None:
    """The same of one setting that is a whole number; `among`: the least and the most, or None: any value will do."""
    if among is None or value is None:
        return
    least, most = among
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name!s:.60}={value!r:.60}; a whole number from {least} to {most} is needed")
