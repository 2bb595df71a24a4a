"""Processes forked from the tests: everything is imported in them already."""

import gc
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from kvq_runtime.disk import files

context = multiprocessing.get_context("fork")


def process(work: Callable[..., int | None], *arguments: object) -> multiprocessing.context.ForkProcess:
    """A child that is yet to start; what `work` returns is its exit code, 70 after an error.

    It ends at once: exit hooks of this process would wait for threads that a fork leaves behind.
    """

    def child() -> None:
        code = 70
        gc.freeze()  # what the parent forgot is the parent's to end: here its threads and connections are gone
        try:
            code = work(*arguments) or 0
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)

    return context.Process(target=child)


def leave_draft(folder: Path) -> None:
    """Die while a draft is written; for `process`."""
    with files.draft(folder) as (_, file):
        file.write(b"half")
        file.flush()
        os._exit(0)
