"""Refuse models of other families than the listed ones, and settings that no model has.

Of the architectures that `files.py` lists the settings in their file are enough; of others transformers completes them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvq_calib.model.files import ARCHITECTURES, ModelFiles
from kvq_runtime import settings
from kvq_runtime.families import FULL, RECURRENT, SLIDING, family_of, refusal
from kvq_runtime.ops import rope

PROPORTIONAL = "proportional"  # RoPE of a part of the frequencies, the others of angle 0
SIZES = settings.SIZES | {  # {setting: the least, and the most that any model has, with room}
    "num_hidden_layers": (1, settings.LAYERS),
    "num_key_value_heads": (1, 1 << 12),
    "intermediate_size": (1, 1 << 22),
    "vocab_size": (1, 1 << 26),
    "max_position_embeddings": (1, 1 << 28),
}
NEEDED = (
    "num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
APART = {  # settings of a family's other models, whose layers are not run one by one
    "num_kv_shared_layers": "layers that share keys and values",
    "hidden_size_per_layer_input": "inputs by layer",
}


def check(files: ModelFiles) -> ModelFiles:
    """Raise ValueError for a model that is not calibrated; return it with all settings."""
    text = files.config.get("text_config")
    both = files.config, text if isinstance(text, dict) else {}
    quantized = next((one["quantization_config"] for one in both if one.get("quantization_config")), None)
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        raise ValueError(
            f"{files.id} has quantized weights, by {method!s:.60}; calibrate the 16-bit model it was made from, or "
            "load it by transformers with dequantize=True, and give the folder of its save_pretrained"
        )
    if family_of(files.config) is None:
        raise ValueError(f"{files.id}: {refusal(files.config)}")
    for given in both:
        _check_numbers(files, given)
    kinds = files.config.get("layer_types")
    if not isinstance(kinds, list | None):
        raise ValueError(f"{files.id}: config.json has layer_types={kinds!r:.60}; a list of one name a layer is needed")
    named = files.config.get("architectures")
    found = named[0] if isinstance(named, list) and named else named
    own = found in ARCHITECTURES and files.config["model_type"] == found.removesuffix("ForCausalLM").lower()
    whole = files if own and not text and not _may_slide(files) else _completed(files)
    _check_sizes(whole)
    for name, what in APART.items():
        if whole.config.get(name):
            raise ValueError(
                f"{files.id}: config.json has {name}={whole.config[name]!r:.60}; models with {what} are not "
                "calibrated: use a recipe that needs no fit"
            )
    _check_weights(whole)
    return whole


def _completed(files: ModelFiles) -> ModelFiles:
    """Return the model with the settings of text that its file leaves to transformers."""
    from transformers.models.auto import modeling_auto  # and all that comes with it

    from kvq_runtime.hf.model import settings_of

    named, kind = files.config.get("architectures"), files.config["model_type"]
    of_text = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    of_images = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind)
    if named not in ([of_text], [of_images]):
        raise ValueError(
            f"{files.id}: config.json has architectures={named!r:.60}; of model_type {kind} "
            f"{' or '.join(filter(None, (of_text, of_images)))} is calibrated"
        )
    try:
        text = settings_of(files.transformers_config().get_text_config(decoder=True))
    except Exception as error:  # what transformers raises has many classes
        said = " ".join(str(error).split())
        raise ValueError(
            f"{files.id}: config.json is none of its model_type: {said:.200}; download it again"
        ) from error
    return replace(files, config=text | {"architectures": named})


def _check_numbers(files: ModelFiles, config: Mapping[str, Any], needed: Sequence[str] = ()) -> None:
    """Refuse numbers that are missing, or that no model has: loops and memory are as large as they say."""
    for name, (least, most) in SIZES.items():
        value = config.get(name)
        if value is None and name not in needed:
            continue
        if type(value) is not int or not least <= value <= most:
            raise ValueError(
                f"{files.id}: config.json has {name}={value!r:.60}; a whole number from {least} to {most} is "
                "needed; download it again"
            )


def _check_sizes(files: ModelFiles) -> None:
    """Refuse sizes that do not go together, and RoPE that cannot be undone."""
    _check_numbers(files, files.config, NEEDED)
    kinds = files.config.get("layer_types") or []
    other = sorted({str(kind) for kind in kinds} - {FULL, SLIDING, RECURRENT})
    if other:
        raise ValueError(
            f"{files.id}: config.json has layers of type {other[0]:.60}; use {FULL}, {SLIDING}, {RECURRENT}"
        )
    if SLIDING in kinds and not files.config.get("sliding_window"):
        raise ValueError(f"{files.id}: some of its layers slide, and config.json has no sliding_window")
    heads, of = files.config["num_attention_heads"], files.geometry.kv_heads
    if files.geometry.head_size > SIZES["head_dim"][1]:
        raise ValueError(f"{files.id}: config.json has heads of {files.geometry.head_size}; no model has")
    if heads % of:
        raise ValueError(
            f"{files.id}: config.json has num_key_value_heads={of}; a divisor of num_attention_heads={heads} is needed"
        )
    given = files.config.get("rope_parameters") or files.config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ValueError(f"{files.id}: config.json has RoPE settings {given!r:.60}; an object is needed")
    turned = rope.settings(files.config)
    kind = turned.get("rope_type", turned.get("type", "default"))
    if kind not in (*rope.FIXED_TYPES, PROPORTIONAL):
        raise ValueError(f"{files.id} has RoPE type {kind!r}; supported are {', '.join(rope.FIXED_TYPES)}: types whose "
                         "frequencies change with the length have no one key before RoPE")  # fmt: skip


def _may_slide(files: ModelFiles) -> bool:
    """True if some layers may slide over a window, which transformers' own configuration decides."""
    config = files.config
    if files.architecture == "MistralForCausalLM" and "sliding_window" not in config:
        return True  # by transformers' default
    return type(config.get("num_hidden_layers")) is int and len(files.attending) < config["num_hidden_layers"]


def _check_weights(files: ModelFiles) -> None:
    if files.headers is None:
        files.check_files()
    count = files.config["num_hidden_layers"]
    missing = [i for i in range(count) if not files.layer_names(i)]
    if missing:
        raise ValueError(f"{files.id}: no weights for layer {missing[0]} of {count}")
