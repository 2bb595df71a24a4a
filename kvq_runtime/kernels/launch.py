"""Choose how a kernel is launched: from a table that `make bench-gpu` measures, or a safe default."""

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import resources

import torch

from kvq_runtime.kernels.layout import Layout


@dataclass(frozen=True)
class Launch:
    """Tokens of a tile (where codes lie along the channels), warps, stages of the pipeline."""

    tile: int = 64
    warps: int = 4
    stages: int = 2


def key(arch: int, layout: Layout, rows: int) -> str:
    """What a measured setting is for: architecture, head size, how keys are read, rows of the query tile."""
    how = layout.scan.__module__.rpartition(".")[2] + "-" + (layout.read or layout.scan).__name__
    bits = layout.settings[7]
    return f"sm{arch}-d{layout.settings[3]}-{how}-{bits}-m{16 if rows <= 16 else 32 if rows <= 32 else 64}"


@lru_cache(maxsize=1)
def table() -> dict[str, Launch]:
    """The measured settings."""
    text = (resources.files("kvq_runtime") / "kernels" / "launch.json").read_text()
    return {name: Launch(**given) for name, given in json.loads(text).items()}


def choose(device: torch.device, layout: Layout, rows: int) -> Launch:
    """The measured setting for this device, or the default."""
    if device.type != "cuda":
        return Launch()
    major, minor = torch.cuda.get_device_capability(device)
    return table().get(key(10 * major + minor, layout, rows), default(layout, rows))


def default(keys: Layout, rows: int) -> Launch:
    """What fits on any architecture and spills least (benchmarks/results/kernels_aot.csv)."""
    size, name, bits = keys.settings[3], (keys.read or keys.scan).__name__, keys.settings[7]
    if name == "polar":
        return Launch(tile=32 if size <= 128 else 16, warps=4, stages=1)
    if name == "codebook" and keys.settings[8] > 1 and keys.settings[9] > 2:  # many slots of few columns
        return Launch(tile=16, warps=2)
    if rows > 16 or size > 128 or name == "turning" or (name != "codebook" and bits == 3):
        return Launch(tile=32, warps=8)
    return Launch()


def splits(programs: int, blocks: int, device: torch.device) -> int:
    """How many parts to cut the tokens into, so that about two programs run on every multiprocessor."""
    count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return max(1, min(blocks, 64, 2 * count // max(1, programs)))


def to_json(measured: dict[str, Launch]) -> str:
    """The table as it is stored."""
    return json.dumps({name: asdict(measured[name]) for name in sorted(measured)}, indent=1) + "\n"
