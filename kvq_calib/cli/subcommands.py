"""Run the commands of `commands.py`. Imported when one of them runs: `kvq list` must not wait for it."""

import json
import webbrowser
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from kvq_calib import bench as benchmark
from kvq_calib.cli.progress import Bar, measuring
from kvq_calib.evaluate import check as checks
from kvq_calib.evaluate import needles, record, tasks
from kvq_calib.evaluate.candidate import Candidate, choose, find, keep
from kvq_calib.evaluate.saved_results import SavedResults
from kvq_calib.job import prepare, run
from kvq_calib.job.job import Job
from kvq_calib.model import find as models
from kvq_calib.model.files import ModelFiles
from kvq_calib.report import pages, plots, tables
from kvq_calib.run import checkpoint
from kvq_calib.run.device import usable
from kvq_calib.run.plan import environment
from kvq_calib.text import corpus
from kvq_runtime.artifact import recipe_text
from kvq_runtime.cli.exit_codes import say
from kvq_runtime.cli.options import check_exists, check_output
from kvq_runtime.cli.table import print_record, print_table
from kvq_runtime.disk import files as disk
from kvq_runtime.errors import extra
from kvq_runtime.ops import product
from kvq_runtime.registry import rating, reference
from kvq_runtime.registry.evaluation_records import FULL, PROTOCOLS, parse
from kvq_runtime.registry.resolve import choose as choose_version
from kvq_runtime.registry.resolve import open_registry


def check(args: Namespace) -> int:
    """Run `kvq check`."""
    files = models.resolve(args.model)
    chosen, protocol = checks.candidates(files), record.Protocol(protocols=(FULL,))
    length = min(checks.LENGTH, files.context)
    batch = corpus.select(args.corpus, files.path, checks.WINDOWS, length, 0, "held-out")
    with measuring(record.work(batch, chosen, protocol), args.quiet) as progress:
        records = record.evaluate(files, batch, chosen, protocol, *_used(args), progress)
    summary = checks.summarize(files, chosen, records)
    advice = list(checks.advice(files, args.model, summary["rows"]))
    if args.json:
        print_record(summary | {"advice": advice}, True)
        return 0
    whole = f"{summary['rows'][0]['MiB']:,.1f} MiB at {summary['tokens']:,} tokens"
    print(f"{files.id}: kvq compresses {summary['compressed']:.0%} of its cache, in 16 bit {whole}.\n")
    print_table(summary["rows"], False)
    text = f"over {checks.WINDOWS} windows of {length} tokens of {args.corpus}, every token but the sinks encoded"
    print(f"\nKL: nats a token, {text}.\n", *advice, sep="\n")
    return 0


def evaluate(args: Namespace) -> int:
    """Run `kvq eval`."""
    if not args.candidates and not args.tasks:
        raise ValueError("nothing is named to be measured; give a recipe or an artifact, or --tasks for 16 bit alone")
    files = models.resolve(args.model)
    candidates = [find(text, files, args.registry) for text in args.candidates]
    recipe_text.distinct(candidate.recipe for candidate in candidates if candidate.sha256 is None)
    if args.tasks:
        return _tasks(args, files, candidates)
    batch = _text(args, files, args.corpus or files.entry.corpus)
    protocol = _protocol(args)
    with measuring(record.work(batch, candidates, protocol), args.quiet) as progress:
        records = record.evaluate(files, batch, candidates, protocol, *_used(args), progress)
    shown = tables.named(list(map(parse, records)), [candidate.name for candidate in candidates])
    if args.plot:
        Path(args.plot).write_bytes(plots.png(plots.cost_by_bits(shown)))
    if not _give(args, records):
        print_table(tables.table(shown), False)
        print("".join(f"\n{note}" for note in tables.notes(shown)))
    _keep(args, candidates, records)
    return 0


def _length(args: Namespace, files: ModelFiles) -> int:
    return args.length or min(files.entry.seq_len, files.context)


def _text(args: Namespace, files: ModelFiles, source: str) -> corpus.Batch:
    """Choose the windows to measure on; say what casts doubt on their tokens."""
    if caution := rating.fit_warning(files.provenance):
        say("kvq", f"CAUTION: {caution}")
    return corpus.select(source, files.path, args.windows, _length(args, files), args.seed, "held-out")


