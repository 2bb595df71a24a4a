"""Wait for another process, or make it wait for the test, so that no kill comes too early or too late."""

import time
from pathlib import Path

import psutil

PATIENCE = 600  # seconds; on two quiet cores nothing takes more than sixty, and a test has 1500


def until(what, pause: float = 0.2):
    """Call `what` until it returns something true, and return that."""
    end = time.monotonic() + PATIENCE
    while not (found := what()):
        assert time.monotonic() < end, f"nothing after {PATIENCE} s"
        time.sleep(pause)
    return found


def lives(process: psutil.Process) -> bool:
    """Whether a process is still running."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def held(flag: Path, where: str) -> str:
    """Code for the top of a program: while the file `flag` exists, wait before renaming a file.

    where   a condition, in Python: `name` is the new path, `beside` the list of files in its folder
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
