"""One decode step of a transformers model, recorded: what it was asked for, what is filled in before each replay."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from kvq_runtime.attention.cuda_graph import Record, captured, refused
from kvq_runtime.hf.cache import KVQCache

FILLED = ("input_ids", "position_ids")  # what is new in each step
TAKEN = {*FILLED, "attention_mask", "past_key_values"}


class Asked:
    """The arguments of a step beside its token, and its model: a recorded step gives nothing else."""

    def __init__(self, model: PreTrainedModel, given: dict[str, Any]):
        others = {name: value for name, value in given.items() if name not in TAKEN and value is not None}
        self.settings = {name: value for name, value in others.items() if isinstance(value, (bool, int, float, str))}
        self.unknown = sorted(others.keys() - self.settings.keys())
        mask, places = given.get("attention_mask"), given.get("position_ids")
        if mask is not None and mask.ndim != 2:
            self.unknown.append("a mask of the caller's own")
        if places is None:
            self.unknown.append("no position_ids")
        self.shapes = [given[name].shape for name in FILLED if given.get(name) is not None]
        self.attention = model.config.get_text_config(decoder=True)._attn_implementation
        self.autocast = torch.is_autocast_enabled(model.device.type)
        self.model = model.training, [weight.data_ptr() for weight in model.parameters()]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Asked) and vars(self) == vars(other)

    def refused(self, cache: KVQCache) -> str | None:
        """Return the reason why a step of this kind is never recorded; None: it may be."""
        if self.attention != "kvq":
            way = 'call model.set_attn_implementation("kvq")'
            return f"{self.attention} attention decodes the history at each step; {way}"
        if self.unknown:
            return f"the model is given {' and '.join(self.unknown)}, which no replay fills in"
        if self.autocast:
            return "autocast is on, which keeps weights in another dtype that may be gone at the next step"
        if len(cache.places) < len(cache.layers):
            return "some layers are held by transformers' own classes, whose tensors grow with every token"
        return refused(cache.blocks)


class RecordedStep:
    """A step of one cache: its own token and position to be filled in, and the class in which its logits go back.

    Raises RuntimeError where the step cannot be recorded.
    """

    def __init__(self, model: PreTrainedModel, asked: Asked, given: dict[str, Any], record: Record):
        cache, self.asked = given["past_key_values"], asked
        with torch.inference_mode(False):
            self.inputs = {name: given[name].clone() for name in FILLED}
        self.kind: type[ModelOutput] = ModelOutput
        inputs = self.inputs

        def step() -> Tensor:
            out = model(**inputs, past_key_values=cache, **asked.settings)
            others = [name for name in out if name not in ("logits", "past_key_values")]
            if others:
                raise RuntimeError(f"the model gives {' and '.join(others)} beside logits")
            self.kind = type(out)
            return out.logits

        self.recorded = captured(cache.blocks, step, record)

    def ready(self) -> bool:
        """True if the step can be replayed in the cache's present state."""
        return self.recorded.ready()

    def take(self, given: dict[str, Any]) -> ModelOutput:
        """Replay it for this token. The logits are the caller's to keep."""
        for name, held in self.inputs.items():
            held.copy_(given[name])
        logits = self.recorded.replay().clone()
        return self.kind(logits=logits, past_key_values=given["past_key_values"])
