"""Build a model of transformers without memory, and run what stands around its layers: its own code, not a copy of it.

In the place of each layer stands a `Place`, which notes what the decoder calls the layer with (rotations, masks), and
puts out its input, or what it is told to. What the decoder does under the first layer (to scale embeddings) and the
model above the last (norm, output head, multipliers, soft caps) is so what the model itself does.

`check` asks the configuration and these modules, not the name, whether a model can be run one layer at a time.

E = hidden width · V = vocabulary.
"""

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
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
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming, rename_source_key
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from kvq_calib.model.carried import ENTRY, EXIT, TABLE, Carried, blank
from kvq_runtime.artifact.fingerprint import LATENT_PROJECTIONS
from kvq_runtime.geometry import attending, owners, stretches
from kvq_runtime.hf.attention import dense
from kvq_runtime.hf.model import CACHE, FULL, LISTED, attention_modules, check_model, rope_refusal, rotary_module, turns
from kvq_runtime.ops.dense import Softmax

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CAPTURED = "kvq-captured"  # the attention of a streamed layer, by the name that transformers knows it by
Call = dict[str, Any]  # a layer's arguments beside hidden states, by name
GIVEN = {"attention_mask", "position_ids", "position_embeddings", "per_layer_input"}  # tensors among them
RECURRENT = ("linear_attention", "conv")  # types of layers that keep a state in place of keys and values
LEARNED = {"sinks"}  # parameters of attention itself that it hands to the function that attends


class Seen(Exception):
    """Ends a layer's forward pass where attention begins."""


