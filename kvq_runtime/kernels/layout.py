"""Say how the kernels read one side of a layer: which function, with which settings and tables; None where none can.

The kernels take groups of one head, or of a part of it where they are rounded, and groups of one channel in a block;
anything else is decoded first. A mean may have been removed, whatever the codes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.kernels import per_channel, per_group, per_token, read, read_polar
from kvq_runtime.kernels import polar as angles
from kvq_runtime.ops import grid, lloyd, pack, polar
from kvq_runtime.recipe import Side
from kvq_runtime.stages import groups
from kvq_runtime.stages import polar as polar_stage
from kvq_runtime.stages.grid import Grid
from kvq_runtime.stages.lloyd import Lloyd
from kvq_runtime.stages.polar import Polar, PolarFitted
from kvq_runtime.stages.predict import Mean
from kvq_runtime.stages.rtn import Rtn

Tensors = Mapping[str, Tensor]
RUN = 32  # columns of a slot of angles, at most
_NOTHING: Tensors = {}


@dataclass(frozen=True)
class Layout:
    """How one side is read.

    scan       the loop over blocks, for keys
    read       the function that reads a tile of tokens, or None where codes lie along the tokens
    settings   of both, see read.py and per_channel.py
    names      the fields, in the order of the address table
    lookup     the codebook in the form `read` takes, or None
    turn       the rotation of a head, float32 [D, D]: x̂ = what is read · turnᵀ; or None
    mean       whether a mean was removed, which x̂ lacks
    """

    scan: Any
    read: Any
    settings: tuple[int, ...]
    names: tuple[str, ...]
    lookup: Tensor | None = None
    turn: Tensor | None = None
    mean: bool = False


def layout(side: Side, geometry: Geometry, position: str = "post", tensors: Tensors = _NOTHING) -> Layout | None:
    """The layout of a side whose codes fill bytes and whose groups are a head's, or a block's; None: no kernel.

    tensors   what was fitted for the quantizer; without it a fitted codebook's layout has no lookup
    """
    if side.correct is not None:
        return None
    if isinstance(side.predict, Mean):
        found = layout(replace(side, predict=None), geometry, position, tensors)
        return found and replace(found, mean=True)
    if side.predict is not None:
        return None
    if side.axis == "channel":
        return _per_channel(side, geometry, position)
    makers: dict[type, Callable] = {Rtn: _uniform, Grid: _grid, Lloyd: _lloyd, Polar: _polar}
    makers[PolarFitted] = partial(_polar, tensors=tensors)
    size = getattr(side.quantize, "group", None)
    if position != "post" or type(side.quantize) not in makers or size is None:
        return None
    size = groups.size(size, geometry.width, geometry)
    if size != geometry.head_size:
        return _per_group(side, geometry, size)
    turn = _turn(side, geometry)
    if side.rotate is not None and turn is None:
        return None
    made = makers[type(side.quantize)](side, geometry)
    if made is not None and made[0] is read_polar.polar_pairs:
        turn = _paired(turn, size)
    return None if made is None else Layout(per_token.plain, *made, turn)


def _paired(turn: Tensor | None, size: int) -> Tensor:
    """The rotation of what is read in pairs of a head's two halves."""
    return (torch.eye(size) if turn is None else turn)[:, torch.arange(size).view(2, -1).mT.flatten()].contiguous()


def padded(count: int) -> int:
    """What a tile of so many columns is padded to: a power of two that a matrix product takes."""
    return max(16, triton.next_power_of_2(count))


def _streams(bits: int) -> int:
    return 8 // min(pack.planes(bits))


def _start(side: Side, geometry: Geometry, slots: int, columns: int, weight: int) -> tuple[int, ...]:
    heads, size = geometry.kv_heads, geometry.head_size
    return (slots, columns, padded(columns), size, heads, side.block, weight)


