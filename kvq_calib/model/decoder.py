"""Build a model of transformers without memory, and run what stands around its layers: its own code, not a copy of it.

A `Stub` stands in the place of each layer. It notes the arguments that the decoder makes (rotations, masks), and what
the decoder does to embeddings under the first layer.

E = hidden width · V = vocabulary.
"""

import copy
import inspect
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvq_runtime.families import ATTENTION, LAYERS
from kvq_runtime.hf.attention import dense
from kvq_runtime.hf.model import decoder_of
from kvq_runtime.ops.dense import Softmax

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CAPTURED = "kvq-captured"  # the attention of a streamed layer, by the name that transformers knows it by
Call = dict[str, Any]  # a layer's arguments beside hidden states, by name


class Seen(Exception):
    """Ends a layer's forward pass where attention begins."""


def captured(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Attention that notes in the module's `seen`, if it has one, what it gets: [B, H, T, D], after RoPE."""
    if module.seen is not None:
        module.seen.update(k=key, v=value, q=query, scale=scaling, softmax=Softmax.of(given))
        if module.seen.get("alone"):
            raise Seen
    return dense(module, query, key, value, attention_mask, scaling, **given)


AttentionInterface.register(CAPTURED, captured)
AttentionMaskInterface.register(CAPTURED, sdpa_mask)


class Stub(nn.Module):
    """Stand in a layer's place: note the arguments; put out the input, or `out`."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        plain = {name: value for name, value in vars(layer).items() if isinstance(value, str | int | float)}
        self.__dict__ |= plain  # as types of layers, by which decoders choose masks
        parameters = list(inspect.signature(type(layer).forward).parameters.values())[2:]
        self._named = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        self.hidden: Tensor | None = None
        self.call: Call = {}
        self.out: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **given: Any) -> Tensor:
        self.hidden, self.call = hidden_states, dict(zip(self._named, args, strict=False)) | given
        return hidden_states if self.out is None else self.out


def empty(config: "PreTrainedConfig", dtype: torch.dtype | None) -> Any:
    """Make the whole model, as transformers does, without memory."""
    with torch.device("meta"):
        return maker(config).from_config(config, dtype=dtype).eval()


def maker(config: "PreTrainedConfig") -> Any:
    """Return the class of transformers that makes a model: of text if its type has one, else of text and images."""
    return (
        AutoModelForCausalLM if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModelForImageTextToText
    )


def hollow(module: Any, device: torch.device | str = "cpu") -> Any:
    """Make a module's parameters zeros that take no memory."""
    for part in module.modules():
        for name, one in part.named_parameters(recurse=False):
            nothing = torch.zeros((), dtype=one.dtype, device=device).expand(one.shape)
            setattr(part, name, nn.Parameter(nothing, requires_grad=False))
    return module


class Decoder:
    """A model without weights: its layers, whose attention notes what it gets, and the model with stubs for them."""

    def __init__(self, config: "PreTrainedConfig", dtype: torch.dtype):
        made = empty(config, dtype)
        _keep_float32(made, dtype)
        self.whole, self.config = made, made.config.get_text_config(decoder=True)
        self.config._attn_implementation = CAPTURED  # not of towers, which may know no other attention than theirs
        self.parameters = list(made.state_dict())
        # rules for files that fuse parameters ask how wide each is, of layers that are none of its modules any more
        made.get_parameter = dict(made.named_parameters(remove_duplicate=False)).__getitem__
        core: Any = decoder_of(made)
        named = {id(module): name for name, module in made.named_modules()}
        self.core_name, self.within = named[id(core)], f"{named[id(core)]}.{LAYERS}"
        self.table = f"{named[id(made.get_input_embeddings())]}.weight"
        self.output = named[id(made.get_output_embeddings())]
        self.layers = list(getattr(core, LAYERS))
        setattr(core, LAYERS, nn.ModuleList(map(Stub, self.layers)))

    def top(self) -> dict[str, nn.Module]:
        """Return the modules above the layers by name: the last norm, and the output head."""
        return {name: self.whole.get_submodule(name) for name in (f"{self.core_name}.norm", self.output)}

    def core(self, device: torch.device) -> Any:
        """Return the decoder with stubs, its parameters zeros, on a device."""
        return self.settled(hollow(copy.deepcopy(decoder_of(self.whole)), device), device)

    def settled(self, module: Any, device: torch.device) -> Any:
        """Set the buffers that no file has (frequencies, scales of embeddings), as transformers does."""
        for parameter in module.parameters():
            parameter._is_hf_initialized = True
        owners: dict[str, Any] = {}
        for place, part in module.named_modules():
            above = owners.get(place.rpartition(".")[0], decoder_of(self.whole))
            owners[place] = part if isinstance(part, PreTrainedModel) else above
            unset = {name: buffer for name, buffer in part.named_buffers(recurse=False) if buffer.is_meta}
            for name, buffer in unset.items():
                made = torch.empty_like(buffer, device=device)
                part._buffers[name] = made.fill_(torch.nan) if made.is_floating_point() else made
            if unset:
                with torch.no_grad():
                    owners[place]._init_weights(part)
        return module


def _keep_float32(model: Any, dtype: torch.dtype) -> None:
    """Make float32 what transformers' loader leaves so, whatever dtype is asked for, as biases of routers."""
    patterns = [re.compile(name.replace("*", ".*")) for name in model._get_dtype_plan(dtype)]
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if any(pattern.search(name) for pattern in patterns):
            owner, _, own = name.rpartition(".")
            part = model.get_submodule(owner)
            if own in part._buffers:
                part._buffers[own] = tensor.float()
            else:
                setattr(part, own, nn.Parameter(tensor.float(), requires_grad=False))


class Around:
    """A decoder with stubs for layers: it makes embeddings, rotations and masks."""

    def __init__(self, core: Any):
        self.core = core
        self._last: tuple[Any, list[Call]] = None, []

    def embed(self, places_BT: Tensor, rows: Tensor) -> Tensor:
        """Embed tokens for the first layer, by their places in these rows of the table."""
        table = self.core.get_input_embeddings()
        weight, padding = table.weight, table.padding_idx
        table.padding_idx, table.weight = None, nn.Parameter(rows, requires_grad=False)
        try:
            embedded = table(places_BT)
        finally:
            table.padding_idx, table.weight = padding, weight
        self.core(inputs_embeds=embedded, use_cache=False)
        return getattr(self.core, LAYERS)[0].hidden

    def calls(self, batch: int, tokens: int, dtype: torch.dtype) -> list[Call]:
        """Return the arguments of each layer beside hidden states, for whole sequences from position 0."""
        key = batch, tokens, dtype
        if self._last[0] != key:
            weight = self.core.get_input_embeddings().weight
            nothing = torch.zeros(batch, tokens, weight.shape[1], dtype=dtype, device=weight.device)
            with torch.no_grad():
                self.core(inputs_embeds=nothing, use_cache=False)
            self._last = key, [stub.call for stub in getattr(self.core, LAYERS)]
        return self._last[1]


def attention_in(layer: Any) -> Any:
    """Return the attention of a layer; None of one that recurs."""
    return getattr(layer, ATTENTION, None)
