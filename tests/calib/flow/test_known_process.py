"""A process that `make flows-up` started is known again when the clock was set, and no other is taken for it."""

import json
import os
import sys

import psutil
import pytest

from pipelines import service


@pytest.fixture
def started(tmp_path):
    """The record of a process that sleeps."""
    service._start("worker", ["-c", "import time; time.sleep(600)"], dict(os.environ), tmp_path)
    record = tmp_path / "worker.json"
    yield record
    process = service._started.pop()
    process.kill()
    process.wait()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of Linux, which adds a process's start to the clock")
def test_it_is_known_after_the_clock_was_set(started, monkeypatch):
    before, boot_time = service._running(started), psutil._pslinux.boot_time
    created = before.create_time()
    for step in (-3600.0, 1.0):
        monkeypatch.setattr(psutil._pslinux, "boot_time", lambda step=step: boot_time() + step)
        assert psutil.Process(before.pid).create_time() == pytest.approx(created + step, abs=0.1)
        assert service._running(started) == before


def test_one_that_has_its_number_later_is_another(started):
    noted = json.loads(started.read_text())
    started.write_text(json.dumps(noted | {"began": noted["began"] - 1}))
    assert service._running(started) is None
