"""Arguments of the attention kernel: its compile-time settings, and the table of a layer's blocks.

Settings are NamedTuples, one class a reader, hashed and compared at every launch. Inside kernels they are read by name
(`S.BITS`):

    read fields alone: the source of a property is no part of the key under which Triton keeps compiled code
    in a `constexpr_function`, unpack them in order: Triton 3.6 hands it a plain tuple
    for a shape of tl.zeros, or a factor of a tuple, make constants of them first: Triton 3.6 takes no plain numbers

A block table has the addresses of a layer's blocks, on the device, so that a captured launch finds slabs that came
later. It is the table of paged attention with a slab of up to SLAB blocks for a page. A slab is a dict of fields
[B, blocks, ...], each contiguous, of the same `blocks`. Row i of the table is slab i: its number of blocks, then the
address of every field. Rows are made for the longest cache; unused rows are zero.

A serving engine has pages of its own, and a table of them: `Pages`. There a page is one block, and holds all of its
fields. A kernel gets one or the other in the same argument, and finds fields by `field_of` alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_runtime.geometry import SLAB
from kvq_runtime.ops.fragment import Run, Words

# False in Triton's interpreter, which has no inline assembly; as `triton.jit`, decided when this is imported
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
# fields of rounded codes, in the order of their addresses
CODES, SCALE, LOW = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_SLAB = tl.constexpr(SLAB)


class LayerSettings(NamedTuple):
    """L: the layer, and its tiles. A step's rows, queries and splits are known at run time alone.

    H       KV heads
    D       head size, in channels
    T       tokens of a block
    M       columns of the tile of queries
    N       tokens of a tile of angles
    SINKS   tokens at the start that are kept exactly
    PAGED   1: a block is a page of a serving engine's cache, and each row has a number of pages of its own
    CAP     bound of a score times log2 e, see `queries.capped`; 0: there is none
    """

    H: int
    D: int
    T: int
    M: int
    N: int
    SINKS: int
    PAGED: int = 0
    CAP: float = 0.0


class TileSettings(NamedTuple):
    """The tiles of values [tokens, P] that `queries.add` sums: all that exact tokens need.

    SLOTS     tiles, each of a run of a head's channels
    COLUMNS   channels of a slot
    P         COLUMNS padded to a power of two, at least 16
    """

    SLOTS: int
    COLUMNS: int
    P: int


class RoundedSettings(NamedTuple):
    """Codes ordered as the tensor core reads them: rounded.py.

    BITS      of a code: 1, 2, 3, 4 or 8
    FIELDS    of a block: 3, codes, steps and low ends; 2, codes and scales, where codes have tables
    GROUP     tokens with one scale, of keys per channel: 16 times a power of two, which divides T; else T
    GROUPS    parts of a head's channels with scales of their own, of codes per token; else 1
    TILES, SUBS, BYTES, WORDS, RUNS   as in `Order` of ops/fragment.py; runs for each table, one after another
    TABLES    for each element that a code stands for, the bits of a float16 for every stored code: fragment.py; ():
              codes are rounded evenly
    """

    BITS: int
    FIELDS: int
    GROUP: int
    GROUPS: int
    TILES: int
    SUBS: int
    BYTES: int
    WORDS: tuple[Words, ...]
    RUNS: tuple[Run, ...]
    TABLES: tuple[tuple[int, ...], ...] = ()


class PolarSettings(NamedTuple):
    """Angles and radii: polar.py. Begins with the fields of TileSettings.

    LEVELS     of angles: codes of 4 bits in the first, which has one for every two channels, of 2 bits above it
    MIRRORED   1: the first level's upper eight points are its lower eight, negative, and not stored
    """

    SLOTS: int
    COLUMNS: int
    P: int
    LEVELS: int
    MIRRORED: int


class SlabSettings(NamedTuple):
    """A slab of latents, [128 tokens, 16 channels], of one width: fragment.py.

    BITS, BYTES, WORDS, RUNS   as in `slab_order` of ops/fragment.py
    TABLES                     as in RoundedSettings, of one element; (): codes are spaced evenly
    """

    BITS: int
    BYTES: int
    WORDS: tuple[Words, ...]
    RUNS: tuple[Run, ...]
    TABLES: tuple[tuple[int, ...], ...] = ()


class LatentSettings(NamedTuple):
    """Latents by head: latent.py. How many slabs there are of a width is read on the device.

    FIELDS    of a block: 2, codes and gains; 1, codes alone
    GAIN      bits of a token's gain in each head; 0: there is none
    SEGMENT   tokens of a segment, of keys; 0: values
    WIDTHS    a slab of each width, falling
    """

    FIELDS: int
    GAIN: int
    SEGMENT: int
    WIDTHS: tuple[SlabSettings, ...]


class Latents(NamedTuple):
    """What a layer's latents are read with, for the scan and for `project`: tensors on the device.

    counts     int64 [1], of bytes: slabs of a head, then how many are of each of WIDTHS
    gains      float32 [H, 2]: log2 of the least gain, and from one gain to the next; or None
    basis      of keys, float16 [H, R, D]: what queries, turned back to a segment, are multiplied with; or None
    projected  of keys, float16 [B · H, segments, rows, R + tokens]: the queries so multiplied, and the mean's share of
               scores if there is one, as `project` writes them; or None
    base       of keys, float32 [B · H, segments, rows]: the mean's share of all of a segment's scores; or None
    segments   that there is room for
    """

    counts: Any
    gains: Any
    basis: Any = None
    projected: Any = None
    base: Any = None
    segments: int = 0


class Pages(NamedTuple):
    """The places of the blocks of keys, or of values, in an engine's cache.

    fields   of all pages, in the order of a layout's names: views [pages, ...] of the cache's memory, each page
             contiguous and aligned to 16 bytes
    table    int [B, width]: the page of each row's blocks
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
    """Make the table of slabs that stay where they are: int64 [room, 1 + fields]. ValueError: more slabs than rows."""
    if len(slabs) > room:
        raise ValueError(f"{len(slabs)} slabs; the table has room for {room}, make it for more tokens")
    rows = torch.zeros(room, 1 + len(names), dtype=torch.int64)
    for row, slab in zip(rows, slabs, strict=False):
        fields = [slab[name] for name in names]
        assert all(field.is_contiguous() and field.data_ptr() % 16 == 0 for field in fields)
        row.copy_(torch.tensor([fields[0].shape[1], *(field.data_ptr() for field in fields)]))
    return rows.to(device)


