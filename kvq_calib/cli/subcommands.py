"""Run `kvq eval`, `compare`, `bench` and `report`. Imported when one of them runs: `kvq list` must not wait for it."""

import json
import sys
import webbrowser
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch

from kvq_calib.bench import contenders, rounds
from kvq_calib.cli.progress import Bar, measuring
from kvq_calib.evaluate import record, tasks
from kvq_calib.evaluate.ledger import Ledger
from kvq_calib.evaluate.subject import Subject, choose, find, keep
from kvq_calib.job import prepare, run
from kvq_calib.job.job import Evaluation, Job, Machine, Publication, Text, What
from kvq_calib.model import find as models
from kvq_calib.model.files import ModelFiles
from kvq_calib.report import plots, registry_page, tables, timings, version_page
from kvq_calib.run.device import memory_of, usable
from kvq_calib.tasks import needles
from kvq_calib.text import corpus
from kvq_runtime.artifact import artifact, recipe_text
from kvq_runtime.cli.exit_codes import say
from kvq_runtime.cli.options import check_exists, check_output
from kvq_runtime.cli.table import print_record, print_table
from kvq_runtime.disk import files as disk
from kvq_runtime.errors import extra
from kvq_runtime.ops import product
from kvq_runtime.prefix.folder import parse_bytes
from kvq_runtime.registry import reference
from kvq_runtime.registry.evaluation_records import (
    PROTOCOLS,
    Record,
    TasksRecord,
    TextRecord,
    parse,
    readable,
    text_records,
)
from kvq_runtime.registry.resolve import choose as choose_version
from kvq_runtime.registry.resolve import open_registry, resolve

R = TypeVar("R", bound=Record)
LIMIT = 1 << 28  # bytes of a file of records


def evaluate(args: Namespace) -> int:
    """Run `kvq eval`."""
    if not args.subjects and not args.tasks:
        raise ValueError("nothing is named to be measured; give a recipe or an artifact, or --tasks for 16 bit alone")
    files = models.resolve(args.model)
    subjects = [find(text, files, args.registry) for text in recipe_text.with_settings(args.subjects, args.set)]
    recipe_text.distinct(subject.recipe for subject in subjects if subject.sha256 is None)
    if args.tasks:
        return _tasks(args, files, subjects)
    batch, beside = _texts(args, files, args.corpus or files.entry.corpus)
    protocol = _protocol(args)
    with measuring(record.work(files, batch, len(subjects), protocol, beside), args.quiet) as progress:
        records = record.evaluate(files, batch, subjects, protocol, *_used(args), progress, others=beside)
    shown = _named(subjects, records, TextRecord)
    if args.plots:
        disk.make_folder(Path(args.plots))
        Path(args.plots, "error-by-layer.png").write_bytes(plots.error_by_layer(shown))
        Path(args.plots, "perplexity-by-bits.png").write_bytes(plots.perplexity_by_bits(shown))
    if not _give(args, records):
        print_table(tables.table(shown), False)
        print("".join(f"\n{note}" for note in tables.about_texts(shown)))
        if args.layers:
            print()
            print_table([{"recipe": one.name, **row} for one in shown for row in one.result.layers], False)
    _keep(args, subjects, records)
    return 0


def _length(args: Namespace, files: ModelFiles) -> int:
    return args.length or min(files.entry.seq_len, files.context)


def _texts(args: Namespace, files: ModelFiles, source: str):
    """Choose the windows to measure on, and windows of texts of other kinds by name."""
    length = _length(args, files)
    batch = corpus.select(source, files.path, args.windows, length, args.seed, "held-out")
    also = files.entry.beside(args.corpus) if args.also is None else args.also
    return batch, corpus.select_others(also, source, files.path, args.windows, length, args.seed)


def _named(subjects: Sequence[Subject], records: Sequence[Any], kind: type[R]) -> list[R]:
    """Parse records, and name them as their subjects were given."""
    return tables.named([parse(one, kind) for one in records], [subject.name for subject in subjects])


