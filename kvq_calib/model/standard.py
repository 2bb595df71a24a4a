"""What the decoders of the listed families have in common: one attention a layer, keys and values by head, one pass."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from kvq_runtime.families import ATTENTION, LAYERS
from kvq_runtime.families import FULL as FULL_ATTENTION
from kvq_runtime.families import SLIDING as SLIDING_ATTENTION
from kvq_runtime.hf.model import CACHE

ENTRIES, LATENTS = "entries of several tokens", "latents"  # no listed family caches either
WHOLE, SLIDES = (FULL_ATTENTION,), (SLIDING_ATTENTION,)


def joined(_config: Mapping[str, Any]) -> None:
    """None: keys and values are cached by head."""


def caching(_config: Mapping[str, Any]) -> int:
    """The attentions of a layer."""
    return 1


def looped(_config: Mapping[str, Any]) -> list[int]:
    """The layers that a pass goes through again: none."""
    return []


def visits(config: Mapping[str, Any]) -> Sequence[int]:
    """The layers in the order of a pass."""
    return range(config["num_hidden_layers"])


def place_of(_config: Mapping[str, Any], layer: int) -> int:
    """The place of a layer in its decoder."""
    return layer


def layers_name(_decoder: Any) -> str:
    """The decoder's name for its layers."""
    return LAYERS


def attention_of(layer: Any, _number: int = 0, _count: int = 1) -> Any:
    """The attention of a layer; None of one that has none."""
    return getattr(layer, ATTENTION, None)


def cache_name(_module: Any) -> str:
    """The argument by which a module is handed a cache."""
    return CACHE


def rotary_name(decoder: Any) -> str | None:
    """The decoder's name of the module that makes rotations."""
    return "rotary_emb" if hasattr(decoder, "rotary_emb") else None


def turns(rotary: Any, x: Tensor, positions_BT: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the layers that attend to all tokens, as the model's module gives them, for the dtype of `x`."""
    if hasattr(rotary, "mrope_section"):  # of time, height and width, which text has the same
        positions_BT = positions_BT.expand(len(rotary.mrope_section), *positions_BT.shape)
    return rotary(x, positions_BT, *([] if hasattr(rotary, "inv_freq") else [FULL_ATTENTION]))


def plain_of(layer: Any) -> dict[str, Any]:
    """What a decoder may read of a layer, which it does not call: attributes of plain types, those of its class too."""
    parts = *(vars(one) for one in reversed(type(layer).__mro__)), vars(layer)
    found = {name: value for part in parts for name, value in part.items() if not name.startswith("__")}
    return {name: value for name, value in found.items() if type(value) in (bool, int, str)}


def none(*_given: Any) -> None:
    """None: the question of an exotic decoder, asked of a listed family."""
