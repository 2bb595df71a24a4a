"""Measure every family of recipes on each model at hand, and write records/compare.md and its pictures.

    make compare                         all small models, with the models and texts under KVQ_TEST_DATA
    python -m scripts.compare_models --model demo --recipes aqua-2bit higgs-2bit
    python -m scripts.compare_models --records                        page and pictures of what was measured before
    python -m scripts.compare_models --records --quick                the same in seconds: the real model's alone

First stands what scripts.measure_real found of a real language model, in pieces and over hours, in
benchmarks/results/real: its records are read, nothing of it is measured here. README.md gets its table.

Beside the page there are compare.png (the frontier of each model), compare-MODEL.png (all recipes of one) and
frontier.png (the first model's, for README). A model takes up to 80 minutes of one core; one that was stopped goes on
where it was. Page and figures are both made from the records, MODEL.json, so that neither can be newer than the other;
of a model that is not measured this time, from those kept before: of benchmarks/records, in benchmarks/results/compare.
"""

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvq_calib.cli import commands
from kvq_calib.evaluate.ledger import code
from kvq_calib.evaluate.subject import choose
from kvq_calib.model import find as models
from kvq_calib.report import plots
from kvq_calib.text.documents import EMBEDDED
from kvq_runtime.registry.measured import FULL, TextRecord
from kvq_runtime.registry.sound import read
from scripts import compare_page, measure_real, real_page
from scripts.compare_page import BUDGETS, OPENING, PICTURE, Found, Model

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "benchmarks" / "records"
RECORDS = ROOT / "benchmarks" / "results" / "compare"  # of the page in DOCS
# of runs and of what was measured: a second call goes on where the first was, unless the code was changed since
HOME = Path("build/compare").absolute() / code()[:16]
STORIES = "text/tinystories/stories_2M.txt"
MODELS = (
    Model("demo", "demo", None, samples=48, length=1024, windows=12),
    Model("stories260K", "models/stories260K", STORIES, samples=64, length=512, windows=12),
    Model("babyllama105", "models/babyllama105", STORIES, samples=64, length=256, windows=24),
    Model("narrow", str(ROOT / "artifacts" / "narrow-model"), "demo", samples=48, length=1024, windows=12),
)
REAL = Model(
    real_page.NAME, "", None, samples=measure_real.SAMPLES, length=measure_real.LENGTH,
    windows=measure_real.WINDOWS[real_page.LENGTH],
)  # fmt: skip
# of each model a text of another kind than it is fitted on, NAME=SOURCE under KVQ_TEST_DATA, or an embedded one
BESIDE = {
    "demo": "demo-code",
    "stories260K": "c4=text/c4/c4_sample.jsonl",
    "babyllama105": "shakespeare=text/tinyshakespeare/input.txt",
    "narrow": "demo-code",
}
SINKS = 4  # exact first tokens of all recipes


