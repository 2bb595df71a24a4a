"""Measure one case on a GPU: its time beside the baselines of its shape, where that goes, and other launch settings."""

import csv
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks import baselines, compiling
from benchmarks.cases import Case, Model, built, encoder, layouts, queries, row
from benchmarks.clock import Deadline, Rates, Timing, evict, timed
from benchmarks.compiling import job_of
from benchmarks.report import RESULTS, Line
from kvq_runtime.kernels.attend import launch
from kvq_runtime.kernels.attend.launch import Launch
from kvq_runtime.kernels.attend.layout import Layout

CUDA = torch.device("cuda")
# of a multiprocessor, see sass.py: what it takes in a cycle, of these columns of kernels_aot.csv, per element and lane
UNITS = {
    "instructions": (128, ("instructions",)),
    "alu": (64, ("alu",)),
    "lsu": (32, ("shared_wavefronts", "global_wavefronts", "gather_wavefronts")),
}
COMPILE = 0.6  # of the time
STAGES = (1, 2, 3)


class Attention:
    """Time cases beside the baselines of their shape, which are timed once in a run."""

    def __init__(self, measured: Rates):
        self.rates = measured
        self.baselines: dict[tuple[str, int, int], dict[str, Any]] = {}

    def measure(self, case: Case) -> Line:
        """The line of a case."""
        shape = (case.model.name, case.tokens, case.batch)
        if shape not in self.baselines:
            self.baselines[shape] = baselines.measured(case, CUDA)
        theirs = self.baselines[shape]
        step, q = built(case, CUDA), queries(case, CUDA)
        took = timed(lambda: step(q))
        read = case.packed() + case.exact()
        bounds = self.bounds(case, read)
        best = baselines.fastest(theirs)
        return took.row() | {
            "gb_per_s": round(read / took.median / 1e3, 1),
            "bandwidth_share": round(bounds["bytes"] / took.median, 3),
            "bounds": {name: round(bound, 1) for name, bound in bounds.items()},
            "baseline": best and best[0],
            "baseline_microseconds": best and round(best[1].median, 1),
            "baseline_share": best and round(1e6 * case.dense() / self.rates.bandwidth / best[1].median, 3),
            "speed_up": best and round(best[1].median / took.median, 2),
            "baselines": {name: one.row() if isinstance(one, Timing) else one for name, one in theirs.items()},
        }

    def bounds(self, case: Case, read: int) -> dict[str, float]:
        """Microseconds at least: of the bytes, the products, and, where they are known, of the instructions."""
        found = {"bytes": 1e6 * read / self.rates.bandwidth, "products": 1e6 * case.products() / self.rates.product}
        return found | issued(case)


def issued(case: Case) -> dict[str, float]:
    """Microseconds that the main loop keeps each of UNITS busy, as it was compiled with the default settings.

    Nothing, if nothing is known of this recipe's kernel, or of the device's clock.
    """
    device = torch.cuda.get_device_properties(0)
    clock = getattr(device, "clock_rate", None)  # kHz; not in every PyTorch
    arch = max((known for known in (80, 90, 100) if known <= 10 * device.major + device.minor), default=80)
    counts = counted(f"attend {case.recipe}", arch)
    if not clock or not counts:
        return {}
    each = 1e3 * 2 * case.batch * case.blocks * 128 * case.model.geometry.width / (device.multi_processor_count * clock)
    return {
        name: each * sum(float(counts[f"{column}_per_element"]) for column in columns) / rate
        for name, (rate, columns) in UNITS.items()
    }


