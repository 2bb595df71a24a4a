"""Block table: addresses of a layer's blocks, on the device, so that a captured launch finds slabs that came later.

As in paged attention, with a slab of up to SLAB blocks for a page. A slab is a dict of fields [B, blocks, ...], each
contiguous, of the same `blocks`. Row i of the table is slab i: its number of blocks, then the address of every field.
Rows are made for `max_tokens`; unused ones are zero.
"""

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.geometry import SLAB

# fields of rounded codes, in the order of their addresses
CODES, SCALE, LOW = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_SLAB = tl.constexpr(SLAB)


def block_table(slabs: Sequence[Mapping[str, Tensor]], names: Sequence[str], room: int, device: torch.device) -> Tensor:
    """The table of `room` rows, int64 [room, 1 + fields], of slabs that stay where they are."""
    rows = torch.zeros(room, 1 + len(names), dtype=torch.int64)
    fill(rows, slabs, names)
    return rows.to(device)


def fill(rows: Tensor, slabs: Sequence[Mapping[str, Tensor]], names: Sequence[str]) -> None:
    """Write the slabs' addresses into the first rows of a table. ValueError: more slabs than rows."""
    if len(slabs) > len(rows):
        raise ValueError(f"{len(slabs)} slabs; the table has room for {len(rows)}, make it for more tokens")
    for row, slab in zip(rows, slabs, strict=False):
        fields = [slab[name] for name in names]
        assert all(field.is_contiguous() and field.data_ptr() % 16 == 0 for field in fields)
        row.copy_(torch.tensor([fields[0].shape[1], *(field.data_ptr() for field in fields)]))


@triton.jit
def field_of(p_table, i_block, i_b, FIELD: tl.constexpr, FIELDS: tl.constexpr, SIZE: tl.constexpr, dtype: tl.constexpr):
    """The address of one field, of FIELDS, of block i_block of batch row i_b: a scalar pointer to `dtype`.

    SIZE   bytes that a block has of the field
    """
    BLOCKS: tl.constexpr = _SLAB.value  # the interpreter has no int % constexpr
    p_slab = p_table + (i_block // BLOCKS) * (FIELDS + 1)
    blocks = tl.load(p_slab)
    address = tl.load(p_slab + 1 + FIELD) + (i_b * blocks + i_block % BLOCKS) * SIZE
    ALIGNED: tl.constexpr = 16 if SIZE % 16 == 0 else SIZE & -SIZE
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), ALIGNED)
