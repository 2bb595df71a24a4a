"""Build a model of transformers without memory, and run what stands around its layers: its own code, not a copy of it.

In the place of each layer stands a `Place` (`places.py`). What the decoder does under the first layer (to scale
embeddings), between layers, and the model above the last (norm, output head, multipliers, soft caps) is so what the
model itself does.
A layer that a pass goes through again is another layer each time, of the same weights.

E = hidden width · V = vocabulary.
"""

import contextlib
import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
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
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from kvq_calib.model.attention import hidden_queries
from kvq_calib.model.carried import INPUT, TABLE, TOKENS, Carried
from kvq_calib.model.places import Call, Pass, Place, Seen, Walk, passing
from kvq_calib.model.standard import attention_of, caching, layers_name, looped, turns, visits
from kvq_runtime.geometry import attending
from kvq_runtime.hf.attention import dense
from kvq_runtime.hf.model import (
    CACHE,
    decoder_of,
    layers_of,
    rope_refusal,
    rotary_module,
    settings_of,
    visible,
)
from kvq_runtime.ops.dense import Softmax

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CAPTURED = "kvq-captured"  # the attention of a streamed layer, by the name that transformers knows it by
# types of layers that keep a state in place of keys and values; or, the last two, nothing
RECURRENT = ("linear_attention", "conv", "moe", "mlp")


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
    mask = attention_mask
    if module.seen is not None:
        found = {"k": key, "v": value, "q": query, "scale": scaling, "softmax": Softmax.of(given)}
        if hasattr(module, "indexer") and mask is not None:
            found["mask"] = visible(mask)
        for name, one in found.items():
            module.seen.setdefault(name, one)  # of rows what is cached has been noted
        if module.seen.get("alone"):
            raise Seen
    return dense(module, query, key, value, mask, scaling, **given)


AttentionInterface.register(CAPTURED, captured)
AttentionMaskInterface.register(CAPTURED, sdpa_mask)


class Noted(DynamicCache):
    """Stand in a cache's place, of a model that hides its queries: note what it gets, [B, H, T, D] each."""

    def __init__(self, config: Any, what: str | None, seen: dict[str, Any]):
        super().__init__(config=config)
        self.layers += [copy.deepcopy(self.layers[n]) for n in looped(settings_of(config))]
        self._what, self._seen = what, seen

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_given: Any) -> tuple[Tensor, Tensor]:
        """Take in what a layer caches, and return it."""
        pair = key_states, value_states
        self._seen["k"], self._seen["v"] = pair
        if self._seen.get("alone"):
            raise Seen
        return key_states, value_states


