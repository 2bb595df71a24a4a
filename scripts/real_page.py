"""Keep what scripts.measure_real finds as lines, and write them: as records of `kvq compare`, sections and pictures of
records/compare.md, and a table for README.md."""

import json
import math
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from kvq_calib.evaluate.ledger import code, digest_of
from kvq_calib.evaluate.perplexity import REFERENCE
from kvq_calib.report import looks, plots
from kvq_calib.report.answered import heat
from kvq_calib.report.looks import short
from kvq_calib.report.tables import by_bits, relative, where
from kvq_calib.run.plan import environment
from kvq_calib.text.corpus import Batch
from kvq_runtime.cli.table import cell
from kvq_runtime.disk import files as disk
from kvq_runtime.errors import counted
from kvq_runtime.registry.measured import FULL, IN_USE, PROTOCOLS, SPOKEN, Figures, Model, TasksRecord, TextRecord
from kvq_runtime.registry.sound import of_json
from kvq_runtime.registry.sound import read as read_record

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "real"
Line = Mapping[str, Any]
NAME, ON, LENGTH = "smollm2-135m", "wikitext", 1024  # of the first table and picture of the page
MIX, MIXED = "mix", "mix.jsonl"  # what recipes of README's table are fitted on, and its lines
POSITIONS, NEEDLES = "real-positions.png", "real-needles.png"
DRAWN = (  # by position; those of them that were measured
    "rtn-4bit", "kivi-2bit", "kivi-4bit", "higgs-2bit", "higgs-4bit", "aqua-2bit", "aqua-klt-1bit", "aqua-metric-1bit",
    "aqua-metric-2bit", "aqua-fisher-1bit", "aqua-fisher-2bit",
)  # fmt: skip
BRIEF = (  # of README's table
    "aqua-fisher-1bit", "aqua-fisher-2bit", "higgs-2bit", "aqua-2bit", "aqua-fisher-3bit", "kivi-2bit",
    "aqua-fisher-4bit", "higgs-4bit", "kivi-4bit",
)  # fmt: skip
OPEN, CLOSE = "<!-- real table -->", "<!-- end of real table -->"


def digest(found: Any) -> str:
    """A digest of JSON."""
    return digest_of(found)[:24]


def machine() -> dict[str, Any]:
    """Return the machine of the figures: the processor, the number of them, and the memory."""
    said = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    named = re.search(r"^model name\s*:\s*(.+)$", said, re.M)
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    name = named[1] if named else platform.processor() or platform.machine()
    return {"processor": name, "processors": os.cpu_count(), "memory_gb": round(pages / 1e9, 1)}


def timed(work: Callable[[], Any], device: str = "cpu") -> tuple[Any, dict[str, Any]]:
    """The findings of work; and its time, machine and code."""
    begun, spent = time.perf_counter(), time.process_time()
    found = work()
    return found, {
        "seconds": round(time.perf_counter() - begun, 1), "processor_seconds": round(time.process_time() - spent, 1),
        "environment": environment(device, "float32", torch.get_num_threads()), "machine": machine(),
        "code": code()[:16],
    }  # fmt: skip


def read(folder: Path, name: str = "scores.jsonl") -> dict[str, dict[str, Any]]:
    """The lines by key, of each the newest; one that was cut off by a kill is none."""
    path, found = folder / name, {}
    for line in path.read_text().split("\n")[:-1] if path.is_file() else ():
        one = json.loads(line)
        found.pop(one["key"], None)  # so that newer ones are last
        found[one["key"]] = one
    return found


