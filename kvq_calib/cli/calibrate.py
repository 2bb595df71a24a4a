"""`kvq-calibrate`: fit recipes to a model, evaluate what was fitted, and publish the artifacts."""

import argparse
import json
import os
import sys
import time
from contextlib import closing
from dataclasses import replace
from functools import partial

from kvq_calib.cli.progress import Status
from kvq_calib.model import catalog
from kvq_calib.run.device import keep_memory
from kvq_runtime import __version__
from kvq_runtime.cli import exit_codes
from kvq_runtime.cli.options import EXPLAINED, Parser, add_settings, count, registry, seconds
from kvq_runtime.cli.table import print_record, print_table
from kvq_runtime.registry import rating
from kvq_runtime.registry.evaluation_records import TextRecord, parse

# GOMP_SPINCOUNT: iterations an idle OpenMP thread spins before it sleeps. At libgomp's own number, 300,000, a fit with
# two threads on busy cores takes about four times as long; with 0, one on idle cores nearly twice as long.
SPIN = "5000"
DEFAULT = "aqua-2bit"  # recipe
INTERRUPTED = "interrupted; the same command goes on where it stopped"
EPILOG = f"""\
examples
    kvq-calibrate --model demo                                  the embedded model, in a minute
    kvq-calibrate --model qwen2.5-7b                            256 sequences of 8192 tokens of RedPajama
    kvq-calibrate --model ./my-model --corpus text.jsonl --recipe aqua-2bit --recipe aqua-3bit
    kvq-calibrate --model ./my-model --recipe aqua-2bit --baseline higgs-2bit --max-perplexity-ratio 1.02
    kvq-calibrate --model demo --recipe squat-2bit --set key.feedback.rank=60       any setting of it
    kvq-calibrate --model demo --recipe aqua-2bit+window.recent=32 --recipe my.json    of one of several; a file
    kvq-calibrate --model meta-llama/Llama-3.1-8B --device cuda --dry-run
    kvq-calibrate --model demo --recipe auto --bits 2.1         bits by layer, chosen within 2.1 per element
    kvq-calibrate --model demo --recipe auto --bits 3.25 --for vllm     among what vLLM can serve from its pages
    kvq-calibrate --model qwen2.5-7b --push hf://my-org         and publish on the Hub
    kvq-calibrate --model ./fine-tune --reuse base-aqua-2bit@production --max-kl 0.1   what its base has, if it will do
    kvq-calibrate --list-models

One pass over the model serves all recipes. What was fitted is measured on held-out text (perplexity, divergence,
agreement, errors) before it is published; that takes the whole model, and card, plots and record lie beside the
artifact. A run that is interrupted, or killed, goes on where it was when the same command is given again.
`kvq recipes` lists the recipes; `kvq eval` measures more, `kvq compare` many recipes side by side.

{EXPLAINED}

{exit_codes.CALIBRATION_EXIT_CODES}"""


def program() -> int:
    """Run the command line of this process, which ends with it."""
    return exit_codes.program("kvq-calibrate", main)


def main(argv: list[str] | None = None) -> int:
    """Run the command, by default that of the command line; returns its exit code."""
    extras = "[calib]', with --prefect '[flows]', with --workers '[scale]"
    return exit_codes.run("kvq-calibrate", lambda: _run(parser().parse_args(argv)), extras, INTERRUPTED)


def _run(args: argparse.Namespace) -> int:
    if args.quiet or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers' bars too; read at import
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN)  # read when torch is imported
    keep_memory()
    return _list_models(args.json) if args.list_models else _calibrate(args)


def _calibrate(args: argparse.Namespace) -> int:
    asked, work, caution = _prepared(args)
    from kvq_calib.cli import outcome
    from kvq_calib.job import prepare
    from kvq_calib.run import checkpoint

    exit_codes.loaded()
    if args.dry_run:
        found = outcome.plan(asked, work)
        print_record(found if args.json else outcome.lines(found), args.json)
        return 0
    begun, layers = time.perf_counter(), work.plan.geometry.layers
    before = checkpoint.newest(work.folder, layers) + 1
    if _wants_prefect(args):
        from kvq_calib.flow import flow

        done, spent = flow.run(asked, work)
    else:
        done, spent = _here(asked, work, args.quiet)
    records = json.loads((work.folder / "evaluation.json").read_text()) if asked.evaluation.evaluate else []
    reused = args.reuse is not None and not spent
    if reused:
        caution = rating.fit_warning(prepare.base_of(asked, work.files).provenance)
    found = [parse(one, TextRecord) for one in records]
    if args.json:
        print_table(outcome.as_records(done, found, caution), json=True)
    else:
        outcome.show(done, found, caution)
    if reused:
        exit_codes.say("kvq-calibrate", f"{args.reuse} keeps the bounds on this model: nothing was fitted")
    if not args.json and spent:
        outcome.cost(time.perf_counter() - begun, spent, (before, layers))
        outcome.peak(work)
    for made in done:
        for reason in made.failed:
            exit_codes.say("kvq-calibrate", f"{made.name} was not published. {reason}; it is in {made.folder}")
    return 5 if any(made.failed for made in done) else 0


