"""Read from a command's arguments what its measurement takes, and how it is told: protocol, device, progress, records.

What they need is imported when they run, as in `subcommands.py`.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvq_calib.cli.status import Lines


def protocol_of(args: argparse.Namespace, rows: int | None):
    from kvq_calib.evaluate import record
    from kvq_runtime.registry.measured import PROTOCOLS

    protocols = (args.protocol,) if args.protocol in PROTOCOLS else PROTOCOLS
    windows = record.ERROR_WINDOWS if args.layers or getattr(args, "plots", None) else 0
    given = {"error_windows": windows, "block": args.block, "protocols": protocols, "prompt": args.prompt}
    given["by_layer"] = args.by_layer or None
    return record.Protocol(args.step, rows, args.recent, args.sinks, **given)


def told(args: argparse.Namespace, records: Sequence[Any]) -> bool:
    """Write records where --output says, and print them with --json; False: a table of them is still to be printed."""
    text = json.dumps(records, indent=2)
    if args.output:
        Path(args.output).write_text(text + "\n")
    if args.json:
        print(text)
    return args.json


def device_of(given: str | None) -> str:
    import torch

    from kvq_calib.run.device import usable

    return usable(given or ("cuda" if torch.cuda.is_available() else "cpu"))


def dtype_of(given: str | None, device: str):
    """None: as stored. A CPU takes float32: what is measured here can be smaller than the rounding of bfloat16."""
    import torch

    return getattr(torch, given or "float32") if given or device == "cpu" else None


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
