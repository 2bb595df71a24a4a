"""Refuse a model of an architecture that cannot be run one layer at a time, by what transformers makes of its settings.

Asked are the configuration and the modules, not the name.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from kvq_calib.model.carried import Carried
from kvq_calib.model.decoder import RECURRENT, Decoder, Under, attentions, empty, split
from kvq_calib.model.standard import ENTRIES, SLIDES, WHOLE, caching, joined, visits
from kvq_runtime import families
from kvq_runtime.artifact.fingerprint import PROJECTIONS
from kvq_runtime.geometry import attending, owners, stretches
from kvq_runtime.hf.model import (
    CACHE,
    LISTED,
    attention_modules,
    check_model,
    decoder_of,
    layers_of,
    settings_of,
    visible,
)
from kvq_runtime.recipe import Recipe, weighs

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WIDEST = 1 << 26  # numbers of a parameter along one axis, with room


def settings(read: Callable[[], "PreTrainedConfig"], id: str) -> dict[str, Any]:
    """The settings of text that are read, with transformers' defaults for those that a file leaves out."""
    with _explained(f"{id}: config.json is none of its model_type", "download it again"):
        text = read().get_text_config(decoder=True)
        own = settings_of(text)
    if "num_hidden_layers" not in own:
        raise ValueError(f"{id}: {type(text).__name__} does not say num_hidden_layers, as Llama's does; {LISTED}")
    part = own.get("ffn_config")  # of DBRX
    own = (part if isinstance(part, dict) else {}) | own
    return {"intermediate_size": _inner(own)} | own


def _inner(settings: Mapping[str, Any]) -> Any:
    """The width inside an MLP of a type that has another name for it, or has four times the width of a layer."""
    names = "ffn_hidden_size", "ffn_dim", "n_inner", "dff"
    given = next((settings[name] for name in names if settings.get(name) is not None), None)
    return 4 * settings["hidden_size"] if given is None and type(settings.get("hidden_size")) is int else given


def known(config: Mapping[str, Any]) -> bool:
    """True if the architecture is what transformers makes of its type: a model of text, or of text and images."""
    named, kind = config.get("architectures"), str(config.get("model_type"))
    made = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind), MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind))
    return isinstance(named, list) and len(named) == 1 and named[0] in made


def check(config: "PreTrainedConfig", id: str) -> None:
    """Raise ValueError, a sentence, for a model that cannot be run a layer at a time, and compressed in some layers."""
    if getattr(config, "is_encoder_decoder", False):  # which transformers sets otherwise for the decoder alone
        raise ValueError(f"{id}: config.json has an encoder, too; calibration takes decoders alone; {LISTED}")
    if families.family_of({"model_type": config.model_type}) is None:
        raise ValueError(f"{id}: {families.refusal({'model_type': config.model_type})}")
    text = config.get_text_config(decoder=True)
    _check_config(text, id)
    with _explained(f"{id}: transformers makes no model of config.json", f"check it; {LISTED}"):
        model: Any = empty(config, None)
    for name, one in model.named_parameters():
        if max(one.shape, default=0) > WIDEST:
            raise ValueError(f"{id}: by config.json {name} is {list(one.shape)}, as of no model; download it again")
    check_model(model)
    if model.main_input_name != "input_ids":
        raise ValueError(f"{id}: it needs {model.main_input_name}, and calibration runs models on text alone; {LISTED}")
    attention_modules(model)
    settings = settings_of(text)
    layers = [one for layer in layers_of(decoder_of(model)) for one in split(layer, caching(settings))]
    attend = dict(attentions(enumerate(layers[n] for n in visits(settings)), text))
    _check_attention(attend, attending(settings), id)
    _check_run(copy.deepcopy(config), attend, id)


def refuses_function(config: "PreTrainedConfig", recipe: Recipe) -> str | None:
    """The reason why attention of ours cannot serve a model, as recipes that read queries or weights need; or None."""
    family = families.family_of({"model_type": config.model_type})
    learned = family is not None and family.sinks and weighs(recipe)
    return "its learned sinks take a share of the weights of attention" if learned else None


