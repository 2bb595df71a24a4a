"""Measure recipes where no token is generated: time and memory of a calibration, encoding and decoding a token.

    python benchmarks/calibration.py time --samples 96 --seq-len 1024 --recipe aqua-2bit
    python benchmarks/calibration.py memory                            two layers of Llama-3.1-70B's size: 4 GB of disk
    python benchmarks/calibration.py memory --device cuda --samples 32 --seq-len 8192
    python benchmarks/calibration.py encode aqua-1bit aqua-fisher-1bit [--rounds 5]

time    against the model's own forward pass over the same tokens, in one run. The plain pass is transformers' own
        model without its output head, which a calibration does not run either but for gradients; with --logits all of
        it, as `model(tokens)` runs. It has the capture's dtype, threads and batches. It takes turns with the
        calibration: after each layer, the next few chunks. The text is read and tokenized by neither; gradients and a
        draft, where a recipe asks for them, count (in processor time with the reading of the text). Bound: the capture
        is one such pass without the last layer's attention and MLP.
memory  of a model of the given geometry, with random weights and the embedded model's tokenizer, which is calibrated as
        `kvq-calibrate --no-eval` does it, in a process of its own that has calibrated one such layer before, so that
        libraries and their buffers are there. On a CPU, peak memory is how far resident anonymous memory then rises
        above what it was, looked at every millisecond; pages of mapped files, which the system takes back when it
        likes, are not in it. On a GPU, it is what torch allocated at the most. The bound is 1.25 × (layer + chunk), as
        the plan counts them. Exit code 1: it is not kept.
encode  of presets, or presets with settings (`aqua-1bit+key.predict=mean`). All are fitted in one pass over the model,
        as `kvq compare` does it; then encodings take turns, a round is one of each recipe. Of fits and rounds the
        median is given, with the least and the greatest, of the process's CPU time, of one thread:
        fit      seconds of a recipe's own fit on `--samples` sequences; rows "forward" and "capture" are what all
                 share, which recipes whose bits are shared out need a second time
        encode   microseconds of a token in all layers, keys and values: the blocks of a window of `--seq-len` tokens,
                 one row, are encoded one after the other, and decoded where the layer above is predicted from them
        decode   likewise, all encoded blocks of a layer at once, as under an attention that reads decoded tokens
"""

import argparse
import ctypes
import json
import multiprocessing
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from kvq_calib.evaluate.caches import FullCache, attending
from kvq_calib.evaluate.record import load_model
from kvq_calib.job.job import Job
from kvq_calib.job.prepare import prepare
from kvq_calib.job.run import complete, run
from kvq_calib.model import find as models
from kvq_calib.model.files import ModelFiles
from kvq_calib.run import bit_allocation, calibrate, checkpoint, plan
from kvq_calib.run.device import keep_memory
from kvq_calib.run.run import InFiles, InMemory, Run
from kvq_calib.text import corpus
from kvq_runtime.artifact import recipe_text
from kvq_runtime.cli.table import print_table
from kvq_runtime.hf.model import CACHE
from kvq_runtime.recipe import Recipe, preset
from kvq_runtime.store.decode import Pair

