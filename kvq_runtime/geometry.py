"""The shape of a model's cache, and the tokens that a recipe keeps exact: the numbers every codec is built from.

Shape letters, as suffixes of tensor names in memory order, everywhere in kvq:
B batch · L layers · H KV heads · G query heads per KV head · T tokens · D head size · C = H·D, all KV heads
of one token · N blocks or rows · R rank · K positions inside a group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

from kvq_runtime.families import SLIDING, attending, layer_types, owners, refusal

Role = Literal["key", "value"]
ROLES: tuple[Role, ...] = get_args(Role)

OTHERWISE = ("kv_lora_rank", "compress_rates", "compress_ratios")  # settings of models that cache latents, or entries
SLAB = 32  # blocks that are stored, addressed and decoded together; the last slab of a layer may have fewer
# sides of a square that is one tile of a matrix product, and fits into registers and shared memory whole
MATRIX_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class Geometry:
    """The shape of one model's cache: `layers` × `kv_heads` × `head_size` keys per token, and as many values.

    Its layers are those that attend to all tokens (`attending`), numbered from 0 on whatever stands between them.
    """

    layers: int
    kv_heads: int
    head_size: int

    def __post_init__(self):
        for field in ("layers", "kv_heads", "head_size"):
            number = getattr(self, field)
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ValueError(f"{field}={number!r}; a geometry needs whole numbers of at least 1")

    @staticmethod
    def from_config(config: Mapping[str, Any], layers: Sequence[int] | None = None) -> "Geometry":
        """Return the shape of a model, from its configuration as in config.json. ValueError if no layer attends to all.

        layers   those that do, if they are known
        """
        if (other := next((name for name in OTHERWISE if config.get(name)), None)) is not None:
            raise ValueError(f"{refusal(config)}: {other} says that it caches otherwise than by head")
        layers = attending(config) if layers is None else layers
        if not layers:
            raise ValueError(
                "no layer of this model attends to all tokens: there is nothing that kvq would compress; "
                "docs/models.md lists the families that are served"
            )
        shapes = {_shape(config, layer) for layer in layers}
        if len(shapes) > 1:
            raise ValueError(
                f"layers that attend to all tokens have other shapes, (KV heads, head size) = {sorted(shapes)}; kvq "
                "takes those of one shape alone"
            )
        return Geometry(len(layers), *shapes.pop())

    def __str__(self) -> str:
        return f"{self.layers} layers of {self.kv_heads} KV heads of {self.head_size} channels"

    @property
    def shape(self) -> dict[str, int]:
        """Its numbers as artifacts and kept prefixes have them."""
        return {"layers": self.layers, "kv_heads": self.kv_heads, "head_size": self.head_size}

    @property
    def width(self) -> int:
        """C: all KV heads of one token side by side."""
        return self.kv_heads * self.head_size

    def group_size(self, group: str | int, width: int) -> int:
        """Elements per group of a quantizer in vectors of `width`: a number, those of a head, or "all", which is the
        largest power of two, at most 1024, that divides it."""
        if group == "head" and width == self.width:
            return self.head_size
        if isinstance(group, str):
            return min(width & -width, 1024)
        if width % group:
            fitting = [n for n in range(1, width + 1) if width % n == 0]
            raise ValueError(f"group={group} does not divide {width}; use one of {fitting}")
        return group


def check_group(group: str | int) -> None:
    """Raise a ValueError for a group setting that no geometry allows."""
    if isinstance(group, str) and group not in ("all", "head"):
        raise ValueError(f'group={group!r}; use "all", "head" or a whole number')
    if isinstance(group, bool) or (isinstance(group, int) and group < 1):
        raise ValueError(f"group={group!r}; use at least 1")


def _shape(config: Mapping[str, Any], layer: int, slides: bool = False) -> tuple[int, int]:
    """KV heads and head size of a layer that attends to all tokens, or slides.

    Gemma 4 has other heads where all tokens are attended to: `global_head_dim` in its files, and by layer, under
    numbers that may have leading zeros, once transformers has read them.
    """
    by_layer = config.get("per_layer_config") or {}
    part = next((part for n, part in by_layer.items() if str(n).lstrip("0") == str(layer).lstrip("0")), None)
    of_layer = part if isinstance(part, Mapping) else {}
    kv_heads, size = config.get("num_key_value_heads"), config.get("head_dim")
    if not slides:
        shared = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
        kv_heads, size = shared or kv_heads, config.get("global_head_dim") or size
    kv_heads, size = of_layer.get("num_key_value_heads") or kv_heads, of_layer.get("head_dim") or size
    heads = config["num_attention_heads"]
    return kv_heads or heads, size or config["hidden_size"] // heads  # in files of Mistral head_dim may be null


@dataclass(frozen=True)
class Sliding:
    """Layers that slide over a window: transformers holds their newest `window` tokens, in 16 bits."""

    layers: int = 0
    width: int = 0
    window: int = 1

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> "Sliding":
        """Return the sliding layers of a model; none where its other layers do not slide."""
        window, kinds = config.get("sliding_window"), layer_types(config)
        sliding = [n for n, kind in enumerate(kinds[: owners(config)]) if kind == SLIDING]
        if not sliding or type(window) is not int or window < 1:
            return NONE_SLIDE
        heads, size = _shape(config, sliding[0], slides=True)
        return Sliding(len(sliding), heads * size, window)

    def bytes(self, tokens: int) -> int:
        """Count the bytes of a row of this length, after a step; from a prompt to the next step all of it is held."""
        return 4 * self.layers * self.width * min(tokens, self.window)


NONE_SLIDE = Sliding()


def stretches(config: Mapping[str, Any]) -> list[range]:
    """The model's layers that belong to each of the geometry: those below it as far as the next, last it, and above the
    last one all that follow."""
    ends = [layer + 1 for layer in attending(config)]
    return [range(a, b) for a, b in pairwise([0, *ends[:-1], config["num_hidden_layers"]])]


# layers, KV heads and head size of the models of kvq_calib's catalog, by kvq's name, as their config.json say
MODELS: dict[str, Geometry] = {
    name: Geometry(*shape)
    for name, shape in {
        "demo": (6, 2, 64),
        "qwen2.5-0.5b": (24, 2, 64),
        "qwen2.5-1.5b": (28, 2, 128),
        "qwen2.5-3b": (36, 2, 128),
        "qwen2.5-7b": (28, 4, 128),
        "qwen2.5-14b": (48, 8, 128),
        "qwen2.5-32b": (64, 8, 128),
        "qwen2.5-72b": (80, 8, 128),
        "qwen3-0.6b": (28, 8, 128),
        "qwen3-1.7b": (28, 8, 128),
        "qwen3-4b": (36, 8, 128),
        "qwen3-8b": (36, 8, 128),
        "qwen3-14b": (40, 8, 128),
        "qwen3-32b": (64, 8, 128),
        "llama-3.1-8b": (32, 8, 128),
        "llama-3.1-70b": (80, 8, 128),
        "llama-3.2-1b": (16, 8, 64),
        "llama-3.2-3b": (28, 8, 128),
        "mistral-7b-v0.3": (32, 8, 128),
        "smollm2-135m": (30, 3, 64),
        "qwen2.5-coder-0.5b": (24, 2, 64),
        "qwen2.5-coder-1.5b": (28, 2, 128),
    }.items()
}


@dataclass(frozen=True)
class Window:
    """The tokens of every row that stay exact, and the number that are encoded together.

    sinks    first tokens of every row, 0 to 2^20
    recent   newest tokens, at least this number, 0 to 2^20
    block    tokens that are encoded together, 1 to 2^20
    """

    sinks: int = 4
    recent: int = 128
    block: int = 128

    def __post_init__(self):
        for name, least in (("sinks", 0), ("recent", 0), ("block", 1)):
            setting = getattr(self, name)
            if not isinstance(setting, int) or isinstance(setting, bool) or not least <= setting <= 1 << 20:
                raise ValueError(f"{name}={setting!r}; use a whole number from {least} to {1 << 20}")
