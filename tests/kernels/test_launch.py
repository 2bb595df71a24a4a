"""Every kind of launch gets as far as the driver: compiled, its arguments taken apart, without a warning.

Without a GPU the driver is fake_cuda.c; results are compared elsewhere, in Triton's interpreter.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
ATTEND = ("kivi-2bit-g128 pre", "kivi-2bit pages", "mean-lloyd-2bit-post", "higgs-head-3bit", "polar-3bit")
OPS = {
    "encode rtn 2 per channel": "_rtn",
    "encode grid 2 256 rotated": "_grid",
    "encode lloyd 3 matrix": "_lloyd",
    "encode polar packed": "_encode",
    "decode rtn": "_decode",
    "decode polar": "_decode",
    "encode latent": "_elements",
    "try gains": "_errors",
    "round matrix": "_round",
    "feedback": "_follow",
    "pack 3": "_pack",
    "hadamard 128": "_hadamard",
    "append": "_append",
}


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> Path:
    """The folder of a libcuda that has no device."""
    folder = tmp_path_factory.mktemp("cuda")
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", f"-I{headers}", "-o", folder / "libcuda.so.1"]
    subprocess.run([*command, ROOT / "tests" / "support" / "fake_cuda.c"], check=True)
    return folder


def on_the_driver(driver: Path, script: str, *arguments: str) -> list[str]:
    """The lines that a script of tests/support prints, where libcuda is the fake one."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= dict.fromkeys(("LD_LIBRARY_PATH", "TRITON_LIBCUDA_PATH"), str(driver))
    environment["PYTHONPATH"] = os.pathsep.join([*sys.path, str(ROOT)])  # the Triton of this process
    command = [sys.executable, "-W", "error::UserWarning", ROOT / "tests" / "support" / script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are launched on the GPU")
@pytest.mark.parametrize("names", [[f"attend {name}" for name in ATTEND], list(OPS)])
def test_launches_reach_the_driver(names, driver):
    made = [line.split()[0] for line in on_the_driver(driver, "launched.py", *names)]
    wanted = [kernel for name in names for kernel in ([OPS[name]] if name in OPS else ["attend", "merge"]) * 2]
    assert made == wanted


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are launched on the GPU")
@pytest.mark.parametrize("recipe, ratio, tiles, resident", [("kivi-2bit-g128", 4, 1, [12]), ("rtn-2bit", 4, 1, [12])])
def test_batches_and_query_tokens_share_compiled_kernels(recipe, ratio, tiles, resident, driver):
    """Of 1 to 8 each: one kernel for tiles of 8 rows, which rounded codes have, and one of anything else.

    The driver says that a kernel takes 168 registers: twelve warps fit.
    """
    made = json.loads(on_the_driver(driver, "compiled.py", recipe, str(ratio))[-1])
    assert made == {"attend": tiles, "merge": 1, "append": 1, "resident": resident}