BOUND = 1.25
M_MMAP_THRESHOLD = -3  # malloc.h
LLAMA_70B = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 128, "num_hidden_layers": 2,
}  # fmt: skip
Clock = Callable[[], float]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write JSON with --json."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(required=True)

    def add(name: str, work: Callable[[argparse.Namespace], int], samples: int, length: int) -> argparse.ArgumentParser:
        one = commands.add_parser(name)
        one.set_defaults(work=work)
        one.add_argument("--samples", type=int, default=samples, help="sequences to fit on (default: %(default)s)")
        one.add_argument("--seq-len", type=int, default=length, help="tokens of one (default: %(default)s)")
        one.add_argument("--json", type=Path, metavar="FILE")
        return one

    timed, held, encoded = (
        add("time", time_of, 96, 1024),
        add("memory", memory_of, 4, 256),
        add("encode", encode, 24, 1024),
    )
    timed.add_argument("--logits", action="store_true", help="the plain pass computes logits, too")
    timed.add_argument("--files", action="store_true", help="activations in files, as with --checkpoint-every 0s")
    for name, size in LLAMA_70B.items():
        held.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    held.add_argument("--device", default="cpu")
    held.add_argument("--folder", help="where model and run lie meanwhile (default: the system's temporary folder)")
    for one, dtype in ((timed, None), (held, "bfloat16")):
        one.add_argument("--recipe", action="append")
        one.add_argument("--threads", type=int, default=torch.get_num_threads())
        one.add_argument("--dtype", choices=("float32", "bfloat16"), default=dtype)
    for one in (timed, encoded):
        one.add_argument("--model", default="demo", help="a name of the catalog, a folder or a Hub id")
    encoded.add_argument("recipes", nargs="+", metavar="RECIPE", help="a preset, or one with settings")
    encoded.add_argument("--rounds", type=int, default=5, help="encodings of each recipe (default: %(default)s)")
    encoded.add_argument("--fits", type=int, default=3, help="fits of each recipe, 1 or more (default: %(default)s)")
    args = top.parse_args(arguments)
    return args.work(args)


def time_of(args: argparse.Namespace) -> int:
    """Print seconds of a calibration and of its parts, and their ratios to a plain forward pass."""
    keep_memory()  # as `kvq-calibrate` does
    files = models.resolve(args.model)
    recipes = tuple(preset(name) for name in args.recipe or ["aqua-2bit"])
    text = {"samples": args.samples, "seq_len": args.seq_len}
    made = plan.make(files, recipes, **text, dtype=args.dtype, threads=args.threads)
    with tempfile.TemporaryDirectory() as folder:
        work = Run(made, files, Path(folder), activations=InFiles() if args.files else InMemory())
        with checkpoint.claimed(work.folder):
            begun = time.process_time()
            calibrate.start(work)
            descent = time.process_time() - begun if made.descends else 0.0
            plain, layers, unit = Plain(work, args.logits), made.geometry.layers, Spent()
            of_gradients = sum((checkpoint.record(work.folder, -1) or {})["seconds"].values())
            spent = Spent(of_gradients, descent)
            for part in bit_allocation.rounds(work):
                stream = calibrate.start(part)
                for layer in range(layers):
                    spent += Spent.by(calibrate.fit_layer, part, stream, layer)
                    if not part.plan.draft:
                        unit += Spent.by(plain.forward, layer, layers)
            spent += Spent.by(calibrate.artifacts, work)
        parts = calibrate.seconds(work)
    rows = {"plain forward": unit.wall, "calibration": spent.wall} | parts
    print(f"{files.id}, {made.tokens} tokens, {made.dtype}, {made.threads} threads, chunks of {made.chunk} sequences")
    for name, seconds in rows.items():
        print(f"  {name:20} {seconds:8.2f} s {seconds / unit.wall:8.2f} x")
    print(f"  in processor time the calibration takes {spent.processor / unit.processor:.2f} x")
    if args.json:
        about = {"benchmark": "calibration", "activations_in": "files" if args.files else "memory",
                 "logits": args.logits, "model": files.id, "tokens": made.tokens,
                 "recipes": [one.name for one in recipes]}  # fmt: skip
        ratios = {"ratio": spent.wall / unit.wall, "processor_ratio": spent.processor / unit.processor}
        record = about | {"environment": made.environment, "seconds": rows} | ratios
        args.json.write_text(json.dumps(record) + "\n")
    return 0


