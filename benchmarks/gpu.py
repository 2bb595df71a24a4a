"""Measure the kernels on a GPU: attention over packed blocks against the fastest bfloat16 attention there is.

In this order, each stage and case only while there is time, the most telling cases first:

device    rates of this device, measured now: copy, read, matrix product, the shortest time that can be measured
parity    the tests that compare the kernels with torch, in all cores; what fails is told first
compile   all that follows is compiled, in all cores, before anything is timed
attend    a decode step, keys and values of one layer: microseconds with quartiles, GB/s and the share of the bandwidth,
          beside every baseline of baselines.py at the same shape in the same run, timed in the same way (clock.py)
profile   of a few cases: microseconds of each kernel of a step, by PyTorch's profiler
counters  of the same: the hardware's counters, where Nsight Compute's `ncu` is on the PATH
encode    GB/s of bfloat16 read by what encodes 64 blocks, of recipes without fitted stages
sweep     only if asked for: launch settings, the default, then what is ever less like it; --write stores the fastest
          in kvq_runtime/kernels/attend/launch.json

A line of JSON for each result is added to benchmarks/results/gpu-<device>.jsonl, or to $OUT if that is set; a second
run does what is missing or failed, unless --again. A case that fails is a line with its error, and the rest goes on.

Times are those of one layer's attention. The number of splits is what the product takes for models of 131072 tokens.

python -m benchmarks.gpu [--only attend] [--lengths 2048,...] [--batches 1,8,64] [--minutes 5.2] [--out FILE] [--again]
python -m benchmarks.gpu --dry-run: shapes and bytes of every case, in their order, on any machine
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from benchmarks import counters, report, settings
from benchmarks.cases import BATCHES, FAMILIES, LENGTHS, MODELS, Case, built, queries, row
from benchmarks.clock import Deadline
from benchmarks.lines import RESULTS, gpu_name, keep, known, place
from benchmarks.run import chosen, lines, listed


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="parity,attend,profile,counters,encode", help="of these, and sweep")
    parser.add_argument("--models", default=",".join(model.name for model in MODELS))
    parser.add_argument("--recipes", default=",".join(FAMILIES))
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--minutes", type=float, default=5.2, help="of the whole run")
    parser.add_argument("--out", type=Path, help="JSON lines, by default as above")
    parser.add_argument("--again", action="store_true", help="measure what was measured before, too")
    parser.add_argument("--settings", type=int, default=12, help="of sweep: launch settings of a recipe")
    parser.add_argument("--write", action="store_true", help="of sweep: store the fastest")
    parser.add_argument("--dry-run", action="store_true", help="print the cases and their bytes, run nothing")
    parser.add_argument("--once", metavar="MODEL,RECIPE,TOKENS,BATCH", help="launch a case a few times, for a profiler")
    return parser.parse_args(given)


def once(text: str) -> None:
    """Launch one case a few times, for a profiler to look at."""
    name, recipe, tokens, batch = text.split(",")
    case = Case(next(model for model in MODELS if model.name == name), recipe, int(tokens), int(batch))
    step, q = built(case, torch.device("cuda")), queries(case, torch.device("cuda"))
    for _ in range(counters.WARM + 1):
        step(q)
    torch.cuda.synchronize()


def main(arguments_given: list[str] | None = None) -> int:
    given = arguments(arguments_given)
    if given.dry_run:
        for case in chosen(given):
            print(json.dumps(row(case)))
        return 0
    if not torch.cuda.is_available():
        print("no CUDA device; --dry-run prints what would be measured", file=sys.stderr)
        return 1
    if given.once:
        once(given.once)
        return 0
    out = given.out or place("gpu", gpu_name())
    before = known(RESULTS / out.name, out)
    if "sweep" in listed(given.only):
        steps = [Case(MODELS[0], recipe, 32768, 8) for recipe in listed(given.recipes)]
        keep(settings.swept(steps, Deadline(60 * given.minutes), given.settings, given.write), out)
        return 0
    found = keep(lines(given, {} if given.again else before), out)
    print("\n".join(report.page([*before.values(), *found])), file=sys.stderr)
    return int(any(not line["good"] for line in found if line["what"] == "parity"))


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    sys.exit(main())
