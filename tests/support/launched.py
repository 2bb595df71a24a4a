"""Launch kernels, by their names in `benchmarks/kernels_aot.py`, twice each, on the driver of fake_cuda.c."""

import os
import sys

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

from benchmarks import kernels_aot
from kvq_runtime.ops import dispatch


class Driver(CudaDriver):
    """Triton's own, which asks torch for nothing."""

    def __init__(self):
        self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
        self.get_current_device, self.get_current_stream = lambda: 0, lambda device=0: 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def launch(names: list[str]) -> None:
    """Launch each twice."""
    triton.runtime.driver.set_active(Driver())
    calls = kernels_aot.calls()
    with dispatch.forced(True):
        for name in names:
            for _ in range(2):
                calls[name]()


if __name__ == "__main__":
    launch(sys.argv[1:])
