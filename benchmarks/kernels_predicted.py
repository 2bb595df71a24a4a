"""Predict from machine code how long a step's attention takes on an H200, beside bfloat16's. Nothing is measured.

A row of kernels_predicted.jsonl is a decode step of one layer of Llama-3.1-8B (8 KV heads of 128, 32 query heads):

    recipe, batch, tokens, splits     what is computed; parts that the blocks are cut into
    microseconds, bf16_microseconds   ours and bfloat16's, and their `ratio`: how many times as fast ours is
    binds, share                      what is busy for the largest share of that time: memory, issue, alu, lsu, tensor;
                                      "latency" where nothing is for BINDS of it
    error, triton                     of every prediction; what compiled the kernels

Ours is that of a captured graph: LAUNCH for every kernel, torch's included, and the cycles of the Triton kernels.
bfloat16 reads keys and values at the BANDWIDTH that ours is given, and takes BF16_LAUNCH for its own kernels.

Attention's programs run in waves of as many as fit. A program takes START, and its blocks at the speed that simulate.py
finds for as many programs on a multiprocessor. The window's programs fill what the last wave leaves free. Any other
kernel is simulated from its first instruction to its last exit, each loop turning as often as CHUNK, a compile-time
argument, says; both sides of branches are run; it finds what attention wrote in the second-level cache (L2_LATENCY).
Clock 1.755 GHz, 600 cycles to memory; all other assumptions are in simulate.py. An error of 35% either way is to be
expected, for no part of it has met a GPU.

python -m benchmarks.kernels_predicted [--recipes NAME,...] [--out FILE]
"""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import ceil, prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":  # before triton is imported
    os.environ.pop("TRITON_INTERPRET", None)

import triton

from benchmarks import sass
from benchmarks.cases import MODELS, Case
from benchmarks.compiled import Recorded, compiled, programs, recorded
from benchmarks.host_work import Operations
from benchmarks.kernels_aot import FAMILIES, attends, main_pass
from benchmarks.report import RESULTS
from benchmarks.simulate import BANDWIDTH, CLOCK, MULTIPROCESSORS, Run, Step, simulate, steps
from kvq_runtime.kernels.attend import launch as attention
from kvq_runtime.kernels.attend.launch import count_splits
from kvq_runtime.ops import dispatch

TABLE = RESULTS / "kernels_predicted.jsonl"
BATCHES, LENGTHS = (1, 8, 32), (4096, 16384, 32768, 131072)
LAUNCH, BF16_LAUNCH = 1.5, 4.0  # microseconds
BINDS = 0.6
ARCH = 90
START = 1500  # cycles of a program beside its blocks: it reads lengths, starts and queries in turn, and stores
WINDOW = 2000  # cycles that a share of the window takes, beside
L2_LATENCY = 300
POINTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # programs on a multiprocessor that are simulated; between them, a line


@dataclass(frozen=True, eq=False)
class Loop:
    """A kernel's main loop.

    steps    of a warp in a pass
    passes   through it, of a block
    warps    of a program
    room     programs that a multiprocessor holds
    """

    steps: list[Step]
    passes: int
    warps: int
    room: int

    def each(self, count: int) -> float:
        """Cycles of a block with so many programs on a multiprocessor, 1 to `room`."""
        known = sorted({min(point, self.room) for point in POINTS})
        below, above = max(n for n in known if n <= count), min(n for n in known if n >= count)
        low, high = (_simulated(self, n).each for n in (below, above))
        return self.passes * (low + (high - low) * (count - below) / max(1, above - below))

    def taken(self) -> dict[str, float]:
        """Cycles of a multiprocessor that a program's block takes of everything it may be bound by."""
        run = _simulated(self, 1)
        return {name: share * run.each * self.passes for name, share in run.busy.items()}


def used_splits(blocks: int, splits: int) -> int:
    """Programs that a line's blocks take of at most `splits`, as kernel.py shares them out."""
    return ceil(blocks / ceil(blocks / splits)) if blocks else 0


@cache
def _simulated(loop: Loop, count: int) -> Run:
    return simulate(loop.steps, count, loop.warps)


@cache
def loop_of(one: Recorded, passes: int, turns: int, size: float) -> Loop:
    """The main loop of a launch.

    passes   of a block
    turns    of an inner loop
    size     bytes of a block
    """
    made = compiled(one, ARCH)
    passed = steps(sass.main_loop(made.instructions(), turns), size / passes / one.warps)
    return Loop(passed, passes, one.warps, programs(made.registers, made.shared, one.warps, ARCH))


