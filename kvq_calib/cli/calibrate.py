"""`kvq-calibrate`: fit recipes to a model, evaluate what was fitted, and publish the artifacts.

Exit codes
    0    done (also when the very same artifact was there already)
    1    a check or the machine failed: disk, memory, a damaged checkpoint, no network
    2    usage: an unknown option, model, recipe or corpus, or settings that cannot be
    3    not found
    4    conflict: the same plan is already running, or the version is taken
    5    an artifact costs more than --max-perplexity-ratio or --max-kl allow: it was not published
    130  interrupted; the same command goes on where it stopped
"""

import argparse
import os
import sys
import time
from dataclasses import replace
from typing import Any

from kvq_calib.cli.commands import count
from kvq_runtime.cli import exit_codes
from kvq_runtime.cli.settings import EXPLAINED, add_settings

# GOMP_SPINCOUNT: iterations an idle OpenMP thread spins before it sleeps. At libgomp's own number, 300,000, a fit with
# two threads on busy cores takes about four times as long; with 0, one on idle cores nearly twice as long.
SPIN = "5000"
INTERRUPTED = "interrupted; the same command goes on where it stopped"
EXIT_CODES = (__doc__ or "").partition("\n\n")[2]
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
    kvq-calibrate --model qwen2.5-7b --push hf://my-org         and publish on the Hub
    kvq-calibrate --list-models

One pass over the model serves all recipes. What was fitted is measured on held-out text (perplexity, divergence,
agreement, errors) before it is published; that takes the whole model, and card, plots and record lie beside the
artifact. A run that is interrupted, or killed, goes on where it was when the same command is given again.
`kvq recipes` lists the recipes; `kvq eval` measures more, `kvq compare` many recipes side by side.

{EXPLAINED}

{EXIT_CODES}"""


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    extras, interrupted = "[calib]', with --prefect '[flows]', with --workers '[scale]", INTERRUPTED
    return exit_codes.run("kvq-calibrate", lambda: _run(parser().parse_args(argv)), extras, interrupted)


def _run(args: argparse.Namespace) -> int:
    if args.quiet or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers' bars too; read at import
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN)  # read when torch is imported
    return _calibrate(args)


def _calibrate(args: argparse.Namespace) -> int:
    from kvq_calib import job
    from kvq_calib.model import find as models
    from kvq_runtime.cli.table import print_table

    if args.list_models:
        rows = [{"model": e.name, "hub": e.hub or "embedded", "corpus": e.corpus} for e in models.CATALOG.values()]
        print_table(rows, args.json)
        return 0
    asked = _job(args)
    work = asked.prepare()
    for note in job.preflight(asked, work):
        exit_codes.say("kvq-calibrate", note)
    if args.dry_run:
        return _show_plan(asked, work, args.json)
    begun = time.perf_counter()
    done, spent = (_through_prefect if _wants_prefect(args) else _here)(asked, work, args.quiet)
    print_table([made.row(full=args.json) for made in done], args.json)
    if not args.json:
        _show_choices(done)
    if not args.json and spent:
        _cost(time.perf_counter() - begun, spent)
        _peak(work.plan, work.files)
    for made in done:
        for reason in made.failed:
            exit_codes.say(
                "kvq-calibrate", f"{made.name} was not published. {reason}; it is in {work.folder / made.name}"
            )
    return 5 if any(made.failed for made in done) else 0


def _job(args: argparse.Namespace):
    import torch

    from kvq_calib.job import Job
    from kvq_runtime.artifact import recipe_text

    if args.workers and _wants_prefect(args):
        raise ValueError("--workers shares chunks inside this process's run; leave out --prefect and $PREFECT_API_URL")
    if args.model is None:
        raise ValueError("--model is missing: a name of --list-models, a folder, or a Hub id")
    names = (
        "model",
        "revision",
        "corpus",
        "transfer",
        "samples",
        "seq_len",
        "held_out",
        "seed",
        "device",
        "dtype",
        "threads",
    )
    names += ("workers", "registry", "push", "name", "version", "run", "eval_windows", "max_perplexity_ratio", "max_kl")
    given: dict[str, Any] = {name: getattr(args, name) for name in names} | {"bits": tuple(args.bits or ())}
    given["device"] = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    given |= {"publish": not args.no_publish, "evaluate": not args.no_eval, "baselines": tuple(args.baseline)}
    given["also"] = None if args.also is None else tuple(args.also)
    recipes = recipe_text.with_settings(args.recipe or ["aqua-2bit"], args.set)
    return Job(recipes=tuple(recipes), **given)


def _here(asked, work, quiet: bool):
    from kvq_calib import job
    from kvq_calib.cli.progress import Bar

    bar = Bar(work.plan, quiet)
    try:
        return job.complete(asked, replace(work, listener=bar))
    finally:
        bar.close()


def _wants_prefect(args: argparse.Namespace) -> bool:
    return args.prefect or bool(os.environ.get("PREFECT_API_URL"))


def _through_prefect(asked, work, quiet: bool):
    from kvq_calib.flow import flow

    return flow.run(asked, work)


def _show_plan(asked, work, json: bool) -> int:
    from kvq_runtime.cli.table import print_record

    plan, files = work.plan, work.files
    needs = plan.needs(files)
    record = {
        "model": plan.model,
        "revision": plan.revision or "local",
        "layers": plan.geometry.layers,
        "recipes": [recipe.name for recipe in plan.recipes],
        "artifacts": [asked.artifact_name(files, recipe.name) for recipe in plan.recipes],
        "corpus": plan.corpus,
        "samples": f"{plan.samples} ({plan.held_out} held out)",
        "seq_len": plan.seq_len,
        "tokens": plan.tokens,
        "evaluation": _evaluation(asked, plan, files),
        "chunks": f"{len(plan.chunks)} of at most {plan.chunk} sequences",
        **_rounds(plan),
        "device": f"{plan.device}, {plan.dtype}, {plan.threads} threads",
        "memory": f"{(needs['layer'] + needs['chunk']) / 1e6:.0f} MB: one layer and one chunk",
        "disk": f"{needs['disk'] / 1e6:.0f} MB at most",
        "run folder": str(work.folder),
        "plan": plan.digest,
    }
    print_record(record, json)
    return 0


def _show_choices(done) -> None:
    """Of recipes with a budget, the bits of each layer's keys and values."""
    from kvq_runtime.cli.table import print_table

    for made in done:
        if made.layers:
            print(f"\n{made.recipe}: bits per element, and the error they put into the model's stream")
            names = ("layer", "keys", "values", "keys attention", "values attention")
            print_table([{name: row[name] for name in names} for row in made.layers], json=False)


