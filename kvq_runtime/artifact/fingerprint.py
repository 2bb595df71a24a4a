"""Recognize the model an artifact was fitted to.

Exactly: layers, KV heads, head size, RoPE parameters, QK-norm. Weights: 8×8 evenly spaced elements of k_proj and v_proj
per layer; ‖found - stored‖ ≤ 2⁻⁷ ‖stored‖ holds for bf16 and fp16 loads of the same weights, and for no others.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvq_runtime import strict_json
from kvq_runtime.errors import ArtifactError
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import HALVES

TOLERANCE = 2.0**-7
QUANTIZED_TOLERANCE = 0.5  # weights rounded to 2 bits are nearer than this to themselves; unrelated ones are not
SIZE = 8
PROJECTIONS = dict(zip(HALVES, ("k_proj", "v_proj"), strict=True))


@dataclass(frozen=True)
class Fingerprint:
    """What is compared between the model of the fit and the model in use.

    rope        rope_type, rope_theta and whatever else the type has, numbers as floats
    probes      {"layers.0.key.fingerprint.probe": float32 [8, 8], ...}; none where the weights are packed codes
    quantized   whether the model's weights are quantized, so that probes are near, not equal
    """

    geometry: Geometry
    rope: Mapping[str, Any]
    qk_norm: bool
    probes: Mapping[str, Tensor]
    quantized: bool = False

    def to_json(self) -> dict:
        """Everything but the probes, which are tensors of the artifact."""
        size = self.geometry
        shape = {"layers": size.layers, "kv_heads": size.kv_heads, "head_size": size.head_size}
        return {"geometry": shape, "rope": dict(self.rope), "qk_norm": self.qk_norm, "quantized": self.quantized}


def from_json(given: Any, probes: Mapping[str, Tensor]) -> Fingerprint:
    """Read what `to_json` wrote; ArtifactError for anything else."""
    strict_json.keys(given, {"geometry", "rope", "qk_norm", "quantized"}, "fingerprint")
    shape = strict_json.keys(given["geometry"], {"layers", "kv_heads", "head_size"}, "fingerprint: geometry")
    if any(type(given[name]) is not bool for name in ("qk_norm", "quantized")) or not isinstance(given["rope"], dict):
        raise ArtifactError("fingerprint: qk_norm and quantized must be true or false, rope an object")
    try:
        geometry = Geometry(**shape)
    except ValueError as error:
        raise ArtifactError(f"fingerprint: {error}") from None
    return Fingerprint(geometry, given["rope"], given["qk_norm"], probes, given["quantized"])


def specs(geometry: Geometry) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Names, shapes and dtypes of the probes in an artifact."""
    return {name: ((SIZE, SIZE), torch.float32) for _, _, name in _names(geometry)}


def _names(geometry: Geometry):
    for layer in range(geometry.layers):
        for half in HALVES:
            yield layer, PROJECTIONS[half], f"layers.{layer}.{half}.fingerprint.probe"


def probe(weight_OI: Tensor) -> Tensor:
    """8×8 elements of a projection, evenly spaced over outputs and inputs: float32 [8, 8]."""
    if weight_OI.dim() != 2 or not weight_OI.is_floating_point():
        raise ValueError(f"a probe needs a float matrix, not {weight_OI.dtype} {list(weight_OI.shape)}; dequantize it")
    rows, columns = (torch.arange(SIZE, device=weight_OI.device) * size // SIZE for size in weight_OI.shape)
    return weight_OI.detach()[rows[:, None], columns].float().cpu()


def from_config(config: Mapping[str, Any], weight: Callable[[int, str], Tensor | None]) -> Fingerprint:
    """Take the fingerprint of a model.

    config   the model's configuration as a dict, as in its config.json
    weight   (layer, "k_proj" or "v_proj") → the matrix [outputs, inputs]; None, or codes of 8 bits, cannot be probed
    """
    heads = config["num_attention_heads"]
    geometry = Geometry(
        layers=config["num_hidden_layers"],
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or config["hidden_size"] // heads,
    )
    normed = str(config.get("model_type", "")).startswith("qwen3") or any(
        config.get(name) for name in ("qk_norm", "use_qk_norm", "qk_layernorm")
    )
    weights = {name: weight(layer, projection) for layer, projection, name in _names(geometry)}
    probes = {name: probe(matrix) for name, matrix in weights.items() if matrix is not None and not _packed(matrix)}
    quantized = bool(config.get("quantization_config")) or len(probes) < len(weights)
    return Fingerprint(geometry, _rope(config), normed, probes, quantized)


def _packed(matrix: Tensor) -> bool:
    return matrix.dim() != 2 or not matrix.is_floating_point() or matrix.itemsize < 2


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE parameters in one form, whether the configuration was written by transformers 4 or 5."""
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "type" in given:
        given.setdefault("rope_type", given.pop("type"))
    defaults = {"rope_type": "default", "rope_theta": config.get("rope_theta") or 10000.0}
    if config.get("partial_rotary_factor") is not None:
        defaults["partial_rotary_factor"] = config["partial_rotary_factor"]
    return _plain(defaults | given)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def differences(stored: Fingerprint, found: Fingerprint) -> list[str]:
    """What differs apart from the weights, a sentence each, naming both sides."""
    shape, other = stored.to_json(), found.to_json()
    return [
        f"{name} is {other[name]} in the model, {shape[name]} in the artifact"
        for name in ("geometry", "rope", "qk_norm")
        if shape[name] != other[name]
    ]


def distances(stored: Fingerprint, found: Fingerprint) -> dict[str, float]:
    """‖found - stored‖ / ‖stored‖ of every probe that both sides have."""
    tiny = torch.finfo(torch.float32).tiny
    return {
        name: float((found.probes[name] - probe).norm() / probe.norm().clamp_min(tiny))
        for name, probe in stored.probes.items()
        if name in found.probes
    }


def compare(stored: Fingerprint, found: Fingerprint, allow_other_weights: bool = False) -> None:
    """Refuse a model that an artifact was not fitted to: ArtifactError naming both sides.

    Weights that differ are an error, or a warning where they are quantized or the user allows them.
    """
    problems = differences(stored, found)
    if problems:
        raise ArtifactError(f"fingerprint: {'; '.join(problems)}; use an artifact fitted to this model")
    far = distances(stored, found)
    worst = max(far, key=lambda name: far[name], default=None)
    quantized = stored.quantized or found.quantized
    if worst is None or len(far) < len(stored.probes):
        warnings.warn("fingerprint: packed weights cannot be compared with the artifact's", stacklevel=2)
    if worst is None or far[worst] <= TOLERANCE:
        return
    layer = re.sub(r"layers\.(\d+)\.(key|value).*", r"layer \1 \2", worst)
    text = f"fingerprint: weights of {layer} differ by {far[worst]:.3g} of their size; {TOLERANCE:.3g} is allowed"
    if allow_other_weights or (quantized and far[worst] <= QUANTIZED_TOLERANCE):
        warnings.warn(f"{text}; errors may be larger than the artifact says", stacklevel=2)
        return
    raise ArtifactError(
        f"{text}; use an artifact fitted to this model, or allow_other_weights=True for a fine-tune of it"
    )
