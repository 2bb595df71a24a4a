"""Add `eval`, `compare`, `bench` and `report` to the `kvq` command, whose exit codes they share.

Imports nothing that takes long: `--help` and `kvq list` must not wait for it.
"""

import argparse
import warnings
from importlib import import_module
from typing import Any

from kvq_calib.model import catalog
from kvq_calib.run.device import keep_memory
from kvq_runtime.cli import exit_codes, options
from kvq_runtime.cli.options import add_settings, count, png
from kvq_runtime.errors import extra

MODEL = "a name of the catalog (demo, qwen2.5-7b), folder, .gguf file, or Hub id"
_TEXT = """\
Text: documents of the corpus' held-out part, less those that share more than 5% of their runs of 64 bytes with its fit
part; what the windows still share is measured and said. --also measures on texts of other kinds than recipes are fitted
on, each with windows, overlap with the fit part of --corpus, and standard errors of its own: their held-out parts, so
that the same windows are measured whichever text is fitted on; by full encode where that is measured and the recipe has
one. Bounds are judged on the corpus. wikitext-2 is the test
set as papers measure on it: its lines joined by two line ends, tokenized whole with the tokenizer's own BOS, cut into
windows of --length in order, of which --windows takes the first, or all; from the Hub, or wikitext-2:FILE, a .parquet
of it or a .txt of its lines."""

EVAL_EXAMPLES = (
    """\
examples
    kvq eval higgs-2bit rtn-4bit --model demo                          recipes that need no calibration
    kvq eval kivi-2bit kivi-2bit+window.recent=32 --model demo         the same with another recent window
    kvq eval demo-aqua-2bit higgs-2bit --model demo --plots out        an artifact beside a recipe, with plots
    kvq eval qwen2.5-7b-aqua-2bit@1.2.0 --model qwen2.5-7b --corpus wiki.txt --length 8192 --device cuda
    kvq eval demo-aqua-2bit --model demo --protocol full --layers      every token encoded; errors by layer too
    kvq eval higgs-2bit --model llama-3.1-8b --corpus wikitext-2 --length 8192 --windows all --protocol full
    kvq eval demo-aqua-2bit --model demo --also demo-code c4=c4.jsonl  on texts of other kinds, too
    kvq eval higgs-2bit --model qwen2.5-7b --tasks passkey,needle      needles in a text, found through the cache
    kvq eval --model qwen2.5-7b --tasks passkey,needle --chat          what the 16-bit model answers by itself, asked
                                                                       in its chat form
    kvq eval higgs-2bit --model qwen2.5-7b --tasks gsm8k --limit 200   lm-eval's tasks, through the cache

The 16-bit model is always measured beside them. Protocols: full, one forward pass in which every token but the sinks
is encoded and decoded before anything attends to it; in-use, tokens arrive in steps and stay exact for as long as the
cache keeps them so; both by default. What is read exactly in use, up to all of it in short windows, costs nothing, so
that the full encode is nearer to a long context. A table of:
bits per element, asymptotic and of a cache that holds a window, or 4096 tokens; perplexity, and its distance from 16
bit with the standard error over windows; KL divergence from the 16-bit model in nats; top-1 agreement with it; the
share of attention's weight, and of what queries read, that was decoded. Records of published
artifacts are kept in the registry.

"""
    + _TEXT
)

COMPARE_EXAMPLES = (
    """\
examples
    kvq compare --model demo --windows 8 --sinks 4 --recent 0 --plot compare.png
    kvq compare --model ./my-model --corpus text.txt --recipes aqua-2bit higgs-2bit kivi-2bit --samples 64
    kvq compare --model demo --recipes squat-2bit-paper squat-2bit-paper+key.feedback.rank=60 my.json --recent 0
    kvq compare --model demo --recipes aqua-2bit kivi-2bit --bits 2.1 --sinks 4 --recent 0     with bits by layer
    kvq compare --model qwen2.5-7b --recipes all --length 4096 --device cuda --output records.json
    kvq compare --model demo --recipes aqua-2bit aqua-fisher-1bit --also demo-code prose=book.txt --protocol full

Recipes that need a fit are fitted in one pass over the model, and are not published; then all are measured in one pass
over held-out text. The same command resumes what was stopped, and repeats no measurement. The table, by bits per
element (asymptotic; of a cache that holds a window, or 4096 tokens), for each protocol (kvq eval --help says what they
are): perplexity, KL divergence in nats, top-1 agreement, each against the 16-bit model, the share of attention's weight
that was decoded, and with --layers the squared error of attention's output over its energy, mean over layers. --sinks 4
gives all the same exact first tokens, of which some papers have none. In use, recipes are compared at equal exact
tokens only with equal blocks, too: --recent 0 leaves sinks and an unfinished block exact, and --block 32 makes blocks
equal where the recipes allow it. A full encode needs neither.

"""
    + _TEXT
)

