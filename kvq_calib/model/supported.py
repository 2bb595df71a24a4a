"""Refuse models that cannot be captured faithfully, and settings that no model has.

Of the architectures that `files.py` lists the settings in their file are enough; of any other transformers is asked
what it makes of them, and its modules whether they can be run one layer at a time (`architecture.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kvq_calib.model.files import ARCHITECTURES, ModelFiles
from kvq_runtime import settings
from kvq_runtime.ops import rope

PROPORTIONAL = "proportional"  # RoPE of a part of the frequencies, the others of angle 0
SIZES = settings.SIZES | {  # {setting: the least, and the most that any model has, with room}
    "num_hidden_layers": (1, settings.LAYERS),
    "num_key_value_heads": (1, 1 << 12),
    "intermediate_size": (1, 1 << 22),
    "vocab_size": (1, 1 << 26),
    "max_position_embeddings": (1, 1 << 28),
    "altup_num_inputs": (1, 1 << 6),
    "altup_active_idx": (0, (1 << 6) - 1),
    "hc_count": (1, 1 << 6),
    "hc_mult": (1, 1 << 6),
    "index_topk": (1, 1 << 16),
    "router_hidden_size": (1, 1 << 16),
    "hidden_size_per_layer_input": (0, 1 << 16),
    "mamba_chunk_size": (0, 1 << 12),
    "chunk_size": (0, 1 << 12),
}
NEEDED = (
    "num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
Files = TypeVar("Files", bound=ModelFiles)


def check(files: Files) -> Files:
    """Refuse what cannot be captured faithfully; return the model itself, with all settings."""
    files.check_form()
    text = files.config.get("text_config")
    for given in (files.config, text if isinstance(text, dict) else {}):
        _check_numbers(files, given)
    named = files.config.get("architectures")
    found = named[0] if isinstance(named, list) and named else named
    kinds = files.config.get("layer_types")
    if not isinstance(kinds, list | None):
        raise ValueError(
            f"{files.id}: {files.described} has layer_types={kinds!r:.60}; a list of one name a layer is needed"
        )
    own = found in ARCHITECTURES and files.config.get("model_type") in (None, found.removesuffix("ForCausalLM").lower())
    if {"text_config", "auto_map"} & files.config.keys() or not own or _slides(files):
        return _other(files, found)
    _check_sizes(files)
    _check_weights(files)
    return files


def _other(files: Files, named: Any) -> Files:
    """Check a model of another type, by what transformers makes of its settings; return it with all of them."""
    from kvq_calib.model import architecture  # transformers and all that comes with it

    if not architecture.known(files.config):
        if files.config.get("auto_map"):
            kind = files.config.get("model_type")
            raise ValueError(
                f"{files.id} needs code from its own repository (auto_map), as transformers has no {named!s:.60} of "
                f"model_type {kind!s:.60}; kvq runs no remote code: take a model that docs/models.md lists"
            )
        raise ValueError(
            f"{files.id} has architecture {named!s:.60}; supported are {', '.join(ARCHITECTURES)}, and other "
            "decoders of transformers of which some layers attend to every token, and towers of text of models "
            "of images (docs/models.md)"
        )
    found = architecture.settings(files.transformers_config, files.id)
    own = {name: files.config[name] for name in ("architectures", "quantization_config") if name in files.config}
    whole = replace(files, config=found | own)
    _check_sizes(whole)
    architecture.check(whole.transformers_config(), whole.id)
    _check_weights(whole)
    return whole


def _check_numbers(files: ModelFiles, config: Mapping[str, Any], needed: Sequence[str] = ()) -> None:
    """Refuse numbers that are missing, or that no model has: loops and memory are as large as they say."""
    for name, (least, most) in SIZES.items():
        value = config.get(name)
        if value is None and name not in needed:
            continue
        each = [value]
        if name == "intermediate_size" and isinstance(value, list) and len(value) == config.get("num_hidden_layers"):
            each = value  # of each layer
        if any(type(one) is not int or not least <= one <= most for one in each):
            raise ValueError(
                f"{files.id}: {files.described} has {name}={value!r:.60}; a whole number from {least} to {most} is "
                "needed; download it again"
            )


def _check_sizes(files: ModelFiles) -> None:
    """The same, and that heads can share, and RoPE be undone."""
    _check_numbers(files, files.config, NEEDED)
    streams, active = files.config.get("altup_num_inputs") or 1, files.config.get("altup_active_idx") or 0
    if active >= streams:
        raise ValueError(
            f"{files.id}: {files.described} has altup_active_idx={active} and altup_num_inputs={streams}; a whole "
            f"number from 0 to {streams - 1} is needed; download it again"
        )
    heads, of = files.config["num_attention_heads"], files.geometry.kv_heads
    if files.geometry.head_size > SIZES["head_dim"][1]:
        raise ValueError(f"{files.id}: {files.described} has heads of {files.geometry.head_size}; no model has")
    if heads % of:
        raise ValueError(
            f"{files.id}: {files.described} has num_key_value_heads={of}; a divisor of num_attention_heads={heads} is "
            "needed"
        )
    given = files.config.get("rope_parameters") or files.config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ValueError(f"{files.id}: {files.described} has RoPE settings {given!r:.60}; an object is needed")
    turned = rope.settings(files.config)
    kind = turned.get("rope_type", turned.get("type", "default"))
    if kind not in (*rope.FIXED_TYPES, PROPORTIONAL):
        raise ValueError(f"{files.id} has RoPE type {kind!r}; supported are {', '.join(rope.FIXED_TYPES)}: types whose "
                         "frequencies change with the length have no one key before RoPE")  # fmt: skip


def _slides(files: ModelFiles) -> bool:
    """True if some layers may slide over a window, which transformers' own configuration decides."""
    config = files.config
    if files.architecture == "MistralForCausalLM" and "sliding_window" not in config:
        return True  # by transformers' default
    return type(config.get("num_hidden_layers")) is int and len(files.attending) < config["num_hidden_layers"]


def _check_weights(files: ModelFiles) -> None:
    if files.headers is None:
        files.check_files()
    told = [map(files.parameter, files.layer_names(layer)) for layer in files.attending if files.latents]
    if not all(any("kv_a_proj_with_mqa" in name for name in names) for names in told):
        raise ValueError(
            f"{files.id}: its files have no kv_a_proj_with_mqa in a layer, by which an artifact knows its model; use a "
            "recipe that needs no fit, or another model (docs/models.md)"
        )
    count = files.config["num_hidden_layers"]
    missing = [i for i in range(count) if not files.layer_names(i)]
    if missing:
        raise ValueError(f"{files.id}: no weights for layer {missing[0]} of {count}")
