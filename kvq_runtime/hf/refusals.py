"""Ask a model's layers whether what a cache gets of them is RoPE of one key, which a recipe before RoPE undoes, and
whether "kvq" attention knows what it is asked for.

Asked are the modules, not their names: all that stands under attention is run, once, with a constant in the place of
each matrix, so that the keys of all tokens are the same before they are turned. What a cache would get of such a token
at any position, turned back as a cache does, has to be the same again.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache

from kvq_runtime.geometry import ENTRIES, caching, joined
from kvq_runtime.hf.attention import Mark, Pass, halves, mark_of
from kvq_runtime.hf.model import (
    cache_name,
    decoder_of,
    frequencies,
    layers_name,
    layers_of,
    place_of,
    rotary_module,
    settings_of,
)
from kvq_runtime.ops import rope
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.recipe import Recipe, weighs

ASKED = "kvq-asked"  # the attention of a layer that is asked what it asks of ours
POSITIONS = 0, 1, 9, 60, 500
_MACHINE = torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError)
_OTHERS = "forward", "_compiled_call_impl"  # what accelerate, and compiling, put into a module: with its own weights
_asked: WeakKeyDictionary[nn.Module, dict[tuple, str | None]] = WeakKeyDictionary()  # by decoder and layers
Ask = Callable[..., Any]  # of a layer, its decoder's configuration, and what the decoder calls it with


def of_model(ask: Callable[..., str | None], model: Any, numbers: Iterable[int], *given: Any) -> str | None:
    """What a refusal below is of the layers that a cache of a model compresses, by their numbers there."""
    decoder = decoder_of(model)
    own = (place_of(settings_of(decoder.config), n) for n in numbers)
    return ask(decoder, {n: layers_of(decoder)[n] for n in own}, *given)


def rope_refusal(decoder: Any, layers: Mapping[int, Any]) -> str | None:
    """The reason why the RoPE of these layers, by their number in a decoder, cannot be undone; None if it can."""
    found, key = _asked.setdefault(decoder, {}), tuple(layers)
    if key not in found:
        found[key] = _rope_refusal(decoder, layers)
    return found[key]


def attention_refusal(decoder: Any, layers: Mapping[int, Any], recipe: Recipe | None) -> str | None:
    """The reason why "kvq" attention does not read what a recipe has stored of these layers; None if none shows.

    recipe   None: why it does not read what was decoded
    """
    name = None if recipe is None else recipe.name if weighs(recipe) else ""
    found, key = _asked.setdefault(decoder, {}), (*layers, name)
    if key not in found:
        device = next((one.device for one in decoder.buffers() if not one.is_meta), "cpu")
        mark: Any = None if recipe is None else Mark(SimpleNamespace(recipe=recipe), 0, True, Pass())  # type: ignore
        told = _told(decoder, layers, torch.tensor([POSITIONS], device=device), partial(_unknown, mark))
        found[key] = next((one for one in told.values() if isinstance(one, str)), None)
    return found[key]


def _rope_refusal(decoder: Any, layers: Mapping[int, Any]) -> str | None:
    settings = settings_of(decoder.config)
    kind = rope.settings(settings).get("rope_type", "default")
    if kind in rope.VARYING_TYPES:
        return f"rope_type={kind} changes with length"
    found = frequencies(rotary_module(decoder))
    if found is None:
        return f"{type(decoder).__name__} has no module with one inv_freq for all layers that attend to all tokens"
    if joined(settings) == ENTRIES:  # which one class of transformers turns, as `PooledLayer` knows
        return None if 4 * len(found[0]) <= settings["head_dim"] else "it turns more than half of the channels of a row"
    positions_NT = torch.tensor([POSITIONS], device=found[0].device)
    cos_sin = Rotary(found[0].float(), found[1], torch.float32).tables(positions_NT)
    for n, seen in _told(decoder, layers, positions_NT, _keys).items():
        layer = f"layer {n} ({decoder.config.model_type})"
        if isinstance(seen, Exception):
            return f"{layer} does not show how it turns keys: {' '.join(str(seen).split()):.120}"
        if _is_one(seen):
            return f"{layer} has no RoPE"
        if (turned := 2 * len(found[0])) > seen.shape[-1]:
            return f"{layer} turns {turned} channels of a key, of which {seen.shape[-1]} are stored as keys are"
        if not _is_one(rope.unrotate(seen, *cos_sin)):
            return f"{layer} turns keys otherwise than half of a head with the other, by position and inv_freq"
    return None


def _is_one(k_NTHD: Tensor) -> bool:
    """True if the keys of all tokens are the same."""
    return bool((k_NTHD - k_NTHD[:, :1]).abs().max() <= 2**-8 * k_NTHD.abs().max())


class _Seen(Exception):
    """Ends a layer's pass where it hands keys to a cache, or asks attention for something.

    why    what is not known of that; `mark`: of the keys and values
    """

    def __init__(self, why: str | None = None, mark: Mark | None = None):
        super().__init__(why)
        self.why, self.mark = why, mark


class _Rows(DynamicCache):
    """Stand in a cache's place: note the keys and values that it would store; states that recur are held."""

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_given: Any) -> Any:
        self.seen = key_states, value_states
        raise _Seen


