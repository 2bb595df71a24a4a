"""Count the bytes that kernels load and store in Triton's interpreter, by the memory that they are in."""

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder


class Traffic:
    """Bytes moved, by the memory they are in; `named` are its ranges."""

    def __init__(self):
        self.loads: list[tuple[np.ndarray, int]] = []
        self.stores: list[tuple[np.ndarray, int]] = []

    def within(self, moved: list[tuple[np.ndarray, int]], tensors) -> int:
        """Bytes moved to or from these tensors."""
        spans = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors]
        return sum(size * int(((at >= a) & (at < b)).sum()) for at, size in moved for a, b in spans)

    def total(self, moved: list[tuple[np.ndarray, int]]) -> int:
        return sum(at.size * size for at, size in moved)


def counted(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    """The one hook: every load and store of the interpreter, its unmasked addresses and the bytes of an element."""
    found = Traffic()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def size(pointer) -> int:
        return max(1, pointer.get_element_ty().primitive_bitwidth // 8)

    def counted_load(self, pointer, mask, *rest):
        found.loads.append((pointer.data[mask.data], size(pointer)))
        return load(self, pointer, mask, *rest)

    def counted_store(self, pointer, value, mask, *rest):
        found.stores.append((pointer.data[mask.data], size(pointer)))
        return store(self, pointer, value, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", counted_store)
    return found
