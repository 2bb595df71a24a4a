"""What calibration costs, against the model's own forward pass over the same tokens, in one run.

    python benchmarks/calibration.py --samples 96 --seq-len 1024 --recipe aqua-2bit

The plain pass is transformers' whole model, logits included, in the same dtype, threads and batches as the capture.
It is timed before and after the calibration, and the mean of both is the unit. The text is read and tokenized by
neither. Bound: the capture is one forward pass without the output head, so a ratio of 1 would be a free fit.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

from kvq_calib import checkpoint, models, plan, run
from kvq_calib.evaluate.record import load_model
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
    top.add_argument("--json", metavar="FILE")
    args = top.parse_args()
    files = models.resolve(args.model)
    recipes = tuple(preset(name) for name in args.recipe or ["aqua-2bit"])
    text = {"samples": args.samples, "seq_len": args.seq_len}
    made = plan.make(files, recipes, **text, dtype=args.dtype, threads=args.threads)
    with tempfile.TemporaryDirectory() as folder:
        work = run.Run(made, files, Path(folder))
        with checkpoint.claimed(work.folder):
            stream = run.start(work)
            plain = [_plain(work)]
            begun = time.perf_counter()
            for layer in range(made.geometry.layers):
                run.fit_layer(work, stream, layer)
            run.artifacts(work)
            wall = time.perf_counter() - begun
            plain.append(_plain(work))
        spent = run.seconds(work)
    unit = sum(plain) / 2
    rows = {"plain forward": unit, "calibration": wall} | spent
    print(f"{files.id}, {made.tokens} tokens, {made.dtype}, {made.threads} threads, chunks of {made.chunk} sequences")
    for name, seconds in rows.items():
        print(f"  {name:20} {seconds:8.2f} s {seconds / unit:8.2f} x")
    if args.json:
        about = {
            "benchmark": "calibration",
            "model": files.id,
            "tokens": made.tokens,
            "recipes": [r.name for r in recipes],
        }
        record = about | {"environment": made.environment, "seconds": rows, "ratio": wall / unit, "plain": plain}
        Path(args.json).write_text(json.dumps(record) + "\n")
    return 0


def _plain(work: run.Run) -> float:
    """Seconds of transformers' forward pass over the run's tokens, in the run's batches."""
    model = load_model(work.files, work.plan.device, getattr(torch, work.plan.dtype))
    generator = torch.Generator().manual_seed(0)
    shape = work.plan.samples, work.plan.seq_len
    tokens = torch.randint(work.files.vocabulary, shape, generator=generator)
    with torch.inference_mode():
        model(tokens[:1], use_cache=False)
        begun = time.perf_counter()
        for rows in work.plan.chunks:
            model(tokens[rows.start : rows.stop], use_cache=False)
        return time.perf_counter() - begun


if __name__ == "__main__":
    sys.exit(main())