class _Marked(DynamicCache):
    """Stand in a cache's place: give keys and values back, marked; states that recur are held."""

    mark: Mark | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_given: Any) -> Any:
        found = key_states.view_as(key_states), value_states.view_as(value_states)
        for one in found:
            one._kvq = self.mark  # type: ignore[attr-defined]
        return found


def _told(decoder: Any, layers: Mapping[int, Any], positions_NT: Tensor, ask: Ask) -> dict[int, Any]:
    """What layers answer of one token at these positions, by layer, or the Exception that the pass ended with."""
    found = _pass(decoder, layers, positions_NT, ask, lambda hidden_states: hidden_states)
    if any(isinstance(one, Exception) for one in found.values()):  # perhaps as a layer puts out a tuple (Chameleon)
        again = _pass(decoder, layers, positions_NT, ask, lambda hidden_states: (hidden_states, None))
        found |= {n: one for n, one in again.items() if not isinstance(one, Exception)}
    return found


@torch.no_grad()
def _pass(
    decoder: Any, layers: Mapping[int, Any], positions_NT: Tensor, ask: Ask, output: Callable[[Tensor], Any]
) -> dict[int, Any]:
    """The same of one pass, in which a layer puts out `output` of its input."""
    found: dict[int, Any] = {}
    bare = _bare(decoder, positions_NT.device)
    bare.config = copy.deepcopy(decoder.config)
    bare.config._attn_implementation = "sdpa"

    def asked(n: int, *args: Any, **given: Any) -> None:
        try:
            found[n] = ask(layers[n], bare.config, *args, **given)
        except _MACHINE:  # which says nothing of the model
            raise
        except Exception as error:  # of the layer's own, whatever class it has
            found[n] = error

    places = [
        _Place(layer, partial(asked, n) if n in layers else None, output) for n, layer in enumerate(layers_of(decoder))
    ]
    bare._modules[str(layers_name(decoder))] = nn.ModuleList(places[: max(layers) + 1])
    try:
        bare(input_ids=torch.ones_like(positions_NT), position_ids=positions_NT, use_cache=False)
    except _MACHINE:
        raise
    except Exception as error:  # of the decoder's own: every layer that it was not yet at
        found = {n: error for n in layers} | found
    return found


def plain_of(layer: nn.Module) -> dict[str, Any]:
    """What a decoder may read of a layer, which it does not call: attributes of plain types, those of its class too."""
    parts = *(vars(one) for one in reversed(type(layer).__mro__)), vars(layer)
    found = {name: value for part in parts for name, value in part.items() if not name.startswith("__")}
    return {name: value for name, value in found.items() if type(value) in (bool, int, str)}


class _Place(nn.Module):
    """Stand in a layer's place: hand on what it is called with, and put out `output` of its input."""

    def __init__(self, layer: nn.Module, asked: Callable[..., None] | None, output: Callable[[Tensor], Any]):
        super().__init__()
        self.__dict__ = plain_of(layer) | self.__dict__
        self._asked, self._output = asked, output

    def forward(self, hidden_states: Tensor, *args: Any, **given: Any) -> Any:
        if self._asked is not None:
            self._asked(hidden_states, *args, **given)
        return self._output(hidden_states)


