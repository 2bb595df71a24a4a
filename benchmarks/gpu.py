"""Measure the kernels on a GPU: attention over packed blocks against the fastest bfloat16 attention there is.

In this order, each stage and case only while there is time, the most telling cases first:

device    rates of this device, measured now: copy, read, matrix product, the shortest time that can be measured
parity    the tests that compare the kernels with torch, in all cores; what fails is told first:
          every family against softmax on the decoded blocks, keys before RoPE, means, captured graphs against eager
compile   all that follows is compiled, in all cores, before anything is timed
attend    a decode step, keys and values of one layer: microseconds with quartiles, GB/s and the share of the bandwidth,
          beside every baseline of baselines.py at the same shape in the same run, timed in the same way (clock.py)
profile   of a few cases: microseconds of each kernel of a step, by PyTorch's profiler
encode    GB/s of bfloat16 read by what encodes 64 blocks, of recipes without fitted stages

A line of JSON for each result is added to benchmarks/results/gpu-<device>.jsonl, or to $OUT if that is set; a second
run does what is missing or failed, unless --again. A case that fails is a line with its error, and the rest goes on.

Times are those of one layer's attention. The number of splits is what the product takes for models of 131072 tokens.

python -m benchmarks.gpu [--only attend] [--lengths 2048,...] [--batches 1,8,64] [--minutes 5.2] [--out FILE] [--again]
python -m benchmarks.gpu --dry-run: shapes and bytes of every case, in their order, on any machine
"""

import argparse
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import compiling, measure, report
from benchmarks.cases import BATCHES, FAMILIES, LENGTHS, MODELS, Case, Model, cases, row
from benchmarks.clock import Deadline, rates
from benchmarks.compiling import Job, job_of
from benchmarks.report import RESULTS, ROOT, Line, attempt, gpu_name, keep, known, name_of, place
from kvq_runtime.recipe import preset

STAGES = ("parity", "attend", "profile", "encode")
PARITY, COMPILE = 0.35, 0.5  # shares of the time that is left when these begin
PROFILED = ("kivi-2bit-g128", "rtn-2bit", "higgs-head-2bit")  # at the first shape
PARITY_NAME = name_of({"what": "parity"})
FILES = ("tests/kernels/test_attention_kernel.py", "tests/kernels/test_recorded_step.py")
CHOSEN = "families or before_rope or means or one_graph"
PYTEST = "[pytest]\nmarkers =\n    gpu\n    slow\n    all_recipes\nxfail_strict = true\n"
ENDED = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b (\S+::\S+.*)|^(\S+::\S+.*?) (PASSED|FAILED|ERROR|SKIPPED)\b")
WRONG = ("FAILED", "ERROR")


@dataclass(frozen=True)
class Task:
    """A line of results to come.

    about     the line, without what is measured
    jobs      what is compiled before: first what is measured, without which nothing is, then what it is compared with
    measure   makes the rest of the line; it raises where that cannot be done
    """

    about: Line
    jobs: tuple[Job, ...]
    measure: Callable[[], Line]


