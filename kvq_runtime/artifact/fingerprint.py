"""Recognize the model an artifact was fitted to.

Compared exactly: layers, KV heads, head size, RoPE parameters, QK-norm. Compared within a tolerance: probes, 8×8 evenly
spaced elements of k_proj and v_proj per layer. ‖model - stored‖ ≤ 2⁻⁷ ‖stored‖ holds for bf16 and fp16 loads of the
same weights, and for no others. Where one of the two is quantized, as its configuration says or a GGUF file is, another
rounding of the same weights is expected: up to QUANTIZED_TOLERANCE a warning states the difference.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.disk import strict_json
from kvq_runtime.errors import ArtifactError, check_type
from kvq_runtime.families import attending
from kvq_runtime.geometry import NONE_SLIDE, Geometry, Sliding
from kvq_runtime.ops import rope
from kvq_runtime.recipe import ROLES

TOLERANCE = 2.0**-7
QUANTIZED_TOLERANCE = 0.5  # weights rounded to 3 bits are nearer than this to the originals; unrelated ones are not
SIZE = 8
DEQUANTIZED = "dequantized_from"  # in a config.json: the quantized type of weights that are written out as floats
PROJECTIONS = dict(zip(ROLES, ("k_proj", "v_proj"), strict=True))
KEYS_AS_VALUES = "attention_k_eq_v"  # in a config.json: values are the projection of keys, before the norm and RoPE


@dataclass(frozen=True)
class Fingerprint:
    """The identity of a model, by which an artifact recognizes the one that it was fitted to.

    rope        rope_type, rope_theta and the other parameters of the type, numbers as floats
    probes      {"layers.0.key.fingerprint.probe": float32 [8, 8], ...}; without those of packed weights
    quantized   whether the model's weights are quantized, so that probes are only approximately equal
    attending   layers of the model that attend to all tokens, which are those of the geometry; None: all
    sliding     layers that slide over a window
    """

    geometry: Geometry
    rope: Mapping[str, Any]
    qk_norm: bool
    probes: Mapping[str, Tensor]
    quantized: bool = False
    attending: tuple[int, ...] | None = None
    sliding: Sliding = NONE_SLIDE

    def to_json(self) -> dict:
        """Return everything but the probes, which are tensors of the artifact."""
        return {
            "geometry": self.geometry.shape,
            "rope": dict(self.rope),
            "qk_norm": self.qk_norm,
            "quantized": self.quantized,
            "attending": None if self.attending is None else list(self.attending),
            "sliding": asdict(self.sliding),
        }


def from_json(fields: Any, probes: Mapping[str, Tensor]) -> Fingerprint:
    """Read what `to_json` wrote; raises ArtifactError for anything else."""
    strict_json.keys(fields, Fingerprint.__dataclass_fields__.keys() - {"probes"}, "fingerprint")
    strict_json.keys(fields["sliding"], Sliding.__dataclass_fields__.keys(), "fingerprint: sliding")
    try:
        geometry, sliding = Geometry(**fields["geometry"]), Sliding(**fields["sliding"])
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"fingerprint: {error}") from None
    layers, rope, flags = fields["attending"], fields["rope"], [fields["qk_norm"], fields["quantized"]]
    if not isinstance(rope, dict) or {*map(type, flags)} != {bool}:
        raise ArtifactError("fingerprint: qk_norm and quantized must be true or false, rope an object")
    numbers = [*asdict(sliding).values(), *(layers if isinstance(layers, list) else [])]
    if any(type(number) is not int or not 0 <= number < 1 << 28 for number in numbers):
        raise ArtifactError("fingerprint: attending and sliding must hold whole numbers of at least 0")
    ascending = isinstance(layers, list) and layers == sorted({*layers}) and len(layers) == geometry.layers
    if layers is not None and not ascending:
        needed = f"{geometry.layers} layers in ascending order are needed, or null"
        raise ArtifactError(f"fingerprint: attending={layers!r:.80}; {needed}")
    attending = None if layers is None else tuple(layers)
    return Fingerprint(geometry, rope, flags[0], probes, flags[1], attending, sliding)


def specs(geometry: Geometry) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return {name: (shape, dtype)} of the probes in an artifact."""
    return {name: ((SIZE, SIZE), torch.float32) for _, _, name in _names(geometry)}


def _names(geometry: Geometry):
    for layer in range(geometry.layers):
        for role in ROLES:
            yield layer, PROJECTIONS[role], f"layers.{layer}.{role}.fingerprint.probe"


