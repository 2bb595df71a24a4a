"""Run `kvq eval`, `compare` and `bench`: take parsed arguments, print, return an exit code.

This is imported when one of them runs: `kvq list` must not wait for it.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

from kvq_calib.bench import contenders, rounds
from kvq_calib.cli.progress import Bar, progress_bar
from kvq_calib.evaluate import record, tasks
from kvq_calib.evaluate.ledger import Ledger
from kvq_calib.evaluate.subject import Subject, choose, find, keep
from kvq_calib.job import prepare, run
from kvq_calib.job.job import Evaluation, Job, Machine, Publication, Text, What
from kvq_calib.model import find as models
from kvq_calib.model.files import ModelFiles
from kvq_calib.report import plots, tables, timings
from kvq_calib.run import budget
from kvq_calib.run.device import memory_of, usable
from kvq_calib.tasks import needles
from kvq_calib.text import corpus
from kvq_runtime.artifact import recipe_text
from kvq_runtime.cli import exit_codes, options
from kvq_runtime.cli.table import print_table
from kvq_runtime.disk import files as disk
from kvq_runtime.errors import ArtifactError, extra, spoken
from kvq_runtime.ops import product
from kvq_runtime.prefix.folder import parse_bytes
from kvq_runtime.registry.evaluation_records import PROTOCOLS, Record, TasksRecord, TextRecord, parse
from kvq_runtime.registry.reference import home

R = TypeVar("R", bound=Record)
Give = Callable[..., None]
OWN = ", ".join(needles.TASKS)
OF_TEXT = ("rows", "layers", "by_layer", "plots")  # options of `kvq eval` that tasks do not have


def evaluate(args: argparse.Namespace) -> int:
    """Run `kvq eval`."""
    if not args.subjects and not args.tasks:
        raise ValueError("nothing is named to be measured; give a recipe or an artifact, or --tasks for 16 bit alone")
    files = models.resolve(args.model)
    given = recipe_text.with_settings(args.subjects, args.set)
    subjects = [find(text, files, args.registry) for text in given]
    recipe_text.distinct(subject.recipe for subject in subjects if subject.sha256 is None)
    if args.tasks:
        if given := [f"--{name.replace('_', '-')}" for name in OF_TEXT if getattr(args, name)]:
            raise ValueError(f"{', '.join(given)}: of text, of which --tasks measures none; leave out either")
        return _tasks(args, files, subjects)
    batch, beside = _texts(args, files, args.corpus or files.entry.corpus)
    protocol = _protocol(args, args.rows)
    with progress_bar(record.work(files, batch, len(subjects), protocol, beside), args.quiet) as progress:
        records = record.evaluate(files, batch, subjects, protocol, *_used(args), progress, others=beside)
    with everywhere() as give:
        shown = _kept(args, subjects, records, TextRecord, give)
        if args.plots:
            drawn = {"error-by-layer.png": plots.error_by_layer(shown)}
            give(save, drawn | {"perplexity-by-bits.png": plots.perplexity_by_bits(shown)}, args.plots)
        if _told(args, records, give):
            return 0
        print_table(tables.table(shown), False)
        print("".join(f"\n{note}" for note in tables.about_texts(shown)))
        if args.layers:
            print()
            print_table([{"recipe": found.name, **row} for found in shown for row in found.result.layers], False)
    return 0


def _ledger(run: str | None = None) -> Ledger:
    """The ledger of what was measured; refused before the work if it cannot be kept. What is there already is read
    though nothing can be written: the ledger refuses what it lacks."""
    folder = Path(run or home()) / "evaluated"
    if not folder.is_dir():
        options.check_output("--run" if run else "$KVQ_HOME", folder, folder=True)
    return Ledger(folder)


def _length(args: argparse.Namespace, files: ModelFiles) -> int:
    return args.length or min(files.entry.seq_len, files.context)


def _texts(args: argparse.Namespace, files: ModelFiles, source: str):
    """The windows to measure on, and those of texts of other kinds by name."""
    length = _length(args, files)
    batch = corpus.select(source, files.path, args.windows, length, args.seed, "held-out")
    also = files.entry.beside(args.corpus) if args.also is None else args.also
    return batch, corpus.select_others(also, source, files.path, args.windows, length, args.seed)


def _kept(
    args: argparse.Namespace, subjects: Sequence[Subject], records: Sequence[Any], kind: type[R], give: Give
) -> list[R]:
    """Keep records where artifacts are; return them as they are shown."""
    for subject, found in zip(subjects, records, strict=True):
        give(keep, subject, found, args.registry)
    return tables.named([parse(one, kind) for one in records], [subject.name for subject in subjects])


def _tasks(args: argparse.Namespace, files: ModelFiles, subjects: Sequence[Subject]) -> int:
    """Run `kvq eval --tasks`: names that kvq does not know are lm-eval's."""
    protocol = _protocol(args, None)
    subjects, ledger = [protocol.subject(one, files.geometry) for one in subjects], _ledger()
    asked = args.tasks.split(",")
    own = [task for task in asked if task in needles.TASKS]
    foreign = [task for task in asked if task not in own]
    if foreign and find_spec("lm_eval") is None:
        raise RuntimeError(
            f"tasks {', '.join(foreign)} are not kvq's own ({OWN}); those of lm-eval need it; {extra('lm-eval')}"
        )
    if args.protocol == "full":
        raise ValueError(f"--protocol full: {args.tasks} are answered in use; leave it out, or use in-use")
    device, groups = _used(args), []
    if own:
        lengths = args.lengths or [length for length in tasks.LENGTHS if length <= files.context]
        haystack = tasks.haystack(args.corpus or "demo")
        plan = tasks.Plan(
            tuple(own), haystack, tuple(lengths), tuple(args.depths), args.samples, args.seed, args.chat
        )  # fmt: skip
        with progress_bar(tasks.work(plan, len(subjects)), args.quiet) as progress:
            groups.append(tasks.evaluate(files, subjects, plan, *device, progress, ledger))
    if foreign:
        from kvq_calib.lm_eval import model as harness

        given = harness.Asked(tuple(foreign), args.limit, args.num_fewshot, args.batch_size, args.chat, args.step)
        groups.append(harness.evaluate(files, subjects, given, *device, args.include_path, args.quiet))
    names, shown = ["16 bit", *(subject.name for subject in subjects)], []
    with everywhere() as give:
        for group in groups:
            _kept(args, subjects, group[1:], TasksRecord, give)
            shown.append(tables.named([parse(one, TasksRecord) for one in group], names))
        if _told(args, [one for group in groups for one in group], give):
            return 0
        for number, group in enumerate(shown):
            print("\n" * bool(number), end="")
            print_table(tables.tasks(group), False)
            print("".join(f"\n{note}" for note in tables.task_notes(group)), end="")
    return 0


