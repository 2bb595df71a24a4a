"""Keep what a benchmark finds as JSON lines, one by one, and say what they say: a page, what failed first; a picture.

    python -m benchmarks.report benchmarks/results/gpu-<device>.jsonl [...]
    python -m benchmarks.report benchmarks/results/gpu-<device>.jsonl --plot picture.png [--model llama-3.1-8b]

Lines stay when a run is stopped, and what they say is not measured again. A line says which kernels it is of (`of`):
what was measured of other kernels, or with another Triton or PyTorch, is not taken for a result.
"""

import argparse
import hashlib
import json
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent
Line = dict[str, Any]
NAMES = (  # what tells one result from another, where a line has it
    *("what", "model", "recipe", "half", "cache", "graph", "tokens", "prompt", "layers", "batch"),
    *("tile", "warps", "stages", "registers"),
)
ATTEND = (
    *("recipe", "batch", "tokens", "µs (quartiles)", "GB/s", "of bandwidth", "fastest bfloat16", "speed-up"),
    "pages",
)
GENERATE = ("cache", "graph", "batch", "ms a step (quartiles, worst)", "tokens/s", "prompt s", "cache GB", "peak GB")


def gpu_name() -> str:
    """The GPU in use, as a part of a file's name: nvidia-h200."""
    return torch.cuda.get_device_name().lower().replace(" ", "-")


def place(benchmark: str, device: str) -> Path:
    """Where results are kept: a file of $OUT, if that is set, else of benchmarks/results."""
    return Path(os.environ.get("OUT") or RESULTS) / f"{benchmark}-{device}.jsonl"


