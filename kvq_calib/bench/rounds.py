"""Measure caches in turns: in each round every cache reads the same prompts and generates, and another one begins.

In a turn a model generates with one cache, as a user does: the time of each token is taken, and the cache's bytes.
Whatever else the machine does falls on all alike, so that ratios within a run hold on a busy machine too. One cache is
in memory at a time: what is at its most is its own. Finished rounds are kept, and a run that was stopped goes on with
the next.
"""

import gc
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import Cache, GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from kvq_calib.bench.contenders import Contender
from kvq_calib.evaluate.ledger import code
from kvq_calib.evaluate.record import load_model
from kvq_calib.model.files import ModelFiles
from kvq_calib.run.device import give_memory_back
from kvq_calib.run.plan import environment
from kvq_runtime.disk import files as disk
from kvq_runtime.errors import NotFound
from kvq_runtime.hf import CudaGraphs, KVQCache
from kvq_runtime.hf.model import CACHE
from kvq_runtime.ops import product
from kvq_runtime.store.storage import storage_bytes

Progress = Callable[[int], object]
LIMIT = 1 << 26  # bytes of a file of rounds
CONTEXTS = (1024, 4096)
WARM = 2  # steps before those that are timed: in the first a graph is recorded, and memory is taken
FULL = "out of memory"
PROCESS = Path("/proc/self")
RESET = "5"  # sets this process' peak to what it has now; Source: Linux, Documentation/filesystems/proc.rst, clear_refs


@dataclass(frozen=True)
class Turn:
    """The times and bytes of one cache with one batch of prompts.

    first_s       seconds from the call until the first token of each row is at hand: the prompt's time
    steps_s       seconds of each later token, without the first WARM
    cache_bytes   in memory at the end, `shared_bytes` of them held once by all caches of the recipe
    peak_bytes    most memory in use during it, weights included; None if the system cannot report it
    graphs        what `CudaGraphs` replayed; "" where there were none
    error         the reason for having no figures; "" if it has some
    """

    first_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)
    cache_bytes: int = 0
    shared_bytes: int = 0
    peak_bytes: int | None = None
    graphs: str = ""
    error: str = ""


class Stopwatch(BaseStreamer):
    """Note when tokens are at hand: `generate` gives it the prompt, then a token of each row, moved to the host."""

    def __init__(self):
        self.at: list[float] = []

    def put(self, value: Tensor) -> None:
        self.at.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to note."""


def attempt(model: PreTrainedModel, contender: Contender, ids_BT: Tensor, tokens: int) -> Turn:
    """`take`, or the error that it ended in: memory that is not there, or what another library refuses."""
    try:
        return take(model, contender, ids_BT, tokens)
    except Exception as error:  # types vary by library; the other caches are worth measuring
        if out_of_memory(error):
            return Turn(error=FULL)
        return Turn(error=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:300])
    finally:
        gc.collect()  # caches hold circles
        if ids_BT.device.type == "cuda":
            torch.cuda.empty_cache()


def take(model: PreTrainedModel, contender: Contender, ids_BT: Tensor, tokens: int) -> Turn:
    """Read prompts, int64 [rows, tokens], and generate greedily: one token, WARM, and those that are timed.

    The model has no end-of-text token, so that every row goes on to the end.
    """
    model.set_attn_implementation(contender.attention)
    cache, watch = contender.make(model), Stopwatch()
    most = watch_peak(ids_BT.device)
    # on a GPU, ours with its steps as CUDA graphs: how it is meant to be used there
    ours = ids_BT.device.type == "cuda" and isinstance(cache, KVQCache)
    with CudaGraphs(model) if ours else nullcontext() as graphs:
        began = time.perf_counter()
        model.generate(  # type: ignore[operator]
            ids_BT, attention_mask=torch.ones_like(ids_BT), **{CACHE: cache}, do_sample=False, streamer=watch,
            max_new_tokens=1 + WARM + tokens,
        )  # fmt: skip
    first, *later = watch.at[1:]
    marks = [first, *later][WARM:]
    return Turn(
        first_s=first - began,
        steps_s=[b - a for a, b in pairwise(marks)],
        cache_bytes=held(cache),
        shared_bytes=cache.memory_report().shared_bytes if isinstance(cache, KVQCache) else 0,
        peak_bytes=most(),
        graphs="" if graphs is None else repr(graphs).removeprefix("CudaGraphs(").removesuffix(")"),
    )


def held(cache: Cache) -> int:
    """Bytes of all tensors that a cache holds, as allocated, each storage once."""
    if isinstance(cache, KVQCache):
        return cache.memory_report().total_bytes
    return storage_bytes(tensor for layer in cache.layers for tensor in _tensors(vars(layer)))


def _tensors(found: Any) -> Iterator[Tensor]:
    """The tensors in nested containers; in place of those that are made of others, these."""
    if isinstance(found, Tensor) and is_traceable_wrapper_subclass(found):
        for name in found.__tensor_flatten__()[0]:
            yield from _tensors(getattr(found, name))
    elif isinstance(found, Tensor):
        yield found
    elif isinstance(found, dict):
        yield from _tensors(list(found.values()))
    elif isinstance(found, (list, tuple)):
        for one in found:
            yield from _tensors(one)


def out_of_memory(error: BaseException) -> bool:
    """True if the error is that a device or the machine has no more memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # of PyTorch on a CPU