BENCH_EXAMPLES = """\
examples
    kvq bench higgs-2bit kivi-2bit --model demo --context 512,2048 --batch 1,4
    kvq bench aqua-2bit rtn-4bit --model qwen2.5-7b --context 4096,16384 --batch 1,8 --device cuda
    kvq bench kivi-2bit --model ./my-model --beside quanto-2bit,hqq-2bit --memory 80GB --json
    kvq bench aqua-2bit --model demo --beside none --tokens 128

Every cache reads the same random prompts and generates with model.generate, in turns: 16 bit (DynamicCache),
transformers' quantized caches (extra bench; a row says what is not installed), and each recipe, under "kvq" attention,
on a GPU with its steps as CUDA graphs. A recipe that is to be fitted takes part with its artifact or, where there is
none, with random tensors: neither time nor bytes depend on them. A table of: seconds until the first token, tokens per
second of the median step, processor seconds of a step, bytes that the cache holds, the peak of a GPU's memory, and how
many rows fit into --memory beside the weights, computed. What does not fit into this machine is a row that says so."""

INTERRUPTED = {
    "bench": "interrupted; finished rounds are above",
    "evaluate": "interrupted; nothing was kept",
    "compare": "interrupted; the same command goes on where it stopped",
}


REPORT_EXAMPLES = """\
examples
    kvq report qwen2.5-7b-aqua-2bit                                  the version that the name means
    kvq report qwen2.5-7b-aqua-2bit@1.2.0 --out page.html --open     one version, shown in a browser
    kvq report qwen2.5-7b-aqua-2bit --compare compare.json           with the frontier of kvq compare --output
    kvq report --registry                                            all versions of your registry
    kvq report --registry hf://my-org --out index.html               of another one
    kvq report --registry --out pages                                and each version's page, linked, in a folder

A page is one file that loads nothing from elsewhere. Of a version: bits and errors by layer, losses in and out of the
domain, divergence against bits beside others, health, provenance, history. Where nothing was measured it names the
command that does. A version that is damaged has a page too, and the command exits with 1."""


def add_report(subparsers: Any) -> None:
    """Add `kvq report`."""
    text = "an HTML page of everything known of a version, or of all versions of a registry"
    command = _command(subparsers, "report", text, REPORT_EXAMPLES, "report", "kvq_calib.cli.report")
    add = command.add_argument
    add("reference", metavar="REF", nargs="?",
        help="NAME, NAME@VERSION, NAME@ALIAS, NAME@sha256:HEX, a .safetensors file or a folder with one")  # fmt: skip
    add("--registry", metavar="URL", nargs="?", const="",
        help="file:///folder or hf://org (default: $KVQ_REGISTRY, else $KVQ_HOME/registry); without REF the page is "
        "of all its versions")  # fmt: skip
    add("--compare", metavar="FILE",
        help="records of the same model, of kvq compare --output or a run's evaluation.json")  # fmt: skip
    add("--out", metavar="FILE",
        help="the page (default: NAME-vVERSION.html or registry.html here; none with --json); of a registry also a "
        "folder, for the pages of all versions")  # fmt: skip
    add("--open", action="store_true", help="show it in a browser")


def add_eval(subparsers: Any) -> None:
    """Add `kvq eval`."""
    command = _command(subparsers, "eval", "perplexity and errors with compressed caches", EVAL_EXAMPLES, "evaluate")
    add = command.add_argument
    add("subjects", metavar="REF|RECIPE", nargs="*",
        help="a reference, a .safetensors file, or an unfitted recipe; with --tasks none: the 16-bit model alone"
    )  # fmt: skip
    add_settings(command, "of every recipe named")
    _source(command)
    add("--rows", type=count, metavar="N", help="windows side by side (default: 8192 tokens' worth)")
    _measuring(command)
    _tasks(command)
    add("--plots", metavar="DIR", help="write error-by-layer.png and perplexity-by-bits.png")
    add("--output", metavar="FILE", help="write the records as JSON")
    options.registry(command)


