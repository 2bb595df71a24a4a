"""Measure one case: a line of results, with its bounds and beside the baselines of its shape."""

import csv
from typing import Any

import torch

from benchmarks import baselines
from benchmarks.cases import Case, Model, built, encoder, queries
from benchmarks.clock import Rates, Timing, evict, timed
from benchmarks.lines import RESULTS, Line

CUDA = torch.device("cuda")


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
        """Microseconds at least: of the bytes, the products, and, where the clock is known, of issuing instructions."""
        found = {"bytes": 1e6 * read / self.rates.bandwidth, "products": 1e6 * case.products() / self.rates.product}
        instructions = issued(case)
        return found if instructions is None else found | {"instructions": instructions}


def issued(case: Case) -> float | None:
    """Microseconds that issuing the main loop's instructions takes, as it was compiled with the default settings.

    At four warps' a cycle, which integer instructions do not reach: it takes longer. None: nothing is known of this
    recipe's kernel, or of the device's clock.
    """
    device = torch.cuda.get_device_properties(0)
    clock = getattr(device, "clock_rate", None)  # kHz; not in every PyTorch
    arch = max((known for known in (80, 90, 100) if known <= 10 * device.major + device.minor), default=80)
    with (RESULTS / "kernels_aot.csv").open() as file:
        table = {(line["kernel"], int(line["arch"])): line["instructions_per_element"] for line in csv.DictReader(file)}
    counted = table.get((f"attend {case.recipe}", arch))
    if not clock or not counted:
        return None
    elements = 2 * case.batch * case.blocks * 128 * case.model.geometry.width
    return 1e3 * float(counted) * elements / (128 * device.multi_processor_count * clock)


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
