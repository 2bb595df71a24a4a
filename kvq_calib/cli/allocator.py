"""Keep freed memory for the next tensor: glibc gives large pieces back at once, and each page comes anew as a fault."""

import ctypes
import os
import sys

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # parameters of mallopt
LARGEST = 32 << 20  # of the first, on 64 bits
KEPT = 1 << 30  # bytes that may stay unused


def keep_memory() -> bool:
    """Raise both thresholds, where there are such; leave alone what the environment sets. Whether they were raised."""
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and bool(mallopt(MMAP_THRESHOLD, LARGEST)) and bool(mallopt(TRIM_THRESHOLD, KEPT))
