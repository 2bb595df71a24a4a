"""Add `check`, `eval`, `compare`, `bench`, `report` and `gc` to the `kvq` command. Imports nothing heavy."""

import argparse
from importlib import import_module
from typing import Any

from kvq_calib.model import catalog
from kvq_calib.run.device import keep_memory
from kvq_runtime.cli.options import add_registry, check_output, count, seconds

MODEL = "a name of the catalog (demo, qwen2.5-7b), a folder, a .gguf file, or a Hub id"
EVAL = """\
examples
    kvq eval higgs-2bit rtn-4bit --model demo                          recipes that need no calibration
    kvq eval demo-aqua-2bit higgs-2bit --model demo --plot out.png     an artifact beside a recipe, with a plot
    kvq eval higgs-2bit --model llama-3.1-8b --corpus wikitext-2 --length 8192 --windows all --protocol full
    kvq eval higgs-2bit --model qwen2.5-7b --tasks passkey,gsm8k --limit 200

Protocols: full, every token but the sinks is encoded before anything attends to it; in-use, tokens stay exact as long
as the cache keeps them so. Records of artifacts are kept in the registry. docs/measure.md explains every figure."""
COMPARE = """\
examples
    kvq compare --model ./my-model --corpus text.txt --recipes aqua-2bit higgs-2bit kivi-2bit --samples 64
    kvq compare --model demo --recipes squat-2bit squat-2bit+key.feedback.rank=60 my.json --recent 0 --plot compare.png
    kvq compare --model demo --recipes aqua-2bit kivi-2bit --bits 2.1 --sinks 4 --recent 0     with bits by layer

Recipes that need a fit are fitted in one pass over the model, and are not published. The same command resumes what was
stopped, and repeats no measurement."""
BENCH = """\
examples
    kvq bench my-aqua-2bit rtn-4bit --model qwen2.5-7b --context 4096,16384 --batch 1,8 --device cuda
    kvq bench kivi-2bit --model ./my-model --beside quanto-2bit,hqq-2bit --tokens 128 --json

Every cache reads the same random prompts and generates with model.generate, in turns. A step that encodes a block takes
longer: --tokens 128 includes one. A CPU predicts nothing about a GPU."""
REPORT = """\
examples
    kvq report qwen2.5-7b-aqua-2bit@1.2.0 --open    a version, shown in a browser
    kvq report --registry --out pages               all versions of your registry, in a folder"""

GC = "example: kvq gc --published 2d --others 90d --delete. Versions in the registry stay."


def add(subparsers: Any) -> None:
    """Add the six commands."""
    text = "measure which recipes are safe on a model"
    _add_check(_command(subparsers, "check", text, "example: kvq check build/qwen2.5-coder-0.5b", "check"))
    _add_eval(_command(subparsers, "eval", "measure perplexity and errors with compressed caches", EVAL, "evaluate"))
    _add_compare(_command(subparsers, "compare", "fit and measure many recipes on one model", COMPARE, "compare"))
    _add_bench(_command(subparsers, "bench", "measure time and memory beside transformers' caches", BENCH, "bench"))
    _add_report(_command(subparsers, "report", "write an HTML page of a version, or of a registry", REPORT, "report"))
    _add_gc(_command(subparsers, "gc", "delete run folders that are published or old", GC, "gc"))


def _command(subparsers: Any, name: str, idea: str, examples: str, function: str) -> argparse.ArgumentParser:
    """Add a command that runs a function of `subcommands`, which is imported then."""
    layout = argparse.RawDescriptionHelpFormatter
    command = subparsers.add_parser(name, help=idea, description=idea, epilog=examples, formatter_class=layout)
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("--quiet", action="store_true", help="no progress bar")
    command.set_defaults(run=lambda args: _run(function, args))
    return command


def _run(function: str, args: argparse.Namespace) -> int:
    """Check what needs no heavy import, then import and run a command."""
    keep_memory()
    if getattr(args, "model", None):
        catalog.check(args.model)
    for option in ("output", "plot"):
        check_output(f"--{option}", getattr(args, option, None))
    return getattr(import_module("kvq_calib.cli.subcommands"), function)(args)


