"""Launch decode attention over a layer's packed blocks, sinks and window: the kernel and its merge.

A layer's blocks are cut into as many splits as fill the device, by the programs that a multiprocessor runs at once.

`__all__` is what attention/fused.py and vllm/page.py call; all of it is imported late, for it imports triton.

Nothing here asks the device anything: lengths and starts are tensors on it, slabs are reached through a block table,
the number of splits is fixed; so that a decode step can be captured as one graph.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvq_runtime.kernels.attend.arguments import LayerSettings, Pages, RoundedSettings, block_table
from kvq_runtime.kernels.attend.kernel import EXACT, merge_parts
from kvq_runtime.kernels.attend.kernel import attend as attend_kernel
from kvq_runtime.kernels.attend.layout import Layout, layout, padded, tile
from kvq_runtime.kernels.attend.queries import LOG2E
from kvq_runtime.kernels.attend.rope import RopeTables
from kvq_runtime.kernels.encode.tile import FUSED, on

__all__ = [
    "Encoded", "Exact", "Layout", "Pages", "RopeTables", "attend", "block_table", "choose_splits", "layout", "takes",
]  # fmt: skip

COLUMNS = 8  # of a tile of queries
ROWS = 64  # query heads of a KV head, times query tokens, at most
TOKENS = 8  # of a query, that any number of heads may have
LINES = 65535  # KV heads of all rows of a batch: an axis of the grid
ANGLES = 128  # tokens of a tile of angles


@dataclass(frozen=True)
class Encoded:
    """One scheme's blocks.

    layout      how they are read
    addresses   their block table, int64 [slabs, 1 + fields]; or the pages of an engine's cache
    lookup      the layout's lookup on the device, or None
    rotation    the layout's rotation, transposed, on the device, float16 [D, D]: x̂ = what is read · rotation; or None
    mean        what was removed from each channel, of keys before RoPE, float32 [C], or None
    """

    layout: Layout
    addresses: Tensor | Pages
    lookup: Tensor | None = None
    rotation: Tensor | None = None
    mean: Tensor | None = None

    @staticmethod
    def of(layout: Layout, addresses: Tensor) -> "Encoded":
        """With the layout's tensors on the device of the addresses."""
        back = None if layout.rotation is None else layout.rotation.mT.half().contiguous()
        lookup, rotation = (None if x is None else x.to(addresses.device) for x in (layout.lookup, back))
        return Encoded(replace(layout, lookup=None, rotation=None), addresses, lookup, rotation)


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
    keys: Encoded,
    values: Encoded,
    exact: Exact,
    lengths: Tensor,
    starts_B: Tensor | None,
    scale: float,
    splits: int,
    rope: RopeTables | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The attention of query tokens that are the last of the window: out [B, Hq, Tq, D] and log2 Σ 2^s [B, Hq, Tq].

    Queries of more than one tile read the blocks once a tile.

    lengths    int32 [3]: encoded blocks, the window's first place in its buffer, its tokens; of pages [B, 4], of each
               row its encoded pages, its row of the windows, its tokens there, its row of the sinks or -1
    starts_B   int32: the first real slot of each row; of pages None
    scale      of the scores
    splits     parts that the blocks are cut into, see `choose_splits`
    rope       for keys before RoPE, and for keys after it whose mean was removed
    cap        bound of a score, which is cap · tanh(score / cap); None: there is none

    ValueError: there are more query tokens than `takes` allows.
    """
    q_BHTD = q_BHTD.contiguous()
    batch, q_heads, tokens, size = q_BHTD.shape
    heads = keys.layout.geometry.kv_heads
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
    arguments, options = _launched(
        q_BHTD, keys, values, exact, lengths, starts_B, scale, splits, rope, cap, part, part_lse
    )
    with on(q_BHTD):
        attend_kernel[(_tiles(rows), lines, parts)](*arguments, **options)
    merge_parts(part, part_lse, values.rotation, values.mean, lengths, out, lse)
    return out, lse


def takes(lines: int, ratio: int, tokens: int) -> bool:
    """True if the kernel takes `tokens` query tokens: every tile of them reads the blocks again.

    lines   batch rows times KV heads
    ratio   query heads of a KV head
    """
    return lines <= LINES and (tokens <= TOKENS or ratio * tokens <= ROWS)


def _tiles(rows: int) -> int:
    """Count the tiles of a KV head's query rows: a larger tile would leave no registers."""
    return -(-rows // COLUMNS)


def _launched(
    q_BHTD: Tensor,
    keys: Encoded,
    values: Encoded,
    exact: Exact,
    lengths: Tensor,
    starts_B: Tensor | None,
    scale: float,
    splits: int,
    rope: RopeTables | None,
    cap: float | None,
    part: Any,
    part_lse: Any,
) -> tuple[tuple, dict[str, Any]]:
    """The kernel's arguments, and the options of its launch."""
    q_heads, tokens = q_BHTD.shape[1:3]
    ratio = q_heads // keys.layout.geometry.kv_heads
    pointers, paged = None if rope is None else rope.pointers(keys.mean), int(isinstance(keys.addresses, Pages))
    arguments = (
        q_BHTD, keys.rotation, scale * LOG2E.value, pointers, keys.addresses, values.addresses, keys.lookup,
        values.lookup, *exact, exact.k_window.stride(0), starts_B, lengths, part, part_lse, ratio * tokens, tokens,
        splits, *constants(keys.layout, values.layout, exact.k_sinks.shape[1], paged, cap),
    )  # fmt: skip
    warps, registers = resources(keys.layout, values.layout)
    return arguments, {"num_warps": warps, "num_stages": 1, "maxnreg": registers} | FUSED


def constants(keys: Layout, values: Layout, sinks: int, paged: int = 0, cap: float | None = None) -> tuple:
    """The compile-time arguments of the kernel, in its order."""
    heads, size = keys.geometry.kv_heads, keys.geometry.head_size
    bound, angles = LOG2E.value * (cap or 0.0), min(ANGLES, padded(keys.block))
    layer = LayerSettings(heads, size, keys.block, COLUMNS, angles, sinks, paged, bound)
    return layer, keys.scan, keys.scores, keys.settings, values.settings, tile(1, size)


def resources(keys: Layout, values: Layout) -> tuple[int, int]:
    """(warps of a program, registers of a thread): the fastest of those tried on an H200, or at most 3.6% slower.

    A program of ordered codes is one warp, so that nothing waits at a barrier. With 168 registers a scheduler has three
    warps, with more two; where steps are many, heads wide, codes of two planes or looked up, what spills then costs
    more than the third warp gives.
    """
    both = keys.settings, values.settings
    if not all(isinstance(settings, RoundedSettings) for settings in both):
        return 2, 255
    few = all(settings.GROUPS == 1 and settings.BITS in (1, 2, 4) for settings in both)
    few = few and all(settings.BITS == 1 or not settings.TABLES for settings in both)
    few = few and min(keys.block, 128) <= keys.settings.GROUP
    plain = not keys.settings.PAIRS and not keys.mean and keys.geometry.head_size <= 128
    return 1, 168 if few and plain else 255


# ---- splits


def choose_splits(
    q_BHTD: Tensor,
    keys: Encoded,
    values: Encoded,
    exact: Exact,
    lengths: Tensor,
    starts_B: Tensor | None,
    blocks: int,
    rope: RopeTables | None = None,
    cap: float | None = None,
) -> int:
    """Return the number of parts that `attend`, with the same arguments, should cut the blocks into (`count_splits`).

    Compiles the kernel, if it has not been yet. On a CPU, where there is nothing to fill, a few.

    blocks   that there is room for
    """
    batch, q_heads, tokens, _ = q_BHTD.shape
    heads = keys.layout.geometry.kv_heads
    lines = batch * heads * _tiles(q_heads // heads * tokens)
    if not q_BHTD.is_cuda:
        return count_splits(lines, blocks, 4, 3)
    arguments, options = _launched(
        q_BHTD, keys, values, exact, lengths, starts_B, 1.0, 1, rope, cap, torch.float32, torch.float32
    )
    limits = torch.cuda.get_device_properties(q_BHTD.device)
    with on(q_BHTD):
        compiled = attend_kernel.warmup(*arguments, grid=(1,), **options)
        compiled._init_handles()  # the driver counts registers when it loads a kernel
    resident = resident_programs(compiled.n_regs, compiled.metadata.shared, options["num_warps"], limits)
    return count_splits(lines, blocks, limits.multi_processor_count, resident)


def count_splits(lines: int, blocks: int, multiprocessors: int, resident: int) -> int:
    """Count the parts to cut the blocks into: the programs that the device runs at once, or fewer of few blocks.

    Splits are equally long (kernel.py), so that a second round would begin when the first one ends: it would read
    lengths and queries again, and leave more partial results to merge. It is rounded down: a few programs more would
    take a round of their own. Nothing here depends on how many tokens there are, so that a recorded step stays right as
    they become more.

    lines      batch rows times KV heads
    blocks     that there is room for
    resident   programs that a multiprocessor runs at once, see `resident_programs`
    """
    return max(1, min(blocks, multiprocessors * resident // max(1, lines)))


def resident_programs(registers: int, shared: int, warps: int, limits: Any) -> int:
    """Return how many programs of a compiled kernel a multiprocessor runs at once.

    registers   of a thread, allocated to warps in eights
    shared      bytes of a program, to which the system adds a KiB
    limits      of the device, as torch.cuda.get_device_properties has them
    """
    by_registers = limits.regs_per_multiprocessor // (-(-registers // 8) * 8 * 32 * warps)
    by_shared = limits.shared_memory_per_multiprocessor // (shared + 1024)
    by_threads = limits.max_threads_per_multi_processor // (32 * warps)
    return max(1, min(by_registers, by_shared, by_threads, 32))
