"""What calibration costs, against the model's own forward pass over the same tokens, in one run.

    python benchmarks/calibration.py --samples 96 --seq-len 1024 --recipe aqua-2bit

The plain pass is transformers' whole model, logits included, in the same dtype, threads and batches as the capture.
It takes turns with the calibration: after each layer, the next few chunks. The text is read and tokenized by neither;
gradients and a draft, where a recipe asks for them, count.
Bound: the capture is one forward pass without the last layer's attention and MLP and without the output head.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kvq_calib.evaluate.record import load_model
from kvq_calib.model import find as models
from kvq_calib.run import budget, calibrate, checkpoint, plan
from kvq_calib.run.activations import InFiles, InMemory
from kvq_calib.run.run import Run
from kvq_runtime.recipe import preset


def main() -> int:
    """Print a table, or write it with --json."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--model", default="demo")
    top.add_argument("--recipe", action="append")
    top.add_argument("--samples", type=int, default=96)
    top.add_argument("--seq-len", type=int, default=1024)
    top.add_argument("--threads", type=int, default=torch.get_num_threads())
    top.add_argument("--dtype", choices=("float32", "bfloat16"))
    top.add_argument("--files", action="store_true", help="activations in files, as with --checkpoint-every 0s")
    top.add_argument("--json", metavar="FILE")
    args = top.parse_args()
    files = models.resolve(args.model)
    recipes = tuple(preset(name) for name in args.recipe or ["aqua-2bit"])
    text = {"samples": args.samples, "seq_len": args.seq_len}
    made = plan.make(files, recipes, **text, dtype=args.dtype, threads=args.threads)
    with tempfile.TemporaryDirectory() as folder:
        held = InFiles() if args.files else InMemory()
        work = Run(made, files, Path(folder), activations=held)
        with checkpoint.claimed(work.folder):
            calibrate.start(work)
            plain, layers, unit = Plain(work), made.geometry.layers, 0.0
            wall = sum((checkpoint.record(work.folder, -1) or {})["seconds"].values())  # of gradients
            for part in budget.rounds(work):
                stream = calibrate.start(part)
                for layer in range(layers):
                    wall += _seconds(calibrate.fit_layer, part, stream, layer)
                    if not part.plan.draft:
                        unit += _seconds(plain.forward, layer, layers)
            wall += _seconds(calibrate.artifacts, work)
        spent = calibrate.seconds(work)
    rows = {"plain forward": unit, "calibration": wall} | spent
    print(f"{files.id}, {made.tokens} tokens, {made.dtype}, {made.threads} threads, chunks of {made.chunk} sequences")
    for name, seconds in rows.items():
        print(f"  {name:20} {seconds:8.2f} s {seconds / unit:8.2f} x")
    if args.json:
        about = {
            "benchmark": "calibration",
            "activations_in": "files" if args.files else "memory",
            "model": files.id,
            "tokens": made.tokens,
            "recipes": [r.name for r in recipes],
        }
        record = about | {"environment": made.environment, "seconds": rows, "ratio": wall / unit}
        Path(args.json).write_text(json.dumps(record) + "\n")
    return 0


class Plain:
    """transformers' model, and tokens of the run's batches."""

    def __init__(self, work: Run):
        plan = work.plan
        self.model = load_model(work.files, plan.device, getattr(torch, plan.dtype))
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


def _seconds(work: Callable[..., object], *given: object) -> float:
    begun = time.perf_counter()
    work(*given)
    return time.perf_counter() - begun


if __name__ == "__main__":
    sys.exit(main())