def compare(args: argparse.Namespace) -> int:
    """Run `kvq compare`."""
    files, ledger = models.resolve(args.model), _ledger(args.folder)
    automatic = [text for text in args.recipes if text in budget.AUTOMATIC] or (["auto"] if args.bits else [])
    texts = recipe_text.with_settings([text for text in args.recipes if text not in automatic], args.set)
    chosen, notes = choose(texts, files) if texts or not args.recipes else ([], [])
    for note in notes:
        print(f"kvq: {note}", file=sys.stderr)
    source, device = corpus.pin(args.corpus or files.entry.corpus), _device(args.device)
    batch, beside = _texts(args, files, source)
    length = _length(args, files)
    subjects = {recipe.name: Subject(recipe.name, recipe, {}) for recipe in chosen}
    asked_as = {recipe_text.read(text).name: text for text in texts if recipe_text.written(text)}
    fitted = [asked_as.get(recipe.name, recipe.name) for recipe in chosen if recipe.fitted] + automatic
    if fitted:
        text = Text(source, args.samples, length, transfer=args.transfer, seed=args.seed)
        machine = Machine(device, args.dtype, torch.get_num_threads(), run=args.folder)
        what = What(args.model, tuple(fitted), tuple(args.bits))
        asked = Job(what, text, machine, Evaluation(False), Publication(False))
        work = prepare.prepare(asked)
        prepare.preflight(asked, work)
        with closing(Bar(work.plan, args.quiet)) as bar:
            subjects |= {subject.name: subject for subject in run.fit(replace(work, listener=bar))}
    protocol = _protocol(args, None)
    uneven = sorted({block for one in subjects.values() if length % (block := args.block or one.recipe.window.block)})
    if uneven and args.protocol != "in-use":
        rests = ", ".join(f"{length % block} in blocks of {block}" for block in uneven)
        note = f"windows of {length} tokens: the last of them stay exact in a full encode, {rests}"
        print(f"kvq: {note}; use --length with a multiple of all blocks", file=sys.stderr)
    with progress_bar(record.work(files, batch, len(subjects), protocol, beside), args.quiet) as progress:
        measured = record.evaluate(
            files, batch, list(subjects.values()), protocol, *_used(args), progress, ledger, others=beside
        )
    records = tables.by_bits([parse(one, TextRecord) for one in measured])
    with everywhere() as give:
        if args.plot:
            give(save, {args.plot: plots.perplexity_by_bits(records)})
        if not _told(args, [one.raw for one in records], give):
            print_table(tables.narrow(records) if not args.wide else tables.comparison(records), False)
            print("".join(f"\n{note}" for note in tables.notes(records)))
    return 0


