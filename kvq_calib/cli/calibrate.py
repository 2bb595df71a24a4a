"""`kvq-calibrate`: fit recipes to a model, evaluate the fits, and publish the artifacts."""

import argparse
import json
import os
import sys
import time
from contextlib import closing
from dataclasses import fields, replace
from functools import partial
from typing import Any

from kvq_calib.model import catalog
from kvq_calib.run.device import keep_memory
from kvq_runtime import __version__
from kvq_runtime.cli import exit_codes
from kvq_runtime.cli.options import Parser, add_registry, count, seconds
from kvq_runtime.cli.table import print_record, print_table
from kvq_runtime.registry import rating
from kvq_runtime.registry.evaluation_records import parse

# GOMP_SPINCOUNT: iterations an idle OpenMP thread spins before it sleeps. At libgomp's own number, 300,000, a fit with
# two threads on busy cores takes about four times as long; with 0, one on idle cores nearly twice as long.
SPIN = "5000"
RECIPE = "aqua-2bit"
INTERRUPTED = "interrupted; the same command goes on where it stopped"
EPILOG = f"""\
examples
    kvq-calibrate --model demo                                          the embedded model, in a minute
    kvq-calibrate --model qwen2.5-7b --push hf://my-org                 publish on the Hub too
    kvq-calibrate --model ./my-model --corpus text.jsonl --recipe aqua-2bit --recipe aqua-2bit+window.recent=32
    kvq-calibrate --model ./my-model --recipe aqua-2bit --baseline higgs-2bit --max-perplexity-ratio 1.02
    kvq-calibrate --model meta-llama/Llama-3.1-8B --device cuda --dry-run
    kvq-calibrate --model demo --recipe auto --bits 2.1                 bits by layer, at most 2.1 per element

One pass over the model serves all recipes. Fits are measured on held-out text before they are published. The same
command resumes a run that was interrupted or killed. docs/commands.md explains every option.

{exit_codes.EXIT_CODES}"""


def main(argv: list[str] | None = None) -> int:
    """Run the command, by default that of the command line; return its exit code."""
    return exit_codes.run("kvq-calibrate", lambda: _run(parser().parse_args(argv)), INTERRUPTED)


def _run(args: argparse.Namespace) -> int:
    if args.quiet or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers' bars too; read at import
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN)  # read when torch is imported
    keep_memory()
    if args.list_models:
        entries = catalog.CATALOG.values()
        rows = [{"model": one.name, "hub": one.hub or "embedded", "corpus": one.corpus} for one in entries]
        print_table(rows, args.json)
        return 0
    rating.Bounds(args.max_perplexity_ratio, args.max_kl, args.max_beyond)
    if args.model is None:
        raise ValueError("--model is missing: a name of --list-models, a folder, a .gguf file, or a Hub id")
    catalog.check(args.model)
    return _calibrate(args)


def _calibrate(args: argparse.Namespace) -> int:
    from kvq_calib.cli import outcome
    from kvq_calib.job import prepare
    from kvq_calib.model import find as models

    job = _job(args)
    files = models.look_up(job.model, job.revision) if args.dry_run else None
    work = prepare.prepare(job, files=files)
    if args.baselines is None:
        job = prepare.not_alone(job, work)
    notes, caution = (
        prepare.preflight(job, work),
        rating.fit_warning(vars(work.plan) | work.files.provenance),
    )
    notes += [f"CAUTION: {caution}"] if caution else []
    notes += prepare.rehearse(job, work) if args.dry_run else []
    for note in notes:
        exit_codes.say("kvq-calibrate", note)
    if args.dry_run:
        print_record(outcome.plan(job, work), args.json)
        return 0
    begun = time.perf_counter()
    if _wants_prefect(args):
        from kvq_calib.flow import flow

        done, spent = flow.run(job, work)
    else:
        done, spent = _here(job, work, args.quiet)
    records = json.loads((work.folder / "evaluation.json").read_text()) if job.evaluate else []
    outcome.show(done, [parse(one) for one in records], caution, args.json)
    if not args.json:
        outcome.show_cost(time.perf_counter() - begun, spent)
    for made in done:
        for reason in made.failed:
            exit_codes.say("kvq-calibrate", f"{made.name} was not published. {reason}; it is in {made.folder}")
    return 5 if any(made.failed for made in done) else 0


def _job(args: argparse.Namespace):
    import torch

    from kvq_calib.job.job import Job

    if args.workers and _wants_prefect(args):
        raise ValueError("--workers shares chunks inside this process's run; leave out --prefect and $PREFECT_API_URL")
    if not args.evaluate and (args.eval_windows or args.baselines):
        raise ValueError("--eval-windows and --baseline are of the evaluation; leave out --no-eval, or them")
    names = {setting.name for setting in fields(Job)}  # options are stored under these
    settings: dict[str, Any] = {"device": "cuda" if torch.cuda.is_available() else "cpu"}
    settings |= {name: value for name, value in vars(args).items() if name in names and value is not None}
    settings["recipes"] = args.recipes or [RECIPE]
    return Job(**settings)


