"""Calibrate on a device that is not the CPU, where there is none: tensors that say they are elsewhere.

python elsewhere.py MODEL RECIPE ...    prints a line for each recipe: ok, or the error

A tensor there wraps one of the CPU, which does its work; an operation that is given tensors of both raises, as on a
GPU, and so does one that `torch.use_deterministic_algorithms` refuses on CUDA. No kernel of ours runs, and results are
those of the CPU.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from kvq_calib.model import find as models
from kvq_calib.run import calibrate, checkpoint, device, plan
from kvq_calib.run.run import InMemory, Run
from kvq_runtime.artifact import recipe_text

backend_registration._setup_privateuseone_for_python_backend("elsewhere")
NAME = "elsewhere:0"
# on CUDA these raise under torch.use_deterministic_algorithms; bincount where it is given weights
REFUSED = {"aten.median.dim", "aten.kthvalue.default", "aten.histc.default", "aten.put_.default"}
COPIES = {"aten.copy_.default", "aten._to_copy.default"}
PLACED = {"aten.index.Tensor", "aten.index_put_.default"}  # x[places], whose places may be the CPU's


class Elsewhere(Tensor):
    """A tensor of the other device."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Elsewhere":
        made = Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=torch.device(NAME),
        )  # fmt: skip
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: tuple = (), given: dict | None = None) -> Any:
        return done(operation, args, given or {})

    def tolist(self) -> Any:
        return self.inner.tolist()

    def numpy(self) -> Any:
        raise TypeError("tensors of another device have no numpy")


class There(TorchDispatchMode):
    """Inside, tensors can be made elsewhere."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple = (), given: dict | None = None) -> Any:
        return done(operation, args, given or {})


def done(operation: Any, args: tuple, given: dict[str, Any]) -> Any:
    """An operation, done by the CPU."""
    tensors = [x for x in tree_flatten((args, given))[0] if isinstance(x, Tensor)]
    ours, asked = [x for x in tensors if isinstance(x, Elsewhere)], given.get("device")
    name = str(operation)
    together = [args[0], *args[2:]] if name in PLACED else tensors
    two = ours and any(isinstance(x, Tensor) and x.ndim and not isinstance(x, Elsewhere) for x in together)
    if two and name not in COPIES:
        raise RuntimeError(f"{name} of tensors of two devices")
    if ours and (name in REFUSED or (name == "aten.bincount.default" and len(args) > 1 and args[1] is not None)):
        raise RuntimeError(f"{name} has no deterministic implementation on CUDA")
    inner_args, inner = tree_map(_inner, (args, dict(given)))
    if asked is not None:
        inner["device"] = "cpu"
    if "pin_memory" in inner:
        inner["pin_memory"] = False
    out = operation(*inner_args, **inner)
    if torch.device(asked).type != "elsewhere" if asked is not None else not ours:
        return out
    if operation._schema.is_mutable and args and isinstance(args[0], Elsewhere) and out is inner_args[0]:
        return args[0]
    return tree_map(lambda x: Elsewhere(x) if isinstance(x, Tensor) else x, out)


def _inner(x: Any) -> Any:
    return x.inner if isinstance(x, Elsewhere) else x


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _inner(target).copy_(_inner(source))
    return target


def _strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None) -> Tensor:
    return Elsewhere(torch.empty_strided(size, stride, dtype=dtype))


def _empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None) -> Tensor:
    return Elsewhere(torch.empty(size, dtype=dtype))


LIBRARY = torch.library.Library("aten", "IMPL")  # what PyTorch asks of a device by itself
for _name, _made in (("empty_strided", _strided), ("empty.memory_format", _empty), ("_copy_from", _copy_from)):
    LIBRARY.impl(_name, _made, "PrivateUse1")


def calibrated(model: Path, recipe: str) -> None:
    """Fit a recipe to a model on that device."""
    files = models.resolve(str(model))
    given = {"source": str(model / "corpus.txt"), "samples": 2, "seq_len": 160, "dtype": "float32"}
    with There(), tempfile.TemporaryDirectory() as folder:
        made = plan.make(files, (recipe_text.read(recipe),), device=NAME, **given)
        calibrate.calibrate(Run(made, files, Path(folder), activations=InMemory()))


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    device.KINDS = (*device.KINDS, "elsewhere")
    read = checkpoint.load
    checkpoint.load = lambda path, device="cpu": {name: x.to(device) for name, x in read(path).items()}
    for one in sys.argv[2:]:
        try:
            calibrated(Path(sys.argv[1]), one)
            print(f"{one}: ok", flush=True)
        except Exception as error:
            print(f"{one}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
