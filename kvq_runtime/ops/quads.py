"""Look up packed codes of 1 to 4 bits four at a time: neighbours of one quarter of n codes, as a word of four float32.

A plane of 2 bits holds codes j, j + n/4, j + n/2, j + 3n/4 in byte j (`pack.py`). A *lane*, four bytes of it as int32,
so holds four neighbours of each quarter, and one product moves those of quarter q to the highest byte:

  (lane & 03030303 << 2q) · (2^24 + 2^18 + 2^12 + 2^6 >> 2q)

Planes of 1 and 4 bits are put into that form first. Two planes together are a place in a table of two bytes.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kvq_runtime.ops import latent, pack
from kvq_runtime.ops.constant import constant

MAX_BITS = 4
EDGE = 32  # codes of which a run of them has a multiple
_ONE, _TWO, _FIELD = 0x55555555, 0x33333333, 0x03030303
# A highest byte is read as a signed number: rows of a table lie from -128 on, but where the byte's sign is never set.
# Tables of two bytes have no rows for fields that codes cannot have.
_ROWS = {1: _ONE % 256 + 1, 2: 256, 3: 256 * (_ONE % 256 + 1), 4: 1 << 16}
_ZERO = {1: 0, 2: 128, 3: 128, 4: 128 + (128 << 8)}


def lanes(runs: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Return lanes int32 [N, R, k] of all channels of runs, of the low 2 bits of their codes, and of the high.

    runs   words int32 [N, channels, bits · T / 32] of packed codes, T of each channel, a multiple of EDGE, and bits
    """
    planes: dict[int, list[Tensor]] = {4: [], 2: [], 1: []}
    for words_NRX, bits in runs:
        widths = pack.planes(bits)
        sizes = [words_NRX.shape[2] // bits * width for width in widths]
        for width, plane in zip(widths, words_NRX.split_with_sizes(sizes, 2), strict=True):
            planes[width].append(plane)
    fours, twos, ones = _each(planes[4], _of_four), iter(planes[2]), _each(planes[1], _of_one)
    low, high = list[Tensor](), list[Tensor]()
    for _, bits in runs:
        if bits == 4:
            first, second = next(fours)
        else:
            first = next(twos) if bits > 1 else next(ones)[0]
            second = next(ones)[0] if bits == 3 else torch.zeros_like(first)
        low.append(first)
        high.append(second)
    return torch.cat(low, 1), torch.cat(high, 1)


def _each(planes: list[Tensor], change: Callable[[Tensor], tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """Change all planes in one piece, and give what becomes of each."""
    if not planes:
        return iter(())
    sizes = [plane.shape[1] for plane in planes]
    return zip(*(x.split_with_sizes(sizes, 1) for x in change(torch.cat(planes, 1))), strict=True)


def _of_one(words: Tensor) -> tuple[Tensor]:
    """Return a plane of 1 bit as lanes: of its eighths, each second lies in the second half of a quarter."""
    return (torch.cat([words & _ONE, (words >> 1) & _ONE], -1),)


def _of_four(words: Tensor) -> tuple[Tensor, Tensor]:
    """Return a plane of 4 bits as lanes: quarters 0 and 2 lie in one byte, 1 and 3 in another."""
    (even, odd), (even_2, odd_2) = ((words >> up & _TWO if up else words & _TWO).chunk(2, -1) for up in (0, 2))
    return torch.add(even, odd, alpha=4), torch.add(even_2, odd_2, alpha=4)


@constant(8)
def _factors(device: torch.device) -> tuple[Tensor, Tensor]:
    quarters = range(0, 8, 2)
    fields = torch.tensor([_FIELD << q for q in quarters]).to(torch.int32)  # wraps
    factors = torch.tensor([0x01041040 >> q for q in quarters], dtype=torch.int32)
    return fields.view(4, 1, 1, 1).to(device), factors.view(4, 1, 1, 1).to(device)


def bytes_of(lanes_NQrJ: Tensor) -> Tensor:
    """Return the bytes of four neighbours' fields, signed: int32 [N, Q, r, J] → [N, 4 quarters, Q, r, J]."""
    fields, factors = _factors(lanes_NQrJ.device)
    return (lanes_NQrJ[:, None] & fields).mul_(factors).bitwise_right_shift_(24)


@constant(8)
def table(device: torch.device) -> Tensor:
    """Return what four codes of each width stand for, a word a row: points of a Gaussian, then even steps about 0."""
    parts, even = list[Tensor](), list[Tensor]()
    for bits, rows in _ROWS.items():
        place = torch.arange(rows) ^ _ZERO[bits]
        fields = [(place >> q & 3) | (place >> q + 8 & 3) << 2 for q in range(0, 8, 2)]
        codes = torch.stack(fields, 1) & 2**bits - 1
        parts.append(latent.points(bits, False, torch.device("cpu"))[codes])
        even.append(codes.float() - (2**bits - 1) / 2)
    return pack.word_table(torch.cat([*parts, *even])).to(device)


def start(bits: int, even: bool) -> int:
    """Return the row of `table` that the signed bytes 0 of a width stand for, among points or even steps."""
    before = sum(rows for width, rows in _ROWS.items() if width < bits)
    return before + _ZERO[bits] + even * sum(_ROWS.values())
