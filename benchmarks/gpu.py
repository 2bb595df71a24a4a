"""Measure the kernels on a GPU: attention over packed blocks against PyTorch's best bfloat16 attention in the same run.

parity   every family against softmax on the decoded blocks
attend   a decode step, keys and values of one layer: microseconds, GB/s, what bounds it and the share of that reached,
         and the speed-up over scaled_dot_product_attention with the fastest of its backends
profile  of the slowest of those from 16384 tokens on, by share: microseconds of each kernel
encode   GB/s of bfloat16 read by what encodes a flush, of recipes without fitted stages; most of them in one launch:
         rotate, scale, find codes, pack
sweep    launch settings: the default, then what is ever less like it, for 0.4 of the time; the fastest are used in what
         follows, and --write stores them in kvq_runtime/kernels/attend/launch.json

Bounds: bytes that must be read (codes and metadata once, sinks and window) over the bandwidth of a copy measured
here; multiplications on the tensor cores over a matrix product's rate measured here; instructions of the main loop as
compiled (kernels_aot.csv) over four warps' a cycle at the device's top clock. The largest is the bound. Medians, with a
cold L2 cache: every run reads another copy of the blocks, as many as outgrow it.

python -m benchmarks.gpu [--only attend] [--lengths 2048,...] [--batches 1,8,64] [--out FILE]
python -m benchmarks.gpu --dry-run: shapes and bytes of every case on any machine
"""

import argparse
import csv
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import BATCHES, FAMILIES, LENGTHS, MODELS, Case, Model, built, cases, row
from benchmarks.clock import L2, bandwidth, tensor_rate, timed
from benchmarks.lines import RESULTS, gpu_name, keep
from kvq_runtime.codec import codec
from kvq_runtime.recipe import preset

SWEEP = 0.4  # of the time


def sdpa(case: Case) -> tuple[float, str]:
    """(microseconds, name) of the fastest backend of PyTorch's attention in bfloat16."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model, found = case.model, []
    copies = max(1, min(4, L2 // max(1, case.dense()) + 1))
    shape = (case.batch, model.kv_heads, case.tokens, model.head_size)
    pairs = [[torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)] for _ in range(copies)]
    q = torch.randn(case.batch, model.q_heads, 1, model.head_size, device="cuda", dtype=torch.bfloat16)
    attention = torch.nn.functional.scaled_dot_product_attention
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        calls = [lambda k=k, v=v: attention(q, k, v, enable_gqa=True) for k, v in pairs]
        try:
            with sdpa_kernel(backend):
                found.append((timed(calls), backend.name.lower()))
        except RuntimeError:  # this backend does not take these shapes on this device
            continue
    return min(found)


def attend(case: Case, copy: float, rate: float) -> dict[str, Any]:
    """One line of the results."""
    device = torch.device("cuda")
    copies = max(1, min(4, L2 // max(1, case.packed()) + 1))
    steps = [built(case, device) for _ in range(copies)]
    model = case.model
    q = torch.randn(case.batch, model.q_heads, 1, model.head_size, device=device, dtype=torch.bfloat16)
    took = timed([lambda step=step: step(q) for step in steps])
    del steps
    theirs, backend = sdpa(case)
    read = case.packed() + case.exact()
    bounds = {"bytes": 1e6 * read / copy, "tensor cores": 1e6 * case.products() / rate, "alu": issued(case)}
    bound = max(bounds, key=lambda name: bounds[name])
    return row(case) | {
        "microseconds": round(took, 1),
        "gb_per_s": round(read / took / 1e3, 1),
        "bound": bound,
        "share": round(bounds[bound] / took, 3),
        "alu_share": round(bounds["alu"] / took, 3),
        "sdpa_microseconds": round(theirs, 1),
        "sdpa_backend": backend,
        "speed_up": round(theirs / took, 2),
    }


def issued(case: Case) -> float:
    """Microseconds that issuing the main loop's instructions takes, as it was compiled with the default settings."""
    device = torch.cuda.get_device_properties(0)
    arch = max((known for known in (80, 90, 100) if known <= 10 * device.major + device.minor), default=80)
    with (RESULTS / "kernels_aot.csv").open() as file:
        table = {(line["kernel"], int(line["arch"])): line for line in csv.DictReader(file)}
    lanes = float(table[f"attend {case.recipe}", arch]["instructions_per_element"])
    elements = 2 * case.batch * case.blocks * 128 * case.model.geometry.width
    return 1e3 * lanes * elements / (128 * device.multi_processor_count * device.clock_rate)


def profile(found: dict[str, Any], case: Case) -> dict[str, Any]:
    """Where a case's time goes: microseconds of each kernel of a step, by PyTorch's profiler."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    device, model = torch.device("cuda"), case.model
    step = built(case, device)
    q = torch.randn(case.batch, model.q_heads, 1, model.head_size, device=device, dtype=torch.bfloat16)
    step(q)
    with watch(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(10):
            step(q)
        torch.cuda.synchronize()
    kernels = {event.key: round(event.self_device_time_total / 10, 1) for event in seen.key_averages()}
    return found | {"what": "profile", "kernels": {name: took for name, took in kernels.items() if took}}


def encode(model: Model, recipe: str, role: str) -> dict[str, Any]:
    """Encode 64 blocks of one layer's keys or values."""
    chosen = preset(recipe)
    block, width = chosen.window.block, model.geometry.width
    one = codec.Codec(chosen, 0, role, model.geometry, {}).to(torch.device("cuda"))
    x = torch.randn(64, block, width, device="cuda", dtype=torch.bfloat16)
    took = timed([lambda: one.encode(x, codec.Context())])
    found = {"what": "encode", "model": model.name, "recipe": recipe, "half": role, "microseconds": round(took, 1)}
    return found | {"gb_per_s": round(x.numel() * x.element_size() / took / 1e3, 1)}


