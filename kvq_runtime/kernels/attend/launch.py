"""Choose how a kernel is launched: from a table that `make bench-gpu` measures, or a safe default."""

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import resources

import torch

from kvq_runtime.kernels.layout import Layout

ROWS = 64  # query heads of a KV head, times query tokens, that one tile has, at most


@dataclass(frozen=True)
class Launch:
    """Tokens of a tile (where codes lie along the channels), warps, stages of the pipeline."""

    tile: int = 64
    warps: int = 2
    stages: int = 1


def key(arch: int, keys: Layout, values: Layout, rows: int) -> str:
    """What a measured setting is for: architecture, head size, how keys and values are read, query rows of a head."""
    read = "-".join(f"{_how(side)}{side.settings[7]}" for side in (keys, values)) + "-mean" * lifted(keys)
    return f"sm{arch}-d{keys.settings[3]}-{read}{'-mean' if lifted(keys) else ''}-m{tall(keys, rows)}"


def _how(side: Layout) -> str:
    return (side.read or side.scan).__name__


def lifted(keys: Layout) -> bool:
    """Whether scores get a mean back by products of their own."""
    return keys.mean and _how(keys) != "turning"


def at_once(keys: Layout, values: Layout, ratio: int, tokens: int) -> int:
    """How many of the query heads of a KV head one launch takes; 0: even one has more rows than a tile.

    Beside a mean's operands, or angles, there are registers for 8 rows. Per channel a tile of 64 costs more than four
    of 8.
    """
    rows = ratio * tokens
    few = lifted(keys) or "polar_pairs" in (_how(keys), _how(values))
    if few or (keys.read is None and rows <= 32 and tokens <= 8):
        return min(ratio, 8 // tokens)
    return ratio if rows <= ROWS else 0


def tall(keys: Layout, rows: int) -> int:
    """What query rows are padded to; per channel a tile of 64 has registers enough, where 16 and 32 have not."""
    return next(size for size in ((8, 16, 32, 64) if keys.read is not None else (8, 64)) if rows <= size)


@lru_cache(maxsize=1)
def table() -> dict[str, Launch]:
    """The measured settings."""
    text = (resources.files("kvq_runtime") / "kernels" / "launch.json").read_text()
    return {name: Launch(**given) for name, given in json.loads(text).items()}


def choose(device: torch.device, keys: Layout, values: Layout, rows: int) -> Launch:
    """The measured setting for this device, or the default."""
    if device.type != "cuda":
        return Launch()
    major, minor = torch.cuda.get_device_capability(device)
    return table().get(key(10 * major + minor, keys, values, rows), default(keys, values, rows))


def default(keys: Layout, values: Layout, rows: int) -> Launch:
    """What spills nowhere on any architecture (benchmarks/results/kernels_aot.csv), with few instructions.

    Warps share a slot's channels, 16 each: where slots are narrow, more warps do the same work twice.
    """
    size, many = keys.settings[3], tall(keys, rows) // 8
    pairs = [side for side in (keys, values) if _how(side) == "polar_pairs"]  # a thread has two tokens
    if pairs:  # three bits are two planes, which take more registers
        return Launch(tile=64 if any(side.settings[10] == 3 for side in pairs) else 128)
    if "polar" in (_how(keys), _how(values)):
        return Launch(tile=16 if size > 64 else 32, warps=16 if size > 128 else min(8, 2 * many))
    if keys.read is None and lifted(keys):
        return Launch(warps=8)
    if _how(keys) == "turning" or (keys.read is None and size > 128):
        return Launch(warps=min(8, 4 * many))
    read = [side for side in (keys, values) if side.read is not None]
    columns = min(side.settings[1] for side in read)
    if lifted(keys):
        paired = any(_how(side) == "codebook" and side.settings[10] for side in read)
        return Launch(32) if columns > 16 else Launch(16, 2 if paired else 1)
    if any(_how(side) == "codebook" for side in read):
        return _gathering(columns, size, many)
    two = keys.settings[7] == values.settings[7] == 2
    if two and keys.read is None and _how(values) == "uniform" and many == 1 and size == 128:
        return Launch(warps=1)  # all of a block's bytes in one warp's registers
    if keys.read is None or size > 128 or columns <= 16 or max(side.settings[7] for side in read) == 8:
        return Launch(warps=min(8, (1 if columns <= 16 else 2) * many))
    return Launch(warps=8) if many == 8 else Launch(tile=min(128, 256 // many), warps=2 if many == 1 else 4)


def _gathering(columns: int, size: int, many: int) -> Launch:
    """The default where codes are looked up."""
    if columns <= 16:
        return Launch(tile=32 if columns == 16 else 16, warps=many)
    if size > 128:
        return Launch(tile=32, warps=min(8, 2 * many))
    return Launch(warps=2) if many == 1 else Launch(tile=max(32, 128 // many), warps=4)


def splits(programs: int, blocks: int, device: torch.device) -> int:
    """How many parts to cut the tokens into, so that about six programs, of few warps, run on every multiprocessor."""
    count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return max(1, min(blocks, 128, 6 * count // max(1, programs)))


def to_json(measured: dict[str, Launch]) -> str:
    """The table as it is stored."""
    return json.dumps({name: asdict(measured[name]) for name in sorted(measured)}, indent=1) + "\n"
