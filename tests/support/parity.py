"""Compare kernels with their torch references: on the GPU where there is one, else in Triton's interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def error(found: Tensor, wanted: Tensor) -> float:
    """The relative root-mean-square error; NaN where either has one."""
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt().clamp_min(1e-30))


@contextmanager
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill what torch.empty gives with NaN, or with ones in integers, so that an unwritten output is seen."""

    def fill(make):
        def filled(*args, **settings):
            x = make(*args, **settings)
            return x.fill_(float("nan") if x.is_floating_point() else 113)

        return filled

    with monkeypatch.context() as patch:
        for name in ("empty", "empty_like"):
            patch.setattr(torch, name, fill(getattr(torch, name)))
        yield


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Gaussian numbers on the device under test."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
