"""The commands `kvq eval`, `compare`, `bench`, `probe` and `import`: take parsed arguments, print, return an exit code.

What they need is imported when they run: `kvq list` must not wait for it.
"""

import argparse
import json
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from kvq_calib.cli.arguments import device_of, dtype_of, progress_bar, protocol_of, told
from kvq_runtime.cli.table import print_table


def evaluate(args: argparse.Namespace) -> int:
    """Run `kvq eval`."""
    from kvq_calib.evaluate import record
    from kvq_calib.evaluate.subject import find, keep
    from kvq_calib.model import find as models
    from kvq_calib.report import plots
    from kvq_calib.report.tables import about_texts, named, table
    from kvq_calib.text import corpus
    from kvq_runtime.artifact import recipe_text
    from kvq_runtime.registry.measured import TextRecord
    from kvq_runtime.registry.sound import read

    if not args.subjects and not args.tasks:
        raise ValueError("nothing is named to be measured; give a recipe or an artifact, or --tasks for 16 bit alone")
    files = models.resolve(args.model)
    given = recipe_text.with_settings(args.subjects, args.set)
    subjects = [find(text, files, args.registry) for text in given]
    recipe_text.distinct(subject.recipe for subject in subjects if subject.sha256 is None)
    if args.plot and not args.tasks:
        raise ValueError("--plot draws tasks, and --tasks names none; --plots DIR draws what is measured on text")
    if args.tasks:
        from kvq_calib.cli import tasks

        return tasks.evaluate(args, files, subjects)
    if args.protocol == "decode":
        return _greedy(args, files, subjects)
    length = args.length or min(files.entry.seq_len, files.context)
    source = args.corpus or files.entry.corpus
    batch = corpus.select(source, files.path, args.windows, length, args.seed, "held-out")
    also = files.entry.beside(args.corpus) if args.also is None else args.also
    beside = corpus.select_others(also, source, files.path, args.windows, length, args.seed)
    protocol = protocol_of(args, args.rows)
    with progress_bar(record.work(files, batch, len(subjects), protocol, beside), args.quiet) as progress:
        device = device_of(args.device)
        used = (device, dtype_of(args.dtype, device))
        records = record.evaluate(files, batch, subjects, protocol, *used, progress, others=beside)
    for subject, found in zip(subjects, records, strict=True):
        keep(subject, found, args.registry)
    shown = named([read(one, TextRecord) for one in records], [subject.name for subject in subjects])
    if args.plots:
        folder = Path(args.plots)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "error-by-layer.png").write_bytes(plots.error_by_layer(shown))
        (folder / "perplexity-by-bits.png").write_bytes(plots.perplexity_by_bits(shown))
    if told(args, records):
        return 0
    print_table(table(shown), False)
    print("".join(f"\n{note}" for note in about_texts(shown)))
    if args.layers:
        rows = [{"recipe": found.name, **row} for found in shown for row in found.result.layers]
        print()
        print_table(rows, False)
    return 0


def _greedy(args: argparse.Namespace, files, subjects) -> int:
    """Run `kvq eval --protocol decode`: follow the 16-bit model's greedy text with each cache."""
    from kvq_calib.evaluate import decode
    from kvq_calib.evaluate.ledger import Ledger
    from kvq_calib.evaluate.subject import keep
    from kvq_calib.report import greedy
    from kvq_calib.report.tables import named
    from kvq_calib.text import corpus
    from kvq_runtime.registry.measured import GreedyRecord
    from kvq_runtime.registry.reference import home
    from kvq_runtime.registry.sound import read

    protocol = protocol_of(args, None)
    subjects = [replace(one, recipe=protocol.recipe(one.recipe, files.geometry, one.tensors)) for one in subjects]
    plan = decode.Plan(args.length or min(decode.LENGTH, files.context))
    source, prompt = args.corpus or files.entry.corpus, args.prompt or decode.PROMPT
    batch = corpus.select(source, files.path, args.windows, prompt, args.seed, "held-out")
    device = device_of(args.device)
    used = (device, dtype_of(args.dtype, device))
    with progress_bar(decode.work(batch, len(subjects), plan), args.quiet) as progress:
        records = decode.evaluate(files, batch, subjects, plan, *used, progress, Ledger(home() / "evaluated"))
    for subject, found in zip(subjects, records, strict=True):
        keep(subject, found, args.registry)
    if not told(args, records):
        shown = named([read(one, GreedyRecord) for one in records], [subject.name for subject in subjects])
        print_table(greedy.rows(shown), False)
        print(f"\n{greedy.about(shown)}")
    return 0


