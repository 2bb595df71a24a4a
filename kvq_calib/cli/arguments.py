"""Share among commands what a measurement takes and how it is told: protocol, device, memory, progress, records.

What they need is imported when they run: a command line is parsed without it.
"""

import argparse
import ctypes
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvq_calib.cli.progress import Lines

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # parameters of mallopt
LARGEST = 32 << 20  # of the first, on 64 bits
KEPT = 1 << 30  # bytes that may stay unused


def keep_memory() -> bool:
    """Keep freed memory for the next tensor: glibc gives large pieces back, and each page comes anew as a fault.

    Raises both thresholds where there are such, and leaves alone what the environment sets. Whether they were raised.
    """
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and bool(mallopt(MMAP_THRESHOLD, LARGEST)) and bool(mallopt(TRIM_THRESHOLD, KEPT))


def protocol_of(args: argparse.Namespace, rows: int | None):
    """How text is measured."""
    from kvq_calib.evaluate import record
    from kvq_runtime.registry.measured import PROTOCOLS

    protocols = (args.protocol,) if args.protocol in PROTOCOLS else PROTOCOLS
    windows = record.ERROR_WINDOWS if args.layers or getattr(args, "plots", None) else 0
    given = {"error_windows": windows, "block": args.block, "protocols": protocols, "prompt": args.prompt}
    given["by_layer"] = args.by_layer or None
    return record.Protocol(args.step, rows, args.recent, args.sinks, **given)


def used(args: argparse.Namespace) -> tuple[str, Any]:
    """Device and dtype; None: as stored. A CPU takes float32: what is measured here can be smaller than the rounding of
    bfloat16."""
    import torch

    device = device_of(args.device)
    return device, getattr(torch, args.dtype or "float32") if args.dtype or device == "cpu" else None


def device_of(given: str | None) -> str:
    """The device that is asked for, else a GPU where there is one."""
    import torch

    from kvq_calib.run.device import usable

    return usable(given or ("cuda" if torch.cuda.is_available() else "cpu"))


def told(args: argparse.Namespace, records: Sequence[Any]) -> bool:
    """Write records where --output says, and print them with --json; False: a table of them is still to be printed."""
    text = json.dumps(records, indent=2)
    if args.output:
        Path(args.output).write_text(text + "\n")
    if args.json:
        print(text)
    return args.json


@contextmanager
def progress_bar(tokens: int, quiet: bool) -> Iterator[Any]:
    """A progress bar on stderr, or, where that is no terminal, a line every 30 seconds at most."""
    from tqdm import tqdm
    from transformers.utils import logging

    logging.disable_progress_bar()  # of loading weights: it would break into ours
    lines, done = Lines("kvq", quiet), 0

    def update(more: int) -> None:
        nonlocal done
        done += more
        bar.update(more)
        lines("measuring", done, tokens)

    with tqdm(total=tokens, unit="tok", unit_scale=True, disable=quiet or not sys.stderr.isatty()) as bar:
        lines("measuring", 0, tokens)
        yield update
