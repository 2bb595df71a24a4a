"""Pack small integer codes into bytes, planar: byte j of a plane holds codes j, j + n/s, j + 2n/s, ...

A width of b bits is a sum of planes of 8, 4, 2 and 1 bits (3 = 2 + 1, 6 = 4 + 2), the low bits first, so that no code
straddles a byte, and every stream inside a plane is multiplied with a contiguous slice of the other operand.

Codes are looked up in a table of rows, several numbers per code, as words: gathered many times faster than elements. A
word of 16 bytes, four float32, is the widest that a tensor can hold and the fastest per number.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvq_runtime.ops.constant import constant

_WORDS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16}


class PackedCodes(NamedTuple):
    """A quantizer's codes, to attend to without decoding: x = scale_g · y + low_g for the elements of group g.

    group   elements of a group
    read    packed codes → y, float32, the elements of each row in `order`
    ends    fields → (scale [..., groups], low [..., groups] or None for 0)
    order   the natural place, inside a run that repeats, of each element that `read` gives; None: stored order
    """

    group: int
    read: Callable[[Tensor], Tensor]
    ends: Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor | None]]
    order: Tensor | None = None


@cache
def planes(bits: int) -> tuple[int, ...]:
    """Return the plane widths, low bits first, that `bits` is stored as; ValueError unless 1 to 8."""
    if not 1 <= bits <= 8:
        raise ValueError(f"bits={bits}; codes have 1 to 8 bits")
    return tuple(width for width in (8, 4, 2, 1) if bits & width)


def packed_size(count: int, bits: int) -> int:
    """Return bytes that `count` codes of `bits` bits take; a plane is padded to whole bytes."""
    return sum(-(-count * width // 8) for width in planes(bits))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack integer codes [..., n] in [0, 2**bits) into uint8 [..., packed_size(n, bits)]."""
    count, codes = codes.shape[-1], codes.to(torch.uint8)
    packed, shift = [], 0
    for width in planes(bits):
        per_byte = 8 // width
        plane = (codes >> shift) & ((1 << width) - 1) if bits < 8 else codes
        missing = -count % per_byte
        if missing:
            plane = torch.nn.functional.pad(plane, (0, missing))
        streams = plane.unflatten(-1, (per_byte, -1))
        byte = streams[..., 0, :]
        for stream in range(1, per_byte):
            byte = byte | (streams[..., stream, :] << (stream * width))
        packed.append(byte)
        shift += width
    return torch.cat(packed, -1) if len(packed) > 1 else packed[0].contiguous()


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Undo `pack`: uint8 [..., packed_size(count, bits)] to uint8 codes [..., count]."""
    codes, start, shift = None, 0, 0
    for width in planes(bits):
        per_byte, size = 8 // width, -(-count * width // 8)
        byte = packed[..., start : start + size]
        plane = _streams(byte, width)[..., :count] if per_byte > 1 else byte
        codes = plane if codes is None else codes | (plane << shift)
        start, shift = start + size, shift + width
    assert codes is not None
    return codes


def places_size(count: int, bits: int) -> int:
    """Return bytes that `count` places of `bits` bits take."""
    return sum(packed_size(count, min(8, bits - shift)) for shift in range(0, bits, 8))


def pack_places(places: Tensor, bits: int) -> Tensor:
    """Pack integers [..., n] in [0, 2**bits), of any number of bits, eight bits after eight, the low ones first."""
    parts = [pack((places >> shift) & 255, min(8, bits - shift)) for shift in range(0, bits, 8)]
    return torch.cat(parts, -1)


def unpack_places(packed: Tensor, bits: int, count: int) -> Tensor:
    """Undo `pack_places`: to int64 [..., count]."""
    places, start = torch.zeros(*packed.shape[:-1], count, dtype=torch.int64, device=packed.device), 0
    for shift in range(0, bits, 8):
        width = min(8, bits - shift)
        stop = start + packed_size(count, width)
        places |= unpack(packed[..., start:stop], width, count).long() << shift
        start = stop
    return places


def pick(packed: Tensor, start: Tensor, place: Tensor, bits: int, count: int) -> Tensor:
    """Return single codes: those at `place` in runs of `count` codes that begin at byte `start` of flat `packed`."""
    codes, shift = None, 0
    for width in planes(bits):
        size = -(-count * width // 8)
        plane = (packed[start + place % size] >> (place // size * width).to(torch.uint8)) & ((1 << width) - 1)
        codes = plane if codes is None else codes | (plane << shift)
        start, shift = start + size, shift + width
    assert codes is not None
    return codes


def _streams(byte: Tensor, width: int) -> Tensor:
    """Return the codes of one plane, stream after stream; eight bytes at a time where they are whole words."""
    mask, words = (1 << width) - 1, byte
    if byte.numel() and byte.shape[-1] % 8 == 0 and byte.is_contiguous() and byte.storage_offset() % 8 == 0:
        mask, words = mask * 0x0101010101010101, byte.reshape(-1).view(torch.int64)
        words = words.view(*byte.shape[:-1], -1)
    out = words.new_empty(*words.shape[:-1], 8 // width, words.shape[-1])
    for stream in range(8 // width):
        torch.bitwise_and(words >> (stream * width), mask, out=out[..., stream, :])
    return out.view(torch.uint8).flatten(-2)


def word_table(rows_RE: Tensor) -> Tensor:
    """Return rows of E elements as words: [R], or [R, words] where a row is wider than a word."""
    row = rows_RE.shape[1] * rows_RE.element_size()
    word = next(kind for size, kind in _WORDS.items() if row % size == 0)
    return rows_RE.contiguous().view(word).view(len(rows_RE), -1).squeeze(-1)


def codes_together(size: int, bits: int) -> int:
    """Return the number of codes that one lookup reads: all of a byte, where they fill it and are a word together."""
    return 8 // bits if bits in (2, 4) and size % (8 // bits) == 0 else 1


@constant(64)
def order_together(size: int, together: int) -> Tensor:
    """Return the natural place, among `size` elements, of each that is read `together` at a time."""
    return torch.arange(size).view(together, -1).mT.flatten()


def codes_of_bytes(bits: int, device: torch.device) -> Tensor:
    """Return the codes that fill every byte, [256, 8/bits]."""
    byte = torch.arange(256, device=device)
    return torch.stack([(byte >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], 1)


def take(table: Tensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows of uint8 codes, one after another, [codes · E], in the dtype the table was made of."""
    return table.index_select(0, codes.int().view(-1)).view(dtype)