def _rounds(plan) -> dict[str, str]:
    """What a plan's budgets make it do, if it has any."""
    from kvq_calib.run import budget, sensitivity, share

    if not plan.budgets:
        shared = [recipe.name for recipe in plan.recipes if share.wanted(recipe)]
        return {"shared bits": f"{', '.join(shared)}: 2 rounds, each a pass over the model"} if shared else {}
    asked = ", ".join(f"{bits:g} bits" for bits in plan.budgets.values())
    settings = len(budget.options(plan.geometry, "key"))
    sequences = sum(len(plan.chunks[i]) for i in sensitivity.chunks(plan))
    other = f", {plan.transfer_samples} of them of {plan.transfer}" if plan.transfer else ""
    measured = f"{settings} settings for each layer's keys and values, measured on {sequences} sequences{other}"
    return {"budgets": f"{asked}: {measured}, in 2 to {budget.ROUNDS} rounds, each a pass over the model"}


def _evaluation(asked, plan, files) -> str:
    from kvq_calib.evaluate import held_out
    from kvq_calib.text import others

    if not asked.evaluate:
        return "none"
    count = asked.eval_windows or f"up to {held_out.windows(plan, plan.seq_len)}"
    bounds = "".join(f", {name} at most {bound:g}" for name, bound in asked.bounds.given.items())
    also = "".join(f", and of {text}" for text in others.parse(asked.beside(files)))
    return f"{count} held-out windows{also}{bounds}"


def _cost(wall: float, spent: dict[str, float]) -> None:
    forward, evaluation = spent.pop("forward", 0.0), spent.pop("evaluation", 0.0)
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in spent.items())
    total = forward + sum(spent.values())
    print(
        f"\n{wall:.1f} s. The layers took {total:.1f} s, {total / forward if forward else 0:.2f} times "
        f"the model's own forward pass in them ({forward:.1f} s): {parts}."
        + (f" The evaluation took {evaluation:.1f} s." if evaluation else "")
    )