def attend_cycles(loop: Loop, lines: int, blocks: int, splits: int, window: int) -> float:
    """Cycles of attention's grid.

    lines    batch rows times KV heads
    blocks   of a line, shared out over at most `splits` programs as kernel.py does; `window` more attend to what is
             exact
    """
    each = ceil(blocks / splits)
    used = used_splits(blocks, splits)
    left, places, cycles, free = used * lines, loop.room * MULTIPROCESSORS, 0.0, 0
    while left > 0:
        now = min(left, places)
        longest = each if left > lines else blocks - (used - 1) * each  # a line's last program is the shorter one
        cycles += START + longest * loop.each(ceil(now / MULTIPROCESSORS))
        left, free = left - now, places - now
    last = START + WINDOW if window else 0
    return max(cycles, last) if window * lines <= free else cycles + last


def whole_cycles(one: Recorded, parts: int) -> float:
    """Cycles of another kernel's grid; its loops go through `parts` partial results.

    ValueError: it has loops, and no CHUNK that says how many they take at a time.
    """
    code, room = _code(one)
    chunk = one.named("CHUNK")
    if sass.loops(code) and chunk is None:
        raise ValueError(f"{one.function.__name__} has loops and no CHUNK, so how often they turn is unknown")
    each = ceil(prod(one.grid) / MULTIPROCESSORS)
    return ceil(each / room) * _ran(one, ceil(parts / chunk) if chunk else 1, min(each, room))


@cache
def _code(one: Recorded) -> tuple[list[sass.Instruction], int]:
    """(instructions, programs that a multiprocessor holds)."""
    made = compiled(one, ARCH)
    return made.instructions(), programs(made.registers, made.shared, one.warps, ARCH)


@cache
def _ran(one: Recorded, turns: int, count: int) -> float:
    code = steps(sass.whole(_code(one)[0], turns), latency=L2_LATENCY, once=True)
    return simulate(code, count, one.warps, passes=1).cycles


def predicted(case: Case, loop: Loop) -> dict[str, Any]:
    """One row."""
    lines = case.batch * case.model.kv_heads
    cut, window = splits(case, loop.room), attention.EXACT.value
    launched, others = launches(case, cut)
    took = LAUNCH * (len(launched) + others) + sum(
        attend_cycles(loop, lines, case.blocks, cut, window) if one.function.__name__ == "attend"
        else whole_cycles(one, used_splits(case.blocks, cut))
        for one in launched
    ) / CLOCK * 1e6  # fmt: skip
    theirs = case.dense() / BANDWIDTH * 1e6 + BF16_LAUNCH
    shares = {name: cycles * lines * case.blocks / MULTIPROCESSORS / (took * CLOCK / 1e6)
              for name, cycles in loop.taken().items()}  # fmt: skip
    most = max(shares, key=lambda name: shares[name])
    return {
        "what": "predicted", "model": case.model.name, "recipe": case.recipe, "batch": case.batch,
        "tokens": case.tokens, "splits": cut, "ratio": round(theirs / took, 2), "microseconds": round(took, 1),
        "bf16_microseconds": round(theirs, 1), "binds": most if shares[most] >= BINDS else "latency",
        "share": round(shares[most], 2), "error": "+-35%", "triton": triton.__version__,
    }  # fmt: skip


def splits(case: Case, room: int) -> int:
    """The splits of the blocks on an H200, whose multiprocessors have room for so many programs."""
    return count_splits(case.batch * case.model.kv_heads, case.blocks, MULTIPROCESSORS, room)


def launches(case: Case, cut: int) -> tuple[list[Recorded], int]:
    """(Triton's launches of one step, how many kernels of torch are between them, reading a value included)."""
    model = case.model
    call = attends(
        case.schemes(), model.head_size, model.kv_heads, model.q_heads // model.kv_heads, batch=case.batch, splits=cut
    )
    seen, inner = Operations(), attention.attend

    def watched(*args: Any) -> Any:
        with seen:
            return inner(*args)

    with dispatch.forced(True), recorded() as made, patch.object(attention, "attend", watched):
        call()
    return made, seen.counts["launches"] + seen.counts["waits"]


def main_loop(recipe: str) -> Loop:
    """Attention's main loop; splits and batch do not change it."""
    case = Case(MODELS[0], recipe, LENGTHS[0], 1)
    one = next(one for one in launches(case, 32)[0] if one.function.__name__ == "attend")
    tokens, turns = main_pass(one)
    return loop_of(one, one.named("L").T // tokens, turns, case.packed() / case.blocks / case.model.kv_heads)


def rows(recipes: list[str]) -> Iterator[dict[str, Any]]:
    """Every recipe at every batch and length."""
    for recipe in recipes:
        loop = main_loop(recipe)
        for batch, tokens in itertools.product(BATCHES, LENGTHS):
            yield predicted(Case(MODELS[0], recipe, tokens, batch), loop)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recipes", default=",".join(FAMILIES), help="names, with commas")
    parser.add_argument("--out", type=Path, default=TABLE, help="JSON lines")
    given = parser.parse_args()
    with given.out.open("w") as file:
        for row in rows(given.recipes.split(",")):
            print(json.dumps(row), file=file, flush=True)
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
