"""Choose how a kernel is launched: from a table that `make bench-gpu` measures, or a safe default.

And cut a layer's blocks into as many splits as fill the device, by how many programs a multiprocessor runs at once.
"""

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

import torch

from kvq_runtime.kernels.attend.layout import Layout

ROWS = 64  # query heads of a KV head, times query tokens, that one tile has, at most
TOKENS = 8  # of a query, that any number of heads may have
LINES = 65535  # KV heads of all rows of a batch: an axis of the grid


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