class Plain:
    """transformers' model, without its output head or with it, and tokens of the run's batches."""

    def __init__(self, work: Run, logits: bool):
        plan = work.plan
        model = load_model(work.files, plan.device, getattr(torch, plan.dtype))
        self.model = model if logits else model.base_model
        shape = plan.samples, plan.seq_len
        tokens = torch.randint(work.files.vocabulary, shape, generator=torch.Generator().manual_seed(0))
        self.batches = [tokens[rows.start : rows.stop] for rows in plan.chunks]
        with torch.inference_mode():
            self.model(tokens[:1], use_cache=False)

    @torch.inference_mode()
    def forward(self, turn: int, turns: int) -> None:
        """Run every `turns`-th batch, from `turn` on."""
        for tokens in self.batches[turn::turns]:
            self.model(tokens, use_cache=False)


@dataclass(frozen=True)
class Spent:
    """Seconds, and those of the processor, of all threads, which other processes disturb less."""

    wall: float = 0.0
    processor: float = 0.0

    @classmethod
    def by(cls, work: Callable[..., object], *given: object) -> "Spent":
        begun = time.perf_counter(), time.process_time()
        work(*given)
        return cls(time.perf_counter() - begun[0], time.process_time() - begun[1])

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.wall + other.wall, self.processor + other.processor)


def memory_of(args: argparse.Namespace) -> int:
    """Print the peak memory of a large model's calibration, and its ratio to one layer and one chunk."""
    settings = {name: getattr(args, name) for name in ("samples", "seq_len", "device", "dtype", "threads")}
    settings |= {"corpus": "demo", "recipes": tuple(args.recipe or ["aqua-2bit"])}
    found = memory({name: getattr(args, name) for name in LLAMA_70B}, settings, args.folder)
    for name, value in found.items():
        print(f"{name:16} {value}")
    if args.json:
        asked = {name: value for name, value in vars(args).items() if name not in ("work", "json")}
        args.json.write_text(json.dumps({"benchmark": "large_model", **asked, **found}) + "\n")
    return int(found["ratio"] > BOUND)


