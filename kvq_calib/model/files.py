"""Read a model folder in Hugging Face format: its configuration, and single tensors from its safetensors files.

Nothing here runs code that came with a model: `config.json` is data, weights are safetensors only. What tensors are
called in transformers' model is known of a few types, and asked of a model without memory for others (`weights.py`). Of
weights that have not been downloaded the headers are enough to plan with: names, dtypes and shapes.
"""

import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from kvq_calib.model import catalog
from kvq_runtime.artifact import fingerprint
from kvq_runtime.disk import files as disk
from kvq_runtime.errors import ArtifactError
from kvq_runtime.families import ATTENTION, Family, family_of
from kvq_runtime.geometry import Geometry, Sliding, attending, stretches

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from kvq_calib.model.weights import Weights

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
LAYERS = "model.layers"  # the name of these models' list of layers, in files too
OUTPUT = "o_proj"  # attention's last projection
BUFFERS = "inv_freq", ".attention.bias", ".attention.masked_bias", ".attn.bias", ".attn.masked_bias"  # of old files
SINGLE = "model.safetensors"  # the file of a model in one
PIECE = 2**24  # bytes read from a file at a time
AHEAD = 2**17  # bytes that are asked for at once: of more, Linux reads the beginning
CONFIG_LIMIT = 1 << 24  # bytes
_WIDTH = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I32": 4, "I64": 8}  # bytes; of others 1
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True)
class Stored:
    """A tensor as a safetensors file has it: in which file, its dtype there ("BF16") and its shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Parameters:
    """The parameters of transformers' model by the tensors of files.

    within   the model's list of layers, by its name there
    named    {tensor: the parameter that it is, or the first of those that it becomes a part of}
    made     tensors that are no parameters as they are: transformers splits, joins or turns them
    tied     tensors with the parameters that they are, or become a part of, beside
    """

    within: str
    named: Mapping[str, str]
    made: frozenset[str]
    tied: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class ModelFiles:
    """One model on disk.

    id         what provenance calls it: the catalog's or the folder's name, or the Hub id
    revision   the Hub commit the files belong to; None for a local folder
    headers    of weights that are on the Hub alone, their headers by tensor: enough to plan, not to read; None
               where the weights are in the folder
    """

    path: Path
    id: str
    revision: str | None
    config: Mapping[str, Any]
    headers: Mapping[str, Stored] | None = None

    @property
    def entry(self) -> catalog.Entry:
        """Its entry in the catalog, or the defaults."""
        return catalog.entry(self.id)

    @property
    def architecture(self) -> str:
        return self.config["architectures"][0]

    @property
    def hidden(self) -> int:
        return self.config["hidden_size"]

    @property
    def inner(self) -> int:
        """The width inside an MLP."""
        return self.config["intermediate_size"]

    @property
    def chosen_experts(self) -> int:
        """The experts that a token goes through; 0 of a model without."""
        return self.config.get("num_experts_per_tok") or 0

    @property
    def context(self) -> int:
        """The longest sequence the model was made for."""
        return self.config["max_position_embeddings"]

    @property
    def vocabulary(self) -> int:
        return self.config["vocab_size"]

    @property
    def loader(self) -> str:
        """The class of transformers that loads it."""
        if self.architecture.endswith("ForCausalLM"):
            return "AutoModelForCausalLM"
        from kvq_calib.model.decoder import maker

        return maker(self.transformers_config()).__name__

    @property
    def provenance(self) -> dict[str, Any]:
        """The facts of the model that an artifact states."""
        said = {"model": self.id, "revision": self.revision}
        if self.quantization:
            said["quantization"] = self.quantization
        return said if self.loader == "AutoModelForCausalLM" else said | {"loader": self.loader}

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
        """For each layer of the geometry those of the model that are run with it, by number."""
        return stretches(self.config)

    @property
    def family(self) -> Family:
        """Its row in the table of families."""
        found = family_of(self.config)
        assert found is not None, f"{self.id} was not checked"
        return found

    @property
    def tapped(self) -> bool:
        """True if keys and queries are taken where the projection, or the norm after it, puts them out, before RoPE.

        Of other models they are turned back from what attention gets, as a cache does, which differs in the last bit.
        """
        return self.architecture in ARCHITECTURES

    @property
    def rope_refusal(self) -> str | None:
        """The reason why recipes that undo RoPE cannot be fitted to the model; None if they can."""
        return "some layers turn no keys" if self.family.rope == "some layers" else None

    @property
    def held(self) -> Mapping[str, str]:
        """The file that holds each tensor, those of towers too."""
        return self._shards

    @cached_property
    def _shards(self) -> Mapping[str, str]:
        given = self.headers
        named = weight_map(self.path) if given is None else {name: one.file for name, one in given.items()}
        return dict.fromkeys(_open(self.path / SINGLE).keys(), SINGLE) if named is None else named

    @cached_property
    def names(self) -> Mapping[str, str]:
        """The file that holds each tensor of the text."""
        return {name: file for name, file in self.held.items() if name in self._parameters.named}

    @cached_property
    def _parameters(self) -> Parameters:
        kind = self.config.get("model_type")
        if self.tapped and kind in (None, self.architecture.removesuffix("ForCausalLM").lower()):
            return Parameters(LAYERS, {name: name for name in self.held}, frozenset())
        return Parameters(*self._weights.parameters)

    @cached_property
    def _weights(self) -> "Weights":
        """Its tensors as transformers reads them."""
        from kvq_calib.model.weights import Weights

        return Weights.of(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_weights"}

    @cached_property
    def _of_layers(self) -> Mapping[int, list[str]]:
        """The tensors of each decoder layer, ascending by the parameters that they are, or become a part of."""
        found: dict[int, list[tuple[str, str]]] = {}
        start = f"{self._parameters.within}."
        for name, parameter in (*self._parameters.named.items(), *self._parameters.tied):
            number, _, own = parameter.removeprefix(start).partition(".")
            if parameter.startswith(start) and number.isdigit() and not name.endswith(BUFFERS):
                found.setdefault(int(number), []).append((own, name))
        return {number: [name for _, name in sorted(own)] for number, own in found.items()}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights as stored."""
        norm = f"{self._parameters.within.rpartition('.')[0]}.norm.weight"
        own = (name for name, parameter in self._parameters.named.items() if parameter == norm)
        found = self._stored(next(own, None) or self.layer_names(0)[0]).dtype
        if found not in DTYPES:
            raise ValueError(f"{self.id} is stored as {found}; use weights in {', '.join(DTYPES)}")
        return DTYPES[found]

    def tensor(self, name: str) -> Tensor:
        """One tensor, as stored, on the CPU, in memory mapped from the file."""
        return _open(self._file(name)).get_tensor(name)

    def copied(self, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
        """One tensor in the memory of a device, whose reading takes no more than that and PIECE."""
        path = self._file(name)
        copy = torch.empty(_open(path).get_slice(name).get_shape(), dtype=dtype, device=device)
        if not copy.dim():
            return copy.copy_(self.tensor(name))
        rows = max(1, PIECE * len(copy) // self._bytes(name))
        for start in range(0, len(copy), rows):
            # opened anew: pages once read are this process's memory until nothing holds the mapping
            copy[start : start + rows] = _open(path).get_slice(name)[start : start + rows]
        return copy

    def read_ahead(self, layer: int) -> None:
        """Have the system read the weights of a layer, and of those that are run with it, into its cache meanwhile.

        Nothing where the system cannot be asked, or there is no such layer.
        """
        if not hasattr(os, "posix_fadvise") or layer >= self.geometry.layers:
            return
        own = [name for n in self.stretches[layer] for name in self.layer_names(n)]
        threading.Thread(target=_asked_for, args=([self.place(name) for name in own],), daemon=True).start()

    def place(self, name: str) -> tuple[Path, int, int]:
        """The file of a tensor, its first byte there, and the one behind its last; both 0 if that is not known."""
        path = self._file(name)
        about = path.stat()
        return path, *_places(path, about.st_mtime_ns, about.st_size).get(name, (0, 0))

    def rows(self, name: str, places: Tensor) -> Tensor:
        """Single rows of a matrix, as stored, on the CPU; the others are not read."""
        return nn.functional.embedding(places, self.tensor(name))

    def transformers_config(self) -> "PreTrainedConfig":
        """The configuration as transformers' own class, with those of towers beside the text's.

        Without what names code: of a repository, for which transformers would ask, or of attention, which is ours.
        """
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self.path, trust_remote_code=False, local_files_only=True)
        config._attn_implementation = None  # and of those in it
        _forget_code(config)
        return config

    def model(self, dtype: torch.dtype) -> "PreTrainedModel":
        """The whole model, on the CPU, with towers that it has beside the text's."""
        from kvq_calib.model.decoder import maker

        config: Any = self.transformers_config()
        return maker(config).from_pretrained(
            self.path, config=config, dtype=dtype, use_safetensors=True, trust_remote_code=False, local_files_only=True
        )

    def layer_names(self, layer: int) -> list[str]:
        """The tensors of one decoder layer in the files, without buffers that transformers makes."""
        return self._of_layers.get(layer, [])

    def parameter(self, name: str) -> str:
        """The parameter of transformers' model that a tensor of the text is, or becomes a part of."""
        return self._parameters.named[name]

    def layer_bytes(self, layer: int) -> int:
        """The bytes of a layer of the geometry and of those that are run with it, as stored."""
        return sum(self._bytes(name) for n in self.stretches[layer] for name in self.layer_names(n))

    @property
    def weight_bytes(self) -> int:
        """The bytes of all tensors of the text, as stored."""
        return sum(map(self._bytes, self.names))

    @property
    def download_bytes(self) -> int:
        """The bytes of the files that are on the Hub alone."""
        return 0 if self.headers is None else sum(_size(one) for one in self.headers.values())

    @property
    def parameters(self) -> int:
        """The numbers in all tensors of the text: embeddings that are the output layer, too, are counted once."""
        shapes = (self._stored(name).shape for name in self.names if not name.endswith("inv_freq"))
        return sum(map(math.prod, shapes))

    @property
    def about(self) -> dict[str, Any]:
        """The model, as records state it."""
        return {"id": self.id, "revision": self.revision, "parameters": self.parameters}

    @property
    def quantization(self) -> str | None:
        """The types of ggml that the weights are, or were before they were written out; None of others."""
        return self.config.get(fingerprint.DEQUANTIZED)

    @cached_property
    def _fingerprint(self) -> fingerprint.Fingerprint:
        def weight(layer: int, name: str) -> Tensor:
            one = [fingerprint.PROJECTIONS["key"]] if self.config.get(fingerprint.ONE) else []
            found, weight = self._matrix(layer, name, *fingerprint.FUSED, *one)
            return fingerprint.of_fused(weight, self.config, name) if found in fingerprint.FUSED else weight

        return fingerprint.from_config(self.config, weight)

    def fingerprint(self) -> fingerprint.Fingerprint:
        """Return the identity of the model, which an artifact fitted to it stores."""
        return self._fingerprint

    def output_projection(self, layer: int) -> Tensor:
        """The matrix of a layer of the geometry behind attention, [hidden width, query heads · head size]."""
        return self._matrix(self.attending[layer], OUTPUT)[1]

    def _matrix(self, layer: int, *matrices: str) -> tuple[str, Tensor]:
        """The first of these matrices that the attention of a layer has, and its name there."""
        start, parameters = f"{self._parameters.within}.{layer}.{ATTENTION}.", self._parameters
        for matrix in matrices:
            for name in self.layer_names(layer):
                if parameters.named[name] == f"{start}{matrix}.weight" and name not in parameters.made:
                    return matrix, self.tensor(name)
        raise ValueError(f"{self.id} has no tensor {start}{matrices[0]}.weight; is the folder complete?")

    def check_files(self) -> None:
        """Refuse files that are missing or not whole."""
        single, index = self.path / SINGLE, self.path / "model.safetensors.index.json"
        if not single.is_file() and not index.is_file():
            others = [path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in sorted(self.path.glob(pattern))]
            code = f"found {others[0]}, which may run code when it is opened: convert it" if others else ""
            instead = gguf_of(self.path) or code
            raise ValueError(f"{self.id} has no model.safetensors in {self.path}{instead and '; '}{instead}")
        for shard in sorted(set(self._shards.values())):  # those of towers, too: the whole model is read of them
            if Path(shard).name != shard or not (self.path / shard).is_file():
                said = f"the index names {shard!r}, which is not in {self.path}"
                raise ArtifactError(f"{self.id}: {said}; download it again")
            _open(self.path / shard)  # a shard that was cut off is found here, not after hours

    def _file(self, name: str) -> Path:
        if name not in self.held:
            raise ValueError(f"{self.id} has no tensor {name!r}; is the folder complete?")
        return self.path / self.held[name]

    def _stored(self, name: str) -> Stored:
        if self.headers is not None and name in self.headers:
            return self.headers[name]
        path = self._file(name)
        found = _open(path).get_slice(name)
        return Stored(path.name, found.get_dtype(), tuple(found.get_shape()))

    def _bytes(self, name: str) -> int:
        return _size(self._stored(name))


def _forget_code(config: "PreTrainedConfig") -> None:
    """Take what names code of a repository out of a configuration, and out of those in it."""
    vars(config).pop("auto_map", None)
    for part in vars(config).values():
        if hasattr(part, "sub_configs"):
            _forget_code(part)


def weight_map(folder: Path) -> dict[str, str] | None:
    """The file of each tensor, from the index of a model in several files; None without an index."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return None
    named = disk.json_object(index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise ArtifactError(f"{index}: weight_map does not name the file of each tensor; download it again")
    return named


def _size(stored: Stored) -> int:
    return _WIDTH.get(stored.dtype, 1) * math.prod(stored.shape)


def gguf_of(folder: Path) -> str:
    """Return advice on what to pass in place of a folder that has a GGUF file, or ""."""
    found = next(iter(sorted(folder.glob("*.gguf"))), None)
    return f"for its GGUF file give {found}" if found else ""


def _open(path: Path):
    try:
        return safe_open(path, "pt")
    except SafetensorError as error:
        raise ArtifactError(f"{path}: no whole safetensors file ({error}); download it again") from None


def _asked_for(places: Sequence[tuple[Path, int, int]]) -> None:
    """Ask the system to read these parts of files. It need not: what it refuses is read when it is used."""
    with suppress(OSError):
        for path, start, stop in places:
            with path.open("rb") as file:
                for at in range(start, stop, AHEAD):
                    os.posix_fadvise(file.fileno(), at, min(AHEAD, stop - at), os.POSIX_FADV_WILLNEED)


@lru_cache(maxsize=256)
def _places(path: Path, changed: int, size: int) -> Mapping[str, tuple[int, int]]:
    """{name: its first byte, and the one behind its last} of a safetensors file, which was whole when it was opened."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    ranges = {name: entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"}
    return {name: (8 + length + first, 8 + length + last) for name, (first, last) in ranges.items()}
