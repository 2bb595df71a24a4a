"""Order a block's codes as tensor cores take them: as the operand A of mma.m16n8k16, so that a load is a lane's share.

A head's block, tokens × channels, is cut into tiles of 16 tokens × 16 channels. A lane holds eight elements of a tile,
at fixed places; a *container* of 16 bits holds one such element of several tiles, and a *word* of 512 bytes all
containers of 32 lanes: 16 bytes a lane, one load. Tiles of one word are the `tiles` of tokens of a sub-block, for one
group of 16 channels after another.

    block → sub-blocks of 16 · tiles tokens → planes (3 bits = 2 + 1) → words → 8 g, 4 t, 2 r, 2 w, 2 h containers

    keys     rows of the operand are tokens:   row g + 8 r, column 2 t + h + 8 w
    values   rows of the operand are channels: likewise, transposed

Shapes: T tokens of a block · D channels of a head · J = D / 16 groups of channels · S tiles of a sub-block.

Source: the fragment layout of mma.m16n8k16, PTX ISA 9.7.14; storing codes so: Du et al., 2025 (BitDecoding).
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

EDGE = 16  # tokens and channels of a tile
LANES = 256  # elements of a tile
MAX_TILES = 8  # tiles of a sub-block: their scores lie in registers
# widths of a code's planes, and the place of each one's lowest bit in the code; the first decides where a code is read
PLANES = {1: ((1, 0),), 2: ((2, 0),), 3: ((2, 1), (1, 0)), 4: ((4, 0),), 8: ((8, 0),)}
SLAB_PLANES = PLANES | {5: ((4, 1), (1, 0)), 6: ((4, 2), (2, 0)), 7: ((4, 3), (2, 1), (1, 0))}
SLAB_TOKENS = EDGE * MAX_TILES


class Words(NamedTuple):
    """Words that are loaded together.

    START    byte of the first in a sub-block
    STRIDE   bytes from one to the next
    COUNT    how many
    BITS     of a container: 16, or 8 in a last half of a word
    """

    START: int
    STRIDE: int
    COUNT: int
    BITS: int


class Plane(NamedTuple):
    """The place of one plane of the codes of some groups of channels.

    WIDTH, UP   bits of a code in it, and the place of the lowest of them in the code
    WORDS       which of the order's
    SLOT        place, in a container, of the first tile of tokens
    """

    WIDTH: int
    UP: int
    WORDS: int
    SLOT: int


class Run(NamedTuple):
    """Groups of channels that are read together: FIRST, FIRST + STEP, ..., COUNT of them, a power of two.

    GROUP    of channels with one scale, that all of them are in
    PLANES   where their codes are
    """

    FIRST: int
    STEP: int
    COUNT: int
    GROUP: int
    PLANES: tuple[Plane, ...]


class Order(NamedTuple):
    """The order of a head's codes in a block.

    BITS     of a code
    TILES    S: tiles of tokens of a sub-block
    SUBS     sub-blocks
    BYTES    of a sub-block
    WORDS    its words, as they are loaded; runs share them where a container has codes of several groups of channels
    RUNS     its channels
    SECTIONS its parts, in the order of their bytes
    """

    BITS: int
    TILES: int
    SUBS: int
    BYTES: int
    WORDS: tuple[Words, ...]
    RUNS: tuple[Run, ...]
    SECTIONS: tuple["Section", ...]


class Section(NamedTuple):
    """The words of a plane, whole or half, of consecutive groups of channels.

    WIDTH, UP   as in `Plane`
    FIRST       group of channels
    WORDS       and EACH, groups of a word
    BITS        of a container
    START       byte of a sub-block at which they begin
    """

    WIDTH: int
    UP: int
    FIRST: int
    WORDS: int
    EACH: int
    BITS: int
    START: int


@lru_cache(maxsize=256)
def order(bits: int, block: int, size: int, groups: int = 1) -> Order | None:
    """Return the order of a head's block, [block, size]; None where tiles do not fill words.

    bits     of a code: 1, 2, 3, 4 or 8
    block    tokens: 16 times a power of two
    size     channels of a head: a multiple of 16
    groups   equal parts of the channels that have scales of their own
    """
    if bits not in PLANES or block % EDGE or size % EDGE or block & (block - 1) or size % (EDGE * groups):
        return None
    tiles = min(block // EDGE, MAX_TILES, 16 // max(width for width, _ in PLANES[bits]))
    count, start, sections = size // EDGE, 0, list[Section]()
    for width, up in PLANES[bits]:
        each = 16 // (width * tiles)  # groups of channels of a word
        words, rest = divmod(count, each)
        if rest and rest * tiles * width != 8:
            return None
        for first, number, together, container in ((0, words, each, 16), (words * each, 1, rest, 8)):
            if number and together:
                sections.append(Section(width, up, first, number, together, container, start))
                start += number * LANES * container // 8
    words, runs = _runs([(j * groups // count, _places(sections, j, tiles)) for j in range(count)])
    return Order(bits, tiles, block // (EDGE * tiles), start, words, runs, tuple(sections))


@lru_cache(maxsize=8)
def slab_order(bits: int) -> Order:
    """Return the order of a slab, [128 tokens, 16 channels], of 1 to 7 bits: 256 bytes a bit, plane after plane.

    Its runs are not of channels: each has a part of the tiles of tokens, the first tile of a part at SLOT.
    """
    sections, words, start = list[Section](), list[Words](), 0
    first = dict[int, int]()  # by width, the plane's first word
    for width, up in SLAB_PLANES[bits]:
        count, container = (2, 16) if width == 4 else (1, 8 * width)
        first[width] = len(words)
        sections.append(Section(width, up, 0, count, 1, container, start))
        for _ in range(count):
            words.append(Words(start, 0, 1, container))
            start += LANES * container // 8
    parts = 2 if bits >= 4 else 1
    runs = tuple(
        Run(0, 1, 1, 0, tuple(
            Plane(width, up, first[width] + (part if width == 4 else 0), part * 4 * (width < 4))
            for width, up in SLAB_PLANES[bits]
        )) for part in range(parts)
    )  # fmt: skip
    return Order(bits, MAX_TILES, 1, start, tuple(words), runs, tuple(sections))


class PlaneSlot(NamedTuple):
    """The place of one plane of a group of channels' codes: its section, the byte of its word, and as in `Plane`."""

    SECTION: Section
    BYTE: int
    SLOT: int


