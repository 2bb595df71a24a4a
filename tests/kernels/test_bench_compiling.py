"""What the GPU benchmark compiles before it times is what it then launches; and its processes, on stand-ins."""

import inspect
import os
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from benchmarks import baselines, cases, compiling, generation, gpu, report
from benchmarks.clock import Deadline
from benchmarks.compiling import Done, Job
from kvq_runtime.kernels.attend import kernel, launch

ROOT = Path(__file__).parents[2]
META = torch.device("meta")
H200 = SimpleNamespace(
    multi_processor_count=132, regs_per_multiprocessor=65536, shared_memory_per_multiprocessor=233472,
    max_threads_per_multi_processor=2048,
)  # fmt: skip


class Kernel:
    """In place of a kernel: remembers what Triton would compile for a launch, or to say what it takes."""

    def __init__(self, seen: set, kernel):
        self.seen, self.name = seen, kernel.fn.__name__
        parameters = inspect.signature(kernel.fn).parameters.values()
        plain = getattr(kernel, "do_not_specialize", None) or kernel.kwargs.get("do_not_specialize") or ()
        self.kinds = [
            str if parameter.annotation in (tl.constexpr, "tl.constexpr") else type if parameter.name in plain
            else self.kind
            for parameter in parameters
        ]  # fmt: skip

    def __getitem__(self, grid):
        return partial(self.warmup, grid=grid)

    def warmup(self, *args, grid, **options):
        kinds = [kind(x) for kind, x in zip(self.kinds, args, strict=True)]
        self.seen.add((self.name, *kinds, *sorted(options.items())))
        shared = SimpleNamespace(shared=18432)
        return SimpleNamespace(n_regs=168, metadata=shared, _init_handles=lambda: None)

    def kind(self, given):
        """An argument as Triton specializes a kernel for it; a dtype stands for a tensor."""
        if isinstance(given, torch.dtype):
            return given, True
        if isinstance(given, torch.Tensor):
            return given.dtype, given.device.type == "meta" or given.data_ptr() % 16 == 0
        if isinstance(given, tuple):
            return type(given).__name__, tuple(map(self.kind, given))
        if isinstance(given, int) and not isinstance(given, bool):
            return given == 1, given % 16 == 0, given.bit_length() > 31
        return "a float" if isinstance(given, float) else given


@pytest.fixture
def launches(monkeypatch):
    """Kernels compiled since it was last asked, on an H200 without memory; without a launch is what splits ask for."""
    seen: set = set()
    for module, name in ((launch, "attend_kernel"), (kernel, "merge"), (baselines, "_attend"), (baselines, "_merge")):
        monkeypatch.setattr(module, name, Kernel(seen, getattr(module, name)))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for module in (launch, kernel):
        monkeypatch.setattr(module, "on", lambda x: nullcontext())
    gpu_like, choose = SimpleNamespace(type="cuda"), launch.choose
    monkeypatch.setattr(launch, "choose", lambda device, *given: choose(gpu_like, *given))

    def taken() -> frozenset:
        found = frozenset(seen)
        seen.clear()
        return found

    return taken


@pytest.mark.slow
@pytest.mark.parametrize("model", [model.name for model in cases.MODELS])
def test_what_is_timed_was_compiled(model, launches):
    """Every kernel of every decode step of a whole run, beside the kernel over pages; and of merges, those of a class
    of splits that a batch of the run does not ask for."""
    tasks = gpu.tasks(gpu.arguments(["--only", "attend,profile", "--models", model]), None)
    compiled, timed = {}, defaultdict(set)
    for job in gpu.jobs_of(tasks):
        compiling.launched(job, META)
        compiled[job] = launches()
        merges = {kernel for kernel in compiled[job] if kernel[0] == "merge"}
        assert len(compiled[job] - merges) == 2 - (job.kind == "attend") and len(merges) <= 2 * len(kernel.CLASSES), job
    ends = (min(cases.LENGTHS), max(cases.LENGTHS))
    for case in gpu.chosen(gpu.arguments(["--models", model])):
        if case.tokens not in ends and case.recipe != cases.FAMILIES[0]:
            continue
        cases.built(case, META)(cases.queries(case, META))
        timed[compiling.job_of(case)] |= launches()
        if case.recipe == cases.FAMILIES[0]:
            baselines.paged_step(case, META)()
            timed[Job("paged", model, batch=case.batch)] |= launches()
    assert timed.keys() == compiled.keys() and all(timed[job] <= compiled[job] for job in compiled)
    assert all({kernel[0] for kernel in timed[job]} == {kernel[0] for kernel in compiled[job]} for job in compiled)
    assert {job.batch for job in compiled if job.kind == "paged"} == set(cases.BATCHES)
    assert [job.recipe for job in compiled if job.kind == "attend"] == list(cases.FAMILIES), "one for all batches"


def test_kernels_are_told_apart(launches):
    """By the stand-in above: those of two recipes, two models and two launch settings."""
    found = []
    for model, recipe, how in (
        *(("llama-3.1-8b", "rtn-2bit", None), ("llama-3.1-8b", "rtn-4bit", None), ("qwen2.5-7b", "rtn-2bit", None)),
        ("llama-3.1-8b", "rtn-2bit", (64, 1, 1, 255)),
    ):
        compiling.launched(Job("attend", model, recipe, 8, launch=how), META)
        found += [launch for launch in launches() if launch[0] == "attend"]
    assert len(set(found)) == len(found) == 4