def _keep(args: Namespace, candidates: Sequence[Candidate], records: Sequence[Any]) -> None:
    """Keep records of artifacts in their registries."""
    for candidate, one in zip(candidates, records, strict=True):
        keep(candidate, one, args.registry)


def _tasks(args: Namespace, files: ModelFiles, candidates: Sequence[Candidate]) -> int:
    """Run `kvq eval --tasks`: names that kvq does not have are lm-eval's."""
    if args.plot or args.by_layer or args.protocol == "full":
        raise ValueError("--plot, --by-layer and --protocol full are of text, which --tasks does not measure")
    protocol = _protocol(args)
    candidates, saved = [protocol.candidate(one) for one in candidates], SavedResults(reference.home() / "evaluated")
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
        settings = tuple(lengths), tuple(args.depths), args.samples, args.seed
        plan = tasks.Plan(tuple(own), haystack, *settings)
        with measuring(tasks.work(plan, len(candidates)), args.quiet) as progress:
            groups.append(tasks.evaluate(files, candidates, plan, *device, progress, saved))
    if foreign:
        from kvq_calib import lm_eval as harness

        given = harness.Asked(tuple(foreign), args.limit, apply_chat_template=args.chat)
        groups.append(harness.evaluate(files, candidates, given, *device, args.include_path, args.quiet))
    if not _give(args, [one for group in groups for one in group]):
        names = ["16 bit", *(candidate.name for candidate in candidates)]
        for number, group in enumerate(groups):
            rows, notes = tables.tasks(group, names)
            print("\n" * bool(number), end="")
            print_table(rows, False)
            print("".join(f"\n{note}\n" for note in notes), end="")
    for group in groups:
        _keep(args, candidates, group[1:])
    return 0


def compare(args: Namespace) -> int:
    """Run `kvq compare`."""
    files, saved = models.resolve(args.model), SavedResults(Path(args.folder or reference.home()) / "evaluated")
    automatic = ["auto"] if args.bits else []
    texts = [text for text in args.recipes if text != "auto"]
    chosen, notes = choose(texts, files) if texts or not args.recipes else ([], [])
    for note in notes:
        say("kvq", note)
    source, length = corpus.pin(args.corpus or files.entry.corpus), _length(args, files)
    batch = _text(args, files, source)
    candidates = {recipe.name: Candidate.unfitted(recipe, files) for recipe in chosen if not recipe.fitted}
    written = {recipe_text.read(text).name: text for text in texts if recipe_text.is_recipe(text)}
    fitted = [written.get(recipe.name, recipe.name) for recipe in chosen if recipe.fitted] + automatic
    if fitted:
        job = Job(
            args.model, tuple(fitted), tuple(args.bits), corpus=source, samples=args.samples, seq_len=length,
            seed=args.seed, device=_device(args.device), dtype=args.dtype, threads=torch.get_num_threads(),
            run=args.folder, evaluate=False, publish=False,
        )  # fmt: skip
        work = prepare.prepare(job)
        prepare.preflight(job, work)
        with closing(Bar(work.plan, args.quiet)) as bar:
            candidates |= {candidate.name: candidate for candidate in run.fit(replace(work, listener=bar))}
    protocol = _protocol(args)
    uneven = sorted({block for one in candidates.values() if length % (block := one.recipe.window.block)})
    if uneven and args.protocol != "in-use":
        blocks = " and ".join(map(str, uneven))
        say("kvq", f"windows of {length} tokens: the last stay exact in a full encode; use a multiple of {blocks}")
    with measuring(record.work(batch, list(candidates.values()), protocol), args.quiet) as progress:
        measured = record.evaluate(files, batch, list(candidates.values()), protocol, *_used(args), progress, saved)
    records = tables.by_bits([parse(one) for one in measured])
    if args.plot:
        Path(args.plot).write_bytes(plots.png(plots.cost_by_bits(records)))
    if not _give(args, [one.raw for one in records]):
        print_table(tables.table(records), False)
        print("".join(f"\n{note}" for note in tables.notes(records)))
    return 0


