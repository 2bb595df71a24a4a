"""Run the stages of the GPU benchmark, each only on what is missing and while there is time."""

import argparse
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import compiling, counters, measure, parity
from benchmarks.cases import MODELS, Case, Model, cases, row
from benchmarks.clock import Deadline, Rates, rates
from benchmarks.jobs import Job, job_of
from benchmarks.lines import Line, attempt, name_of
from kvq_runtime.recipe import preset

PARITY, COMPILE = 0.35, 0.5  # shares of the time that is left when these begin
PROFILED = ("kivi-2bit-g128", "rtn-2bit", "higgs-head-2bit")  # at the first shape
LOST = "the device answers nothing after an error"
PARITY_NAME = name_of({"what": "parity"})


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


def chosen(given: argparse.Namespace) -> list[Case]:
    """The decode steps that the command line asks for."""
    lengths, batches = ([int(number) for number in listed(text)] for text in (given.lengths, given.batches))
    return list(cases(listed(given.models), listed(given.recipes), lengths, batches))


def tasks(given: argparse.Namespace, attention: measure.Attention, deadline: Deadline) -> list[Task]:
    """All that the command line asks for, the most telling first.

    The first shape of the first model, where its time goes, its other shapes, what encodes, then the other models.
    """
    steps, wanted = chosen(given), listed(given.only)

    def of(case: Case, what: str, measured: Callable[[], Line]) -> Task:
        pages = (Job("paged", case.model.name, batch=case.batch),) if what == "attend" else ()
        return Task(row(case) | {"what": what}, (job_of(case), *pages), measured)

    attends = [of(case, "attend", lambda c=case: attention.measure(c)) for case in steps]
    first = sum(
        (case.model, case.tokens, case.batch) == (steps[0].model, steps[0].tokens, steps[0].batch) for case in steps
    )
    few = [case for case in steps[:first] if case.recipe in PROFILED]
    profiles = [of(case, "profile", lambda c=case: measure.profile(c)) for case in few]
    if shutil.which("ncu"):
        profiles += [of(case, "counters", lambda c=case: counters.counted(c, deadline)) for case in few]
    own = sum(case.model == steps[0].model for case in steps) if steps else 0
    found = [*attends[:first], *profiles, *attends[first:own], *encodes(given), *attends[own:]]
    return [task for task in found if task.about["what"] in wanted]


def encodes(given: argparse.Namespace) -> list[Task]:
    """What encodes keys and values of recipes without fitted stages."""
    models = [model for model in MODELS if model.name in listed(given.models)]
    plain = [recipe for recipe in listed(given.recipes) if not preset(recipe).fitted]

    def of(model: Model, recipe: str, role: str) -> Task:
        about = {"what": "encode", "model": model.name, "recipe": recipe, "half": role}
        job = Job("encode", model.name, recipe, role=role)
        return Task(about, (job,), lambda: measure.encode(model, recipe, role))

    return [of(*each) for each in itertools.product(models, plain, ("key", "value"))]


def missing(found: list[Task], before: dict[tuple, Line]) -> list[Task]:
    """What was not measured before: first what was never tried, then what failed."""
    lines = [before.get(name_of(task.about)) for task in found]
    new = [task for task, line in zip(found, lines, strict=True) if line is None]
    return new + [task for task, line in zip(found, lines, strict=True) if line is not None and "error" in line]


def jobs_of(found: list[Task]) -> list[Job]:
    """What has to be compiled for these, each once, in the order in which it is wanted."""
    return list(dict.fromkeys(job for task in found for job in task.jobs))


def lines(given: argparse.Namespace, before: dict[tuple, Line]) -> Iterator[Line]:
    """Every result, as it comes.

    before   what is known already, by name, and is not measured again
    """
    deadline, measured = Deadline(60 * given.minutes), rates()
    yield device_line(measured)
    if "parity" in listed(given.only) and not before.get(PARITY_NAME, {}).get("good"):
        yield checked(deadline.part(PARITY))
    found = missing(tasks(given, measure.Attention(measured), deadline), before)
    jobs, begun = jobs_of(found), time.monotonic()
    if not jobs:
        return
    done = compiling.stage(jobs, deadline.part(COMPILE))
    yield compiling.summary(jobs, done, time.monotonic() - begun)
    own = [(task, done[task.jobs[0]]) for task in found if task.jobs[0] in done]
    yield from (task.about | {"error": f"not compiled: {end.error}"} for task, end in own if end.error)
    yield from each([task for task, end in own if not end.error], deadline)


def each(found: list[Task], deadline: Deadline) -> Iterator[Line]:
    """A line of each, until the deadline, or until the device answers nothing any more."""
    for i, task in enumerate(found):
        if not deadline.left:
            yield {"what": "stopped", "why": "the time is over", "left": len(found) - i}
            return
        line = attempt(task.about, compiling.alone(task.measure))
        yield line
        if "error" in line and not usable():
            yield {"what": "stopped", "why": LOST, "left": len(found) - i - 1}
            return
        torch.cuda.empty_cache()


def usable() -> bool:
    """Whether the device can be used after an error: a bad access of memory ends its use in this process."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def checked(deadline: Deadline) -> Line:
    """The line of the parity tests."""
    with tempfile.TemporaryDirectory() as folder:
        return parity.run(parity.command(Path(folder), min(os.cpu_count() or 1, parity.MOST)), deadline)


def device_line(measured: Rates) -> Line:
    import triton

    return {
        "what": "device",
        "name": torch.cuda.get_device_name(),
        "copy_gb_per_s": round(measured.copy / 1e9),
        "read_gb_per_s": round(measured.read / 1e9),
        "tflops": round(measured.product / 1e12),
        "floor_microseconds": round(measured.floor, 1),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
