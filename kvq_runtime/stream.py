"""Hold one layer's keys or values: encoded blocks in slabs, append only, and the exact tokens that follow them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvq_runtime.attention.fold import Laid
from kvq_runtime.codec import Codec
from kvq_runtime.ops import dispatch
from kvq_runtime.outliers import Outliers
from kvq_runtime.row_codec import RowCodec
from kvq_runtime.stages.escape import Escape

SLAB = 32  # blocks
# what the first word of a field's name says it is; all other fields are scales
_KINDS = {"codes": "codes", "x": "codes", "escape": "escapes", "sparse": "outliers", "landmarks": "landmarks"}
_SLACK = 64  # tokens that one step may add before the window is made larger and smaller again


class Stream:
    """Encoded blocks, then the window, in the model's dtype; the first tokens of each row once more, exact.

    A slab holds 32 blocks; only the last grows, by doubling. The window is a buffer in which live tokens move to the
    front when its end is reached, once per block. The sinks stand right before the window, and move with its start, so
    that what is exact is met in one piece.
    """

    def __init__(
        self, codec: Codec, batch: int, dtype: torch.dtype, device: torch.device, outliers: Outliers | None = None
    ):
        self.outliers = outliers
        self.codec: Codec | RowCodec = codec
        self.side, self.fold = codec.side, codec.fold
        self.recent = self.side.recent  # more in a forward pass that a dynamic window makes keep more
        self.blocks = 0
        self.slabs: list[dict[str, Tensor]] = []
        self._changed()
        self._hold(torch.zeros(batch, self.side.sinks, codec.geometry.width, dtype=dtype, device=device))
        self._start = self._stop = self.side.sinks
        self._kept: tuple[int, Tensor] | None = None

    def _hold(self, buffer: Tensor) -> None:
        geometry = self.codec.geometry
        x_BHTD = buffer.view(*buffer.shape[:2], geometry.kv_heads, geometry.head_size).transpose(1, 2)
        self._buffer, self._by_head = buffer, x_BHTD[0] if len(x_BHTD) == 1 else x_BHTD

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self._buffer.shape[0]

    @property
    def window_BTC(self) -> Tensor:
        """The exact tokens after the blocks."""
        return self._buffer[:, self._start : self._stop]

    @property
    def sinks_BSC(self) -> Tensor:
        """The first real tokens of each row, as far as they have arrived."""
        return self._buffer[:, self._start - self.side.sinks : self._start]

    @property
    def exact_YTD(self) -> Tensor:
        """What is exact, sinks, once there are blocks, and window, by head, float32; a single row where it lies."""
        start = self._start - self.front
        x = self._by_head.narrow(-2, start, self._stop - start)
        return (x if x.ndim == 3 else x.flatten(0, 1)).float()

    @property
    def length(self) -> int:
        """All tokens."""
        return self.encoded + self._stop - self._start

    @property
    def due(self) -> int:
        """Blocks that the window holds beyond the recent tokens."""
        return self.beyond(self.recent)

    def beyond(self, recent: int, count: int = 0) -> int:
        """Whole blocks that the window holds beyond so many tokens, once `count` more have come."""
        return max(0, self._stop - self._start + count - recent) // self.side.block

    def append(self, x_BTC: Tensor) -> None:
        """Add tokens to the window."""
        live, count = self._stop - self._start, x_BTC.shape[1]
        if self._stop + count > self._buffer.shape[1]:
            if self.side.sinks + live + count <= self._buffer.shape[1] and live <= self._start:
                self._shift(self.side.sinks)
            else:
                self._rebuffer(live + count)
        self._buffer[:, self._stop : self._stop + count] = x_BTC
        self.arrived(count)

    def arrived(self, count: int) -> None:
        """Count tokens that lie at the window's end."""
        self._stop += count

    def keep_sinks(self, rows: Tensor, ranks: Tensor, x_MC: Tensor) -> None:
        """Keep M tokens as sinks: their rows, and which sink each is."""
        self.sinks_BSC[rows, ranks] = x_MC

    def trim(self) -> None:
        """Give back the room that a long prompt took in the window."""
        if self._buffer.shape[1] > self.side.sinks + self.recent + self.side.block + _SLACK:
            self._rebuffer(self._stop - self._start)

    def _rebuffer(self, needed: int) -> None:
        sinks, live, steady = self.side.sinks, self._stop - self._start, self.recent + self.side.block
        room = needed if needed > steady else min(steady, max(needed, 64, 2 * live))
        buffer = self._buffer.new_empty(len(self._buffer), sinks + room, self._buffer.shape[2])
        buffer[:, : sinks + live] = self._buffer[:, self._start - sinks : self._stop]
        self._hold(buffer)
        self._start, self._stop = sinks, sinks + live

    def _shift(self, start: int) -> None:
        """Move sinks and window to where the window starts at `start`."""
        sinks, live = self.side.sinks, self._stop - self._start
        held = self._buffer[:, self._start - sinks : self._stop].clone()  # the two places may overlap
        self._buffer[:, start - sinks : start + live] = held
        self._start, self._stop = start, start + live

    def store(self, fields: dict[str, Tensor]) -> None:
        """Append the encoded form of the window's oldest block, and drop its exact tokens."""
        place = self.blocks % SLAB
        if place == 0 and self.blocks // SLAB == len(self.slabs):
            self.slabs.append({name: self._room(field, 1) for name, field in fields.items()})
        slab = self.slabs[self.blocks // SLAB]
        for name, field in fields.items():
            if place == slab[name].shape[1]:
                grown = self._room(field, min(2 * place, SLAB))
                grown[:, :place] = slab[name]
                slab[name] = grown
            slab[name][:, place] = field
        self.blocks += 1
        self._changed()
        sinks_BSC = self.sinks_BSC.clone()
        self._start += self.side.block
        self.sinks_BSC.copy_(sinks_BSC)

    def _room(self, field: Tensor, blocks: int) -> Tensor:
        """Memory for so many blocks of a field; for the ends of groups [B, block, M], which a fold reads, by group."""
        batch, *shape = field.shape
        if self.fold is None or len(shape) != 2 or dispatch.runs_kernel(field):
            return field.new_empty(batch, blocks, *shape)
        return field.new_empty(batch, shape[1], blocks, shape[0]).permute(0, 2, 3, 1)

    def _changed(self) -> None:
        """There are other blocks: count them."""
        self.encoded = self.blocks * self.side.block  # tokens in blocks
        self.front = self.side.sinks if self.blocks else 0  # sinks read beside them; before, they are in the window
        self.sizes = [(stop - start) * self.side.block for start, stop in self.runs()]  # tokens of each slab
        self._laid: list[Laid] = []

    def drop(self, kept_BK: Tensor) -> None:
        """Keep these tokens of the window, in rising order; the others are gone for good."""
        kept_BKC = self.window_BTC.gather(1, kept_BK[..., None].expand(-1, -1, self._buffer.shape[2]))
        self._hold(torch.cat([self.sinks_BSC, kept_BKC], 1))
        self._start, self._stop = self.side.sinks, self.side.sinks + kept_BK.shape[1]

    def keep(self, length: int) -> None:
        """Keep the window of the first `length` tokens, until `release`: blocks are about to be made of it."""
        if length > self.encoded:
            self._kept = (self.blocks, self.window_BTC[:, : length - self.encoded].clone())
            if self.outliers is not None:
                self.outliers.keep()

    def release(self) -> None:
        """Drop what `keep` kept."""
        self._kept = None
        if self.outliers is not None:
            self.outliers.release()

    def keeps(self, length: int) -> bool:
        """Whether `crop(length)` finds the window of that time."""
        return self._kept is not None and length == self._kept[0] * self.side.block + self._kept[1].shape[1]

    def fields(self, start: int, stop: int) -> dict[str, Tensor]:
        """The fields of blocks `start` to `stop` of one slab, [B, blocks, ...] each."""
        slab = self.slabs[start // SLAB]
        return {name: field[:, start % SLAB : (stop - 1) % SLAB + 1] for name, field in slab.items()}

    def laid(self, first: int) -> list[Laid]:
        """The blocks of each slab, from token `first` on, as the fold reads them; views, for a single row, are kept."""
        if self._laid and self._laid[0].tokens == self.sizes[0] - first:
            return self._laid
        assert self.fold is not None
        laid = [self.fold.lay(self.fields(*run), 0 if run[0] else first) for run in self.runs()]
        self._laid = laid if self.rows == 1 else []
        return laid

    def runs(self) -> Iterator[tuple[int, int]]:
        """(first, last + 1) of the blocks of each slab."""
        for start in range(0, self.blocks, SLAB):
            yield start, min(start + SLAB, self.blocks)

    def tokens(self, run: tuple[int, int]) -> tuple[int, int]:
        """(first, last + 1) of the tokens of a run of blocks."""
        return run[0] * self.side.block, run[1] * self.side.block

    def crop(self, length: int, survivors_BTC: Tensor | None) -> None:
        """Keep `length` tokens; `survivors` are the decoded tokens of a block that is cut."""
        if self._kept is not None and self.keeps(length):
            self.blocks, survivors_BTC = self._kept
            self._kept = None
            if self.outliers is not None:
                self.outliers.undo()
        elif length >= self.encoded:
            self._stop = self._start + length - self.encoded
            return
        else:
            self.blocks = length // self.side.block
            if self.outliers is not None:
                self.outliers.crop(self.blocks * self.side.block)
        del self.slabs[-(-self.blocks // SLAB) :]
        self._changed()
        self._stop = self._start
        self._shift(self.side.sinks)
        if survivors_BTC is not None:
            self.append(survivors_BTC)

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        self.slabs = [{name: field.index_select(0, rows) for name, field in slab.items()} for slab in self.slabs]
        self._changed()
        self._hold(self._buffer.index_select(0, rows))
        self._kept = None
        if self.outliers is not None:
            self.outliers.take_rows(rows)

    def escapes(self) -> tuple[int, int]:
        """(tokens stored by the escape, tokens that wanted to be)."""
        if not isinstance(self.side.correct, Escape):
            return 0, 0
        counts = [self.side.correct.count(self.fields(*run)) for run in self.runs()]
        return sum(served for served, _ in counts), sum(wanted for _, wanted in counts)

    def bytes(self) -> dict[str, int]:
        """Allocated bytes by kind."""
        kept = _bytes(self._kept[1]) if self._kept is not None else 0
        sinks = self.sinks_BSC.nbytes
        found = {"window": _bytes(self._buffer) - sinks + kept, "sinks": sinks}
        if self.outliers is not None:
            found["chunks"] = self.outliers.bytes()
        for slab in self.slabs:
            for name, field in slab.items():
                kind = _KINDS.get(name.split("_")[0], "scales")
                found[kind] = found.get(kind, 0) + _bytes(field)
        return found


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