def watch_peak(device: torch.device) -> Callable[[], int | None]:
    """Start a measurement of peak memory; return a function to call at its end.

    It returns the most bytes in use, weights included, on a CPU those of the whole process; None if the system does not
    count them. Memory that earlier caches freed and the allocator keeps is released first.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return lambda: torch.cuda.max_memory_allocated(device)
    if device.type == "cpu":
        give_memory_back()
        try:
            (PROCESS / "clear_refs").write_text(RESET)
            return _of_process
        except OSError:  # no Linux, or not allowed
            pass
    return lambda: None


def _of_process() -> int | None:
    found = re.search(r"^VmHWM:\s+(\d+) kB$", (PROCESS / "status").read_text(), re.M)
    return 1024 * int(found[1]) if found else None


@dataclass(frozen=True)
class Plan:
    """The prompts to measure: of each length, in batches of each size.

    tokens   of a row whose time counts, in each round
    """

    contexts: tuple[int, ...] = CONTEXTS
    batches: tuple[int, ...] = (1,)
    tokens: int = 32
    rounds: int = 3
    seed: int = 0

    @property
    def cells(self) -> list[tuple[int, int]]:
        """(context, batch), the smaller first."""
        return list(itertools.product(sorted(set(self.contexts)), sorted(set(self.batches))))

    def longest(self, context: int) -> int:
        """Tokens of a row at the end."""
        return context + 1 + WARM + self.tokens

    def check(self, files: ModelFiles) -> "Plan":
        """The plan itself. ValueError if a prompt with what is generated is longer than the model was made for."""
        longest = max(self.contexts)
        if self.longest(longest) > files.context:
            rest = self.longest(0)
            raise ValueError(
                f"context {longest} and {rest} generated tokens; {files.id} was made for at most {files.context}: use "
                f"--context up to {files.context - rest}"
            )
        return self


@dataclass(frozen=True)
class Round:
    """The turns of all caches, by name: `number` counts the rounds of a context and batch."""

    context: int
    batch: int
    number: int
    turns: Mapping[str, Turn]


class Rounds:
    """Measured rounds; with a path kept in a file of JSON lines: what was asked, then rounds.

    The file is replaced whole, so that it is never cut short.

    Raises ValueError for a file of another run, ArtifactError for a damaged one.
    """

    def __init__(self, path: Path | None, about: Mapping[str, Any]):
        self.path, self.about = path, json.loads(json.dumps(about))
        self.done: dict[tuple[int, int, int], Round] = {}
        for one in self._read():
            self._put(Round(**{**one, "turns": {name: Turn(**turn) for name, turn in one["turns"].items()}}))

    def add(self, one: Round) -> None:
        """Keep a round."""
        self._put(one)
        if self.path is not None:
            lines = [self.about, *map(asdict, self.done.values())]
            disk.make_folder(self.path.parent)
            disk.save(self.path, "".join(json.dumps(line) + "\n" for line in lines).encode())

    def _put(self, one: Round) -> None:
        self.done[one.context, one.batch, one.number] = one

    def _read(self) -> list[dict[str, Any]]:
        if self.path is None:
            return []
        try:
            lines = disk.read(self.path, LIMIT).splitlines()
        except NotFound:
            return []
        try:
            about, *rounds = map(json.loads, lines)
        except ValueError:
            raise ValueError(f"{self.path} holds no rounds of kvq bench; give --out another file") from None
        for name, given in self.about.items():
            there = about.get(name) if isinstance(about, dict) else None
            if there != given:
                raise ValueError(
                    f"{self.path} is of another run: {name} there is {_short(there)}, here {_short(given)}; give --out "
                    "another file"
                )
        return rounds


def _short(value: Any) -> str:
    return f"{json.dumps(value):.120}"


def dtype_of(files: ModelFiles, name: str | None = None, device: str = "cpu") -> torch.dtype:
    """Return the dtype of this name; None: the stored one, and bfloat16 if that has 32 bits.

    On a processor without bfloat16 instructions, where bfloat16 takes up to 170 times as long, None means float32.
    """
    if name is not None:
        return getattr(torch, name)
    if product.without_bfloat16(device):
        return torch.float32
    return torch.bfloat16 if files.dtype == torch.float32 else files.dtype


def load(files: ModelFiles, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model, without an end of text: what is generated goes on for as long as it is asked for."""
    model = load_model(files, device, dtype)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def about(files: ModelFiles, model: PreTrainedModel, contenders: Sequence[Contender], plan: Plan) -> dict[str, Any]:
    """All that the figures depend on beside context and batch."""
    kind = str(model.dtype).removeprefix("torch.")
    return {
        "name": "bench",
        "version": 1,
        "model": files.about,
        "weights_bytes": sum(x.nbytes for x in model.parameters()),
        "tokens": plan.tokens,
        "seed": plan.seed,
        "caches": {one.name: one.pinned for one in contenders},
        "environment": environment(str(model.device), kind, torch.get_num_threads()),
        "code": code(),
    }


