"""Wait for what another process does; make it wait for the test, so that no kill is too early or too late."""

import time
from pathlib import Path

import psutil

PATIENCE = 1800  # seconds; on two quiet cores nothing takes more than sixty


def until(what, pause: float = 0.2):
    """Ask until there is an answer."""
    end = time.monotonic() + PATIENCE
    while not (found := what()):
        assert time.monotonic() < end, f"nothing after {PATIENCE} s"
        time.sleep(pause)
    return found


def lives(process: psutil.Process) -> bool:
    """Whether a process is at work yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def held(flag: Path, where: str) -> str:
    """Code for the top of a program: it waits, as long as there is such a file, before it gives a file a name.

    where   a condition, in Python: `name` is the path of that file, `beside` what is in its folder
    """
    return f"""
import os, sys, time
def held(event, given):
    if event == "os.rename":
        name = str(given[1])
        while os.path.exists({str(flag)!r}):
            beside = os.listdir(os.path.dirname(name) or ".")
            if not ({where}):
                break
            time.sleep(0.01)
sys.addaudithook(held)
"""
