"""Generate with a model of random weights: time of a step and peak memory, kvq against 16-bit caches of transformers.

A prompt of one row of random tokens is taken in, in one pass; the cache is repeated for a batch; then 128 tokens are
generated greedily, one forward pass each, in which a block of every row is encoded once. Caches:

dynamic           DynamicCache, eager: it copies its history at every step
static            StaticCache, as a CUDA graph: masked attention over the whole buffer, as transformers does it
static unmasked   StaticCache, as a CUDA graph, without the mask: as fast as PyTorch's attention is over as many tokens.
                  The buffer has room for a few tokens that are not there yet, and attends to them: what it generates is
                  not to be used. It is the bar for a 16-bit cache
a recipe          KVQCache under "kvq" attention, eager, and as a CUDA graph where the recipe can

Time is that of the generated tokens: the steps' median and quartiles, the worst (where a block is encoded), and tokens
per second of all. Memory is what was allocated at the most, weights included, and what the cache holds at the end.
Batches: those asked for, and with "most" the largest power of two that fits. On a GPU all kernels are compiled before,
in all cores. Results are added to benchmarks/results/generation-<device>.jsonl, or to $OUT, and not measured again.

python -m benchmarks.generation [--models llama-3.1-8b] [--recipes kivi-2bit-g128] [--prompt 16384] [--batches 8,1,most]
python -m benchmarks.generation --device cpu --layers 2 --prompt 256 --batches 1: the same, small, on any machine
"""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks import compiling, report
from benchmarks.caches import CONFIGS, Way, random_model, ways
from benchmarks.clock import Deadline
from benchmarks.jobs import Job
from benchmarks.lines import RESULTS, Line, attempt, gpu_name, keep, known, name_of, place
from benchmarks.run import LOST, usable
from benchmarks.steps import NEW, generate, warm

COMPILE = 0.4  # of the time


def batches(text: str) -> Iterator[int]:
    """Those asked for; with "most", powers of two beyond them, without end."""
    asked = [int(n) for n in text.split(",") if n != "most"]
    yield from asked
    if "most" in text.split(","):
        yield from (2**n for n in range(11) if 2**n > max(asked, default=0))


def planned(given: argparse.Namespace, before: dict[tuple, Line]) -> list[tuple[Line, Way]]:
    """(the line to come, way) of all that is asked for and was not measured before, in its order."""
    gpu, found = given.device.startswith("cuda"), []
    for name, batch in itertools.product(given.models.split(","), batches(given.batches)):
        for way in ways(given.recipes.split(","), gpu):
            layers = given.layers or CONFIGS[name].num_hidden_layers
            about = {"what": "generate", "model": name, "cache": way.cache, "graph": way.graph, "batch": batch}
            about |= {"prompt": given.prompt, "layers": layers}
            if "error" in before.get(name_of(about), {"error": "never tried"}):
                found.append((about, way))
    return found


def jobs(found: list[tuple[Line, Way]]) -> list[Job]:
    """What is compiled before, of batches up to 64: larger ones are asked for to find out what fits."""
    return [
        Job("generate", about["model"], way.cache, about["batch"], prompt=about["prompt"])
        for about, way in found
        if way.attention == "kvq" and about["batch"] <= 64
    ]


def lines(given: argparse.Namespace, before: dict[tuple, Line]) -> Iterator[Line]:
    """A line of every cache, batch by batch; of one that is out of memory at a batch, no larger one."""
    deadline, gpu, found = Deadline(60 * given.minutes), given.device.startswith("cuda"), planned(given, before)
    wanted, begun = jobs(found), time.monotonic()
    if gpu and wanted:
        done = compiling.stage(wanted, deadline.part(COMPILE))
        yield compiling.summary(wanted, done, time.monotonic() - begun)
    name, model, full = "", None, {}
    for i, (about, way) in enumerate(found):
        if about["batch"] > full.get((about["model"], way), about["batch"]):
            continue
        if not deadline.left:
            yield {"what": "stopped", "why": "the time is over", "left": len(found) - i}
            return
        if about["model"] != name:
            model, name = None, about["model"]  # the last is forgotten before the next is made
            model = random_model(name, given.device, num_hidden_layers=about["layers"])
            warm(model, given.prompt)
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        measure = partial(generate, model, way, about["batch"], given.prompt, given.new)
        line = attempt(about, compiling.alone(measure) if gpu else measure)
        yield line
        if line.get("out_of_memory"):
            full[name, way] = about["batch"]
        if gpu and "error" in line and not usable():
            yield {"what": "stopped", "why": LOST, "left": len(found) - i - 1}
            return


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama-3.1-8b", help="of " + ", ".join(CONFIGS))
    parser.add_argument("--recipes", default="kivi-2bit-g128,rtn-4bit", help="which need no calibration")
    parser.add_argument("--prompt", type=int, default=16384, help="tokens of a row's prompt")
    parser.add_argument("--new", type=int, default=NEW, help="tokens generated in a row")
    parser.add_argument("--batches", default="8,1,32", help='numbers of rows, and "most"')
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--minutes", type=float, default=2.3, help="of the whole run")
    parser.add_argument("--out", type=Path, help="JSON lines, by default as above")
    parser.add_argument("--again", action="store_true", help="measure what was measured before, too")
    return parser.parse_args(given)


def main(arguments_given: list[str] | None = None) -> int:
    """Measure, print JSON lines and keep them."""
    given = arguments(arguments_given)
    on_gpu = given.device.startswith("cuda")
    if on_gpu and not torch.cuda.is_available():
        print("no CUDA device; --device cpu --layers 2 --prompt 256 --batches 1 runs anywhere", file=sys.stderr)
        return 1
    if not on_gpu and "most" in given.batches:
        print('--batches with "most" needs a GPU, whose memory is the bound; give numbers', file=sys.stderr)
        return 2
    out = given.out or place("generation", gpu_name() if on_gpu else "cpu")
    before = {} if given.again else known(RESULTS / out.name, out)
    found = keep(lines(given, before), out)
    print("\n".join(report.page([*before.values(), *found])), file=sys.stderr)
    return 0


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    sys.exit(main())
