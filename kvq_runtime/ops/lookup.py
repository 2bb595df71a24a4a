"""Look codes up in a table of rows, several numbers per code, as words: gathered many times faster than elements.

A word of 16 bytes, four float32, is the widest that a tensor can hold and the fastest per number.
"""

import torch
from torch import Tensor

_WORDS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16}


def table(rows_RE: Tensor) -> Tensor:
    """Rows of E elements as words: [R], or [R, words] where a row is wider than a word."""
    row = rows_RE.shape[1] * rows_RE.element_size()
    word = next(kind for size, kind in _WORDS.items() if row % size == 0)
    return rows_RE.contiguous().view(word).view(len(rows_RE), -1).squeeze(-1)


def take(table: Tensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows of uint8 codes, one after another, [codes · E], in the dtype the table was made of."""
    return table.index_select(0, codes.int().view(-1)).view(dtype)