def _here(job, work, quiet: bool):
    """Run the job in this process."""
    from kvq_calib.cli.progress import Bar
    from kvq_calib.job import run

    with closing(Bar(work.plan, quiet)) as bar:
        return run.complete(job, replace(work, listener=bar))


def _wants_prefect(args: argparse.Namespace) -> bool:
    return args.prefect or bool(os.environ.get("PREFECT_API_URL"))


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    layout = argparse.RawDescriptionHelpFormatter
    text = "Fit KV-cache quantizers to a model, and publish the artifacts."
    top = Parser("kvq-calibrate", description=text, epilog=EPILOG, formatter_class=layout)
    group = top.add_argument_group("what")
    add = group.add_argument
    text = "a catalog name (--list-models), a folder, a .gguf file, or org/name on the Hub"
    add("--model", metavar="NAME|PATH|HUB-ID", help=text)
    add("--revision", metavar="REV", help="commit, tag or branch of a Hub model")
    text = "a name or FILE.json, either with +PATH=VALUE; or auto; repeat for several (default aqua-2bit)"
    add("--recipe", dest="recipes", action="append", metavar="RECIPE", help=text)
    add("--bits", action="append", type=float, metavar="B", help="of --recipe auto: bits per element, in all; repeat")
    text = (
        "fit only what vLLM serves from its pages, or an attention kernel reads; auto then chooses among such recipes"
    )
    add("--for", dest="engine", choices=("vllm", "kernel"), help=text)
    text = ".txt, .jsonl(.gz, .zst), .parquet, or org/name[:config][@revision]; 'A + B' takes as many sequences of each"
    add("--corpus", metavar="FILE|HUB-ID", help=text)
    add("--samples", type=int, metavar="N", help="sequences, held-out ones included (default: the model's)")
    add("--seq-len", type=partial(count, least=2), metavar="L", help="tokens per sequence (default: the model's)")
    add("--held-out", type=int, metavar="N", help="sequences that only measure the fit (default: an eighth)")
    add("--seed", type=int, default=0, metavar="S", help="of the choice of text (default 0)")
    text = "of fisher-*, aqua-fisher-* and auto: tokens of each corpus whose gradients are taken (default 4096)"
    add("--gradient-tokens", type=count, metavar="N", help=text)
    group = top.add_argument_group("where")
    add = group.add_argument
    add("--device", metavar="D", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="of the forward pass (default: the model's)")
    text = "CPU threads of a process; part of the plan, since the order of sums depends on them (default: all cores)"
    add("--threads", type=count, metavar="N", help=text)
    add("--workers", type=count, metavar="N", help="share the chunks among N processes, with Ray (default: this one)")
    text = "work that a killed run may lose, as in 90s or 1h (default: 5m); 0s, and with --workers: the layer at work"
    add("--checkpoint-every", type=seconds, metavar="TIME", help=text)
    add("--run", metavar="DIR", help="folder of the run's files (default: $KVQ_HOME/runs/PLAN)")
    add_registry(group)
    add("--push", metavar="URL", help="publish to this registry too, as in hf://org; checked before the work")
    add("--name", metavar="NAME", help="of the artifact (default: MODEL-RECIPE)")
    text = "number of the artifact, as in 1.2.0 (default: the next one)"
    add("--artifact-version", dest="version", metavar="V", help=text)
    add("--no-publish", dest="publish", action="store_false", help="leave artifact, card and plots in the run folder")
    add = top.add_argument_group("evaluation").add_argument
    add("--no-eval", dest="evaluate", action="store_false", help="publish without measuring on held-out text")
    add("--eval-windows", type=count, metavar="N", help="windows of it, as long as the sequences (default: few)")
    text = "measure this beside: an unfitted recipe or a REF (default: higgs-2bit beside a recipe that is alone)"
    add("--baseline", dest="baselines", action="append", metavar="NAME", help=text)
    text = "publish only if perplexity / 16-bit perplexity <= X, by full encode"
    add("--max-perplexity-ratio", type=float, metavar="X", help=text)
    add("--max-kl", type=float, metavar="X", help="publish only if the KL divergence <= X nats per token, likewise")
    text = "publish only if the share of blocks with errors beyond the calibration's <= X, likewise"
    add("--max-beyond", type=float, metavar="X", help=text)
    add = top.add_argument_group("how").add_argument
    add("--prefect", action="store_true", help="run as a Prefect flow (also when PREFECT_API_URL is set)")
    add("--dry-run", action="store_true", help="check everything, print the plan, and stop")
    add("--list-models", action="store_true", help="print the catalog")
    add("--json", action="store_true", help="print JSON")
    add("--quiet", action="store_true", help="no progress bar")
    add("--version", action="version", version=f"kvq-runtime {__version__}")
    return top


if __name__ == "__main__":
    sys.exit(main())