def parity() -> dict[str, Any]:
    """Run the tests that compare attention with torch, on this device; `make test` has the rest."""
    import pytest

    tests = Path(__file__).parent.parent / "tests" / "kernels"
    code = pytest.main(["-q", str(tests / "test_attention_kernel.py"), "-k", "families or before_rope or means"])
    return {"what": "parity", "passed": code == 0}


def sweep(model: Model, recipe: str, deadline: float) -> tuple[str, Any, list[dict[str, Any]]]:
    """(key, fastest, all) of the launch settings of a family at 32k tokens that were tried until the deadline."""
    from benchmarks import settings
    from kvq_runtime.kernels.attend import launch
    from kvq_runtime.kernels.attend.layout import layout

    case = Case(model, recipe, 32768, 8)
    chosen, ratio = case.schemes(), model.q_heads // model.kv_heads
    keys = layout(chosen.key, chosen.window.block, model.geometry, chosen.position)
    values = layout(chosen.value, chosen.window.block, model.geometry)
    assert keys is not None and values is not None
    step = built(case, torch.device("cuda"))
    q = torch.randn(case.batch, model.q_heads, 1, model.head_size, device="cuda", dtype=torch.bfloat16)
    took = dict(
        settings.tried(
            lambda how: timed([lambda: step(q, how)], 12), settings.candidates(keys, values, ratio), deadline
        )
    )
    lines = [{"what": "sweep", "recipe": recipe, **asdict(how), "microseconds": time} for how, time in took.items()]
    measured = {how: time for how, time in took.items() if isinstance(time, float)}
    major, minor = torch.cuda.get_device_capability()
    return launch.key(10 * major + minor, keys, values, ratio), min(measured, key=lambda how: measured[how]), lines


def listed(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="parity,sweep,encode,attend", help="of these")
    parser.add_argument("--models", default=",".join(model.name for model in MODELS))
    parser.add_argument("--recipes", default=",".join(FAMILIES))
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--minutes", type=float, default=8.0, help="stop starting cases after this long")
    parser.add_argument("--out", type=Path, help="JSON lines, by default benchmarks/results/gpu-<device>.jsonl")
    parser.add_argument("--write", action="store_true", help="with sweep: store the settings")
    parser.add_argument("--dry-run", action="store_true", help="print the cases and their bytes, run nothing")
    return parser.parse_args(given)


def chosen(given: argparse.Namespace) -> Iterator[Case]:
    """The cases that the command line asks for."""
    lengths, batches = ([int(number) for number in listed(text)] for text in (given.lengths, given.batches))
    return cases(listed(given.models), listed(given.recipes), lengths, batches)


def lines(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every result, as it comes."""
    wanted, recipes, deadline = listed(given.only), listed(given.recipes), time.monotonic() + 60 * given.minutes
    models = [model for model in MODELS if model.name in listed(given.models)]
    copy, rate = bandwidth(), tensor_rate()
    yield {
        "what": "device",
        "name": torch.cuda.get_device_name(),
        "copy_gb_per_s": round(copy / 1e9),
        "torch": torch.__version__,
    }
    if "parity" in wanted:
        yield parity()
    if "sweep" in wanted:
        yield from swept(models[0], recipes, 60 * given.minutes * SWEEP, given.write)
    if "encode" in wanted:
        plain = [recipe for recipe in recipes if not preset(recipe).fitted]
        yield from (encode(*each) for each in itertools.product(models, plain, ("key", "value")))
    if "attend" in wanted:
        measured = []
        for case in chosen(given):
            if time.monotonic() > deadline:
                yield {"what": "stopped", "after_minutes": given.minutes}
                break
            measured.append((attend(case, copy, rate), case))
            yield measured[-1][0]
        long = [pair for pair in measured if pair[1].tokens >= 16384]
        if long:
            yield profile(*min(long, key=lambda pair: pair[0]["share"]))


def swept(model: Model, recipes: list[str], seconds: float, write: bool) -> Iterator[dict[str, Any]]:
    """Try launch settings of every recipe for so long in all; what follows runs with the fastest."""
    from benchmarks import settings
    from kvq_runtime.kernels.attend import launch

    begun, best = time.monotonic(), {}
    for i, recipe in enumerate(recipes, start=1):
        name, fastest, tried = sweep(model, recipe, begun + seconds * i / len(recipes))
        best[name] = fastest
        yield from tried
    if write:
        settings.write(best)
    launch.table().update(best)


def main(arguments_given: list[str] | None = None) -> int:
    given = arguments(arguments_given)
    if given.dry_run:
        for case in chosen(given):
            print(json.dumps(row(case)))
        return 0
    if not torch.cuda.is_available():
        print("no CUDA device; --dry-run prints what would be measured", file=sys.stderr)
        return 1
    keep(lines(given), given.out or RESULTS / f"gpu-{gpu_name()}.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
