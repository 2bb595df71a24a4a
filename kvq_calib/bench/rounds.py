"""Measure caches in turns: in each round every cache reads the same prompts and generates, and another one begins.

Whatever else the machine does falls on all alike, so that ratios within a run hold on a busy machine too. One cache is
in memory at a time: what is at its most is its own. Finished rounds are kept, and a run that was stopped goes on with
the next.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from kvq_calib.bench.contenders import Contender
from kvq_calib.bench.turn import FULL, WARM, Turn, attempt
from kvq_calib.evaluate.ledger import code
from kvq_calib.evaluate.record import load_model
from kvq_calib.model.files import ModelFiles
from kvq_calib.run.plan import environment
from kvq_runtime.disk import files as disk
from kvq_runtime.errors import NotFound
from kvq_runtime.ops import product

Progress = Callable[[int], object]
LIMIT = 1 << 26  # bytes of a file of rounds
CONTEXTS = (1024, 4096)


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
