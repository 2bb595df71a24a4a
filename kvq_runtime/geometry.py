"""The shape of a model's cache, and the tokens that a recipe keeps exact: the numbers every codec is built from.

Shape letters, as suffixes of tensor names in memory order, everywhere in kvq:
B batch · L layers · H KV heads · G query heads per KV head · T tokens · D head size · C = H·D, all KV heads
of one token · N blocks or rows · R rank · K positions inside a group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

from kvq_runtime import settings
from kvq_runtime.families import FULL, PLAIN, SLIDING, Family, family_of, refusal

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
            given = getattr(self, field)
            if not isinstance(given, int) or isinstance(given, bool) or given < 1:
                raise ValueError(f"{field}={given!r}; a geometry needs whole numbers of at least 1")

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> "Geometry":
        """The shape of a model, from its configuration as in config.json. ValueError if no layer attends to all."""
        if (other := next((name for name in OTHERWISE if config.get(name)), None)) is not None:
            raise ValueError(f"{refusal(config)}: {other} says that it caches otherwise than by head")
        layers = attending(config)
        if not layers:
            kinds = config.get("layer_types")
            told = sorted({f"{kind!s:.40}" for kind in kinds}) if isinstance(kinds, (list, tuple)) else []
            of = f" alone (their types: {', '.join(told[:4])})" if told else ""
            raise ValueError(
                f"no layer of this model attends to all tokens{of}: there is nothing that kvq would compress; "
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
    """KV heads and head size of a layer that attends to all tokens, or slides."""
    given = config.get("per_layer_config")
    by_layer = {str(n).lstrip("0"): one for n, one in given.items()} if isinstance(given, Mapping) else {}
    found = by_layer.get(str(layer).lstrip("0"))
    own = found if isinstance(found, Mapping) else {}
    kv_heads, size = config.get("num_key_value_heads"), config.get("head_dim")
    if not slides:  # Gemma 4 has other heads there: by layer, or as its files say it
        shared = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
        kv_heads = shared or kv_heads
        size = config.get("global_head_dim") or size
    kv_heads, size = own.get("num_key_value_heads") or kv_heads, own.get("head_dim") or size
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
        """Those of a model; none of one whose other layers do not slide."""
        window, kinds = config.get("sliding_window"), layer_types(config)
        sliding = [n for n, kind in enumerate(kinds[: owners(config)]) if kind == SLIDING]
        if not sliding or type(window) is not int or window < 1:
            return NONE_SLIDE
        heads, size = _shape(config, sliding[0], slides=True)
        return Sliding(len(sliding), heads * size, window)

    def bytes(self, tokens: int) -> int:
        """Bytes of a row of this length, after a step; from a prompt to the next step all of it is held."""
        return 4 * self.layers * self.width * min(tokens, self.window)


NONE_SLIDE = Sliding()


def owners(config: Mapping[str, Any]) -> int:
    """The number of layers, the first ones, that cache keys and values; those above them read what the last of their
    type has (Gemma 4's E2B and E4B)."""
    count, shared = config["num_hidden_layers"], config.get("num_kv_shared_layers") or 0
    if type(count) is not int or type(shared) is not int or not 0 <= shared < max(1, count):
        given = f"num_hidden_layers={count!r:.60}" + (f", num_kv_shared_layers={shared!r:.60}" if shared else "")
        raise ValueError(f"{given}; a whole number is needed" + (", and fewer that share" if shared else ""))
    return count - shared


def layer_types(config: Mapping[str, Any]) -> Sequence[str]:
    """The type of each layer, which config.json may leave to transformers.

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


def stretches(config: Mapping[str, Any]) -> list[range]:
    """The model's layers that belong to each of the geometry: those below it as far as the next, last it, and above the
    last one all that follow."""
    ends = [layer + 1 for layer in attending(config)]
    return [range(a, b) for a, b in pairwise([0, *ends[:-1], config["num_hidden_layers"]])]


def _models() -> dict[str, Geometry]:
    """Layers, KV heads and head size of models, by kvq's name for them."""
    shapes = {
        "demo": {"": (6, 2, 64)},
        "qwen2.5-": {
            **{"0.5b": (24, 2, 64), "1.5b": (28, 2, 128), "3b": (36, 2, 128), "7b": (28, 4, 128)},
            **{"14b": (48, 8, 128), "32b": (64, 8, 128), "72b": (80, 8, 128)},
        },
        "qwen3-": {
            **{"0.6b": (28, 8, 128), "1.7b": (28, 8, 128), "4b": (36, 8, 128), "8b": (36, 8, 128)},
            **{"14b": (40, 8, 128), "32b": (64, 8, 128)},
        },
        "llama-3.1-": {"8b": (32, 8, 128), "70b": (80, 8, 128)},
        "llama-3.2-": {"1b": (16, 8, 64), "3b": (28, 8, 128)},
        "mistral-": {"7b-v0.3": (32, 8, 128)},
        "smollm2-": {"135m": (30, 3, 64)},
    }
    return {f"{family}{size}": Geometry(*shape) for family, sizes in shapes.items() for size, shape in sizes.items()}


MODELS: dict[str, Geometry] = _models()  # of the catalog of kvq_calib, as their config.json say


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