def measure(
    model: PreTrainedModel,
    contenders: Sequence[Contender],
    plan: Plan,
    kept: Rounds,
    progress: Progress = lambda tokens: None,
) -> None:
    """Measure what `kept` does not have, round by round. `progress` gets the number of `work(...)` tokens done."""
    full: dict[str, list[tuple[int, int]]] = {}
    for context, batch in plan.cells:
        each = len(contenders) * context * batch
        left = [number for number in range(plan.rounds) if (context, batch, number) not in kept.done]
        if not left:
            progress((plan.rounds + 1) * each)
            continue
        progress((plan.rounds - len(left)) * each)
        ids_BT = prompts(model, context, batch, plan.seed)
        failed: dict[str, Turn] = {}

        def turn(one: Contender, tokens: int, ids_BT: Tensor = ids_BT, failed: dict[str, Turn] = failed) -> Turn:
            found = failed.get(one.name) or _beyond(full.get(one.name, ()), ids_BT)
            found = found or attempt(model, one, ids_BT, tokens)
            if found.error:
                failed[one.name] = found
            if found.error == FULL:
                full.setdefault(one.name, []).append((ids_BT.shape[1], ids_BT.shape[0]))
            progress(ids_BT.numel())
            return found

        for one in contenders:  # which warms kernels and memory up, and does not count
            turn(one, 1)
        for number in left:
            first = number % len(contenders)
            turns = {one.name: turn(one, plan.tokens) for one in (*contenders[first:], *contenders[:first])}
            kept.add(Round(context, batch, number, turns))


def _beyond(full: Sequence[tuple[int, int]], ids_BT: Tensor) -> Turn | None:
    """The turn of a cache that was out of memory with no longer prompts in no larger batch: none."""
    batch, context = ids_BT.shape
    for there, rows in full:
        if there <= context and rows <= batch:
            return Turn(error=f"not tried: {FULL} at {there} x {rows}")
    return None


def work(contenders: int, plan: Plan) -> int:
    """Return the tokens that `measure` reports to `progress`, in all."""
    return (plan.rounds + 1) * contenders * sum(context * batch for context, batch in plan.cells)


def prompts(model: PreTrainedModel, context: int, batch: int, seed: int) -> Tensor:
    """Random token ids, int64 [rows, tokens]: no row is like another."""
    generator = torch.Generator().manual_seed(seed)
    tokens = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(tokens, (batch, context), generator=generator).to(model.device)


def chosen(plan: Plan, kept: Rounds) -> Iterator[Round]:
    """The finished rounds of what a plan asks for."""
    for context, batch in plan.cells:
        for number in range(plan.rounds):
            if (context, batch, number) in kept.done:
                yield kept.done[context, batch, number]
