"""Compile what a run will launch before it times anything: side by side, in processes that share Triton's cache.

A job has as few tokens as the kernel takes, but the heads of the case it stands for: the very kernel that will be
timed, which serves any batch and number of splits; and every merge, for each serves a class of splits, and of a large
batch others do. `python -m benchmarks.compiling` is a process that takes one job after another, a line of JSON each,
and answers each. One that fails a job, or dies of it, is ended, since a GPU's error stays with its process, and a new
one goes on; one that works at the deadline is killed, with the compilers it started.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks import baselines, cases
from benchmarks.clock import Deadline
from benchmarks.report import ROOT, Line

SHORT = 512  # tokens of a case that is launched to be compiled
MOST = 14  # processes
COMMAND = (sys.executable, "-m", "benchmarks.compiling")


@dataclass(frozen=True)
class Job:
    """Something to launch once.

    kind    attend: a decode step; encode: a flush; paged: bfloat16 attention over pages; generate: a model's steps
    batch   of paged and generate, whose kernels depend on it
    role    of encode: key or value
    launch  of attend: tile, warps, stages, registers; None: the package's choice
    prompt  of generate: tokens
    """

    kind: str
    model: str
    recipe: str = ""
    batch: int = 1
    role: str = ""
    launch: tuple[int, ...] | None = None
    prompt: int = 0

    def __str__(self) -> str:
        batch = f"batch {self.batch}" if self.kind in ("paged", "generate") else ""
        parts = (self.kind, self.model, self.recipe, self.role, batch, self.launch)
        return " ".join(str(part) for part in parts if part)


def job_of(case: cases.Case, launch: tuple[int, ...] | None = None) -> Job:
    """The launches that compile a case's kernel, for all its tokens and batches."""
    return Job("attend", case.model.name, case.recipe, launch=launch)


def launched(job: Job, device: torch.device) -> None:
    """Launch what a job names, once."""
    if job.kind == "generate":
        from benchmarks import generation

        return generation.rehearse(job.model, job.recipe, job.batch, job.prompt, device)
    model = next(model for model in cases.MODELS if model.name == job.model)
    if job.kind == "encode":
        cases.encoder(model, job.recipe, job.role, device)[0]()
        return None
    if job.kind == "paged":
        baselines.paged_step(cases.Case(model, job.recipe, SHORT, job.batch), device)()
        return None
    from kvq_runtime.kernels.attend.kernel import CLASSES
    from kvq_runtime.kernels.attend.launch import Launch

    how = job.launch and Launch(*job.launch)
    for batch in (min(cases.BATCHES), max(cases.BATCHES)):
        case = cases.Case(model, job.recipe, SHORT, batch)
        step, q = cases.built(case, device), cases.queries(case, device)
        for splits in (None, *CLASSES):
            step(q, how, splits)
    return None


