"""Measure at which bits retrieval through the cache breaks: the table of benchmarks/records/retrieval.md.

    python scripts/measure_retrieval.py                          all, on one thread; fits what needs a fit
    python scripts/measure_retrieval.py --recipes rtn-2bit higgs-2bit --samples 2
    python scripts/measure_retrieval.py --protocol in-use        recipes without a full encode, and some beside them

By full encode every token but four sinks is encoded before it is read; in use the newest tokens are exact, too.
Artifacts and what was measured are kept under build/retrieval, and a second call goes on there; records go to
records.json there, or records-in-use.json.
"""

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvq_calib.cli import calibrate, commands
from kvq_runtime.geometry import MODELS
from kvq_runtime.recipe import preset

HOME = Path("build/retrieval").absolute()
TASKS = ("needle", "multikey", "chain", "count")
PLACED = TASKS[:3]  # what is asked for is at one place; mentions of what is counted are anywhere
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
RECIPES = (  # trellis codes of more bits take minutes each
    "rtn-2bit", "rtn-3bit", "rtn-4bit", "kivi-2bit", "kivi-3bit", "gear-2bit", "squat-online-2bit", "quarot-2bit",
    "quarot-3bit", "higgs-1bit", "higgs-2bit", "higgs-3bit", "higgs-4bit", "lloyd-1bit", "lloyd-2bit", "lloyd-3bit",
    "turboquant-1bit", "turboquant-2bit", "turboquant-3bit", "polar-2.5bit", "polar-paper", "polar-online",
    "trellis-head-1bit", "zipcache-online-2bit", "svdq-online-2bit-v4", "aqua-1bit", "aqua-2bit", "aqua-3bit",
    "aqua-metric-1bit", "aqua-metric-2bit", "kvquant-2bit", "kvquant-3bit", "squat-2bit", "squat-3bit", "svdq-2bit-v4",
    "svdq-3bit-v4", "svdq-wf-1bit-v4", "svdq-wf-2bit-v4", "wush-2bit", "oscar-2bit",
    "aqua-klt-1bit", "aqua-klt-2bit", "aqua-absorbed-2bit-2",
)  # fmt: skip
IN_USE = (  # the first five have a full encode, too
    "rtn-2bit", "kivi-2bit", "higgs-1bit", "higgs-2bit", "aqua-2bit", "h2o", "h2o-50", "h2o-higgs-2bit",
    "aqua-h2o-2bit", "subkv-2bit", "subkv-3bit", "subkv-4bit", "subkv-aqua-2bit", "svdq-shadow-2bit-v4-128",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Fit, measure, and print the rows."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--recipes", nargs="+", metavar="NAME", help="default: of most families")
    top.add_argument("--protocol", choices=["full", "in-use"], default="full", help="(default: %(default)s)")
    top.add_argument("--length", type=int, default=2048, help="tokens of a text (%(default)s)")
    top.add_argument("--samples", type=int, default=4, help="texts of each task and depth (%(default)s)")
    args = top.parse_args(arguments)
    names = args.recipes or (RECIPES if args.protocol == "full" else IN_USE)
    for name in names:
        preset(name).check(MODELS["recall"])
    os.environ.setdefault("KVQ_HOME", str(HOME))
    fit([name for name in names if preset(name).fitted])
    records = measure(names, args.length, args.samples, args.protocol)
    HOME.mkdir(parents=True, exist_ok=True)
    kept = HOME / f"records{'' if args.protocol == 'full' else '-in-use'}.json"
    kept.write_text(json.dumps(records, indent=1) + "\n")
    print("\n".join(lines(records, args.protocol)))
    return 0


def fit(names: Sequence[str]) -> None:
    """Publish an artifact of each recipe that has none, fitted to texts of the tasks that no evaluation asks."""
    given = [word for name in names for word in ("--recipe", name)]
    with contextlib.redirect_stdout(sys.stderr):
        code = calibrate.main(["--model", "recall", *given, "--no-eval"]) if given else 0
    if code:
        raise RuntimeError(f"kvq-calibrate did not fit {', '.join(names)}; what it printed says why")


def measure(names: Sequence[str], length: int, samples: int, protocol: str = "full") -> list[dict[str, Any]]:
    """The records of `kvq eval --tasks`: of the 16-bit model, then of each recipe."""
    top = argparse.ArgumentParser()
    commands.add_eval(top.add_subparsers())
    subjects = [f"recall-{name}" if preset(name).fitted else name for name in names]
    given = ["--model", "recall", "--tasks", ",".join(TASKS), "--lengths", length, "--samples", samples]
    given += [
        "--depths",
        *DEPTHS,
        "--protocol",
        protocol,
        "--sinks",
        4,
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--json",
    ]
    args = top.parse_args(["eval", *subjects, *map(str, given)])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        args.run(args)
    return json.loads(printed.getvalue())


def lines(records: Iterable[Mapping[str, Any]], protocol: str = "full") -> list[str]:
    """Rows of a Markdown table: accuracy by task with its standard error, then by depth over PLACED."""
    found = [
        f"| recipe | bits | {' | '.join(f'`{task}`' for task in TASKS)} | at {' | at '.join(map(str, DEPTHS))} |",
        f"|---|{'---:|' * (1 + len(TASKS) + len(DEPTHS))}",
    ]
    for record in records:
        result = record["result"]
        part = result["protocols"][protocol]
        name = f"`{result['recipe']}`" if "bits" in result else result["recipe"]
        held = f"{result['bits']['asymptotic']:.2f}" if "bits" in result else "16"
        if "reason" in part:
            found.append(f"| {name} | {held} | {part['reason']} |")
            continue
        cells = [percent(part["tasks"][task]["accuracy"], part["tasks"][task]["se"]) for task in TASKS]
        for depth in DEPTHS:
            some = [cell["accuracy"] for cell in part["cells"] if cell["depth"] == depth and cell["task"] in PLACED]
            cells.append(percent(sum(some) / len(some)))
        found.append(f"| {name} | {held} | {' | '.join(cells)} |")
    return found


def percent(share: float, error: float | None = None) -> str:
    """A share in percent, with its standard error where it has one that is not 0."""
    return f"{100 * share:.0f}" + (f" ± {100 * error:.0f}" if error else "")


if __name__ == "__main__":
    sys.exit(main())
