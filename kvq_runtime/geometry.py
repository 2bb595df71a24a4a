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

Role = Literal["key", "value"]
ROLES: tuple[Role, ...] = get_args(Role)

BLOCKS = "minimax_m3_sparse"  # of layers whose queries read blocks of tokens, by KV head, that an indexer chooses
POOLED = "compressed_sparse_attention"  # of those that cache one entry for `rate` tokens (DeepSeek V4)
INDEXED = ("indexed_attention", BLOCKS, POOLED)  # of all whose queries read what is chosen by keys of an indexer
# types of layers that cache all tokens: the second in files of Granite 4, the third recur too
WHOLE = ("full_attention", "attention", "hybrid", *INDEXED)
HEAVY = "heavily_compressed_attention"  # of those that cache such entries too, of so many tokens that they stay 16-bit
# of those to the newest: of a window, of a chunk (Llama 4); the last recur too
SLIDES = ("sliding_attention", "chunked_attention", HEAVY, "hybrid_sliding")
MIMO, LONGCAT = "mimo_v2_flash", "longcat_flash"
LATENTS = "latents"  # of multi-head latent attention (MLA)
ENTRIES = "entries of several tokens"  # of layers of type POOLED
# settings of a pass that goes through some layers again: how often, from which one, to which one, but for how many
LOOPS = (
    ("n_recurrent_loops", "n_input_layers", "num_hidden_layers", "n_output_layers"),
    ("loop_num_passes", "loop_layer_index_start", "loop_layer_index_end", ""),
)
MOST_PASSES = 64
SLAB = 32  # blocks that are stored, addressed and decoded together; the last slab of a layer may have fewer
# sides of a square that is one tile of a matrix product, and fits into registers and shared memory whole
MATRIX_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class Geometry:
    """The shape of one model's cache: `layers` × `kv_heads` × `head_size` keys per token, and as many values.

    Its layers are those that attend to all tokens (`attending`), numbered from 0 on whatever stands between them.
    They may cache one entry for `rate` tokens: entries are what sinks, windows and blocks then have in tokens' place.
    """

    layers: int
    kv_heads: int
    head_size: int
    rate: int = 1

    def __post_init__(self):
        for field in ("layers", "kv_heads", "head_size", "rate"):
            given = getattr(self, field)
            if not isinstance(given, int) or isinstance(given, bool) or given < 1:
                raise ValueError(f"{field}={given!r}; a geometry needs whole numbers of at least 1")

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> "Geometry":
        """The shape of a model, from its configuration as in config.json. ValueError if no layer attends to all."""
        layers = attending(config)
        if not layers:
            kinds = _kinds(config)
            told = sorted({f"{kind!s:.40}" for kind in kinds}) if isinstance(kinds, (list, tuple)) else []
            of = f" alone (their types: {', '.join(told[:4])})" if told else ""
            raise ValueError(
                f"no layer of this model attends to all tokens{of}: there is nothing that kvq would compress; "
                "docs/models.md lists the architectures that work"
            )
        order = visits(config)
        shapes = {_shape(config, order[layer]) for layer in layers}
        if len(shapes) > 1:
            raise ValueError(
                f"layers that attend to all tokens have other shapes, (KV heads, head size) = {sorted(shapes)}; kvq "
                "takes those of one shape alone"
            )
        return Geometry(len(layers), *shapes.pop(), _rates(config).get(POOLED, 1))

    def __str__(self) -> str:
        return f"{self.layers} layers of {self.kv_heads} KV heads of {self.head_size} channels"

    @property
    def shape(self) -> dict[str, int]:
        """Its numbers as artifacts and kept prefixes have them; of tokens, unless they say the rate."""
        rate = {"rate": self.rate} if self.rate > 1 else {}
        return {"layers": self.layers, "kv_heads": self.kv_heads, "head_size": self.head_size} | rate

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


