"""Launch decode attention over a layer's packed blocks, sinks and window: the kernel and its merge.

How it is launched is in a table that `make bench-gpu` measures, or a safe default; a layer's blocks are cut into as
many splits as fill the device, by how many programs a multiprocessor runs at once.

`__all__` is what attention/fused.py and the store call; all of it is imported late, for it imports triton.

Nothing here asks the device anything: lengths and starts are tensors on it, slabs are reached through a block table,
the number of splits is fixed; so that a decode step can be captured as one graph.
"""

import json
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvq_runtime.kernels.attend.block_table import Pages, block_table
from kvq_runtime.kernels.attend.kernel import EXACT, merge_parts
from kvq_runtime.kernels.attend.kernel import attend as attend_kernel
from kvq_runtime.kernels.attend.layout import Layout, layout, tile
from kvq_runtime.kernels.attend.queries import LOG2E
from kvq_runtime.kernels.attend.rope import RopeTables
from kvq_runtime.kernels.attend.settings import LayerSettings
from kvq_runtime.kernels.encode.tile import FUSED, on

__all__ = [
    "Encoded", "Exact", "Layout", "Pages", "RopeTables", "attend", "block_table", "choose_splits", "layout", "takes",
]  # fmt: skip

ROWS = 64  # query heads of a KV head, times query tokens, that one tile has, at most
TOKENS = 8  # of a query, that any number of heads may have
LINES = 65535  # KV heads of all rows of a batch: an axis of the grid
REGISTERS = 65536  # of a multiprocessor; ptxas would rather spill than take more than its own guess


@dataclass(frozen=True)
class Launch:
    """Launch settings of a kernel.

    tile        tokens of a tile of what is looked up, or angles
    warps       of a program
    stages      of the pipeline
    registers   of a thread, at most: fewer leave room for more programs
    """

    tile: int = 64
    warps: int = 2
    stages: int = 1
    registers: int = 255


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
    launch: Launch | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The attention of query tokens that are the last of the window: out [B, Hq, Tq, D] and log2 Σ 2^s [B, Hq, Tq].

    Queries that one tile has no room for are several, which read the blocks again: `tile_rows`.

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
        q_BHTD, keys, values, exact, lengths, starts_B, scale, splits, rope, launch, part, part_lse, cap
    )
    with on(q_BHTD):
        attend_kernel[(_tiles(keys, values, rows), lines, parts)](*arguments, **options)
    merge_parts(part, part_lse, values.rotation, values.mean, lengths, out, lse)
    return out, lse


