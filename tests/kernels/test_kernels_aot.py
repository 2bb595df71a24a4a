"""No kernel takes more registers, stack or shared memory, compiled for a GPU, than the committed table says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "kernels_aot.py"


def check(*arguments: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("arch, which, least", [(90, (), 100), (80, ("--each-kind",), 20), (100, ("--each-kind",), 20)])
def test_no_kernel_got_worse(arch, which, least):
    done = check("--arch", str(arch), *which, "--check")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert int(done.stdout.split()[0]) > least, "so many were compiled"


SASS = """
//--------------------- .text.attend              --------------------------
.text.attend:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   IADD3 R4, R4, 0x40, RZ ;
.L_x_0:
        /*0020*/                   LOP3.LUT R26, R40, 0xf0f0f0f, RZ, 0xc0, !PT ;
        /*0030*/                   HMMA.16816.F32 R20, R20, R24, RZ ;
        /*0040*/              @!P0 BRA `(.L_x_0) ;
        /*0050*/                   FMUL R3, R3, R4 ;
        /*0060*/               @P1 BRA `(.L_x_1) ;
        /*0070*/                   FFMA R3, R3, R4, R5 ;
.L_x_2:
        /*0080*/                   BRA `(.L_x_2);
.L_x_3:
"""


def test_instructions_are_counted_where_they_are_run(tmp_path):
    from benchmarks import sass

    tool = tmp_path / "tool"
    tool.write_text(f"#!/bin/sh\ncat <<'END'{SASS}END\n")
    tool.chmod(0o755)
    found = sass.instructions(tool, tmp_path)
    assert [name for _, name, _ in found] == ["LDC", "IADD3", "LOP3", "HMMA", "BRA", "FMUL", "BRA", "FFMA", "BRA"]
    assert sass.main_loop(found, 4) == {"IADD3": 1, "LOP3": 4, "HMMA": 4, "BRA": 5, "FMUL": 1}


def test_a_kernel_that_got_worse_is_seen():
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
    table["attend x", 90]["stack"] = 8
    assert "stack 8; at most 0" in aot.worse("attend x", 90, taken | {"stack": 8}, table)[0]  # whatever the table says
    assert "at most 64" in aot.worse("attend x", 90, taken, table, warps=32)[0]  # they would not fit
    table["attend x", 90] |= {"stack": 0, "instructions_per_element": 3.0}
    assert "element 3.1" in aot.worse("attend x", 90, taken | {"instructions_per_element": 3.1}, table)[0]
    other = {k: v | {"triton": "0"} for k, v in table.items()}  # made with another Triton: it has to fit
    assert aot.worse("attend x", 90, taken | {"registers": 101, "stack": 8}, other) == []
    assert "at most 255" in aot.worse("attend x", 90, taken | {"registers": 256}, other)[0]