def _prepared(args: argparse.Namespace):
    """The job, its run, and the caution that is due, after all checks; notes are printed."""
    rating.Bounds(args.max_perplexity_ratio, args.max_kl, args.max_beyond)
    if args.model is not None:
        catalog.check(args.model)
    with Status("kvq-calibrate", args.quiet) as show:
        show("loading torch and transformers")
        from kvq_calib.job import prepare
        from kvq_calib.model import find as models

        asked = _job(args)
        show(f"looking for the model {asked.what.model} and the text")
        files = models.look_up(asked.what.model, asked.what.revision) if args.dry_run else None
        work = prepare.prepare(asked, files=files)
        if args.baselines is None:
            asked = prepare.not_alone(asked, work)
        notes, caution = prepare.preflight(asked, work), rating.fit_warning(vars(work.plan))
        notes += [f"CAUTION: {caution}; use more --samples"] if caution and args.reuse is None else []
        if args.dry_run:
            show(f"choosing {work.plan.samples} sequences of {work.plan.corpus}")
            notes += prepare.rehearse(asked, work)
    for note in notes:
        exit_codes.say("kvq-calibrate", note)
    return asked, work, caution


def _list_models(as_json: bool) -> int:
    print_table(
        [{"model": e.name, "hub": e.hub or "embedded", "corpus": e.corpus} for e in catalog.CATALOG.values()], as_json
    )
    return 0


def _job(args: argparse.Namespace):
    import torch

    from kvq_calib.job.job import Job, What
    from kvq_runtime.artifact import recipe_text

    if args.workers and _wants_prefect(args):
        raise ValueError("--workers shares chunks inside this process's run; leave out --prefect and $PREFECT_API_URL")
    if args.model is None:
        raise ValueError("--model is missing: a name of --list-models, a folder, a .gguf file, or a Hub id")
    if not args.evaluate and (args.eval_windows or args.baselines or args.also not in (None, ["none"])):
        raise ValueError("--eval-windows, --baseline and --also are of the evaluation; leave out --no-eval, or them")
    if args.reuse is not None and _wants_prefect(args):
        raise ValueError("--reuse is measured in this process; leave out --prefect and $PREFECT_API_URL")
    known = Job(What(args.model)).settings  # which options are called by
    given = {name: value for name, value in vars(args).items() if name in known and value is not None}
    given["recipes"] = recipe_text.with_settings(args.recipes or [_like(args)], args.set)
    return Job.from_settings(**{"device": "cuda" if torch.cuda.is_available() else "cpu"} | given)


def _like(args: argparse.Namespace) -> str:
    """The recipe that is fitted where none is named: that of an artifact to reuse, if its name says it all."""
    if args.reuse is None:
        return DEFAULT
    from kvq_runtime.artifact import recipe_text
    from kvq_runtime.registry.resolve import load_artifact

    made = load_artifact(args.reuse, args.registry)
    try:
        return made.recipe.name if made.recipe.name == recipe_text.read(made.recipe.name).name else DEFAULT
    except ValueError:
        return DEFAULT


def _here(asked, work, quiet: bool):
    from transformers.utils import logging

    from kvq_calib.cli.progress import Bar
    from kvq_calib.job import run

    logging.disable_progress_bar()  # of loading weights: it would break into ours
    with closing(Bar(work.plan, quiet)) as bar:
        return run.complete(asked, replace(work, listener=bar))