def memory(geometry: dict[str, int], settings: dict, folder: str | None = None) -> dict:
    """Peak memory of a calibration of such a model; `ratio` is to one layer and one chunk."""
    with (
        tempfile.TemporaryDirectory(dir=folder) as place,
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process,
    ):
        write(Path(place) / "model", geometry)
        write(Path(place) / "warm-up", geometry | {"num_hidden_layers": 1})
        return process.submit(_memory, Path(place), settings).result()


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
        shapes = {name: x.shape for name, x in AutoModelForCausalLM.from_config(config).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    files = {name: f"layer-{name.split('.')[2]}" if ".layers." in name else "rest" for name in shapes}
    for file in sorted(set(files.values())):
        weights = {name: _weight(shapes[name], generator) for name in files if files[name] == file}
        save_file(weights, folder / f"{file}.safetensors")
    index = {"metadata": {}, "weight_map": {name: f"{file}.safetensors" for name, file in files.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _weight(shape: torch.Size, generator: torch.Generator) -> Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, shape[1] ** -0.5, generator=generator)


def _memory(place: Path, settings: dict) -> dict:
    # so large a piece goes back to the system when it is freed: what is in use is counted, not what malloc keeps
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    alone = settings | {"publish": False, "evaluate": False, "checkpoint_every": 0}  # activations in files
    run(Job(model=str(place / "warm-up"), run=str(place / "warm"), **alone))
    if settings["device"] != "cpu":
        torch.cuda.reset_peak_memory_stats()
    job = Job(model=str(place / "model"), run=str(place / "run"), **alone)
    work = prepare(job)
    with _watched() as most:
        done, seconds = complete(job, work)
    peak = max(most) - most[0] if settings["device"] == "cpu" else torch.cuda.max_memory_allocated()
    needs = work.plan.needs(work.files)
    layer, chunk = needs["layer"], needs["chunk"]
    return {
        "layer": layer, "chunk": chunk, "peak": peak, "ratio": round(peak / (layer + chunk), 3),
        "tokens": work.plan.tokens, "layers": work.plan.geometry.layers,
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "sha256": [made.sha256 for made in done], "environment": work.plan.environment,
    }  # fmt: skip


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


def encode(args: argparse.Namespace) -> int:
    """Print a row a recipe: seconds of its fit, microseconds to encode and to decode a token."""
    torch.set_num_threads(1)
    files = models.resolve(args.model)
    recipes = recipe_text.distinct(recipe_text.read(text).check(files.geometry) for text in args.recipes)
    rows = encoding(files, recipes, args.samples, args.seq_len, args.rounds, args.fits, time.process_time)
    print_table(rows, json=False)
    if args.json:
        about = {"benchmark": "encoding", "model": files.id, "samples": args.samples, "length": args.seq_len}
        about |= {"torch": torch.__version__, "threads": 1}
        args.json.write_text("".join(json.dumps(about | row) + "\n" for row in rows))
    return 0


class TimedCache(FullCache):
    """A full encode of one pass, whose encoding and decoding are timed: `spent`, in seconds of the clock."""

    def __init__(
        self, recipe: Recipe, model: PreTrainedModel, tensors: Mapping[str, Tensor], length: int, clock: Clock
    ):
        if recipe.policies:
            raise ValueError(
                f"{recipe.name} chooses among tokens, or is fitted to its prompt; time recipes that do not"
            )
        super().__init__(recipe, model, tensors, length=length)
        self.clock, self.spent = clock, {"encode": 0.0, "decode": 0.0}

    def _encode(self, layer: int) -> Pair:
        begun = self.clock()
        self.blocks.encoder.flush(layer)
        encoded = self.clock()
        pair = self.blocks.decoder.whole(layer)
        self.spent["encode"] += encoded - begun
        self.spent["decode"] += self.clock() - encoded
        return pair

    def _count(self, *counted: Any, **more: Any) -> None:
        """Do not count what is read: nobody asks."""


def encoding(
    files: ModelFiles, recipes: Sequence[Recipe], samples: int, length: int, rounds: int, fits: int, clock: Clock
) -> list[dict[str, Any]]:
    """A row a recipe: of fit, encode and decode the median, least and greatest."""
    made: dict[str, tuple[Recipe, Mapping[str, Tensor]]] = {recipe.name: (recipe, {}) for recipe in recipes}
    times: dict[str, dict[str, list[float]]] = {}
    to_fit = [recipe for recipe in recipes if recipe.fitted]
    for _ in range(fits if to_fit else 0):
        settings = plan.make(files, to_fit, samples=samples, seq_len=length, threads=1)
        with tempfile.TemporaryDirectory() as folder, patch("time.perf_counter", clock):
            work = Run(settings, files, Path(folder))
            with checkpoint.claimed(work.folder):
                artifacts = calibrate.fit(work)
            spent = calibrate.seconds(work)
        for name, seconds in spent.items():
            times.setdefault(name, {}).setdefault("fit s", []).append(seconds)
        made |= {name: (one.recipe, one.tensors) for name, one in artifacts.items()}
    model = load_model(files)
    (tokens_T,) = corpus.select(files.entry.corpus, files.path, 1, length, 0, "held-out").tokens_BT.long()
    for turn in range(rounds + 1):
        for name, (recipe, tensors) in made.items():
            cache = TimedCache(recipe, model, tensors, length, clock)
            with attending(model, cache), torch.inference_mode():
                model(tokens_T[None], **{CACHE: cache}, use_cache=True, logits_to_keep=1)
            for what, spent in cache.spent.items():
                if turn:  # the first round warms up
                    times.setdefault(name, {}).setdefault(f"{what} us", []).append(1e6 * spent / length)
    kinds = {"": median, " least": min, " greatest": max}
    return [
        {"recipe": name} | {what + kind: of(some) for what, some in found.items() for kind, of in kinds.items()}
        for name, found in times.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
