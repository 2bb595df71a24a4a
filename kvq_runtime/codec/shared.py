"""Build the codecs of a fit, and share them among all caches of a process: made once for each device, and dropped with
their last user. Rows that are fitted online have codecs of their own.

An artifact's tensors are `Fitted`; whoever builds codecs of the same `Fitted` gets the same ones, and from `moved` the
same copies on another device. Nothing else of a fit is held twice, whatever the number of caches or threads.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from kvq_runtime.codec.codec import Codec, Context, all_specs
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops.constant import lasting
from kvq_runtime.recipe import Recipe, Role

_lock = threading.RLock()
_moved: WeakKeyDictionary[Codec, WeakValueDictionary[torch.device, Codec]] = WeakKeyDictionary()


class Fitted(dict[str, Tensor]):
    """The tensors of a fit by name. They must not be changed: caches share them. Those of inference mode are copied."""

    @lasting
    def __init__(self, tensors: Mapping[str, Tensor]):
        super().__init__(
            (name, tensor.clone() if tensor.is_inference() else tensor) for name, tensor in tensors.items()
        )
        self._built: list[tuple[Recipe, Geometry, list[tuple[Codec, Codec]]]] = []

    def __reduce__(self):  # in another process codecs are made again
        return Fitted, (dict(self),)


def build(recipe: Recipe, geometry: Geometry, tensors: Mapping[str, Tensor]) -> list[tuple[Codec, Codec]]:
    """The codecs of all layers, (keys, values) each, from the tensors of an artifact: a list of its own, of codecs that
    are the same for everyone who asks with the same `Fitted`. ValueError: a fitted recipe without tensors."""
    if recipe.fitted and not tensors and all_specs(recipe, geometry):
        raise ValueError(
            f"recipe {recipe.name} has fitted stages: load an artifact with from_pretrained, "
            f"or make one with kvq-calibrate --recipe {recipe.name}"
        )
    if not isinstance(tensors, Fitted):
        tensors = Fitted(tensors)
    with _lock:
        for known, size, pairs in tensors._built:
            if known == recipe and size == geometry:
                return list(pairs)
        pairs = [_pair(recipe, layer, geometry, tensors) for layer in range(geometry.layers)]
        tensors._built.append((recipe, geometry, pairs))
        return list(pairs)


def _pair(recipe: Recipe, layer: int, geometry: Geometry, tensors: Mapping[str, Tensor]) -> tuple[Codec, Codec]:
    def codec_of(role: Role) -> Codec:
        start = f"layers.{layer}.{role}."
        fitted = {name.removeprefix(start): x for name, x in tensors.items() if name.startswith(start)}
        return Codec(recipe, layer, role, geometry, fitted)

    return codec_of("key"), codec_of("value")


def moved(codec: Codec, device: torch.device) -> Codec:
    """`codec.to(device)`, one object for all callers as long as it is in use."""
    if device == codec.device:
        return codec
    with _lock:
        known = _moved.setdefault(codec, WeakValueDictionary())
        copied = known.get(device)
        if copied is None:
            copied = known[device] = codec.to(device)
        return copied


class RowCodec:
    """Encode and decode every row of a batch with a codec of its own, as a cache that fits online has them.

    Rows are worked through one by one, so that no row can depend on the others. N = B · n: n blocks of each row, row
    after row.

    rows   codecs of one scheme of one layer, at least one
    """

    packed_reader = None  # rows have codes of their own: blocks are decoded to be attended to

    def __init__(self, rows: Sequence[Codec]):
        self.rows = tuple(rows)
        self.scheme, self.geometry = rows[0].scheme, rows[0].geometry
        self.role: Role = rows[0].role
        self.predictor = rows[0].predictor
        self.unrotated, self.segment = rows[0].unrotated, rows[0].segment

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
        decoded = [c.tokens(fields, block_N[at], place_N[at], channels) for c, at in zip(self.rows, parts, strict=True)]
        return torch.cat(decoded)[torch.cat(parts).argsort()]

    def one_launch(self, x_NTC: Tensor) -> bool:
        """As `Codec.one_launch`: never, since rows are encoded one by one."""
        return False

    def mean(self, context: Context) -> Tensor:
        """Return the mean that is removed, float32 [B, 1, C]."""
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
