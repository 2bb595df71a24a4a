"""Fault injection: stop at a named point, so that tests see what a crash or a full disk leaves behind.

    KVQ_FAULT=claim.linked:2         kill -9 of this process when it passes the point claim.linked for the second time
    KVQ_FAULT=claim.linked:2:full    an OSError there instead: no space left on device

There is a point between any two steps that change a disk; tests/registry/test_faults.py visits each of them.
"""

import errno
import os
import signal
from collections import Counter

_passed: Counter[str] = Counter()


def point(name: str) -> None:
    """Pass a point: nothing happens unless $KVQ_FAULT names it."""
    setting = os.environ.get("KVQ_FAULT")
    if setting is None:
        return
    target, number, *how = setting.split(":")
    _passed[name] += target == name
    if target != name or _passed[name] != int(number):
        return
    if how == ["full"]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
    os.kill(os.getpid(), signal.SIGKILL)