def append(folder: Path, line: Line) -> None:
    """Add a line, whole and durable."""
    path = folder / "scores.jsonl"
    disk.make_folder(folder)
    with path.open("a+b") as file:
        if file.tell():
            whole = path.read_bytes()
            file.truncate(whole.rfind(b"\n") + 1)  # what a kill left of a line
        file.write(json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def keep_text(folder: Path, batch: Batch) -> None:
    """Describe windows in texts.json, once."""
    path = folder / "texts.json"
    known, (windows, length) = _read(path), batch.tokens_BT.shape
    if (key := _text(batch.digest, length)) not in known:
        disk.make_folder(folder)
        known[key] = batch.description | {"windows": windows}
        disk.save(path, (json.dumps(known, indent=1, sort_keys=True) + "\n").encode())


def _text(tokens: str, length: int) -> str:
    """The key of windows in texts.json: their digest is that of the same tokens in windows of another length, too."""
    return f"{tokens}-{length}"


def records(folder: Path, on: str, length: int) -> list[TextRecord]:
    """Return a record, as of `kvq compare`, of each recipe: the text `on` in domain, others beside.

    Recipes without figures in domain are left out; of lines on the same measurement, the newest counts.
    """
    described = _read(folder / "texts.json")
    found: dict[str, dict[str, dict[str, Line]]] = {}
    for line in read(folder).values():
        if line["length"] == length and line["on"] in (on, None) and line["recipe"] != REFERENCE:
            found.setdefault(line["recipe"], {}).setdefault(line["text"], {})[line["protocol"]] = line
    texts = list(dict.fromkeys(text for own in found.values() for text in own if text != on))
    made = [read_record(_record(own, on, texts, described), TextRecord) for own in found.values() if on in own]
    return by_bits(made)


def _record(own: Mapping[str, Mapping[str, Line]], on: str, texts: Sequence[str], described: Line) -> dict[str, Any]:
    line = next(iter(own[on].values()))
    about = {
        "name": "perplexity", "version": 2, "protocols": [name for name in PROTOCOLS if name in own[on]],
        "model": line["model"], "step": max((one["step"] or 0) for one in own[on].values()) or None,
        "recent": line["recent"], "sinks": line["sinks"], "error_windows": 0, **_windows(own[on], described),
    }  # fmt: skip
    elsewhere = {text: own[text] for text in texts if text in own}
    if elsewhere:
        about["texts"] = {text: _windows(lines, described) for text, lines in elsewhere.items()}
    parts = {text: {name: one["part"] for name, one in lines.items()} for text, lines in own.items()}
    result = {
        "recipe": line["recipe"], "protocols": parts[on], "window": line["window"], "bits": line["bits"], "layers": [],
        "texts": {text: {"protocols": parts[text]} for text in elsewhere},
    }  # fmt: skip
    if not elsewhere:
        del result["texts"]
    return {
        "artifact": line["artifact"] or line["recipe"], "corpus": about["text"]["corpus_digest"], "protocol": about,
        "environment": line["environment"] | line["machine"], "result": result,
    }  # fmt: skip


def _windows(lines: Mapping[str, Line], described: Line) -> dict[str, Any]:
    """Return windows and text, in a record's form, of the full encode if it was measured."""
    line = lines.get(FULL) or next(iter(lines.values()))
    text = dict(described[_text(line["tokens"], line["length"])])
    return {"windows": text.pop("windows"), "length": line["length"], "text": text}


def sections(folder: Path, docs: Path) -> list[str]:
    """Write what follows the first table: lengths, both ways of fitting, positions, needles, talk; draw in docs."""
    lines = list(read(folder).values())
    return [
        part
        for made in (_lengths(lines), _crossed(lines), _positions(lines, docs), _needles(folder, docs), talk(folder),
                     greedy(folder), _machine(lines))
        for part in made
    ]  # fmt: skip


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a Markdown table, a column for each name that any of them has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [names, ["---"] * len(names), *([cell(row.get(name)) for name in names] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def brief(folder: Path) -> str:
    """README's table: some recipes by full encode, on each kind of text that they were fitted on."""
    lines = [one for one in _ordered(list(read(folder, MIXED).values())) if one["recipe"] in BRIEF]
    if not lines:
        raise ValueError(f"{folder / MIXED} has no lines of {', '.join(BRIEF)}: README's table is made of them")
    some = [one for one in lines if (one["protocol"], one["length"]) == (FULL, LENGTH) and one["on"] in (MIX, None)]
    texts = dict.fromkeys(one["text"] for one in sorted(some, key=lambda one: one["text"] != ON))
    return _by_recipe(some, texts, lambda one: one["text"])


def _by_recipe(lines: Sequence[Line], heads: Iterable[str], head: Callable[[Line], str], bits: bool = True) -> str:
    """A table of losses: a row a recipe, with its bits, and each line's loss in the column of its head."""
    rows: dict[str, dict[str, str]] = {}
    for one in lines:
        named = {"recipe": f"`{one['recipe']}`"} | ({"bits": _bits(one)} if bits else {})
        row = rows.setdefault(one["recipe"], named | dict.fromkeys(heads, ""))
        row[head(one)] = f"{relative(of_json(Figures, one['part'], 'part'))}, {short(one['part']['kl'])}"
    return table(list(rows.values()))


def _bits(found: Line) -> str:
    return f"{found['bits']['asymptotic']:.2f}"


def _ordered(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the lines with figures of recipes, by bits; the newest of the same measurement, whichever fit it is of."""
    told = ("recipe", "on", "text", "length", "protocol")
    newest = {tuple(one[name] for name in told): one for one in lines}.values()
    some = [one for one in newest if one["recipe"] != REFERENCE and "kl" in one["part"]]
    return sorted(some, key=lambda one: (one["bits"]["asymptotic"], one["recipe"]))


def _lengths(lines: Sequence[Line]) -> list[str]:
    """A row a recipe, a column a length and protocol, in domain."""
    some = [one for one in _ordered(lines) if one["text"] == ON and one["on"] in (ON, None)]

    def head(one: Line) -> str:
        return f"{SPOKEN[one['protocol']]}, {one['length']:,}"

    heads = dict.fromkeys(map(head, sorted(some, key=lambda one: (one["protocol"], one["length"]))))
    said = f"**By length.** {NAME}, {ON}, in domain: perplexity against 16 bit, KL divergence in nats."
    return [said, _by_recipe(some, heads, head)] if some else []


def _crossed(lines: Sequence[Line]) -> list[str]:
    """Write a table of fitted recipes: fitted on each text, measured on each, by full encode at the first length."""
    some = [one for one in _ordered(lines) if one["on"] and one["protocol"] == FULL and one["length"] == LENGTH]
    if len({one["on"] for one in some}) < 2:
        return []

    def head(one: Line) -> str:
        return f"fitted on {one['on']}: {one['text']}"

    said = f"**In domain and out of it, both ways.** {NAME}, full encode of windows of {LENGTH:,} tokens."
    return [said, _by_recipe(some, dict.fromkeys(map(head, some)), head, bits=False)]


def _positions(lines: Sequence[Mapping[str, Any]], docs: Path) -> list[str]:
    """The picture by position."""
    some = [one for one in lines if "bins" in one["part"] and one["on"] in (ON, None)]
    exact = [one for one in some if one["recipe"] == REFERENCE]
    if not exact:
        return []
    reference = max(reversed(exact), key=lambda one: one["length"])  # the newest of the longest windows
    windows = _text(reference["tokens"], reference["length"])
    known = {(one["recipe"], one["protocol"]): one for one in some if _text(one["tokens"], one["length"]) == windows}
    drawn = [known[name, protocol] for name in DRAWN for protocol in (FULL, IN_USE) if (name, protocol) in known]
    if not drawn:
        return []
    (docs / POSITIONS).write_bytes(by_position(reference["part"], drawn, reference["text"]))
    return [f"![Divergence by position, {NAME}, windows of {reference['length']} tokens]({POSITIONS})"]


@looks.picture
def by_position(exact: Mapping[str, Any], lines: Sequence[Line], text: str) -> Figure:
    """Divergence and perplexity above 16 bit against position in long windows, a column a protocol.

    exact   the part of the 16-bit model, {"bins": [...]}, as `positions.part` gives it
    lines   {"recipe", "protocol", "bits", "part", "model"} of one text and length
    text    what it is called
    """
    protocols = [name for name in PROTOCOLS if any(one["protocol"] == name for one in lines)]
    names = list(dict.fromkeys(one["recipe"] for one in lines))
    styles = dict(zip(names, looks.looks(names), strict=True))
    figure = Figure(figsize=(5.6 * len(protocols) + 2, 7.6), layout="constrained")
    grid = figure.subplots(2, len(protocols), squeeze=False, sharex=True)
    places, own = [(one["from"] + one["to"]) / 2 for one in exact["bins"]], _means(exact, "loss")
    for (upper, lower), protocol in zip(grid.T, protocols, strict=True):
        heights, above = [], []
        for one in (one for one in lines if one["protocol"] == protocol):
            kl, style = _means(one["part"], "kl"), styles[one["recipe"]].line
            upper.plot(places, kl, label=f"{one['recipe']} ({one['bits']['asymptotic']:.2f})", **style)
            heights += [height for height in kl if height > 0]
            losses = zip(_means(one["part"], "loss"), own, strict=True)
            worse = [100 * math.expm1(loss - reference) for loss, reference in losses]
            lower.plot(places, worse, **style)
            above += worse
        upper.set_title(SPOKEN[protocol], loc="left", fontsize=10)
        if heights:
            looks.log_scale(upper, min(heights) / 1.4, max(heights) * 1.4)
        lower.axhline(0, color="0.35", linewidth=1, linestyle="--", zorder=1)
        looks.symlog_scale(lower, 1.2 * min(0.0, *above) - 0.1, 1.3 * max(0.1, *above), 1.0)
        lower.set_xlabel("position in the text, tokens", fontsize=9)
        looks.tidy(upper)
        looks.tidy(lower)
    grid[0][0].set_ylabel("KL divergence from the 16-bit model, nats")
    grid[1][0].set_ylabel("perplexity above that of the 16-bit model, %")
    looks.key(figure, grid[0])
    last = exact["bins"][-1]
    looks.caption(
        figure,
        f"{where(Model(**lines[0]['model']))}. {counted(len(last['loss']), 'window')} of {last['to']} tokens of "
        f"{text}; each point is the mean of {last['to'] - last['from']} tokens of each. In brackets: bits per element. "
        f"Mean loss of the 16-bit model in the first part {own[0]:.3g} nats, in the last {own[-1]:.3g}. "
        + " ".join(plots.SENTENCES.values()),
    )
    return figure


def _means(part: Mapping[str, Any], name: str) -> list[float]:
    """The mean over windows at each position."""
    return [sum(one[name]) / len(one[name]) for one in part["bins"]]


def _needles(folder: Path, docs: Path) -> list[str]:
    """Tell what the 16-bit model finds, by which the tasks are chosen; draw what recipes find."""
    said = f"**Needles: what {NAME} finds in 16 bit**, asked plainly and in its chat form."
    found = [said, *first] if (first := answered(folder / "needles-16bit.json")) else []
    records = [one for row in _read(folder / "needles.json").values() for one in row["found"]]
    if records:
        (docs / NEEDLES).write_bytes(heat([read_record(one, TasksRecord) for one in joined(records)]))
        found += [f"![Needles found by depth and length, {NAME}]({NEEDLES})"]
    return found


def answered(path: Path) -> list[str]:
    """A table of the needles found in a file of records: a row a recipe, task and form; none, if there are none."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for one in (one for row in _read(path).values() for one in row["found"]):
        about, recipe = one["protocol"], one["result"]["recipe"]
        form, part = "chat" if about.get("chat") else "plain", one["result"]["protocols"][IN_USE]
        for task, own in part.get("tasks", {}).items():
            named = {} if recipe == REFERENCE else {"recipe": f"`{recipe}`"}
            row = rows.setdefault((recipe, task, form), named | {"task": f"`{task}`", "form": form})
            row[f"{about['lengths'][0]:,} tokens"] = f"{own['accuracy']:.0%}"
    return [table(list(rows.values()))] if rows else []


def joined(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Records of one length each put together, a record a recipe, the 16-bit model first; the newest of each counts.

    Of both forms that with more records; texts are the fewest that a length has.
    """
    chats = [one["protocol"].get("chat", False) for one in records]
    form = max((False, True), key=chats.count)
    cells: dict[str, dict[tuple, Any]] = {}
    lengths, tasks, samples, reasons = set(), {}, [], {}
    for one in records:
        about, part, name = one["protocol"], one["result"]["protocols"][IN_USE], one["result"]["recipe"]
        if about.get("chat", False) != form:
            continue
        lengths |= set(about["lengths"])
        tasks |= dict.fromkeys(about["tasks"])
        samples.append(about["samples"])
        if "reason" in part:
            reasons[name] = part["reason"]
        for one_cell in part.get("cells", []):
            place = one_cell["task"], one_cell["length"], one_cell["depth"]
            cells.setdefault(name, {})[place] = one_cell
    about = {**records[0]["protocol"], "lengths": sorted(lengths), "tasks": list(tasks), "samples": min(samples)}
    names = sorted({**cells, **reasons}, key=lambda name: name != REFERENCE)  # a set has an order of its own each run
    return [
        {**records[0], "protocol": about, "result": {"recipe": name, "protocols": {IN_USE: (
            {"cells": list(cells[name].values())} if name in cells else {"reason": reasons[name]}
        )}}}
        for name in names
    ]  # fmt: skip


def talk(folder: Path) -> list[str]:
    rows = []
    for one in (row["found"] for row in _read(folder / "conversation.json").values()):
        row = {"recipe": f"`{one['recipe']}`", "bits": _bits(one)}
        for number, some in enumerate(zip(*one["conversations"], strict=True), 1):
            firsts = ", ".join("never" if turn["first"] is None else str(turn["first"]) for turn in some)
            row[f"turn {number}"] = f"{short(sum(turn['kl'] for turn in some) / len(some))} ({firsts})"
        rows.append(row)
    said = (
        f"**A conversation of several turns**, {NAME}, the cache kept over them: KL divergence in nats over the "
        "answer, and in brackets, of each conversation, the first of its tokens that is chosen otherwise."
    )
    return [said, table(rows)] if rows else []


def greedy(folder: Path) -> list[str]:
    rows = []
    for one in (row["found"] for row in _read(folder / "greedy.json").values()):
        part = one["result"]["protocols"]["decode"]
        row = {"recipe": f"`{one['result']['recipe']}`", "bits": _bits(one["result"])}
        about = one["protocol"]
        if "reason" in part:
            rows.append(row | {"first other token": part["reason"]})
            continue
        firsts = ["never" if window["first"] is None else str(window["first"]) for window in part["windows"]]
        rows.append(
            row | {"first other token": ", ".join(firsts), "KL": short(part["kl"]), "top-1": f"{part['top1']:.1%}"}
        )
    if not rows:
        return []
    count, prompt = about["length"] - about["prompt"], about["prompt"]
    said = (
        f"**{count:,} greedy tokens after a prompt of {prompt:,}**, {NAME}, along the text of the 16-bit model: where "
        "each recipe would first choose otherwise, in each text."
    )
    return [said, table(rows)]


def _machine(lines: Sequence[Line]) -> list[str]:
    kinds = {json.dumps(one["machine"], sort_keys=True): one["machine"] for one in lines}
    said = [f"{one['processors']} processors {one['processor']}, {one['memory_gb']:g} GB" for one in kinds.values()]
    seconds = sum(one["processor_seconds"] for one in lines)
    return [f"Measured on {'; '.join(said)}: {seconds / 3600:.1f} processor hours for these scores."] if lines else []


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def readme(text: str, made: str) -> str:
    """README.md with its table replaced, where it has a place for one."""
    if OPEN not in text:
        return text
    return re.sub(f"{OPEN}.*?{CLOSE}", lambda _: f"{OPEN}\n{made}\n{CLOSE}", text, flags=re.DOTALL)
