"""Add `eval`, `compare` and `probe` to the `kvq` command, whose exit codes they share.

What they need is imported when they run: `kvq list` must not wait for it.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvq_runtime.table import print_table

EVAL_EXAMPLES = """\
examples
    kvq eval higgs-2bit rtn-4bit --model demo                          recipes that need no calibration
    kvq eval demo-aqua-2bit higgs-2bit --model demo --plots out        an artifact beside a recipe, with plots
    kvq eval qwen2.5-7b-aqua-2bit@1.2.0 --model qwen2.5-7b --corpus wiki.txt --length 8192 --device cuda
    kvq eval demo-aqua-2bit --model demo --recent 0 --layers           no exact recent tokens; errors by layer

The 16-bit model is always measured beside them. A table of: bits per element, asymptotic and of a cache that holds a
window, or 4096 tokens; perplexity, and its distance from 16 bit with the standard error over windows; KL divergence
from the 16-bit model in nats; top-1 agreement with it. Records of published artifacts are kept in the registry."""

COMPARE_EXAMPLES = """\
examples
    kvq compare --model demo --windows 8 --recent 0 --plot compare.png
    kvq compare --model ./my-model --corpus text.txt --recipes aqua-2bit higgs-2bit kivi-2bit --samples 64
    kvq compare --model demo --recipes aqua-2bit kivi-2bit --bits 2.1 --sinks 4 --recent 0     with bits by layer
    kvq compare --model qwen2.5-7b --recipes all --length 4096 --device cuda --output records.json

Recipes that need a fit are fitted in one pass over the model, and are not published; then all are measured in one pass
over held-out text. The same command resumes what was stopped, and repeats no measurement. The table, by bits per
element (asymptotic; of a cache that holds a window, or 4096 tokens): perplexity, KL divergence in nats, top-1
agreement, each against the 16-bit model, and the squared error of attention's output over its energy, mean over layers,
as the cache gives it in use. --recent 0 encodes every token but the sinks: the worst case, and the clearest ranking.
--sinks 4 gives all the same exact first tokens, of which some papers have none."""

PROBE_EXAMPLES = """\
examples
    kvq probe --model demo
    kvq probe --model qwen2.5-7b --corpus wiki.txt --samples 224 --length 8192 --device cuda --plot probe.png --layers

