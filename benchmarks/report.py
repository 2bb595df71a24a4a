"""Say what a file of results says, as a page that can be read: what failed first, then tables.

python -m benchmarks.report benchmarks/results/gpu-<device>.jsonl [...]
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.lines import Line, name_of, read

ATTEND = (
    "recipe",
    "batch",
    "tokens",
    "µs (quartiles)",
    "GB/s",
    "of bandwidth",
    "fastest bfloat16",
    "speed-up",
    "pages",
)
COUNTERS = (
    *("Duration", "DRAM Throughput", "Memory Throughput", "L2 Hit Rate", "Issue Slots Busy", "Registers Per Thread"),
    *("Achieved Occupancy", "Eligible Warps Per Scheduler", "Warp Cycles Per Issued Instruction"),
)
GENERATE = ("cache", "graph", "batch", "ms a step (quartiles, worst)", "tokens/s", "prompt s", "cache GB", "peak GB")


def latest(lines: Iterable[Line]) -> list[Line]:
    """The last line of each thing that was measured of the latest code, in the order of the first."""
    lines = list(lines)
    of = lines[-1].get("of") if lines else None
    return list({name_of(line): line for line in lines if line.get("of") == of}.values())


def failures(lines: list[Line]) -> Iterator[str]:
    """What went wrong, and what is missing."""
    for line in lines:
        where = " ".join(
            str(line[name]) for name in ("model", "recipe", "cache", "half", "tokens", "batch") if name in line
        )
        if line["what"] == "parity" and not line["good"]:
            what = (
                f"FAILED: {len(line['failed'])} tests"
                if line["failed"] or line["ended"]
                else "NOT FINISHED in its time"
            )
            yield f"PARITY {what}, {line['passed']} passed; not all that is timed below is known to be right"
            yield from (f"  {name}" for name in line["failed"])
            yield from (f"  | {text}" for text in line["said"])
        elif line["what"] == "compile":
            if line["not_done"]:
                yield f"not compiled in time, so not measured: {len(line['not_done'])} of {line['jobs']}; run it again"
        elif line["what"] == "stopped":
            yield f"stopped: {line['why']}; {line['left']} left: run it again"
        elif "error" in line:
            yield f"FAILED: {line['what']} {where}: {line['error']}"
        elif line.get("out_of_memory"):
            yield f"out of memory: {line['what']} {where}"
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


def told(found: float | dict[str, str]) -> str:
    """Microseconds of a kernel, or what its counters say first."""
    if not isinstance(found, dict):
        return f"{found} µs"
    return ", ".join(f"{name} {found[name]}" for name in COUNTERS if name in found)


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
    for what, names, row in (("attend", ATTEND, attended), ("generate", GENERATE, generated)):
        of_kind = [line for line in whole if line["what"] == what]
        for model in dict.fromkeys(line["model"] for line in of_kind):
            yield f"\n{what}, {model}"
            yield from table(names, [row(line) for line in of_kind if line["model"] == model])
    for line in whole:
        if line["what"] in ("profile", "counters"):
            yield f"\n{line['what']}, {line['model']} {line['recipe']}, {line['tokens']} tokens, batch {line['batch']}"
            yield from (f"  {name[:60]}: {told(found)}" for name, found in line["kernels"].items())
    encoded = [line for line in whole if line["what"] == "encode"]
    if encoded:
        yield "\nencode"
        rows = [
            (line["model"], line["recipe"], line["half"], line["microseconds"], line["gb_per_s"]) for line in encoded
        ]
        yield from table(("model", "recipe", "half", "µs", "GB/s of bfloat16"), rows)


if __name__ == "__main__":
    print("\n".join(page(read(*map(Path, sys.argv[1:])))))
