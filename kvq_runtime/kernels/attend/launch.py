"""Launch decode attention over a layer's packed blocks, sinks and window: the kernel and its merge.

A layer's blocks are cut into as many splits as fill the device, by the programs that a multiprocessor runs at once.

`__all__` is what attention/fused.py and vllm/page.py call; all of it is imported late, for it imports triton.

Nothing here asks the device anything: lengths and starts are tensors on it, slabs are reached through a block table,
the number of splits is fixed; so that a decode step can be captured as one graph.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvq_runtime.geometry import SLAB
from kvq_runtime.kernels.attend.arguments import (
    Latents,
    LatentSettings,
    LayerSettings,
    Pages,
    RoundedSettings,
    block_table,
)  # fmt: skip
from kvq_runtime.kernels.attend.kernel import EXACT, merge_parts
from kvq_runtime.kernels.attend.kernel import attend as attend_kernel
from kvq_runtime.kernels.attend.latent import project
from kvq_runtime.kernels.attend.layout import Layout, layout, padded, tile
from kvq_runtime.kernels.attend.queries import LOG2E
from kvq_runtime.kernels.attend.rope import RopeTables
from kvq_runtime.kernels.encode.tile import FUSED, on

__all__ = [
    "Exact", "Layout", "Pages", "RopeTables", "attend", "block_table", "choose_splits", "layout", "takes",
]  # fmt: skip

COLUMNS = 8  # of a tile of queries
ROWS = 64  # query heads of a KV head, times query tokens, at most
TOKENS = 8  # of a query, that any number of heads may have
LINES = 65535  # KV heads of all rows of a batch: an axis of the grid
ANGLES = 128  # tokens of a tile of angles
SEGMENTS = 64  # columns of a program of `project`: queries of several segments
PROJECTIONS = 1024  # programs of it, at most
SHARED = 144  # bytes of shared memory a warp and channel, as compiled for sm_90


class Exact(NamedTuple):
    """Exact keys and values: windows [B, W, C], a buffer; the sinks of each row [B, S, C].

    Of pages: windows [E, N, C], and sinks [F, S, C], views of [F, 2, S, C]; which of E and F are a row's, `lengths`
    says.
    """

    k_window: Tensor
    v_window: Tensor
    k_sinks: Tensor
    v_sinks: Tensor


def attend(
    q_BHTD: Tensor,
    keys: Layout,
    values: Layout,
    exact: Exact,
    lengths: Tensor,
    starts_B: Tensor | None,
    scale: float,
    splits: int,
    rope: RopeTables | None = None,
    cap: float | None = None,
    blocks: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend with query tokens that are the last of the window: out [B, Hq, Tq, D] and log2 Σ 2^s [B, Hq, Tq].

    Queries of more than one tile read the blocks once a tile.

    lengths    int32 [3]: encoded blocks, the window's first place in its buffer, its tokens; of pages [B, 4], of each
               row its encoded pages, its row of the windows, its tokens there, its row of the sinks or -1
    starts_B   int32: the first real slot of each row; of pages None
    scale      of the scores
    splits     parts that the blocks are cut into, see `choose_splits`
    rope       for keys whose mean was removed, or that are turned back to their segment's middle
    cap        bound of a score, which is cap · tanh(score / cap); None: there is none
    blocks     encoded, at most, where the host knows; None: as many as the tables have room for

    ValueError: there are more query tokens than `takes` allows.
    """
    q_BHTD = q_BHTD.contiguous()
    batch, q_heads, tokens, size = q_BHTD.shape
    heads = keys.geometry.kv_heads
    ratio, lines = q_heads // heads, batch * heads
    if not takes(lines, ratio, tokens):
        raise ValueError(
            f"{batch} rows of {heads} KV heads, {ratio * tokens} rows of queries of each; the kernel takes up to "
            f"{LINES} KV heads of all rows, and {ROWS} rows of queries, or {TOKENS} tokens of any number of heads: "
            "give it fewer"
        )
    parts, rows = EXACT.value + splits, ratio * tokens
    part = torch.empty(lines, parts, rows, size, dtype=torch.float32, device=q_BHTD.device)
    part_lse = torch.empty(lines, rows, parts, dtype=torch.float32, device=q_BHTD.device)
    out, lse = torch.empty_like(q_BHTD), part_lse.new_empty(batch, q_heads, tokens)
    pointers = None if rope is None or keys.mean is None else rope.pointers(keys.mean)
    warps, registers = resources(keys, values)
    settings = constants(keys, values, exact.k_sinks.shape[1], cap)
    lookup = keys.lookup
    if isinstance(lookup, Latents):
        assert rope is not None
        lookup = _projected(q_BHTD, keys, rope, lengths, scale, settings[0], blocks)
    with on(q_BHTD):
        attend_kernel[(_tiles(rows), lines, parts)](
            q_BHTD, keys.rotation, scale * LOG2E.value, pointers, keys.addresses, values.addresses, lookup,
            values.lookup, *exact, exact.k_window.stride(0), starts_B, lengths, part, part_lse, rows, tokens, splits,
            *settings,
            num_warps=warps, num_stages=1, maxnreg=registers, **FUSED,
        )  # fmt: skip
    merge_parts(part, part_lse, values.rotation, values.mean, lengths, out, lse)
    return out, lse