def _tasks(command: argparse.ArgumentParser) -> None:
    """Add what `kvq eval --tasks` asks."""
    add = command.add_argument
    add("--tasks", metavar="TASK,TASK",
        help="measure tasks instead of text: see docs/measure.md; other names are lm-eval's (gsm8k, ifeval), which is "
        "an extra")  # fmt: skip
    add("--lengths", type=count, metavar="L", nargs="+", help="of tasks: tokens of a text (default: 1024 4096)")
    add("--depths", type=float, metavar="D", nargs="+", default=[0.1, 0.3, 0.5, 0.7, 0.9],
        help="of tasks: places of what is asked for, 0 to 1 (default: 0.1 0.3 0.5 0.7 0.9)")  # fmt: skip
    add("--samples", type=count, metavar="N", default=5, help="of tasks: texts of each length and depth (default: 5)")
    add("--limit", type=count, metavar="N", help="of lm-eval's tasks: the first examples (default: all)")
    add("--num-fewshot", type=int, metavar="N", help="of lm-eval's tasks: worked examples in a prompt")
    add("--batch-size", type=count, metavar="N", default=1,
        help="of lm-eval's tasks: requests side by side (default: 1)")  # fmt: skip
    add("--include-path", metavar="DIR", help="of lm-eval's tasks: a folder of task files beside its own")
    add("--chat", action="store_true", help="of tasks: apply the model's chat template")


def add_compare(subparsers: Any) -> None:
    """Add `kvq compare`."""
    command = _command(
        subparsers, "compare", "many recipes on one model, fitted in one pass", COMPARE_EXAMPLES, "compare"
    )
    _source(command)
    add = command.add_argument
    add("--recipes", metavar="RECIPE", nargs="+", default=[], help="recipes, or all (default: some of every family)")
    add_settings(command, "of every recipe named")
    add("--bits", metavar="B", type=float, nargs="+", default=[],
        help="also auto: bits by layer, within B per element"
    )  # fmt: skip
    add("--transfer", metavar="FILE|HUB-ID",
        help="with --bits: a text of another kind whose fit part settings are measured on, too; or none (default: "
        "demo-code, or demo beside that)")  # fmt: skip
    add("--wide", action="store_true", help="every column, instead of those that fit in 100")
    add("--samples", type=count, metavar="N", help="sequences to fit on (default: the model's)")
    _measuring(command)
    add("--plot", type=png, metavar="FILE", help="write the plot, a PNG")
    add("--output", metavar="FILE", help="write the records as JSON")
    add("--run", dest="folder", metavar="DIR", help="folder of the run's files (default: under $KVQ_HOME)")


def add_bench(subparsers: Any) -> None:
    """Add `kvq bench`."""
    text = "time to first token, tokens per second and memory, beside transformers' own caches"
    command = _command(subparsers, "bench", text, BENCH_EXAMPLES, "bench")
    add = command.add_argument
    add("subjects", metavar="REF|RECIPE", nargs="+", help="references, .safetensors files, recipes")
    add_settings(command, "of every recipe named")
    _machine(command, "as stored; bfloat16 where that has 32 bits", "prompts")
    add("--context", type=counts, metavar="L,L",
        help="tokens of a prompt (default: 1024,4096 as far as the model goes)")  # fmt: skip
    add("--batch", type=counts, metavar="B,B", default=(1,), help="rows (default: 1)")
    add("--tokens", type=count, metavar="N", default=32, help="timed in a row and round (default: 32)")
    add("--rounds", type=count, metavar="N", default=3, help="turns of each cache (default: 3)")
    add("--beside", metavar="NAME,NAME",
        help="transformers' quantized caches, or none (default: quanto-2bit,quanto-4bit,hqq-2bit,hqq-4bit,fp8)"
    )  # fmt: skip
    add("--memory", metavar="SIZE",
        help="that weights and rows are to fit into, as in 80GB (default: the device's own)")  # fmt: skip
    options.registry(command)


