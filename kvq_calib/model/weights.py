"""Find and convert the tensors in a model's files that each parameter of transformers' model is made of.

Files name tensors as the model's authors did. transformers knows by type of model how they are renamed, and which are
put together: experts, which files have one by one, are one tensor of its model. Its own rules are applied here, to the
tensors of one module at a time.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from kvq_calib.model.decoder import Decoder
from kvq_calib.model.files import HEAD, ModelFiles


@dataclass(frozen=True)
class Source:
    """What a parameter is made of: tensors of files, each with the pattern of the rule that put it here, if one did."""

    names: tuple[str, ...]
    patterns: tuple[str | None, ...]


class Weights:
    """The tensors of a model's files, by the parameters of transformers' model."""

    def __init__(self, files: ModelFiles, decoder: Decoder):
        self.files, self._decoder = files, decoder
        rules = get_model_conversion_mapping(decoder.whole)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._converter = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        known = dict.fromkeys(decoder.parameters, True)
        found: dict[str, list[tuple[str, str | None]]] = {}
        for name in sorted(files.names, key=dot_natural_key):
            target, pattern = name, None
            if name not in known:
                prefix = decoder.whole.base_model_prefix
                target, pattern = rename_source_key(name, renamings, converters, prefix, known)
            found.setdefault(target, []).append((name, pattern))
        self._sources = {
            target: Source(tuple(name for name, _ in parts), tuple(pattern for _, pattern in parts))
            for target, parts in found.items()
        }
        own = any(HEAD in name for name in files.names)
        if decoder.output not in self._sources and decoder.table in self._sources and not own:
            self._sources[decoder.output] = self._sources[decoder.table]  # tied

    def filled(self, empty: nn.Module, prefix: str, device: torch.device) -> nn.Module:
        """A copy of a module with weights of its own. `prefix`: what its parameters' names begin with in the model."""
        module = copy.deepcopy(empty)
        wanted = {name: parameter.dtype for name, parameter in module.state_dict().items()}
        tensors: dict[str, Tensor] = {}
        for name, dtype in wanted.items():
            if name not in tensors:
                tensors |= self._made(prefix, name, device, dtype)
        try:
            module.load_state_dict({name: tensors[name] for name in wanted if name in tensors}, assign=True)
        except RuntimeError as error:
            raise ValueError(f"the weights of {self.files.id} do not fit its config.json: {error}") from error
        return self._decoder.settled(module.requires_grad_(False), device)

    def stored(self, target: str) -> str:
        """The one tensor of the files that a parameter is. ValueError if there is none, or it is made of several."""
        names = self._sources[target].names if target in self._sources else ()
        if len(names) != 1:
            raise ValueError(f"{self.files.id} has {len(names)} tensors for {target}, not one; is the folder complete?")
        (name,) = names
        return name

    def _made(self, prefix: str, name: str, device: torch.device, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """A parameter of a module, and what its rule makes beside it, by their names; nothing if no file has it."""
        target = prefix + name
        source = self._sources.get(target)
        if source is None:
            return {}
        tensors = [self.files.copied(stored, device, dtype) for stored in source.names]
        found = self._converter.get(next(iter(source.patterns)) or "")
        if found is None:
            return {name: tensors[0]}
        rule: Any = copy.deepcopy(found)
        for stored, pattern, tensor in zip(source.names, source.patterns, tensors, strict=True):
            rule.add_tensor(target, stored, pattern, tensor)
        del tensors
        made = rule.convert(target, model=self._decoder.whole, config=self._decoder.config)
        first = {key: one[0] if isinstance(one, list) else one for key, one in made.items()}
        return {key.removeprefix(prefix): tensor for key, tensor in first.items()}
