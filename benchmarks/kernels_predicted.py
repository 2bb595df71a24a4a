"""Predict from machine code how long a step's attention takes on an H200, beside bfloat16's. Nothing is measured.

A row of kernels_predicted.jsonl is a decode step of one layer of Llama-3.1-8B (8 KV heads of 128, 32 query heads):

    recipe, batch, tokens, splits     what is computed; parts that the blocks are cut into
    microseconds, bf16_microseconds   ours and bfloat16's, and their `ratio`: how many times as fast ours is
    binds, share                      what is busy for the largest share of that time: memory, issue, alu, lsu, tensor;
                                      "latency" where nothing is for BINDS of it
    error, triton                     of every prediction; what compiled the kernels

Ours is that of a captured graph: LAUNCH for every kernel, torch's included, and what predict.py finds for the Triton
kernels. bfloat16 reads keys and values at the BANDWIDTH that ours is given, and takes BF16_LAUNCH for its own kernels.
Clock 1.755 GHz, 600 cycles to memory; all other assumptions are in predict.py and simulate.py. An error of 35% either
way is to be expected, for no part of it has met a GPU.

python -m benchmarks.kernels_predicted [--recipes NAME,...] [--out FILE]
"""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":  # before triton is imported
    os.environ.pop("TRITON_INTERPRET", None)

import triton
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.cases import MODELS, Case
from benchmarks.kernels_aot import FAMILIES, attends, main_pass
from benchmarks.lines import RESULTS
from benchmarks.predict import Loop, attend_cycles, loop_of, used_splits, whole_cycles
from benchmarks.recorded import Recorded, recorded
from benchmarks.simulate import BANDWIDTH, CLOCK, MULTIPROCESSORS
from kvq_runtime.kernels.attend import host as attention
from kvq_runtime.kernels.attend import occupancy
from kvq_runtime.ops import dispatch

TABLE = RESULTS / "kernels_predicted.jsonl"
BATCHES, LENGTHS = (1, 8, 32), (4096, 16384, 32768, 131072)
LAUNCH, BF16_LAUNCH = 1.5, 4.0  # microseconds
BINDS = 0.6
ALLOCATIONS = ("empty", "new_empty", "_unsafe_view")


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
    """What the host would cut the blocks into on an H200, whose multiprocessors have room for so many programs."""
    return occupancy.splits(case.batch * case.model.kv_heads, case.blocks, MULTIPROCESSORS, room)


def launches(case: Case, cut: int) -> tuple[list[Recorded], int]:
    """(Triton's launches of one step, how many kernels of torch are between them)."""
    model = case.model
    call = attends(
        case.schemes(), model.head_size, model.kv_heads, model.q_heads // model.kv_heads, batch=case.batch, splits=cut
    )
    seen, inner = _Seen(), attention.attend

    def watched(*args: Any) -> Any:
        with seen:
            return inner(*args)

    with dispatch.forced(True), recorded() as made, patch.object(attention, "attend", watched):
        call()
    return made, seen.count


class _Seen(TorchDispatchMode):
    """Counts what torch does that a GPU would have a kernel for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        views = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        self.count += not views and not func.overloadpacket.__name__.startswith(ALLOCATIONS)
        return func(*args, **(kwargs or {}))


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
