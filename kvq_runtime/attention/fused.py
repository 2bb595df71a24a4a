"""Attend to the layers of a cache with the decode kernel, which reads their blocks packed: one launch and a merge.

A step asks the device nothing: blocks are in the slabs of `store/layer.py`, which a table on the device finds; blocks
and tokens are counted on the device too (`store/storage.py`). So it can be recorded as one graph (`hf/cuda_graphs.py`).
A block is encoded eagerly, at a step that the host knows; the device learns of it at the next.

Imports the kernels, and with them triton, when the first layer is kept so: see ops/dispatch.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.attention.path import Attended, Path, Query
from kvq_runtime.codec.codec import Codec
from kvq_runtime.errors import extra
from kvq_runtime.geometry import ROLES, SLAB, Geometry
from kvq_runtime.ops import dispatch
from kvq_runtime.ops.constant import constant, lasting
from kvq_runtime.recipe import Recipe
from kvq_runtime.store.layer import LayerStore
from kvq_runtime.store.positions import Positions
from kvq_runtime.store.storage import DeviceIndex, send, storage_bytes

COST = "at every step its history is decoded, a slab at a time: 4 · tokens · width bytes written and read in a layer"

MAX_HEAD = 128  # channels of a head whose mean turns in the tile: more spill on sm_80


def refusal(recipe: Recipe, geometry: Geometry, layer: int = 0) -> str | None:
    """Return the reason why no kernel attends to this layer's packed blocks, with its cost; None: one does."""
    reason = _reason(recipe, geometry, layer)
    return reason and f"{recipe.name}, layer {layer}: {reason}; {COST}"


def _reason(recipe: Recipe, geometry: Geometry, layer: int) -> str | None:
    key, value = recipe.at(layer)
    if not dispatch.available():
        return f"triton is not installed: {extra('triton')}"
    for policy in recipe.policies:
        if policy.unpacked is not None:
            return policy.unpacked
    pair = layouts(recipe, geometry, layer)
    for role, scheme, layout in zip(ROLES, (key, value), pair, strict=True):
        if layout is None:
            why = ""
            if scheme.quantize.takes_latents:
                why = "; kernels read latents of a basis a head, in slabs of 16 for blocks of 128, of keys by segment"
            elif scheme.rotate is not None and scheme.rotate.fitted:
                why = "; kernels take one rotation for all heads, known without a fit"
            elif role == "key" and recipe.position != "post":
                why = "; kernels read keys after RoPE"
            return f"there is no kernel for its {role}s{why}"
    if pair[0].scan is not pair[1].scan:
        return "kernels read keys and values of one kind: both in operand order, both angles, or both latents"
    if key.predict is not None and not key.quantize.takes_latents and geometry.head_size > MAX_HEAD:
        return f"heads of more than {MAX_HEAD} channels leave no registers for the mean of keys after RoPE"
    return None


def layouts(recipe: Recipe, geometry: Geometry, layer: int) -> list[Any]:
    """Return the kernel's layouts of a layer's keys and values; None for one that it cannot read."""
    block, (key, value) = recipe.window.block, recipe.at(layer)
    keys = None
    if recipe.position != "pre":
        keys = kernels().layout(key, block, geometry, "key", segment=segment_of(recipe))
    return [keys, kernels().layout(value, block, geometry, "value")]


def segment_of(recipe: Recipe) -> int:
    """Return the tokens of a segment of keys; 0: they are not encoded by segment."""
    return recipe.segment if recipe.position == "segment" else 0


def kernels() -> ModuleType:
    """Import the kernels: `__all__` of kernels/attend/launch.py."""
    return dispatch.kernels("attend.launch")


def make_reader(codec: Codec, device: torch.device) -> Any:
    """Return the layout of a codec's blocks on a device, without their addresses; None: it was not fitted by slabs.

    Codecs without fitted tensors share one set of tables.
    """
    settings = codec.scheme, codec.block, codec.geometry, codec.role
    fitted = {name.split(".")[1]: x for name, x in codec.tensors.items() if name.startswith(("quantize.", "rotate."))}
    made = _layout_on(device, *settings, fitted, codec.segment) if fitted else _shared_layout_on(device, *settings)
    return made and replace(made, mean=codec.tensors.get("predict.mean"))


def _layout_on(device: torch.device, *settings: Any) -> Any:
    """Return `kernels().layout` of these settings on a device."""
    made = kernels().layout(*settings)
    return made and made.on(device)


_shared_layout_on = constant(64)(_layout_on)