def noting(seen: dict[str, Any], turned: int) -> Any:
    """A hook on what puts out entries, with their mask: note them as a cache stores them; `turned`: as of `pooled`."""

    def hook(_module: Any, _given: Any, out: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        read = out[0]
        if seen.get("alone"):
            raise Seen
        return read, out[1]

    return hook


def empty(config: "PreTrainedConfig", dtype: torch.dtype | None) -> Any:
    """The whole model, as transformers makes it, without memory."""
    with torch.device("meta"):
        return maker(config).from_config(config, dtype=dtype).eval()


def hollow(module: Any, device: torch.device | str = "cpu") -> Any:
    """The module, its parameters zeros that take no memory."""
    for part in module.modules():
        for name, one in part.named_parameters(recurse=False):
            nothing = torch.zeros((), dtype=one.dtype, device=device).expand(one.shape)
            setattr(part, name, nn.Parameter(nothing, requires_grad=False))
    return module


class Decoder:
    """A model without weights: its layers, whose attention notes what it gets, and all around them with a Place for
    each."""

    def __init__(self, config: "PreTrainedConfig", dtype: torch.dtype):
        made = empty(config, dtype)
        _keep_float32(made, dtype)
        self.whole = made
        self.config, self.hides = made.config.get_text_config(decoder=True), hidden_queries(made)
        if self.hides is None:
            self.config._attn_implementation = CAPTURED  # not of towers, which may know no other attention than theirs
        settings = settings_of(self.config)
        self.carried = Carried.of(settings)
        self.parameters = list(made.state_dict())
        # of layers that are none of its modules any more: rules for files that fuse parameters ask how wide each is
        made.get_parameter = dict(made.named_parameters(remove_duplicate=False)).__getitem__
        core: Any = decoder_of(made)
        named = {id(module): name for name, module in made.named_modules()}
        self.core_name = named[id(core)]
        self.table = f"{named[id(made.get_input_embeddings())]}.weight"
        self.output = f"{named[id(output_of(made))]}.weight"
        self.whole_layers, self.each = list(layers_of(core)), caching(settings)
        halves = [one for layer in self.whole_layers for one in split(layer, self.each)]
        self.layers = [halves[n] for n in visits(settings)]
        self.calls = self.passed = len(self.layers) // self.each  # of layers in a pass, by the configuration, and seen
        self.attending = attending(settings)  # of the layers
        self.within = f"{self.core_name}.{layers_name(core)}"  # the name of their list
        self.places: Any = nn.ModuleList(map(Place, self.whole_layers))
        setattr(core, str(layers_name(core)), self.places)
        self._called, self.written = dict[str, set[int]](), False
        for paired in (False, True):
            for place in self.places:
                place.paired = paired
            if self._walk():
                break

    def top(self) -> dict[str, nn.Module]:
        """The modules with parameters above the layers, by name: the last norm, and the output head."""
        core: Any = decoder_of(self.whole)
        within = {f"{self.core_name}.{name}": module for name, module in core.named_children()}
        holds = {id(module) for module in self.whole.children() if any(part is core for part in module.modules())}
        beside = {name: module for name, module in self.whole.named_children() if id(module) not in holds}
        head = {self.output.removesuffix(".weight"): output_of(self.whole)}
        below = [f"{name}." for name in self._below]
        return {
            name: module
            for name, module in (within | beside | head).items()
            if name in self._run and not any(one.startswith(f"{name}.") for one in below)
        }

    def entry(self) -> dict[str, nn.Module]:
        """The modules that make of embeddings what the first layer gets, or of outputs what others get, by name: of
        positions, norms, streams."""
        tables = self.table, f"{self.core_name}.{TABLE}.weight"
        within = (name for name in self._below if name != self.core_name)
        return {name: self.whole.get_submodule(name) for name in within if f"{name}.weight" not in tables}

    @property
    def apart(self) -> list[str]:
        """The modules with parameters, by name, that are called elsewhere than under layers, or else above all; between
        layers, where what these put out is not handed on as it is."""
        known = {*range(self.calls)} if self.carried.held else {0}
        return [name for name, behind in self._called.items() if not (behind <= known or behind == {self.calls})]

    @property
    def _below(self) -> list[str]:
        return [name for name, behind in self._called.items() if min(behind, default=self.calls) < self.calls]

    @torch.inference_mode(False)
    @torch.enable_grad()
    def _walk(self) -> bool:
        """Go through the decoder, and note {module with parameters of its own: behind how many layers it is called}, by
        name, and of which outputs it makes what. False if it does not take what layers put out."""
        core: Any = self.settled(hollow(copy.deepcopy(decoder_of(self.whole))), torch.device("cpu"))
        walk, self._called = Walk(), {}
        for name, module in core.named_modules(prefix=self.core_name):
            if next(module.parameters(recurse=False), None) is not None:
                self._called[name] = behind = set()
                module.register_forward_pre_hook(lambda *_given, behind=behind: behind.add(len(walk.called)))
        core.get_input_embeddings().register_forward_hook(lambda _module, _given, out: walk.put_out(-1, out))
        out: Any = None
        with contextlib.suppress(Exception), passing(core, walk):  # of the decoder's own, whatever class it has
            out = core(input_ids=torch.zeros(2, 3, dtype=torch.long), use_cache=False)[0]
        if getattr(out, "shape", ())[:2] != (2, 3):
            return False
        self.carried = replace(self.carried, held=walk.held(out))
        self.passed, self.written = len(walk.called), walk.written
        return True

    @cached_property
    def _run(self) -> set[str]:
        """The modules with parameters that text goes through, but for the table of tokens; not those of images.

        Those that are called, without memory; all but towers where the model does not run so.
        """
        core, table = decoder_of(self.whole), self.whole.get_input_embeddings()
        held = {
            name: module
            for name, module in self.whole.named_modules()
            if module is not table and next(module.parameters(), None) is not None
        }
        called: set[str] = set()
        hooks = [
            # with what it is in, too: a list of modules is never called itself
            module.register_forward_pre_hook(
                lambda _m, _given, name=name: called.update((name, name.rpartition(".")[0]))
            )
            for name, module in held.items()
        ]
        nothing = torch.empty(1, 2, self.carried.embedded, device="meta")
        try:
            with torch.no_grad(), self.carried.muted(core):
                # with a cache no position is looked at, of which there are none without memory
                self.whole(inputs_embeds=nothing, **{CACHE: DynamicCache(config=self.config)}, use_cache=True)
        except Exception:  # of the model's own, whatever class it has
            called = {name for name, module in held.items() if not isinstance(module, PreTrainedModel)}
        finally:
            for hook in hooks:
                hook.remove()
        return called

    def under(self, device: torch.device) -> "Under":
        """The decoder without what stands above its layers, on a device."""
        core = self.settled(hollow(copy.deepcopy(decoder_of(self.whole)), device), device)
        with self.carried.muted(core):
            refusal = rope_refusal(self.whole)
        return Under(core, self.carried, self.calls, refusal)

    def settled(self, module: Any, device: torch.device) -> Any:
        """The module, its buffers that no file has (frequencies, scales of embeddings) set as transformers does."""
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
        if type(module) in map(type, self.layers) and any(bool(one.isnan().any()) for one in module.buffers()):
            self._settle_of_model(module)
        return module

    @torch.no_grad()
    def _settle_of_model(self, layer: Any) -> None:
        """Set the buffers that a decoder sets in all of its layers (Falcon H1), in one that is none of its modules."""
        core: Any = decoder_of(self.whole)
        around = copy.copy(core)
        around._modules = core._modules | {str(layers_name(core)): nn.ModuleList([layer])}
        core._init_weights(around)


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


class Under:
    """All that stands under the layers of a decoder: embeddings, rotations, masks; and what it does between them.

    refusal   the reason why RoPE cannot be undone; None if it can
    """

    def __init__(self, core: Any, carried: Carried, calls: int, refusal: str | None):
        self.core, self._carried, self._calls, self.refusal = core, carried, calls, refusal
        self._last: tuple[Any, list[Call]] = None, []

    def embed(self, tokens_BT: Tensor, places_BT: Tensor, *rows: Tensor) -> Tensor:
        """Embed tokens, by their places in these rows, for the first layer: rows of the table, and of that of inputs by
        layer, if there is one."""
        tables = [self.core.get_input_embeddings(), getattr(self.core, TABLE, None)][: len(rows)]
        empty = [table.weight for table in tables]
        for table, own in zip(tables, rows, strict=True):
            table.padding_idx, table.weight = None, nn.Parameter(own, requires_grad=False)
        try:
            given: Any = {"input_ids": places_BT} if len(rows) > 1 else {"inputs_embeds": tables[0](places_BT)}
            if self._carried.held:
                return self._carried.hold({-1: given["inputs_embeds"]}, 0)
            called = self._called(self._calls - 1, **given)
        finally:
            for table, weight in zip(tables, empty, strict=True):
                table.weight = weight
        inputs = [call[INPUT] for _, call in called] if len(rows) > 1 else []
        numbers = tokens_BT[..., None] if self._carried.named == TOKENS else None
        return self._carried.pack(called[0][0], inputs, numbers)

    def layer(self, number: int, outs: Mapping[int, Tensor]) -> tuple[Tensor, Call]:
        """What a layer is called with, hidden states and the rest, where those below have put out `outs`."""
        some = next(iter(outs.values()))
        embedded = outs.get(-1, some.new_zeros(*some.shape[:-1], self._carried.embedded))
        with self._carried.muted(self.core):
            return self._called(number, outs, inputs_embeds=embedded)[number]

    def _called(
        self, last: int, outs: Mapping[int, Tensor] = MappingProxyType({}), **given: Any
    ) -> list[tuple[Tensor, Call]]:
        with passing(self.core, Pass(outs, last)) as one:
            self.core(**given, use_cache=False)
        return one.called

    def calls(
        self, batch: int, tokens: int, dtype: torch.dtype, device: torch.device, embedded: float = 0.0
    ) -> list[Call]:
        """The arguments of each layer beside hidden states, for whole sequences from position 0.

        embedded   of tokens, all their numbers: what a layer is given is the same for any
        """
        key = batch, tokens, dtype, device, embedded
        if self._last[0] != key:
            rows = torch.full((batch, tokens, self._carried.embedded), embedded, dtype=dtype, device=device)
            with torch.no_grad(), self._carried.muted(self.core):
                called = self._called(self._calls - 1, inputs_embeds=rows)
            each = caching(settings_of(self.core.config))
            self._last = key, [call for _, call in called for _ in range(each)]
        return self._last[1]

    def turns(self, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions 0 to tokens - 1, float32, as the decoder's own module computes them."""
        positions = torch.arange(tokens, device=device)[None]
        return turns(rotary_module(self.core), torch.empty(0, dtype=torch.float32, device=device), positions)


def split(layer: Any, count: int) -> list[Any]:
    """A layer; of two attentions (LongCat Flash) two that compute the same, one after the other.

    The first hands on what its experts put out, behind the stream, and the second adds it, as the layer does at its
    end. Each is the layer itself, in which nothing stands in the place of the other's parts.
    """
    if count == 1:
        return [layer]
    first, second = copy.deepcopy(layer), copy.deepcopy(layer)
    for half, other in ((first, 1), (second, 0)):
        half.self_attn[other] = half.mlps[other] = Nothing()
        half.input_layernorm[other] = half.post_attention_layernorm[other] = nn.Identity()
    first.mlp.register_forward_hook(_held_back)
    first.register_forward_hook(_handed_on)
    second.mlp = Nothing()
    second.register_forward_pre_hook(_taken_off)
    second.register_forward_hook(_added)
    return [first, second]


class Nothing(nn.Module):
    """Stand in the place of an MLP, or of attention, which is called by names: add nothing to the stream."""

    def forward(self, hidden_states: Tensor, **given: Any) -> Any:
        nothing = torch.zeros_like(hidden_states)
        return (nothing, None) if given else nothing


def _held_back(mlp: Any, _given: Any, out: Tensor) -> Tensor:
    mlp.held = out
    return torch.zeros_like(out)


def _handed_on(layer: Any, _given: Any, out: Tensor) -> Tensor:
    return torch.cat([out, layer.mlp.held], -1)


def _taken_off(layer: Any, given: tuple) -> tuple:
    hidden, layer.held = given[0].chunk(2, -1)
    return hidden, *given[1:]


def _added(layer: Any, _given: Any, out: Tensor) -> Tensor:
    return out + layer.held


def output_of(model: Any) -> Any:
    """The output head of a model, or of the model of text within (Nemotron 3 Nano Omni)."""
    found = (part.get_output_embeddings() for part in (model, *model.children()) if isinstance(part, PreTrainedModel))
    return next((head for head in found if head is not None), None)


def attentions(layers: Iterable[tuple[int, Any]], config: Any) -> Iterator[tuple[int, nn.Module]]:
    """The attention modules of layers, by number in the model; of those that recur there are none."""
    kinds, order = getattr(config, "layer_types", None), visits(settings_of(config))
    for n, layer in layers:
        module = attention_of(layer)
        if module is not None and not (kinds and kinds[order[n]] in RECURRENT):
            yield n, module


def maker(config: "PreTrainedConfig") -> Any:
    """The class of transformers that makes a model: of text where there is one of its type, which reads its files
    (Emu 3's does not), else of text and images."""
    of_text = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and config.model_type != "emu3"
    return AutoModelForCausalLM if of_text else AutoModelForImageTextToText
