"""No kernel takes more registers, stack or shared memory, compiled for a GPU, than the committed table says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "kernels_aot.py"


def check(*arguments: str, table: str | None = None) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_no_kernel_got_worse(arch):
    done = check("--arch", str(arch), "--check")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count(f"arch {arch}") > 50


def test_a_kernel_that_got_worse_is_seen(tmp_path):
    import importlib.util

    spec = importlib.util.spec_from_file_location("kernels_aot", SCRIPT)
    assert spec is not None and spec.loader is not None
    aot = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(aot)
    table = {("attend x", 90): {"triton": triton.__version__, "registers": 100, "stack": 0, "local": 0, "shared": 512}}
    taken = {"registers": 100, "stack": 0, "local": 0, "shared": 512}
    assert aot.worse("attend x", 90, taken, table) == []
    assert "registers 101" in aot.worse("attend x", 90, taken | {"registers": 101}, table)[0]
    assert "stack 8" in aot.worse("attend x", 90, taken | {"stack": 8}, table)[0]
    assert "not in" in aot.worse("attend y", 90, taken, table)[0]
    assert (
        aot.worse("attend x", 90, taken | {"registers": 101}, {k: v | {"triton": "0"} for k, v in table.items()}) == []
    )
