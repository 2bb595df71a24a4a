"""The GPU benchmark's run on stand-ins: what comes first, what is skipped, what ends it, and what it says of itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from stand_in import Device, Hands

pytest.importorskip("triton")
from benchmarks import clock, compiling, gpu, measure, report

ROOT = Path(__file__).parents[2]
GOOD = {"what": "parity", "good": True, "failed": [], "said": [], "ended": True, "passed": 9, "skipped": 0}
LINE = {
    "microseconds": 50.0, "low": 49.0, "high": 52.0, "gb_per_s": 3000.0, "bandwidth_share": 0.7, "baseline": "flash",
    "baseline_microseconds": 200.0, "baseline_share": 0.9, "speed_up": 4.0, "bounds": {},
    "baselines": {"flash": {"microseconds": 200.0}, "pages": {"microseconds": 220.0}},
}  # fmt: skip
FEW = ["--recipes", "kivi-2bit-g128,rtn-2bit", "--lengths", "32768,2048", "--models", "llama-3.1-8b"]


class Bench:
    """`benchmarks.gpu` with a device, a clock, a compiler and measurements that stand in; `measured` says of what."""

    def __init__(self, patch: pytest.MonkeyPatch, out: Path):
        self.out, self.device, self.hands = out, Device().use(patch), Hands(patch)
        self.measured: list[tuple] = []
        self.seconds, self.fails, self.uncompiled = 1.0, {}, {}
        patch.setattr(gpu, "rates", lambda: clock.Rates(4e12, 3e12, 8e14, 2.0))
        patch.setattr(gpu, "parity", lambda deadline: GOOD)
        patch.setattr(compiling, "stage", self.compile)
        patch.setattr(measure.Attention, "measure", lambda attention, case: self.take("attend", case))
        patch.setattr(measure, "profile", lambda case: self.take("profile", case))
        patch.setattr(measure, "encode", lambda model, recipe, role: self.take("encode", model, recipe, role))

    def compile(self, jobs, deadline):
        self.jobs = jobs
        done = {job: compiling.Done(job, 1.0, self.uncompiled.get(job.recipe)) for job in jobs}
        return done, compiling.summary(jobs, done, 1.0)

    def take(self, what, *of):
        self.hands.now += self.seconds
        name = (what, of[0].model.name, of[0].recipe, of[0].tokens, of[0].batch) if len(of) == 1 else (what, of[1:])
        self.measured.append(name)
        if name in self.fails:
            raise self.fails[name]
        return LINE if what == "attend" else {"microseconds": 1.0, "gb_per_s": 1.0, "kernels": {}}

    def __call__(self, *given: str) -> list[dict]:
        """The lines that one call of the benchmark adds."""
        before = len(list(report.read(self.out)))
        self.code = gpu.main([*FEW, "--out", str(self.out), *given])
        return list(report.read(self.out))[before:]


@pytest.fixture
def bench(monkeypatch, tmp_path) -> Bench:
    return Bench(monkeypatch, tmp_path / "gpu.jsonl")


@pytest.mark.slow
def test_the_most_telling_come_first(bench):
    found = bench()
    assert [line["what"] for line in found[:3]] == ["device", "parity", "compile"]
    llama = "llama-3.1-8b"
    assert bench.measured[:6] == [
        ("attend", llama, "kivi-2bit-g128", 32768, 8), ("attend", llama, "rtn-2bit", 32768, 8),
        ("profile", llama, "kivi-2bit-g128", 32768, 8), ("profile", llama, "rtn-2bit", 32768, 8),
        ("attend", llama, "kivi-2bit-g128", 32768, 1), ("attend", llama, "rtn-2bit", 32768, 1),
    ]  # fmt: skip
    assert len(bench.measured) == 2 * 2 * 3 + 2 + 4  # attend, profile, encode
    everything = gpu.tasks(gpu.arguments([]), None)
    first = [task.about for task in everything[:4]]
    assert {(line["tokens"], line["batch"]) for line in first} == {(32768, 8)}
    assert all(line["recipe"].endswith("2bit") or "2bit" in line["recipe"] for line in first)
    models = [task.about["model"] for task in everything if task.about["what"] == "attend"]
    assert models == sorted(models) and set(models) == {llama, "qwen2.5-7b"}


def test_a_second_run_does_what_is_missing(bench):
    bench("--lengths", "32768")
    begun, bench.measured = bench.measured, []
    found = bench()
    assert begun and bench.measured
    assert not set(begun) & set(bench.measured)
    assert {name[3] for name in bench.measured if name[0] == "attend"} == {2048}
    assert "parity" not in {line["what"] for line in found}
    bench.measured = []
    assert [line["what"] for line in bench()] == ["device"] and not bench.measured
    bench("--again")
    assert set(bench.measured) >= set(begun)


def test_what_was_measured_of_other_code_is_measured_again(bench, monkeypatch):
    bench("--only", "attend")
    begun, bench.measured = bench.measured, []
    monkeypatch.setattr(report, "measured_code", lambda: "another")
    found = bench("--only", "attend")
    assert bench.measured == begun and {line["of"] for line in found} == {"another"}
    assert all(line["of"] == "another" for line in report.latest(report.read(bench.out)))


def test_an_unknown_stage_is_refused(capsys):
    with pytest.raises(SystemExit):
        gpu.arguments(["--only", "attend,counters"])
    assert "no stage counters; allowed are parity, attend, profile, encode, sweep" in capsys.readouterr().err


def test_results_in_the_repository_are_known_where_others_are_written(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    bench("--only", "attend")
    bench.measured, bench.out = [], tmp_path / "out" / "gpu.jsonl"
    assert [line["what"] for line in bench("--only", "attend")] == ["device"]


def test_the_deadline_ends_a_run_and_the_next_goes_on(bench):
    bench.seconds = 20.0
    found = bench("--only", "attend", "--minutes", "1")
    assert len(bench.measured) == 3 and found[-1]["what"] == "stopped" and found[-1]["left"] == 9
    first, bench.measured, bench.hands.now = bench.measured, [], 0.0
    bench("--only", "attend", "--minutes", "1")
    assert len(bench.measured) == 3 and not set(first) & set(bench.measured)


def test_a_case_that_fails_is_told_and_the_rest_goes_on(bench):
    wrong = ("attend", "llama-3.1-8b", "rtn-2bit", 32768, 8)
    large = ("attend", "llama-3.1-8b", "rtn-2bit", 2048, 64)
    bench.fails = {wrong: AttributeError("no attribute 'clock_rate'"), large: torch.OutOfMemoryError("too much")}
    found = bench("--only", "attend")
    assert len(bench.measured) == 12 and bench.measured[-1] != wrong
    (line,) = [line for line in found if "error" in line]
    assert (line["recipe"], line["tokens"], line["batch"]) == ("rtn-2bit", 32768, 8)
    assert line["error"] == "AttributeError: no attribute 'clock_rate'"
    assert sum("out_of_memory" in line for line in found) == 1
    bench.measured = []
    bench("--only", "attend")
    assert bench.measured == [wrong], "what failed is tried again, what does not fit is not"


def test_what_failed_before_is_tried_last(bench):
    wrong = ("attend", "llama-3.1-8b", "kivi-2bit-g128", 32768, 8)
    bench.fails = {wrong: RuntimeError("an illegal memory access was encountered")}
    bench.device.synchronize = lost = lambda: (_ for _ in ()).throw(RuntimeError("lost"))
    found = bench("--only", "attend")
    assert bench.measured == [wrong] and found[-1]["what"] == "stopped" and "the device" in found[-1]["why"]
    bench.measured = []
    bench("--only", "attend")
    assert lost and bench.measured[-1] == wrong and len(bench.measured) == 12


def test_what_does_not_compile_is_not_measured(bench):
    bench.uncompiled = {"rtn-2bit": "out of shared memory"}
    found = bench("--only", "attend")
    assert {name[2] for name in bench.measured} == {"kivi-2bit-g128"}
    assert sum(line.get("error") == "not compiled: out of shared memory" for line in found) == 6


def test_a_failed_parity_is_the_runs_result(bench, monkeypatch):
    bad = GOOD | {"good": False, "failed": ["test_families[kivi-2]"], "said": ["assert 0.2 <= 0.0015"]}
    monkeypatch.setattr(gpu, "parity", lambda deadline: bad)
    bench("--only", "parity,attend")
    assert bench.code == 1 and len(bench.measured) == 12
    bench.measured = []
    assert "parity" in {line["what"] for line in bench("--only", "parity,attend")}, "it is run again until it passes"


# ---- what is said -------------------------------------------------------------------------------------------------


def test_the_report_tells_failures_first(bench, capsys):
    bench.fails = {("attend", "llama-3.1-8b", "rtn-2bit", 32768, 8): ValueError("a bad case")}
    bench()
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "FAILED: attend llama-3.1-8b rtn-2bit 32768 8: ValueError: a bad case"
    assert said[1].startswith("Stand In: copy 4000 GB/s, read 3000 GB/s")
    row = "| kivi-2bit-g128 | 8 | 32768 | 50.0 (49.0 to 52.0) | 3000 | 70% | flash: 200.0 µs, 90% | 4.0x | 220.0 µs |"
    assert row in said
    assert not any("rtn-2bit | 8 | 32768" in text for text in said)


@pytest.mark.parametrize(
    "line, told",
    [
        (
            GOOD | {"good": False, "failed": ["a"], "said": ["why"]},
            ["PARITY FAILED: 1 tests, 9 passed", "  a", "  | why"],
        ),
        (GOOD | {"good": False, "ended": False}, ["PARITY NOT FINISHED in its time, 9 passed"]),
        ({"what": "compile", "failed": {}, "not_done": ["a", "b"], "jobs": 9}, ["not compiled in time", "2 of 9"]),
        ({"what": "stopped", "why": "the time is over", "left": 4}, ["the time is over; 4 left"]),
        ({"what": "attend", "recipe": "x", "batch": 8, "out_of_memory": True}, ["out of memory: attend x 8"]),
        ({"what": "attend", "recipe": "x", "compiled_meanwhile": ["attend"]}, ["compiled while timing: x: attend"]),
    ],
)
def test_what_is_told_of_a_failure(line, told):
    said = "\n".join(report.failures([line]))
    assert all(text in said for text in told), said


def test_a_report_has_the_latest_of_each(tmp_path):
    file = tmp_path / "gpu.jsonl"
    about = {"what": "encode", "model": "m", "recipe": "r", "half": "key", "of": "now"}
    written = [about | {"of": "old", "microseconds": 1.0, "gb_per_s": 1.0}]
    written += [about | {"microseconds": each, "gb_per_s": 5.0} for each in (2.0, 3.0)]
    file.write_text("\n".join(map(json.dumps, written)) + '\n{"what": "enc')
    said = list(report.page(report.read(file)))
    assert [text for text in said if text.startswith("| m |")] == ["| m | r | key | 3.0 | 5.0 |"]
    report.keep([{"what": "stopped"}], file)
    assert len(list(report.read(file))) == 4, "a line cut short costs no other"


def test_where_time_goes_is_told():
    about = {"model": "m", "recipe": "r", "tokens": 9, "batch": 8}
    said = list(report.page([about | {"what": "profile", "kernels": {"attend": 40.0}}]))
    assert "\nprofile, m r, 9 tokens, batch 8" in said and "  attend: 40.0 µs" in said


def test_generation_has_a_table():
    line = {
        "what": "generate", "model": "m", "cache": "static", "graph": True, "batch": 8, "tokens_per_s": 900.0,
        "ms_per_step": 8.0, "low_ms": 7.9, "high_ms": 8.2, "worst_ms": 30.0, "prompt_s": 0.5, "cache_bytes": 2e9,
        "peak_bytes": 2e10,
    }  # fmt: skip
    assert "| static | yes | 8 | 8.0 (7.9 to 8.2, 30.0) | 900.0 | 0.5 | 2.0 | 20.0 |" in report.page([line])


# ---- parity -------------------------------------------------------------------------------------------------------

XDIST = """[gw0] [  1%] PASSED tests/kernels/test_attention_kernel.py::test_families[kivi-2]
[gw3] [  2%] FAILED tests/kernels/test_attention_kernel.py::test_families[rtn-2]
[gw1] [  3%] SKIPPED tests/kernels/test_recorded_step.py::test_a_step_is_one_graph[rtn-2bit-whole]
E       assert 0.2 <= 0.0015
FAILED tests/kernels/test_attention_kernel.py::test_families[rtn-2] - assert 0.2 <= 0.0015""".splitlines()


def test_what_parity_printed_is_read():
    found = gpu.parity_outcome(XDIST, 1)
    assert found["failed"] == ["test_attention_kernel.py::test_families[rtn-2]"]
    assert (found["passed"], found["skipped"], found["good"], found["ended"]) == (1, 1, False, True)
    assert found["said"] == ["assert 0.2 <= 0.0015"]
    alone = ["tests/kernels/test_attention_kernel.py::test_families[kivi-2] PASSED    [ 50%]", "1 passed in 3 s"]
    assert gpu.parity_outcome(alone, 0)["good"]
    assert not gpu.parity_outcome(alone, None)["good"] and not gpu.parity_outcome(alone, None)["ended"]
    assert not gpu.parity_outcome(["no tests ran"], 0)["good"], "nothing was compared"
    assert gpu.parity_outcome(["ImportError: no module"], 4)["said"] == ["ImportError: no module"]


def test_parity_is_run_and_ended_at_its_deadline(tmp_path):
    script = "import time; print('[gw0] PASSED a.py::test_a', flush=True); time.sleep(100)"
    found = gpu.parity_run([sys.executable, "-c", script], clock.Deadline(3))
    assert (found["passed"], found["ended"], found["good"]) == (1, False, False)
    script = "print('[gw0] PASSED a.py::test_a')"
    assert gpu.parity_run([sys.executable, "-c", script], clock.Deadline(30))["good"]


@pytest.mark.slow
def test_parity_is_found_on_a_bare_machine(tmp_path):
    """Nothing but PyTorch, Triton, transformers, safetensors, huggingface_hub, pytest and its xdist, and no install."""
    (tmp_path / "sitecustomize.py").write_text((ROOT / "tests" / "support" / "bare.py").read_text())
    called = [*gpu.parity_command(tmp_path, 0), "--collect-only", "-q", "-p", "no:hypothesispytest"]
    environment = gpu.parity_environment()
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    done = subprocess.run(called, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.count("test_families[") > 30 and "test_a_step_is_one_graph[rtn-2bit-whole]" in done.stdout


@pytest.mark.slow
def test_it_imports_on_a_bare_machine(tmp_path):
    (tmp_path / "sitecustomize.py").write_text((ROOT / "tests" / "support" / "bare.py").read_text())
    modules = sorted(f"benchmarks.{name}" for name in (
        *("gpu", "generation", "measure", "baselines", "compiling", "report"),
    ))  # fmt: skip
    code = f"import sys, importlib.util as u, {', '.join(modules)}\n"
    code += "print(u.find_spec('prefect'), 'kvq_calib' in sys.modules)"
    environment = gpu.parity_environment() | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "None False\n"), done.stderr[-2000:]


def test_a_line_says_what_was_compiled_for_it(bench, monkeypatch):
    from triton import knobs

    def compiles(attention, case):
        if case.recipe == "rtn-2bit" and case.tokens == 2048:
            for hit in (True, False):
                source = type("Source", (), {"name": f"attend {hit}"})
                knobs.compilation.listener(src=source, metadata={}, metadata_group={}, times=None, cache_hit=hit)
        return LINE

    monkeypatch.setattr(measure.Attention, "measure", compiles)
    before = knobs.compilation.listener
    found = [line for line in bench("--only", "attend") if "compiled_meanwhile" in line]
    assert {(line["recipe"], line["tokens"], *line["compiled_meanwhile"]) for line in found} == {
        ("rtn-2bit", 2048, "attend False")
    }
    assert knobs.compilation.listener is before
