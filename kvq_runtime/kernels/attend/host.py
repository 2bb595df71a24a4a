"""Launch decode attention over a layer's packed blocks, sinks and window: the kernel, its merge, and one to rotate.

`__all__` is what attention/fused.py and the store call; all of it is imported late, for it imports triton.

Nothing here asks the device anything: lengths and starts are tensors on it, slabs are reached through a block table,
the number of splits is fixed; so that a decode step can be captured as one graph.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kvq_runtime.kernels.attend.block_table import block_table
from kvq_runtime.kernels.attend.kernel import EXACT
from kvq_runtime.kernels.attend.kernel import attend as attend_kernel
from kvq_runtime.kernels.attend.launch import Launch, choose, heads_per_launch, padded_rows, splits
from kvq_runtime.kernels.attend.layout import Layout, layout, padded, tile
from kvq_runtime.kernels.attend.merge import merge
from kvq_runtime.kernels.attend.rope import RopeTables
from kvq_runtime.kernels.attend.settings import LayerSettings
from kvq_runtime.kernels.encode.tile import FUSED, on

__all__ = ["Encoded", "Exact", "Layout", "RopeTables", "attend", "block_table", "heads_per_launch", "layout", "splits"]

COLUMNS = 32  # channels that one program merges
MERGED = 4096  # elements of partial results that it has in registers
REGISTERS = 65536  # of a multiprocessor; ptxas would rather spill than take more than its own guess
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Encoded:
    """One scheme's blocks.

    layout      how they are read
    addresses   their block table, int64 [slabs, 1 + fields]
    lookup      the layout's lookup on the device, or None
    rotation    the layout's rotation on the device, float32 [D, D], or None
    mean        what was removed from each channel, of keys before RoPE, float32 [C], or None
    """

    layout: Layout
    addresses: Tensor
    lookup: Tensor | None = None
    rotation: Tensor | None = None
    mean: Tensor | None = None

    @staticmethod
    def of(layout: Layout, addresses: Tensor) -> "Encoded":
        """With the layout's tensors on the device of the addresses."""
        lookup, rotation = (None if x is None else x.to(addresses.device) for x in (layout.lookup, layout.rotation))
        return Encoded(layout, addresses, lookup, rotation)


class Exact(NamedTuple):
    """What is held exactly, keys and values alike: windows [B, W, C], a buffer; the sinks of each row [B, S, C]."""

    k_window: Tensor
    v_window: Tensor
    k_sinks: Tensor
    v_sinks: Tensor


def attend(
    q_BHTD: Tensor,
    keys: Encoded,
    values: Encoded,
    exact: Exact,
    lengths: Tensor,
    starts_B: Tensor,
    scale: float,
    splits: int,
    rope: RopeTables | None = None,
    launch: Launch | None = None,
) -> tuple[Tensor, Tensor]:
    """The attention of query tokens that are the last of the window: out [B, Hq, Tq, D] and log2 Σ 2^s [B, Hq, Tq].

    Query heads that one launch has no room for are launched in turn, and read the blocks again: `heads_per_launch`.

    lengths    int32 [3]: encoded blocks, the window's first place in its buffer, its tokens
    starts_B   int32: the first real slot of each row
    scale      of the scores
    splits     parts that the blocks are cut into, see `splits`
    rope       for keys before RoPE, and for keys after it whose mean was removed

    ValueError: the query tokens of one head are more rows than a tile has.
    """
    q_BHTD = q_BHTD.contiguous()
    batch, q_heads, tokens, size = q_BHTD.shape
    heads = keys.layout.geometry.kv_heads
    ratio, rows = q_heads // heads, q_heads // heads * tokens
    few = heads_per_launch(keys.layout, values.layout, ratio, tokens)
    if not few:
        raise ValueError(f"{q_heads} query heads and {tokens} tokens are {rows} rows per KV head: too many for a tile")
    if few < ratio:
        rest = (keys, values, exact, lengths, starts_B, scale, splits, rope, launch)
        done = [attend(part.flatten(1, 2), *rest) for part in q_BHTD.unflatten(1, (heads, ratio)).split(few, 2)]
        out, lse = (torch.cat([x.unflatten(1, (heads, -1)) for x in parts], 2) for parts in zip(*done, strict=True))
        return out.flatten(1, 2), lse.flatten(1, 2)
    launch = launch or choose(q_BHTD.device, keys.layout, values.layout, rows)
    parts = splits + EXACT.value
    part = torch.empty(batch, heads, parts, rows, size, dtype=torch.float32, device=q_BHTD.device)
    part_lse = torch.empty(batch, heads, parts, rows, dtype=torch.float32, device=q_BHTD.device)
    out, lse = torch.empty_like(q_BHTD), part_lse.new_empty(batch, q_heads, tokens)
    rotated = q_BHTD if keys.rotation is None else q_BHTD.float() @ keys.rotation
    pointers = None if rope is None else rope.pointers(keys.mean)
    with on(q_BHTD):
        attend_kernel[(batch * heads, parts)](
            rotated, q_BHTD, scale * LOG2E, pointers, keys.addresses, values.addresses, keys.lookup, values.lookup,
            *exact, exact.k_window.stride(0), starts_B, lengths, part, part_lse,
            *constants(keys.layout, values.layout, ratio, tokens, exact.k_sinks.shape[1], splits, launch),
            num_warps=launch.warps, num_stages=launch.stages, maxnreg=min(255, REGISTERS // (32 * launch.warps)),
            **FUSED,
        )  # fmt: skip
        back, wide = None if values.rotation is None else _padded(values.rotation.mT), padded(size)
        high = min(16, padded_rows(keys.layout, rows))
        chunk = max(1, MERGED // (high * (COLUMNS if back is None else wide)))
        merge[(batch * heads, triton.cdiv(wide, COLUMNS), triton.cdiv(rows, high))](
            part, part_lse, back, values.mean, out, lse, splits, heads, rows, high, size, wide, EXACT,
            min(wide, COLUMNS), min(chunk, 16), num_warps=4, maxnreg=255, **FUSED,
        )  # fmt: skip
    return out, lse


def constants(keys: Layout, values: Layout, ratio: int, tokens: int, sinks: int, splits: int, launch: Launch) -> tuple:
    """The compile-time arguments of the kernel, in its order."""
    heads, size = keys.geometry.kv_heads, keys.geometry.head_size
    rows = padded_rows(keys, ratio * tokens)
    layer = LayerSettings(heads, size, keys.block, ratio, tokens, rows, launch.tile, sinks, splits)
    return layer, keys.scan, keys.read, keys.settings, values.read, values.settings, tile(1, size)


def _padded(rotation: Tensor) -> Tensor:
    wide = padded(len(rotation)) - len(rotation)
    return torch.nn.functional.pad(rotation, (0, wide, 0, wide)).contiguous()
