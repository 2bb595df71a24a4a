"""Read config.json: the settings of a model's text decoder, completed by transformers; refuse what cannot be run.

The file is data: nothing that it names is imported or downloaded. Numbers are checked before loops and memory are as
large as they say.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq_runtime import families
from kvq_runtime.disk import files as disk
from kvq_runtime.families import FULL, RECURRENT, SLIDING, family_of, refusal
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import rope

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LIMIT = 1 << 24  # bytes of a config.json
PROPORTIONAL = "proportional"  # RoPE of a part of the frequencies, the others of angle 0
SIZES = {  # {setting: the least, and the most that any model has, with room}, beside those of the runtime
    **dict.fromkeys(("num_hidden_layers", "num_key_value_heads"), (1, families.MAX_LAYERS)),
    "intermediate_size": (1, 1 << 22),
    "vocab_size": (1, 1 << 26),
    "max_position_embeddings": (1, 1 << 28),
}
APART = {  # settings of models whose layers cannot run one by one
    "num_kv_shared_layers": "layers that share keys and values",
    "hidden_size_per_layer_input": "inputs by layer",
}


def read(folder: Path, id: str) -> dict[str, Any]:
    """Read the settings of a folder's text decoder, transformers' defaults included.

    Raises ValueError for a model that is not calibrated, ArtifactError for a damaged file.
    """
    given = disk.json_object(folder / "config.json", LIMIT)
    text = given.get("text_config")
    for part in (given, text if isinstance(text, dict) else {}):
        if quantized := part.get("quantization_config"):
            method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
            raise ValueError(
                f"{id} has quantized weights, by {method!s:.60}; calibrate the 16-bit model it was made from, or load "
                "it by transformers with dequantize=True, and give the folder of its save_pretrained"
            )
        _check_numbers(id, part)
    if family_of(given) is None:
        raise ValueError(f"{id}: {refusal(given)}")
    whole = _completed(folder, id, given)
    _check_numbers(id, whole)
    _check_layers(id, whole)
    _check_rope(id, whole)
    return whole


def _completed(folder: Path, id: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of text with the defaults that the file leaves to transformers."""
    from transformers.models.auto import modeling_auto

    from kvq_runtime.hf.model import settings_of

    named, kind = given.get("architectures"), given["model_type"]
    known = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind),
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind),
    )
    if named not in [[one] for one in known if one]:
        raise ValueError(
            f"{id}: config.json has architectures={named!r:.60}; of model_type {kind} "
            f"{' or '.join(filter(None, known))} is calibrated"
        )
    try:
        settings = settings_of(transformers_config(folder).get_text_config(decoder=True))
    except Exception as error:  # what transformers raises has many classes
        why = " ".join(str(error).split())
        raise ValueError(f"{id}: config.json is none of its model_type: {why:.200}; download it again") from error
    return {name: value for name, value in settings.items() if name != "_name_or_path"}


def _check_numbers(id: str, config: Mapping[str, Any]) -> None:
    """Refuse numbers of another type, or larger than any model's."""
    try:
        families.check(config)
        for name, bounds in SIZES.items():
            families.check_number(name, config.get(name), bounds)
    except ValueError as error:
        raise ValueError(f"{id}: config.json has {error}; download it again") from None


def _check_layers(id: str, config: Mapping[str, Any]) -> None:
    """Refuse layers of other types, and heads that do not go together."""
    kinds = config.get("layer_types") or []
    other = sorted({str(kind) for kind in kinds} - {FULL, SLIDING, RECURRENT})
    if other:
        raise ValueError(f"{id}: config.json has layers of type {other[0]:.60}; use {FULL}, {SLIDING}, {RECURRENT}")
    if SLIDING in kinds and not config.get("sliding_window"):
        raise ValueError(f"{id}: some of its layers slide, and config.json has no sliding_window")
    for name, what in APART.items():
        if config.get(name):
            raise ValueError(
                f"{id}: config.json has {name}={config[name]!r:.60}; models with {what} are not calibrated: use a "
                "recipe that needs no fit"
            )
    heads, geometry = config["num_attention_heads"], Geometry.from_config(config)
    families.check_number("head_dim", geometry.head_size, families.SIZES["head_dim"])
    if heads % geometry.kv_heads:
        raise ValueError(
            f"{id}: config.json has num_key_value_heads={geometry.kv_heads}; a divisor of num_attention_heads={heads} "
            "is needed"
        )


def _check_rope(id: str, config: Mapping[str, Any]) -> None:
    """Refuse RoPE that cannot be undone."""
    turned = rope.settings(config)
    kind = turned.get("rope_type", turned.get("type", "default"))
    if kind not in (*rope.FIXED_TYPES, PROPORTIONAL):
        raise ValueError(
            f"{id} has RoPE type {kind!r}; supported are {', '.join(rope.FIXED_TYPES)}: types whose frequencies change "
            "with the length have no one key before RoPE"
        )


def auto_class(model_type: str) -> Any:
    """Return the class of transformers that makes a model: of text if its type has one, else of text and images."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return AutoModelForCausalLM if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModelForImageTextToText


def transformers_config(folder: Path) -> "PreTrainedConfig":
    """Read a folder's config.json without what names code: `auto_map`, and an implementation of attention."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    config._attn_implementation = None  # and of those in it
    _forget_code(config)
    return config


def _forget_code(config: "PreTrainedConfig") -> None:
    vars(config).pop("auto_map", None)
    for part in vars(config).values():
        if hasattr(part, "sub_configs"):
            _forget_code(part)
