"""Describe the model of a folder in Hugging Face format: its configuration, and the tensors of its safetensors files.

No code that came with a model runs: `config.json` is data, and weights are safetensors only. The configuration suffices
to plan a calibration.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from kvq_calib.model import catalog, gguf
from kvq_calib.model.config import auto_class, transformers_config
from kvq_runtime.artifact import fingerprint
from kvq_runtime.codec.key_bias import Biases, nonzero
from kvq_runtime.disk import files as disk
from kvq_runtime.errors import ArtifactError
from kvq_runtime.families import Family, attending, family_of
from kvq_runtime.geometry import Geometry, Sliding, stretches
from kvq_runtime.registry import rating

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from kvq_calib.model.weights import Weights

DTYPES = "bfloat16", "float16", "float32"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_OF_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class ModelFiles:
    """One model on disk.

    id         its name in provenance: the catalog's or the folder's name, or the Hub id
    revision   the Hub commit the files belong to; None for a local folder
    config     the text decoder's settings, transformers' defaults included
    tensors    the file of each tensor, those of image towers included; none where the weights are only on the Hub
    """

    path: Path
    id: str
    revision: str | None
    config: Mapping[str, Any]
    tensors: Mapping[str, str]

    @property
    def local(self) -> bool:
        """False if the weights are only on the Hub."""
        return bool(self.tensors)

    @property
    def entry(self) -> catalog.Entry:
        """Its entry in the catalog, or the defaults."""
        return catalog.entry(self.id)

    @property
    def hidden(self) -> int:
        return self.config["hidden_size"]

    @property
    def context(self) -> int:
        """The longest sequence the model was made for."""
        return self.config["max_position_embeddings"]

    @property
    def vocabulary(self) -> int:
        return self.config["vocab_size"]

    @property
    def provenance(self) -> dict[str, Any]:
        """The facts of the model that an artifact states."""
        facts: dict[str, Any] = {"model": self.id, "revision": self.revision}
        if self.quantization:
            facts["quantization"] = self.quantization
        if self.config.get(gguf.GUESSED):
            facts["text_split"] = rating.GUESSED
        loader = auto_class(self.config["model_type"]).__name__
        return facts if loader == "AutoModelForCausalLM" else facts | {"loader": loader}

    @property
    def geometry(self) -> Geometry:
        return Geometry.from_config(self.config)

    @property
    def sliding(self) -> Sliding:
        """Its layers that slide over a window."""
        return Sliding.from_config(self.config)

    @property
    def attending(self) -> Sequence[int]:
        """The layers of the geometry, by their number in the model."""
        return attending(self.config)

    @property
    def stretches(self) -> Sequence[range]:
        """For each layer of the geometry the model's layers that run with it, by number."""
        return stretches(self.config)

    @property
    def family(self) -> Family:
        """Its row in the table of families."""
        family = family_of(self.config)
        assert family is not None, f"{self.id} was not checked"
        return family

    @property
    def rope_refusal(self) -> str | None:
        """The reason why recipes that undo RoPE cannot be fitted to the model; None if they can."""
        return "some layers turn no keys" if self.family.rope == "some layers" else None

    @property
    def quantization(self) -> str | None:
        """The ggml types of the weights before they were dequantized; None if they never were quantized."""
        return self.config.get(fingerprint.DEQUANTIZED)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which layers are stored; of weights on the Hub, as config.json says."""
        first = next((name for name in self.tensors if _OF_LAYER.search(name)), None)
        dtype = str(self.config.get("dtype") if first is None else self.tensor(first).dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ValueError(f"{self.id} is stored as {dtype}; use weights in {', '.join(DTYPES)}")
        return getattr(torch, dtype)

    @property
    def parameters(self) -> int:
        """The numbers in all weights of the text: an output layer that is the embedding is counted once."""
        return self.weights.parameters

    @property
    def weight_bytes(self) -> int:
        """The bytes of the text's weights, in their stored dtype."""
        return self.parameters * self.dtype.itemsize

    @property
    def download_bytes(self) -> int:
        """The bytes of weights to download; 0 for local ones."""
        return 0 if self.local else self.weight_bytes

    @property
    def about(self) -> dict[str, Any]:
        """The model, as records state it."""
        return {"id": self.id, "revision": self.revision, "parameters": self.parameters}

    @cached_property
    def weights(self) -> "Weights":
        """Its tensors by the parameters of transformers' model."""
        from kvq_calib.model.weights import Weights

        return Weights(self, self.without_memory(self.dtype))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "weights"}

    def layer_bytes(self, layer: int) -> int:
        """The bytes of a layer of the geometry and of those that run with it, in their stored dtype."""
        return self.weights.layer_parameters(self.stretches[layer]) * self.dtype.itemsize

    def tensor(self, name: str) -> Tensor:
        """One tensor, as stored, on the CPU, in memory mapped from the file."""
        if name not in self.tensors:
            raise ValueError(f"{self.id} has no tensor {name!r}; is the folder complete?")
        return _open(self.path / self.tensors[name]).get_tensor(name)

    def rows(self, name: str, numbers: Tensor) -> Tensor:
        """Single rows of a matrix, as stored, on the CPU; the others are not read."""
        return nn.functional.embedding(numbers, self.tensor(name))

    @cached_property
    def _fingerprint(self) -> fingerprint.Fingerprint:
        def weight(layer: int, projection: str) -> Tensor:
            if self.family.fused:
                return fingerprint.of_fused(self._projection(layer, self.family.fused), self.config, projection)
            shared = self.config.get(fingerprint.KEYS_AS_VALUES) and not self._has(layer, projection)
            return self._projection(layer, fingerprint.PROJECTIONS["key"] if shared else projection)

        return fingerprint.from_config(self.config, weight)

    def fingerprint(self) -> fingerprint.Fingerprint:
        """Return the identity of the model, which an artifact fitted to it stores."""
        return self._fingerprint

    @cached_property
    def key_biases(self) -> Biases:
        """The biases of `k_proj` by layer of the geometry; none where a norm follows, or RoPE cannot be undone."""
        if self.rope_refusal is not None or self.family.fused:
            return {}
        matrices = [self.weights.of_attention(n, "k_proj").removesuffix("weight") for n in self.attending]
        if any(f"{start.removesuffix('k_proj.')}k_norm.weight" in self.weights for start in matrices):
            return {}
        named = {n: f"{start}bias" for n, start in enumerate(matrices)}
        return nonzero({n: self.weights.read(name) for n, name in named.items() if name in self.weights})

    def _has(self, layer: int, projection: str) -> bool:
        return self.weights.of_attention(layer, projection) in self.weights

    def _projection(self, layer: int, projection: str) -> Tensor:
        return self.weights.read(self.weights.of_attention(layer, projection))

    def transformers_config(self) -> "PreTrainedConfig":
        """The configuration as transformers' own class, that of an image tower included."""
        return transformers_config(self.path)

    def without_memory(self, dtype: torch.dtype) -> "PreTrainedModel":
        """The whole model on torch's meta device."""
        config: Any = self.transformers_config()
        with torch.device("meta"):
            return auto_class(config.model_type).from_config(config, dtype=dtype).eval()

    def model(self, dtype: torch.dtype) -> "PreTrainedModel":
        """The whole model, on the CPU, with an image tower where it has one."""
        config: Any = self.transformers_config()
        return auto_class(config.model_type).from_pretrained(
            self.path, config=config, dtype=dtype, use_safetensors=True, trust_remote_code=False, local_files_only=True
        )


