"""Fit a cache's stages to the first tokens of its rows, layer by layer, before anything of a layer is encoded.

Until then a layer's tokens lie in its window, all of them, so that keys and values are at hand; queries, which nobody
else keeps, are kept here. A fit stays until the cache is empty. A forward pass that is undone takes the fit that it
made with it.
"""

import torch
from torch import Tensor

from kvq_runtime import rope
from kvq_runtime.fit import row
from kvq_runtime.flush import refuse_nan
from kvq_runtime.history import History
from kvq_runtime.row_codec import RowCodec
from kvq_runtime.stages.online import FirstTokens
from kvq_runtime.stream import Stream


class Online:
    """What one cache fits, and has fitted."""

    def __init__(self, setting: FirstTokens, history: History):
        self.setting, self.history = setting, history
        self._fitted: set[int] = set()  # layers
        self._queries: dict[int, Tensor] = {}  # [B, T, query heads · D], of layers that are not fitted
        self._undo: dict[int, Tensor | None] = {}  # by layer fitted in this forward pass, the queries before it

    def hear(self, layer: int, q_BHTD: Tensor) -> None:
        """Take the queries of a layer's newest tokens."""
        if layer in self._fitted or "queries" not in self.history.recipe.needs:
            return
        q_BTC = q_BHTD.transpose(1, 2).flatten(2).detach()
        before = self.history.layers[layer][0].length - q_BTC.shape[1]
        held = self._queries.get(layer)
        if (0 if held is None else held.shape[1]) == before:
            self._queries[layer] = q_BTC.clone() if held is None else torch.cat([held, q_BTC], 1)

    def ready(self, layer: int, before: int) -> bool:
        """Whether the layer may encode: it is fitted, here where a block is due; False while tokens are too few."""
        streams, recipe = self.history.layers[layer], self.history.recipe
        if layer in self._fitted or not any(stream.due for stream in streams):
            return True
        rank_BT = self._rank(streams[0])
        sinks, block = (max(getattr(stream.side, name) for stream in streams) for name in ("sinks", "block"))
        if not len(rank_BT) or int(rank_BT.amax(1).min()) < self.setting.enough(sinks, block):
            return False
        q_BTC = self._queries.get(layer)
        if "queries" in recipe.needs and (q_BTC is None or q_BTC.shape[1] != streams[0].length):
            raise RuntimeError(f"{recipe.name} is fitted to queries: hear() those of every token of layer {layer}")
        made = [self._fit(layer, stream, rank_BT, q_BTC) if recipe.fits(stream.side) else None for stream in streams]
        for stream, codec in zip(streams, made, strict=True):
            stream.codec = codec or stream.codec
        self._fitted.add(layer)
        self._queries.pop(layer, None)
        self._undo[layer] = None if q_BTC is None else q_BTC[:, :before].clone()
        return True

    def _rank(self, stream: Stream) -> Tensor:
        """Which of its row's real tokens each slot holds, from 1 on; 0 where none does: [B, T]."""
        real_BT, shape = self.history.timeline.real_BT, (len(stream.sinks_BSC), stream.length)
        if real_BT is None:
            return torch.arange(1, shape[1] + 1, device=stream.sinks_BSC.device).expand(shape)
        return real_BT.cumsum(1) * real_BT

    def _fit(self, layer: int, stream: Stream, rank_BT: Tensor, q_BTC: Tensor | None) -> RowCodec:
        recipe, geometry, timeline = self.history.recipe, self.history.geometry, self.history.timeline
        if stream.sinks_BSC.is_cuda:
            refuse_nan(layer, stream, timeline, stream.window_BTC, 0)
        last = rank_BT.shape[1] if self.setting.fit_tokens == "prompt" else self.setting.fit_tokens
        half, codecs = stream.codec.half, []
        for index, rank_T in enumerate(rank_BT):
            seen = (rank_T > 0) & (rank_T <= last)
            own, positions_T = seen & (rank_T > stream.side.sinks), timeline.positions(index, rank_T.device)
            x_TC, q_TC = stream.window_BTC[index][own].float(), None
            if half == "key" and recipe.position == "pre":
                x_TC = self._turned_back(x_TC, positions_T[own])
            if stream.side.feedback is not None and q_BTC is not None:
                q_TC = q_BTC[index][seen].float()
                q_TC = q_TC if stream.side.feedback.queries == "after" else self._turned_back(q_TC, positions_T[seen])
            codecs.append(row.fit(recipe, layer, half, geometry, x_TC, q_TC))
        return RowCodec(codecs)

    def _turned_back(self, x_TC: Tensor, positions_T: Tensor) -> Tensor:
        """Keys or queries of one row, before RoPE."""
        tables = self.history.timeline.require().tables(positions_T[None])
        return rope.unrotate(x_TC[None].unflatten(-1, (-1, self.history.geometry.head_size)), *tables)[0].flatten(-2)

    def release(self) -> None:
        """Forget how to undo this forward pass."""
        self._undo.clear()

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens, after the streams have: a fit of this pass goes, if nothing encoded stays."""
        if length == 0:
            self._fitted.clear()
            self._queries.clear()
            self._undo.clear()
        for layer, q_BTC in list(self._undo.items()):
            streams = self.history.layers[layer]
            if not any(stream.blocks for stream in streams):
                del self._undo[layer]
                self._fitted.discard(layer)
                for stream, codec in zip(streams, self.history.codecs[layer], strict=True):
                    stream.codec = codec
                if q_BTC is not None:
                    self._queries[layer] = q_BTC
        self._queries = {layer: q_BTC[:, :length].clone() for layer, q_BTC in self._queries.items()}

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        self._undo.clear()
        self._queries = {layer: q.index_select(0, rows.to(q.device)) for layer, q in self._queries.items()}
        for stream in self._streams():
            if isinstance(stream.codec, RowCodec):
                stream.codec = stream.codec.select(rows)

    def _streams(self) -> list[Stream]:
        return [stream for pair in self.history.layers.values() for stream in pair]

    def bytes(self) -> dict[str, int]:
        """Allocated bytes by kind."""
        own = [s.codec.tensors for s in self._streams() if isinstance(s.codec, RowCodec)]
        queries = [*self._queries.values(), *(q for q in self._undo.values() if q is not None)]
        return {"fitted": _bytes([tensor for row in own for tensor in row]), "queries": _bytes(queries)}


def _bytes(tensors: list[Tensor]) -> int:
    """Of the storages behind the tensors, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
