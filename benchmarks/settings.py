"""Find the fastest launch settings of a decode step, and keep them in the package's table, launch.json."""

import math
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from kvq_runtime.kernels.attend import launch
from kvq_runtime.kernels.attend.launch import Launch
from kvq_runtime.kernels.attend.layout import Layout


def candidates(keys: Layout, values: Layout, rows: int) -> list[Launch]:
    """The default, then what is ever less like it; a tile that the kernel does not use is not varied."""
    default = launch.default(keys, values, rows)
    tiles = [default.tile] if keys.rounded else [tile for tile in (16, 32, 64, 128) if tile <= keys.block]

    def distance(how: Launch) -> float:
        return abs(math.log2(how.tile / default.tile)) + abs(math.log2(how.warps / default.warps)) + how.stages - 1

    found = {Launch(*each) for each in product(tiles, (1, 2, 4, 8), (1, 2, 3))} | {default}
    return sorted(found, key=lambda how: (distance(how), how.tile, how.warps))


def tried(step: Callable[[Launch], float], hows: list[Launch], deadline: float) -> Iterator[tuple[Launch, float | str]]:
    """Each setting with its time, or why it cannot be launched; the first in any case, the rest until the deadline."""
    for i, how in enumerate(hows):
        if i and time.monotonic() > deadline:
            return
        try:
            yield how, step(how)
        except Exception as error:  # too much shared memory for this device: Triton's own error types vary
            yield how, type(error).__name__


def write(found: dict[str, Any]) -> None:
    """Add measured settings to the package's table."""
    path = Path(launch.__file__).with_name("launch.json")
    path.write_text(launch.to_json(launch.table() | found))
