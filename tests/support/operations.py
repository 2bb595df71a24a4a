"""Count what torch is asked to do: operations, and waits for the device to read a value."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvq_runtime.ops import dispatch

WAITS = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero"}


class _Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter({"operations": 0, "waits": 0})

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.counts["operations"] += 1
        self.counts["waits"] += func._schema.name in WAITS
        return func(*args, **kwargs or {})


def operations(run: Callable[[], Any]) -> Counter[str]:
    """Count the operations of one call."""
    with _Counting() as mode:
        run()
    return mode.counts


@contextmanager
def no_kernels() -> Iterator[None]:
    """Keep layers as for the decode kernel, and have it return its queries."""

    def attend(q_BHTD: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return q_BHTD, q_BHTD

    with (
        dispatch.forced(True),
        mock.patch("kvq_runtime.kernels.attend.launch.attend", attend),
    ):
        yield
