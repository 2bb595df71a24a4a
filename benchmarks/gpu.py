"""Measure the kernels on a GPU: attention over packed blocks against the fastest 16-bit attention of PyTorch.

In this order, each stage and case only while there is time, the most telling cases first:

device    rates of this device, measured now: copy, read, matrix product, the shortest time that can be measured
attend    a decode step, keys and values of one layer: microseconds with quartiles, GB/s and the share of the bandwidth,
          beside PyTorch's attention backends at the same shape in the same run, timed in the same way (clock.py)
profile   of a few cases: microseconds of each kernel of a step, by PyTorch's profiler
encode    GB/s of bfloat16 read by what encodes 64 blocks, of recipes without fitted stages

A line of JSON for each result is added to benchmarks/results/gpu-<device>.jsonl, or to $OUT if that is set. A line says
which code it is of (`of`): a second run of the same code does what is missing or failed, unless --again. A case that
fails is a line with its error, and the rest goes on. The first launch of a case compiles its kernels.

Times are those of one layer's attention. The number of splits is what the product takes for models of 131072 tokens.

python -m benchmarks.gpu [--only attend] [--lengths 2048,...] [--batches 1,8,64] [--minutes 10] [--out FILE] [--again]
python -m benchmarks.gpu --dry-run: shapes and bytes of every case, in their order, on any machine
"""

import argparse
import hashlib
import itertools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import BATCHES, FAMILIES, LENGTHS, MODELS, Case, Model, built, cases, encoder, queries, row
from benchmarks.clock import Rates, Timing, evict, rates, timed
from kvq_runtime.recipe import preset

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CUDA = torch.device("cuda")
STAGES = ("attend", "profile", "encode")
PROFILED = ("kivi-2bit-g128", "rtn-2bit", "higgs-head-2bit")  # at the first shape
BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
NAMES = ("what", "model", "recipe", "half", "tokens", "batch")  # two lines with the same of these are of one thing
COLUMNS = ("recipe", "batch", "tokens", "µs (quartiles)", "GB/s", "of bandwidth", "fastest 16 bit", "speed-up")
Line = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A line of results to come: `about`, without what is measured, and what measures the rest."""

    about: Line
    measure: Callable[[], Line]


class Attention:
    """Time cases beside PyTorch's backends at their shape, which are timed once in a run."""

    def __init__(self, measured: Rates):
        self.rates = measured
        self.baselines: dict[tuple[str, int, int], dict[str, Timing | str]] = {}

    def measure(self, case: Case) -> Line:
        """The line of a case."""
        shape = (case.model.name, case.tokens, case.batch)
        if shape not in self.baselines:
            self.baselines[shape] = baselines(case)
        theirs = self.baselines[shape]
        step, q = built(case, CUDA), queries(case, CUDA)
        took = timed(lambda: step(q))
        read = case.packed() + case.exact()
        least = 1e6 * read / self.rates.bandwidth
        ran = {name: timing.median for name, timing in theirs.items() if isinstance(timing, Timing)}
        best = min(ran, key=ran.__getitem__, default=None)
        found = took.row() | {"gb_per_s": round(read / took.median / 1e3, 1),
                              "bandwidth_share": round(least / took.median, 3), "baseline": best}  # fmt: skip
        if best is not None:
            share = 1e6 * case.dense() / self.rates.bandwidth / ran[best]
            found |= {"baseline_microseconds": round(ran[best], 1), "baseline_share": round(share, 3),
                      "speed_up": round(ran[best] / took.median, 2)}  # fmt: skip
        rows = {name: timing.row() if isinstance(timing, Timing) else timing for name, timing in theirs.items()}
        return found | {"baselines": rows}


