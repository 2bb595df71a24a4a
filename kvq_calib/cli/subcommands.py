"""What `kvq eval`, `compare`, `probe` and `import` do: each takes parsed arguments, prints, and returns an exit code.

What they need is imported when they run: `kvq list` must not wait for it.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvq_runtime.cli.table import print_table


def evaluate(args: argparse.Namespace) -> int:
    """Run `kvq eval`."""
    from kvq_calib.evaluate import record
    from kvq_calib.evaluate.subject import find
    from kvq_calib.model import find as models
    from kvq_calib.report import plots
    from kvq_calib.report.names import named
    from kvq_calib.report.tables import about_texts, table
    from kvq_calib.text import corpus, others
    from kvq_runtime.artifact import recipe_text
    from kvq_runtime.registry import reference
    from kvq_runtime.registry.resolve import open_registry

    files = models.resolve(args.model)
    given = recipe_text.with_settings(args.subjects, args.set)
    subjects = [find(text, files, args.registry) for text in given]
    recipe_text.distinct(subject.recipe for subject in subjects if subject.sha256 is None)
    if args.tasks:
        return _tasks(args, files, subjects)
    length = args.length or min(files.entry.seq_len, files.context)
    source = args.corpus or files.entry.corpus
    batch = corpus.select(source, files.path, args.windows, length, args.seed, "held-out")
    also = files.entry.beside(args.corpus) if args.also is None else args.also
    beside = others.choose(also, source, files.path, args.windows, length, args.seed)
    protocol = _protocol(args, args.rows)
    with _bar(record.work(files, batch, len(subjects), protocol, beside), args.quiet) as progress:
        device = _device(args.device)
        used = (device, _dtype(args.dtype, device))
        records = record.evaluate(files, batch, subjects, protocol, *used, progress, others=beside)
    for subject, found in zip(subjects, records, strict=True):
        if subject.published:
            kept = reference.parse(subject.name)
            assert isinstance(kept, reference.Reference), "what a registry holds was asked for by a reference"
            open_registry(kept.registry or args.registry).add_evaluation(found, kept.name)
    if args.output:
        Path(args.output).write_text(json.dumps(records, indent=2) + "\n")
    shown = named(records, [subject.name for subject in subjects])
    if args.plots:
        folder = Path(args.plots)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "error-by-layer.png").write_bytes(plots.error_by_layer(shown))
        (folder / "perplexity-by-bits.png").write_bytes(plots.perplexity_by_bits(shown))
    if args.json:
        print(json.dumps(records, indent=2))
        return 0
    print_table(table(shown), False)
    print("".join(f"\n{note}" for note in about_texts(shown)))
    if args.layers:
        rows = [{"recipe": found["name"], **row} for found in shown for row in found["result"]["layers"]]
        print()
        print_table(rows, False)
    return 0


def _tasks(args: argparse.Namespace, files, subjects) -> int:
    """Run `kvq eval --tasks`."""
    from kvq_calib.evaluate import tasks
    from kvq_calib.evaluate.ledger import Ledger
    from kvq_calib.report import task_table
    from kvq_calib.report.names import named
    from kvq_runtime.registry.reference import home

    protocol = _protocol(args, None)
    subjects = [replace(one, recipe=protocol.recipe(one.recipe, files.geometry, one.tensors)) for one in subjects]
    lengths = args.lengths or [length for length in tasks.LENGTHS if length <= files.context]
    plan = tasks.Plan(tuple(args.tasks.split(",")), tuple(lengths), tuple(args.depths), args.samples, args.seed,
                      protocol.protocols)  # fmt: skip
    device = _device(args.device)
    used = (device, _dtype(args.dtype, device))
    with _bar(tasks.work(plan, len(subjects)), args.quiet) as progress:
        records = tasks.evaluate(files, subjects, plan, *used, progress, Ledger(home() / "evaluated"))
    if args.output:
        Path(args.output).write_text(json.dumps(records, indent=2) + "\n")
    if args.json:
        print(json.dumps(records, indent=2))
    else:
        shown = named(records, ["16 bit", *(subject.name for subject in subjects)])
        print_table(task_table.rows(shown), False)
    return 0


def compare(args: argparse.Namespace) -> int:
    """Run `kvq compare`."""
    import torch

    from kvq_calib import job
    from kvq_calib.cli.progress import Bar
    from kvq_calib.evaluate import compare as comparing
    from kvq_calib.evaluate import record
    from kvq_calib.evaluate.ledger import Ledger
    from kvq_calib.evaluate.subject import Subject
    from kvq_calib.model import find as models
    from kvq_calib.report import plots, points, tables
    from kvq_calib.run import budget
    from kvq_calib.text import corpus, others
    from kvq_runtime.artifact import recipe_text
    from kvq_runtime.registry.reference import home

    files = models.resolve(args.model)
    length = args.length or min(files.entry.seq_len, files.context)
    automatic = [text for text in args.recipes if text in budget.AUTOMATIC] or (["auto"] if args.bits else [])
    texts = recipe_text.with_settings([text for text in args.recipes if text not in automatic], args.set)
    chosen, notes = comparing.choose(texts, files.geometry) if texts or not args.recipes else ([], [])
    for note in notes:
        print(f"kvq: {note}", file=sys.stderr)
    source, device = corpus.pin(args.corpus or files.entry.corpus), _device(args.device)
    batch = corpus.select(source, files.path, args.windows, length, args.seed, "held-out")
    also = files.entry.beside(args.corpus) if args.also is None else args.also
    beside = others.choose(also, source, files.path, args.windows, length, args.seed)
    subjects = {recipe.name: Subject(recipe.name, recipe, {}) for recipe in chosen}
    asked_as = {recipe_text.read(text).name: text for text in texts if recipe_text.written(text)}
    fitted = tuple(asked_as.get(recipe.name, recipe.name) for recipe in chosen if recipe.fitted)
    fitted += tuple(automatic)
    if fitted:
        asked = job.Job(
            args.model, fitted, tuple(args.bits), corpus=source, samples=args.samples, seq_len=length, seed=args.seed,
            transfer=args.transfer, device=device, dtype=args.dtype, threads=torch.get_num_threads(), run=args.folder,
            publish=False, evaluate=False,
        )  # fmt: skip
        work = asked.prepare()
        job.preflight(asked, work)
        bar = Bar(work.plan, args.quiet)
        try:
            subjects |= {subject.name: subject for subject in job.fit(replace(work, listener=bar))}
        finally:
            bar.close()
    protocol = _protocol(args, None)
    uneven = sorted({block for one in subjects.values() if length % (block := args.block or one.recipe.window.block)})
    if uneven and args.protocol != "in-use":
        rests = ", ".join(f"{length % block} in blocks of {block}" for block in uneven)
        note = f"windows of {length} tokens: the last of them stay exact in a full encode, {rests}"
        print(f"kvq: {note}; use --length with a multiple of all blocks", file=sys.stderr)
    ledger = Ledger(home() / "evaluated" if args.folder is None else Path(args.folder) / "evaluated")
    with _bar(record.work(files, batch, len(subjects), protocol, beside), args.quiet) as progress:
        used = (device, _dtype(args.dtype, device))
        records = record.evaluate(
            files, batch, list(subjects.values()), protocol, *used, progress, ledger, others=beside
        )
    records = points.by_bits(records)
    if args.output:
        Path(args.output).write_text(json.dumps(records, indent=1) + "\n")
    if args.plot:
        Path(args.plot).write_bytes(plots.comparison(records))
    if args.json:
        print(json.dumps(records, indent=2))
    else:
        print_table(tables.comparison(records), False)
        print("".join(f"\n{note}" for note in tables.notes(records)))
    return 0


def probe(args: argparse.Namespace) -> int:
    """Run `kvq probe`."""
    from kvq_calib.evaluate import probe as probes
    from kvq_calib.model import find as models
    from kvq_calib.report import fit_plots

    files = models.resolve(args.model)
    settings = probes.settings(files, args.corpus, args.samples, args.held_out, args.length, args.seed)
    with _bar(settings.work(files), args.quiet) as progress:
        device = _device(args.device)
        found = probes.probe(files, settings, device, _dtype(args.dtype, device), progress)
    if args.plot:
        Path(args.plot).write_bytes(fit_plots.probes(found))
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print_table(probes.by_layer(found) if args.layers else probes.means(found), False)
    return 0


def import_files(args: argparse.Namespace) -> int:
    """Run `kvq import`."""
    from kvq_calib.job import Job
    from kvq_calib.model import find as models
    from kvq_runtime.artifact import artifact, oscar_files
    from kvq_runtime.cli.table import print_record
    from kvq_runtime.recipe import preset
    from kvq_runtime.registry.resolve import open_registry

    files = models.resolve(args.model)
    paths = Path(args.keys), Path(args.values)
    made = oscar_files.to_artifact(paths, preset(args.recipe), files.fingerprint(), files.id)
    registry = open_registry(args.registry)
    name = args.name or Job(args.model, (args.recipe,)).artifact_name(files, args.recipe)
    version = registry.publish(name, artifact.to_bytes(made))
    print_record({"artifact": f"{name}@{version.version}", "sha256": version.sha256, "recipe": args.recipe}, args.json)
    return 0


def _protocol(args: argparse.Namespace, rows: int | None):
    from kvq_calib.evaluate import record
    from kvq_runtime.registry.measured import PROTOCOLS

    protocols = PROTOCOLS if args.protocol == "both" else (args.protocol,)
    return record.Protocol(
        args.step, rows, args.recent, args.sinks, block=args.block, protocols=protocols, prompt=args.prompt
    )


def _device(given: str | None) -> str:
    import torch

    from kvq_calib.run.device import usable

    return usable(given or ("cuda" if torch.cuda.is_available() else "cpu"))


def _dtype(given: str | None, device: str):
    """None: as stored. A CPU takes float32: what is measured here can be smaller than the rounding of bfloat16."""
    import torch

    return getattr(torch, given or "float32") if given or device == "cpu" else None


@contextmanager
def _bar(tokens: int, quiet: bool) -> Iterator[Any]:
    """A progress bar on stderr, where a person looks."""
    from tqdm import tqdm
    from transformers.utils import logging

    logging.disable_progress_bar()  # of loading weights: it would break into ours
    with tqdm(total=tokens, unit="tok", unit_scale=True, disable=quiet or not sys.stderr.isatty()) as bar:
        yield bar.update
