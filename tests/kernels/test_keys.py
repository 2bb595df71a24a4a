"""Compiled code is found again on disk by a process that comes to its kernels in another order."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_keys_do_not_depend_on_the_order_of_kernels():
    """With the oldest Triton they do, unless they are settled; and two settings of one name would be in any order."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([*sys.path, str(ROOT)])  # the Triton of this process
    command = [sys.executable, ROOT / "tests" / "support" / "kernel_keys.py", "settled"]
    found = json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert found["functions"] > 80 and found["several"] == found["ambiguous"] == []
    assert found["seconds"] < 5
