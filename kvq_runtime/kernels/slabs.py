"""Reach the blocks of a stream through a table of addresses on the device, so that a captured launch sees new slabs.

A slab is a dict of fields [B, blocks, ...], each contiguous, of the same `blocks`. Row i of the table is slab i: its
number of blocks, then the address of every field. The table has room for `max_tokens`; unused rows are zero.
"""

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

SLAB = 32  # blocks of a slab, but for the last


def table(slabs: Sequence[Mapping[str, Tensor]], names: Sequence[str], room: int, device: torch.device) -> Tensor:
    """The table, int64 [room, 1 + fields]; of slabs that stay where they are."""
    rows = torch.zeros(room, 1 + len(names), dtype=torch.int64)
    fill(rows, slabs, names)
    return rows.to(device)


def fill(rows: Tensor, slabs: Sequence[Mapping[str, Tensor]], names: Sequence[str]) -> None:
    """Write the slabs' rows into a table."""
    if len(slabs) > len(rows):
        raise ValueError(f"{len(slabs)} slabs; the table has room for {len(rows)}, make it for more tokens")
    for row, slab in zip(rows, slabs, strict=False):
        fields = [slab[name] for name in names]
        assert all(field.is_contiguous() and field.data_ptr() % 16 == 0 for field in fields)
        row.copy_(torch.tensor([fields[0].shape[1], *(field.data_ptr() for field in fields)]))


@triton.jit
def field(table, block, row, NAME: tl.constexpr, NAMES: tl.constexpr, SIZE: tl.constexpr, dtype: tl.constexpr):
    """The address of a field of one block of a batch row; SIZE is its bytes."""
    entry = table + (block // 32) * (NAMES + 1)
    capacity = tl.load(entry)
    at = tl.load(entry + 1 + NAME) + (row * capacity + block % 32) * SIZE
    ALIGNED: tl.constexpr = 16 if SIZE % 16 == 0 else SIZE & -SIZE
    return tl.multiple_of(at.to(tl.pointer_type(dtype)), ALIGNED)
