"""Record a decode step as one CUDA graph, and replay it: for `model.generate`, or in a loop of one's own (`captured`).

What a step does on the device depends on what is counted there, not on what the host counts (`store/storage.py`), so
that it can be replayed; what the host counts is counted after each replay (`advance`), and what encodes a block
between is eager.

`generate` asks its model twice: whether a step may be compiled (`_valid_auto_compile_criteria`), and for the call that
takes it (`get_compiled_call`). Greedy search and sampling take every step after the prompt with that call, and here it
is answered for a KVQCache. Their mask grows by ones alone, so that no step has to look for padding.

Why not what transformers does there by itself, for a cache that `is_compileable`: it builds a 4-D mask as long as the
cache for each step, which our kernel does not read and which hides from the cache where padding is; and torch.compile
traces what the host counts, another number at each step.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.utils import ModelOutput

from kvq_runtime.cache import BlockCache
from kvq_runtime.hf.cache import KVQCache
from kvq_runtime.hf.model import CACHE, check_model

_log = logging.getLogger(__name__)

ASKED = ("_valid_auto_compile_criteria", "get_compiled_call")  # what generate asks its model
FILLED = ("input_ids", "position_ids")  # what is new in each step
TAKEN = {*FILLED, "attention_mask", CACHE}
SEVERAL = "a pass of several tokens, as of assisted decoding; a graph is of one"

T = TypeVar("T")
Record = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]


def graph(step: Callable[[], T]) -> tuple[T, Callable[[], None]]:
    """Record a step on the device: its result, and what replays it."""
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        out = step()
    return out, recorded.replay


def refused(cache: BlockCache) -> str | None:
    """Return the reason why no step of this cache can be recorded while it holds these rows; None: one can."""
    stores = list(cache.layers.values())
    if len(stores) < cache.geometry.layers:
        return cache.refusal or "the cache holds no tokens yet"
    if cache.recipe.policies:
        kinds = " and ".join(policy.kind for policy in cache.recipe.policies)
        return f"the {kinds} policy of {cache.recipe.name} asks the host"
    if any(store.index is None for store in stores):
        return cache.refusal or f"the cache is on {stores[0].buffer_2BTC.device}, and graphs are of CUDA devices"
    cache.fused.look(stores[0].rows, 1, stores[0].buffer_2BTC.device)
    if not cache.fused.regular:
        return "padding is not on the left, or RoPE rotates a part of a head; no kernel takes this step"
    return None


def not_yet(cache: BlockCache) -> str | None:
    """Return the reason why the very next step cannot be recorded, though a later one can; None: it can."""
    first = next(iter(cache.layers.values()))
    if any(store.beyond(store.recent, 1) for store in cache.layers.values()):
        return "the next step encodes a block; take it first, then record"
    sinks, length = first.window.sinks, cache.positions.length
    if cache.positions.complete(sinks, length) > length:
        return f"a row has fewer than its {sinks} exact first tokens; take a few steps first, then record"
    return None


def captured(cache: BlockCache, step: Callable[[], T], record: Record = graph) -> "Recorded[T]":
    """Record a decode step of one token as a CUDA graph; return what takes that step, again and again.

    step     a forward pass from tensors to tensors that stay where they are: fill in the token, and its position,
             before each call. It runs once here, and is undone. Its token is taken to be real and to follow the last.
    record   step -> (its result, a function that replays it)

    Raises RuntimeError with the reason of `refused` or `not_yet`, and whatever the step raises.
    """
    cache.settle()
    reason = refused(cache) or not_yet(cache)
    if reason:
        raise RuntimeError(f"a step of this cache is no graph: {reason}")
    with trial(cache):
        step()
    cache.fused.publish(cache.layers)
    with trial(cache):
        out, replay = record(step)
    return Recorded(cache, out, replay)


@contextmanager
def trial(cache: BlockCache) -> Iterator[None]:
    """Undo the forward pass that is made inside when it has ended; the host counts its tokens, and does no more."""
    cache.positions.recorded = True
    try:
        yield
    finally:
        cache.positions.recorded = False
        cache.undo()


def advance(cache: BlockCache) -> None:
    """Count the token that a replayed step has taken in, in every layer, and encode what is due."""
    stores = cache.layers.values()
    first = next(iter(stores))
    if not any(store.beyond(store.recent, 1) for store in stores):  # nothing that could fail, and be undone
        cache.positions.extend(first.rows, 1, first.buffer_2BTC.device)
        for store in stores:
            store.arrived(1)
        return
    step = cache.begin(1, first.rows, first.buffer_2BTC)
    for store in stores:
        store.begin(step)
        store.arrived(1)
        step.taken.add(store.layer)
    for layer in sorted(cache.layers):
        cache.finish(layer)


class Recorded(Generic[T]):
    """A recorded step: called, it takes one token in all layers, and encodes what is due.

    It stays good over flushes, crops, eager passes, and a reorder of as many rows. After a reset, other rows or more
    tokens than the tables have room for it is not: `ready` says so.
    """

    def __init__(self, cache: BlockCache, out: T, replay: Callable[[], None]):
        self._cache, self._out, self._replay = cache, out, replay
        self._stores = dict(cache.layers)
        self._addresses = self._find_addresses()

    def __call__(self) -> T:
        """The step's own result, to be read before the next call. Raises RuntimeError where it is not `ready`."""
        if not self.ready():
            raise RuntimeError("the cache is not where it was when the step was recorded; record it again")
        return self.replay()

    def ready(self) -> bool:
        """Send the device the host's changes; True if the cache's tensors are still where they were recorded, and
        padding is as the kernel takes it. Between replays the device is asked nothing."""
        cache = self._cache
        cache.settle()
        if any(cache.layers.get(layer) is not store for layer, store in self._stores.items()):
            return False
        cache.fused.publish(self._stores)
        first = next(iter(self._stores.values()))
        cache.fused.look(first.rows, 1, first.buffer_2BTC.device)
        return cache.fused.regular and self._find_addresses() == self._addresses

    def replay(self) -> T:
        """As called, where `ready` has just said that it is."""
        self._replay()
        advance(self._cache)
        return self._out

    def _find_addresses(self) -> list[int]:
        """Return the addresses at which the kernel finds the layers."""
        tensors = [self._cache.fused.padding.starts_B]
        for store in self._stores.values():
            assert store.index is not None
            tensors += [store.buffer_2BTC, store.index.sinks_2BSC, store.index.counts, *store.index.tables]
        return [tensor.data_ptr() for tensor in tensors]