def _places(sections: list[Section], group: int, tiles: int) -> tuple[PlaneSlot, ...]:
    """Return the place of a group of channels in each plane."""
    inside = ((section, *divmod(group - section.FIRST, section.EACH)) for section in sections)
    return tuple(
        PlaneSlot(section, section.START + word * 2 * LANES, slot * tiles)
        for section, word, slot in inside if 0 <= word < section.WORDS
    )  # fmt: skip


def _runs(channels: list[tuple[int, tuple[PlaneSlot, ...]]]) -> tuple[tuple[Words, ...], tuple[Run, ...]]:
    """Return groups of channels whose codes are alike placed, and evenly apart, in runs of powers of two."""
    alike: dict[tuple, list[int]] = {}
    for j, (group, places) in enumerate(channels):
        alike.setdefault((group, tuple((place.SLOT, place.SECTION.BITS) for place in places)), []).append(j)
    words: dict[Words, int] = {}
    runs = []
    for (group, _), members in alike.items():
        while members:
            count = 1 << (len(members).bit_length() - 1)
            chosen, members = members[:count], members[count:]
            first, step = chosen[0], chosen[1] - chosen[0] if count > 1 else 1
            assert chosen == list(range(first, first + count * step, step))
            planes = []
            for at, place in enumerate(channels[first][1]):
                stride = channels[chosen[1]][1][at].BYTE - place.BYTE if count > 1 else 0
                section = place.SECTION
                loaded = words.setdefault(Words(place.BYTE, stride, count, section.BITS), len(words))
                planes.append(Plane(section.WIDTH, section.UP, loaded, place.SLOT))
            runs.append(Run(first, step, count, group, tuple(planes)))
    return tuple(words), tuple(runs)