def probe(weight_OI: Tensor) -> Tensor:
    """Return 8×8 elements of a projection, evenly spaced over outputs and inputs: float32 [8, 8]."""
    if weight_OI.dim() != 2 or not weight_OI.is_floating_point():
        raise ValueError(
            f"expected a float matrix to probe, got {weight_OI.dtype} {list(weight_OI.shape)}; dequantize it"
        )
    rows, columns = (torch.arange(SIZE, device=weight_OI.device) * size // SIZE for size in weight_OI.shape)
    return weight_OI.detach()[rows[:, None], columns].float().cpu()


def from_config(config: Mapping[str, Any], weight: Callable[[int, str], Tensor | None]) -> Fingerprint:
    """Take the fingerprint of a model.

    config   the model's configuration as a dict, as in its config.json
    weight   (layer of the model, "k_proj" or "v_proj") → the matrix [outputs, inputs]; None and 8-bit codes are not
             probed
    """
    geometry = Geometry.from_config(config)
    normed = str(config.get("model_type", "")).startswith("qwen3") or any(
        config.get(name) for name in ("qk_norm", "use_qk_norm", "qk_layernorm")
    )
    layers = attending(config)
    weights = {name: weight(layers[place], projection) for place, projection, name in _names(geometry)}
    probes = {name: probe(matrix) for name, matrix in weights.items() if matrix is not None and not _packed(matrix)}
    quantized = any(config.get(name) for name in ("quantization_config", DEQUANTIZED)) or len(probes) < len(weights)
    some = None if [*layers] == [*range(config["num_hidden_layers"])] else tuple(layers)
    return Fingerprint(geometry, _rope(config), normed, probes, quantized, some, Sliding.from_config(config))


def of_fused(weight_OI: Tensor, config: Mapping[str, Any], projection: str) -> Tensor:
    """Return the rows of "k_proj" or "v_proj" in a matrix that projects to queries, then keys, then values."""
    width = Geometry.from_config(config).width
    place = -2 if projection == PROJECTIONS["key"] else -1
    return weight_OI[place * width :][:width]


def _packed(matrix: Tensor) -> bool:
    return matrix.dim() != 2 or not matrix.is_floating_point() or matrix.itemsize < 2


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return RoPE parameters, in one form for configurations of transformers 4 and 5."""
    settings = rope.settings(config)
    if "type" in settings:
        settings.setdefault("rope_type", settings.pop("type"))
    defaults = {"rope_type": "default", "rope_theta": config.get("rope_theta") or 10000.0}
    if config.get("partial_rotary_factor") is not None:
        defaults["partial_rotary_factor"] = config["partial_rotary_factor"]
    return _plain(defaults | settings)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def mismatches(stored: Fingerprint, model: Fingerprint) -> list[str]:
    """Return the differences apart from the weights, a clause each, with both values."""
    ours, theirs = stored.to_json(), model.to_json()
    return [
        f"{name} is {_shown(theirs[name])} in the model, {_shown(ours[name])} in the artifact"
        for name in ("geometry", "attending", "sliding", "rope", "qk_norm")
        if ours[name] != theirs[name]
    ]


def _shown(value: Any) -> Any:
    return "all" if value is None else value


def distances(stored: Fingerprint, model: Fingerprint) -> dict[str, float]:
    """Return ‖model - stored‖ / ‖stored‖ of every probe that both have; inf where a weight is NaN."""
    tiny = torch.finfo(torch.float32).tiny
    return {
        name: float(((model.probes[name] - probe).norm() / probe.norm().clamp_min(tiny)).nan_to_num(torch.inf))
        for name, probe in stored.probes.items()
        if name in model.probes
    }


def check_match(stored: Fingerprint, model: Fingerprint, allow_other_weights: bool = False) -> None:
    """Raise ArtifactError unless an artifact was fitted to this model.

    stored                of the artifact
    allow_other_weights   warn instead if only the weights differ, as those of a fine-tune do
    Where either is quantized, other weights also only warn, up to QUANTIZED_TOLERANCE.
    """
    check_type("allow_other_weights", allow_other_weights, bool, "True or False")
    problems = mismatches(stored, model)
    if problems:
        raise ArtifactError(f"fingerprint: {'; '.join(problems)}; use an artifact fitted to this model")
    distance = distances(stored, model)
    worst = max(distance, key=lambda name: distance[name], default=None)
    quantized = stored.quantized or model.quantized
    if worst is None or len(distance) < len(stored.probes):
        warnings.warn("fingerprint: packed weights cannot be compared with the artifact's", stacklevel=2)
    if worst is None or distance[worst] <= TOLERANCE:
        return
    layer = re.sub(r"layers\.(\d+)\.(key|value).*", r"layer \1 \2", worst)
    near = quantized and distance[worst] <= QUANTIZED_TOLERANCE
    text = f"fingerprint: weights of {layer} differ by {distance[worst]:.3g} of their norm; {TOLERANCE:.3g} is allowed"
    if near:
        text += f", and {QUANTIZED_TOLERANCE:.3g} where either is quantized"
    if near or allow_other_weights:
        about = "errors may be larger than those stated in the artifact: `kvq eval` on this model measures them"
        warnings.warn(f"{text}; {about}", stacklevel=2)
        return
    raise ArtifactError(
        f"{text}; use an artifact fitted to this model, or allow_other_weights=True for a fine-tune of it"
    )
