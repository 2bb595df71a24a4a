"""Have `model.generate` replay its decode steps as CUDA graphs: one line, and a reason wherever it cannot.

`generate` asks its model twice: whether a step may be compiled (`_valid_auto_compile_criteria`), and for the call that
takes it (`get_compiled_call`). Greedy search and sampling take every step after the prompt with that call, and here it
is answered for a KVQCache. Their mask grows by ones alone, so that no step has to look for padding.

Why not what transformers does there by itself, for a cache that `is_compileable`: it builds a 4-D mask as long as the
cache for each step, which our kernel does not read and which hides from the cache where padding is; and torch.compile
traces what the host counts, another number at each step. A recorded step depends on none of these counts
(`hf/recorded.py`).
"""

import logging
from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel
from transformers.utils import ModelOutput

from kvq_runtime.hf.cache import KVQCache
from kvq_runtime.hf.model import CACHE, check_model
from kvq_runtime.hf.recorded import Record, captured, graph, not_yet, refused

_log = logging.getLogger(__name__)

ASKED = ("_valid_auto_compile_criteria", "get_compiled_call")  # what generate asks its model
FILLED = ("input_ids", "position_ids")  # what is new in each step
TAKEN = {*FILLED, "attention_mask", CACHE}
SEVERAL = "a pass of several tokens, as of assisted decoding; a graph is of one"


class StepArguments:
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
        return isinstance(other, StepArguments) and vars(self) == vars(other)

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
        return cache._decodes or refused(cache.blocks)


class RecordedStep:
    """A step of one cache: its own token and position to be filled in, and the class in which its logits go back.

    Raises RuntimeError where the step cannot be recorded.
    """

    def __init__(self, model: PreTrainedModel, arguments: StepArguments, given: dict[str, Any], record: Record):
        cache, self.arguments = given[CACHE], arguments
        with torch.inference_mode(False):
            self.inputs = {name: given[name].clone() for name in FILLED}
        self.kind: type[ModelOutput] = ModelOutput
        inputs = self.inputs

        def step() -> Tensor:
            out = model(**inputs, **{CACHE: cache}, **arguments.settings)
            others = [name for name in out if name not in ("logits", CACHE)]
            if others:
                raise RuntimeError(f"the model gives {' and '.join(others)} beside logits")
            self.kind = type(out)
            return out.logits

        self.recorded = captured(cache.blocks, step, record)

    def take(self, given: dict[str, Any]) -> ModelOutput:
        """Replay it for this token. The logits are the caller's to keep."""
        for name, held in self.inputs.items():
            held.copy_(given[name])
        logits = self.recorded.replay().clone()
        return self.kind(logits=logits, **{CACHE: given[CACHE]})


class CudaGraphs:
    """Replay the decode steps of `model.generate` as CUDA graphs, for any KVQCache, until `close` or the end of `with`.

        model.set_attn_implementation("kvq")
        with CudaGraphs(model) as graphs:
            out = model.generate(**inputs, cache=cache, max_new_tokens=64)
        print(graphs)

    A recorded step is launched at once, where an eager one asks the host for some dozens of launches in each layer. It
    is recorded after the prompt, by two passes that are undone, and again after `reset`, for other rows or other
    weights, and when the cache outgrows its tables; a later `generate` that goes on with the cache replays it. It gives
    the eager step's tokens, in greedy search and in sampling, whatever streamer, stopping criteria and padding on the
    left. A step that completes a block encodes it eagerly.

    Every other step is eager, as without this; `reason` and the log say why: no CUDA device, another attention than
    "kvq", a recipe without a kernel or with a policy that asks the host, layers that transformers holds, padding
    elsewhere than on the left, autocast, attentions or hidden states in the output, several tokens of assisted
    decoding. Beam search, prompts in chunks and `disable_compile` do not ask for a compiled step, nor do loops of one's
    own: these passes are not counted.

    replayed   steps that were replays
    recorded   graphs recorded for them
    eager      {reason: steps that were not replays}
    reason     why the newest step was not a replay; None if it was one, or there was none yet

    What is changed in the model between two steps without another tensor or training flag is not seen by a recorded
    step, such as an adapter that is switched off: `close` before, and make another. Copy the model after `close`, too.
    Raises TypeError if the model is no transformers model that generates, RuntimeError if it has CudaGraphs already.
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
        self._steps: WeakKeyDictionary[KVQCache, RecordedStep] = WeakKeyDictionary()
        self._next = False  # whether the call asked for next is ours
        self._begin()
        self._stock = [getattr(model, name) for name in ASKED]
        for name, answer in zip(ASKED, (self._may_compile, self._call), strict=True):
            setattr(model, name, answer)

    def close(self) -> None:
        """Let generate take eager steps again, and free the recorded ones."""
        for name in ASKED:
            vars(self.model).pop(name, None)
        self._steps.clear()
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

    def _take(self, **given: Any) -> Any:
        """Take a step of `generate`."""
        ids = given.get("input_ids")
        step, reason = (None, SEVERAL) if ids is None or ids.shape[-1] != 1 else self._find(given)
        if step is None:
            self._note(reason, logging.DEBUG if self._refused is None else logging.WARNING)
            return self.model(**given)
        out = step.take(given)
        self.replayed, self.reason = self.replayed + 1, None
        return out

    def _find(self, given: dict[str, Any]) -> tuple[RecordedStep, str] | tuple[None, str]:
        """Find the step to replay; or return None, and the reason."""
        if self._refused is not None:
            return None, self._refused
        if self._step is not None and self._step.recorded.ready():
            return self._step, ""
        cache = given[CACHE]
        arguments = StepArguments(self.model, given)
        held = self._steps.pop(cache, None)
        if held is None or held.arguments != arguments or not held.recorded.ready():
            self._refused = arguments.refused(cache)
            soon = None if self._refused else not_yet(cache.blocks)
            if self._refused or soon:
                return None, self._refused or soon or ""
            try:
                held = RecordedStep(self.model, arguments, given, self.record)
            except RuntimeError as error:  # what CUDA cannot record: a step of this model that waits for the device
                self._refused = f"it cannot be recorded: {str(error).partition(chr(10))[0]}"
                return None, self._refused
            self.recorded += 1
        self._step = self._steps[cache] = held
        return held, ""