Explained variance of keys and values (before RoPE) on held-out sequences, by ridge regression from: layers below (L-1,
L-2, L-3), earlier tokens of the layer (T-1, T-2, T-3), the other role (values for keys, keys for values), and sets."""


def add_eval(subparsers: Any) -> None:
    """Add `kvq eval`."""
    command = _command(subparsers, "eval", "perplexity and errors with compressed caches", EVAL_EXAMPLES, evaluate)
    command.add_argument(
        "subjects", metavar="REF|RECIPE", nargs="+", help="a reference, a .safetensors file, or an unfitted recipe"
    )
    _source(command)
    command.add_argument("--windows", type=count, default=16, metavar="N", help="windows of text (default: 16)")
    command.add_argument("--step", type=count, default=32, metavar="N", help="tokens per forward pass (default: 32)")
    command.add_argument("--rows", type=count, metavar="N", help="windows side by side (default: 8192 tokens' worth)")
    command.add_argument("--sinks", type=int, metavar="N", help="exact first tokens (default: as each recipe says)")
    command.add_argument("--recent", type=int, metavar="N", help="exact newest tokens (default: as each recipe says)")
    command.add_argument("--layers", action="store_true", help="print errors by layer too")
    command.add_argument("--plots", metavar="DIR", help="write error-by-layer.png and perplexity-by-bits.png")
    command.add_argument("--output", metavar="FILE", help="write the records as JSON")
    command.add_argument(
        "--registry", metavar="URL", help="file:///folder or hf://org (default: $KVQ_REGISTRY, else $KVQ_HOME/registry)"
    )


def add_compare(subparsers: Any) -> None:
    """Add `kvq compare`."""
    command = _command(
        subparsers, "compare", "many recipes on one model, fitted in one pass", COMPARE_EXAMPLES, compare
    )
    _source(command)
    command.add_argument(
        "--recipes", metavar="NAME", nargs="+", default=[], help="recipes, or all (default: some of every family)"
    )
    command.add_argument(
        "--bits", metavar="B", type=float, nargs="+", default=[], help="also auto: bits by layer, within B per element"
    )
    command.add_argument("--samples", type=count, metavar="N", help="sequences to fit on (default: the model's)")
    command.add_argument("--windows", type=count, default=16, metavar="N", help="windows of text (default: 16)")
    command.add_argument("--step", type=count, default=32, metavar="N", help="tokens per forward pass (default: 32)")
    command.add_argument("--sinks", type=int, metavar="N", help="exact first tokens (default: as each recipe says)")
    command.add_argument("--recent", type=int, metavar="N", help="exact newest tokens (default: as each recipe says)")
    command.add_argument("--plot", metavar="FILE", help="write the plot, a PNG")
    command.add_argument("--output", metavar="FILE", help="write the records as JSON")
    command.add_argument(
        "--run", dest="folder", metavar="DIR", help="folder of the run's files (default: under $KVQ_HOME)"
    )


def add_probe(subparsers: Any) -> None:
    """Add `kvq probe`."""
    command = _command(subparsers, "probe", "what keys and values can be predicted from", PROBE_EXAMPLES, probe)
    _source(command)
    command.add_argument("--samples", type=count, metavar="N", help="sequences to fit on (default: as a calibration)")
    command.add_argument("--held-out", type=count, metavar="N", help="sequences to measure on (default: likewise)")
    command.add_argument("--layers", action="store_true", help="print a row per layer instead of means")
    command.add_argument("--plot", metavar="FILE", help="write the plot, a PNG")


def evaluate(args: argparse.Namespace) -> int:
    """Run `kvq eval`."""
    from kvq_calib import corpus, models, plots
    from kvq_calib.evaluate import record
    from kvq_calib.evaluate.subject import find
    from kvq_runtime import reference
    from kvq_runtime.registry import open_registry

    files = models.resolve(args.model)
    subjects = [find(given, files, args.registry) for given in args.subjects]
    length = args.length or min(files.entry.seq_len, files.context)
    source = args.corpus or files.entry.corpus
    batch = corpus.select(source, files.path, args.windows, length, args.seed, "held-out")
    protocol = record.Protocol(args.step, args.rows, args.recent, args.sinks)
    with _bar(record.work(files, batch, len(subjects), protocol), args.quiet) as progress:
        device = _device(args.device)
        records = record.evaluate(files, batch, subjects, protocol, device, _dtype(args.dtype, device), progress)
    for subject, found in zip(subjects, records, strict=True):
        if subject.published:
            kept = reference.parse(subject.name)
            assert isinstance(kept, reference.Reference), "what a registry holds was asked for by a reference"
            open_registry(kept.registry or args.registry).add_evaluation(found, kept.name)
    if args.output:
        Path(args.output).write_text(json.dumps(records, indent=2) + "\n")
    if args.plots:
        folder = Path(args.plots)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "error-by-layer.png").write_bytes(plots.error_by_layer(records))
        (folder / "perplexity-by-bits.png").write_bytes(plots.perplexity_by_bits(records))
    if args.json:
        print(json.dumps(records, indent=2))
        return 0
    print_table(table(records), False)
    if args.layers:
        rows = [{"recipe": found["result"]["recipe"], **row} for found in records for row in found["result"]["layers"]]
        print()
        print_table(rows, False)
    return 0


def compare(args: argparse.Namespace) -> int:
    """Run `kvq compare`."""
    import torch

    from kvq_calib import compare as comparing
    from kvq_calib import corpus, models, plots
    from kvq_calib.evaluate import record
    from kvq_calib.evaluate.subject import Subject
    from kvq_calib.job import Job
    from kvq_calib.ledger import Ledger
    from kvq_calib.plan import home
    from kvq_calib.progress import Bar

    files = models.resolve(args.model)
    length = args.length or min(files.entry.seq_len, files.context)
    chosen, notes = comparing.choose(args.recipes, files.geometry)
    for note in notes:
        print(f"kvq: {note}", file=sys.stderr)
    source, device = corpus.pin(args.corpus or files.entry.corpus), _device(args.device)
    batch = corpus.select(source, files.path, args.windows, length, args.seed, "held-out")
    subjects = {recipe.name: Subject(recipe.name, recipe, {}) for recipe in chosen}
    fitted = tuple(recipe.name for recipe in chosen if recipe.fitted) + (("auto",) if args.bits else ())
    if fitted:
        job = Job(
            args.model, fitted, tuple(args.bits), corpus=source, samples=args.samples, seq_len=length, seed=args.seed,
            device=device, dtype=args.dtype, threads=torch.get_num_threads(), run=args.folder, publish=False,
            evaluate=False,
        )  # fmt: skip
        bar = Bar(job.prepare()[1], args.quiet)
        try:
            subjects |= {one.name: one for one in comparing.fit(job, bar)}
        finally:
            bar.close()
    protocol = record.Protocol(args.step, None, args.recent, args.sinks)
    ledger = Ledger(home() / "evaluated" if args.folder is None else Path(args.folder) / "evaluated")
    with _bar(record.work(files, batch, len(subjects), protocol), args.quiet) as progress:
        dtype = _dtype(args.dtype, device)
        records = record.evaluate(files, batch, list(subjects.values()), protocol, device, dtype, progress, ledger)
    records = plots.by_bits(records)
    if args.output:
        Path(args.output).write_text(json.dumps(records, indent=1) + "\n")
    if args.plot:
        Path(args.plot).write_bytes(plots.comparison(records))
    if args.json:
        print(json.dumps(records, indent=2))
    else:
        print_table(comparison(records), False)
    return 0


def comparison(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows that `kvq compare` prints: those of `kvq eval`, with the error of attention's output."""
    from kvq_calib.plots import attention_error

    first, *rows = table(records)
    return [first, *(row | {"attention": attention_error(one)} for row, one in zip(rows, records, strict=True))]