def _keep(args: Namespace, subjects: Sequence[Subject], records: Sequence[Any]) -> None:
    """Keep records of artifacts in their registries."""
    for subject, one in zip(subjects, records, strict=True):
        keep(subject, one, args.registry)


def _tasks(args: Namespace, files: ModelFiles, subjects: Sequence[Subject]) -> int:
    """Run `kvq eval --tasks`: names that kvq does not have are lm-eval's."""
    if args.plots or args.layers or args.by_layer or args.protocol == "full":
        raise ValueError(
            "--plots, --layers, --by-layer and --protocol full are of text, which --tasks does not measure"
        )
    protocol = _protocol(args)
    subjects, ledger = (
        [protocol.subject(one, files.geometry) for one in subjects],
        Ledger(reference.home() / "evaluated"),
    )
    named = args.tasks.split(",")
    own = [task for task in named if task in needles.TASKS]
    foreign = [task for task in named if task not in own]
    if foreign and find_spec("lm_eval") is None:
        text = f"tasks {', '.join(foreign)} are not kvq's own ({', '.join(needles.TASKS)}), and lm-eval is missing"
        raise RuntimeError(f"{text}; {extra('lm-eval')}")
    device, groups = _used(args), []
    if own:
        lengths = args.lengths or [length for length in tasks.LENGTHS if length <= files.context]
        haystack = tasks.haystack(args.corpus or "demo")
        settings = tuple(lengths), tuple(args.depths), args.samples, args.seed, args.chat
        plan = tasks.Plan(tuple(own), haystack, *settings)
        with measuring(tasks.work(plan, len(subjects)), args.quiet) as progress:
            groups.append(tasks.evaluate(files, subjects, plan, *device, progress, ledger))
    if foreign:
        from kvq_calib.lm_eval import model as harness

        given = harness.Asked(tuple(foreign), args.limit, apply_chat_template=args.chat)
        groups.append(harness.evaluate(files, subjects, given, *device, args.include_path, args.quiet))
    if not _give(args, [one for group in groups for one in group]):
        names = ["16 bit", *(subject.name for subject in subjects)]
        for number, group in enumerate(groups):
            shown = tables.named([parse(one, TasksRecord) for one in group], names)
            print("\n" * bool(number), end="")
            print_table(tables.tasks(shown), False)
            print("".join(f"\n{note}" for note in tables.task_notes(shown)), end="")
    for group in groups:
        _keep(args, subjects, group[1:])
    return 0


def compare(args: Namespace) -> int:
    """Run `kvq compare`."""
    files, ledger = models.resolve(args.model), Ledger(Path(args.folder or reference.home()) / "evaluated")
    automatic = ["auto"] if args.bits else []
    texts = recipe_text.with_settings([text for text in args.recipes if text != "auto"], args.set)
    chosen, notes = choose(texts, files) if texts or not args.recipes else ([], [])
    for note in notes:
        say("kvq", note)
    source, length = corpus.pin(args.corpus or files.entry.corpus), _length(args, files)
    batch, beside = _texts(args, files, source)
    subjects = {recipe.name: Subject(recipe.name, recipe, {}) for recipe in chosen}
    written = {recipe_text.read(text).name: text for text in texts if recipe_text.written(text)}
    fitted = [written.get(recipe.name, recipe.name) for recipe in chosen if recipe.fitted] + automatic
    if fitted:
        text = Text(source, args.samples, length, seed=args.seed)
        machine = Machine(_device(args.device), args.dtype, torch.get_num_threads(), run=args.folder)
        what = What(args.model, tuple(fitted), tuple(args.bits))
        job = Job(what, text, machine, Evaluation(False), Publication(False))
        work = prepare.prepare(job)
        prepare.preflight(job, work)
        with closing(Bar(work.plan, args.quiet)) as bar:
            subjects |= {subject.name: subject for subject in run.fit(replace(work, listener=bar))}
    protocol = _protocol(args)
    uneven = sorted({block for one in subjects.values() if length % (block := args.block or one.recipe.window.block)})
    if uneven and args.protocol != "in-use":
        blocks = " and ".join(map(str, uneven))
        say("kvq", f"windows of {length} tokens: the last stay exact in a full encode; use a multiple of {blocks}")
    with measuring(record.work(files, batch, len(subjects), protocol, beside), args.quiet) as progress:
        measured = record.evaluate(
            files, batch, list(subjects.values()), protocol, *_used(args), progress, ledger, others=beside
        )
    records = tables.by_bits([parse(one, TextRecord) for one in measured])
    if args.plot:
        Path(args.plot).write_bytes(plots.perplexity_by_bits(records))
    if not _give(args, [one.raw for one in records]):
        print_table(tables.narrow(records), False)
        print("".join(f"\n{note}" for note in tables.notes(records)))
    return 0