def _captured(
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
        found = {"k": key, "v": value, "q": query, "scale": scaling, "softmax": Softmax.of(given)}
        for name, one in found.items():
            module.seen.setdefault(name, one)  # of latents what is cached has been noted
        if module.seen.get("alone"):
            raise Seen
    return dense(module, query, key, value, attention_mask, scaling, **given)


AttentionInterface.register(CAPTURED, _captured)
AttentionMaskInterface.register(CAPTURED, sdpa_mask)


class Place(nn.Module):
    """Stand in a layer's place: note what it is called with; put out `out`, or else the input."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        plain = {name: value for name, value in vars(layer).items() if type(value) in (bool, int, str)}
        self.__dict__ |= {name: value for name, value in plain.items() if name not in self.__dict__}
        parameters = list(inspect.signature(type(layer).forward).parameters.values())[2:]
        self._named = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        self.call: Call = {}
        self.under: Tensor | None = None
        self.out: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **given: Any) -> Tensor:
        self.under, self.call = hidden_states, dict(zip(self._named, args, strict=False)) | given
        return hidden_states if self.out is None else self.out


def _empty(config: "PreTrainedConfig", dtype: torch.dtype | None) -> Any:
    return maker(config).from_config(config, attn_implementation=CAPTURED, dtype=dtype).eval()


class Decoder:
    """A model without weights: its layers, and all around them with a Place for each."""

    def __init__(self, config: "PreTrainedConfig", dtype: torch.dtype):
        with torch.device("meta"):
            made = _empty(config, dtype)
        _keep_float32(made, dtype)
        self.whole, self.dtype = made, dtype
        self.config = made.config.get_text_config(decoder=True)
        self.carried = Carried.of(self.config.to_dict())
        self.parameters = list(made.state_dict())
        core: Any = made.get_decoder()
        named = {id(module): name for name, module in made.named_modules()}
        self.core_name = named[id(core)]
        self.table = f"{named[id(made.get_input_embeddings())]}.weight"
        self.output = f"{named[id(made.get_output_embeddings())]}.weight"
        self.layers = list(core.layers)
        self.attending = attending(self.config.to_dict())  # of the layers
        core.layers = nn.ModuleList(map(Place, self.layers))
        self.around = made

    def blank(self) -> PreTrainedModel:
        """The whole model, as transformers makes it, without memory."""
        with torch.device("meta"):
            return _empty(self.whole.config, self.dtype)

    def top(self) -> dict[str, nn.Module]:
        """The modules with parameters above the layers, by name: the last norm, and the output head."""
        core: Any = self.around.get_decoder()
        table = self.around.get_input_embeddings()
        children = [(name, module) for name, module in core.named_children() if name not in (TABLE, *ENTRY)]
        within = {f"{self.core_name}.{name}": module for name, module in children}
        holds = {id(module) for module in self.around.children() if any(part is core for part in module.modules())}
        beside = {name: module for name, module in self.around.named_children() if id(module) not in holds}
        return {
            name: module
            for name, module in (within | beside).items()
            if module is not table and next(module.parameters(), None) is not None
        }

    def under(self, device: torch.device) -> "Under":
        """The decoder without what stands above its layers, on a device."""
        bare: Any = copy.deepcopy(self.around.get_decoder())
        for name in (*self.top(), *self.entry()):
            parent, _, child = name.rpartition(".")
            if parent == self.core_name:
                setattr(bare, child, blank(getattr(bare, child)))
        core = self.settled(bare, device)
        refusal = rope_refusal(core, [self.layers[n].self_attn for n in self.attending])
        return Under(core, self.config, self.carried, refusal)

    def entry(self) -> dict[str, nn.Module]:
        """The modules that make streams and inputs by layer of embeddings, by name."""
        core: Any = self.around.get_decoder()
        return {f"{self.core_name}.{name}": getattr(core, name) for name in ENTRY if hasattr(core, name)}

    def settled(self, module: Any, device: torch.device) -> Any:
        """The module, its buffers that no file has (frequencies, scales of embeddings) set as transformers does."""
        for parameter in module.parameters():
            parameter._is_hf_initialized = True
        for part in module.modules():
            empty = {name: buffer for name, buffer in part.named_buffers(recurse=False) if buffer.is_meta}
            for name, buffer in empty.items():
                part._buffers[name] = torch.empty_like(buffer, device=device)
            if empty:
                owner: Any = part if isinstance(part, PreTrainedModel) else self.around
                with torch.no_grad():
                    owner._init_weights(part)
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


class Under:
    """All that stands under the layers of a decoder: embeddings, rotations, masks.

    refusal   the reason why RoPE cannot be undone; None if it can
    """

    def __init__(self, core: Any, config: Any, carried: Carried, refusal: str | None):
        self.core, self._config, self._carried = core, config, carried
        self._last: tuple[Any, list[Call]] = None, []
        self.refusal = refusal

    def embed(self, tokens_BT: Tensor, *rows: Tensor) -> Tensor:
        """What is carried under the first layer, of tokens that are numbers of these rows: of the table, and of that of
        inputs by layer, if there is one."""
        tables = [self.core.get_input_embeddings(), getattr(self.core, TABLE, None)][: len(rows)]
        empty = [table.weight for table in tables]
        for table, own in zip(tables, rows, strict=True):
            table.padding_idx, table.weight = None, nn.Parameter(own, requires_grad=False)
        try:
            self.core(input_ids=tokens_BT, use_cache=False)
        finally:
            for table, weight in zip(tables, empty, strict=True):
                table.weight = weight
        inputs = [place.call["per_layer_input"] for place in self.core.layers] if len(rows) > 1 else []
        return self._carried.pack(self._taken(), inputs)

    def calls(self, batch: int, tokens: int, dtype: torch.dtype, device: torch.device) -> list[Call]:
        """The arguments of each layer beside hidden states, for whole sequences from position 0."""
        key = batch, tokens, dtype, device
        if self._last[0] != key:
            nothing = torch.zeros((), dtype=dtype, device=device).expand(batch, tokens, self._config.hidden_size)
            with torch.no_grad(), self._carried.muted(self.core):
                self.core(inputs_embeds=nothing, use_cache=False)
            self._last = key, [place.call for place in self.core.layers]
            self._taken()
        return self._last[1]

    def turns(self, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions 0 to tokens - 1, float32, as the decoder's own module computes them."""
        positions = torch.arange(tokens, device=device)[None]
        return turns(rotary_module(self.core), torch.empty(0, dtype=torch.float32, device=device), positions)

    def _taken(self) -> Tensor:
        found = self.core.layers[0].under
        for place in self.core.layers:
            place.under, place.call = None, {}
        return found


def settings(read: Callable[[], "PreTrainedConfig"], id: str) -> dict[str, Any]:
    """The settings of text that are read, with transformers' defaults for those that a file leaves out."""
    with _explained(f"{id}: config.json is none of its model_type", "download it again"):
        text = read().get_text_config(decoder=True)
        own = text.to_dict()  # where a type calls a setting otherwise, it has the common name too
        return own | {
            name: own[other] for name, other in text.attribute_map.items() if other in own and name not in own
        }


def attentions(layers: Iterable[tuple[int, Any]], config: Any) -> Iterator[tuple[int, nn.Module]]:
    """The attention modules of layers, by number in the model; of those that recur there are none."""
    kinds = getattr(config, "layer_types", None)
    for n, layer in layers:
        module = getattr(layer, "self_attn", None)
        if module is not None and not (kinds and kinds[n] in RECURRENT):
            yield n, module


def known(config: Mapping[str, Any]) -> bool:
    """True if the architecture is what transformers makes of its type: a model of text, or of text and images."""
    named, kind = config.get("architectures"), str(config.get("model_type"))
    made = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind), MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind))
    return isinstance(named, list) and len(named) == 1 and named[0] in made


def maker(config: "PreTrainedConfig") -> Any:
    """The class of transformers that makes a model: of text where there is one of its type, else of text and images."""
    of_text = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return AutoModelForCausalLM if of_text else AutoModelForImageTextToText