def step_refusal(model: PreTrainedModel, arguments: dict[str, Any]) -> str | None:
    """Return the reason why no step with these arguments is recorded: a replay gives its token alone; None: it is."""
    cache, mask = arguments[CACHE], arguments.get("attention_mask")
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    if attention != "kvq":
        way = 'call model.set_attn_implementation("kvq")'
        return f"{attention} attention decodes the history at each step; {way}"
    unknown = sorted(
        arguments.keys() - TAKEN - _settings(arguments).keys() - {n for n, x in arguments.items() if x is None}
    )
    if mask is not None and mask.ndim != 2:
        unknown.append("a mask of the caller's own")
    if arguments.get("position_ids") is None:
        unknown.append("no position_ids")
    if unknown:
        return f"the model is given {' and '.join(unknown)}, which no replay fills in"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast is on, which keeps weights in another dtype that may be gone at the next step"
    if len(cache.places) < len(cache.layers):
        return "some layers are held by transformers' own classes, whose tensors grow with every token"
    return cache._decodes or refused(cache.blocks)


def _settings(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that are the same in every step."""
    return {n: x for n, x in arguments.items() if n not in TAKEN and isinstance(x, (bool, int, float, str))}


class RecordedStep:
    """A step of one `generate`: its own token and position to be filled in, and the class in which its logits go back.

    Raises RuntimeError where the step cannot be recorded.
    """

    def __init__(self, model: PreTrainedModel, arguments: dict[str, Any], record: Record):
        cache, settings = arguments[CACHE], _settings(arguments)
        with torch.inference_mode(False):
            self.inputs = {name: arguments[name].clone() for name in FILLED}
        self.kind: type[ModelOutput] = ModelOutput
        inputs = self.inputs

        def step() -> Tensor:
            out = model(**inputs, **{CACHE: cache}, **settings)
            others = [name for name in out if name not in ("logits", CACHE)]
            if others:
                raise RuntimeError(f"the model gives {' and '.join(others)} beside logits")
            self.kind = type(out)
            return out.logits

        self.recorded = captured(cache.blocks, step, record)

    def take(self, arguments: dict[str, Any]) -> ModelOutput:
        """Replay it for this token. The logits are the caller's to keep."""
        for name, held in self.inputs.items():
            held.copy_(arguments[name])
        logits = self.recorded.replay().clone()
        return self.kind(logits=logits, **{CACHE: arguments[CACHE]})


class CudaGraphs:
    """Replay the decode steps of `model.generate` as CUDA graphs, for any KVQCache, until `close` or the end of `with`.

        model.set_attn_implementation("kvq")
        with CudaGraphs(model) as graphs:
            out = model.generate(**inputs, cache=cache, max_new_tokens=64)
        print(graphs)

    A recorded step is launched at once, where an eager one asks the host for some dozens of launches in each layer. It
    is recorded after the prompt of each `generate`, by two passes that are undone, and again when the cache outgrows
    its tables. It gives the eager step's tokens, in greedy search and in sampling, whatever streamer, stopping criteria
    and padding on the left. A step that completes a block encodes it eagerly.

    Every other step is eager, as without this; `reason` and the log say why: no CUDA device, another attention than
    "kvq", a recipe without a kernel or with a policy that asks the host, layers that transformers holds, padding
    elsewhere than on the left, autocast, attentions or hidden states in the output, several tokens of assisted
    decoding. Beam search, prompts in chunks and `disable_compile` do not ask for a compiled step, nor do loops of one's
    own: these passes are not counted.

    replayed   steps that were replays
    recorded   graphs recorded for them
    eager      {reason: steps that were not replays}
    reason     why the newest step was not a replay; None if it was one, or there was none yet

    Copy the model after `close`, not before. Raises TypeError if the model is no transformers model that generates,
    RuntimeError if it has CudaGraphs already.
    """

    def __init__(self, model: PreTrainedModel, record: Record = graph):
        """Take effect at once.

        model    whose `generate` is meant
        record   step -> (its result, a function that replays it); a stand-in for CUDA in tests
        """
        check_model(model)
        if not isinstance(model, GenerationMixin):
            raise TypeError(f"{type(model).__name__} has no generate of transformers; give the model that has")
        if ASKED[0] in vars(model):
            raise RuntimeError(f"this {type(model).__name__} has CudaGraphs already: close() them first")
        self.model, self.record = model, record
        self.replayed = self.recorded = 0
        self.eager: Counter[str] = Counter()
        self.reason: str | None = None
        self._next = False  # whether the call asked for next is ours
        self._begin()
        self._stock = [getattr(model, name) for name in ASKED]
        for name, answer in zip(ASKED, (self._may_compile, self._call), strict=True):
            setattr(model, name, answer)

    def close(self) -> None:
        """Let generate take eager steps again, and free the recorded ones."""
        for name in ASKED:
            vars(self.model).pop(name, None)
        self._begin()

    def __enter__(self) -> "CudaGraphs":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        counted = f"{self.replayed} steps replayed, {self.recorded} graphs recorded"
        return f"CudaGraphs({'; '.join([counted, *(f'{n} eager: {reason}' for reason, n in self.eager.items())])})"

    def _may_compile(self, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        """Answer generate, before it reads the prompt."""
        plain = not generation_config.disable_compile and generation_config.prefill_chunk_size is None
        self._next = plain and isinstance(model_kwargs.get(CACHE), KVQCache)
        return self._next or self._stock[0](model_kwargs, generation_config)

    def _call(self, compile_config: Any) -> Any:
        if not self._next:
            return self._stock[1](compile_config)
        self._begin()
        return self._take

    def _begin(self) -> None:
        """Begin a `generate`."""
        self._refused: str | None = None  # why none of its steps can be recorded
        self._step: RecordedStep | None = None

    def _note(self, reason: str, level: int = logging.WARNING) -> None:
        """Count an eager step, and log the reason once."""
        if reason not in self.eager:
            _log.log(level, "a decode step is not replayed as a CUDA graph: %s", reason)
        self.eager[reason] += 1
        self.reason = reason

    def _take(self, **arguments: Any) -> Any:
        """Take a step of `generate`."""
        ids = arguments.get("input_ids")
        step, reason = (None, SEVERAL) if ids is None or ids.shape[-1] != 1 else self._find(arguments)
        if step is None:
            self._note(reason, logging.DEBUG if self._refused is None else logging.WARNING)
            return self.model(**arguments)
        out = step.take(arguments)
        self.replayed, self.reason = self.replayed + 1, None
        return out

    def _find(self, arguments: dict[str, Any]) -> tuple[RecordedStep, str] | tuple[None, str]:
        """Find the step to replay; or return None, and the reason."""
        if self._refused is not None:
            return None, self._refused
        if self._step is not None and self._step.recorded.ready():
            return self._step, ""
        self._refused = step_refusal(self.model, arguments)
        if reason := self._refused or not_yet(arguments[CACHE].blocks):
            return None, reason
        try:
            self._step = RecordedStep(self.model, arguments, self.record)
        except RuntimeError as error:  # what CUDA cannot record: a step of this model that waits for the device
            self._refused = f"it cannot be recorded: {str(error).partition(chr(10))[0]}"
            return None, self._refused
        self.recorded += 1
        return self._step, ""
