"""Triton's own driver on the libcuda of fake_cuda.c, which has no device: imported, it is the one that launches."""

import os

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils


class Driver(CudaDriver):
    """Triton's own, which asks torch for nothing."""

    def __init__(self):
        self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
        self.get_current_device, self.get_current_stream = lambda: 0, lambda device=0: 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


triton.runtime.driver.set_active(Driver())