def check(config: "PreTrainedConfig", id: str) -> None:
    """Raise ValueError, a sentence, for a model that cannot be run a layer at a time, and compressed in some layers."""
    text = config.get_text_config(decoder=True)
    _check_config(text, id)
    with torch.device("meta"), _explained(f"{id}: transformers makes no model of config.json", "check it"):
        model: Any = _empty(config, None)
    check_model(model)
    attention_modules(model, attending(text.to_dict()))
    attend = dict(attentions(enumerate(model.get_decoder().layers), text))
    learned = {name for module in attend.values() for name, _ in module.named_parameters(recurse=False)}
    if learned - LEARNED:
        raise ValueError(
            f"{id}: its attention has parameters of its own ({', '.join(sorted(learned))}), which calibration does not "
            f"know; use a recipe that needs no fit, or another model; {LISTED}"
        )
    for n in attending(text.to_dict()):
        named = ("qkv_proj",), ("k_proj", "v_proj"), LATENT_PROJECTIONS.values()
        told = next((names for names in named if all(hasattr(attend[n], name) for name in names)), None)
        if told is None:
            raise ValueError(
                f"{id}: {type(attend[n]).__name__} has no k_proj and v_proj, and no qkv_proj, by which an artifact "
                f"knows its model; use a recipe that needs no fit; {LISTED}"
            )
        wanted = [f"layers.{n}.self_attn.{name}.weight" for name in told]
        if (stored := _stored(model, wanted)) != wanted:
            raise ValueError(
                f"{id}: its files have {stored[0]}, and no {wanted[0]}, by which an artifact knows its model; use a "
                f"recipe that needs no fit, or another model; {LISTED}"
            )
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    if getattr(text, "sliding_window", None):
        text.sliding_window = 2
    decoder = Decoder(config, torch.float32)
    above = [name for name in decoder.top() if not name.endswith(EXIT)]
    if len(above) > 2:
        raise ValueError(
            f"{id}: {', '.join(above)} stand beside its layers; a last norm and an output head can; {LISTED}"
        )
    under = decoder.under(torch.device("cpu"))
    _check_cache(under, id)
    calls = under.calls(1, 4, torch.float32, torch.device("cpu"))
    unknown = {key for given in calls for key, value in given.items() if isinstance(value, Tensor)} - GIVEN
    if unknown:
        what = ", ".join(sorted(unknown))
        raise ValueError(f"{id}: its layers are given {what}, which is known of the whole model alone; {LISTED}")
    masks: list[Any] = [given.get("attention_mask") for given in calls]
    caching = [n for n in attend if n < owners(text.to_dict())]
    whole = [n for n in caching if masks[n] is None or bool(masks[n][..., -1, 0].all())]
    if whole != list(decoder.attending):
        raise ValueError(
            f"{id}: by its configuration layers {_numbers(list(decoder.attending))} attend to every token, by its "
            f"masks {_numbers(whole) or 'none'}; {LISTED}"
        )


def _stored(model: Any, names: Iterable[str]) -> list[str]:
    """The names that parameters have in the files that transformers writes of such a model."""
    rules = [rule.reverse_transform() for rule in reversed(get_model_conversion_mapping(model, add_legacy=False))]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming) and not isinstance(rule, PrefixChange)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    return [rename_source_key(name, renamings, converters, reverse=True)[0] for name in names]


def _check_cache(under: "Under", id: str) -> None:
    """Refuse a decoder that does not go with transformers' own cache, in whose place ours stands."""
    config: Any = under.core.config
    muted = under._carried.muted(under.core)
    with torch.no_grad(), muted, _explained(f"{id}: it does not run with transformers' own cache", LISTED):
        nothing = torch.zeros(1, 4, config.hidden_size)
        under.core(inputs_embeds=nothing, **{CACHE: DynamicCache(config=config)}, use_cache=True)


def _check_config(config: "PreTrainedConfig", id: str) -> None:
    """Refuse what the configuration says that calibration does not know."""
    kinds = getattr(config, "layer_types", None) or []
    other = [n for n, kind in enumerate(kinds) if kind not in (FULL, "sliding_attention", *RECURRENT)]
    if other:
        raise ValueError(
            f"{id}: layers {_numbers(other)} of {len(kinds)} are of type {kinds[other[0]]!s:.40}; calibration takes "
            f"models whose layers attend to every token, slide over a window, or recur; {LISTED}"
        )
    if "sliding_attention" in kinds and not getattr(config, "sliding_window", None):
        raise ValueError(f"{id}: some of its layers slide, and config.json has no sliding_window; {LISTED}")
    first, count = stretches(config.to_dict())[-1].start, owners(config.to_dict())
    apart = [kind for kind in dict.fromkeys(kinds[count:]) if kind not in kinds[first:count]]
    if apart:
        raise ValueError(
            f"{id}: its last layers share keys and values of a layer of type {apart[0]!s:.40} below layer {first}, "
            f"with which they are not run; use a recipe that needs no fit; {LISTED}"
        )


@contextmanager
def _explained(said: str, advice: str) -> Iterator[None]:
    """Make a sentence of what transformers raises, whatever class it has."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{said}: {' '.join(str(error).split()):.200}; {advice}") from error


def _numbers(layers: list[int]) -> str:
    """The first few of them."""
    return ", ".join(map(str, layers[:6])) + (", ..." if len(layers) > 6 else "")
