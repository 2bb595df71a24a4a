"""Read the parameters of transformers' model from safetensors files, one module at a time.

Files name tensors as the model's authors did: transformers has rules for each type of model that rename them, and that
put together tensors such as single experts. Its own rules are applied here.
"""

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from kvq_runtime.families import ATTENTION, LAYERS
from kvq_runtime.hf.model import decoder_of


class Weights:
    """The parameters of a model of transformers by name; the model itself has no memory.

    files             the `ModelFiles` of its folder
    decoder, output   names of the decoder of text, and of the output head, in the model
    """

    def __init__(self, files: Any, model: Any):
        self.files, self.model = files, model
        modules = {id(module): name for name, module in model.named_modules()}
        self.decoder = modules[id(decoder_of(model))]
        self.embedding = f"{modules[id(model.get_input_embeddings())]}.weight"
        self.output = modules[id(model.get_output_embeddings())]
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._converters = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        known = dict.fromkeys(model.state_dict(), True)
        # {parameter: the tensors it is made of, each with the pattern of the rule that converts it, if any does}
        self._sources: dict[str, list[tuple[str, str | None]]] = {}
        for name in sorted(files.tensors, key=dot_natural_key):
            target, pattern = name, None
            if name not in known:
                target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
            self._sources.setdefault(target, []).append((name, pattern))
        for target, source in model.all_tied_weights_keys.items():
            if target not in self._sources and source in self._sources:
                self._sources[target] = self._sources[source]

    def __contains__(self, parameter: str) -> bool:
        return parameter in self._sources

    def of_attention(self, layer: int, projection: str) -> str:
        """The name of a projection's matrix in a layer's attention."""
        return f"{self.decoder}.{LAYERS}.{layer}.{ATTENTION}.{projection}.weight"

    @property
    def parameters(self) -> int:
        """The numbers in the decoder and the output head, each counted once."""
        parts = decoder_of(self.model), self.model.get_output_embeddings()
        return sum({id(one): one.numel() for part in parts for one in part.parameters()}.values())

    def layer_parameters(self, layers: Iterable[int]) -> int:
        """The numbers in some layers, by their number in the model."""
        modules = getattr(decoder_of(self.model), LAYERS)
        return sum(one.numel() for n in layers for one in modules[n].parameters())

    def read(self, parameter: str) -> Tensor:
        """A parameter that is one tensor of the files, as stored, on the CPU."""
        return self.files.tensor(self._source(parameter))

    def rows(self, parameter: str, numbers: Tensor) -> Tensor:
        """Single rows of such a parameter; the others are not read."""
        return self.files.rows(self._source(parameter), numbers)

    def _source(self, parameter: str) -> str:
        sources = self._sources.get(parameter, [])
        if len(sources) != 1 or sources[0][1] is not None:
            raise ValueError(f"{self.files.id} has no tensor {parameter}; is the folder complete?")
        return sources[0][0]

    def filled(self, name: str, device: torch.device, dtype: torch.dtype) -> Any:
        """A copy of a module of the model, by its name, in the memory of a device.

        dtype   of all parameters but those that transformers keeps in float32, such as biases of routers
        """
        module = copy.deepcopy(self.model.get_submodule(name))
        float32 = [re.compile(pattern.replace("*", ".*")) for pattern in self.model._get_dtype_plan(dtype)]
        tensors: dict[str, Tensor] = {}
        for own in (names := list(module.state_dict())):
            if own not in tensors:
                wide = any(pattern.search(f"{name}.{own}") for pattern in float32)
                tensors |= self._made(f"{name}.", own, device, torch.float32 if wide else dtype)
        try:
            module.load_state_dict({own: tensors[own] for own in names if own in tensors}, assign=True)
        except RuntimeError as error:
            raise ValueError(f"the weights of {self.files.id} do not fit its config.json: {error}") from error
        return self.with_buffers(module.requires_grad_(False), device)

    def with_buffers(self, module: nn.Module, device: torch.device) -> Any:
        """Set the buffers of a module that no file has (frequencies, scales of embeddings), as transformers does."""
        for parameter in module.parameters():
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        for part in module.modules():
            unset = {name: buffer for name, buffer in part.named_buffers(recurse=False) if buffer.is_meta}
            for name, buffer in unset.items():
                part._buffers[name] = torch.empty_like(buffer, device=device)
            if unset:
                with torch.no_grad():
                    decoder_of(self.model)._init_weights(part)
        return module

    def _made(self, prefix: str, name: str, device: torch.device, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """A parameter of a module, and what its rule makes beside it, by their names; nothing if no file has it."""
        sources = self._sources.get(prefix + name)
        if sources is None:
            return {}
        tensors = [self.files.tensor(stored).to(device, dtype, copy=True) for stored, _ in sources]
        converter = self._converters.get(sources[0][1] or "")
        if converter is None:
            return {name: tensors[0]}
        rule: Any = copy.deepcopy(converter)
        for (stored, pattern), tensor in zip(sources, tensors, strict=True):
            rule.add_tensor(prefix + name, stored, pattern, tensor)
        del tensors
        made = rule.convert(prefix + name, model=self.model, config=self.model.config)
        first = {key: one[0] if isinstance(one, list) else one for key, one in made.items()}
        return {key.removeprefix(prefix): tensor for key, tensor in first.items()}
