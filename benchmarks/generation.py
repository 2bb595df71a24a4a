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
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import compiling, report
from benchmarks.caches import CONFIGS, Way, random_model, ways
from benchmarks.clock import Deadline
from benchmarks.jobs import Job
from benchmarks.lines import RESULTS, Line, attempt, gpu_name, keep, known, name_of, place
from benchmarks.steps import NEW, generate

COMPILE = 0.4  # of the time


def batches(text: str) -> Iterator[int]:
    """Those asked for; with "most", powers of two beyond them, without end."""
    asked = [int(n) for n in text.split(",") if n != "most"]
    yield from asked
    if "most" in text.split(","):
        yield from (2**n for n in range(11) if 2**n > max(asked, default=0))


def planned(given: argparse.Namespace) -> Iterator[tuple[str, int, Way]]:
    """(model, batch, way) of all that is asked for, in its order."""
    for name in given.models.split(","):
        for batch in batches(given.batches):
            for way in ways(given.recipes.split(","), given.device.startswith("cuda")):
                yield name, batch, way


def jobs(given: argparse.Namespace) -> list[Job]:
    """What is compiled before, of batches up to 64: larger ones are asked for to find out what fits."""
    return [
        Job("generate", name, way.cache, batch, prompt=given.prompt)
        for name, batch, way in planned(given)
        if way.attention == "kvq" and batch <= 64
    ]


def lines(given: argparse.Namespace, before: dict[tuple, Line]) -> Iterator[Line]:
    """A line of every cache, batch by batch; of one that is out of memory at a batch, no larger one."""
    deadline, gpu, model, full = Deadline(60 * given.minutes), given.device.startswith("cuda"), None, {}
    changed = {"num_hidden_layers": given.layers} if given.layers else {}
    if gpu:
        wanted, begun = jobs(given), time.monotonic()
        done = compiling.stage(wanted, deadline.part(COMPILE))
        yield compiling.summary(wanted, done, time.monotonic() - begun)
    for name, batch, way in planned(given):
        about = {"what": "generate", "model": name, "cache": way.cache, "graph": way.graph, "batch": batch}
        about |= {"prompt": given.prompt, "layers": given.layers or CONFIGS[name].num_hidden_layers}
        if full.get((name, way), batch) < batch or "error" not in before.get(name_of(about), {"error": ""}):
            continue
        if not deadline.left:
            yield {"what": "stopped", "why": "the time is over", "left": "at least 1"}
            return
        if model is None or model[0] != name:
            model = None  # before the next is made
            model = (name, random_model(name, given.device, **changed))
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        line = attempt(about, lambda: generate(model[1], way, batch, given.prompt, given.new))  # noqa: B023
        if line.get("out_of_memory"):
            full[name, way] = min(batch, full.get((name, way), batch))
        yield line


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
    parser.add_argument("--minutes", type=float, default=2.5, help="of the whole run")
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
