"""The command `kvq eval --protocol decode`: follow the 16-bit model's greedy text with each compressed cache."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvq_calib.cli.arguments import device_of, dtype_of, progress_bar, protocol_of
from kvq_calib.evaluate import decode
from kvq_calib.evaluate.ledger import Ledger
from kvq_calib.evaluate.subject import Subject, keep
from kvq_calib.model.files import ModelFiles
from kvq_calib.report import decode_table
from kvq_calib.report.names import named
from kvq_calib.text import corpus
from kvq_runtime.cli.table import print_table
from kvq_runtime.registry.measured import GreedyRecord
from kvq_runtime.registry.reference import home
from kvq_runtime.registry.sound import read


def evaluate(args: argparse.Namespace, files: ModelFiles, subjects: Sequence[Subject]) -> int:
    """Run `kvq eval --protocol decode`."""
    protocol = protocol_of(args, None)
    subjects = [replace(one, recipe=protocol.recipe(one.recipe, files.geometry, one.tensors)) for one in subjects]
    plan = decode.Plan(args.length or min(decode.LENGTH, files.context))
    prompt = args.prompt or decode.PROMPT
    batch = corpus.select(args.corpus or files.entry.corpus, files.path, args.windows, prompt, args.seed, "held-out")
    device = device_of(args.device)
    used = (device, dtype_of(args.dtype, device))
    with progress_bar(decode.work(batch, len(subjects), plan), args.quiet) as progress:
        records = decode.evaluate(files, batch, subjects, plan, *used, progress, Ledger(home() / "evaluated"))
    for subject, found in zip(subjects, records, strict=True):
        keep(subject, found, args.registry)
    if args.output:
        Path(args.output).write_text(json.dumps(records, indent=2) + "\n")
    if args.json:
        print(json.dumps(records, indent=2))
        return 0
    shown = named([read(one, GreedyRecord) for one in records], [subject.name for subject in subjects])
    print_table(decode_table.rows(shown), False)
    print(f"\n{decode_table.about(shown)}")
    return 0
