"""Run the tests that compare the kernels with torch, on this device; `make test` has the rest.

Every family against softmax on the decoded blocks, keys before RoPE, means, and captured graphs against eager steps. In
as many processes as there are cores, since nearly every test compiles a kernel of its own; without tests/conftest.py,
which wants packages that only a development environment has, and with warnings as warnings, since PyTorch and
transformers may be others than the tests were written with.
"""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from benchmarks.clock import Deadline
from benchmarks.lines import ROOT

FILES = ("tests/kernels/test_attention_kernel.py", "tests/kernels/test_graph.py")
CHOSEN = "families or before_rope or means or one_graph"
MOST = 14  # processes
SETTINGS = "[pytest]\nmarkers =\n    gpu\n    slow\n    all_recipes\nxfail_strict = true\n"
ENDED = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b (\S+::\S+.*)|^(\S+::\S+.*?) (PASSED|FAILED|ERROR|SKIPPED)\b")


def pytest_runtest_setup(item: Any) -> None:
    """As a plugin of pytest: let a test draw the same numbers whatever tests were there before it."""
    torch.manual_seed(0)


def command(folder: Path, processes: int) -> list[str]:
    """How pytest is called; its settings are written to the folder."""
    (folder / "pytest.ini").write_text(SETTINGS)
    return [
        *(sys.executable, "-m", "pytest", "-v", "--noconftest", "-c", str(folder / "pytest.ini")),
        *("--rootdir", str(ROOT), "-o", "filterwarnings=default", "-p", "no:cacheprovider"),
        *("-p", "benchmarks.parity", "-n", str(processes), "-k", CHOSEN, *(str(ROOT / file) for file in FILES)),
    ]


def environment() -> dict[str, str]:
    """With the repository and the tests' support on the path; kernels compiled."""
    paths = [str(ROOT), str(ROOT / "tests" / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | given | {"PYTHONPATH": os.pathsep.join(paths)}


def outcome(printed: list[str], code: int | None) -> dict[str, Any]:
    """The line of results. What failed comes first; code None: the time was over."""
    found: dict[str, str] = {}
    for text in printed:
        seen = ENDED.search(text)
        if seen:
            word, name = (seen[1], seen[2]) if seen[1] else (seen[4], seen[3])
            name = name.strip().partition(" - ")[0].removeprefix("tests/kernels/")
            if found.get(name) not in ("FAILED", "ERROR"):
                found[name] = word
    wrong = [name for name, word in found.items() if word in ("FAILED", "ERROR")]
    errors = [text[2:].strip() for text in printed if text.startswith("E  ")]
    counted = {word.lower(): sum(each == word for each in found.values()) for word in ("PASSED", "SKIPPED")}
    said = errors[:10] or ([] if code == 0 else printed[-10:])
    return {"what": "parity", "failed": wrong, "said": said if code != 0 else [], "ended": code is not None} | {
        **counted,
        "good": code == 0 and not wrong and counted["passed"] > 0,
    }


def run(called: list[str], deadline: Deadline) -> dict[str, Any]:
    """Call pytest, say on stderr what it says as it goes, and end it at the deadline."""
    late, printed = threading.Event(), []
    with subprocess.Popen(
        called, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
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
    return outcome(printed, None if late.is_set() else process.returncode)
