"""Hold a model's compressed cache: exact sinks, encoded blocks, an exact window, in every layer.

Layers are updated in order, once per forward pass: `update` hands out all keys and values, history decoded (see
`history.py`); or `take` only takes the new ones in, `attend` answers queries from what is held, and `finish` encodes
what is due (see `flush.py`). A recipe that selects tokens by their attention is served by the second road alone, and
encodes at the end of a forward pass (see `hitters.py`); one that is fitted online waits for its tokens first (see
`online.py`).

Knows nothing of transformers: see `hf/`. Tensors are [B, T, C], all heads side by side.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from kvq_runtime import codec as codecs
from kvq_runtime import sinks
from kvq_runtime.attention import shadow
from kvq_runtime.attention.attend import Observer, attend
from kvq_runtime.attention.fused import Fused, refusal
from kvq_runtime.attention.votes import Votes
from kvq_runtime.flush import flush, refuse_nan
from kvq_runtime.geometry import Geometry
from kvq_runtime.history import History, Pair
from kvq_runtime.hitters import Hitters, decide
from kvq_runtime.memory import MemoryReport
from kvq_runtime.online import Online
from kvq_runtime.outliers import Outliers
from kvq_runtime.recipe import OURS, Recipe
from kvq_runtime.stages.select import Chunks, Heavy
from kvq_runtime.stream import Stream
from kvq_runtime.timeline import Timeline


class BlockCache:
    """The compressed cache of `geometry` under `recipe`, with an artifact's tensors where the recipe is fitted.

    held         the layers it holds, if not all
    max_tokens   what the tables of a GPU are made for, see fused.py
    reencoded    counts tokens that were decoded and will be encoded again: only a crop below the window does that

    An error undoes the forward pass it comes from; nothing else changes.
    """

    def __init__(
        self,
        recipe: Recipe,
        geometry: Geometry,
        tensors: Mapping[str, Tensor] | None = None,
        held: Iterable[int] | None = None,
        max_tokens: int = 1 << 17,
    ):
        self.recipe = recipe.check(geometry)
        if recipe.fitted and not tensors:
            raise ValueError(
                f"recipe {recipe.name} has fitted stages: load an artifact with from_pretrained, "
                f"or make one with kvq-calibrate --recipe {recipe.name}"
            )
        self.geometry = geometry
        self.held = frozenset(range(geometry.layers) if held is None else held)
        self._last = max(self.held)
        self.codecs = codecs.build(recipe, geometry, tensors or {})
        self._needs, self._max_tokens = recipe.needs, max_tokens
        self.reset()

    def reset(self) -> None:
        """Forget every token."""
        self.timeline = Timeline()
        self.history = History(self.recipe, self.geometry, self.codecs, self.timeline)
        self.layers = self.history.layers
        self.fused = Fused(self.recipe, self.geometry, self.timeline, self._max_tokens)
        window = self.recipe.window
        self.votes = None if window is None else Votes(window, self.history, len(self.held))
        self.hitters = self._hitters()
        self.online = None if self.recipe.online is None else Online(self.recipe.online, self.history)
        self.reencoded = 0
        self._before = 0  # tokens before this forward pass
        self._taken = 0  # layers that have taken in this pass's tokens
        self._whole = True  # whether every layer is known to hold all tokens of the timeline

    def _hitters(self) -> Hitters | None:
        select = self.recipe.select
        return Hitters(select, self.timeline, *self.recipe.key.window) if isinstance(select, Heavy) else None

    @property
    def _observer(self) -> Observer | None:
        listener = self.votes or self.hitters
        return None if listener is None else listener.hear

    # ---- one layer of one forward pass -------------------------------------------------------------------------

    def update(self, layer: int, k_BTC: Tensor, v_BTC: Tensor) -> Pair:
        """Take in a layer's new keys (after RoPE) and values; return all of them, history decoded, as 16-bit would.

        What is returned is valid until the next layer's update, which decodes into the same memory.
        The first call returns its arguments: a prompt attends to exact keys and values. A flush follows the reading,
        so a step attends to the state before its own flush.
        """
        unseen = self.recipe.needs & OURS
        if unseen:
            raise RuntimeError(
                f"{self.recipe.name} needs {' and '.join(sorted(unseen))}, which update() does not see; "
                "use take(), attend() and finish(), with hear() for queries"
            )
        try:
            first = self._arrive(layer, k_BTC)[0].length == 0
            self._append(layer, (k_BTC, v_BTC))
            out = (k_BTC, v_BTC) if first else self.history.whole(layer)
            self._finish(layer)
        except Exception:
            self.crop(self._before)
            raise
        return out

    def take(self, layer: int, k_BTC: Tensor, v_BTC: Tensor) -> None:
        """Take in a layer's new keys (after RoPE) and values, to be attended to and then encoded by `finish`."""
        try:
            self._arrive(layer, k_BTC)
            self._append(layer, (k_BTC, v_BTC))
        except Exception:
            self.crop(self._before)
            raise

    def hear(self, layer: int, q_BHTD: Tensor) -> None:
        """Take the queries [B, query heads, T, D] of what `take` took in, for a recipe that is fitted to them."""
        if self.online is not None:
            self.online.hear(layer, q_BHTD)

    def attend(self, layer: int, q_BHTD: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """What queries [B, query heads, T, D] of the newest tokens get from everything the layer holds: the same shape.

        mask    bool [B or 1, 1, T, all tokens], True where a query sees a token; None: causal, nothing padded
        scale   what scores are multiplied with
        """
        keys = self.layers[layer][0]
        if keys.outliers is not None and keys.encoded:
            return shadow.attend(self.history, layer, q_BHTD, mask, scale)
        found = self.fused.attend(self.history, layer, q_BHTD, mask, scale)
        if found is None:
            return attend(self.history, layer, q_BHTD, mask, scale, self._observer)
        out_BHTD, level_BHT = found
        if self.votes is not None:
            self.votes.infer(layer, q_BHTD[:, :, -1], level_BHT[..., -1], scale)
        return out_BHTD

    def finish(self, layer: int) -> None:
        """Encode what is due in a layer that `take` extended, and drop what no layer above will read."""
        try:
            self._finish(layer)
        except Exception:
            self.crop(self._before)
            raise

    def advance(self) -> None:
        """Count the token that a replayed step has taken in, in every layer, and encode what is due (see fused.py)."""
        self._before = self.timeline.seen
        pairs = [self.layers[layer] for layer in sorted(self.layers)]
        self.timeline.extend(pairs[0][0].rows, 1, pairs[0][0].sinks_BSC.device)
        for stream in (stream for pair in pairs for stream in pair):
            stream.arrived(1)
        for layer in sorted(self.layers):
            self.finish(layer)

    def _append(self, layer: int, new: Pair) -> None:
        streams = self.layers[layer]
        if not new[0].is_cuda and not _finite(*new):
            for stream, x_BTC in zip(streams, new, strict=True):
                refuse_nan(layer, stream, self.timeline, x_BTC, stream.length)
        for stream, x_BTC in zip(streams, new, strict=True):
            stream.append(x_BTC)
            sinks.keep(stream, self.timeline, x_BTC)
        self._taken += 1

    def _finish(self, layer: int) -> None:
        last = layer == self._last
        if self.hitters is not None:
            if last:
                decide(self.hitters, self.history, layer)
        elif self.online is None or self.online.ready(layer, self._before):
            flush(self.history, layer, self._before)
        for stream in self.layers[layer]:
            stream.trim()
        if last:
            for stream in (stream for pair in self.layers.values() for stream in pair):
                stream.release()
            self.timeline.release()
            if self.votes is not None:
                self.votes.release()
            if self.online is not None:
                self.online.release()
            self._whole = self._taken == len(self.held)
        self.history.forget(layer, last)

    def _arrive(self, layer: int, k_BTC: Tensor) -> tuple[Stream, Stream]:
        """Extend the timeline with the first layer of a forward pass; a pass that stopped midway is undone first."""
        batch, count, _ = k_BTC.shape
        pair = self.layers.get(layer)
        first = (0 if pair is None else pair[0].length) + count != self.timeline.length
        if first:
            self.settle()
            self.history.clear()
            self._before, self._taken, self._whole = self.timeline.seen, 0, False
            if self.votes is not None:
                self.votes.decide(self._before, count)
            pair = self.layers.get(layer)
        pair = self._streams(layer, k_BTC) if pair is None else pair
        if batch != pair[0].rows:
            raise ValueError(f"{batch} rows; the cache holds {pair[0].rows}: reset() it, or make one for each batch")
        if first:
            self.timeline.extend(batch, count, k_BTC.device)
            if "positions" in self._needs:
                self.timeline.require()
        if self.hitters is not None and (first or count == 0):
            self.hitters.begin(batch, count, k_BTC.device)
        below = self.layers.get(layer - 1)
        if self.recipe.chained and layer > 0 and (below is None or below[0].length != self.timeline.length):
            raise RuntimeError(f"layer {layer} is predicted from layer {layer - 1}, which must be updated before it")
        return pair

    def _streams(self, layer: int, k_BTC: Tensor) -> tuple[Stream, Stream]:
        if layer not in self.held:
            raise ValueError(f"layer {layer}; the cache was made for {sorted(self.held)}")
        if k_BTC.shape[-1] != self.geometry.width:
            raise ValueError(f"keys of width {k_BTC.shape[-1]}; the cache was made for {self.geometry}")
        for codec in self.codecs[layer]:
            codec.to(k_BTC.device)
        select, where = self.recipe.select, (len(k_BTC), k_BTC.dtype, k_BTC.device)
        outliers = Outliers(select, self.geometry, *where) if isinstance(select, Chunks) else None
        keys, values = self.codecs[layer]
        fixed = self.fused.pair(layer, (keys, values), k_BTC)
        self.layers[layer] = fixed or (Stream(keys, *where, outliers), Stream(values, *where))
        return self.layers[layer]

    def settle(self) -> None:
        """Undo a forward pass that stopped midway: truncate every layer to the shortest."""
        if self._whole:
            return
        lengths = {stream.length for pair in self.layers.values() for stream in pair}
        shortest = min(lengths, default=0) if len(self.layers) == len(self.held) else 0
        if lengths - {shortest} or self.timeline.length != shortest:
            self.crop(shortest + self.timeline.dropped)
        self._whole = True

    # ---- the whole cache ---------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens that every layer has taken in, those that were dropped since among them."""
        if self._whole:
            return self.timeline.seen
        if len(self.layers) < len(self.held):
            return 0
        shortest = min((stream.length for pair in self.layers.values() for stream in pair), default=0)
        return shortest + self.timeline.dropped

    @property
    def scratch_peak(self) -> int:
        """Most bytes of decoded tensors alive at once so far."""
        return self.history.scratch_peak

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens. The survivors of a block that is cut return to the window, decoded.

        Raises RuntimeError where some of them have been dropped since: they cannot be had back.
        """
        seen = max(0, min(length, self.length))
        if self.hitters is not None and self.timeline.dropped and 0 < seen < self.hitters.decided:
            raise RuntimeError(
                f"crop to {seen} tokens; {self.recipe.name} has dropped {self.timeline.dropped} of the first "
                f"{self.hitters.decided}: crop to that many or more, or to 0"
            )
        self.fused.forget()
        length = max(0, seen - self.timeline.dropped)
        self.reencoded += self.history.crop(length)
        self.timeline.crop(length)
        if self.votes is not None:
            self.votes.crop(length)
        if self.hitters is not None and length:
            self.hitters.crop(seen, next(iter(self.layers.values()))[0].window_BTC.shape[1])
        if self.online is not None:
            self.online.crop(length)
        if length == 0:
            self.layers.clear()
            self.hitters = self._hitters()

    def select(self, rows: Tensor) -> None:
        """Keep these rows of every tensor that has rows, in this order: beam search, batch changes."""
        self.history.clear()
        self.fused.forget()
        self.timeline.select(rows)
        if self.votes is not None:
            self.votes.select(rows)
        if self.hitters is not None and self.layers:
            self.hitters.take_rows(rows)
        if self.online is not None:
            self.online.select(rows)
        for pair in self.layers.values():
            for stream in pair:
                stream.select(rows.to(stream.sinks_BSC.device))

    @property
    def refusal(self) -> str | None:
        """Why, on a GPU, some layer is decoded before it is attended to; None: all are read packed (see fused.py)."""
        return next(filter(None, (refusal(self.recipe, self.geometry, layer) for layer in sorted(self.held))), None)

    def memory_report(self) -> MemoryReport:
        """Bytes held, by kind, and what 16 bits would hold."""
        return MemoryReport.of(self)


def _finite(k_BTC: Tensor, v_BTC: Tensor) -> bool:
    """Whether both are surely free of NaN and infinity: a sum of their products, which either would spoil, is."""
    return math.isfinite(torch.dot(k_BTC.reshape(-1), v_BTC.reshape(-1)).item())
