"""Look codes up in a table of rows, several numbers per code, as words: gathered many times faster than elements.

A word of 16 bytes, four float32, is the widest that a tensor can hold and the fastest per number.
"""

from functools import lru_cache

import torch
from torch import Tensor

_WORDS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16}


def table(rows_RE: Tensor) -> Tensor:
    """Rows of E elements as words: [R], or [R, words] where a row is wider than a word."""
    row = rows_RE.shape[1] * rows_RE.element_size()
    word = next(kind for size, kind in _WORDS.items() if row % size == 0)
    return rows_RE.contiguous().view(word).view(len(rows_RE), -1).squeeze(-1)


def together(size: int, bits: int) -> int:
    """The number of codes that one lookup reads: all of a byte, where they fill it and are a word together."""
    return 8 // bits if bits in (2, 4) and size % (8 // bits) == 0 else 1


@lru_cache(maxsize=64)
def order(size: int, together: int) -> Tensor:
    """The natural place, among `size` elements, of each that is read `together` at a time."""
    return torch.arange(size).view(together, -1).mT.flatten()


def codes_of_bytes(bits: int, device: torch.device) -> Tensor:
    """The codes that fill every byte, [256, 8/bits]."""
    byte = torch.arange(256, device=device)
    return torch.stack([(byte >> shift) & (2**bits - 1) for shift in range(0, 8, bits)], 1)


def take(table: Tensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows of uint8 codes, one after another, [codes · E], in the dtype the table was made of."""
    return table.index_select(0, codes.int().view(-1)).view(dtype)