def bench(args: argparse.Namespace) -> int:
    """Run `kvq bench`: what was measured is printed, also when it is interrupted."""
    files, device = models.resolve(args.model), _device(args.device)
    asked = rounds.Plan(batches=args.batch, tokens=args.tokens, rounds=args.rounds, seed=args.seed)
    fitting = tuple(length for length in rounds.CONTEXTS if asked.longest(length) <= files.context)
    plan = replace(asked, contexts=args.context or fitting or rounds.CONTEXTS[:1]).check(files)
    memory = parse_bytes(args.memory, "--memory ") if args.memory else memory_of(device)
    ours = contenders.ours(recipe_text.with_settings(args.subjects, args.set), files, args.registry)
    names = ",".join(contenders.BESIDE) if args.beside is None else args.beside
    stock = [contenders.quantized(name) for name in ([] if names == "none" else names.split(","))]
    dtype, interrupted = rounds.dtype_of(files, args.dtype, device), None
    if args.dtype is None and (said := product.without_bfloat16(device)):
        exit_codes.say("kvq bench", said)
    every = [contenders.plain(dtype), *stock, *ours]
    with progress_bar(rounds.work(len(every), plan), args.quiet) as progress:
        model = rounds.load(files, device, dtype)
        about, done = rounds.about(files, model, every, plan), list[rounds.Round]()
        try:
            rounds.measure(model, every, plan, done, progress)
        except KeyboardInterrupt as error:
            interrupted = error
    found = timings.figures(done, every, about["weights_bytes"], memory)
    notes = timings.notes(found, about, memory) if found else []
    if args.json:
        print(json.dumps({"about": about | {"memory_bytes": memory}, "rows": found}, indent=2))
    elif found:
        print_table(timings.rows(found, memory), False)
        print("".join(f"\n{note}" for note in notes))
    if interrupted is not None:
        raise interrupted
    if wrong := timings.failed(found):
        raise RuntimeError(f"not measured: {'; '.join(wrong)}")
    return 0


def _protocol(args: argparse.Namespace, rows: int | None) -> record.Protocol:
    """The protocol that options ask for."""
    protocols = (args.protocol,) if args.protocol in PROTOCOLS else PROTOCOLS
    windows = record.ERROR_WINDOWS if args.layers or getattr(args, "plots", None) else 0
    given = {"error_windows": windows, "block": args.block, "protocols": protocols, "prompt": args.prompt}
    given["by_layer"] = args.by_layer or None
    return record.Protocol(args.step, rows, args.recent, args.sinks, **given)


def _used(args: argparse.Namespace) -> tuple[str, Any]:
    """Device and dtype; None: as stored. A CPU takes float32: what is measured here can be smaller than the rounding of
    bfloat16."""
    device = _device(args.device)
    return device, getattr(torch, args.dtype or "float32") if args.dtype or device == "cpu" else None


def _device(given: str | None) -> str:
    """The device that is asked for, else a GPU where there is one."""
    return usable(given or ("cuda" if torch.cuda.is_available() else "cpu"))


def _told(args: argparse.Namespace, records: Sequence[Any], give: Give) -> bool:
    """Write records where --output says, and print them with --json; False: a table of them is still to be printed."""
    text = json.dumps(records, indent=2)
    if args.output:
        give(save, {args.output: f"{text}\n".encode()})
    if args.json:
        print(text)
    return args.json


@contextmanager
def everywhere() -> Iterator[Give]:
    """Yield `give(step, *arguments)`, which gives what was measured to one of the places that it is for: one that fails
    takes nothing from the others. What a step ends in is raised at the end, or said before what ends the block itself.

    with everywhere() as give:
        give(save, {path: data})
        print_table(...)
    """
    failed: list[Exception] = []

    def give(step: Callable[..., object], *given: object) -> None:
        try:
            step(*given)
        except (ArtifactError, OSError, RuntimeError) as error:
            failed.append(error)

    try:
        yield give
    except BaseException:
        for error in failed:
            exit_codes.say("kvq", spoken(error))
        raise
    for error in failed[1:]:
        exit_codes.say("kvq", spoken(error))
    if failed:
        raise failed[0]


def save(found: Mapping[str | Path, bytes], folder: str | None = None) -> None:
    """Write files by their paths, below a folder that is made if one is named."""
    if folder is not None:
        disk.make_folder(Path(folder))
    for path, data in found.items():
        options.write_output(Path(folder or "", path), data)