def _measuring(command: argparse.ArgumentParser) -> None:
    """Add what both measuring commands ask: on which texts, under which protocols, and what stays exact."""
    add = command.add_argument
    add("--windows", type=windows, default=16, metavar="N", help="windows of each text, or all (default: 16)")
    add("--also", metavar="NAME=SOURCE", nargs="+",
        help="texts of other kinds to measure on too: FILE, HUB-ID, demo-code (Python's library), wikitext-2; or none "
        "(default: the model's, demo-code beside a --corpus)")  # fmt: skip
    add(
        "--protocol", choices=["full", "in-use", "both"], default="both",
        help="every token but the sinks encoded before it is read; as the cache does it in use; or both (default)",
    )  # fmt: skip
    add("--step", type=count, default=32, metavar="N", help="in use: tokens per pass (default: 32)")
    add(
        "--prompt", type=int, default=0, metavar="N",
        help="in use: tokens of the first pass, which reads no cache and is not scored; recipes that are fitted to "
        "their prompt are fitted to it (default: 0, the first pass is a step)",
    )  # fmt: skip
    add("--sinks", type=int, metavar="N", help="exact first tokens (default: as each recipe says)")
    add("--recent", type=int, metavar="N",
        help="in use: exact newest tokens (default: as each recipe says). 0 still leaves those of an unfinished block "
        "and of the step at hand exact, 1 to 128 in blocks of 128, which can carry most of attention; the share is in "
        "the table")  # fmt: skip
    add("--block", type=count, metavar="N", help="tokens encoded together (default: as each recipe)")
    add("--by-layer", action="store_true",
        help="run the model one layer at a time, all recipes in one reading of its weights, by full encode alone (so "
        "it is where the model does not fit into memory)")  # fmt: skip
    add(
        "--layers", action="store_true",
        help="measure errors of keys, values and attention's output by layer, too, on 4 windows: a pass more for every "
        "16 recipes, in which each layer attends twice more for each recipe (--plots does too)",
    )  # fmt: skip


def _command(
    subparsers: Any, name: str, idea: str, examples: str, function: str, module: str = "kvq_calib.cli.subcommands"
) -> argparse.ArgumentParser:
    """A command that runs a function of a module, which is imported then."""
    command = options.command(subparsers, name, idea, examples)
    command.add_argument("--quiet", action="store_true", help="no progress bar")
    command.set_defaults(run=lambda args: _run(module, function, args))
    return command


def counts(text: str) -> tuple[int, ...]:
    """The type of an option: whole numbers of at least 1, with commas between them."""
    return tuple(count(part) for part in text.split(","))


def windows(text: str) -> int | None:
    """The type of --windows: a count, or None for all."""
    return None if text == "all" else count(text)


def _run(module: str, function: str, args: argparse.Namespace) -> int:
    """Import what a command takes, and run it; without the calibration extra, name the extra that it needs."""
    warnings.filterwarnings(
        "ignore", "`torch.jit", DeprecationWarning
    )  # hqq's, which transformers imports if it is there
    keep_memory()
    if getattr(args, "model", None):
        catalog.check(args.model)
    if function != "report":  # whose --out may be either
        for option in ("output", "out", "plot"):
            options.check_output(f"--{option}", getattr(args, option, None))
        options.check_output("--plots", getattr(args, "plots", None), folder=True)
    try:
        command = getattr(import_module(module), function)
        exit_codes.loaded()
        return command(args)
    except KeyboardInterrupt:
        kept = function == "evaluate" and args.tasks
        raise KeyboardInterrupt(INTERRUPTED.get("compare" if kept else function, "interrupted")) from None
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("kvq"):
            raise
        raise RuntimeError(f"kvq {args.command} needs {_missing(error)}; {extra('calib')}") from error


def _missing(error: BaseException) -> str:
    """The module that was not found; transformers' own error names none, one of its causes does."""
    cause: BaseException | None = error
    while cause is not None and getattr(cause, "name", None) is None:
        cause = cause.__cause__
    return getattr(cause, "name", None) or str(error)


def _source(command: argparse.ArgumentParser) -> None:
    _machine(command, "float32 on a CPU, else as stored", "sequences")
    add = command.add_argument
    add("--corpus", metavar="FILE|HUB-ID", help="text, measured on its held-out part (default: model's)")
    add("--length", type=count, metavar="L", help="tokens of a sequence (default: the model's)")


def _machine(command: argparse.ArgumentParser, stored: str, chosen: str) -> None:
    """Add the model and where it runs: in the dtype `stored` by default; what the seed chooses."""
    add = command.add_argument
    add("--model", required=True, help=MODEL)
    add("--device", help="cpu, cuda, ... (default: cuda where there is one)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help=f"default: {stored}")
    add("--seed", type=int, default=0, help=f"chooses the {chosen} (default: 0)")