@lru_cache(maxsize=1)
def measured_code() -> str:
    """The code that is measured, as 12 digits: the runtime's sources, and versions of what compiles and runs them."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "kvq_runtime").rglob("*")):
        if path.suffix in (".py", ".json"):
            digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    for name in ("torch", "triton", "transformers"):
        try:
            digest.update(f"{name} {metadata.version(name)}".encode())
        except metadata.PackageNotFoundError:
            digest.update(f"no {name}".encode())
    return digest.hexdigest()[:12]


def name_of(line: Line) -> tuple:
    """The name of a line: two lines of one name are of one thing, measured twice."""
    return tuple(line.get(name) for name in NAMES)


def read(*files: Path) -> Iterator[Line]:
    """The lines of these files, of those that are there; a last line cut short is passed over."""
    for file in files:
        for text in file.read_text().splitlines() if file.exists() else ():
            try:
                yield json.loads(text)
            except json.JSONDecodeError:
                continue


def known(*files: Path) -> dict[tuple, Line]:
    """Lines of the code as it is that were found before, by name, the latest of each."""
    return {name_of(line): line for line in read(*files) if line.get("of") == measured_code()}


def keep(found: Iterable[Line], out: Path) -> list[Line]:
    """Print each line as it comes, and add it to a file, marked with the code it is of."""
    kept = []
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        if file.tell() and not out.read_bytes().endswith(b"\n"):
            file.write("\n")
        for line in found:
            kept.append(line | {"of": measured_code()})
            print(json.dumps(kept[-1]), flush=True)
            file.write(json.dumps(kept[-1]) + "\n")
            file.flush()
    return kept


def attempt(about: Line, measure: Callable[[], Line]) -> Line:
    """A line with what was measured, or with the error that it ended in."""
    try:
        return about | measure()
    except torch.OutOfMemoryError:
        return about | {"out_of_memory": True}
    except Exception as error:  # a driver's, a compiler's, torch's: types vary, and the other cases are worth measuring
        return about | {"error": f"{type(error).__name__}: {error}"[:400]}


def latest(lines: Iterable[Line]) -> list[Line]:
    """The last line of each thing that was measured of the latest code, in the order of the first."""
    lines = list(lines)
    of = lines[-1].get("of") if lines else None
    return list({name_of(line): line for line in lines if line.get("of") == of}.values())


def failures(lines: list[Line]) -> Iterator[str]:
    """The failures, and the gaps."""
    for line in lines:
        named = ("model", "recipe", "cache", "half", "tokens", "batch")
        what, where = line["what"], " ".join(str(line[name]) for name in named if name in line)
        if what == "parity" and not line["good"]:
            failed = f"FAILED: {len(line['failed'])} tests"
            why = failed if line["failed"] or line["ended"] else "NOT FINISHED in its time"
            yield f"PARITY {why}, {line['passed']} passed; not all that is timed below is known to be right"
            yield from (f"  {name}" for name in line["failed"])
            yield from (f"  | {text}" for text in line["said"])
        elif what == "compile" and line["not_done"]:
            yield f"not compiled in time, so not measured: {len(line['not_done'])} of {line['jobs']}; run it again"
        elif what == "stopped":
            yield f"stopped: {line['why']}; {line['left']} left: run it again"
        elif "error" in line:
            yield f"FAILED: {what} {where}: {line['error']}"
        elif line.get("out_of_memory"):
            yield f"out of memory: {what} {where}"
        elif line.get("compiled_meanwhile"):
            yield f"compiled while timing: {where}: {', '.join(line['compiled_meanwhile'])}"


def table(names: tuple[str, ...], rows: list[tuple]) -> Iterator[str]:
    """A Markdown table."""
    yield "| " + " | ".join(names) + " |"
    yield "|" + "---|" * len(names)
    yield from ("| " + " | ".join(map(str, row)) + " |" for row in rows)


def attended(line: Line) -> tuple:
    """A row of ATTEND."""
    paged, best, speed_up = line["baselines"].get("pages"), "none", ""
    if line["baseline"]:
        best = f"{line['baseline']}: {line['baseline_microseconds']} µs, {line['baseline_share']:.0%}"
        speed_up = f"{line['speed_up']}x"
    return (
        line["recipe"], line["batch"], line["tokens"], f"{line['microseconds']} ({line['low']} to {line['high']})",
        round(line["gb_per_s"]), f"{line['bandwidth_share']:.0%}",
        best, speed_up,
        f"{paged['microseconds']} µs" if isinstance(paged, dict) else "",
    )  # fmt: skip


def generated(line: Line) -> tuple:
    """A row of GENERATE."""
    peak = line["peak_bytes"]
    return (
        line["cache"], "yes" if line["graph"] else "no", line["batch"],
        f"{line['ms_per_step']} ({line['low_ms']} to {line['high_ms']}, {line['worst_ms']})", line["tokens_per_s"],
        line["prompt_s"], round(line["cache_bytes"] / 1e9, 2), round(peak / 1e9, 1) if peak else "",
    )  # fmt: skip


def page(lines: Iterable[Line]) -> Iterator[str]:
    """Everything, failures first."""
    chosen = latest(lines)
    yield from failures(chosen)
    for line in chosen:
        if line["what"] == "device":
            yield (
                f"{line['name']}: copy {line['copy_gb_per_s']} GB/s, read {line['read_gb_per_s']} GB/s, matrix product "
                f"{line['tflops']} TFLOP/s, shortest time {line['floor_microseconds']} µs; PyTorch {line['torch']}, "
                f"Triton {line['triton']}"
            )
        elif line["what"] == "parity" and line["good"]:
            yield f"parity: {line['passed']} passed, {line['skipped']} skipped"
    whole = [line for line in chosen if "error" not in line and not line.get("out_of_memory")]
    of_kind = {what: [line for line in whole if line["what"] == what] for what in ("attend", "generate", "encode")}
    for what, names, row in (("attend", ATTEND, attended), ("generate", GENERATE, generated)):
        for model in dict.fromkeys(line["model"] for line in of_kind[what]):
            yield f"\n{what}, {model}"
            yield from table(names, [row(line) for line in of_kind[what] if line["model"] == model])
    for line in whole:
        if line["what"] == "profile":
            yield f"\nprofile, {line['model']} {line['recipe']}, {line['tokens']} tokens, batch {line['batch']}"
            yield from (f"  {name[:60]}: {found} µs" for name, found in line["kernels"].items())
    if of_kind["encode"]:
        named = ("model", "recipe", "half", "microseconds", "gb_per_s")
        rows = [tuple(line[name] for name in named) for line in of_kind["encode"]]
        yield "\nencode"
        yield from table(("model", "recipe", "half", "µs", "GB/s of bfloat16"), rows)


def speed_figure(lines: list[Line], caption: str) -> Any:
    """Draw the speed of a decode step over 16-bit attention: a panel for each number of rows, a line a recipe.

    lines   `attend` lines of one model
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    recipes, batches = (list(dict.fromkeys(line[name] for line in lines)) for name in ("recipe", "batch"))
    figure = Figure(figsize=(13.5, 5.4), layout="constrained")
    panels = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
    for axis, batch in zip(panels, sorted(batches), strict=True):
        for recipe in recipes:
            found = sorted((x["tokens"], x["speed_up"]) for x in lines if (x["recipe"], x["batch"]) == (recipe, batch))
            axis.plot(*zip(*found, strict=True), label=recipe, marker="o")
        axis.axhline(1, color="0.3", linewidth=1)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(FixedLocator(sorted({line["tokens"] for line in lines})))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
        axis.set_yscale("log")
        axis.set_xlabel("tokens of a row", fontsize=9)
        axis.set_title(f"{batch} row{'s' if batch > 1 else ''}", loc="left", fontsize=10)
        axis.grid(color="0.92")
    panels[0].set_ylabel("times as fast as the fastest 16-bit attention", fontsize=9)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8.5)
    figure.supxlabel(textwrap.fill(caption, 190), x=0.01, ha="left", fontsize=8.5)
    return figure


def draw(lines: Iterable[Line], target: Path, model: str) -> None:
    """Write `speed_figure` of a model as a PNG."""
    lines = latest(lines)
    device = next((f" on one {line['name']}" for line in lines if line["what"] == "device"), "")
    found = [one for one in lines if (one["what"], one.get("model")) == ("attend", model) and "error" not in one]
    said = (
        f"Attention of one decode step of one layer, heads of {model}{device}: above 1 it is faster than every 16-bit "
        "attention of PyTorch, and a Triton kernel, at the same shape."
    )
    speed_figure(found, said).savefig(target, dpi=130)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw speed-ups there, and print nothing")
    parser.add_argument("--model", default="llama-3.1-8b", help="of the picture (default: %(default)s)")
    given = parser.parse_args(arguments)
    if given.plot:
        draw(read(*given.files), given.plot, given.model)
    else:
        print("\n".join(page(read(*given.files))))


if __name__ == "__main__":
    main()