def bench(args: Namespace) -> int:
    """Run `kvq bench`."""
    files, device = models.resolve(args.model), _device(args.device)
    plan = benchmark.Plan(args.context, args.batch, args.tokens, args.rounds, args.seed).check(files)
    dtype = benchmark.dtype_of(files, args.dtype, device)
    if args.dtype is None and (note := product.without_bfloat16(device)):
        say("kvq bench", note)
    every = benchmark.uncompressed(dtype)
    for name in args.beside.split(",") if args.beside != "none" else ():
        every |= benchmark.quantized(name)
    stock = set(every)
    for text in args.candidates:
        every |= benchmark.compressed(text, files, args.registry)
    with measuring(benchmark.work(len(every), plan), args.quiet) as progress:
        rows = benchmark.measure(benchmark.load(files, device, dtype), every, plan, progress)
    if (busy := max((row.get("busy", 0.0) for row in rows), default=0.0)) > benchmark.BUSY:
        say("kvq bench", f"other processes took {busy:.0%} of the processors: wall times and tokens_per_s mean little; "
            "compare first_cpu_s and step_cpu_s, or repeat it when nothing else runs")  # fmt: skip
    if args.json:
        used = environment(device, str(dtype).removeprefix("torch."), torch.get_num_threads())
        print(json.dumps({"model": files.about, "environment": used, "rows": rows}, indent=2))
    else:
        print_table(rows, False)
    if failed := [f"{row['cache']}: {row['error']}" for row in rows if "error" in row and row["cache"] not in stock]:
        raise RuntimeError(f"not measured: {'; '.join(dict.fromkeys(failed))}")
    return 0


def _protocol(args: Namespace) -> record.Protocol:
    """Make the protocol that options ask for."""
    return record.Protocol(
        sinks=args.sinks,
        recent=args.recent,
        protocols=PROTOCOLS if args.protocol == "both" else args.protocol and (args.protocol,),
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


def gc(args: Namespace) -> int:
    """Run `kvq gc`."""
    rows = []
    for folder in sorted((reference.home() / "runs").glob("*/")):
        row = checkpoint.describe(folder) | {"outcome": "kept"}
        most = args.published if row["published"] else args.others
        if row["unused, days"] >= most / 86400 or folder.name.startswith("."):  # a killed `delete` left it
            row["outcome"] = "deleted" if args.delete else "to delete"
            try:
                if args.delete:
                    checkpoint.delete(folder)
            except checkpoint.AlreadyRunning:
                row["outcome"] = "running"
        rows.append(row)
    print_table(rows, args.json)
    if not args.json:
        freed = sum(row["bytes"] for row in rows if "delete" in row["outcome"])
        print(f"\n{freed / 1e6:.1f} MB " + ("are free now" if args.delete else "would be freed; --delete frees them"))
    return 0


# ---- kvq report ------------------------------------------------------------------------------------------------------


def report(args: Namespace) -> int:
    """Run `kvq report`: 0, or 1 for a page of something that a check found damaged."""
    if args.reference is None and args.registry is None:
        raise ValueError("nothing is named; give NAME for the page of a version, or --registry for all of them")
    path, (page, faults) = _index(args) if args.reference is None else _version(args)
    check_output("--out", path)
    path.write_bytes(page.encode())
    print_record({"page": str(path), "bytes": len(page.encode())}, json=args.json)
    if args.open and not webbrowser.open(path.absolute().as_uri()):
        say("kvq", f"no browser was found; open {path}")
    for fault in faults:
        say("kvq", fault)
    return int(bool(faults))


def _index(args: Namespace) -> tuple[Path, pages.Page]:
    """Write the index; into a folder --out together with the pages of all versions."""
    check_exists(args.registry)
    registry, out = open_registry(args.registry or None), Path(args.out or "registry.html")
    if out.suffix or (out.exists() and not out.is_dir()):
        return out, pages.of_registry(registry, datetime.now(UTC))
    disk.make_folder(out)
    for name in registry.names():
        for version in registry.state(name).versions:
            disk.save(out / pages.file_name(name, version), pages.of_version(registry, name, version)[0].encode())
    return out / "index.html", pages.of_registry(registry, datetime.now(UTC), linked=True)


def _version(args: Namespace) -> tuple[Path, pages.Page]:
    """Write the page of the version that the reference means."""
    given = reference.parse(args.reference)
    if not isinstance(given, reference.Reference):
        raise ValueError(f"{args.reference} is a file; give the NAME of an artifact in a registry, or use kvq show")
    registry = open_registry(given.registry or args.registry or None)
    version = choose_version(registry.existing(given.name), given)[0].version
    out = Path(args.out or pages.file_name(given.name, version))
    return out, pages.of_version(registry, given.name, version)
