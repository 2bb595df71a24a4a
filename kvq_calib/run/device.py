"""Check the device that a command names; count memory and cores; keep freed memory, or give it back.

Imports torch and psutil where they are needed: without the extra `calib`, `kvq-calibrate` says so.
"""

import ctypes
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

KINDS = ("cpu", "cuda", "mps", "xpu")
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # parameters of mallopt
LARGEST = 32 << 20  # of the first, on 64 bits
KEPT = 1 << 30  # bytes that may stay unused


def usable(device: str) -> str:
    """Return the device if this machine has it.

    Raises ValueError for text that names no device, RuntimeError for one that this machine does not have.
    """
    import torch

    try:
        known = torch.device(device).type in KINDS
    except RuntimeError:
        known = False
    if not known:
        raise ValueError(f"device {device!r:.80}; use cpu, cuda, cuda:1, ..., mps or xpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):  # both occur, by kind and build
        text = f"device {device} cannot be used: torch {torch.__version__} finds none on this machine"
        raise RuntimeError(f"{text}; use --device cpu, or leave --device out") from None
    return device


def free_on(device: str) -> int:
    """Return the free bytes of a device."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return psutil.virtual_memory().available


def settle(device: "str | torch.device") -> None:
    """Wait until a device has finished its work, so that a clock counts it."""
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def cores() -> int:
    """Count the cores that this process may use: physical ones, or OMP_NUM_THREADS."""
    import psutil

    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    allowed = len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else psutil.cpu_count()
    return max(1, min(allowed or 1, psutil.cpu_count(logical=False) or 1))


def keep_memory() -> bool:
    """Keep freed memory for the next tensor: glibc gives large pieces back, and each page comes anew as a fault.

    Raises both thresholds unless the environment sets them; returns whether it did.
    """
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and bool(mallopt(MMAP_THRESHOLD, LARGEST)) and bool(mallopt(TRIM_THRESHOLD, KEPT))
