"""What memory the calibration of a large model takes, against one layer and one chunk of it.

    python benchmarks/large_model.py                            two layers of Llama-3.1-70B's size: 4 GB of disk
    python benchmarks/large_model.py --device cuda --samples 32 --seq-len 8192

A model of the given geometry, with random weights and the embedded model's tokenizer, is written to a temporary folder,
and calibrated as `kvq-calibrate --no-eval` does it, in a process of its own that has calibrated one such layer before,
so that libraries and their buffers are there. On a CPU, peak memory is how far resident anonymous memory then rises
above what it was, looked at every millisecond; pages of mapped files, which the system takes back when it likes, are
not in it. On a GPU, it is what torch allocated at the most. The bound is 1.25 × (layer + chunk), as
the plan counts them. Exit code 1: it is not kept.
"""

import argparse
import ctypes
import json
import multiprocessing
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from kvq_calib.job.job import Job
from kvq_calib.job.prepare import prepare
from kvq_calib.job.run import complete, run
from kvq_calib.model import find as models

BOUND = 1.25
M_MMAP_THRESHOLD = -3  # malloc.h
LLAMA_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}


def main() -> int:
    """Print what was measured, or write it with --json."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in (LLAMA_70B | {"head_dim": 128, "num_hidden_layers": 2}).items():
        top.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    top.add_argument("--recipe", action="append")
    top.add_argument("--samples", type=int, default=4)
    top.add_argument("--seq-len", type=int, default=256)
    top.add_argument("--device", default="cpu")
    top.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    top.add_argument("--threads", type=int, default=torch.get_num_threads())
    top.add_argument("--folder", help="where model and run lie meanwhile (default: the system's temporary folder)")
    top.add_argument("--json", metavar="FILE")
    args = top.parse_args()
    names = (*LLAMA_70B, "head_dim", "num_hidden_layers")
    settings = {name: getattr(args, name) for name in ("samples", "seq_len", "device", "dtype", "threads")}
    settings |= {"corpus": "demo", "recipes": tuple(args.recipe or ["aqua-2bit"])}
    found = measure({name: getattr(args, name) for name in names}, settings, args.folder)
    for name, value in found.items():
        print(f"{name:16} {value}")
    if args.json:
        Path(args.json).write_text(json.dumps({"benchmark": "large_model", **vars(args), **found}) + "\n")
    return int(found["ratio"] > BOUND)


def measure(geometry: dict[str, int], settings: dict, folder: str | None = None) -> dict:
    """Peak memory of a calibration of such a model; `ratio` is to one layer and one chunk."""
    with (
        tempfile.TemporaryDirectory(dir=folder) as place,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process,
    ):
        write(Path(place) / "model", geometry)
        write(Path(place) / "warm-up", geometry | {"num_hidden_layers": 1})
        return process.submit(_measured, Path(place), settings).result()


def write(folder: Path, geometry: dict[str, int]) -> None:
    """A model of random bfloat16 weights on disk, a file per layer, so that one layer is in memory."""
    demo = models.resolve("demo").path
    known = json.loads((demo / "config.json").read_text())
    config = LlamaConfig(**geometry, vocab_size=known["vocab_size"], max_position_embeddings=8192, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, folder)
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in AutoModelForCausalLM.from_config(config).state_dict().items()}
    generator, names = torch.Generator().manual_seed(0), {}
    for name in shapes:
        names[name] = f"layer-{name.split('.')[2]}.safetensors" if ".layers." in name else "rest.safetensors"
    for file in sorted(set(names.values())):
        save_file({n: _weight(shapes[n], generator) for n in names if names[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def _weight(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, shape[1] ** -0.5, generator=generator)


def _measured(place: Path, settings: dict) -> dict:
    # so large a piece goes back to the system when it is freed: what is in use is counted, not what malloc keeps
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    alone = settings | {"publish": False, "evaluate": False, "checkpoint_every": 0}  # activations in files
    run(Job.from_settings(model=str(place / "warm-up"), run=str(place / "warm"), **alone))
    if settings["device"] != "cpu":
        torch.cuda.reset_peak_memory_stats()
    job = Job.from_settings(model=str(place / "model"), run=str(place / "run"), **alone)
    work = prepare(job)
    plan = work.plan
    with _watched() as most:
        done, seconds = complete(job, work)
    peak = max(most) - most[0] if settings["device"] == "cpu" else torch.cuda.max_memory_allocated()
    needs = plan.needs(work.files)
    return {
        "layer": needs["layer"],
        "chunk": needs["chunk"],
        "peak": peak,
        "ratio": round(peak / (needs["layer"] + needs["chunk"]), 3),
        "tokens": plan.tokens,
        "layers": plan.geometry.layers,
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "sha256": [made.sha256 for made in done],
        "environment": plan.environment,
    }


@contextmanager
def _watched() -> Iterator[list[int]]:
    """Resident anonymous bytes of this process: as they are now, and the most of them until the end."""
    found, done = [_anonymous()] * 2, threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            found[1] = max(found[1], _anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


if __name__ == "__main__":
    sys.exit(main())
