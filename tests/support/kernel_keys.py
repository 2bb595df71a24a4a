"""Compute the keys of all kernels in several orders; print how often each function had another one, as JSON."""

import json
import os
import random
import sys
import time

os.environ.pop("TRITON_INTERPRET", None)

from triton.language import constexpr
from triton.runtime.jit import JITCallable

from kvq_runtime.kernels import keys
from kvq_runtime.ops import dispatch

settling = keys.settle
keys.settle = lambda: None
for module in ("attend.launch", *(f"encode.{name.partition('.')[0]}" for name in dispatch.OPS)):
    dispatch.kernels(module)
modules = {name: module for name, module in sys.modules.items() if name.startswith("kvq_runtime.kernels.")}
functions = {
    f"{name}.{inner}": one
    for name, module in modules.items()
    for inner, one in vars(module).items()
    if isinstance(one, JITCallable) and one.__module__ == name
}
found = {name: set() for name in functions}
taken = []
for seed in range(4):
    for one in functions.values():
        one.hash, one.used_global_vals = None, {}
    order = random.Random(seed).sample(sorted(functions), len(functions))
    begun = time.process_time()
    if "settled" in sys.argv:
        settling()
    taken.append(time.process_time() - begun)
    for name in order:
        found[name].add(functions[name].cache_key)
settings = {}
for module in modules.values():
    for name, value in vars(module).items():
        if isinstance(value, constexpr):
            settings.setdefault(name, set()).add(repr(value))
print(json.dumps({
    "functions": len(functions),
    "several": sorted(name for name, keys in found.items() if len(keys) > 1),
    "ambiguous": sorted(name for name, values in settings.items() if len(values) > 1),
    "seconds": round(max(taken), 2),
}))  # fmt: skip
