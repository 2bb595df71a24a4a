"""Write the means of keys as a bias file of llama.cpp: a GGUF of one vector a layer, subtracted from keys before Q4_0.

A bias b of a head's keys moves all scores of a query by q b, which softmax does not see. Q4_0 has no zero point, and
channels with a mean of their own waste its range. The fork of PrismML reads such a file by `--kv-mean-center`:

    general.type = "kv-mean-center"        kv_mean_center.k_rot = false        kv_bar.blk.<layer>.k: F32 [H · D]

There the cache holds keys after RoPE, and one vector serves all positions: the mean of R_t μ over t = 0, 1, ..., T - 1,
where μ is the artifact's mean before RoPE. Slow channels keep it, fast ones turn it to nothing. k_rot = false says that
it is for keys that are not rotated by a Hadamard (LLAMA_ATTN_ROT_DISABLE=1); the loader refuses another use.

GGUF of the architectures llama and mistral has the channels of a head in pairs that RoPE turns, (0, D/2), (1, D/2 + 1),
...; that of qwen2 and qwen3 in halves, as transformers has them.

Source: PrismML-Eng/llama.cpp, docs/kv-mean-center.md; ggml-org/ggml, docs/gguf.md, version 3.
"""

import math
import struct
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.errors import ArtifactError
from kvq_runtime.ops import rope

Channels = Literal["halves", "pairs"]
POSITIONS = 512
ALIGNMENT = 32  # bytes, GGUF's default
STRING, BOOL, F32 = 8, 7, 0  # types of values, and of tensors


def from_artifact(artifact: Artifact, channels: str | None, positions: int = POSITIONS) -> bytes:
    """The file's bytes. ValueError for an artifact that has no such means, or an order of channels that must be stated.

    channels   "halves" or "pairs"; None: halves, if the model has QK-norm, which only qwen3 has
    """
    geometry, mark = artifact.fingerprint.geometry, artifact.fingerprint
    if channels is None and not mark.qk_norm:
        raise ValueError("how the GGUF orders a head's channels is not known; --channels pairs for llama and mistral, "
                         "halves for qwen2")  # fmt: skip
    if channels is not None and channels not in get_args(Channels):
        raise ValueError(f"channels={channels!r}; use one of {get_args(Channels)}")
    names = [f"layers.{layer}.key.predict.mean" for layer in range(geometry.layers)]
    absent = [name for name in names if name not in artifact.tensors]
    if absent:
        raise ValueError(f"{artifact.recipe.name} removes no mean from keys ({absent[0]}); use a recipe that does, as "
                         "mean-higgs-2bit or aqua-2bit")  # fmt: skip
    found = {}
    for layer, name in enumerate(names):
        mean_HD = averaged(artifact.tensors[name].view(geometry.kv_heads, -1), mark.rope, positions)
        if channels == "pairs":
            mean_HD = mean_HD.unflatten(1, (2, -1)).mT.flatten(1)
        found[f"kv_bar.blk.{layer}.k"] = mean_HD.flatten()
    return gguf({"general.type": "kv-mean-center", "kv_mean_center.k_rot": False}, found)


def averaged(mean_HD: Tensor, settings: Mapping[str, Any], positions: int) -> Tensor:
    """The mean of R_t μ over t < `positions`, float32 [H, D], of μ in halves."""
    frequencies_K = frequencies(settings, mean_HD.shape[-1])
    angles_TK = torch.arange(positions)[:, None].double() * frequencies_K
    cos, sin = (turned.mean(0).expand(1, 1, -1) for turned in (angles_TK.cos(), angles_TK.sin()))
    return rope.rotate(mean_HD.double()[None, None], cos, sin)[0, 0].float()


def frequencies(settings: Mapping[str, Any], size: int) -> Tensor:
    """Radians a position of each pair of channels, float64 [K]. ValueError for a RoPE that is none of these."""
    kind, rotated = settings.get("rope_type"), int(size * _setting(settings, "partial_rotary_factor", 1 / size, 1, 1.0))
    if rotated < 2 or rotated % 2:
        raise ArtifactError(f"fingerprint: rope: {rotated} of {size} channels are rotated; use an even number")
    plain_K = _setting(settings, "rope_theta", 1, 1e12) ** -(torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    if kind == "default":
        return plain_K
    if kind == "linear":
        return plain_K / _setting(settings, "factor", 1e-3, 1e6)
    if kind == "llama3":  # long waves are stretched by the factor, short ones are not, those between in part
        low = _setting(settings, "low_freq_factor", 1e-6, 1e6)
        high = _setting(settings, "high_freq_factor", low * (1 + 1e-6), 1e7)
        turns_K = _setting(settings, "original_max_position_embeddings", 1, 1e12) * plain_K / (2 * math.pi)
        kept_K = ((turns_K - low) / (high - low)).clamp(0, 1)
        return kept_K * plain_K + (1 - kept_K) * plain_K / _setting(settings, "factor", 1e-3, 1e6)
    raise ValueError(f"RoPE of type {kind!r:.40}; a bias is written for default, linear and llama3")


def _setting(settings: Mapping[str, Any], name: str, low: float, high: float, default: float | None = None) -> float:
    """A number of RoPE's settings; ArtifactError for one that is none, or out of bounds."""
    value = settings.get(name, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise ArtifactError(f"fingerprint: rope: {name} {value!r:.40}; use a number from {low:g} to {high:g}")
    return value


def gguf(values: Mapping[str, str | bool], vectors: Mapping[str, Tensor]) -> bytes:
    """A GGUF file, version 3: strings and booleans, then float32 vectors, each at a multiple of ALIGNMENT."""
    head = [b"GGUF", struct.pack("<IQQ", 3, len(vectors), len(values))]
    for name, value in values.items():
        head += [_text(name), struct.pack("<I", BOOL if isinstance(value, bool) else STRING)]
        head.append(struct.pack("<?", value) if isinstance(value, bool) else _text(value))
    data = bytearray()
    for name, vector in vectors.items():
        head += [_text(name), struct.pack("<IQIQ", 1, len(vector), F32, len(data))]
        data += _padded(vector.float().numpy().astype("<f4").tobytes())
    return _padded(b"".join(head)) + bytes(data)


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _padded(raw: bytes) -> bytes:
    return raw + bytes(-len(raw) % ALIGNMENT)
