"""Sample rows of a stream by the hash of where they stand, so that the sample does not depend on chunks or order."""

from typing import Self

import torch
from torch import Tensor


class Sample:
    """Keep the rows whose hash of (seed, sequence, position) is among the `rows` smallest."""

    def __init__(self, rows: int, width: int, seed: int = 0):
        self.rows, self.seed, self.merged = rows, seed, 0
        self._hash_R = torch.empty(0, dtype=torch.int64)
        self._sequence_R, self._position_R = self._hash_R.clone(), self._hash_R.clone()
        self._rows_RC = torch.empty(0, width)

    def update(self, x_NTC: Tensor, sequences_N: Tensor, start: int = 0, mask_NT: Tensor | None = None) -> None:
        """Offer the rows where the mask is true.

        sequences_N   the sequences' numbers in the whole corpus
        start         the position of the first token
        """
        N, T, _ = x_NTC.shape
        sequence = sequences_N.cpu().long()[:, None].expand(N, T).flatten()
        position = torch.arange(start, start + T).expand(N, T).flatten()
        hashes = _mix(_mix(_mix(torch.tensor(self.seed)) ^ sequence) ^ position)
        kept = torch.arange(N * T) if mask_NT is None else mask_NT.cpu().flatten().nonzero()[:, 0]
        kept = kept[torch.argsort(hashes[kept], stable=True)[: self.rows]]
        rows = x_NTC.flatten(0, 1)[kept.to(x_NTC.device)].to("cpu", torch.float32)
        self._keep(hashes[kept], sequence[kept], position[kept], rows)

    def merge(self, index: int, partial: Self) -> None:
        """Take in the partial of chunk `index`: 0 first, then each next one."""
        in_order(index, self.merged)
        if (partial.rows, partial.seed) != (self.rows, self.seed):
            raise ValueError(f"chunk {index} was sampled with rows={partial.rows}, seed={partial.seed}; "
                             f"this sample has rows={self.rows}, seed={self.seed}")  # fmt: skip
        self._keep(partial._hash_R, partial._sequence_R, partial._position_R, partial._rows_RC)
        self.merged += 1

    def value(self) -> Tensor:
        """The rows [R, C] in the order of their hashes."""
        return self._rows_RC

    def _keep(self, hashes: Tensor, sequence: Tensor, position: Tensor, rows: Tensor) -> None:
        """Join with what is held, and keep the smallest; equal hashes by sequence, then position."""
        old = (self._hash_R, self._sequence_R, self._position_R)
        hashes, sequence, position = (torch.cat(both) for both in zip(old, (hashes, sequence, position), strict=True))
        rows = torch.cat([self._rows_RC, rows])
        order = torch.arange(len(hashes))
        for key in (position, sequence, hashes):
            order = order[torch.argsort(key[order], stable=True)]
        order = order[: self.rows]
        self._hash_R, self._sequence_R, self._position_R = hashes[order], sequence[order], position[order]
        self._rows_RC = rows[order]


def in_order(index: int, expected: int) -> None:
    """Refuse a partial out of turn."""
    if index != expected:
        raise ValueError(f"merge of chunk {index}; the next one is {expected}: sums are added in ascending order")


def _mix(x: Tensor) -> Tensor:
    """Mix the bits of int64s by splitmix64; products wrap, shifts are logical. Source: Steele et al., 2014."""
    x = x + -7046029254386353131  # 0x9E3779B97F4A7C15
    x = (x ^ _shifted(x, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ _shifted(x, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)