def main() -> int:
    """Measure, and write tables, plots and the page."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--model", action="append", choices=[one.name for one in MODELS], help="only this one; repeat")
    top.add_argument("--recipes", nargs="+", default=[], metavar="NAME", help="default: some of every family")
    told = "records of the real model (%(default)s)"
    top.add_argument("--real", type=Path, default=real_page.RESULTS, metavar="DIR", help=told)
    top.add_argument("--docs", type=Path, default=DOCS, metavar="DIR", help="where page and plots go")
    told = "draw and write from MODEL.json there (default: benchmarks/results/compare); measure nothing"
    top.add_argument("--records", type=Path, nargs="?", const=RECORDS, metavar="DIR", help=told)
    told = "with --records: leave the pictures of the small models as they are"
    top.add_argument("--quick", action="store_true", help=told)
    args = top.parse_args()
    os.environ.setdefault("KVQ_HOME", str(HOME))
    data = Path(os.environ.get("KVQ_TEST_DATA", "."))
    records = args.records or (RECORDS if args.docs == DOCS and not args.recipes else HOME)
    found: Found = {}
    absent: dict[Model, list[str]] = {}
    beside: list[str] = []
    real = real_page.records(args.real, real_page.ON, real_page.LENGTH)
    if real:
        found[REAL], absent[REAL] = real, []
        (args.docs / f"compare-{REAL.name}.png").write_bytes(plots.comparison(real))
        beside = real_page.sections(args.real, args.docs)
        readme = (ROOT if args.docs == DOCS else args.docs.parent) / "README.md"
        if readme.is_file():
            readme.write_text(real_page.readme(readme.read_text(), real_page.brief(args.real)))
    for model in MODELS:
        asked, kept = not args.model or model.name in args.model, records / f"{model.name}.json"
        if asked and args.records is None and _can_be_measured(model, data):
            print(f"{model.name} ...", file=sys.stderr, flush=True)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(measure(model, data, args.recipes)) + "\n")
        elif not (kept.is_file() and (asked or args.records is None)):
            continue
        folder = model.path(data)
        here = model.text is None or Path(folder).is_dir()
        found[model] = [read(one, TextRecord) for one in json.loads(kept.read_text())]
        absent[model] = left_out(folder) if here and not args.recipes else []
        if not args.quick:
            (args.docs / f"compare-{model.name}.png").write_bytes(plots.comparison(found[model]))
        if args.records is None:  # which may be stopped
            write(found, absent, args.docs, beside)
    write(found, absent, args.docs, beside, every=not args.quick)
    return 0


def _can_be_measured(model: Model, data: Path) -> bool:
    """True if the model is here; if not, write the reason to stderr."""
    folder, why = model.path(data), ""
    if model.text not in (None, *EMBEDDED) and not os.environ.get("KVQ_TEST_DATA"):
        why = "KVQ_TEST_DATA names no folder"
    elif model.text not in (None, *EMBEDDED) and not Path(folder).is_dir():
        why = f"there is no {folder}"
    if why:
        print(f"{model.name} is not measured: {why}", file=sys.stderr)
    return not why


def write(
    found: Found, absent: Mapping[Model, Sequence[str]], docs: Path, beside: Sequence[str] = (), every: bool = True
) -> None:
    """Write the page and the pictures of all models that were measured so far.

    beside   what else was found of the first
    every    draw all models, too; else the first alone
    """
    measured = [records for records in found.values() if any(one.figures(FULL) for one in records)]
    if measured:
        if every:
            (docs / PICTURE).write_bytes(plots.frontier(measured, width=13))
        (docs / OPENING).write_bytes(plots.frontier(measured[:1], beside=False, width=8, height=5))
    (docs / "compare.md").write_text(compare_page.page(found, absent, beside))


def left_out(folder: str) -> list[str]:
    """Return why some recipes are not compared on a model."""
    return choose([], models.resolve(folder))[1]


def measure(model: Model, data: Path, recipes: Sequence[str]) -> list[dict[str, Any]]:
    """The records of `kvq compare` on one model."""
    top = argparse.ArgumentParser()
    commands.add_compare(top.add_subparsers())
    name, named, other = BESIDE[model.name].partition("=")
    given = ["--model", model.path(data), "--also", f"{name}={_source(model, data, other)}" if named else name]
    given += ["--samples", model.samples, "--length", model.length, "--windows", model.windows]
    given += ["--sinks", SINKS, "--recent", 0, "--device", "cpu", "--dtype", "float32", "--json", "--layers"]
    given += ["--corpus", _source(model, data, model.text)] if model.text else []
    given += ["--recipes", *recipes] if recipes else ["--bits", *BUDGETS]
    args = top.parse_args(["compare", *map(str, given)])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        args.run(args)
    return json.loads(printed.getvalue())


def _source(model: Model, data: Path, text: str) -> str:
    """A text of a model, as `--corpus` takes it.

    With a space for each line's end for the smallest model, whose alphabet does not have it.
    """
    if text in EMBEDDED or model.name != "babyllama105":
        return text if text in EMBEDDED else str(data / text)
    path = HOME / f"{Path(text).stem}-in-a-line.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(" ".join((data / text).read_text(encoding="utf-8").split("\n")), encoding="utf-8")
    return str(path)


if __name__ == "__main__":
    sys.exit(main())