def arrange(codes: Tensor, order: Order, rows: str) -> Tensor:
    """Order codes uint8 [..., T, D] of a head: bytes uint8 [..., SUBS · BYTES].

    rows   of the operand: "tokens" or "channels"
    """
    x = _tiles(codes, order, rows)
    parts = []
    for width, up, start, count, each, bits, _ in order.SECTIONS:
        plane = (x >> up) & ((1 << width) - 1)  # [..., SUBS, J, S, 256]
        slots = plane[..., start : start + count * each, :, :].reshape(*x.shape[:-3], count, -1, LANES)
        shifts = torch.arange(slots.shape[-2], device=x.device, dtype=torch.int16) * width
        container = (slots.to(torch.int16) << shifts[:, None]).sum(-2, dtype=torch.int16)
        whole = container.to(torch.uint8) if bits == 8 else container.contiguous().view(torch.uint8)
        parts.append(whole.flatten(-2))
    return torch.cat(parts, -1).flatten(-2)


def collect(ordered: Tensor, order: Order, rows: str) -> Tensor:
    """Undo `arrange`: codes uint8 [..., T, D]."""
    subs = ordered.unflatten(-1, (order.SUBS, order.BYTES))
    count = order.BYTES * 8 // (order.BITS * order.TILES * LANES)
    x = torch.zeros(*subs.shape[:-1], count, order.TILES, LANES, dtype=torch.uint8, device=ordered.device)
    for width, up, start, words, _, bits, offset in order.SECTIONS:
        size = words * LANES * bits // 8
        part = subs[..., offset : offset + size].contiguous()
        container = part if bits == 8 else part.view(torch.int16)
        shifts = torch.arange(bits // width, device=x.device, dtype=torch.int16) * width
        slots = (container.unflatten(-1, (words, 1, LANES)).to(torch.int32) >> shifts[:, None]) & ((1 << width) - 1)
        groups = slots.to(torch.uint8).view(*subs.shape[:-1], -1, order.TILES, LANES)
        x[..., start : start + groups.shape[-3], :, :] |= groups << up
    return _untiled(x, rows)


def _tiles(codes: Tensor, order: Order, rows: str) -> Tensor:
    """Return [..., T, D] as [..., SUBS, J, S, 256], elements of a tile as lanes hold them: g, t, r, w, h."""
    x = codes.unflatten(-1, (-1, EDGE)).unflatten(-3, (order.SUBS, order.TILES, EDGE))
    lead = x.ndim - 5
    sub, tile, token, group, channel = range(lead, lead + 5)
    row, column = (token, channel) if rows == "tokens" else (channel, token)
    x = x.permute(*range(lead), sub, group, tile, row, column)
    x = x.unflatten(-1, (2, 4, 2)).unflatten(-4, (2, 8))  # r, g, w, t, h
    r, g, w, t, h = range(lead + 3, lead + 8)
    return x.permute(*range(lead + 3), g, t, r, w, h).flatten(-5)


def _untiled(x: Tensor, rows: str) -> Tensor:
    """Undo `_tiles`."""
    x = x.unflatten(-1, (8, 4, 2, 2, 2))
    lead = x.ndim - 5
    g, t, r, w, h = range(lead, lead + 5)
    x = x.permute(*range(lead), r, g, w, t, h).flatten(-3).flatten(-3, -2)  # SUBS, J, S, row, column
    sub, group, tile, row, column = range(lead - 3, lead + 2)
    token, channel = (row, column) if rows == "tokens" else (column, row)
    return x.permute(*range(lead - 3), sub, tile, token, group, channel).flatten(-5, -3).flatten(-2)
