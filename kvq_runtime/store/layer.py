"""Hold what one layer caches: exact sinks, encoded blocks in slabs, and the exact window of tokens after them.

    tokens   | block 0 | block 1 | ... | window                keys and values alike: one set of counters
    exact      the first tokens of each row (sinks), once more, right before the window

The window is a buffer in which live tokens move to the front when its end is reached, once per block. The sinks stand
right before the window, and move with its start, so that what is exact is read in one piece.

The digit in a shape, as in [2, B, T, C], counts keys and values.
"""

from typing import Any

import torch
from torch import Tensor

from kvq_runtime.codec.codec import Codec
from kvq_runtime.codec.shared import RowCodec
from kvq_runtime.geometry import SLAB, Window
from kvq_runtime.ops.constant import lasting
from kvq_runtime.store import storage
from kvq_runtime.store.positions import Positions
from kvq_runtime.store.step import Step
from kvq_runtime.store.storage import SLACK, DeviceIndex, Slab

Run = tuple[int, int]  # (first, last + 1) of the blocks of one slab
CUT = 4  # blocks


class LayerStore:
    """Keys and values of one layer, in the model's dtype where they are exact.

    codecs   of keys and of values
    layer    its number
    recent   newest tokens that are not due to be encoded; a policy may keep more than the recipe's window
    slabs    of keys and of values, [B, blocks, ...] a field
    index    where a kernel on the device finds all that; None: no kernel reads this layer
    orders   how codes lie in `slabs`, for a kernel; None: as they were encoded
    length   all tokens     encoded   those in blocks     runs   the blocks of each slab     sizes   and their tokens
    front    sinks that are read beside blocks; before there are any, sinks are in the window
    cut      by block, of the newest CUT that a crop has cut, the tokens that it left as they were first decoded,
             [2, B, T, C]: rounded with other tokens again, and cut again, they would lose more each time
    """

    @lasting
    def __init__(
        self,
        codecs: tuple[Codec, Codec],
        window: Window,
        positions: Positions,
        like_BTC: Tensor,
        index: DeviceIndex | None = None,
    ):
        self.codecs: tuple[Codec | RowCodec, Codec | RowCodec] = codecs
        self.layer = codecs[0].layer
        self.window, self.positions, self.index = window, positions, index
        self.orders = (None, None) if index is None else index.orders
        self.recent = window.recent
        self.blocks = 0
        self.cut: dict[int, Tensor] = {}
        self.slabs: tuple[list[Slab], list[Slab]] = ([], [])
        self._step: Step | None = None
        self._before = 0  # tokens before that step
        self._saved = True  # whether the step can restore the window that it found
        self._start = self._stop = window.sinks
        self._count_blocks()
        self._hold(like_BTC.new_zeros(2, len(like_BTC), window.sinks, codecs[0].geometry.width))

    def __getstate__(self) -> dict[str, Any]:
        """Return what is held between two forward passes, without views and the index, which are made again."""
        views = ("_keys", "_values", "_by_head", "_packed")
        kept = {name: value for name, value in self.__dict__.items() if name not in views}
        return kept | {"index": None, "_step": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._count_blocks()
        self._hold(self.buffer_2BTC)

    # ---- what is held ------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.buffer_2BTC.shape[1]

    @property
    def window_2BTC(self) -> Tensor:
        """The exact tokens after the blocks."""
        return self.buffer_2BTC[:, :, self._start : self._stop]

    @property
    def window_start(self) -> int:
        """The place in `buffer_2BTC` where the window begins."""
        return self._start

    @property
    def sinks_2BSC(self) -> Tensor:
        """The first real tokens of each row, as far as they have arrived."""
        return self.buffer_2BTC[:, :, self._start - self.window.sinks : self._start]

    def exact_YTD(self, role: int) -> Tensor:
        """Return the exact tokens by head, float32: sinks (once there are blocks) and window; one row is a view."""
        start = self._start - self.front
        x = self._by_head[role].narrow(-2, start, self._stop - start)
        return (x if x.ndim == 3 else x.flatten(0, 1)).float()

    @property
    def due(self) -> int:
        """Blocks that the window holds beyond the recent tokens."""
        return self.beyond(self.recent)

    def beyond(self, recent: int, count: int = 0) -> int:
        """Return whole blocks that the window holds beyond `recent` tokens, once `count` more have come."""
        return max(0, self._stop - self._start + count - recent) // self.window.block

    def fields(self, role: int, start: int, stop: int) -> dict[str, Tensor]:
        """Return the fields of blocks `start` to `stop` of one slab, as they were encoded, [B, blocks, ...]."""
        if not self.slabs[role]:
            return {}
        fields, order = dict(self.slabs[role][start // SLAB]), self.orders[role]
        for name, field in fields.items():
            fields[name] = field[:, start % SLAB : (stop - 1) % SLAB + 1]
        return fields if order is None else order.collected(fields)

    def tokens(self, run: Run) -> Run:
        """(first, last + 1) of the tokens of a run of blocks."""
        return run[0] * self.window.block, run[1] * self.window.block

    def packed(self, role: int, first: int) -> list[Any]:
        """The blocks of each slab, from token `first` on, as their codec's packed reader takes them; views, for a
        single row, are kept."""
        kept = self._packed[role]
        if kept and kept[0].tokens == self.sizes[0] - first:
            return kept
        reader = self.codecs[role].packed_reader
        assert reader is not None
        parts = [reader.view_blocks(self.fields(role, *run), 0 if run[0] else first) for run in self.runs]
        self._packed[role] = parts if self.rows == 1 else []
        return parts

    # ---- one forward pass --------------------------------------------------------------------------------------

    def begin(self, step: Step) -> None:
        """Take part in a forward pass, which can be undone."""
        self._step, self._before, self._saved = step, self.length, False

    def undo(self) -> None:
        """Forget the tokens of a pass that is undone; what it made of the window is restored."""
        self._truncate(self._before)

    def append(self, k_BTC: Tensor, v_BTC: Tensor) -> None:
        """Add tokens to the window, and keep those that are sinks beside it."""
        live, count, index = self._stop - self._start, k_BTC.shape[1], self.index
        room = self.buffer_2BTC.shape[2] - self._stop
        if (
            index is not None
            and not index.stale
            and self.buffer_2BTC is index.window_2BTC
            and count <= min(SLACK, room)
        ):
            storage.append(k_BTC, v_BTC, self.buffer_2BTC, index.counts)
        else:
            if count > room:
                if self.window.sinks + live + count <= self.buffer_2BTC.shape[2] and live <= self._start:
                    self._shift(self.window.sinks)
                else:
                    self._rebuffer(live + count)
            self._keys[:, self._stop : self._stop + count] = k_BTC
            self._values[:, self._stop : self._stop + count] = v_BTC
            if index is not None:
                index.stale = True
        first, self._stop, self.length = self.length, self._stop + count, self.length + count
        if first < self.window.sinks or self.positions.real_BT is not None:
            self._keep_sinks(k_BTC, v_BTC)

    def arrived(self, count: int) -> None:
        """Count tokens that a recorded step has put at the window's end."""
        self._stop, self.length = self._stop + count, self.length + count

    def trim(self) -> None:
        """Give back the room that a long prompt took in the window."""
        sinks, live = self.window.sinks, self._stop - self._start
        steady = sinks + self.recent + self.window.block + SLACK
        index = self.index
        if index is None:
            if self.buffer_2BTC.shape[2] > steady:
                self._rebuffer(live)
            return
        home = index.window_2BTC
        if (self.buffer_2BTC is home and self._start == sinks) or sinks + live > steady:
            return
        held = self.buffer_2BTC[:, :, self._start - sinks : self._stop]
        if home is None or home.shape[1] != self.rows or home.shape[2] < sinks + live:
            with torch.inference_mode(False):
                home = self.buffer_2BTC.new_empty(2, self.rows, steady, self.buffer_2BTC.shape[3])
            index.window_2BTC = home
        home[:, :, : sinks + live] = held.clone() if self.buffer_2BTC is home else held
        self._hold(home)
        self._place(sinks, live)

    @lasting
    def add_blocks(self, count: int, keys: Slab, values: Slab) -> None:
        """Append the encoded form of the window's oldest blocks, all of one slab, and drop their exact tokens.

        keys, values   as their codecs encode them, [B, count, ...] a field
        """
        self._save_window()
        self._take_blocks(count, keys, values)
        sinks_2BSC = self.sinks_2BSC.clone()
        size = count * self.window.block
        self._place(self._start + size, self._stop - self._start - size)
        self.sinks_2BSC.copy_(sinks_2BSC)

    @lasting
    def adopt(self, count: int, keys: Slab, values: Slab, sinks_2BSC: Tensor) -> None:
        """Begin with blocks that were encoded elsewhere, and the sinks among their tokens; nothing is held yet.

        keys, values   as their codecs encode them, [B, count, ...] a field
        """
        while self.blocks < count:
            stop = min(self.blocks + SLAB, count)
            of_keys, of_values = ({n: x[:, self.blocks : stop] for n, x in fields.items()} for fields in (keys, values))
            self._take_blocks(stop - self.blocks, of_keys, of_values)
        self.sinks_2BSC[:, :, : sinks_2BSC.shape[2]] = sinks_2BSC
        self._place(self._start, 0)

    def _take_blocks(self, count: int, keys: Slab, values: Slab) -> None:
        for role, fields in enumerate((keys, values)):
            order = self.orders[role]
            if fields:
                arranged = fields if order is None else order.arranged(fields)
                storage.put(self.slabs[role], self.blocks, arranged, self._by_group(role))
        self.blocks += count
        self._count_blocks()

    def _by_group(self, role: int) -> bool:
        reader = self.codecs[role].packed_reader
        return reader is not None and reader.by_group

    @lasting
    def drop(self, kept_BK: Tensor) -> None:
        """Keep these tokens of the window, in rising order; the others are gone when the pass has ended."""
        self._save_window()
        self.cut = {}  # their places are other tokens'
        kept_2BKC = kept_BK[None, ..., None].expand(2, -1, -1, self.buffer_2BTC.shape[3])
        self._hold(torch.cat([self.sinks_2BSC, self.window_2BTC.gather(2, kept_2BKC)], 2))
        self._place(self.window.sinks, kept_BK.shape[1])

    # ---- the past ----------------------------------------------------------------------------------------------

    def crop(self, length: int, survivors_2BTC: Tensor | None = None) -> None:
        """Keep `length` tokens; `survivors` are the decoded tokens of a block that is cut."""
        size = self.window.block
        self.cut = {n: x[:, :, : length - n * size] for n, x in self.cut.items() if n * size < length}
        if survivors_2BTC is not None and not all(codec.scheme.by_token for codec in self.codecs):
            if (decoded_2BTC := self.cut.pop(length // size, None)) is not None:
                survivors_2BTC[:, :, : decoded_2BTC.shape[2]] = decoded_2BTC
            self.cut = dict([*self.cut.items(), (length // size, survivors_2BTC)][-CUT:])
        if length >= self.encoded:
            self._truncate(length)
        else:
            self._restore(length // self.window.block, survivors_2BTC)

    @lasting
    def reorder(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        for slabs in self.slabs:
            slabs[:] = [{name: field.index_select(0, rows) for name, field in slab.items()} for slab in slabs]
        self.codecs = tuple(  # type: ignore[assignment]
            codec.select(rows) if isinstance(codec, RowCodec) else codec for codec in self.codecs
        )
        self.cut = {block: x_2BTC.index_select(1, rows) for block, x_2BTC in self.cut.items()}
        self._count_blocks()
        self._hold(self.buffer_2BTC.index_select(1, rows))
        if self.index is not None:
            self.index.forget_slabs()
            self.index.sinks_stale = True
            home = self.index.window_2BTC
            if home is not None and home.shape == self.buffer_2BTC.shape:
                self._hold(home.copy_(self.buffer_2BTC))

    # ---- sinks -------------------------------------------------------------------------------------------------

    def put_sinks(self, role: int, out_BTC: Tensor, start: int = 0) -> None:
        """Write the sinks over decoded keys (0) or values (1), the first of which is in slot `start`."""
        sinks, padded = self.window.sinks, self.positions.real_BT is not None
        if sinks == 0 or (not padded and start >= sinks):
            return
        if not padded:
            stop = min(sinks, start + out_BTC.shape[1])
            out_BTC[:, : stop - start] = self.sinks_2BSC[role, :, start:stop]
            return
        slots, arrived = self.positions.sink_slots(sinks, out_BTC.shape[0], out_BTC.device)
        rows, ranks = (arrived & (slots >= start) & (slots < start + out_BTC.shape[1])).nonzero(as_tuple=True)
        out_BTC[rows, slots[rows, ranks] - start] = self.sinks_2BSC[role, rows, ranks]

    def _keep_sinks(self, k_BTC: Tensor, v_BTC: Tensor) -> None:
        """Copy those of the newest tokens, which have just been appended, that are sinks."""
        sinks, first = self.window.sinks, self.length - k_BTC.shape[1]
        if sinks == 0 or first >= self.positions.complete(sinks, first):
            return
        slots, arrived = self.positions.sink_slots(sinks, k_BTC.shape[0], k_BTC.device)
        here = arrived & (slots >= first) & (slots < self.length)
        if bool(here.any()):
            rows, ranks = here.nonzero(as_tuple=True)
            for role, x_BTC in enumerate((k_BTC, v_BTC)):
                self.sinks_2BSC[role, rows, ranks] = x_BTC[rows, slots[rows, ranks] - first]
            if self.index is not None:
                self.index.stale = self.index.sinks_stale = True

    # ---- how -----------------------------------------------------------------------------------------------------

    def _hold(self, buffer_2BTC: Tensor) -> None:
        geometry = self.codecs[0].geometry
        shape = (*buffer_2BTC.shape[:3], geometry.kv_heads, geometry.head_size)
        x_2BHTD = buffer_2BTC.view(shape).transpose(2, 3)
        self.buffer_2BTC = buffer_2BTC
        self._keys, self._values = buffer_2BTC.unbind(0)
        self._by_head = [x[0] if len(x) == 1 else x for x in x_2BHTD]

    def _place(self, start: int, live: int) -> None:
        """Note where in the buffer the window begins, and how many tokens it holds; the device has to know."""
        self._start, self._stop, self.length = start, start + live, self.encoded + live
        if self.index is not None:
            self.index.stale = True

    def _count_blocks(self) -> None:
        self.encoded = self.blocks * self.window.block
        self.length = self.encoded + self._stop - self._start
        self.front = self.window.sinks if self.blocks else 0
        self.runs: list[Run] = [(n, min(n + SLAB, self.blocks)) for n in range(0, self.blocks, SLAB)]
        self.sizes = [(stop - start) * self.window.block for start, stop in self.runs]
        self._packed: list[list[Any]] = [[], []]

    @lasting
    def _rebuffer(self, needed: int) -> None:
        sinks, live, steady = self.window.sinks, self._stop - self._start, self.recent + self.window.block
        room = needed if needed > steady else min(steady, max(needed, 64, 2 * live))
        buffer = self.buffer_2BTC.new_empty(2, self.rows, sinks + room, self.buffer_2BTC.shape[3])
        buffer[:, :, : sinks + live] = self.buffer_2BTC[:, :, self._start - sinks : self._stop]
        self._hold(buffer)
        self._place(sinks, live)

    def _shift(self, start: int) -> None:
        """Move sinks and window to where the window starts at `start`."""
        sinks, live = self.window.sinks, self._stop - self._start
        held = self.buffer_2BTC[:, :, self._start - sinks : self._stop].clone()  # the two places may overlap
        self.buffer_2BTC[:, :, start - sinks : start + live] = held
        self._place(start, live)

    def _save_window(self) -> None:
        """Have the step of this forward pass restore the window that it found, before blocks are made of it."""
        if self._step is not None and not self._saved:
            window_2BTC = self.window_2BTC[:, :, : max(0, self._before - self.encoded)].clone()
            self._step.on_undo(self._restore, self.blocks, window_2BTC)
            self._saved = True

    def _truncate(self, length: int) -> None:
        self._place(self._start, length - self.encoded)

    def _restore(self, blocks: int, window_2BTC: Tensor | None) -> None:
        """Keep `blocks` blocks, and this window after them."""
        self.blocks = blocks
        for slabs in self.slabs:
            del slabs[-(-blocks // SLAB) :]
        self._stop = self._start
        self._count_blocks()
        self._shift(self.window.sinks)
        if self.index is not None:
            self.index.forget_slabs()
        if window_2BTC is not None:
            count = window_2BTC.shape[2]
            if self._stop + count > self.buffer_2BTC.shape[2]:
                self._rebuffer(count)
            self.buffer_2BTC[:, :, self._stop : self._stop + count] = window_2BTC
            self.arrived(count)