def _keys(asked: nn.Module, config: Any, hidden_states: Tensor, *args: Any, **given: Any) -> Tensor:
    """The keys that a layer hands a cache, those of all its attentions as so many heads, [N, T, H, D]."""
    settings, seen = settings_of(config), list[Tensor]()
    what = joined(settings)
    for number in range(caching(settings)):
        rows, layer = _Rows(config=config), _bare(asked, hidden_states.device)
        if number:  # in the place of the first
            layer.self_attn = nn.ModuleList([*layer.self_attn][number:])
        try:
            layer(hidden_states, *args, **given | {str(cache_name(asked)): rows})
            raise RuntimeError("it hands a cache no keys")
        except _Seen:
            seen.append((halves(what, *rows.seen)[0] if what else rows.seen[0]).transpose(1, 2))
    return torch.cat(seen, 2)


def _unknown(
    mark: Mark | None, asked: nn.Module, config: Any, hidden_states: Tensor, *args: Any, **given: Any
) -> str | None:
    """What a layer asks of attention that ours does not know, of keys and values with this mark; None: nothing."""
    rows, layer, name = _Marked(config=config), _bare(asked, hidden_states.device), type(asked).__name__
    rows.mark = mark
    for part in layer.modules():
        if hasattr(getattr(part, "config", None), "_attn_implementation"):
            part.config = copy.deepcopy(part.config)
            part.config._attn_implementation = ASKED
    try:
        layer(hidden_states, *args, **given | {str(cache_name(asked)): rows})
    except _Seen as seen:
        changed = f"kvq attention does not know keys and values that {name} changes behind a cache"
        return seen.why if seen.why or seen.mark is mark else changed
    return mark and f"kvq attention does not know keys and values that {name} reads by code of its own"


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None,
    sliding_window: int | None = None, **given: Any,
) -> Any:  # fmt: skip
    """Attention that tells what is not known of what it is asked for."""
    try:
        mark = mark_of(module, key, value, attention_mask, sliding_window, given)
    except ValueError as error:
        raise _Seen(str(error).partition("; ")[0]) from None  # what to do depends on who asks
    raise _Seen(None, mark)


AttentionInterface.register(ASKED, _attention)


class _Constant(nn.Module):
    """Stand in the place of a matrix or a table: put out the same vector for every token."""

    def __init__(self, width: int, device: torch.device):
        super().__init__()
        self.width, self.weight = width, torch.empty(0, device=device)  # of which a decoder may ask where it is

    def forward(self, x: Tensor, *_args: Any, **_given: Any) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(self.width)
        drawn = torch.randn(self.width, generator=generator, dtype=torch.float32, device="cpu")
        return drawn.to(x.device).repeat(*(x.shape[:-1] if x.is_floating_point() else x.shape), 1)


def _bare(module: nn.Module, device: torch.device) -> Any:
    """A module of the same class and settings without hooks, training and matrices; norms are of ones, as calibration
    asks before it has weights: one behind the rotation (HunYuan's) scales channels, which a cache gets back."""
    module = getattr(module, "_orig_mod", module)  # which torch.compile wraps
    width = getattr(module, "out_features", getattr(module, "embedding_dim", None))
    if isinstance(width, int):
        return _Constant(width, device)
    bare: Any = type(module).__new__(type(module))
    own = {name: value for name, value in vars(module).items() if name not in _OTHERS}
    bare.__dict__ |= own | vars(nn.Module()) | {"training": False}
    children = module._modules.items()
    bare._modules = {name: None if child is None else _bare(child, device) for name, child in children}
    bare._buffers = {name: _here(one, device) for name, one in module._buffers.items()}
    bare._parameters = {
        name: None if one is None else torch.ones((), device=device).expand(one.shape)
        for name, one in module._parameters.items()
    }
    return bare


def _here(tensor: Any, device: torch.device) -> Any:
    if tensor is None or not tensor.is_meta:
        return tensor
    return torch.ones(tensor.shape, dtype=tensor.dtype, device=device)