def bench(args: Namespace) -> int:
    """Run `kvq bench`: print what was measured, also when it is interrupted."""
    files, device = models.resolve(args.model), _device(args.device)
    asked = rounds.Plan(batches=args.batch, tokens=args.tokens, rounds=args.rounds, seed=args.seed)
    fitting = tuple(length for length in rounds.CONTEXTS if asked.longest(length) <= files.context)
    plan = replace(asked, contexts=args.context or fitting or rounds.CONTEXTS[:1]).check(files)
    memory = parse_bytes(args.memory, "--memory ") if args.memory else memory_of(device)
    ours = contenders.ours(recipe_text.with_settings(args.subjects, args.set), files, args.registry)
    names = ",".join(contenders.BESIDE) if args.beside is None else args.beside
    stock = [contenders.quantized(name) for name in ([] if names == "none" else names.split(","))]
    dtype, interrupted = rounds.dtype_of(files, args.dtype, device), None
    if args.dtype is None and (note := product.without_bfloat16(device)):
        say("kvq bench", note)
    every = [contenders.plain(dtype), *stock, *ours]
    with measuring(rounds.work(len(every), plan), args.quiet) as progress:
        model = rounds.load(files, device, dtype)
        about, done = rounds.about(files, model, every, plan), list[rounds.Round]()
        try:
            rounds.measure(model, every, plan, done, progress)
        except KeyboardInterrupt:
            interrupted = KeyboardInterrupt("interrupted; finished rounds are above")
    figures = timings.figures(done, every, about["weights_bytes"], memory)
    if args.json:
        print(json.dumps({"about": about | {"memory_bytes": memory}, "rows": figures}, indent=2))
    elif figures:
        print_table(timings.rows(figures, memory), False)
        print("".join(f"\n{note}" for note in timings.notes(figures, about, memory)))
    if interrupted is not None:
        raise interrupted
    if failed := timings.failed(figures):
        raise RuntimeError(f"not measured: {'; '.join(failed)}")
    return 0


def _protocol(args: Namespace) -> record.Protocol:
    """Make the protocol that options ask for."""
    return record.Protocol(
        sinks=args.sinks,
        recent=args.recent,
        block=args.block,
        prompt=args.prompt,
        protocols=(args.protocol,) if args.protocol in PROTOCOLS else PROTOCOLS,
        error_windows=record.ERROR_WINDOWS if args.layers or getattr(args, "plots", None) else 0,
        by_layer=args.by_layer or None,
    )


def _used(args: Namespace) -> tuple[str, Any]:
    """Return device and dtype; None: as stored. A CPU takes float32: losses can be smaller than bfloat16's rounding."""
    device = _device(args.device)
    return device, getattr(torch, args.dtype or "float32") if args.dtype or device == "cpu" else None


def _device(given: str | None) -> str:
    return usable(given or ("cuda" if torch.cuda.is_available() else "cpu"))


