"""Read a model from one GGUF file, as llama.cpp has it: its configuration, and single tensors, dequantized.

What llama.cpp's conversion did is undone: tensors have transformers' names, the rows of Llama's queries and keys are in
halves again and not in pairs, and the factors of Llama 3's frequencies are told as the settings they came from.

    llama (Mistral's models, too)  →  LlamaForCausalLM      gemma3  →  Gemma3ForCausalLM, without its tower of images
    qwen2  →  Qwen2ForCausalLM                              qwen3   →  Qwen3ForCausalLM

Of Gemma 3 the weights of norms are as transformers has them, without the 1 that is added to them; which layers slide,
and with which base they turn, llama.cpp knows and the file does not say.

Source: ggml-org/llama.cpp, convert_hf_to_gguf.py; the dequantizers are those of its package gguf.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvq_calib.model import supported
from kvq_calib.model.files import DTYPES, PIECE, ModelFiles, Stored
from kvq_runtime.artifact import gguf_mean
from kvq_runtime.artifact.fingerprint import DEQUANTIZED
from kvq_runtime.disk import gguf
from kvq_runtime.errors import ArtifactError, extra

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

CLASSES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}  # fmt: skip
TYPES = {"gemma3": "gemma3_text"}  # transformers' names, where they are others
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORMS = {  # around attention and the MLP, each
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
INNER_OF = {"gemma3": INNER | NORMS}
FACTORS = "rope_freqs.weight"
FOREIGN = ("expert_count", "attention.scale", "attention.clamp_kqv", "logit_scale", "residual_scale", "embedding_scale",
           "rope.scale_linear")  # fmt: skip
_PLAIN = ("F32", "F16", "BF16")
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP = re.compile(r"(\w+)\.(weight|bias)")
_PAIRED = re.compile(r"model\.layers\.\d+\.self_attn\.(q|k)_proj\.(weight|bias)")


@dataclass(frozen=True)
class GgufFiles(ModelFiles):
    """A model in one GGUF file, which `path` is."""

    described = "its metadata"

    @cached_property
    def _held(self) -> Mapping[str, gguf.Held]:
        """The place of each tensor, by transformers' name of it."""
        return _named(gguf.read(self.path), self.path)

    @property
    def held(self) -> Mapping[str, str]:
        return dict.fromkeys(self._held, self.path.name)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most weights; bfloat16 for quantized ones, whose products are what it takes anyway."""
        return DTYPES.get(self._kinds.most_common(1)[0][0], torch.bfloat16)

    @property
    def _kinds(self) -> Counter[str]:
        """Count the elements of the layers in each of ggml's types."""
        found: Counter[str] = Counter()
        for name, held in self._held.items():
            if name.startswith("model.layers.") and len(held.shape) > 1:
                found[_type(held.kind, self.path).name] += math.prod(held.shape)
        return found

    def tensor(self, name: str) -> Tensor:
        """One tensor, dequantized: float32, on the CPU."""
        return self.copied(name, torch.device("cpu"), torch.float32)

    def copied(self, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
        held, rows = self._rows(name)
        copy = torch.empty(held.shape, dtype=dtype, device=device)
        flat = copy.view(len(rows), -1)
        step = max(1, PIECE // (4 * flat.shape[1]))
        for start in range(0, len(rows), step):
            flat[start : start + step] = self._dequantized(rows[start : start + step], held)
        return copy.sub_(1) if self._is_offset(name) else copy

    def _is_offset(self, name: str) -> bool:
        """True of a norm whose weight is stored with 1 added: a model adds it, and llama.cpp does not."""
        return self.config["model_type"] == "gemma3_text" and name.endswith("norm.weight")

    def place(self, name: str) -> tuple[Path, int, int]:
        held = self._held[name]
        return self.path, held.start, held.start + _size(held, name, self.path)

    def rows(self, name: str, places: Tensor) -> Tensor:
        held, rows = self._rows(name)
        asked, places = places.unique(return_inverse=True)
        return self._dequantized(rows[asked.numpy()], held)[places]

    def transformers_config(self) -> "PreTrainedConfig":
        from transformers import CONFIG_MAPPING

        return CONFIG_MAPPING[self.config["model_type"]].from_dict(dict(self.config))

    def model(self, dtype: torch.dtype) -> "PreTrainedModel":
        import transformers

        weights = {name: self.copied(name, torch.device("cpu"), dtype) for name in self.names}
        if "lm_head.weight" not in weights:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        made = getattr(transformers, self.architecture)
        return made.from_pretrained(None, config=self.transformers_config(), state_dict=weights, dtype=dtype)

    def _stored(self, name: str) -> Stored:
        self._file(name)
        return Stored(self.path.name, _type(self._held[name].kind, self.path).name, self._held[name].shape)

    def _bytes(self, name: str) -> int:
        return self.dtype.itemsize * math.prod(self._held[name].shape)

    def check_files(self) -> None:
        """Refuse types that cannot be dequantized, and tensors that are not wholly in the file."""
        size = self.path.stat().st_size
        for name, held in self._held.items():
            end = held.start + _size(held, name, self.path)
            if end > size:
                raise ArtifactError(f"{self.path}: {name} ends at byte {end} of {size}; download it again")
        if "model.embed_tokens.weight" not in self._held:
            raise ValueError(f"{self.path} has no token_embd.weight; give the file of a whole model")

    def _rows(self, name: str) -> tuple[gguf.Held, np.ndarray]:
        """A tensor's rows as they are packed, bytes [rows, bytes a row], in transformers' order."""
        self._file(name)
        held = self._held[name]
        # mapped anew: pages once read are this process's memory until nothing holds the mapping
        size = _size(held, name, self.path)
        data = np.memmap(self.path, np.uint8, "r", held.start, (size,))
        paired = self.config["model_type"] == "llama" and _PAIRED.fullmatch(name)
        vector = len(held.shape) == 1 and not paired
        rows = data.reshape(1 if vector else held.shape[0], -1)
        if paired:
            heads = self.config["num_attention_heads"] if paired[1] == "q" else self.geometry.kv_heads
            if len(rows) % (2 * heads):
                raise ArtifactError(f"{self.path}: {name} has {len(rows)} rows for {heads} heads; download it again")
            rows = rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
        return held, rows

    def _dequantized(self, rows: np.ndarray, held: gguf.Held) -> Tensor:
        return torch.from_numpy(np.array(_library().dequantize(rows, _type(held.kind, self.path)), np.float32))


def read(path: Path, id: str) -> GgufFiles:
    """Open a GGUF file and check that it can be captured.

    Raises ValueError for a model that is not supported, ArtifactError for a damaged file, RuntimeError without gguf.
    """
    _library()
    header = gguf.read(path)
    name = header.architecture
    if name not in CLASSES:
        raise ValueError(f"{path} has architecture {name[:60]}; supported are {', '.join(CLASSES)}")
    for key in FOREIGN:
        if header.of_model(key) not in (None, 0, 1):
            raise ValueError(
                f"{path} has {name}.{key}={header.of_model(key)!r:.60}, and calibration knows no {name} with that; use "
                "a model in Hugging Face format"
            )
    held = _named(header, path)
    config = gguf.config(header, path) | {
        "architectures": [CLASSES[name]],
        "model_type": TYPES.get(name, name),
        "hidden_act": "silu",
        "rms_norm_eps": _positive(header, "attention.layer_norm_rms_epsilon", 1e-6, path),
        "tie_word_embeddings": "lm_head.weight" not in held,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in held,
        "mlp_bias": "model.layers.0.mlp.up_proj.bias" in held,
    }
    for key, place in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = header.values.get(f"tokenizer.ggml.{place}_token_id")
        config[f"{key}_token_id"] = token if type(token) is int else None
    made = GgufFiles(path, id, None, config)
    kinds = [kind for kind, _ in made._kinds.most_common() if kind not in _PLAIN]
    config |= {DEQUANTIZED: ", ".join(kinds)} if kinds else {}
    config["rope_parameters"] = _rope(header, config["head_dim"], path)
    if name == "gemma3":
        heads, size = config["num_attention_heads"], config["head_dim"]
        largest = config["num_hidden_layers"] == 62  # the 27B, whose scale is by the width: llama.cpp knows it so
        config["query_pre_attn_scalar"] = config["hidden_size"] // heads if largest else size
        local = {"rope_type": "default", "rope_theta": 1e4}
        config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}
        del config["hidden_act"]  # `hidden_activation`, whose default is Gemma's
    return supported.check(replace(made, config=config))


def _named(header: gguf.Header, path: Path) -> dict[str, gguf.Held]:
    """The tensors by transformers' names. ValueError for one that these architectures do not have."""
    found, inner = {}, INNER_OF.get(header.architecture, INNER)
    for given, held in header.tensors.items():
        if given == FACTORS:
            continue
        layer, top = _LAYER.fullmatch(given), _TOP.fullmatch(given)
        if layer and layer[2] in inner:
            found[f"model.layers.{int(layer[1])}.{inner[layer[2]]}.{layer[3]}"] = held
        elif top and top[1] in TOP:
            found[f"{TOP[top[1]]}.{top[2]}"] = held
        else:
            raise ValueError(f"{path} has a tensor {given[:80]!r}, which is none of {header.architecture}'s")
    return found


def _rope(header: gguf.Header, size: int, path: Path) -> dict[str, Any]:
    """RoPE's settings as transformers has them."""
    rotated, kind = header.of_model("rope.dimension_count", size), header.of_model("rope.scaling.type", "none")
    if rotated != size:
        raise ValueError(f"{path} rotates {rotated} of {size} channels of a head; all must be rotated")
    settings = {"rope_type": "default", "rope_theta": _positive(header, "rope.freq_base", 1e4, path)}
    factor = _positive(header, "rope.scaling.factor", None, path)
    before = _positive(header, "rope.scaling.original_context_length", None, path)
    if FACTORS in header.tensors:
        return settings | _llama3(header.tensors[FACTORS], settings, size, before or 8192, path)
    if kind == "linear" and factor:
        return settings | {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and factor and before and header.of_model("rope.scaling.attn_factor", 1.0) == 1.0:
        return settings | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": before}
    if kind != "none":
        raise ValueError(f"{path} has RoPE scaling {kind!r:.60}, factor {factor!r:.20}, original length {before!r}; "
                         "supported are linear, yarn with both numbers, and Llama 3's factors")  # fmt: skip
    return settings


def _positive(header: gguf.Header, name: str, default: float | None, path: Path) -> Any:
    """A number of the architecture that is above 0, or the default; ValueError for anything else that is there."""
    found = header.of_model(name, default)
    if found is not None and (type(found) not in (int, float) or not 0 < found < math.inf):
        raise ValueError(f"{path} has {header.architecture}.{name}={found!r:.60}; a number above 0 is needed")
    return found


def _llama3(held: gguf.Held, settings: Mapping[str, Any], size: int, before: int, path: Path) -> dict[str, Any]:
    """Llama 3's settings, where its factors are those of the settings that all its models have."""
    count = size // 2
    if held.shape != (count,) or _type(held.kind, path).name != "F32" or held.start + 4 * count > path.stat().st_size:
        raise ValueError(f"{path}: {FACTORS} is not float32 of {count} numbers; convert the model again")
    factors = torch.from_numpy(np.fromfile(path, "<f4", count, offset=held.start).astype(np.float64))
    scaled = {"rope_type": "llama3", "factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": before}  # fmt: skip
    expected = gguf_mean.frequencies(dict(settings), size) / gguf_mean.frequencies({**settings, **scaled}, size)
    if not torch.allclose(factors, expected, rtol=1e-4):
        raise ValueError(f"{path}: {FACTORS} holds other factors than Llama 3's; such frequencies are not supported")
    return scaled


def _library():
    try:
        import gguf as library
    except ModuleNotFoundError as error:
        raise RuntimeError(f"a GGUF file needs {error.name}: {extra('gguf')}") from error
    return library


@lru_cache(maxsize=64)
def _type(kind: int, path: Path) -> Any:
    """ggml's type of a number. ValueError for one that is not known, or that the package cannot dequantize."""
    library = _library()
    try:
        found = library.GGMLQuantizationType(kind)
        library.dequantize(np.zeros((1, library.GGML_QUANT_SIZES[found][1]), np.uint8), found)
    except (ValueError, KeyError, NotImplementedError):
        raise ValueError(f"{path} has tensors of ggml's type {kind}, which the package gguf cannot dequantize; convert "
                         "the model to another type, or update gguf") from None  # fmt: skip
    return found


def _size(held: gguf.Held, name: str, path: Path) -> int:
    """The bytes of a tensor."""
    elements, size = _library().GGML_QUANT_SIZES[_type(held.kind, path)]
    if held.shape[-1] % elements or not math.prod(held.shape):
        raise ArtifactError(f"{path}: {name} has shape {list(held.shape)}, and blocks of {elements}; download it again")
    return math.prod(held.shape) // elements * size
