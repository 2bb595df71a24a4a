"""Take decode steps of many shapes on the driver of fake_cuda.c; print what was compiled for them, as JSON.

compiled.py RECIPE RATIO: RATIO query heads of a KV head, batches and query tokens of 1 to 8
"""

import json
import sys
from types import SimpleNamespace

import no_device  # noqa: F401
import torch

from benchmarks import kernels_aot
from kvq_runtime.kernels.attend import kernel, launch
from kvq_runtime.kernels.attend.launch import count_splits
from kvq_runtime.kernels.encode import stored
from kvq_runtime.ops import dispatch
from kvq_runtime.recipe import preset

H200 = SimpleNamespace(
    regs_per_multiprocessor=65536, shared_memory_per_multiprocessor=233472, max_threads_per_multi_processor=2048
)
recipe, ratio = preset(sys.argv[1]), int(sys.argv[2])
launched, resident = launch._launched, set()


def asked(*given):
    """Ask too how many programs of the kernel a multiprocessor runs."""
    arguments, options = launched(*given)
    resident.add(launch._resident(arguments, options, H200))
    return arguments, options


launch._launched = asked
with dispatch.forced(True):
    for batch in range(1, 9):
        stored.append(*torch.zeros(2, batch, 1, 1024).unbind(0), torch.zeros(2, batch, 8, 1024), torch.zeros(4).int())
        for tokens in range(1, 9):
            step = kernels_aot.attends(recipe, 64, 1, ratio, tokens, batch=batch, splits=count_splits(batch, 64, 4, 1))
            assert step is not None
            step()
functions = {"attend": launch.attend_kernel, "merge": kernel.merge, "append": stored._append}
kernels = {name: function.device_caches[0][0] for name, function in functions.items()}
print(json.dumps({name: len(made) for name, made in kernels.items()} | {"resident": sorted(resident)}))