def table(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows that `kvq eval` prints: the 16-bit model first."""
    first = records[0]
    length = first["protocol"]["length"]
    rows = [{"recipe": "16 bit", "bits": 16.0, f"at {length}": 16.0, "at 4096": 16.0,
             "perplexity": f"{first['result']['reference_perplexity']:.3f}"}]  # fmt: skip
    for found in records:
        result, bits = found["result"], found["result"]["bits"]
        rows.append({
            "recipe": result["recipe"],
            "bits": bits["asymptotic"],
            f"at {length}": bits["at_length"],
            "at 4096": bits["at_4096"],
            "perplexity": f"{result['perplexity']:.3f}",
            "vs 16 bit": relative(result),
            "KL": result["kl"],
            "top-1": f"{result['top1']:.2%}",
        })  # fmt: skip
    return rows


def relative(result: Mapping[str, Any]) -> str:
    """The distance of a perplexity from that of 16 bit, with its standard error where there is one."""
    spread = result["relative_se"]
    return f"{result['relative']:+.2%}" + ("" if spread is None else f" ± {spread:.2%}")


def probe(args: argparse.Namespace) -> int:
    """Run `kvq probe`."""
    from kvq_calib import models, plots
    from kvq_calib import probe as probes

    files = models.resolve(args.model)
    settings = probes.settings(files, args.corpus, args.samples, args.held_out, args.length, args.seed)
    with _bar(settings.work(files), args.quiet) as progress:
        device = _device(args.device)
        found = probes.probe(files, settings, device, _dtype(args.dtype, device), progress)
    if args.plot:
        Path(args.plot).write_bytes(plots.probes(found))
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print_table(probes.by_layer(found) if args.layers else probes.means(found), False)
    return 0


def _command(subparsers: Any, name: str, idea: str, examples: str, run: Any) -> argparse.ArgumentParser:
    from kvq_runtime.cli import EXIT_CODES

    command = subparsers.add_parser(
        name, help=idea, description=f"{idea[0].upper()}{idea[1:]}.", epilog=f"{examples}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("--quiet", action="store_true", help="no progress bar")
    command.set_defaults(run=lambda args: _complete(run, args))
    return command


def _complete(run: Any, args: argparse.Namespace) -> int:
    """Run a command; without the calibration extra, say what it is called."""
    warnings.filterwarnings(
        "ignore", "`torch.jit", DeprecationWarning
    )  # hqq's, which transformers imports if it is there
    try:
        return run(args)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("kvq"):
            raise
        raise RuntimeError(f"this needs {error.name}: pip install 'kvq-runtime[calib]'") from error


def _source(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", required=True, help="a name of the catalog (demo, qwen2.5-7b), folder, or Hub id")
    command.add_argument(
        "--corpus", metavar="FILE|HUB-ID", help="text, measured on its held-out part (default: model's)"
    )
    command.add_argument("--length", type=count, metavar="L", help="tokens of a sequence (default: the model's)")
    command.add_argument("--seed", type=int, default=0, help="chooses the sequences (default: 0)")
    command.add_argument("--device", help="cpu, cuda, ... (default: cuda where there is one)")
    kinds = ("float32", "bfloat16", "float16")
    command.add_argument("--dtype", choices=kinds, help="default: float32 on a CPU, else as stored")


def count(text: str) -> int:
    """A number of things, of an option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; use a whole number of at least 1")
    return int(text)


def _device(given: str | None) -> str:
    import torch

    device = given or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device} cannot be used here: {str(error).splitlines()[0]}") from None
    return device


def _dtype(given: str | None, device: str):
    """None: as stored. A CPU takes float32: what is measured here can be smaller than the rounding of bfloat16."""
    import torch

    return getattr(torch, given or "float32") if given or device == "cpu" else None


@contextmanager
def _bar(tokens: int, quiet: bool) -> Iterator[Any]:
    """A progress bar on stderr, where a person looks."""
    from tqdm import tqdm
    from transformers.utils import logging

    if quiet or not sys.stderr.isatty():
        logging.disable_progress_bar()  # of loading weights
    with tqdm(total=tokens, unit="tok", unit_scale=True, disable=quiet or not sys.stderr.isatty()) as bar:
        yield bar.update
