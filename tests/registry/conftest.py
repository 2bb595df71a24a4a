"""Tests of registries begin with no artifact in memory, whatever another test of the process still holds."""

from weakref import WeakValueDictionary

import pytest

from kvq_runtime.artifact import artifact


@pytest.fixture(autouse=True)
def nothing_in_memory(monkeypatch):
    monkeypatch.setattr(artifact, "_loaded", WeakValueDictionary())