def _shape(config: Mapping[str, Any], layer: int | None = None, slides: bool = False) -> tuple[int, int]:
    """KV heads and head size of a layer that caches all tokens, or slides; without one, of all that its type has."""
    given = config.get("per_layer_config")
    by_layer = {str(n).lstrip("0"): one for n, one in given.items()} if isinstance(given, Mapping) else {}
    found = by_layer.get(str(layer).lstrip("0"))
    own = found if isinstance(found, Mapping) else {}
    config = {**config, **own}
    if slides:  # MiMo V2 Flash's, of twice the heads; Dots 3 Note's, which have latents of their own
        if config.get("model_type") == MIMO:
            config["num_key_value_heads"] *= 2
        config |= {name.removeprefix("swa_"): one for name, one in config.items() if name.startswith("swa_")}
    if rank := config.get("kv_lora_rank"):  # a row of latent and rotary key for all heads: `hf/attention.py`
        return 1, (rank + (config.get("qk_rope_head_dim") or 0)) // 2
    if _rates(config):  # of an entry, likewise
        return 1, config["head_dim"] // 2
    kv_heads, size = config.get("num_key_value_heads"), config.get("head_dim")
    if config.get("multi_query") and not config.get("new_decoder_architecture"):  # of Falcon
        kv_heads = 1
    if not slides:  # of Gemma 4 these have heads of their own: by layer, or as its files say it
        shared = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
        kv_heads = own.get("num_key_value_heads") or shared or kv_heads
        size = own.get("head_dim") or config.get("global_head_dim") or size
    heads = config["num_attention_heads"]
    size = size or config["hidden_size"] // heads  # of Mistral head_dim may be null
    return kv_heads or heads, (size + (config.get("v_head_dim") or size)) // 2


def joined(config: Mapping[str, Any]) -> str | None:
    """What the layers of a model cache as one row of a token, half of which is stored as keys are, the other half as
    values (`hf/attention.py`); None: they cache keys and values of one size."""
    if config.get("kv_lora_rank"):
        return LATENTS
    if _rates(config):
        return ENTRIES
    if not config.get("v_head_dim"):  # 0: of models whose type may have latents, and that have none
        return None
    keys = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return None if config["v_head_dim"] == keys else "keys and values of different widths"


@dataclass(frozen=True)
class Sliding:
    """Layers that slide over a window: transformers holds their newest `window` tokens, in 16 bits; and `indexed`, the
    bytes of a token in keys of indexers, which are not compressed either."""

    layers: int = 0
    width: int = 0
    window: int = 1
    indexed: int = 0

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> "Sliding":
        """Those of a model; none of one whose other layers do not slide."""
        if rates := _rates(config):
            return Pooling.of(config, rates)
        indexed = _indexed(config)
        names = "sliding_window", "sliding_window_size", "attention_chunk_size"
        kinds, window = _kinds(config), next((config[name] for name in names if config.get(name)), None)
        if config.get("model_type") == MIMO and config.get("sliding_window_size"):  # without the query's own token
            window = config["sliding_window_size"] + 1
        count, first = owners(config) - len(attending(config)), None
        if isinstance(kinds, (list, tuple)):
            sliding = [n for n, kind in enumerate(kinds[: owners(config)]) if kind in SLIDES]
            count, first = len(sliding), next((visits(config)[n] for n in sliding), None)
        if not count or type(window) is not int or window < 1:
            return Sliding(indexed=indexed)
        heads, size = _shape(config, first, slides=True)
        return Sliding(count, heads * size, window, indexed)

    def bytes(self, tokens: int) -> int:
        """Bytes of a row of this length, after a step; from a prompt to the next step all of it is held."""
        return 4 * self.layers * self.width * min(tokens, self.window) + self.indexed * tokens


NONE_SLIDE = Sliding()