def counted(kernel: str, arch: int) -> dict[str, str]:
    """A kernel's row of kernels_aot.csv, by the Triton in use, or else the newest there; empty without one."""
    with (RESULTS / "kernels_aot.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if (row["kernel"], row["arch"]) == (kernel, str(arch))]
    rows = [row for row in rows if row["instructions_per_element"]]  # oldest first
    return next((row for row in rows if row["triton"] == triton.__version__), rows[-1] if rows else {})


def profile(case: Case) -> Line:
    """Where a case's time goes: microseconds of each kernel of a step, from cold caches, by PyTorch's profiler."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    step, q, repeats = built(case, CUDA), queries(case, CUDA), 10
    found: list[dict[str, float]] = []
    for call in (lambda: None, lambda: step(q)):
        call()
        with watch(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(repeats):
                evict()
                call()
            torch.cuda.synchronize()
        found.append({event.key: event.self_device_time_total / repeats for event in seen.key_averages()})
    evicting, both = found
    return {"kernels": {name: round(one, 1) for name, one in both.items() if one and name not in evicting}}


def encode(model: Model, recipe: str, role: str) -> Line:
    """Encode 64 blocks of one layer's keys or values."""
    call, read = encoder(model, recipe, role, CUDA)
    took = timed(call)
    return took.row() | {"gb_per_s": round(read / took.median / 1e3, 1)}


def candidates(keys: Layout, values: Layout, rows: int) -> list[Launch]:
    """The default, then what is ever less like it.

    Rounded codes are read by one warp, without a tile: what varies are its registers, two warps a scheduler or three.
    """
    default = launch.default(keys, values, rows)
    tiles = [tile for tile in (16, 32, 64, 128) if tile <= keys.block]
    varied = ([default.tile], [1], STAGES, (168, 255)) if keys.rounded else (tiles, (1, 2, 4, 8), STAGES, [255])

    def distance(how: Launch) -> float:
        pairs = ((how.tile, default.tile), (how.warps, default.warps), (how.registers, default.registers))
        return sum(abs(math.log2(one / other)) for one, other in pairs) + how.stages - 1

    found = {Launch(*each) for each in product(*varied)} | {default}
    return sorted(found, key=lambda how: (distance(how), astuple(how)))


def tried(step: Callable[[Launch], float], hows: list[Launch], deadline: float) -> Iterator[tuple[Launch, float | str]]:
    """Each setting with its time, or why it cannot be launched; the first in any case, the rest until the deadline."""
    for i, how in enumerate(hows):
        if i and time.monotonic() > deadline:
            return
        try:
            yield how, step(how)
        except Exception as error:  # too much shared memory for this device: Triton's own error types vary
            yield how, type(error).__name__


def write(found: dict[str, Any]) -> None:
    """Add measured settings to the package's table, launch.json."""
    path = Path(launch.__file__).with_name("launch.json")
    path.write_text(launch.to_json(launch.table() | found))


def swept(steps: list[Case], deadline: Deadline, count: int, store: bool) -> Iterator[Line]:
    """Compile so many launch settings of every case, then try them; store the fastest of each if asked to."""
    ratio = {case: case.model.q_heads // case.model.kv_heads for case in steps}
    hows = {case: candidates(*layouts(case.schemes(), case.model.geometry), ratio[case])[:count] for case in steps}
    jobs = {(case, how): job_of(case, astuple(how)) for case in steps for how in hows[case]}
    done, line = compiling.stage(list(jobs.values()), deadline.part(COMPILE))
    yield line
    best, ready = {}, {job for job, each in done.items() if each.error is None}
    for i, case in enumerate(steps):
        step, q = built(case, CUDA), queries(case, CUDA)
        until = time.monotonic() + deadline.left / (len(steps) - i)
        compiled = [how for how in hows[case] if jobs[case, how] in ready]
        took = dict(tried(lambda how, step=step, q=q: timed(lambda: step(q, how), 12).median, compiled, until))
        yield from (row(case) | {"what": "sweep", **asdict(how), "microseconds": one} for how, one in took.items())
        measured = {how: one for how, one in took.items() if isinstance(one, float)}
        if measured:
            major, minor = torch.cuda.get_device_capability()
            key = launch.key(10 * major + minor, *layouts(case.schemes(), case.model.geometry), ratio[case])
            best[key] = min(measured, key=lambda how: measured[how])
    if store:
        write(best)
