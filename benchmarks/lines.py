"""Keep what a benchmark finds as JSON lines, one by one, so that what was found stays when it is stopped."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def gpu_name() -> str:
    """The GPU in use, as a part of a file's name: nvidia-h200."""
    return torch.cuda.get_device_name().lower().replace(" ", "-")


def keep(found: Iterable[dict[str, Any]], out: Path) -> None:
    """Print each line as it comes, and write it to a file."""
    with out.open("w") as file:
        for line in found:
            print(json.dumps(line), flush=True)
            file.write(json.dumps(line) + "\n")
            file.flush()