class LeftPadding:
    """Padding on the left, as kernels take it: each row's first real slot, int32 [B], in memory that stays where it is.

    real      whether all slots after it are real
    counted   whether positions count from it
    """

    def __init__(self, positions: Positions):
        self.positions = positions
        self.starts_B = torch.empty(0)
        self.forget()

    def forget(self) -> None:
        """Look again before the next attention: rows or tokens have changed."""
        self._length, self.real, self.counted = -1, False, False

    def look(self, batch: int, count: int, device: torch.device) -> bool:
        """Find the starts, once in a pass, unless a step announces no padding; True if they may have changed."""
        positions, last = self.positions, self._length
        self._length = positions.length
        if self._length == last or (self._length == last + 1 and count == 1 and not positions.told):
            return False
        with torch.inference_mode(False):
            starts_B, self.real, self.counted = positions.starts(batch, device)
        if len(self.starts_B) != batch:
            self.starts_B = starts_B
        else:
            self.starts_B.copy_(starts_B)
        return True


class Fused(Path):
    """The kernel's path, and what its layers in a cache share.

    max_tokens   what tables have room for, and the number of splits is chosen for
    shared       codebooks and rotations, as the kernel wants them
    """

    def __init__(self, recipe: Recipe, geometry: Geometry, positions: Positions, max_tokens: int):
        self.recipe, self.geometry, self.positions, self.max_tokens = recipe, geometry, positions, max_tokens
        self.padding = LeftPadding(positions)
        self.shared: list[Tensor] = []
        self._readers: dict[int, list[Any]] = {}  # by layer, of keys and of values
        self._rope: Any = None
        self._counts_L4: Tensor | None = None
        self._splits: dict[tuple[int, int, int], int] = {}  # by layer, rows of the batch and query tokens

    def __reduce__(self):
        """Copied and pickled without what is on the device: a cache has each layer's index made again."""
        return Fused, (self.recipe, self.geometry, self.positions, self.max_tokens)

    def index(self, layer: int, codecs: tuple[Codec, Codec], k_BTC: Tensor) -> DeviceIndex | None:
        """Make the index by which the kernel finds a new layer, for keys like these; None if it reads none."""
        if not dispatch.runs_kernel(k_BTC) or _reason(self.recipe, self.geometry, layer):
            return None
        window = self.recipe.window
        readers = [make_reader(codec, k_BTC.device) for codec in codecs]
        if None in readers:
            return None
        self.shared += [x for reader in readers for x in reader.tables]
        self._readers[layer] = readers
        columns = [1 + len(reader.names) for reader in readers]
        sinks_2BSC = k_BTC.new_zeros(2, len(k_BTC), window.sinks, k_BTC.shape[2])
        orders = readers[0].order, readers[1].order
        slabs = -(-self.max_tokens // (SLAB * window.block))
        return DeviceIndex(self._counts(k_BTC.device)[layer], (columns[0], columns[1]), slabs, sinks_2BSC, orders)

    @lasting
    def _counts(self, device: torch.device) -> Tensor:
        """Return the counts of blocks and tokens of all layers on the device, int32 [L, 4]."""
        if self._counts_L4 is None or self._counts_L4.device != device:
            self._counts_L4 = torch.zeros(self.geometry.layers, 4, dtype=torch.int32, device=device)
        return self._counts_L4

    def attend(self, query: Query) -> Attended | None:
        """As `Path.attend`.

        A mask is taken to be that of the padding announced with this pass; one that was not announced is not for the
        kernel, except in a step that is recorded: its token sees all that is real. Nor are padded slots after a row's
        first real one, or, with a mean, keys that RoPE rotates in part, or not by their place after the padding; nor
        more query tokens than are worth it.
        """
        (store, q_BHTD, _, scale, cap), layer, index = query, query.store.layer, query.store.index
        if index is None or not self.takes(query) or not self.fits(q_BHTD) or not self.regular:
            return None
        host = kernels()
        self.publish({layer: store})
        keys, values = self._read(layer, index)
        exact = host.Exact(*store.buffer_2BTC, *index.sinks_2BSC)
        rope = self._tables(store, index) if "positions" in self.recipe.needs else None
        shape = layer, len(q_BHTD), q_BHTD.shape[2]
        if shape not in self._splits:
            self._splits[shape] = host.choose_splits(q_BHTD, keys, values, self.max_tokens // store.window.block)
        starts_B, splits = self.padding.starts_B, self._splits[shape]
        blocks = None if self.positions.recorded else store.blocks
        return Attended(
            *host.attend(q_BHTD, keys, values, exact, index.counts, starts_B, scale, splits, rope, cap, blocks)
        )

    def takes(self, query: Query) -> bool:
        """Return True if the kernel reads the layer and can read its padding, whatever the number of queries."""
        if query.store.index is None or not query.q_BHTD.numel():
            return False
        masked = query.mask is not None and not self.positions.recorded
        if masked and not self.positions.told:
            return False
        batch, _, count, _ = query.q_BHTD.shape
        self.look(batch, count, query.q_BHTD.device)
        return self.padding.real

    def fits(self, q_BHTD: Tensor) -> bool:
        """Return True if the kernel takes this number of query rows."""
        (batch, q_heads, tokens, _), heads = q_BHTD.shape, self.geometry.kv_heads
        return kernels().takes(batch * heads, q_heads // heads, tokens)

    @property
    def regular(self) -> bool:
        """True if padding is on the left, and RoPE, where a mean needs it, rotates whole heads by position."""
        if "positions" not in self.recipe.needs:
            return self.padding.real
        whole = 2 * self.positions.rotary_pairs == self.geometry.head_size
        return self.padding.real and self.padding.counted and whole

    def look(self, batch: int, count: int, device: torch.device) -> None:
        """Find each row's first real slot, and what rotates a row by it."""
        padding, rope = self.padding, self._rope
        if not padding.look(batch, count, device) or rope is None:
            return
        if len(rope.leads_B2K) != batch:
            self._rope = None
        else:
            rope.start_at(padding.starts_B)

    def publish(self, stores: Mapping[int, LayerStore]) -> None:
        """Send the device new counts of all layers in one copy; waits for nothing."""
        if self._counts_L4 is None:
            return
        stale = [layer for layer, store in stores.items() if store.index is not None and store.index.stale]
        if not stale:
            return
        for layer in stale:
            self._publish_places(stores[layer], layer)
        first, last = min(stores), max(stores) + 1
        counts = [_counted(stores.get(layer)) for layer in range(first, last)]
        send(torch.tensor(counts, dtype=torch.int32), self._counts_L4[first:last])

    def _publish_places(self, store: LayerStore, layer: int) -> None:
        """Send the device the addresses of new slabs, and the tokens that are sinks."""
        index = store.index
        assert index is not None
        if len(store.slabs[0]) > len(index.tables[0]):
            index.make_tables(2 * len(store.slabs[0]))
        for role, reader in enumerate(self._readers[layer]):
            names, listed = reader.names, index.listed[role]
            held = [(slab[names[0]].data_ptr(), slab[names[0]].shape[1]) for slab in store.slabs[role]]
            pairs = enumerate(zip(listed, held, strict=False))
            same = next((row for row, (before, now) in pairs if before != now), len(listed))
            if same < len(held):
                new = store.slabs[role][same:]
                rows = kernels().block_table(new, names, len(new), torch.device("cpu"))
                send(rows, index.tables[role][same : len(held)])
            index.listed[role] = held
        if index.sinks_stale:
            if index.sinks_2BSC.shape == store.sinks_2BSC.shape:
                index.sinks_2BSC.copy_(store.sinks_2BSC)
            else:
                with torch.inference_mode(False):
                    index.sinks_2BSC = store.sinks_2BSC.clone(memory_format=torch.contiguous_format)
        index.stale = index.sinks_stale = False

    def bytes(self) -> dict[str, int]:
        """Allocated bytes, by kind, of what is held beside the layers."""
        rope, counts = self._rope or (), () if self._counts_L4 is None else (self._counts_L4,)
        tables = storage_bytes([self.padding.starts_B, *counts, *rope[:6]])
        return {"tables": tables} if tables else {}

    def _read(self, layer: int, index: DeviceIndex) -> list[Any]:
        """Return the readers of a layer's keys and values, with the present addresses of its tables."""
        readers = self._readers[layer]
        if readers[0].addresses is not index.tables[0]:
            readers = self._readers[layer] = [
                replace(reader, addresses=table) for reader, table in zip(readers, index.tables, strict=True)
            ]
        return readers

    def _tables(self, store: LayerStore, index: DeviceIndex) -> Any:
        """Return RoPE's tables, for as many blocks as the block table has room for."""
        blocks, rotary = len(index.tables[0]) * SLAB + 1, self.positions.require()
        if self._rope is None or len(self._rope.bases_N2K) < blocks:
            frequencies_K = rotary.frequencies_K.to(index.counts.device)
            with torch.inference_mode(False):
                self._rope = kernels().RopeTables.of(
                    frequencies_K, rotary.scaling, store.window.block, blocks, self.padding.starts_B,
                    segment_of(self.recipe),
                )  # fmt: skip
        return self._rope


def _counted(store: LayerStore | None) -> list[int]:
    """Return the counts of a layer for the device; zeros for one that no kernel reads."""
    if store is None or store.index is None:
        return [0, 0, 0, 0]
    return [store.blocks, store.window_start, store.window_2BTC.shape[2], 0]
