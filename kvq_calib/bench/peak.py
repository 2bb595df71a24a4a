"""Ask for the most memory that was in use: of a GPU by PyTorch, of this process on Linux; elsewhere it is not known."""

import ctypes
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch

PROCESS = Path("/proc/self")
RESET = "5"  # sets this process' peak to what it has now; Source: Linux, Documentation/filesystems/proc.rst, clear_refs


def watch(device: torch.device) -> Callable[[], int | None]:
    """Start a measurement of peak memory; return a function to call at its end.

    It returns the most bytes in use, weights included, on a CPU those of the whole process; None if the system does not
    count them. Memory that earlier caches freed and the allocator keeps is released first.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return lambda: torch.cuda.max_memory_allocated(device)
    if device.type == "cpu":
        _trim()
        try:
            (PROCESS / "clear_refs").write_text(RESET)
            return _of_process
        except OSError:  # no Linux, or not allowed
            pass
    return lambda: None


def _trim() -> None:
    """Return freed memory to the system; `kvq` keeps up to a GiB of it, see `kvq_calib.cli.allocator`."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None  # glibc's
    if trim is not None:
        trim(0)


def _of_process() -> int | None:
    found = re.search(r"^VmHWM:\s+(\d+) kB$", (PROCESS / "status").read_text(), re.M)
    return 1024 * int(found[1]) if found else None
