"""`make demo`: the whole line on the embedded model. Calibrate, measure, publish, load, generate."""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvq_calib.report import tables
from kvq_runtime.registry import measured
from kvq_runtime.registry.measured import FULL

ABOUT = "4.1 million parameters; figures of so small a model say little about a large one"


def main(argv: list[str] | None = None) -> int:
    """Run the demo; returns its exit code."""
    top = argparse.ArgumentParser("kvq_calib.cli.demo", description=__doc__)
    top.add_argument("--short", action="store_true", help="less text, for a quick check")
    top.add_argument("--json", metavar="FILE", default="build/demo.json", help="where the table goes too")
    args = top.parse_args(argv)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers' bars too; read at import
    os.environ.setdefault("KVQ_HOME", str(Path("build/kvq").absolute()))
    begun = time.perf_counter()
    rows = demonstrate(*((24, 2, 512) if args.short else (96, 12, 1024)))
    result = {"model": "demo", "note": ABOUT, "seconds": round(time.perf_counter() - begun, 1), "rows": rows}
    path = Path(args.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{result['seconds']:.0f} s in all; the table is in {path}. ({ABOUT})")
    return 0


def demonstrate(samples: int, windows: int, length: int) -> list[dict]:
    """Calibrate with `samples` sequences, and measure on `windows` held-out windows of `length` tokens."""
    from kvq_calib.job import Job
    from kvq_calib.model import find as models
    from kvq_calib.text import corpus
    from kvq_runtime.cli.table import print_table

    asked = Job(
        "demo",
        recipes=("aqua-2bit", "mean-higgs-2bit"),
        baselines=("higgs-2bit",),
        samples=samples,
        seq_len=length,
        eval_windows=windows,
        threads=torch.get_num_threads(),
    )
    print(f"1. Calibrate AQUA-KV on {samples} sequences of the standard library's own documentation, measure the "
          f"result\n   on {windows} held-out ones of {length} tokens, and publish it.")  # fmt: skip
    records, cost = _calibrate(asked)
    print(f"   {cost}")
    files = models.resolve("demo")
    batch = corpus.select("demo", files.path, 1, length, split="held-out")
    print("\n2. Load the published artifact, and go on writing a held-out text with it (after >>>).")
    _generate(files, batch.tokens_BT[0, : 3 * length // 4])
    print("\n3. What was measured before publishing.")
    rows = _rows(records)
    print_table([{name: _shown(name, value) for name, value in row.items()} for row in rows], json=False)
    others = ", ".join(measured.texts(records))
    print(f"   {others}: a text of another kind than was fitted on, by full encode.")
    return rows


def _calibrate(asked) -> tuple[list[dict], str]:
    """The evaluation's records, and what the calibration cost."""
    from kvq_calib import job
    from kvq_calib.cli.progress import Bar

    with tempfile.TemporaryDirectory() as folder:  # not a finished run of last time: the demo shows the work
        work = replace(asked, run=folder).prepare()
        bar = Bar(work.plan)
        done, spent = job.complete(asked, replace(work, listener=bar))
        records = json.loads((Path(folder) / "evaluation.json").read_text())
    bar.close()
    for made in done:
        print(f"   {made.reference}  sha256 {made.sha256[:12]}")
    evaluation = spent.pop("evaluation")
    forward, total = spent["forward"], sum(spent.values())
    return records, (
        f"{total:.1f} s for two recipes, {total / forward:.1f} times the model's own forward pass ({forward:.1f} s); "
        f"{evaluation:.1f} s for the evaluation"
    )


def _generate(files, prompt_T) -> None:
    from transformers import AutoTokenizer

    from kvq_calib.evaluate.record import load_model
    from kvq_runtime.hf import KVQCache

    model, tokenizer = load_model(files, dtype=files.dtype), AutoTokenizer.from_pretrained(files.path)
    cache = KVQCache.from_pretrained("demo-aqua-2bit", model=model)
    torch.manual_seed(0)
    settings = {"do_sample": True, "top_k": 20, "max_new_tokens": 256, "pad_token_id": 0}
    out = model.generate(prompt_T[None].long(), past_key_values=cache, **settings)[0]  # type: ignore[operator]
    given, written = (" ".join(tokenizer.decode(part).split()) for part in (out[: len(prompt_T)], out[len(prompt_T) :]))
    print(f"   ... {given[-150:]} >>> {written[:300]} ...\n")
    print("\n".join("   " + line for line in str(cache.memory_report()).splitlines()))


def _rows(records: list[dict]) -> list[dict]:
    """The table: 16 bit, then the records by what they cost, dearest first."""
    records = sorted(records, key=lambda one: -(measured.figures(one, FULL) or {"kl": 0.0})["kl"])
    rows: list[dict[str, Any]] = [{
        "recipe": "16 bit",
        "bits": 16.0,
        "bits at 4096": 16.0,
        "bytes": 1.0,
        "perplexity": tables.reference(records, FULL),
    }]  # fmt: skip
    for record in records:
        found = record["result"]
        bits = found["bits"]
        row = {
            "recipe": found["recipe"],
            "bits": bits["asymptotic"],
            "bits at 4096": bits["at_4096"],
            "bytes": bits["bytes_at_4096"] / bits["exact_bytes_at_4096"],
        }
        for name, part in measured.parts(record).items():
            spoken = measured.SPOKEN[name]
            if "reason" in part:
                row[spoken] = part["reason"]
                continue
            row |= {"perplexity": part["perplexity"]} if name == FULL else {}
            row |= {spoken: part["relative"], f"{spoken}, KL": part["kl"]}
            row[f"{spoken}, decoded"] = part["decoded"]["attention"]
        for text, other in measured.elsewhere(record).items():
            part = measured.figures(other, FULL)
            row |= {text: part["relative"], f"{text}, KL": part["kl"]} if part else {}
        rows.append(row)
    return rows


def _shown(name: str, value) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if name == "bytes" or name.endswith("decoded"):
        return f"{value:.1%}" if name == "bytes" else f"{value:.0%} of attention"
    if name.endswith("KL"):
        return f"{value:.5f}"
    if name in ("bits", "bits at 4096"):
        return f"{value:.2f}"
    return f"{value:.3f}" if name == "perplexity" else f"{value:+.1%}"


if __name__ == "__main__":
    sys.exit(main())
