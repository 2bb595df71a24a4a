"""Count what a decode step of `model.generate` asks of the host, eager and replayed by CudaGraphs.

    operations   of torch, views and allocations among them; `launches` are those that do work on a device
    waits        for the device, to read a value
    calls        of Python functions, and of C functions from Python
    us           microseconds of the CPU

A step is a part of the difference between generating 64 tokens and 4, a layer of that between models of 6 layers and 2.

This runs on a CPU without a kernel: the decode kernel gives its queries back, and a replay does nothing. So Triton's
launcher (two kernels in a layer of an eager step) and the one call that launches a graph are in no figure; microseconds
include the arithmetic of a model of width 64.

python -m benchmarks.host_work [--rows 1] [--padded]
"""

import argparse
import sys
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

from kvq_runtime.hf import CudaGraphs, KVQCache
from kvq_runtime.hf.model import CACHE
from kvq_runtime.ops import dispatch

RECIPE, PROMPT = "rtn-2bit", 140  # at most 255 tokens are exact: no step here encodes a block
NEW, LAYERS = (4, 64), (2, 6)
WAITS = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero"}
NO_WORK = ("aten::empty", "aten::new_empty", "aten::detach", "aten::_unsafe_view")  # beginnings of names
Counts = dict[str, float]


def is_view(func: Any) -> bool:
    """Whether an operation of torch returns what it was given, seen in another way."""
    return any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do inside."""

    def __init__(self):
        super().__init__()
        self.counts: Counts = {"operations": 0, "launches": 0, "waits": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func._schema.name
        self.counts["operations"] += 1
        self.counts["waits"] += name in WAITS
        self.counts["launches"] += not (is_view(func) or name in WAITS or name.startswith(NO_WORK))
        return func(*args, **kwargs or {})


def operations(run: Callable[[], Any]) -> Counts:
    """Count the operations that torch is asked for."""
    with Operations() as mode:
        run()
    return mode.counts


def calls(run: Callable[[], Any]) -> Counts:
    """Count the functions that are called."""
    counted = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return {"calls": counted}


def microseconds(run: Callable[[], Any]) -> Counts:
    """Of this thread, the least of nine runs."""
    return {"us": 1e6 * min(timeit.repeat(run, number=1, repeat=9, timer=time.thread_time))}


@contextmanager
def no_kernels() -> Iterator[None]:
    """Layers are kept as for the decode kernel, which gives its queries back."""

    def attend(q_BHTD: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return q_BHTD, q_BHTD

    with (
        dispatch.forced(True),
        mock.patch("kvq_runtime.kernels.attend.launch.attend", attend),
        mock.patch("kvq_runtime.ops.dispatch.is_waited_for", lambda x: True),  # as a GPU is
    ):
        yield


def generated(layers: int, replayed: bool, rows: int, padded: bool, new: int) -> Callable[[], Any]:
    """A function that generates so many tokens."""
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="kvq").eval()
    ids, mask = torch.randint(1, 97, (rows, PROMPT)), torch.ones(rows, PROMPT, dtype=torch.long)
    mask[0, : 7 * padded] = 0

    def run() -> None:
        cache = KVQCache.from_recipe(RECIPE, model)
        graphs = CudaGraphs(model, lambda step: (step(), lambda: None)) if replayed else nullcontext()
        with graphs:
            model.generate(ids, attention_mask=mask, **{CACHE: cache}, max_new_tokens=new, do_sample=False)
        assert not isinstance(graphs, CudaGraphs) or graphs.replayed == new - 1, graphs

    return run


def step(layers: int, replayed: bool, rows: int = 1, padded: bool = False, timed: bool = True) -> Counts:
    """The host's work in one step."""
    found: list[Counts] = []
    with no_kernels():
        for new in NEW:
            run = generated(layers, replayed, rows, padded, new)
            run()
            found.append(operations(run) | calls(run) | (microseconds(run) if timed else {}))
    few, more = found
    return {name: (more[name] - few[name]) / (NEW[1] - NEW[0]) for name in few}


def main() -> int:
    """Print a line for eager and replayed steps: of a layer, and of a step beside its layers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--padded", action="store_true", help="the first row has padding on the left")
    asked = parser.parse_args()
    for kind, replayed in (("eager", False), ("replayed", True)):
        few, more = (step(layers, replayed, asked.rows, asked.padded) for layers in LAYERS)
        for name in few:
            layer = (more[name] - few[name]) / (LAYERS[1] - LAYERS[0])
            print(f"{kind:9}{name:11}{layer:9.1f} a layer {few[name] - LAYERS[0] * layer:9.1f} a step beside them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