@triton.jit
def field_of(
    p_table, i_block, i_b, FIELD: tl.constexpr, FIELDS: tl.constexpr, SIZE: tl.constexpr, dtype: tl.constexpr,
    L: tl.constexpr,
):  # fmt: skip
    """Return the address of one field, of FIELDS, of block i_block of batch row i_b: a scalar pointer to `dtype`.

    p_table   block table, int64; of an L that is PAGED, Pages
    SIZE      bytes of the field in a block
    """
    ALIGNED: tl.constexpr = 16 if SIZE % 16 == 0 else SIZE & -SIZE
    address = place_of(p_table, i_block, i_b, FIELD, FIELDS, SIZE, L)
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), ALIGNED)


@triton.jit
def place_of(p_table, i_block, i_b, FIELD: tl.constexpr, FIELDS: tl.constexpr, size, L: tl.constexpr):
    """As `field_of`, of a size that may be known at run time alone: the address, a number or a pointer to bytes."""
    if L.PAGED == 1:
        page = tl.load(p_table.table + i_b * p_table.width + i_block).to(tl.int64)
        address = p_table.fields[FIELD].to(tl.pointer_type(tl.uint8), bitcast=True) + page * p_table.bytes
    else:
        BLOCKS: tl.constexpr = _SLAB.value  # the interpreter has no int % constexpr
        p_slab = p_table + (i_block // BLOCKS) * (FIELDS + 1)
        blocks = tl.load(p_slab)
        address = tl.load(p_slab + 1 + FIELD) + (i_b * blocks + i_block % BLOCKS) * size
    return address
