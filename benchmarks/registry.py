"""Time a load from a Hub beside `huggingface_hub.snapshot_download` of the same file, in one run.

    python benchmarks/registry.py --megabytes 64

A Hub on loopback (tests/support/hub_server.py) serves one artifact. Cold: an empty cache; both download the same bytes
over the same socket, and kvq hashes them once. Warm: `resolve` with a lock file asks nobody, as does snapshot_download
by a commit; with an alias it asks once, as does snapshot_download by a branch. `load` is what comes on top of either:
reading, hashing and checking every tensor. Rounds are interleaved; medians and ratios to snapshot_download are
printed.
Loopback shows what we add to the network, not what the network costs.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import torch
from hub_server import Hub
from huggingface_hub import constants, snapshot_download
from huggingface_hub.utils import disable_progress_bars

from kvq_runtime.artifact import artifact, fingerprint
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.artifact.fingerprint import Fingerprint
from kvq_runtime.codec import codec
from kvq_runtime.disk import files
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import preset
from kvq_runtime.registry import resolve
from kvq_runtime.registry.lock import Lock, write_lock

NAME = "bench-aqua-2bit"


def main() -> int:
    """Print a table, and write it with --json."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--megabytes", type=int, default=64)
    top.add_argument("--rounds", type=int, default=7)
    top.add_argument("--json", type=Path, metavar="FILE")
    args = top.parse_args()
    disable_progress_bars()
    warnings.simplefilter("ignore", DeprecationWarning)
    data = _artifact(args.megabytes << 20)
    with Hub() as hub, tempfile.TemporaryDirectory() as folder:
        hub.users = {"hf_bench": ("me", "write")}
        os.environ |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_bench", "HF_HUB_OFFLINE": "0"}
        (Path(folder) / "harnesses.json").write_text("{}")
        constants.AGENT_HARNESSES_PATH = str(Path(folder) / "harnesses.json")
        seconds, requests = _measure(hub, data, Path(folder), args.rounds)
    print(f"{len(data) / 1e6:.1f} MB, {args.rounds} rounds, {torch.get_num_threads()} threads")
    rows, medians = [], {name: statistics.median(taken) for name, taken in seconds.items()}
    for name, median in medians.items():
        unit = medians.get(f"{name.partition(':')[0]}: snapshot_download")
        row = {"what": name, "ms": 1e3 * median, "ratio": unit and median / unit, "requests": requests[name]}
        shown = f"{row['ratio']:8.2f} x" if unit else " " * 10
        print(f"  {name:32} {row['ms']:10.2f} ms {shown}   {row['requests']} requests")
        rows.append(row)
    if args.json:
        record = {"benchmark": "registry", "bytes": len(data), "rounds": args.rounds, "rows": rows}
        args.json.write_text(json.dumps(record) + "\n")
    return 0


def _measure(hub: Hub, data: bytes, folder: Path, rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    kept = resolve.open_registry("hf://org")
    constants.HF_HUB_CACHE = str(folder / "publisher")
    version = kept.publish(NAME, data)
    kept.promote(NAME, version.version)
    where, lock = f"hf://org/{NAME}", folder / "kvq.lock"
    commit = hub.repos[f"org/{NAME}"].branches["main"]
    pinned = Lock(where, kept.url, NAME, version.version, version.sha256, version.size, commit)
    write_lock(lock, pinned)
    file = f"versions/{version.version}/kvq.safetensors"

    def snapshot(revision: str) -> None:
        snapshot_download(f"org/{NAME}", revision=revision, allow_patterns=file, endpoint=hub.url)

    path = resolve.resolve(where).path
    constants.HF_HUB_CACHE = str(folder / "snapshots")
    snapshot("main")
    snapshot(commit)
    cold: dict[str, Callable[[], object]] = {
        "cold: snapshot_download": lambda: snapshot(commit),
        "cold: kvq": lambda: resolve.resolve(where),
    }
    warm: dict[str, Callable[[], object]] = {
        "warm pinned: snapshot_download": lambda: snapshot(commit),
        "warm pinned: kvq": lambda: resolve.resolve(where, lock=lock),
        "warm alias: snapshot_download": lambda: snapshot("main"),
        "warm alias: kvq": lambda: resolve.resolve(f"{where}@production"),
        "load, checked": lambda: artifact.load(path, version.sha256, version.size),
        "read and hash once": lambda: files.digest(path),
    }
    seconds, requests = {name: [] for name in (*cold, *warm)}, {}
    for number in range(rounds):
        for name, action in [*cold.items(), *warm.items()]:
            warm_cache = "snapshots" if "snapshot" in name else "publisher"
            constants.HF_HUB_CACHE = str(folder / (f"{number}-{name[-3:]}" if name in cold else warm_cache))
            before, begun = len(hub.requests), time.perf_counter()
            action()
            seconds[name].append(time.perf_counter() - begun)
            requests[name] = len(hub.requests) - before
        for name in cold:
            shutil.rmtree(folder / f"{number}-{name[-3:]}")
    return seconds, requests


def _artifact(size: int) -> bytes:
    """An artifact of at least so many bytes: AQUA-KV's linear predictors, of random numbers."""
    recipe, layers, generator = preset("aqua-2bit"), 2, torch.Generator().manual_seed(0)

    def specs() -> dict[str, Any]:
        return codec.all_specs(recipe, Geometry(layers=layers, kv_heads=8, head_size=128))

    while layers < 1024 and sum(torch.empty(s, dtype=d, device="meta").nbytes for s, d in specs().values()) < size:
        layers += 1
    shape = Geometry(layers=layers, kv_heads=8, head_size=128)
    tensors, probes = (
        {name: _random(*spec, generator) for name, spec in some.items()} for some in (specs(), fingerprint.specs(shape))
    )
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return artifact.to_bytes(Artifact(recipe, Fingerprint(shape, rope, False, probes), tensors, {"model": "none"}, {}))


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype == torch.uint8:
        return torch.randint(256, shape, generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator).to(dtype)


if __name__ == "__main__":
    sys.exit(main())