def _add_check(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("model", metavar="MODEL", help=MODEL)
    add("--corpus", metavar="FILE|HUB-ID", default="demo", help="text (default: Python's documentation)")
    add("--device", help="cpu, cuda, ... (default: cuda if there is one)")
    command.set_defaults(dtype=None)


def _add_eval(command: argparse.ArgumentParser) -> None:
    text = "a reference, a .safetensors file, or an unfitted recipe; with --tasks none: the 16-bit model alone"
    command.add_argument("candidates", metavar="REF|RECIPE", nargs="*", help=text)
    _add_text(command)
    _add_protocol(command)
    add_registry(command)
    add = command.add_argument_group("tasks").add_argument
    text = "measure tasks instead of text: passkey, needle (docs/measure.md), or lm-eval's (gsm8k, ...; extra lm-eval)"
    add("--tasks", metavar="TASK,TASK", help=text)
    add("--lengths", type=count, metavar="L", nargs="+", help="tokens of a needle task's text (default: 1024 4096)")
    depths = [0.1, 0.3, 0.5, 0.7, 0.9]
    add("--depths", type=float, metavar="D", nargs="+", default=depths, help="positions of a needle, from 0 to 1")
    add("--samples", type=count, metavar="N", default=5, help="texts of each length and depth (default: 5)")
    add("--limit", type=count, metavar="N", help="examples of each of lm-eval's tasks (default: all)")
    add("--include-path", metavar="DIR", help="a folder of task files beside lm-eval's own")
    add("--chat", action="store_true", help="apply the model's chat template to lm-eval's tasks")


def _add_compare(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--recipes", metavar="RECIPE", nargs="+", default=[], help="recipes, or all (default: some of every family)")
    add("--bits", metavar="B", type=float, nargs="+", default=[], help="also auto: bits by layer, within B per element")
    _add_text(command)
    _add_protocol(command)
    add("--samples", type=count, metavar="N", help="sequences to fit on (default: the model's)")
    add("--run", dest="folder", metavar="DIR", help="folder of the run's files (default: under $KVQ_HOME)")


def _add_bench(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("candidates", metavar="REF|RECIPE", nargs="+", help="references, .safetensors files, recipes")
    _add_machine(command, "as stored; bfloat16 where that has 32 bits")
    add("--context", type=counts, metavar="L,L", default=(1024,), help="tokens of a prompt (default: 1024)")
    add("--batch", type=counts, metavar="B,B", default=(1,), help="rows (default: 1)")
    add("--tokens", type=count, metavar="N", default=32, help="timed in a row and round (default: 32)")
    add("--rounds", type=count, metavar="N", default=3, help="turns of each cache (default: 3)")
    text = "transformers' quantized caches: quanto-2bit, quanto-4bit, hqq-2bit, hqq-4bit (default: none)"
    add("--beside", metavar="NAME,NAME", default="none", help=text)
    add_registry(command)


def _add_report(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("reference", metavar="REF", nargs="?", help="NAME, NAME@VERSION, NAME@ALIAS or NAME@sha256:HEX")
    text = "file:///folder or hf://org (default: yours); without REF the page is of all its versions"
    add("--registry", metavar="URL", nargs="?", const="", help=text)
    text = "the page (default: NAME-vVERSION.html or registry.html here); of a registry also a folder, for all pages"
    add("--out", metavar="FILE", help=text)
    add("--open", action="store_true", help="show it in a browser")


def _add_gc(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    text = "those with published artifacts, if unused for so long (default: 7d)"
    add("--published", metavar="TIME", type=seconds, default=7 * 86400.0, help=text)
    add("--others", metavar="TIME", type=seconds, default=30 * 86400.0, help="all others likewise (default: 30d)")
    add("--delete", action="store_true", help="delete; without it only the table is printed")


def _add_text(command: argparse.ArgumentParser) -> None:
    """Add the model, and the text to measure on."""
    _add_machine(command, "float32 on a CPU, else as stored")
    add = command.add_argument
    add(
        "--corpus",
        metavar="FILE|HUB-ID",
        help="text, measured on its held-out part; wikitext-2: the test set (default: the model's)",
    )
    add("--length", type=count, metavar="L", help="tokens of a sequence (default: the model's)")
    add("--windows", type=windows, default=16, metavar="N", help="windows of it, or all (default: 16)")


def _add_protocol(command: argparse.ArgumentParser) -> None:
    """Add the options of how to measure, and of what stays exact."""
    add = command.add_argument
    text = "how to measure (default: full, and in use if a recipe has no full encode)"
    add("--protocol", choices=["full", "in-use", "both"], help=text)
    add("--sinks", type=int, metavar="N", help="exact first tokens (default: each recipe's own)")
    text = "in use: exact newest tokens (default: each recipe's own); tokens of an unfinished block stay exact too"
    add("--recent", type=int, metavar="N", help=text)
    text = "run the model one layer at a time, by full encode (so it is if the model does not fit into memory)"
    add("--by-layer", action="store_true", help=text)
    add("--plot", metavar="FILE", help="write the plot of losses against bits, a PNG")
    add("--output", metavar="FILE", help="write the records as JSON")


def _add_machine(command: argparse.ArgumentParser, stored: str) -> None:
    """Add the model and where it runs; its weights are in the dtype `stored` by default."""
    command.add_argument("--model", required=True, help=MODEL)
    command.add_argument("--device", help="cpu, cuda, ... (default: cuda if there is one)")
    command.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help=f"default: {stored}")
    command.add_argument("--seed", type=int, default=0, help="of the choice of text (default: 0)")


def counts(text: str) -> tuple[int, ...]:
    """Parse whole numbers of at least 1 with commas between them."""
    return tuple(count(part) for part in text.split(","))


def windows(text: str) -> int | None:
    """Parse --windows: a count, or None for all."""
    return None if text == "all" else count(text)
