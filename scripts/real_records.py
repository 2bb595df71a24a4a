"""Read and append the lines that scripts.measure_real finds, and put them together as `kvq compare` writes records."""

import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvq_calib.evaluate.perplexity import REFERENCE
from kvq_calib.report.tables import by_bits
from kvq_calib.text.corpus import Batch
from kvq_runtime.disk import files as disk
from kvq_runtime.registry.measured import FULL, PROTOCOLS, TextRecord
from kvq_runtime.registry.sound import read as read_record

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "real"
Line = Mapping[str, Any]


def digest(found: Any) -> str:
    """A digest of JSON."""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:24]


def machine() -> dict[str, Any]:
    """Return the machine of the figures: the processor, the number of them, and the memory."""
    said = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    named = re.search(r"^model name\s*:\s*(.+)$", said, re.M)
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    name = named[1] if named else platform.processor() or platform.machine()
    return {"processor": name, "processors": os.cpu_count(), "memory_gb": round(pages / 1e9, 1)}


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """The lines by key, of each the newest; one that was cut off by a kill is none."""
    path, found = folder / "scores.jsonl", {}
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
    known = json.loads(path.read_text()) if path.is_file() else {}
    if batch.digest not in known:
        disk.make_folder(folder)
        known[batch.digest] = batch.description | {"windows": len(batch.tokens_BT)}
        disk.save(path, (json.dumps(known, indent=1, sort_keys=True) + "\n").encode())


def records(folder: Path, on: str, length: int) -> list[TextRecord]:
    """Return a record, as of `kvq compare`, of each recipe: the text `on` in domain, others beside.

    Recipes without figures in domain are left out; of lines on the same measurement, the newest counts.
    """
    path = folder / "texts.json"
    described = json.loads(path.read_text()) if path.is_file() else {}
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
    text = dict(described[line["tokens"]])
    return {"windows": text.pop("windows"), "length": line["length"], "text": text}