def listed(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def stages(text: str) -> str:
    """Names of stages, with commas, if there are such."""
    unknown = [one for one in listed(text) if one not in STAGES]
    if unknown:
        raise argparse.ArgumentTypeError(f"no stage {', '.join(unknown)}; allowed are {', '.join(STAGES)}")
    return text


def chosen(given: argparse.Namespace) -> list[Case]:
    """The decode steps that the command line asks for."""
    lengths, batches = (list(map(int, listed(text))) for text in (given.lengths, given.batches))
    return list(cases(listed(given.models), listed(given.recipes), lengths, batches))


def tasks(given: argparse.Namespace, attention: measure.Attention) -> list[Task]:
    """All that the command line asks for, the most telling first.

    The first shape of the first model, where its time goes, its other shapes, what encodes, then the other models.
    """
    steps, wanted = chosen(given), listed(given.only)

    def of(case: Case, what: str, measured: Callable[[], Line]) -> Task:
        pages = (Job("paged", case.model.name, batch=case.batch),) if what == "attend" else ()
        return Task(row(case) | {"what": what}, (job_of(case), *pages), measured)

    attends = [of(case, "attend", lambda c=case: attention.measure(c)) for case in steps]
    shapes = [(case.model, case.tokens, case.batch) for case in steps]
    first, own = (sum(shape[:n] == shapes[0][:n] for shape in shapes) for n in (3, 1))
    few = [case for case in steps[:first] if case.recipe in PROFILED]
    profiles = [of(case, "profile", lambda c=case: measure.profile(c)) for case in few]
    found = [*attends[:first], *profiles, *attends[first:own], *encodes(given), *attends[own:]]
    return [task for task in found if task.about["what"] in wanted]


def encodes(given: argparse.Namespace) -> list[Task]:
    """Cases of encoding keys and values, of recipes without fitted stages."""
    models = [model for model in MODELS if model.name in listed(given.models)]
    plain = [recipe for recipe in listed(given.recipes) if not preset(recipe).fitted]

    def of(model: Model, recipe: str, role: str) -> Task:
        about = {"what": "encode", "model": model.name, "recipe": recipe, "half": role}
        job = Job("encode", model.name, recipe, role=role)
        return Task(about, (job,), lambda: measure.encode(model, recipe, role))

    return [of(*each) for each in itertools.product(models, plain, ("key", "value"))]


def missing(found: list[Task], before: dict[tuple, Line]) -> list[Task]:
    """Return the cases that were not measured before: first those never tried, then those that failed."""
    known = [(task, before.get(name_of(task.about))) for task in found]
    failed = [task for task, line in known if line is not None and "error" in line]
    return [task for task, line in known if line is None] + failed


def jobs_of(found: list[Task]) -> list[Job]:
    """Return the kernels to compile for these, each once, in the order in which they are wanted."""
    return list(dict.fromkeys(job for task in found for job in task.jobs))


def lines(given: argparse.Namespace, before: dict[tuple, Line]) -> Iterator[Line]:
    """Every result, as it comes.

    before   what is known already, by name, and is not measured again
    """
    deadline, measured = Deadline(60 * given.minutes), rates()
    yield measured.row()
    if "parity" in listed(given.only) and not before.get(PARITY_NAME, {}).get("good"):
        yield parity(deadline.part(PARITY))
    found = missing(tasks(given, measure.Attention(measured)), before)
    jobs = jobs_of(found)
    if not jobs:
        return
    done, line = compiling.stage(jobs, deadline.part(COMPILE))
    yield line
    own = [(task, done[task.jobs[0]]) for task in found if task.jobs[0] in done]
    yield from (task.about | {"error": f"not compiled: {end.error}"} for task, end in own if end.error)
    yield from each([task for task, end in own if not end.error], deadline)


def each(
    found: list[Task],
    deadline: Deadline,
    gpu: bool = True,
    skipped: Callable[[Line], bool] = lambda about: False,
    prepare: Callable[[Line], object] = lambda about: None,
) -> Iterator[Line]:
    """A line of each that is not skipped, until the deadline, or until the device answers nothing any more.

    prepare   comes before a measurement and is no part of it: its errors end the run
    """
    for i, task in enumerate(found):
        if skipped(task.about):
            continue
        if not deadline.left:
            yield {"what": "stopped", "why": "the time is over", "left": len(found) - i}
            return
        prepare(task.about)
        if gpu:
            torch.cuda.empty_cache()
        line = attempt(task.about, compiling.alone(task.measure) if gpu else task.measure)
        yield line
        if gpu and "error" in line and not usable():
            yield {"what": "stopped", "why": "the device answers nothing after an error", "left": len(found) - i - 1}
            return


def usable() -> bool:
    """True if the device can be used after an error: a bad access of memory ends its use in this process."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def parity(deadline: Deadline) -> Line:
    """The line of the tests that compare the kernels with torch, in as many processes as there are cores."""
    with tempfile.TemporaryDirectory() as folder:
        return parity_run(parity_command(Path(folder), min(os.cpu_count() or 1, compiling.MOST)), deadline)


def pytest_runtest_setup(item: Any) -> None:
    """As a plugin of pytest: let a test draw the same numbers whatever tests were there before it."""
    torch.manual_seed(0)


def parity_command(folder: Path, processes: int) -> list[str]:
    """The command of pytest; its settings are written to the folder.

    Without tests/conftest.py, which wants packages that only a development environment has, and with warnings as
    warnings, since PyTorch and transformers may be others than the tests were written with.
    """
    (folder / "pytest.ini").write_text(PYTEST)
    return [
        *(sys.executable, "-m", "pytest", "-v", "--noconftest", "-c", str(folder / "pytest.ini")),
        *("--rootdir", str(ROOT), "-o", "filterwarnings=default", "-p", "no:cacheprovider"),
        *("-p", "benchmarks.gpu", "-n", str(processes), "-k", CHOSEN, *(str(ROOT / file) for file in FILES)),
    ]


def parity_environment() -> dict[str, str]:
    """With the repository and the tests' support on the path; kernels compiled."""
    paths = [str(ROOT), str(ROOT / "tests" / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | given | {"PYTHONPATH": os.pathsep.join(paths)}


def parity_outcome(printed: list[str], code: int | None) -> Line:
    """The line of results. What failed comes first; code None: the time was over."""
    found: dict[str, str] = {}
    for seen in filter(None, map(ENDED.search, printed)):
        name = (seen[2] or seen[3]).strip().partition(" - ")[0].removeprefix("tests/kernels/")
        if found.get(name) not in WRONG:
            found[name] = seen[1] or seen[4]
    wrong = [name for name, word in found.items() if word in WRONG]
    errors = [text[2:].strip() for text in printed if text.startswith("E  ")]
    passed, skipped = (sum(word == one for word in found.values()) for one in ("PASSED", "SKIPPED"))
    said = [] if code == 0 else errors[:10] or printed[-10:]
    good = code == 0 and not wrong and passed > 0
    return {"what": "parity", "failed": wrong, "said": said, "ended": code is not None,
            "passed": passed, "skipped": skipped, "good": good}  # fmt: skip


def parity_run(called: list[str], deadline: Deadline) -> Line:
    """Call pytest, say on stderr what it says as it goes, and end it at the deadline."""
    late, printed = threading.Event(), []
    with subprocess.Popen(
        called, env=parity_environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None

        def end() -> None:
            late.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(deadline.left, end)
        timer.start()
        try:
            for text in process.stdout:
                printed.append(text.rstrip())
                print(printed[-1], file=sys.stderr, flush=True)
        except BaseException:
            end()
            raise
        finally:
            timer.cancel()
    return parity_outcome(printed, None if late.is_set() else process.returncode)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=stages, default=",".join(STAGES))
    parser.add_argument("--models", default=",".join(model.name for model in MODELS))
    parser.add_argument("--recipes", default=",".join(FAMILIES))
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--minutes", type=float, default=5.2, help="of the whole run")
    parser.add_argument("--out", type=Path, help="JSON lines, by default as above")
    parser.add_argument("--again", action="store_true", help="measure what was measured before, too")
    parser.add_argument("--dry-run", action="store_true", help="print the cases and their bytes, run nothing")
    return parser.parse_args(given)


def main(arguments_given: list[str] | None = None) -> int:
    given = arguments(arguments_given)
    if given.dry_run:
        for case in chosen(given):
            print(json.dumps(row(case)))
        return 0
    if not torch.cuda.is_available():
        print("no CUDA device; --dry-run prints what would be measured", file=sys.stderr)
        return 1
    out = given.out or place("gpu", gpu_name())
    before = known(RESULTS / out.name, out)
    found = keep(lines(given, {} if given.again else before), out)
    print("\n".join(report.page([*before.values(), *found])), file=sys.stderr)
    return int(any(not line["good"] for line in found if line["what"] == "parity"))


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    sys.exit(main())