def _per_channel(side: Side, geometry: Geometry, position: str) -> Layout | None:
    quantize = side.quantize
    if not isinstance(quantize, Rtn) or side.rotate is not None:
        return None
    slots, group = _streams(quantize.bits), groups.size(quantize.group, side.block, geometry)
    if group % slots or side.block < 16 or (position == "pre" and geometry.head_size % 2):
        return None
    low = int(quantize.range == "minmax")
    if group in (16, 32) and (position == "pre" or group // slots < 16):
        start = _start(side, geometry, 1, group, 0)
    else:
        start = _start(side, geometry, slots, group // slots, quantize.bits)
    settings = (*start, quantize.bits, low, _wide(geometry.head_size, position), group)
    names = ("codes", "step", "low")[: 2 + low]
    return Layout(per_channel.plain if position == "post" else per_channel.turning, None, settings, names)


def _per_group(side: Side, geometry: Geometry, group: int) -> Layout | None:
    """Rounded tokens, a head's channels in several groups."""
    quantize, size = side.quantize, geometry.head_size
    if not isinstance(quantize, Rtn) or side.rotate is not None or size % group or group & (group - 1) or group < 8:
        return None
    low = int(quantize.range == "minmax")
    settings = (*_start(side, geometry, 1, size, 0), quantize.bits, low, group)
    return Layout(per_token.plain, per_group.token, settings, ("codes", "step", "low")[: 2 + low])


def _wide(size: int, position: str) -> int:
    """The padded head size; before RoPE, twice that of half a head."""
    return padded(size) if position == "post" else 2 * padded(size // 2)


def _turn(side: Side, geometry: Geometry) -> Tensor | None:
    """The rotation of a whole head, if it is one."""
    if side.rotate is None or not hasattr(side.rotate, "matrix"):
        return None
    matrix = side.rotate.matrix(geometry.width, geometry)
    if geometry.head_size % len(matrix):
        return None
    return torch.block_diag(*[matrix] * (geometry.head_size // len(matrix)))


def _uniform(side: Side, geometry: Geometry):
    quantize, low = side.quantize, int(side.quantize.range == "minmax")
    slots = _streams(quantize.bits)
    if geometry.head_size % slots:
        return None
    start = _start(side, geometry, slots, geometry.head_size // slots, quantize.bits)
    return read.uniform, (*start, quantize.bits, low), ("codes", "step", "low")[: 2 + low], None


def _grid(side: Side, geometry: Geometry):
    dim, size, bits = side.quantize.dim, side.quantize.size, side.quantize.bits
    count = geometry.head_size // dim
    points = grid.points(dim, size)
    if bits == 4 and count % 2 == 0:  # a byte is two codes: its row of the table has element 2 i + c, part i of code c
        byte = torch.arange(256)
        points = torch.stack([points[byte & 15], points[byte >> 4]], 2).flatten(1)
        return _codebook(side, geometry, points, 8, count // 2)
    return _codebook(side, geometry, points, bits, count)


def _lloyd(side: Side, geometry: Geometry):
    bits = side.quantize.bits
    centroids = lloyd.sphere(geometry.head_size, bits)[1].bfloat16().float()  # as the stage looks them up
    size, each = geometry.head_size, 8 // bits
    if bits != 3:
        byte = torch.arange(256)[:, None]
        codes = (byte >> (bits * torch.arange(each))) & (2**bits - 1)
        return _codebook(side, geometry, centroids[codes], 8, size // each) if size % each == 0 else None
    index = torch.arange(64)  # two codes of 3 bits
    return _codebook(side, geometry, torch.stack([centroids[index & 7], centroids[index >> 3]], 1), 3, size // 2, 1)


def _codebook(side: Side, geometry: Geometry, points: Tensor, bits: int, indices: int, paired: int = 0):
    """A codebook [entries, elements] of so many indices, each of `bits`, or of twice that if it is two codes."""
    streams, elements = _streams(bits) >> paired, points.shape[1]
    if indices % streams or elements not in (1, 2, 4, 8):
        return None
    word = {1: torch.int16, 2: torch.int32}.get(elements, torch.int64)
    start = _start(side, geometry, streams * elements, indices // streams, 0)
    lookup = points.half().contiguous().view(word)
    return read.codebook, (*start, bits, streams, elements, paired), ("codes", "scale"), lookup


def _polar(side: Side, geometry: Geometry, tensors: Tensors = _NOTHING):
    """Heads of other sizes take more registers in pairs than there are."""
    quantize: Polar = side.quantize
    size, bits = quantize.sizes(geometry.width, geometry)
    known = bool(tensors) or type(quantize) is Polar
    points = quantize.points_of(bits, tensors, torch.device("cpu")) if known else None
    low = int(quantize.radius == "log8")
    names = ("codes", "radius", "norm")[: 2 + low]
    if size in (16, 32, 64, 128):
        return read_polar.polar_pairs, *_pairs(side, geometry, bits, low, names, points)
    levels, count = _levels(size, bits)
    wide = triton.next_power_of_2(size >> len(bits)) << len(bits)
    if wide < 16:
        return None
    start = (1, size, wide, size, geometry.kv_heads, side.block, 0)
    settings = (*start, len(bits), count, low, *(number for level in levels for number in level))
    radii = (polar_stage.RADII * size**0.5).float()
    lookup = None if points is None else torch.cat([angles.table(points).mT.flatten(), radii])
    return read.polar, settings, names, lookup


def _levels(size: int, bits: tuple[int, ...]) -> tuple[list[tuple[int, ...]], int]:
    """Bits, first byte of the run, codes of it and first of its own, of every level; and the bytes of a head."""
    levels, first = [], 0
    for wide, counts in polar.runs(size, bits):
        levels += [(wide, first, sum(counts), sum(counts[:i])) for i in range(len(counts))]
        first += pack.packed_size(sum(counts), wide)
    return levels, first


def _pairs(side: Side, geometry: Geometry, bits: tuple[int, ...], low: int, names, points: list[Tensor] | None):
    """For the reader of pairs; a codebook of the whole circle that is not fitted is known by its first half."""
    size = geometry.head_size
    levels, count = _levels(size, bits)
    each, words, settings, kept = min(RUN, size), 0, [], []
    for i, level in enumerate(levels):
        mirrored = int(i == 0 and bits[0] > 3 and type(side.quantize) is Polar)
        settings += [*level, words, mirrored]
        words += _entries(bits[i] - mirrored)
        kept.append(2 ** (bits[i] - mirrored))
    lookup = None
    if points is not None:
        lookup = torch.cat([_words(table[:codes]) for table, codes in zip(points, kept, strict=True)])
    start = _start(side, geometry, size // each, each, 0)
    return (*start, len(bits), count, low, *settings), names, lookup


def _entries(bits: int) -> int:
    """Words that the points of so many bits take."""
    return 2 if bits <= 2 else 2 ** (bits - 1)


def _words(points: Tensor) -> Tensor:
    """Points [codes, 2] times √2, in words of eight bytes: cos, then sin, each four float16; or, of each eight codes,
    the low bytes of cos, the high ones, the low ones of sin, and the high ones."""
    halves = (points.double() * 2**0.5).half().mT.contiguous()
    if len(points) <= 4:
        return torch.nn.functional.pad(halves, (0, 4 - len(points))).view(torch.int64).flatten()
    return halves.view(torch.uint8).view(2, -1, 8, 2).permute(1, 0, 3, 2).contiguous().view(torch.int64).flatten()