@dataclass(frozen=True)
class Pooling(Sliding):
    """The same of DeepSeek V4: a window in every layer, and what stands beside the entries that are compressed.

    sparse, heavy      of the layers, those whose entries are compressed, and those whose are not; windows of both are
                       keys and values at once
    rate, heavy_rate   tokens of an entry of theirs, at least 1
    index              channels of an entry of an indexer, which sparse layers have
    """

    sparse: int = 0
    heavy: int = 0
    rate: int = 1
    heavy_rate: int = 1
    index: int = 0

    @staticmethod
    def of(config: Mapping[str, Any], rates: Mapping[str, int]) -> "Pooling":
        """That of a configuration, by the tokens of an entry of each type of layer."""
        count = config["num_hidden_layers"]
        kinds: list[Any] = [*(_kinds(config) or ())][:count]
        own = kinds.count(POOLED), kinds.count(HEAVY), rates.get(POOLED, 1), rates.get(HEAVY, 1)
        settings.check_number("sliding_window", window := config["sliding_window"], settings.TOKENS)
        return Pooling(count, config["head_dim"], window, 0, *own, config.get("index_head_dim") or 0)

    def bytes(self, tokens: int) -> int:
        """The same. Of tokens that are yet to make an entry, and of those of the last one that go into the next, a row
        and a gate are held, which is in 32 bits there."""
        channels, far = self.sparse * (self.width + self.index), self.heavy * self.width  # of entries in all layers
        found = super().bytes(tokens) - 2 * (self.sparse + self.heavy) * self.width * min(tokens, self.window)
        found += 8 * channels * ((tokens - 1) % self.rate + 1) + 4 * far * ((tokens - 1) % self.heavy_rate + 1)
        found += 6 * channels * self.rate if tokens >= self.rate else 0
        return found + 2 * self.sparse * self.index * (tokens // self.rate) + 2 * far * (tokens // self.heavy_rate)


def _kinds(config: Mapping[str, Any]) -> Any:
    """The types of layers, which files of DeepSeek V4 say by the tokens of an entry."""
    ratios, kinds = config.get("compress_ratios"), config.get("layer_types")
    named = {0: "sliding_attention", 4: POOLED, 128: HEAVY}
    if isinstance(ratios, list):
        return [named.get(one) if type(one) is int else None for one in ratios]
    if not looped(config) or not isinstance(kinds, (list, tuple)):
        return kinds
    if len(kinds) < config["num_hidden_layers"]:
        raise ValueError(f"layer_types has {len(kinds)} for {config['num_hidden_layers']} layers; one each is needed")
    return [kinds[n] for n in visits(config)]


def _rates(config: Mapping[str, Any]) -> Mapping[str, int]:
    """The tokens of an entry by type of layer, of DeepSeek V4; none of others."""
    given = config.get("compress_rates")
    fixed = {POOLED: 4, HEAVY: 128}
    return given or (fixed if config.get("model_type") == "deepseek_v4" else {})


def _indexed(config: Mapping[str, Any]) -> int:
    """Bytes of a token in the keys of indexers, in 16 bits, of all layers that have one and share no other's choice."""
    if blocks := sum(kind == BLOCKS for kind in config.get("layer_types") or ()):
        return 2 * blocks * config["index_head_dim"]
    kinds = config.get("indexer_types") or config.get("index_topk_pattern")
    if isinstance(kinds, (list, tuple, str)):
        own = [n for n in attending(config) if n >= len(kinds) or kinds[n] not in ("shared", "S")]
    else:  # as files of GLM 5 say it, and of HY 4 leave to the type
        every = config.get("index_topk_freq") or (4 if str(config.get("model_type")).startswith("hy_v4") else 1)
        start = config.get("index_skip_topk_offset")
        start = 2 if start is None else start
        own = [n for n in attending(config) if max(n - start + 1, 0) % every == 0]
    if not config.get("index_topk"):  # of Qwen 4, with the token's three positions beside
        return 2 * len(own) * config["indexer_head_dim"] + 24 if config.get("indexer_head_dim") else 0
    size = config["index_head_dim"]
    return 2 * len(own) * (2 * size + 1 if config.get("index_kpool") else size)  # of GLM 5.3 with gates, and a mark


def owners(config: Mapping[str, Any]) -> int:
    """Of how many layers, the first, keys and values are cached; those above them read what the last of their type has
    (Gemma 3n)."""
    count, shared = config["num_hidden_layers"], config.get("num_kv_shared_layers") or 0
    if type(count) is not int or type(shared) is not int or not 0 <= shared < max(1, count):
        given = f"num_hidden_layers={count!r:.60}" + (f", num_kv_shared_layers={shared!r:.60}" if shared else "")
        raise ValueError(f"{given}; a whole number is needed" + (", and fewer that share" if shared else ""))
    return count - shared + len(looped(config))


def looped(config: Mapping[str, Any]) -> list[int]:
    """The layers that a pass goes through again, as often as it does: what they cache then has layers of its own behind
    those of the model (Dory, Inkling 2 Loop)."""
    names = next((names for names in LOOPS if config.get(names[0])), None)
    if names is None:
        return []
    given: list[Any] = [config.get(name) if name else 0 for name in (*names, "num_hidden_layers")]
    passes, start, stop, left, count = given
    if any(type(one) is not int for one in given) or not (
        1 <= passes <= MOST_PASSES and 0 <= start <= stop - left <= stop <= count
    ):
        said = ", ".join(f"{name}={one!r:.60}" for name, one in zip(names, given, strict=False) if name)
        raise ValueError(f"{said}; whole numbers are needed, of {count!r:.60} layers and {MOST_PASSES} passes at most")
    return [*range(start, stop - left)] * (passes - 1)


def filled(config: Mapping[str, Any]) -> Sequence[int]:
    """The layers of a cache in the order in which a pass fills them."""
    again, count = looped(config), config["num_hidden_layers"]
    if not again:
        return range(count)
    return [*range(again[-1] + 1), *range(count, count + len(again)), *range(again[-1] + 1, count)]


def visits(config: Mapping[str, Any]) -> Sequence[int]:
    """The layers of the model in the order of a pass, which may go through some again: wherever layers are numbered,
    each time counts as one."""
    again, order = looped(config), filled(config)
    return [[*range(config["num_hidden_layers"]), *again][n] for n in order] if again else order


def attending(config: Mapping[str, Any]) -> Sequence[int]:
    """The layers that cache all tokens, by their number in a pass through the model; the others slide over a window,
    recur, or read what a layer below them caches.

    config   as in config.json, which may leave out what transformers knows of its type; or with its defaults

    Raises ValueError for settings that no model has.
    """
    settings.check(config)
    count, kinds = owners(config), _kinds(config)
    if isinstance(kinds, (list, tuple)):
        return [n for n, kind in enumerate(kinds[:count]) if kind in WHOLE]
    chosen = config.get("full_attn_idxs", config.get("attn_layer_indices"))
    interval, slides = config.get("full_attention_interval"), config.get("hybrid_layer_pattern")
    if isinstance(slides, list):  # as files of MiMo V2 Flash
        return [n for n, one in enumerate(slides[:count]) if not one]
    if isinstance(chosen, list):  # as files of LFM2 and Bamba say it
        return sorted({n for n in chosen if type(n) is int and 0 <= n < count})
    if type(interval) is int and interval > 0:  # as files of Qwen3-Next
        return range(interval - 1, count, interval)
    first, pattern = config.get("max_window_layers"), config.get("sliding_window_pattern")
    if config.get("model_type") == "gemma2":  # whose files leave it to the type
        pattern = pattern or 2
    if config.get("sliding_window") is None or not config.get("use_sliding_window", first is None):
        return range(count)  # of Qwen's models windows are off unless asked for
    if type(pattern) is int and pattern > 0:  # as files of Gemma 3 say it
        return range(pattern - 1, count, pattern)
    return range(min(count, first) if type(first) is int else 0)


def caching(config: Mapping[str, Any]) -> int:
    """How many attentions a layer of the model has, each a layer of the cache: two of LongCat Flash, of which
    `num_hidden_layers` counts these, and `num_layers` its own."""
    return 2 if config.get("model_type") == LONGCAT else 1


def stretches(config: Mapping[str, Any]) -> list[range]:
    """The model's layers that belong to each of the geometry: those below it as far as the next, last it, and above the
    last one all that follow."""
    ends = [layer + 1 for layer in attending(config)]
    return [range(a, b) for a, b in pairwise([0, *ends[:-1], len(visits(config))])]


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
_VOCABULARIES = {
    **{"demo": 2048, "qwen2.5-": 151936, "qwen3-": 151936, "llama-3": 128256, "mistral-": 32768},
    "smollm2-": 49152,
    **dict.fromkeys(("qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "qwen2.5-72b"), 152064),
}
# {model: tokens of its vocabulary}, the rows of its embedding
VOCABULARIES = {name: _VOCABULARIES[max(filter(name.startswith, _VOCABULARIES), key=len)] for name in MODELS}


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