def choose_splits(
    q_BHTD: Tensor,
    keys: Encoded,
    values: Encoded,
    exact: Exact,
    lengths: Tensor,
    starts_B: Tensor | None,
    blocks: int,
    rope: RopeTables | None = None,
    launch: Launch | None = None,
    cap: float | None = None,
) -> int:
    """Return the number of parts that `attend`, with the same arguments, should cut the blocks into (`count_splits`).

    Compiles the kernel, if it has not been yet. On a CPU, where there is nothing to fill, a few.

    blocks   that there is room for
    """
    batch, q_heads, tokens, _ = q_BHTD.shape
    heads = keys.layout.geometry.kv_heads
    lines = batch * heads * _tiles(keys, values, q_heads // heads * tokens)
    if not q_BHTD.is_cuda:
        return count_splits(lines, blocks, 4, 3)
    given = (q_BHTD, keys, values, exact, lengths, starts_B, 1.0, 1, rope, launch)
    limits = torch.cuda.get_device_properties(q_BHTD.device)
    with on(q_BHTD):
        resident = _resident(*_launched(*given, torch.float32, torch.float32, cap), limits)
    return count_splits(lines, blocks, limits.multi_processor_count, resident)


def _tiles(keys: Encoded, values: Encoded, rows: int) -> int:
    """Into how many tiles the query rows of a KV head fall."""
    return -(-rows // tile_rows(keys.layout, values.layout, rows))


def _resident(arguments: tuple, options: dict[str, Any], limits: Any) -> int:
    """Return how many programs of the kernel a multiprocessor of the current device runs at once."""
    compiled = attend_kernel.warmup(*arguments, grid=(1,), **options)
    compiled._init_handles()  # the driver counts registers when it loads a kernel
    return resident_programs(compiled.n_regs, compiled.metadata.shared, options["num_warps"], limits)


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
    launch: Launch | None,
    part: Any,
    part_lse: Any,
    cap: float | None,
) -> tuple[tuple, dict[str, Any]]:
    """The kernel's arguments, and the options of its launch."""
    q_heads, tokens = q_BHTD.shape[1:3]
    ratio = q_heads // keys.layout.geometry.kv_heads
    launch = launch or choose(q_BHTD.device, keys.layout, values.layout, ratio * tokens)
    pointers, paged = None if rope is None else rope.pointers(keys.mean), int(isinstance(keys.addresses, Pages))
    arguments = (
        q_BHTD, keys.rotation, scale * LOG2E.value, pointers, keys.addresses, values.addresses, keys.lookup,
        values.lookup, *exact, exact.k_window.stride(0), starts_B, lengths, part, part_lse, ratio * tokens, tokens,
        splits,
        *constants(keys.layout, values.layout, ratio * tokens, exact.k_sinks.shape[1], launch, paged, cap),
    )  # fmt: skip
    most = min(launch.registers, REGISTERS // (32 * launch.warps))
    return arguments, {"num_warps": launch.warps, "num_stages": launch.stages, "maxnreg": most} | FUSED


def constants(
    keys: Layout, values: Layout, rows: int, sinks: int, launch: Launch, paged: int = 0, cap: float | None = None
) -> tuple:
    """The compile-time arguments of the kernel, in its order."""
    heads, size = keys.geometry.kv_heads, keys.geometry.head_size
    bound = LOG2E.value * (cap or 0.0)
    layer = LayerSettings(heads, size, keys.block, tile_rows(keys, values, rows), launch.tile, sinks, paged, bound)
    return layer, keys.scan, keys.read, keys.settings, values.read, values.settings, tile(1, size)


# ---- settings, and splits


def key(arch: int, keys: Layout, values: Layout, rows: int) -> str:
    """Return the key of a measured setting: architecture, head size, readers of keys and values, rows of a KV head.

    For example "sm90-d128-codebook8x2-mean-codebook8x2-m8", a mean added to the scores.
    """
    mean = "-mean" if keys.adds_mean else ""
    return f"sm{arch}-d{keys.geometry.head_size}-{keys.reader}{mean}-{values.reader}-m{tile_rows(keys, values, rows)}"


def takes(lines: int, ratio: int, tokens: int) -> bool:
    """True if the kernel takes `tokens` query tokens: every tile of them reads the blocks again.

    lines   batch rows times KV heads
    ratio   query heads of a KV head
    """
    return lines <= LINES and (tokens <= TOKENS or ratio * tokens <= ROWS)


def tile_rows(keys: Layout, values: Layout, rows: int) -> int:
    """Columns of a tile for `rows` query rows of a KV head: 8, 16, 32 or 64. More rows are several tiles.

    Beside a mean's operands, angles, or the scores of a sub-block of rounded tokens, there are registers for 8 rows;
    where codes are looked up, a tile of 32 costs more than two of 16, which do not spill.
    """
    if keys.rounded or keys.adds_mean or 2 in (keys.tokens_per_thread, values.tokens_per_thread):
        return 8
    if (keys.gathers or values.gathers) and 16 < rows <= 32:
        return 16
    return next((size for size in (8, 16, 32) if rows <= size), ROWS)


@lru_cache(maxsize=1)
def table() -> dict[str, Launch]:
    """The measured settings, by `key`."""
    text = (resources.files("kvq_runtime") / "kernels" / "attend" / "launch.json").read_text()
    return {name: Launch(**settings) for name, settings in json.loads(text).items()}


def choose(device: torch.device, keys: Layout, values: Layout, rows: int) -> Launch:
    """The measured setting for this device, or the default."""
    if device.type != "cuda":
        return Launch()
    major, minor = torch.cuda.get_device_capability(device)
    return table().get(key(10 * major + minor, keys, values, rows), default(keys, values, rows))


def default(keys: Layout, values: Layout, rows: int) -> Launch:
    """Return settings that spill on no architecture (benchmarks/results/kernels_aot.csv), with few instructions.

    Warps share a slot's channels, 16 each: where slots are narrow, more warps do the same work twice.
    """
    if keys.rounded:
        return _rounded(keys, values)
    size, many, both = keys.geometry.head_size, tile_rows(keys, values, rows) // 8, (keys, values)
    pairs = [scheme for scheme in both if scheme.tokens_per_thread == 2]
    if pairs:  # three bits are two planes, which take more registers
        return Launch(tile=64 if any(scheme.bits == 3 for scheme in pairs) else 128)
    columns = min(scheme.settings.COLUMNS for scheme in both)
    if keys.adds_mean:
        return Launch(32) if columns > 16 else Launch(16, 1)
    return _gathering(columns, size, many)


def _rounded(keys: Layout, values: Layout) -> Launch:
    """The default where codes are rounded: one warp, so that nothing waits at a barrier.

    With 168 registers a scheduler has three warps, with more two; where steps are many, heads wide, codes of two planes
    or looked up, what spills then costs more than the third warp gives, as
    benchmarks/results/kernels_predicted.jsonl has it.
    """
    few = all(scheme.settings.GROUPS == 1 and scheme.bits in (1, 2, 4) for scheme in (keys, values))
    few = few and all(scheme.bits == 1 or not scheme.settings.TABLES for scheme in (keys, values))
    few = few and min(keys.block, 128) <= keys.settings.GROUP
    plain = not keys.pre_rope and not keys.adds_mean and keys.geometry.head_size <= 128
    return Launch(warps=1, registers=168 if few and plain else 255)


def _gathering(columns: int, size: int, many: int) -> Launch:
    """The default where codes are looked up."""
    if columns <= 16:
        return Launch(tile=32 if columns == 16 else 16, warps=many)
    if size > 128:
        return Launch(tile=32, warps=min(8, 2 * many))
    if many == 1:
        return Launch(warps=2)
    return Launch(tile=64, warps=8) if many == 4 else Launch(tile=128 // many, warps=4)


def to_json(measured: dict[str, Launch]) -> str:
    """The table as it is stored."""
    return json.dumps({name: asdict(measured[name]) for name in sorted(measured)}, indent=1) + "\n"


def count_splits(lines: int, blocks: int, multiprocessors: int, resident: int) -> int:
    """Into how many parts to cut the blocks at most: what the device runs at once, or fewer where blocks are fewer.

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
