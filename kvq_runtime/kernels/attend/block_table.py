"""Block table: addresses of a layer's blocks, on the device, so that a captured launch finds slabs that came later.

As in paged attention, with a slab of up to SLAB blocks for a page. A slab is a dict of fields [B, blocks, ...], each
contiguous, of the same `blocks`. Row i of the table is slab i: its number of blocks, then the address of every field.
Rows are made for `max_tokens`; unused ones are zero.

A serving engine has pages of its own, and a table of them: `Pages`. There a page is one block, and holds all of its
fields. A kernel gets one or the other in the same place, and finds fields by `field_of` alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.geometry import SLAB

# fields of rounded codes, in the order of their addresses
CODES, SCALE, LOW = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_SLAB = tl.constexpr(SLAB)


class Pages(NamedTuple):
    """The places of the blocks of keys, or of values, in an engine's cache.

    fields   of all pages, in the order of a layout's names: views [pages, ...] of the cache's memory, each page
             contiguous and aligned to 16 bytes
    table    int [B, width]: the page that each row's blocks are in
    width    elements from one row of the table to the next
    bytes    from one page of the cache to the next
    """

    fields: tuple[Any, ...]
    table: Any
    width: int
    bytes: int

    @staticmethod
    def of(fields: Mapping[str, Tensor], names: Sequence[str], table: Tensor) -> "Pages":
        """Make the pages of fields. ValueError: a field begins where the kernel cannot load 16 bytes at a time."""
        views = tuple(fields[name] for name in names)
        steps = {view.stride(0) * view.element_size() for view in views}
        if len(steps) > 1 or any(view.data_ptr() % 16 for view in views) or next(iter(steps)) % 16:
            raise ValueError(
                f"pages {sorted(steps)} bytes apart; a page and its fields have to begin at multiples of 16"
            )
        assert all(view[0].is_contiguous() for view in views) and table.stride(1) == 1
        return Pages(views, table, table.stride(0), steps.pop())


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
def field_of(
    p_table, i_block, i_b, FIELD: tl.constexpr, FIELDS: tl.constexpr, SIZE: tl.constexpr, dtype: tl.constexpr,
    L: tl.constexpr,
):  # fmt: skip
    """The address of one field, of FIELDS, of block i_block of batch row i_b: a scalar pointer to `dtype`.

    p_table   block table, int64; of an L that is PAGED, Pages
    SIZE      bytes that a block has of the field
    """
    if L.PAGED == 1:
        page = tl.load(p_table.table + i_b * p_table.width + i_block).to(tl.int64)
        address = p_table.fields[FIELD].to(tl.pointer_type(tl.uint8), bitcast=True) + page * p_table.bytes
    else:
        BLOCKS: tl.constexpr = _SLAB.value  # the interpreter has no int % constexpr
        p_slab = p_table + (i_block // BLOCKS) * (FIELDS + 1)
        blocks = tl.load(p_slab)
        address = tl.load(p_slab + 1 + FIELD) + (i_b * blocks + i_block % BLOCKS) * SIZE
    ALIGNED: tl.constexpr = 16 if SIZE % 16 == 0 else SIZE & -SIZE
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), ALIGNED)
