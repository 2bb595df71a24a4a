"""Launch kernels, by their names in `benchmarks/kernels_aot.py`, twice each, on the driver of fake_cuda.c."""

import sys

import no_device  # noqa: F401

from benchmarks import kernels_aot
from kvq_runtime.ops import dispatch

calls = kernels_aot.calls()
with dispatch.forced(True):
    for name in sys.argv[1:]:
        for _ in range(2):
            calls[name]()