def serve(device: torch.device) -> None:
    """Take jobs from stdin until it ends; what else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        given = json.loads(line)
        error = None
        try:
            launched(Job(**given | {"launch": given["launch"] and tuple(given["launch"])}), device)
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"[:400]
        answers.write(json.dumps({"error": error}) + "\n")
        answers.flush()


@dataclass(frozen=True)
class Done:
    """The end of a job: seconds, and the error, if any."""

    job: Job
    seconds: float
    error: str | None = None


class _Worker:
    """A process that takes jobs, in a session of its own, which the compilers it starts belong to."""

    def __init__(self, command: tuple[str, ...]):
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=environment, start_new_session=True,
        )  # fmt: skip

    def take(self, job: Job) -> str | None:
        """The job's error; None: it went well."""
        pipes = self.process.stdin, self.process.stdout
        assert pipes[0] is not None and pipes[1] is not None
        try:
            pipes[0].write(json.dumps(asdict(job)) + "\n")
            pipes[0].flush()
            answer = pipes[1].readline()
        except (BrokenPipeError, ValueError):
            answer = ""
        return json.loads(answer)["error"] if answer else f"the process ended with {self.process.wait()}"

    def end(self) -> None:
        """Kill it, with what it started; may be called again."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def close(self) -> None:
        """End it, and close its pipes: for the thread that uses them."""
        self.end()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):
                pipe and pipe.close()


def compiled(
    jobs: Iterable[Job], deadline: Deadline, processes: int, command: tuple[str, ...] = COMMAND
) -> Iterator[Done]:
    """Every job as it is done, in as many processes at once; at the deadline it ends, with some of them not done."""
    waiting, found, workers, over = deque(jobs), queue.SimpleQueue(), list[_Worker](), threading.Event()
    count = len(waiting)

    def work() -> None:
        worker = None
        while waiting and not over.is_set():
            try:
                job = waiting.popleft()
            except IndexError:  # another took the last
                break
            if worker is None:
                workers.append(worker := _Worker(command))
            begun = time.monotonic()
            error = worker.take(job)
            if not over.is_set():
                found.put(Done(job, time.monotonic() - begun, error))
            if error is not None:
                worker.close()
                worker = None
        if worker is not None:
            worker.close()

    threads = [threading.Thread(target=work) for _ in range(min(processes, count))]
    try:
        for thread in threads:
            thread.start()
        for _ in range(count):
            yield found.get(timeout=deadline.left)
    except queue.Empty:
        pass
    finally:
        over.set()
        while any(thread.is_alive() for thread in threads):
            for worker in list(workers):
                worker.end()
            for thread in threads:
                thread.join(0.1)


def stage(jobs: list[Job], deadline: Deadline, command: tuple[str, ...] = COMMAND) -> tuple[dict[Job, Done], Line]:
    """Compile these, and say on stderr how far it is: how each ended, and a line of results."""
    done: dict[Job, Done] = {}
    begun = time.monotonic()
    jobs = list(dict.fromkeys(jobs))
    processes = min(os.cpu_count() or 1, MOST)
    print(f"compiling {len(jobs)} in {processes} processes", file=sys.stderr, flush=True)
    for each in compiled(jobs, deadline, processes, command):
        done[each.job] = each
        end = f"FAILED, {each.error}" if each.error else f"{each.seconds:.0f} s"
        so_far = f"compiled {len(done)} of {len(jobs)} after {time.monotonic() - begun:.0f} s"
        print(f"{so_far}: {each.job}, {end}", file=sys.stderr, flush=True)
    return done, summary(jobs, done, time.monotonic() - begun)


def summary(jobs: list[Job], done: dict[Job, Done], seconds: float) -> Line:
    """A line of results: how many were compiled, and which were not."""
    slowest = max(done.values(), key=lambda each: each.seconds, default=None)
    return {
        "what": "compile",
        "jobs": len(jobs),
        "compiled": sum(each.error is None for each in done.values()),
        "seconds": round(seconds, 1),
        "slowest": slowest and f"{slowest.job}, {slowest.seconds:.0f} s",
        "failed": {str(each.job): each.error for each in done.values() if each.error},
        "not_done": [str(job) for job in jobs if job not in done],
    }


def alone(measure: Callable[[], Line]) -> Callable[[], Line]:
    """The same measurement, whose line says which kernels were compiled meanwhile, if any were."""

    def measured() -> Line:
        with watched() as found:
            line = measure()
        return line | ({"compiled_meanwhile": found} if found else {})

    return measured


@contextmanager
def watched() -> Iterator[list[str]]:
    """The kernels that Triton compiles meanwhile, rather than find in its cache: while timing, there should be none."""
    from triton import knobs

    found: list[str] = []
    before: Callable[..., Any] | None = knobs.compilation.listener

    def heard(*, src: Any, cache_hit: bool, **given: Any) -> None:
        if not cache_hit:
            found.append(getattr(src, "name", None) or src.fn.__name__)
        if before is not None:
            before(src=src, cache_hit=cache_hit, **given)

    knobs.compilation.listener = heard
    try:
        yield found
    finally:
        knobs.compilation.listener = before


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    serve(torch.device("cuda"))
