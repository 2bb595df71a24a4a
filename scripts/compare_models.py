"""Write docs/compare.md: every family of recipes on each small model at hand, in tables, plots, and held to the papers.

    make compare                         all, with the models and texts under KVQ_TEST_DATA
    python scripts/compare_models.py --model demo --recipes aqua-2bit higgs-2bit

A model takes minutes; one that was stopped goes on where it was. Prose and figures are both made from the records, so
that neither can be newer than the other.
"""

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq_calib import commands
from kvq_calib.commands import comparison
from kvq_calib.ledger import code
from kvq_calib.plots import size_of
from kvq_runtime.table import cell

DOCS = Path(__file__).parents[1] / "docs"
# of runs and of what was measured: a second call goes on where the first was, unless the code was changed since
HOME = Path("build/compare").absolute() / code()[:16]


@dataclass(frozen=True)
class Model:
    """A model, the text that it was made for, and how much of that is used."""

    name: str
    folder: str
    text: str | None
    samples: int
    length: int
    windows: int


MODELS = (
    Model("demo", "demo", None, samples=48, length=1024, windows=4),
    Model("stories260K", "models/stories260K", "text/tinystories/stories_2M.txt", samples=64, length=512, windows=12),
    Model("babyllama105", "models/babyllama105", "text/tinystories/stories_2M.txt", samples=64, length=256, windows=24),
)


@dataclass(frozen=True)
class Claim:
    """What a paper says: the recipe `better` diverges less than `worse`."""

    said: str
    better: str
    worse: str


CLAIMS = (
    Claim("AQUA-KV: predicting from the layer below beats the same grid alone", "aqua-2bit", "higgs-2bit"),
    Claim("AQUA-KV: and so at 3 bits", "aqua-3bit", "higgs-3bit"),
    Claim("AQUA-KV: at 2 bits it beats KIVI at 2 bits", "aqua-2bit", "kivi-2bit"),
    Claim("HIGGS: rounding pairs to a Gaussian grid beats rotation with min-max (QuaRot)", "higgs-2bit", "quarot-2bit"),
    Claim("QuaRot: a rotation helps plain rounding", "quarot-2bit", "rtn-2bit"),
    Claim("KIVI: keys by channel beat keys by token", "kivi-2bit", "rtn-2bit"),
    Claim("PolarQuant: angles beat KIVI", "polar-paper", "kivi-2bit"),
    Claim("TurboQuant: an optimal scalar grid beats PolarQuant", "turboquant-3bit", "polar-paper"),
    Claim("SVDq: latent channels of mixed bits beat KIVI (2-bit keys, 4-bit values)", "svdq-2bit-v4", "kivi-2bit"),
    Claim("GEAR: low rank and outliers mend KIVI's rounding", "gear-2bit", "kivi-2bit"),
    Claim("here: water-filling beats SVDq's fixed schedule", "svdq-wf-2bit-v4", "svdq-2bit-v4"),
    Claim("here: the mean is worth removing", "mean-higgs-2bit", "higgs-2bit"),
    Claim("here: bases of AQUA-KV's residuals beat its grid", "aqua-klt-2bit", "aqua-2bit"),
)


