"""Sample rows of a corpus by a hash of their place: the same rows whatever the chunks, or their order."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from kvq_runtime.ops.rotation import mix


class Sample:
    """Keep the rows whose hash of (seed, sequence, position) is among the `rows` smallest.

    among   so many rows are offered in all: those whose hash is too large for them are not looked at. 0: unknown
    """

    def __init__(self, rows: int, width: int, seed: int = 0, among: int = 0):
        self.rows, self.seed, self.merged = rows, seed, 0
        share = rows / max(among, 1) * (1 + 8 / rows**0.5)  # eight deviations more than are kept
        self._most = int(2**64 * share) - 2**63 if among and share < 1 else 2**63 - 1
        self._hash_R = torch.empty(0, dtype=torch.int64)
        self._sequence_R, self._position_R = self._hash_R.clone(), self._hash_R.clone()
        self._rows_RC = torch.empty(0, width, dtype=torch.float32)

    def update(self, x_NTC: Tensor, sequences_N: Tensor, start: int = 0, mask_NT: Tensor | None = None) -> None:
        """Offer the rows where the mask is true.

        sequences_N   the sequences' numbers in the whole corpus
        start         the position of the first token
        """
        rows_RC = x_NTC.flatten(0, 1)
        self.choose(lambda places_K: rows_RC[places_K], sequences_N, x_NTC.shape[1], start, mask_NT, x_NTC.device)

    def choose(
        self, rows: Callable[[Tensor], Tensor], sequences_N: Tensor, tokens: int, start: int = 0,
        mask_NT: Tensor | None = None, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        """The same of rows that are made of their places in [N · tokens] first, on a device."""
        N, T = len(sequences_N), tokens
        sequence = sequences_N.cpu().long()[:, None].expand(N, T).flatten()
        position = torch.arange(start, start + T).expand(N, T).flatten()
        hashes = mix(mix(mix(torch.tensor(self.seed)) ^ sequence) ^ position)
        open_R = hashes <= self._most
        kept = (open_R if mask_NT is None else open_R & mask_NT.cpu().flatten()).nonzero()[:, 0]
        kept = kept[torch.argsort(hashes[kept], stable=True)[: self.rows]]
        self._keep(hashes[kept], sequence[kept], position[kept], rows(kept.to(device)).to("cpu", torch.float32))

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
