"""Time one decode step with each cache, as a ratio to transformers' own caches in the same run.

A step of generation reads the whole cache once. Every cache is filled with the same prompt; then the caches take turns,
16 tokens each: short enough for whatever else the machine does to fall on all of them alike, long enough for a cache to
find its own code in the processor's caches, as it does when it generates alone. (In turns of one token a cache that
follows one of another kind takes a tenth longer than one that follows its like.)

Every quantized cache here encodes once in 128 steps, so as many are timed. The mean is what tokens per second come
from, the median a step in which nothing is encoded. Ratios of both: to DynamicCache, and to the faster, by that
measure, of the two QuantizedCaches (2 bits, groups of 64, 128 recent tokens). Wall time, or (`--cpu`) time of the main
thread.

python benchmarks/decode.py [--recipes higgs-2bit,higgs-2bit/kvq] [--lengths 512,1024,2048,4096] [--json FILE]
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel

from kvq_calib.bench.contenders import quantized, random_tensors
from kvq_runtime.cli.table import print_table
from kvq_runtime.hf import KVQCache, geometry_of
from kvq_runtime.recipe import preset

DEMO = Path(__file__).parent.parent / "artifacts" / "demo-model"
PEERS = ("quanto-2bit", "hqq-2bit")
OURS = "/kvq"  # after a recipe's name: under our own attention, which reads packed codes
TURN = 16  # steps of one cache after another
Makers = dict[str, Callable[[], Cache]]


def makers(model: PreTrainedModel, recipes: list[str], artifacts: list[str]) -> Makers:
    """Every cache that takes part, by name."""

    def of_recipe(name: str) -> Callable[[], Cache]:
        recipe = preset(name.removesuffix(OURS))
        return lambda: KVQCache(recipe, model, random_tensors(recipe, geometry_of(model)) or None)

    def of_artifact(reference: str) -> Callable[[], Cache]:
        return lambda: KVQCache.from_pretrained(reference, model)

    return {
        "dynamic": lambda: DynamicCache(config=model.config),
        **{name: partial(quantized(name).make, model) for name in PEERS},
        **{name: of_recipe(name) for name in recipes},
        **{reference: of_artifact(reference) for reference in artifacts},
    }


@torch.inference_mode()
def measure(
    model: PreTrainedModel, made: Makers, length: int, steps: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of each step of each cache, `length` tokens after the first."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, model.config.vocab_size, (1, length + steps + 2), generator=generator)
    caches = {name: make() for name, make in made.items()}
    for cache in caches.values():
        model(ids[:, :length], past_key_values=cache, logits_to_keep=1)
    times: dict[str, list[float]] = {name: [] for name in caches}
    for first in range(length, length + steps + 2, TURN):
        for name, cache in caches.items():
            model.set_attn_implementation("kvq" if name.endswith(OURS) else "sdpa")
            for step in range(first, min(first + TURN, length + steps + 2)):
                start = clock()
                model(ids[:, step : step + 1], past_key_values=cache)
                times[name].append(clock() - start)
    return {name: found[2:] for name, found in times.items()}  # two to warm up


def rows(length: int, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """One row for each cache: mean and median of all steps, and their ratios to the stock caches of the same run."""
    out: dict[str, dict[str, Any]] = {name: {"tokens": length, "cache": name} for name in times}
    for measured, of in (("mean", fmean), ("median", median)):
        seconds = {name: of(found) for name, found in times.items()}
        peer = min(seconds[name] for name in PEERS)
        for name, row in out.items():
            row[f"{measured}_ms"] = 1e3 * seconds[name]
            row[f"{measured}_over_dynamic"] = seconds[name] / seconds["dynamic"]
            row[f"{measured}_over_quantized"] = seconds[name] / peer
    return list(out.values())


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEMO), help="a folder or a Hub id (default: the embedded model)")
    usual = "rtn-2bit/kvq,higgs-2bit/kvq,aqua-2bit/kvq"
    parser.add_argument("--recipes", default=usual, help="timed with random tensors where fitted")
    parser.add_argument("--artifact", action="append", default=[], help="a reference to a published artifact")
    parser.add_argument("--lengths", default="512,1024,2048,4096", help="tokens in the cache")
    parser.add_argument("--steps", type=int, default=128, help="steps of each cache at each length")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu", action="store_true", help="one thread, its own time: for a busy machine")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", type=Path, help="write the rows to this file, one JSON object each")
    given = parser.parse_args(arguments)
    given.threads = 1 if given.cpu else given.threads
    torch.set_num_threads(given.threads)
    clock = time.thread_time if given.cpu else time.perf_counter
    source = str(DEMO) if given.model == "demo" else given.model
    model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, given.dtype)).eval()
    made = makers(model, [name for name in given.recipes.split(",") if name], given.artifact)
    found = []
    for length in (int(text) for text in given.lengths.split(",")):
        found += rows(length, measure(model, made, length, given.steps, clock))
    about = {"machine": platform.machine(), "torch": torch.__version__}
    about |= {"threads": given.threads, "dtype": given.dtype, "cpu": given.cpu}
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text("".join(json.dumps(row | about) + "\n" for row in found))
    print_table(found, json=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
