"""The command `kvq eval --tasks`: kvq's own tasks, and lm-eval's, with records kept where artifacts are."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvq_calib.cli.arguments import device_of, dtype_of, progress_bar, protocol_of, told
from kvq_calib.evaluate import cases, tasks
from kvq_calib.evaluate.ledger import Ledger
from kvq_calib.evaluate.subject import Subject, keep
from kvq_calib.model.files import ModelFiles
from kvq_calib.report import tasks as answered
from kvq_calib.report.tables import named
from kvq_calib.tasks import ruler, synthetic
from kvq_runtime.cli.table import print_table
from kvq_runtime.errors import extra
from kvq_runtime.registry.measured import TasksRecord
from kvq_runtime.registry.reference import home
from kvq_runtime.registry.sound import read


def evaluate(args: argparse.Namespace, files: ModelFiles, subjects: Sequence[Subject]) -> int:
    """Run `kvq eval --tasks`: names that kvq does not know are lm-eval's."""
    protocol = protocol_of(args, None)
    subjects = [replace(one, recipe=protocol.recipe(one.recipe, files.geometry, one.tensors)) for one in subjects]
    asked = args.tasks.split(",")
    own = [task for task in asked if task in synthetic.TASKS or task in ruler.TASKS]
    others = [task for task in asked if task not in own]
    if others and find_spec("lm_eval") is None:
        raise RuntimeError(
            f"tasks {', '.join(others)} are not kvq's own ({', '.join([*synthetic.TASKS, *ruler.TASKS])}); those of "
            f"lm-eval need it; {extra('lm-eval')}"
        )
    if others and args.protocol == "full":
        raise ValueError(f"--protocol full: {', '.join(others)} are answered in use; leave it out, or use in-use")
    if args.plot and not own:
        raise ValueError(
            f"--plot draws kvq's own tasks ({', '.join([*synthetic.TASKS, *ruler.TASKS])}), of which --tasks has none"
        )
    records = []
    device = device_of(args.device)
    used = (device, dtype_of(args.dtype, device))
    if own:
        records.append(_own(args, files, subjects, own, protocol.protocols, used))
    if others:
        records.append(_others(args, files, subjects, others, used))
    for group in records:
        for subject, found in zip(subjects, group[1:], strict=True):
            keep(subject, found, args.registry)
    whole = [record for group in records for record in group]
    names = ["16 bit", *(subject.name for subject in subjects)]
    if args.plot:
        Path(args.plot).write_bytes(answered.heat(named([read(one, TasksRecord) for one in records[0]], names)))
    if told(args, whole):
        return 0
    for number, group in enumerate(records):
        shown = named([read(one, TasksRecord) for one in group], names)
        print("\n" * bool(number), end="")
        print_table(answered.rows(shown), False)
        print("".join(f"\n{note}" for note in answered.notes(shown)), end="")
    return 0


def _own(
    args,
    files: ModelFiles,
    subjects: Sequence[Subject],
    asked: Sequence[str],
    protocols: Sequence[str],
    used: tuple[str, Any],
) -> list[dict[str, Any]]:
    lengths = args.lengths or [length for length in tasks.LENGTHS if length <= files.context]
    essays = cases.haystack(args.haystack) if set(asked) & set(ruler.ESSAYS) else None
    plan = tasks.Plan(
        tuple(asked), tuple(lengths), tuple(args.depths), args.samples, args.seed, tuple(protocols), essays, args.chat,
        args.answer,
    )  # fmt: skip
    with progress_bar(tasks.work(plan, len(subjects)), args.quiet) as progress:
        return tasks.evaluate(files, subjects, plan, *used, progress, Ledger(home() / "evaluated"))


def _others(
    args, files: ModelFiles, subjects: Sequence[Subject], asked: Sequence[str], used: tuple[str, Any]
) -> list[dict[str, Any]]:
    from kvq_calib.lm_eval import record as harness

    given = harness.Asked(tuple(asked), args.limit, args.num_fewshot, args.batch_size, args.chat, args.step)
    return harness.evaluate(files, subjects, given, *used, args.include_path, args.quiet)
