"""Every kernel compiles for the GPUs that we name, and fits them, without a GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
FEW = ["attend quarot-head-2bit", "attend lloyd-4bit", "encode rtn 4 rotated"]


@pytest.mark.slow
@pytest.mark.parametrize("arch, only", [(90, []), (80, FEW), (100, FEW)])
def test_kernels_compile_and_fit(arch, only):
    """One of each kind on sm_90; on the others one of each room. All of them take a quarter of an hour."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        ROOT / "benchmarks" / "kernels_aot.py",
        "--arch",
        str(arch),
        "--each-kind",
        "--only",
        *only,
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    counted = re.search(r"^(\d+) compiled with Triton", done.stdout, re.MULTILINE)
    assert counted and int(counted[1]) >= (len(only) or 20)
