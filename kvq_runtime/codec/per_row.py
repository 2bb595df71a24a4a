"""Encode and decode every row of a batch with a codec of its own, as a cache that fits online has them.

Rows are worked through one by one, so that no row can depend on the others.

N = B · n: n blocks of each row, row after row.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.recipe import Role


class RowCodec:
    """One scheme of one layer. `rows` are its codecs, at least one."""

    packed_reader = None  # rows have codes of their own: blocks are decoded to be attended to

    def __init__(self, rows: Sequence[Codec]):
        self.rows = tuple(rows)
        self.scheme, self.geometry = rows[0].scheme, rows[0].geometry
        self.role: Role = rows[0].role
        self.predictor = rows[0].predictor

    def encode(self, x_NTC: Tensor, context: Context) -> dict[str, Tensor]:
        """As `Codec.encode`."""
        parts = [codec.encode(x_NTC[part], _of(context, part)) for codec, part in self._parts(len(x_NTC))]
        return {name: torch.cat([fields[name] for fields in parts]) for name in parts[0]}

    def decode(self, fields: Mapping[str, Tensor], context: Context, out: Tensor | None = None) -> Tensor:
        """As `Codec.decode`."""
        if len(self.rows) == 1:
            return self.rows[0].decode(fields, context, out)
        count = len(next(iter(fields.values())))
        parts = [
            codec.decode({name: field[part] for name, field in fields.items()}, _of(context, part))
            for codec, part in self._parts(count)
        ]
        return torch.cat(parts)

    def tokens(self, fields: Mapping[str, Tensor], block_N: Tensor, place_N: Tensor, channels: slice) -> Tensor:
        """As `Codec.tokens`; the fields are those of the first row's blocks, then of the second's, as many of each."""
        room = len(next(iter(fields.values()))) // len(self.rows)
        parts = [(block_N // room == row).nonzero()[:, 0] for row in range(len(self.rows))]
        found = [c.tokens(fields, block_N[at], place_N[at], channels) for c, at in zip(self.rows, parts, strict=True)]
        return torch.cat(found)[torch.cat(parts).argsort()]

    def one_launch(self, x_NTC: Tensor) -> bool:
        """As `Codec.one_launch`: never, since rows are encoded one by one."""
        return False

    def mean(self, context: Context) -> Tensor:
        """The mean that is removed, float32 [B, 1, C]."""
        return torch.stack([codec.mean(context) for codec in self.rows])[:, None]

    def select(self, rows: Tensor) -> "RowCodec":
        """These rows, in this order; a row that comes twice is held once. A batch without rows keeps a codec."""
        return RowCodec([self.rows[row] for row in rows.tolist()] or self.rows[:1])

    @property
    def tensors(self) -> list[Tensor]:
        """Return the fitted tensors, row by row."""
        return [tensor for codec in self.rows for tensor in codec.tensors.values()]

    def _parts(self, count: int) -> Iterator[tuple[Codec, slice]]:
        each = count // len(self.rows)
        for row, codec in enumerate(self.rows):
            yield codec, slice(row * each, (row + 1) * each)


def _of(context: Context, part: slice) -> Context:
    """Return a row's part of the context: nothing online is predicted from layers or keys."""
    rope = context.rope
    return context if rope is None else Context(rope=(rope[0][part], rope[1][part]))