def compare(args: argparse.Namespace) -> int:
    """Run `kvq compare`."""
    import torch

    from kvq_calib.cli.progress import Bar
    from kvq_calib.evaluate import compare as comparing
    from kvq_calib.evaluate import record
    from kvq_calib.evaluate.ledger import Ledger
    from kvq_calib.evaluate.subject import Subject
    from kvq_calib.job import prepare, run
    from kvq_calib.job.job import Evaluation, Job, Machine, Publication, Text, What
    from kvq_calib.model import find as models
    from kvq_calib.report import plots, tables
    from kvq_calib.run import budget
    from kvq_calib.text import corpus
    from kvq_runtime.artifact import recipe_text
    from kvq_runtime.registry.measured import TextRecord
    from kvq_runtime.registry.reference import home
    from kvq_runtime.registry.sound import read

    files = models.resolve(args.model)
    length = args.length or min(files.entry.seq_len, files.context)
    automatic = [text for text in args.recipes if text in budget.AUTOMATIC] or (["auto"] if args.bits else [])
    texts = recipe_text.with_settings([text for text in args.recipes if text not in automatic], args.set)
    chosen, notes = comparing.choose(texts, files.geometry) if texts or not args.recipes else ([], [])
    for note in notes:
        print(f"kvq: {note}", file=sys.stderr)
    source, device = corpus.pin(args.corpus or files.entry.corpus), device_of(args.device)
    batch = corpus.select(source, files.path, args.windows, length, args.seed, "held-out")
    also = files.entry.beside(args.corpus) if args.also is None else args.also
    beside = corpus.select_others(also, source, files.path, args.windows, length, args.seed)
    subjects = {recipe.name: Subject(recipe.name, recipe, {}) for recipe in chosen}
    asked_as = {recipe_text.read(text).name: text for text in texts if recipe_text.written(text)}
    fitted = tuple(asked_as.get(recipe.name, recipe.name) for recipe in chosen if recipe.fitted)
    fitted += tuple(automatic)
    if fitted:
        text = Text(source, args.samples, length, transfer=args.transfer, seed=args.seed)
        machine = Machine(device, args.dtype, torch.get_num_threads(), run=args.folder)
        what, alone = What(args.model, fitted, tuple(args.bits)), (Evaluation(False), Publication(False))
        asked = Job(what, text, machine, *alone)
        work = prepare.prepare(asked)
        prepare.preflight(asked, work)
        with closing(Bar(work.plan, args.quiet)) as bar:
            subjects |= {subject.name: subject for subject in run.fit(replace(work, listener=bar))}
    protocol = protocol_of(args, None)
    uneven = sorted({block for one in subjects.values() if length % (block := args.block or one.recipe.window.block)})
    if uneven and args.protocol != "in-use":
        rests = ", ".join(f"{length % block} in blocks of {block}" for block in uneven)
        note = f"windows of {length} tokens: the last of them stay exact in a full encode, {rests}"
        print(f"kvq: {note}; use --length with a multiple of all blocks", file=sys.stderr)
    ledger = Ledger(home() / "evaluated" if args.folder is None else Path(args.folder) / "evaluated")
    with progress_bar(record.work(files, batch, len(subjects), protocol, beside), args.quiet) as progress:
        used = (device, dtype_of(args.dtype, device))
        measured = record.evaluate(
            files, batch, list(subjects.values()), protocol, *used, progress, ledger, others=beside
        )
    records = tables.by_bits([read(one, TextRecord) for one in measured])
    if args.plot:
        Path(args.plot).write_bytes(plots.comparison(records))
    if not told(args, [one.raw for one in records]):
        print_table(tables.narrow(records) if not args.wide else tables.comparison(records), False)
        print("".join(f"\n{note}" for note in tables.notes(records)))
    return 0