def tensors_of(folder: Path, id: str, layers: int) -> dict[str, str]:
    """Map each tensor of a folder's weights to its file.

    Raises ValueError for a folder without safetensors or without a layer, ArtifactError for a file that is missing or
    cut off: it is found here, not after hours.
    """
    if (folder / INDEX).is_file():
        named = disk.json_object(folder / INDEX).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
            raise ArtifactError(f"{folder / INDEX}: it does not name the file of each tensor; download it again")
        files = sorted(set(named.values()))
    elif (folder / SINGLE).is_file():
        files = [SINGLE]
    else:
        others = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in sorted(folder.glob(pattern))]
        code = f"; found {others[0]}, which may run code when it is opened: convert it" if others else ""
        raise ValueError(f"{id} has no {SINGLE} in {folder}{code}")
    tensors: dict[str, str] = {}
    for file in files:
        if Path(file).name != file or not (folder / file).is_file():
            raise ArtifactError(f"{id}: the index names {file!r}, which is not in {folder}; download it again")
        tensors |= dict.fromkeys(_open(folder / file).keys(), file)
    stored = {int(found[1]) for found in map(_OF_LAYER.search, tensors) if found}
    if (missing := next((n for n in range(layers) if n not in stored), None)) is not None:
        raise ValueError(f"{id}: no weights for layer {missing} of {layers}")
    return tensors


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise ArtifactError(f"{path}: no whole safetensors file ({error}); download it again") from None
