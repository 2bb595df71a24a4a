"""Stop at a named point when a test asks for it: what a crash or a full disk leaves behind is then seen, not guessed.

    KVQ_FAULT=files.synced:2         kill -9 of this process at its second passage of the point files.synced
    KVQ_FAULT=files.synced:2:full    OSError there instead: no space left on the device

A point stands between any two steps that change what is on a disk; tests/test_faults.py visits each of them.
"""

import errno
import os
import signal
from collections import Counter

_passed: Counter[str] = Counter()


def point(name: str) -> None:
    """Pass a point: nothing happens unless KVQ_FAULT names it."""
    asked = os.environ.get("KVQ_FAULT")
    if asked is None:
        return
    where, number, *how = asked.split(":")
    _passed[name] += where == name
    if where != name or _passed[name] != int(number):
        return
    if how == ["full"]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
    os.kill(os.getpid(), signal.SIGKILL)