def bench(args: argparse.Namespace) -> int:
    """Run `kvq bench`: what was measured is printed, also when it is interrupted."""
    from kvq_calib.bench import contenders, rounds
    from kvq_calib.model import find as models
    from kvq_calib.report import bench as shown
    from kvq_calib.run.device import memory_of
    from kvq_runtime.artifact import recipe_text
    from kvq_runtime.cli import exit_codes
    from kvq_runtime.ops import product
    from kvq_runtime.prefix.shelf import parse_bytes

    files, device = models.resolve(args.model), device_of(args.device)
    asked = rounds.Plan(batches=args.batch, tokens=args.tokens, rounds=args.rounds, seed=args.seed)
    fitting = tuple(length for length in rounds.CONTEXTS if asked.longest(length) <= files.context)
    plan = replace(asked, contexts=args.context or fitting or rounds.CONTEXTS[:1]).check(files)
    memory = parse_bytes(args.memory, "--memory ") if args.memory else memory_of(device)
    ours = contenders.ours(recipe_text.with_settings(args.subjects, args.set), files, args.registry)
    others = ",".join(contenders.BESIDE) if args.beside is None else args.beside
    stock = [contenders.quantized(name) for name in ([] if others == "none" else others.split(","))]
    dtype, interrupted = rounds.dtype_of(files, args.dtype, device), None
    if args.dtype is None and (said := product.without_bfloat16(device)):
        exit_codes.say("kvq bench", said)
    every = [contenders.plain(dtype), *stock, *ours]
    with progress_bar(rounds.work(len(every), plan), args.quiet) as progress:
        model = rounds.load(files, device, dtype)
        absent = {one.name: contenders.absent(one, model) for one in stock}
        able = [one for one in every if not absent.get(one.name)]
        progress(rounds.work(len(every) - len(able), plan))
        about = rounds.about(files, model, able, plan)
        kept = rounds.Rounds(Path(args.out) if args.out else None, about)
        try:
            rounds.measure(model, able, plan, kept, progress)
        except KeyboardInterrupt as error:
            interrupted = error
    found = shown.figures(rounds.chosen(plan, kept), every, about["weights_bytes"], memory, absent)
    notes = shown.notes(found, about, memory) if found else []
    if args.plot and found:
        Path(args.plot).write_bytes(shown.picture(found, notes))
    if args.json:
        print(json.dumps({"about": about | {"memory_bytes": memory}, "rows": found}, indent=2))
    elif found:
        print_table(shown.rows(found, memory), False)
        print("".join(f"\n{note}" for note in notes))
    if interrupted is not None:
        raise interrupted
    wrong = shown.failed(found)
    if wrong:
        raise RuntimeError(f"not measured: {'; '.join(wrong)}")
    return 0


def probe(args: argparse.Namespace) -> int:
    """Run `kvq probe`."""
    from kvq_calib.evaluate import probe as probes
    from kvq_calib.model import find as models
    from kvq_calib.report import fit_plots

    files = models.resolve(args.model)
    settings = probes.settings(files, args.corpus, args.samples, args.held_out, args.length, args.seed)
    with progress_bar(settings.work(files), args.quiet) as progress:
        device = device_of(args.device)
        found = probes.probe(files, settings, device, dtype_of(args.dtype, device), progress)
    if args.plot:
        Path(args.plot).write_bytes(fit_plots.probes(found))
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print_table(probes.by_layer(found) if args.layers else probes.means(found), False)
    return 0


def import_files(args: argparse.Namespace) -> int:
    """Run `kvq import`."""
    from kvq_calib.job.job import Job, What
    from kvq_calib.model import find as models
    from kvq_runtime.artifact import artifact, oscar_files
    from kvq_runtime.cli.table import print_record
    from kvq_runtime.recipe import preset
    from kvq_runtime.registry.resolve import open_registry

    files = models.resolve(args.model)
    paths = Path(args.keys), Path(args.values)
    made = oscar_files.to_artifact(paths, preset(args.recipe), files.fingerprint(), files.id)
    registry = open_registry(args.registry)
    name = args.name or Job(What(args.model)).artifact_name(files, args.recipe)
    version = registry.publish(name, artifact.to_bytes(made))
    print_record({"artifact": f"{name}@{version.version}", "sha256": version.sha256, "recipe": args.recipe}, args.json)
    return 0