def _give(args: Namespace, records: Sequence[Any]) -> bool:
    """Write records to --output, and print them with --json; return False if a table is still to be printed."""
    text = json.dumps(records, indent=2)
    if args.output:
        Path(args.output).write_text(f"{text}\n")
    if args.json:
        print(text)
    return args.json


# ---- kvq report ------------------------------------------------------------------------------------------------------


def report(args: Namespace) -> int:
    """Run `kvq report`: 0, or 1 for a page of something that a check found damaged."""
    if args.reference is None:
        return _registry_report(args)
    known = _known_of_version(args, _records(args.compare))
    name = f"{known['name']}-v{known['version']}.html" if known["version"] else f"{known['name']}.html"
    return _write_page(args, known, version_page.page, Path(args.out or name), version_page.faults(known))


def _registry_report(args: Namespace) -> int:
    """Write the page of a registry; into a folder with the page of every version, linked from its rows."""
    if args.registry is None or args.compare:
        raise ValueError("nothing is named; give NAME for the page of a version, or --registry for all of them")
    check_exists(args.registry)
    registry = open_registry(args.registry or None)
    known, out = registry_page.of_registry(registry, datetime.now(UTC)), Path(args.out or "registry.html")
    if args.out and (out.is_dir() or not (out.suffix or out.exists())):
        disk.make_folder(out)
        for row in known["versions"]:
            row["page"] = f"{row['name']}-v{row['version']}.html"
            version = version_page.of_version(registry, row["name"], row["version"])
            disk.save(out / row["page"], version_page.page(version).encode())
        out /= "index.html"
    damaged = [f"{one['name']}: {one['reason']}" for one in known["faults"]]
    damaged += [f"{row['name']} {row['version']}: {row['damage']}" for row in known["versions"] if row["damage"]]
    return _write_page(args, known, registry_page.page, out, damaged)


def _known_of_version(args: Namespace, compared: list[TextRecord]) -> dict[str, Any]:
    folder = Path(args.reference)
    given = folder if folder.is_dir() else reference.parse(args.reference)
    if isinstance(given, Path):
        resolved = resolve(args.reference, args.registry or None)
        made = artifact.load(resolved.path, resolved.sha256, resolved.size)
        return version_page.of_file(made, resolved.name, resolved.sha256, resolved.size, compared)
    registry = open_registry(given.registry or args.registry or None)
    version, _ = choose_version(registry.existing(given.name), given)
    return version_page.of_version(registry, given.name, version.version, compared)


def _records(file: str | None) -> list[TextRecord]:
    """Read the records that `kvq compare --output` or `kvq eval --output` wrote; raise ValueError for other JSON."""
    if file is None:
        return []
    try:
        given = json.loads(disk.read(Path(file), LIMIT))
    except ValueError as error:
        raise ValueError(f"--compare {file}: {error}; give what kvq compare --output wrote") from None
    given = [given] if isinstance(given, dict) else given  # the record that lies beside an artifact
    records = text_records(readable(given)) if isinstance(given, list) else None
    if records is None or len(records) < len(given):
        raise ValueError(f"--compare {file}: no list of records; give what kvq compare --output wrote")
    return records


def _write_page(args: Namespace, known: dict[str, Any], page: Any, path: Path, damaged: list[str]) -> int:
    """Print the data, or write the page and print its path."""
    if args.json:
        print(json.dumps(known, indent=2, default=str))
    if args.out or args.open or not args.json:
        check_output("--out", path)
        data = page(known).encode()
        path.write_bytes(data)
        if not args.json:
            print_record({"page": str(path), "bytes": len(data)}, json=False)
        if args.open and not webbrowser.open(path.absolute().as_uri()):
            print(f"kvq: no browser was found; open {path}", file=sys.stderr)
    for fault in damaged:
        say("kvq", fault)
    return int(bool(damaged))
