"""Read the hardware's counters of a few cases with Nsight Compute, where `ncu` is on the PATH.

Its sections, rather than single metrics, whose names differ among chips: what limits the kernel, occupancy, why warps
wait, and the traffic of memory and caches. Clocks are left as they are.
"""

import csv
import io
import shutil
import subprocess
import sys
from collections import defaultdict
from typing import Any

from benchmarks.cases import Case
from benchmarks.clock import Deadline
from benchmarks.lines import ROOT

SECTIONS = ("SpeedOfLight", "LaunchStats", "Occupancy", "WarpStateStats", "SchedulerStats", "MemoryWorkloadAnalysis")
LONGEST = 60.0  # seconds of a case
WARM = 2  # launches of each kernel before the one that is read


def command(ncu: str, case: Case) -> list[str]:
    """Profile one step of a case, after others."""
    sections = [part for name in SECTIONS for part in ("--section", name)]
    return [
        *(ncu, "--csv", "--page", "details", "--clock-control", "none", *sections),
        *("--kernel-name", "regex:attend|merge", "--launch-skip", str(2 * WARM), "--launch-count", "2"),
        *(sys.executable, "-m", "benchmarks.gpu", "--once"),
        f"{case.model.name},{case.recipe},{case.tokens},{case.batch}",
    ]


def read(printed: str) -> dict[str, dict[str, str]]:
    """{kernel: {metric: value and unit}} of ncu's CSV; what a program prints beside it is passed over."""
    start = printed.find('"ID"')
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for row in csv.DictReader(io.StringIO(printed[start:])) if start >= 0 else ():
        if row.get("Metric Name") and row.get("Kernel Name"):
            found[row["Kernel Name"]][row["Metric Name"]] = f"{row['Metric Value']} {row['Metric Unit']}".strip()
    return dict(found)


def counted(case: Case, deadline: Deadline) -> dict[str, Any]:
    """What the counters say of a case. RuntimeError: ncu read none, with what it printed."""
    ncu = shutil.which("ncu")
    assert ncu is not None
    done = subprocess.run(
        command(ncu, case), cwd=ROOT, capture_output=True, text=True, timeout=max(1.0, min(LONGEST, deadline.left))
    )
    kernels = read(done.stdout)
    if not kernels:
        raise RuntimeError(f"ncu ended with {done.returncode} and no counters: {(done.stdout + done.stderr)[-300:]}")
    return {"kernels": kernels}
