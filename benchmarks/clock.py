"""Time what runs on a GPU, and measure the rates its times are compared with."""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

L2 = 256 << 20  # more than any cache


def timed(calls: list[Callable[[], Any]], repeats: int = 30) -> float:
    """The median microseconds of a call, each time another of `calls`, as one captured graph each."""
    graphs = []
    for call in calls:
        for _ in range(2):
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graphs.append(graph)
    times = []
    for i in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graphs[i % len(graphs)].replay()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end))
    return median(times[len(graphs) :] or times)


def bandwidth() -> float:
    """Bytes per second of a copy, read and written."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2e6 * a.numel() / timed([lambda: b.copy_(a)])


def tensor_rate() -> float:
    """Float16 operations per second of a large matrix product."""
    a = torch.randn(8192, 8192, dtype=torch.float16, device="cuda")
    return 2e6 * 8192**3 / timed([lambda: a @ a], 10)
