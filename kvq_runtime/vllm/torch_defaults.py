"""Make tensors as torch does by itself, inside of vLLM."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def own_defaults() -> Iterator[None]:
    """float32 on the CPU: vLLM builds a model with the model's dtype and device as defaults."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)
