"""Lay fields one after another in memory, wide elements first: so each begins where its dtype may."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Field:
    """One field of a layer's keys or values: bytes `start` to `stop`."""

    layer: int
    role: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int = 0

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    def of(self, memory_X: Tensor) -> Tensor:
        """The field, a view [..., *shape] of uint8 memory [..., bytes]."""
        return memory_X[..., self.start : self.stop].view(self.dtype).unflatten(-1, self.shape)


def laid_out(fields: Iterable[Field], start: int = 0) -> list[Field]:
    """The fields from byte `start` on; of elements of one width in the order that they are given in."""
    found: list[Field] = []
    for one in sorted(fields, key=lambda one: -one.dtype.itemsize):
        found.append(replace(one, start=found[-1].stop if found else start))
    return found
