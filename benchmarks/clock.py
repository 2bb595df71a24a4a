"""Time what runs on a GPU, from cold caches and without its launch, and measure the rates that times are compared with.

Before each sample more is written, and read again, than any cache holds: what is timed finds its operands in memory,
and no cache line that has yet to be written back. Then the device spins while the host queues the call between two
events, so that the launch is over when the first event is. Every call is timed so, ours and what it is compared with.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor

SCRATCH = 256 << 20  # bytes, more than any GPU's last-level cache; four times that of this one, if it is larger
REPEATS = 30  # samples
SPIN = 200_000  # cycles, about 0.1 ms: several times what queueing a graph takes
LONGEST = 64 * SPIN


@dataclass(frozen=True)
class Timing:
    """Microseconds of a call: median and quartiles of its samples.

    late   samples that are left out, since the device had to wait for their launch; all are in where no other is
    """

    median: float
    low: float
    high: float
    late: int = 0

    def row(self) -> dict[str, float]:
        """For a line of results; `late` where there were any."""
        found = {"microseconds": round(self.median, 1), "low": round(self.low, 1), "high": round(self.high, 1)}
        return found | ({"late": self.late} if self.late else {})


@dataclass(frozen=True)
class Rates:
    """Speeds of the device, as measured.

    copy     bytes a second, read and written
    read     bytes a second, of a sum over a tensor
    product  float16 operations a second, of a large matrix product
    floor    microseconds of a graph that sets one number: no time is less
    """

    copy: float
    read: float
    product: float
    floor: float

    @property
    def bandwidth(self) -> float:
        """Bytes a second, the better of the two."""
        return max(self.copy, self.read)

    def row(self) -> dict[str, Any]:
        """For a line of results, with the device, PyTorch and Triton."""
        import triton

        return {
            "what": "device", "name": torch.cuda.get_device_name(), "copy_gb_per_s": round(self.copy / 1e9),
            "read_gb_per_s": round(self.read / 1e9), "tflops": round(self.product / 1e12),
            "floor_microseconds": round(self.floor, 1), "torch": torch.__version__, "triton": triton.__version__,
        }  # fmt: skip


@lru_cache(maxsize=1)
def scratch() -> Tensor:
    """The memory that `evict` writes, kept."""
    cache = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0)
    return torch.empty(max(SCRATCH, 4 * cache) // 4, dtype=torch.float32, device="cuda")


def evict() -> None:
    """Leave nothing in the device's caches but clean lines of `scratch`."""
    scratch().zero_()
    scratch().sum()


@contextmanager
def unsynchronized() -> Iterator[None]:
    """Inside, a call that would wait for the device raises, as far as PyTorch knows: a graph of it cannot be captured.

    A capture that fails midway may leave PyTorch's allocator of no use to what follows.
    """
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def timed(call: Callable[[], Any], repeats: int = REPEATS) -> Timing:
    """Time a call as one captured graph; two calls before warm it."""
    call()
    with unsynchronized():
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    good: list[float] = []
    late: list[float] = []
    spin = SPIN
    while len(good) < repeats and len(good) + len(late) < 2 * repeats:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        evict()
        torch.cuda._sleep(spin)
        begin.record()
        graph.replay()
        end.record()
        waited = begin.query()  # the spin was over before all was queued
        end.synchronize()
        (late if waited else good).append(1000 * begin.elapsed_time(end))
        spin = min(2 * spin, LONGEST) if waited else spin
    low, median, high = quantiles(good if len(good) > 1 else late + good, n=4, method="inclusive")
    return Timing(median, low, high, len(late))


def rates() -> Rates:
    """Measure the device."""
    a = torch.empty(1 << 28, dtype=torch.float32, device="cuda").normal_()
    b, one = torch.empty_like(a), torch.zeros(1, device="cuda")
    x = torch.randn(8192, 8192, dtype=torch.float16, device="cuda")
    return Rates(
        copy=2e6 * a.nbytes / timed(lambda: b.copy_(a), 10).median,
        read=1e6 * a.nbytes / timed(a.sum, 10).median,
        product=2e6 * 8192**3 / timed(lambda: x @ x, 10).median,
        floor=timed(one.zero_, 10).median,
    )
