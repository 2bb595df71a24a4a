"""Find the fastest launch settings of a decode step, and keep them in the package's table, launch.json."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks import compiling
from benchmarks.cases import Case, built, queries, row
from benchmarks.clock import Deadline, timed
from benchmarks.jobs import job_of
from benchmarks.lines import Line
from benchmarks.measure import CUDA
from kvq_runtime.kernels.attend import launch
from kvq_runtime.kernels.attend.launch import Launch
from kvq_runtime.kernels.attend.layout import Layout, layout

COMPILE = 0.6  # of the time
STAGES = (1, 2, 3)


def read(case: Case) -> tuple[Layout, Layout]:
    """How a case's keys and values are read."""
    recipe, geometry = case.schemes(), case.model.geometry
    keys = layout(recipe.key, recipe.window.block, geometry, "key", recipe.position)
    values = layout(recipe.value, recipe.window.block, geometry, "value")
    assert keys is not None and values is not None
    return keys, values


def ratio(case: Case) -> int:
    """Query heads of a KV head."""
    return case.model.q_heads // case.model.kv_heads


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
    """Add measured settings to the package's table."""
    path = Path(launch.__file__).with_name("launch.json")
    path.write_text(launch.to_json(launch.table() | found))


def swept(steps: list[Case], deadline: Deadline, count: int, store: bool) -> Iterator[Line]:
    """Compile so many launch settings of every case, then try them; store the fastest of each if asked to."""
    hows = {case: candidates(*read(case), ratio(case))[:count] for case in steps}
    jobs = {(case, how): job_of(case, astuple(how)) for case in steps for how in hows[case]}
    begun, best = time.monotonic(), {}
    done = compiling.stage(list(jobs.values()), deadline.part(COMPILE))
    yield compiling.summary(list(jobs.values()), done, time.monotonic() - begun)
    ready = {job for job, each in done.items() if each.error is None}
    for i, case in enumerate(steps):
        step, q = built(case, CUDA), queries(case, CUDA)
        until = time.monotonic() + deadline.left / (len(steps) - i)
        compiled = [how for how in hows[case] if jobs[case, how] in ready]
        took = dict(tried(lambda how, step=step, q=q: timed(lambda: step(q, how), 12).median, compiled, until))
        yield from (row(case) | {"what": "sweep", **asdict(how), "microseconds": one} for how, one in took.items())
        measured = {how: one for how, one in took.items() if isinstance(one, float)}
        if measured:
            major, minor = torch.cuda.get_device_capability()
            best[launch.key(10 * major + minor, *read(case), ratio(case))] = min(
                measured, key=lambda how: measured[how]
            )
    if store:
        write(best)
