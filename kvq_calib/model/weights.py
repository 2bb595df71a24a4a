"""Fill modules of transformers with the tensors of a model's files.

Files name tensors as the model's authors did: transformers knows by type of model how they are renamed, and which are
put together, as experts are, which files have one by one. Its own rules are applied, to one module at a time.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from kvq_calib.model.decoder import Decoder


class Files(Protocol):
    """The part of `ModelFiles` that is read here; that class asks this module for the names of its own tensors."""

    @property
    def id(self) -> str: ...
    @property
    def held(self) -> Mapping[str, str]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def transformers_config(self) -> Any: ...
    def copied(self, name: str, device: torch.device, dtype: torch.dtype) -> Tensor: ...
    def rows(self, name: str, places: Tensor) -> Tensor: ...


class Weights:
    """The tensors of a model's files, by the parameters of transformers' model."""

    def __init__(self, files: Files, decoder: Decoder):
        self.files, self._decoder = files, decoder
        rules = get_model_conversion_mapping(decoder.whole)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._converter = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        known, prefix = dict.fromkeys(decoder.parameters, True), decoder.whole.base_model_prefix
        # {parameter: the tensors that it is made of, each with the pattern of the rule that put it here, if one did}
        self._sources: dict[str, list[tuple[str, str | None]]] = {}
        for name in sorted(files.held, key=dot_natural_key):
            target, pattern = name, None
            if name not in known:
                target, pattern = rename_source_key(name, renamings, converters, prefix, known)
            self._sources.setdefault(target, []).append((name, pattern))
        for target, source in decoder.whole.all_tied_weights_keys.items():
            if target not in self._sources and source in self._sources:
                self._sources[target] = self._sources[source]

    @staticmethod
    def of(files: Files) -> "Weights":
        """Those of a model of which nothing else is needed."""
        return Weights(files, Decoder(files.transformers_config(), torch.float32))

    @property
    def parameters(self) -> tuple[str, Mapping[str, str], frozenset[str], Sequence[tuple[str, str]]]:
        """Those of the text, by the tensors of the files: fields of `Parameters`."""
        decoder = self._decoder
        text = f"{decoder.core_name}.", f"{decoder.output}."
        own = {target: parts for target, parts in self._sources.items() if target.startswith(text)}
        named = {name: target for target, parts in reversed(own.items()) for name, _ in parts}
        made = {name for parts in own.values() for name, rule in parts if rule is not None or len(parts) > 1}
        tied = [(name, target) for target, parts in own.items() for name, _ in parts if target != named[name]]
        return decoder.within, named, frozenset(made), tied

    def filled(self, empty: nn.Module, name: str, device: torch.device) -> nn.Module:
        """A copy of a module, by its name in the model, with weights of its own."""
        module = copy.deepcopy(empty)
        wanted = {name: parameter.dtype for name, parameter in module.state_dict().items()}
        tensors: dict[str, Tensor] = {}
        for own, dtype in wanted.items():
            if own not in tensors:
                tensors |= self._made(f"{name}.", own, device, dtype)
        try:
            module.load_state_dict({own: tensors[own] for own in wanted if own in tensors}, assign=True)
        except RuntimeError as error:
            raise ValueError(f"the weights of {self.files.id} do not fit its config.json: {error}") from error
        return self._decoder.settled(module.requires_grad_(False), device)

    def rows(self, target: str, places: Tensor) -> Tensor:
        """Single rows of a table, on the CPU; where it is one tensor of the files, the others are not read."""
        parts = self._sources.get(target, [])
        if not parts:
            raise ValueError(f"{self.files.id} has no tensor for {target}; is the folder complete?")
        if len(parts) == 1 and parts[0][1] is None:
            return self.files.rows(parts[0][0], places)
        start, _, name = target.rpartition(".")
        made = self._made(f"{start}.", name, torch.device("cpu"), self.files.dtype)[name]
        return nn.functional.embedding(places, made)

    def _made(self, prefix: str, name: str, device: torch.device, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """A parameter of a module, and what its rule makes beside it, by their names; nothing if no file has it."""
        target = prefix + name
        parts = self._sources.get(target)
        if parts is None:
            return {}
        tensors = [self.files.copied(stored, device, dtype) for stored, _ in parts]
        found = self._converter.get(parts[0][1] or "")
        if found is None:
            return {name: tensors[0]}
        rule: Any = copy.deepcopy(found)
        for (stored, pattern), tensor in zip(parts, tensors, strict=True):
            rule.add_tensor(target, stored, pattern, tensor)
        del tensors
        made = rule.convert(target, model=self._decoder.whole, config=self._decoder.config)
        first = {key: one[0] if isinstance(one, list) else one for key, one in made.items()}
        return {key.removeprefix(prefix): tensor for key, tensor in first.items()}