def _check_attention(attend: Mapping[int, Any], layers: Sequence[int], id: str) -> None:
    """Refuse attention that a fingerprint does not know."""
    named = ("qkv_proj",), tuple(PROJECTIONS.values())
    for n in layers:
        if not any(all(hasattr(attend[n], name.partition(".")[0]) for name in names) for names in named):
            raise ValueError(
                f"{id}: {type(attend[n]).__name__} has no k_proj and v_proj, and no qkv_proj, by which an "
                f"artifact knows its model; use a recipe that needs no fit; {LISTED}"
            )


def _check_run(config: "PreTrainedConfig", attend: Iterable[int], id: str) -> None:
    """Refuse a decoder that, without memory, does not run as its layers alone are run."""
    text = config.get_text_config(decoder=True)
    for width in ("sliding_window", "attention_chunk_size"):
        if getattr(text, width, None):
            setattr(text, width, 2)
    decoder = Decoder(config, torch.float32)
    if decoder.apart:
        raise ValueError(f"{id}: {', '.join(decoder.apart)} stand neither under its layers alone nor above; {LISTED}")
    if decoder.passed != decoder.calls:
        raise ValueError(
            f"{id}: a pass goes through {decoder.passed} layers, and by its configuration {decoder.calls}; {LISTED}"
        )
    carried = decoder.carried
    if carried.held and (decoder.written or replace(carried, held=()).width != carried.embedded):
        how = "which its decoder writes into" if decoder.written else "which have more than one stream"
        raise ValueError(f"{id}: what its layers are called with is made of several outputs below, {how}; {LISTED}")
    under = decoder.under(torch.device("cpu"))
    _check_cache(carried, under, id)
    calls, others = (under.calls(1, 4, torch.float32, torch.device("cpu"), embedded) for embedded in (0.0, 1.0))
    unknown = {
        name
        for given, other in zip(calls, others, strict=True)
        for name, value in given.items()
        if isinstance(value, Tensor)
        and not torch.equal(value, other[name])
        and not (carried.held and value.is_floating_point())  # which the decoder makes again
    }
    if unknown:
        what = ", ".join(sorted(unknown))
        raise ValueError(f"{id}: its layers are given {what} of the tokens below, which is not carried; {LISTED}")
    given: list[Any] = [call.get("attention_mask") for call in calls]
    masks = [one["causal"] if isinstance(one, dict) else one for one in given]  # of ZAYA, with that of its convolution
    caching = [n for n in attend if n < owners(settings_of(text))]
    whole = [n for n in caching if masks[n] is None or bool(visible(masks[n][..., -1, 0]).all())]
    others = joined(settings_of(text)) == ENTRIES  # of which masks may say the contrary
    if whole != list(decoder.attending) and not others:
        raise ValueError(
            f"{id}: by its configuration layers {_numbers(list(decoder.attending))} attend to every token, by its "
            f"masks {_numbers(whole) or 'none'}; {LISTED}"
        )


def _check_cache(carried: Carried, under: Under, id: str) -> None:
    """Refuse a decoder that does not go with transformers' own cache, in whose place ours stands."""
    config = under.core.config
    said = f"{id}: its decoder does not run with transformers' own cache, and its layers apart"
    with torch.no_grad(), carried.muted(under.core), _explained(said, LISTED):
        nothing = torch.zeros(1, 4, carried.embedded)
        under.core(inputs_embeds=nothing, **{CACHE: DynamicCache(config=config)}, use_cache=True)


def _check_config(config: "PreTrainedConfig", id: str) -> None:
    """Refuse what the configuration says that calibration does not know."""
    kinds = getattr(config, "layer_types", None) or []
    other = [n for n, kind in enumerate(kinds) if kind not in (*WHOLE, *SLIDES, *RECURRENT)]
    if other:
        raise ValueError(
            f"{id}: layers {_numbers(other)} of {len(kinds)} are of type {kinds[other[0]]!s:.40}; calibration takes "
            f"models whose layers attend to every token, slide over a window, or recur; {LISTED}"
        )
    if "sliding_attention" in kinds and not getattr(config, "sliding_window", None):
        raise ValueError(f"{id}: some of its layers slide, and config.json has no sliding_window; {LISTED}")
    settings = settings_of(config)
    first, count = stretches(settings)[-1].start, owners(settings)
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
