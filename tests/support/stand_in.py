"""Stand-ins for a GPU: a device that writes down what it is given to do, and a clock that is set by hand."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from benchmarks import clock


class Device:
    """What `benchmarks/clock.py` asks of torch.cuda; a graph does again what was called when it was captured.

    did    all in order: "write", "read", "spin", "begin", what calls say of themselves by `do`, "end"
    took   microseconds of the calls timed, in turn; the last of them again and again
    late   of that many samples the device had to wait for the launch
    """

    def __init__(self, took: list[float] | None = None, late: int = 0):
        self.did: list[str] = []
        self.spins: list[int] = []
        self.took, self.late = list(took or [10.0]), late
        self.captured: list[str] | None = None
        self.waiting_is = "default"
        device = self

        class Event:
            def __init__(self, enable_timing: bool):
                assert enable_timing

            def record(self) -> None:
                device.did.append("begin" if device.did[-1] == "spin" else "end")

            def query(self) -> bool:
                device.late -= 1
                return device.late >= 0

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, other: "Event") -> float:
                return (device.took.pop(0) if len(device.took) > 1 else device.took[0]) / 1000

        class Graph:
            def __init__(self):
                self.calls: list[str] = []

            def replay(self) -> None:
                device.did.extend(self.calls)

        self.Event, self.CUDAGraph = Event, Graph

    def do(self, name: str) -> None:
        """What a call that is timed does; while it is captured, nothing yet."""
        (self.did if self.captured is None else self.captured).append(name)

    @contextmanager
    def graph(self, graph) -> Iterator[None]:
        self.captured = graph.calls
        yield
        self.captured = None

    def _sleep(self, cycles: int) -> None:
        self.did.append("spin")
        self.spins.append(cycles)

    def zero_(self) -> None:
        self.did.append("write")

    def sum(self) -> None:
        self.did.append("read")

    def synchronize(self) -> None:
        pass

    def set_sync_debug_mode(self, mode: str) -> None:
        self.waiting_is = mode

    def empty_cache(self) -> None:
        pass

    def get_device_name(self, device: object = None) -> str:
        return "Stand In"

    def get_device_properties(self, device=None) -> SimpleNamespace:
        return SimpleNamespace(major=9, minor=0, multi_processor_count=132)

    def get_device_capability(self, device=None) -> tuple[int, int]:
        return 9, 0

    def is_available(self) -> bool:
        return True

    def use(self, patch: pytest.MonkeyPatch) -> "Device":
        """In place of torch.cuda; what it writes to evict caches is itself."""
        patch.setattr(torch, "cuda", self)
        patch.setattr(clock, "scratch", lambda: self)
        return self


class Hands:
    """A clock's: `now` is what it shows, in seconds."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.now = 0.0
        patch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: self.now))