def baselines(case: Case) -> dict[str, Timing | str]:
    """Time scaled_dot_product_attention over bfloat16, by backend; the error of those that refuse.

    In two forms: with enable_gqa, and "rows", the query heads of a KV head as rows of one query, which may be faster.
    PyTorch's math backend is left out: it copies keys and values for every query head.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model, found = case.model, dict[str, Timing | str]()
    shape = (case.batch, model.kv_heads, case.tokens, model.head_size)
    k, v = (torch.randn(shape, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    q = queries(case, CUDA)
    rows = q.view(case.batch, model.kv_heads, -1, model.head_size)
    for name, backend in BACKENDS.items():
        for form, query, settings in ((name, q, {"enable_gqa": True}), (f"{name} rows", rows, {})):

            def call(query: Tensor = query, settings: dict = settings, backend: str = backend) -> Tensor:
                with sdpa_kernel(getattr(SDPBackend, backend)):
                    return torch.nn.functional.scaled_dot_product_attention(query, k, v, **settings)

            with warnings.catch_warnings(action="ignore"):  # each reason for a refusal; the error has it too
                try:
                    found[form] = timed(call)
                except RuntimeError as error:
                    found[form] = f"{type(error).__name__}: {error}"[:120]
    return found


def profile(case: Case) -> Line:
    """Measure where a case's time goes: microseconds of each kernel of a step, from cold caches."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    step, q, repeats = built(case, CUDA), queries(case, CUDA), 10
    found: list[dict[str, float]] = []
    for call in (lambda: None, lambda: step(q)):
        call()
        with watch(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(repeats):
                evict()
                call()
            torch.cuda.synchronize()
        found.append({event.key: event.self_device_time_total / repeats for event in seen.key_averages()})
    evicting, both = found
    return {"kernels": {name: round(took, 1) for name, took in both.items() if took and name not in evicting}}


def encode(model: Model, recipe: str, role: str) -> Line:
    """Encode 64 blocks of one layer's keys or values."""
    call, read = encoder(model, recipe, role, CUDA)
    took = timed(call)
    return took.row() | {"gb_per_s": round(read / took.median / 1e3, 1)}


def listed(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def stages(text: str) -> str:
    """Check names of stages, with commas."""
    unknown = [name for name in listed(text) if name not in STAGES]
    if unknown:
        raise argparse.ArgumentTypeError(f"no stage {', '.join(unknown)}; allowed are {', '.join(STAGES)}")
    return text


def chosen(given: argparse.Namespace) -> list[Case]:
    """The decode steps that the command line asks for."""
    lengths, batches = (list(map(int, listed(text))) for text in (given.lengths, given.batches))
    return list(cases(listed(given.models), listed(given.recipes), lengths, batches))


def tasks(given: argparse.Namespace, attention: Attention) -> list[Task]:
    """All tasks that the command line asks for, the most telling first.

    The first shape of the first model, where its time goes, its other shapes, what encodes, then the other models.
    """
    steps, wanted = chosen(given), listed(given.only)
    shapes = [(case.model, case.tokens, case.batch) for case in steps]
    first, own = (sum(shape[:n] == shapes[0][:n] for shape in shapes) for n in (3, 1))
    attends = [Task(row(case), lambda case=case: attention.measure(case)) for case in steps]
    profiles = [
        Task(row(case) | {"what": "profile"}, lambda case=case: profile(case))
        for case in steps[:first] if case.recipe in PROFILED
    ]  # fmt: skip
    found = [*attends[:first], *profiles, *attends[first:own], *encodes(given), *attends[own:]]
    return [task for task in found if task.about["what"] in wanted]


def encodes(given: argparse.Namespace) -> Iterator[Task]:
    """Cases of encoding keys and values, of recipes without fitted stages."""
    models = [model for model in MODELS if model.name in listed(given.models)]
    plain = [recipe for recipe in listed(given.recipes) if not preset(recipe).fitted]
    for model, recipe, role in itertools.product(models, plain, ("key", "value")):
        about = {"what": "encode", "model": model.name, "recipe": recipe, "half": role}
        yield Task(about, lambda each=(model, recipe, role): encode(*each))


def lines(given: argparse.Namespace, before: dict[tuple, Line]) -> Iterator[Line]:
    """Every result, as it comes, until the time is over, or until the device answers nothing any more.

    before   lines of this code, by name, which are not measured again unless they failed
    """
    end, measured = time.monotonic() + 60 * given.minutes, rates()
    yield measured.row()
    every = tasks(given, Attention(measured))
    failed = [task for task in every if "error" in before.get(name_of(task.about), {})]
    left = [task for task in every if name_of(task.about) not in before] + failed
    for i, task in enumerate(left):
        if time.monotonic() > end:
            yield {"what": "stopped", "why": "the time is over", "left": len(left) - i}
            return
        torch.cuda.empty_cache()
        try:
            yield task.about | task.measure()
        except torch.OutOfMemoryError:
            yield task.about | {"out_of_memory": True}
        except Exception as error:  # a driver's, a compiler's, torch's: types vary, and the other cases are worth it
            yield task.about | {"error": f"{type(error).__name__}: {error}"[:400]}
            if not usable():
                yield {"what": "stopped", "why": "the device answers nothing after an error", "left": len(left) - i - 1}
                return


def usable() -> bool:
    """True if the device can be used after an error: a bad access of memory ends its use in this process."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


# ---- results


@lru_cache(maxsize=1)
def measured_code() -> str:
    """The code that is measured, as 12 digits: the runtime's sources, and versions of what compiles and runs them."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "kvq_runtime").rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    for name in ("torch", "triton"):
        digest.update(f"{name} {metadata.version(name)}".encode())
    return digest.hexdigest()[:12]


def name_of(line: Line) -> tuple:
    return tuple(line.get(name) for name in NAMES)


def known(*files: Path) -> dict[tuple, Line]:
    """Lines of the code as it is that were found before, by name, the latest of each."""
    read = [json.loads(text) for file in files if file.exists() for text in file.read_text().splitlines()]
    return {name_of(line): line for line in read if line.get("of") == measured_code()}


def keep(found: Iterable[Line], out: Path) -> list[Line]:
    """Print each line as it comes, and add it to a file, marked with the code it is of."""
    kept = []
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        for line in found:
            kept.append(line | {"of": measured_code()})
            print(json.dumps(kept[-1]), flush=True)
            file.write(json.dumps(kept[-1]) + "\n")
            file.flush()
    return kept


def page(found: Iterable[Line]) -> Iterator[str]:
    """The failures, then a Markdown table of attention for each model."""
    latest = list({name_of(line): line for line in found}.values())
    for line in latest:
        if line["what"] == "stopped":
            yield f"stopped: {line['why']}; {line['left']} left: run it again"
        elif "error" in line:
            yield f"FAILED: {' '.join(str(part) for part in name_of(line) if part is not None)}: {line['error']}"
    attended = [line for line in latest if line["what"] == "attend" and "microseconds" in line]
    for model in dict.fromkeys(line["model"] for line in attended):
        yield f"\n{model}\n\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
        for line in attended:
            if line["model"] == model:
                took = f"{line['microseconds']} ({line['low']} to {line['high']})"
                best = f"{line['baseline']}: {line.get('baseline_microseconds')} µs"
                cells = (line["recipe"], line["batch"], line["tokens"], took, round(line["gb_per_s"]),
                         f"{line['bandwidth_share']:.0%}", best, line.get("speed_up"))  # fmt: skip
                yield f"| {' | '.join(map(str, cells))} |"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=stages, default=",".join(STAGES))
    parser.add_argument("--models", default=",".join(model.name for model in MODELS))
    parser.add_argument("--recipes", default=",".join(FAMILIES))
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--minutes", type=float, default=10, help="of the whole run")
    parser.add_argument("--out", type=Path, help="JSON lines, by default as above")
    parser.add_argument("--again", action="store_true", help="measure what was measured before, too")
    parser.add_argument("--dry-run", action="store_true", help="print the cases and their bytes, run nothing")
    given = parser.parse_args(arguments)
    if given.dry_run:
        for case in chosen(given):
            print(json.dumps(row(case)))
        return 0
    if not torch.cuda.is_available():
        print("no CUDA device; --dry-run prints what would be measured", file=sys.stderr)
        return 1
    device = torch.cuda.get_device_name().lower().replace(" ", "-")
    out = given.out or Path(os.environ.get("OUT") or RESULTS) / f"gpu-{device}.jsonl"
    before = known(RESULTS / out.name, out)
    found = keep(lines(given, {} if given.again else before), out)
    print("\n".join(page([*before.values(), *found])), file=sys.stderr)
    return int(any("error" in line for line in found))


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    sys.exit(main())
