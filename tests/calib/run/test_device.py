"""Memory that a tensor has left serves the next one: both thresholds of glibc are raised, unless a user has set any."""

import os
import sys
from types import SimpleNamespace

import pytest

from kvq_calib.run import device


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What mallopt is asked for, of an environment that sets nothing."""
    calls: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *given: calls.append(given) or 1)
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(sys, "platform", "linux")
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    return calls


def test_both_thresholds_are_raised(asked):
    assert device.keep_memory()
    assert asked == [(-3, 32 << 20), (-1, 1 << 30)]  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h


def test_what_a_user_has_set_is_left_alone(asked, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not device.keep_memory() and not asked


def test_an_allocator_without_thresholds_is_left_alone(asked, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: SimpleNamespace())
    assert not device.keep_memory()