def _peak(plan, files) -> None:
    """Say how much memory the run took, beside what one layer and one chunk were planned with."""
    import resource

    import torch

    needs = plan.needs(files)
    planned = f"one layer {needs['layer'] / 1e6:.0f} MB, one chunk {needs['chunk'] / 1e6:.0f} MB"
    if plan.device.startswith("cuda"):
        print(
            f"At most {torch.cuda.max_memory_allocated(plan.device) / 1e6:.0f} MB on {plan.device} (plan: {planned})."
        )
    else:
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(f"At most {held:.0f} MB of memory, Python and its libraries included (plan: {planned}).")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        "kvq-calibrate",
        description="Fit KV-cache quantizers to a model, and publish the artifacts to a registry.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = top.add_argument_group("what")
    add = what.add_argument
    add("--model", metavar="NAME|PATH|HUB-ID", help="a catalog name (--list-models), a folder, or org/name on the Hub")
    add("--revision", metavar="REV", help="commit, tag or branch of a Hub model")
    add(
        "--recipe",
        action="append",
        metavar="RECIPE",
        help="a name or FILE.json, either with +PATH=VALUE; or auto; repeat for several (default aqua-2bit)",
    )
    add_settings(what, "of every --recipe")
    add("--bits", action="append", type=float, metavar="B",
        help="with --recipe auto: choose settings by layer within B bits per element; repeat for several")  # fmt: skip
    add("--corpus", metavar="FILE|HUB-ID", help=".txt, .jsonl(.gz, .zst), .parquet, or org/name[:config][@revision]")
    add("--transfer", metavar="FILE|HUB-ID",
        help="with --bits: a text of another kind whose fit part settings are measured on, too; or none "
        "(default: demo-code, or demo beside that)")  # fmt: skip
    add("--samples", type=int, metavar="N", help="sequences, held-out ones included (default: the model's)")
    add("--seq-len", type=int, metavar="L", help="tokens per sequence")
    add("--held-out", type=int, metavar="N", help="sequences that only measure the fit (default: an eighth)")
    add("--seed", type=int, default=0, metavar="S", help="of the choice of text (default 0)")
    add = top.add_argument_group("where").add_argument
    add("--device", metavar="D", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="of the forward pass (default: the model's)")
    add("--threads", type=int, default=1, metavar="N", help="CPU threads; a part of the plan (default 1)")
    add("--workers", type=count, metavar="N", help="share the chunks among N processes, with Ray (default: this one)")
    add("--run", metavar="DIR", help="folder of the run's files (default: $KVQ_HOME/runs/PLAN)")
    add(
        "--registry", metavar="URL", help="file:///folder or hf://org (default: $KVQ_REGISTRY, else $KVQ_HOME/registry)"
    )
    add("--push", metavar="URL", help="publish to this registry as well: hf://org; checked before the work")
    add("--name", metavar="NAME", help="of the artifact (default: MODEL-RECIPE)")
    add("--version", metavar="V", help="1.2.0; default: the next number")
    add("--no-publish", action="store_true", help="leave artifact, card and plots in the run folder")
    add = top.add_argument_group("evaluation").add_argument
    add("--no-eval", action="store_true", help="publish without measuring on held-out text")
    add("--eval-windows", type=count, metavar="N", help="windows of it, as long as the sequences (default: few)")
    add("--also", metavar="NAME=SOURCE", nargs="+",
        help="texts of other kinds to measure on too: demo-code (Python's library), a corpus as above; or none "
        "(default: the model's, demo-code beside a --corpus)")  # fmt: skip
    add(
        "--baseline",
        action="append",
        default=[],
        metavar="NAME",
        help="measure this beside: an unfitted recipe or a REF",
    )
    add(
        "--max-perplexity-ratio",
        type=float,
        metavar="X",
        help="publish only if perplexity / 16-bit perplexity <= X, every token but the sinks encoded",
    )
    add("--max-kl", type=float, metavar="X", help="publish only if the KL divergence, nats per token, <= X, likewise")
    add = top.add_argument_group("how").add_argument
    add("--prefect", action="store_true", help="run as a Prefect flow (also when PREFECT_API_URL is set)")
    add("--dry-run", action="store_true", help="check everything, print the plan, and stop")
    add("--list-models", action="store_true", help="print the catalog")
    add("--json", action="store_true", help="print JSON")
    add("--quiet", action="store_true", help="no progress bar")
    return top


if __name__ == "__main__":
    sys.exit(main())
