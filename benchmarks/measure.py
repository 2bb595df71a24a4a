"""Measure one case on a GPU: its time beside the baselines of its shape, and where that goes."""

from typing import Any

import torch

from benchmarks import baselines
from benchmarks.cases import Case, Model, built, encoder, queries
from benchmarks.clock import Rates, Timing, evict, timed
from benchmarks.report import Line

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
        """Microseconds at least, of the bytes and of the products."""
        return {"bytes": 1e6 * read / self.rates.bandwidth, "products": 1e6 * case.products() / self.rates.product}


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
