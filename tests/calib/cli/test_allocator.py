"""Memory that a tensor has left serves the next one, without a page fault for each of its pages."""

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from kvq_calib.cli.allocator import keep_memory
import torch
torch.set_num_threads(1)
raised = len(sys.argv) > 1 and keep_memory()
def work():
    parts = [torch.ones(4 << 20) for _ in range(4)]  # 16 MB each
for _ in range(3):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    work()
print(int(raised), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's thresholds")
def test_faults_are_a_tenth(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)

    def faults(*words: str) -> tuple[int, int]:
        done = subprocess.run([sys.executable, "-c", FAULTS, *words], capture_output=True, text=True, check=True)
        raised, count = map(int, done.stdout.split())
        return raised, count

    (_, before), (raised, after) = faults(), faults("keep")
    if not raised:
        pytest.skip("this allocator has no thresholds, or the environment sets them")
    assert after < before / 10
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert faults("keep")[0] == 0
