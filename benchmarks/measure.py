"""Measure one case on a GPU: its time beside the baselines of its shape, where that goes, and other launch settings.

Counters are the hardware's, read by Nsight Compute where `ncu` is on the PATH: its sections, rather than single
metrics, whose names differ among chips. Clocks are left as they are.
"""

import csv
import io
import math
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks import baselines, compiling
from benchmarks.cases import Case, Model, built, encoder, queries, row
from benchmarks.clock import Deadline, Rates, Timing, evict, timed
from benchmarks.compiling import job_of
from benchmarks.report import RESULTS, ROOT, Line
from kvq_runtime.kernels.attend import launch
from kvq_runtime.kernels.attend.launch import Launch
from kvq_runtime.kernels.attend.layout import Layout, layout

CUDA = torch.device("cuda")
# of a multiprocessor, see sass.py: what it takes in a cycle, of these columns of kernels_aot.csv, per element and lane
UNITS = {
    "instructions": (128, ("instructions",)),
    "alu": (64, ("alu",)),
    "lsu": (32, ("shared_wavefronts", "global_wavefronts", "gather_wavefronts")),
}
SECTIONS = ("SpeedOfLight", "LaunchStats", "Occupancy", "WarpStateStats", "SchedulerStats", "MemoryWorkloadAnalysis")
LONGEST = 60.0  # seconds of a case
WARM = 2  # launches of each kernel before the one that is read
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


def ncu_command(ncu: str, case: Case) -> list[str]:
    """Profile one step of a case, after others."""
    sections = [part for name in SECTIONS for part in ("--section", name)]
    return [
        *(ncu, "--csv", "--page", "details", "--clock-control", "none", *sections),
        *("--kernel-name", "regex:attend|merge", "--launch-skip", str(2 * WARM), "--launch-count", "2"),
        *(sys.executable, "-m", "benchmarks.gpu", "--once"),
        f"{case.model.name},{case.recipe},{case.tokens},{case.batch}",
    ]


def read_counters(printed: str) -> dict[str, dict[str, str]]:
    """{kernel: {metric: value and unit}} of ncu's CSV; what a program prints beside it is passed over."""
    start = printed.find('"ID"')
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for one in csv.DictReader(io.StringIO(printed[start:])) if start >= 0 else ():
        if one.get("Metric Name") and one.get("Kernel Name"):
            found[one["Kernel Name"]][one["Metric Name"]] = f"{one['Metric Value']} {one['Metric Unit']}".strip()
    return dict(found)


def counters(case: Case, deadline: Deadline) -> dict[str, Any]:
    """What the counters say of a case. RuntimeError: ncu read none, with what it printed."""
    ncu = shutil.which("ncu")
    assert ncu is not None
    done = subprocess.run(
        ncu_command(ncu, case), cwd=ROOT, capture_output=True, text=True, timeout=max(1.0, min(LONGEST, deadline.left))
    )
    kernels = read_counters(done.stdout)
    if not kernels:
        raise RuntimeError(f"ncu ended with {done.returncode} and no counters: {(done.stdout + done.stderr)[-300:]}")
    return {"kernels": kernels}


def layouts(case: Case) -> tuple[Layout, Layout]:
    """How a case's keys and values are read."""
    recipe, geometry = case.schemes(), case.model.geometry
    keys = layout(recipe.key, recipe.window.block, geometry, "key", recipe.position)
    values = layout(recipe.value, recipe.window.block, geometry, "value")
    assert keys is not None and values is not None
    return keys, values


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
    hows = {case: candidates(*layouts(case), ratio[case])[:count] for case in steps}
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
            key = launch.key(10 * major + minor, *layouts(case), ratio[case])
            best[key] = min(measured, key=lambda how: measured[how])
    if store:
        write(best)