def _wants_prefect(args: argparse.Namespace) -> bool:
    return args.prefect or bool(os.environ.get("PREFECT_API_URL"))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = Parser(
        "kvq-calibrate",
        description="Fit KV-cache quantizers to a model, and publish the artifacts to a registry.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = top.add_argument_group("what")
    add = what.add_argument
    add("--model", metavar="NAME|PATH|HUB-ID",
        help="a catalog name (--list-models), a folder, a .gguf file, or org/name on the Hub")  # fmt: skip
    add("--revision", metavar="REV", help="commit, tag or branch of a Hub model")
    add("--recipe", dest="recipes", action="append", metavar="RECIPE",
        help="a name or FILE.json, either with +PATH=VALUE; or auto; repeat for several "
        "(default aqua-2bit)")  # fmt: skip
    add("--reuse", metavar="REF", help="an artifact of the model that this one was fine-tuned from: if it keeps "
        "--max-kl or --max-perplexity-ratio here, it is published for this model, and nothing is fitted")  # fmt: skip
    add_settings(what, "of every --recipe")
    add("--bits", action="append", type=float, metavar="B",
        help="with --recipe auto: share out B bits per element among the layers; repeat for several"
    )  # fmt: skip
    add("--for", dest="engine", choices=("vllm",),
        help="fit only what this engine can serve from its pages; auto then chooses among such settings")  # fmt: skip
    add("--corpus", metavar="FILE|HUB-ID", help=".txt, .jsonl(.gz, .zst), .parquet, or org/name[:config][@revision]; "
        "'A + B' mixes as many sequences of each")  # fmt: skip
    add("--transfer", metavar="FILE|HUB-ID",
        help="with --recipe auto --for: a text of another kind whose fit part settings are measured on, too; "
        "or none (default: demo-code, or demo beside that)")  # fmt: skip
    add("--samples", type=int, metavar="N", help="sequences, held-out ones included (default: the model's)")
    add("--seq-len", type=partial(count, least=2), metavar="L", help="tokens per sequence")  # one, and one to foretell
    add("--held-out", type=int, metavar="N", help="sequences that only measure the fit (default: an eighth)")
    add("--seed", type=int, default=0, metavar="S", help="of the choice of text (default 0)")
    add("--gradient-tokens", type=count, metavar="N",
        help="of recipes in the metric of gradients (aqua-fisher-*): tokens of the fit part that these are of "
        "(default 4096); more take longer, and lose less")  # fmt: skip
    where = top.add_argument_group("where")
    add = where.add_argument
    add("--device", metavar="D", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="of the forward pass (default: the model's)")
    add("--threads", type=count, metavar="N",
        help="CPU threads of a process; a part of the plan, since the order of sums depends on them (default: all "
        "cores, or, with --workers, a worker's share of them)")  # fmt: skip
    add("--workers", type=count, metavar="N", help="share the chunks among N processes, with Ray (default: this one)")
    add("--checkpoint-every", type=seconds, metavar="TIME",
        help="what a killed run loses beside the layer at work, as in 90s or 1h (default: 5m; more where writing takes "
        "over a twentieth of it); 0s, and with --workers: nothing, by way of files")  # fmt: skip
    add("--run", metavar="DIR", help="folder of the run's files (default: $KVQ_HOME/runs/PLAN)")
    registry(where)
    add("--push", metavar="URL",
        help="publish to this registry as well, as in hf://org; checked before the work")  # fmt: skip
    add("--name", metavar="NAME", help="of the artifact (default: MODEL-RECIPE)")
    add(
        "--artifact-version",
        dest="version",
        metavar="V",
        help="number of the artifact, as in 1.2.0 (default: the next one)",
    )
    add("--no-publish", dest="publish", action="store_false", help="leave artifact, card and plots in the run folder")
    add = top.add_argument_group("evaluation").add_argument
    add("--no-eval", dest="evaluate", action="store_false", help="publish without measuring on held-out text")
    add("--eval-windows", type=count, metavar="N", help="windows of it, as long as the sequences (default: few)")
    add("--also", metavar="NAME=SOURCE", nargs="+",
        help="texts of other kinds to measure on too: demo-code (Python's library), a corpus as above; or none "
        "(default: the model's, demo-code beside a --corpus)")  # fmt: skip
    add("--baseline", dest="baselines", action="append", metavar="NAME",
        help="measure this beside: an unfitted recipe or a REF (default: higgs-2bit beside a recipe that is alone)"
    )  # fmt: skip
    add("--max-perplexity-ratio", type=float, metavar="X",
        help="publish only if perplexity / 16-bit perplexity <= X, every token but the sinks encoded")  # fmt: skip
    add("--max-kl", type=float, metavar="X", help="publish only if the KL divergence, nats per token, <= X, likewise")
    add("--max-beyond", type=float, metavar="X",
        help="publish only if the share of blocks beyond 99.9%% of those in calibration <= X, likewise")  # fmt: skip
    add = top.add_argument_group("how").add_argument
    add("--prefect", action="store_true", help="run as a Prefect flow (also when PREFECT_API_URL is set)")
    add("--dry-run", action="store_true", help="check everything, print the plan, and stop")
    add("--list-models", action="store_true", help="print the catalog")
    add("--json", action="store_true", help="print JSON")
    add("--quiet", action="store_true", help="no progress bar")
    add("--version", action="version", version=f"kvq-runtime {__version__}")
    return top


if __name__ == "__main__":
    sys.exit(program())