def main() -> int:
    """Measure, and write tables, plots and the page."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--model", action="append", choices=[one.name for one in MODELS], help="only this one; repeat")
    top.add_argument("--recipes", nargs="+", default=[], metavar="NAME", help="default: some of every family")
    top.add_argument("--docs", type=Path, default=DOCS, metavar="DIR", help="where page and plots go")
    args = top.parse_args()
    os.environ.setdefault("KVQ_HOME", str(HOME))
    data = os.environ.get("KVQ_TEST_DATA")
    found = {}
    for model in MODELS:
        if args.model and model.name not in args.model:
            continue
        if model.text and not data:
            print(f"{model.name} is left out: KVQ_TEST_DATA names no folder", file=sys.stderr)
            continue
        print(f"{model.name} ...", file=sys.stderr, flush=True)
        found[model] = measure(model, Path(data or "."), args.recipes, args.docs)
        (args.docs / "compare.md").write_text(page(found))
    return 0


def measure(model: Model, data: Path, recipes: Sequence[str], docs: Path) -> list[dict[str, Any]]:
    """The records of `kvq compare` on one model; its plot goes to `docs`."""
    top = argparse.ArgumentParser()
    commands.add_compare(top.add_subparsers())
    given = ["--samples", model.samples, "--length", model.length, "--windows", model.windows, "--recent", 0]
    given += ["--model", data / model.folder if model.text else model.folder]
    given += ["--device", "cpu", "--dtype", "float32", "--plot", docs / f"compare-{model.name}.png", "--json"]
    if model.text:
        given += ["--corpus", _one_line(model, data / model.text)]
    if recipes:
        given += ["--recipes", *recipes]
    args = top.parse_args(["compare", *map(str, given)])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        args.run(args)
    return json.loads(printed.getvalue())


def _one_line(model: Model, text: Path) -> Path:
    """The text with a space for each line's end, which the smallest model's alphabet does not have."""
    if model.name != "babyllama105":
        return text
    path = HOME / f"{model.name}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(" ".join(text.read_text(encoding="utf-8").split("\n")), encoding="utf-8")
    return path


def page(found: Mapping[Model, Sequence[Mapping[str, Any]]]) -> str:
    """The text of compare.md."""
    parts = [
        "# Recipes compared",
        "`make compare` measures and writes this page. Every token but the sinks is encoded (`--recent 0`), in steps "
        "of 32 tokens. Bits are those of keys and values together, scales and all metadata included: asymptotic, of a "
        "cache that holds a window, and one of 4096 tokens; predictors and bases, which an artifact holds once for all "
        "sequences, are not in them. Attention: squared error of its output over its energy, "
        "mean over layers. Models this small have no massive outliers and short contexts: what ranks here may not rank "
        "so on a model of 7 billion parameters.",
    ]
    for model, records in found.items():
        parts += [_section(model, records)]
    parts += ["## Where the papers' rankings hold", _verdicts(found)]
    return "\n\n".join(parts) + "\n"


def _section(model: Model, records: Sequence[Mapping[str, Any]]) -> str:
    about = records[0]["protocol"]
    size = size_of(about["model"]["parameters"])
    return (
        f"## {model.name} ({size} parameters)\n\n"
        f"Fitted on {model.samples} sequences of {model.length} tokens of {about['text']['source']}, measured on "
        f"{about['windows']} held-out windows of {about['length']}; ± is a standard error over windows.\n\n"
        f"![{model.name}, {size} parameters](compare-{model.name}.png)\n\n{_table(comparison(records))}"
    )


def _verdicts(found: Mapping[Model, Sequence[Mapping[str, Any]]]) -> str:
    """A row a claim, a column a model: whether it holds there, and what both sides cost at which bits."""
    rows = []
    for claim in CLAIMS:
        row = {"claim": claim.said, "recipes": f"{claim.better} / {claim.worse}"}
        for model, records in found.items():
            results = {one["result"]["recipe"]: one["result"] for one in records}
            if claim.better in results and claim.worse in results:
                pair = [results[name] for name in (claim.better, claim.worse)]
                costs = " / ".join(f"{one['kl']:.2g} at {one['bits']['asymptotic']:.3g} bits" for one in pair)
                row[model.name] = f"{verdict(*pair)}: {costs}"
        if len(row) > 2:
            rows.append(row)
    return (
        "KL divergence from the 16-bit model, nats per token, of both sides. Undecided: the one that should be better "
        "diverges more, and holds fewer bits.\n\n" + _table(rows)
    )


def verdict(better: Mapping[str, Any], worse: Mapping[str, Any]) -> str:
    """Whether a claim holds for two results; bits within a quarter count as the same."""
    fewer = worse["bits"]["asymptotic"] - better["bits"]["asymptotic"]
    if better["kl"] < worse["kl"]:
        return "holds, with more bits" if fewer < -0.25 else "holds"
    return "undecided" if fewer > 0.25 else "**does not hold**"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---"] * len(names), *([cell(row.get(name)) for name in names] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
