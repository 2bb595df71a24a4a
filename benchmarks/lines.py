"""Keep what a benchmark finds as JSON lines, one by one, so that it stays when it is stopped, and is not done again.

A line says which kernels it is of (`of`): what was measured of other kernels, or with another Triton or PyTorch, is not
taken for a result.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent
Line = dict[str, Any]
# what tells one result from another, where a line has it
NAMES = (
    "what",
    "model",
    "recipe",
    "half",
    "cache",
    "graph",
    "tokens",
    "prompt",
    "layers",
    "batch",
    "tile",
    "warps",
    "stages",
    "registers",
)


def gpu_name() -> str:
    """The GPU in use, as a part of a file's name: nvidia-h200."""
    return torch.cuda.get_device_name().lower().replace(" ", "-")


def place(benchmark: str, device: str) -> Path:
    """Where results are kept: a file of $OUT, if that is set, else of benchmarks/results."""
    return Path(os.environ.get("OUT") or RESULTS) / f"{benchmark}-{device}.jsonl"


@lru_cache(maxsize=1)
def measured_code() -> str:
    """What is measured, as 12 digits: the runtime's sources, and the versions of what compiles and runs them."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "kvq_runtime").rglob("*")):
        if path.suffix in (".py", ".json"):
            digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    for name in ("torch", "triton", "transformers"):
        try:
            digest.update(f"{name} {metadata.version(name)}".encode())
        except metadata.PackageNotFoundError:
            digest.update(f"no {name}".encode())
    return digest.hexdigest()[:12]


def name_of(line: Line) -> tuple:
    """What a line is about: two lines of one name are of one thing, measured twice."""
    return tuple(line.get(name) for name in NAMES)


def read(*files: Path) -> Iterator[Line]:
    """The lines of these files, of those that are there; a last line cut short is passed over."""
    for file in files:
        for text in file.read_text().splitlines() if file.exists() else ():
            try:
                yield json.loads(text)
            except json.JSONDecodeError:
                continue


def known(*files: Path) -> dict[tuple, Line]:
    """What was found before of the code as it is, by name, the latest of each."""
    return {name_of(line): line for line in read(*files) if line.get("of") == measured_code()}


def keep(found: Iterable[Line], out: Path) -> list[Line]:
    """Print each line as it comes, and add it to a file, marked with the code it is of."""
    kept = []
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        if file.tell() and not out.read_bytes().endswith(b"\n"):
            file.write("\n")
        for line in found:
            kept.append(line | {"of": measured_code()})
            print(json.dumps(kept[-1]), flush=True)
            file.write(json.dumps(kept[-1]) + "\n")
            file.flush()
    return kept


def attempt(about: Line, measure: Callable[[], Line]) -> Line:
    """A line with what was measured, or with the error that it ended in."""
    try:
        return about | measure()
    except torch.OutOfMemoryError:
        return about | {"out_of_memory": True}
    except Exception as error:  # a driver's, a compiler's, torch's: types vary, and the other cases are worth measuring
        return about | {"error": f"{type(error).__name__}: {error}"[:400]}