def test_splits_are_the_products(monkeypatch):
    """For what the model can hold, as attention/fused.py asks, not for the tokens of a case."""
    asked, cut = [], []
    monkeypatch.setattr(launch, "choose_splits", lambda *given: asked.append((given[6], given[8])) or len(asked))
    monkeypatch.setattr(launch, "attend", lambda *given: cut.append(given[7]))
    for tokens in (2048, 32768):
        case = cases.Case(cases.MODELS[0], "rtn-2bit", tokens, 8)
        step, q, how = cases.built(case, META), cases.queries(case, META), launch.Launch(warps=1)
        for each in (None, how, None):
            step(q, each)
    assert asked == [(1024, None), (1024, how)] * 2 and cut == [1, 2, 1, 3, 4, 3], "once for each launch setting"
    assert {config.max_position_embeddings for config in generation.CONFIGS.values()} == {cases.MAX_TOKENS}


def test_generation_compiles_what_it_steps_with():
    given = generation.arguments(["--batches", "8,1,most", "--recipes", "rtn-2bit,rtn-4bit"])
    planned = generation.planned(given, {})
    found = generation.jobs(planned)
    wanted = {(about["batch"], way.cache) for about, way in planned if way.attention == "kvq" and about["batch"] <= 64}
    assert {(job.batch, job.recipe) for job in found} == wanted and {job.prompt for job in found} == {16384}
    assert [job.batch for job in found][:2] == [8, 8]
    before = {report.name_of(about): about for about, way in planned if way.cache == "rtn-2bit"}
    assert {job.recipe for job in generation.jobs(generation.planned(given, before))} == {"rtn-4bit"}


# ---- processes ----------------------------------------------------------------------------------------------------

WORKER = """
import json, os, sys, time
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()}\\n")
for line in sys.stdin:
    recipe = json.loads(line)["recipe"]
    if recipe == "dies":
        os._exit(3)
    if recipe == "hangs":
        time.sleep(1000)
    print(json.dumps({"error": "CompilationError: no" if recipe == "bad" else None}), flush=True)
"""


@pytest.fixture
def worker(tmp_path):
    """(the command of a process that stands in for one that compiles, what lists the processes begun)."""
    begun = tmp_path / "begun"
    return (sys.executable, "-S", "-c", WORKER, str(begun)), lambda: [int(pid) for pid in begun.read_text().split()]


def job(recipe: str, batch: int = 1) -> Job:
    return Job("attend", "llama-3.1-8b", recipe, batch)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_jobs_are_shared_out(worker):
    command, begun = worker
    wanted = [job("good", batch) for batch in range(12)]
    found = list(compiling.compiled(wanted, Deadline(60), 3, command))
    assert {done.job for done in found} == set(wanted) and all(done.error is None for done in found)
    assert 1 <= len(begun()) <= 3 and not any(map(alive, begun()))


def test_a_job_that_fails_costs_its_process_and_no_other(worker):
    command, begun = worker
    wanted = [job("good"), job("bad"), job("good", 2), job("dies"), job("good", 3)]
    found = {done.job: done.error for done in compiling.compiled(wanted, Deadline(60), 1, command)}
    assert found == {
        job("good"): None, job("bad"): "CompilationError: no", job("good", 2): None,
        job("dies"): "the process ended with 3", job("good", 3): None,
    }  # fmt: skip
    assert len(set(begun())) == 3


def test_the_deadline_ends_every_process(worker, capfd):
    command, begun = worker
    wanted = [job("good"), job("hangs"), *(job("hangs", batch) for batch in (2, 3)), job("good", 4)]
    start = time.monotonic()
    done, line = compiling.stage(wanted, Deadline(3), command)
    assert time.monotonic() - start < 20
    assert set(done) == {job("good")} and not any(map(alive, begun()))
    said = capfd.readouterr().err
    assert said.startswith("compiling 5 in ") and "compiled 1 of 5 after" in said
    assert (line["jobs"], line["compiled"], len(line["not_done"]), line["failed"]) == (5, 1, 4, {})


def test_a_summary_tells_what_failed():
    found = {job("bad"): Done(job("bad"), 9.0, "no"), job("good"): Done(job("good"), 4.0)}
    line = compiling.summary([job("bad"), job("good")], found, 9.4)
    assert (line["jobs"], line["compiled"], line["seconds"]) == (2, 1, 9.4)
    assert line["failed"] == {"attend llama-3.1-8b bad": "no"} and line["slowest"].endswith("bad, 9 s")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="its driver stands in for a GPU's")
def test_nothing_is_left_to_compile_for_triton(tmp_path):
    """With Triton's own compiler, cache and launcher: jobs in processes, then the cases they stand for in another."""
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    built = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{headers}", "-o", tmp_path / "libcuda.so.1"]
    subprocess.run([*built, ROOT / "tests" / "support" / "fake_cuda.c"], check=True)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= dict.fromkeys(("LD_LIBRARY_PATH", "TRITON_LIBCUDA_PATH"), str(tmp_path))
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join([*sys.path, str(ROOT)])}
    script = [sys.executable, ROOT / "tests" / "support" / "compiling_cpu.py"]
    done = subprocess.run([*script, "kivi-2bit-g128", "rtn-4bit"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "0 compiled meanwhile; without a job: attend, merge"
