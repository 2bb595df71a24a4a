"""A lock of a file: one process has it, and a file system without locks is told from a file that is locked."""

import errno
import os

import pytest
from filelock import Timeout, _unix

from kvq_runtime.disk import files


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.EBADF])
def test_a_file_system_without_locks_is_named(code, monkeypatch, tmp_path):
    with files.lock(tmp_path / "lock"), pytest.raises(Timeout):
        files.lock(tmp_path / "lock", wait=False)

    def refuse(descriptor, operation):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(_unix.fcntl, "flock", refuse)
    message = rf"{tmp_path}: .* no locks \({os.strerror(code)}\); use a folder on another"
    with pytest.raises(RuntimeError, match=message):
        files.lock(tmp_path / "lock")