def _projected(
    q_BHTD: Tensor, keys: Layout, rope: RopeTables, lengths: Tensor, scale: float, layer: LayerSettings,
    blocks: int | None,
) -> Latents:  # fmt: skip
    """Multiply queries with the bases of keys' latents, for each segment that there is room for."""
    lookup, table, settings = keys.lookup, keys.addresses, keys.settings
    assert isinstance(lookup, Latents) and isinstance(settings, LatentSettings) and table is not None
    room = table.table.shape[1] if isinstance(table, Pages) else len(table) * SLAB
    blocks = room if blocks is None else min(room, -(-blocks // SLAB) * SLAB)
    (batch, q_heads, tokens, size), heads = q_BHTD.shape, layer.H
    rows, segments = q_heads // heads * tokens, blocks * keys.block // settings.SEGMENT
    lines, wide = batch * heads, lookup.basis.shape[1] + (0 if keys.mean is None else settings.SEGMENT)
    lookup = lookup._replace(
        projected=lookup.basis.new_empty(lines, segments, rows, wide),
        base=torch.empty(lines, segments, rows, dtype=torch.float32, device=q_BHTD.device),
        segments=segments,
    )
    if not segments:
        return lookup
    programs = min(-(-segments * rows // SEGMENTS), max(1, PROJECTIONS // lines))
    with on(q_BHTD):
        project[(programs, lines)](
            q_BHTD, scale * LOG2E.value, rope.segments(keys.mean), lookup, lengths, rows, layer, settings,
            padded(size // 2), SEGMENTS, num_warps=4, num_stages=1, **FUSED,
        )  # fmt: skip
    return lookup


def takes(lines: int, ratio: int, tokens: int) -> bool:
    """Return True if the kernel takes `tokens` query tokens: every tile of them reads the blocks again.

    lines   batch rows times KV heads
    ratio   query heads of a KV head
    """
    return lines <= LINES and (tokens <= TOKENS or ratio * tokens <= ROWS)


def _tiles(rows: int) -> int:
    """Count the tiles of a KV head's query rows: a larger tile would leave no registers."""
    return -(-rows // COLUMNS)


def constants(keys: Layout, values: Layout, sinks: int, cap: float | None = None) -> tuple:
    """Return the compile-time arguments of the kernel, in its order."""
    heads, size = keys.geometry.kv_heads, keys.geometry.head_size
    bound, angles = LOG2E.value * (cap or 0.0), min(ANGLES, padded(keys.block))
    paged = int(isinstance(keys.addresses, Pages))
    layer = LayerSettings(heads, size, keys.block, COLUMNS, angles, sinks, paged, bound)
    return layer, keys.scan, keys.scores, keys.settings, values.settings, tile(1, size)


def resources(keys: Layout, values: Layout) -> tuple[int, int]:
    """Return (warps of a program, registers of a thread), the fastest of those tried on an H200, or 3.6% slower.

    A program of ordered codes is one warp, so that nothing waits at a barrier. With 168 registers a scheduler has three
    warps, with more two; where steps are many, heads wide, codes of two planes or looked up, what spills then costs
    more than the third warp gives.
    """
    both = keys.settings, values.settings
    if isinstance(keys.settings, LatentSettings):
        return 1, 168
    if not all(isinstance(settings, RoundedSettings) for settings in both):
        return 2, 255
    few = all(settings.GROUPS == 1 and settings.BITS in (1, 2, 4) for settings in both)
    few = few and all(settings.BITS == 1 or not settings.TABLES for settings in both)
    few = few and min(keys.block, 128) <= keys.settings.GROUP
    plain = keys.mean is None and keys.geometry.head_size <= 128
    return 1, 168 if few and plain else 255


def choose_splits(q_BHTD: Tensor, keys: Layout, values: Layout, blocks: int) -> int:
    """Return the number of parts that `attend` should cut the blocks of these queries into.

    It is what the device runs at once, or fewer where blocks are fewer. Splits are equally long (kernel.py), so that a
    second round would begin when the first one ends: it would read lengths and queries again, and leave more partial
    results to merge. Nothing here depends on how many tokens there are, so that a recorded step stays right as they
    become more. On a CPU, where there is nothing to fill, a few.

    blocks   that there is room for
    """
    batch, q_heads, tokens, _ = q_BHTD.shape
    heads = keys.geometry.kv_heads
    lines = batch * heads * _tiles(q_heads // heads * tokens)
    programs = 12
    if q_BHTD.is_cuda:
        limits = torch.cuda.get_device_properties(q_BHTD.device)
        programs = limits.multi_processor_count * resident_programs(keys, values, limits)
    return max(1, min(blocks, programs // max(1, lines)))


def resident_programs(keys: Layout, values: Layout, limits: Any) -> int:
    """Return how many programs of the kernel a multiprocessor runs at once, by registers and shared memory.

    Registers are taken to be all that a program may have, allocated to warps in eights.

    limits   of the device, as torch.cuda.get_device_properties has them
    """
    warps, registers = resources(keys, values)
    shared = SHARED * warps * padded(keys.geometry.head_size) + 1024  # the system adds a KiB
    by_registers = limits.regs_per_multiprocessor // (-(-registers // 8) * 8 * 32 * warps)
    return max(1, min(by_registers, limits.shared_memory_per_multiprocessor // shared))
