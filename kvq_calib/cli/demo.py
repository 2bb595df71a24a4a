"""`make demo`: the whole line on the embedded model. Calibrate, measure, publish, load, generate.

Without --full it does as much as a newcomer waits for, and lists what it left out. `make demo-real` does the same on a
model that others have trained.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kvq_runtime.registry.evaluation_records import FULL, IN_USE, SPOKEN, TextRecord, Unmeasured, parse


@dataclass(frozen=True)
class Size:
    """The size of a demo: `samples` sequences of `length` tokens to fit on, `windows` to measure on.

    recipes    that are fitted and published; the first generates
    beside     recipes without a fit, measured on the same windows
    also       texts of other kinds, as a Job takes them
    protocols  under which is measured
    write      tokens to generate
    left_out   of what --full does, in words
    """

    samples: int
    windows: int
    length: int = 1024
    recipes: tuple[str, ...] = ("aqua-2bit",)
    beside: tuple[str, ...] = ("higgs-2bit",)
    also: tuple[str, ...] | None = ("none",)
    protocols: tuple[str, ...] = (FULL, IN_USE)
    write: int = 48
    left_out: str = ""


FULL_SIZE = Size(96, 12, recipes=("aqua-2bit", "mean-higgs-2bit"), also=None, write=128)
SHORT = Size(
    16, 3, left_out="96 sequences to fit on and 12 windows to measure on, mean-higgs-2bit, a text of another kind"
)
REAL_FULL = Size(32, 8, 1024, ("aqua-2bit", "aqua-fisher-2bit"), ("kivi-4bit", "higgs-4bit", "kivi-2bit", "higgs-2bit"))
REAL = replace(
    REAL_FULL,
    samples=12,
    windows=3,
    recipes=("aqua-2bit",),
    beside=("kivi-4bit", "kivi-2bit", "higgs-2bit"),
    protocols=(FULL,),
    left_out="32 sequences to fit on and 8 windows to measure on, aqua-fisher-2bit, higgs-4bit, measuring in use",
)


def main(argv: list[str] | None = None) -> int:
    """Run the demo; returns its exit code."""
    top = argparse.ArgumentParser("kvq_calib.cli.demo", description=__doc__)
    top.add_argument("--full", action="store_true", help="all of it: more text, more recipes")
    top.add_argument("--model", default="demo", help="another model: a folder, or a name that kvq-calibrate takes")
    top.add_argument("--json", metavar="FILE", default="build/demo.json", help="the table; the picture lies beside it")
    args = top.parse_args(argv)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers' bars too; read at import
    os.environ.setdefault("KVQ_HOME", str(Path("build/kvq").absolute()))
    own = args.model == "demo"
    size = (FULL_SIZE if own else REAL_FULL) if args.full else (SHORT if own else REAL)
    begun, path = time.perf_counter(), Path(args.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    result, picture = demonstrate(args.model, size)
    result["seconds"] = round(time.perf_counter() - begun, 1)
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".png").write_bytes(picture)
    print(f"\n{result['seconds']:.0f} s in all. The table is in {path}, its picture in {path.with_suffix('.png')}.")
    print(f"{result['note']}.")
    if size.left_out:
        target = f"make {'demo' if own else 'demo-real'} DEMO_ARGS=--full"
        print(f"Left out: {size.left_out}. With all that, in several times the time: {target}")
    home = os.environ["KVQ_HOME"]
    print(
        f"All that is known of it, as a page: KVQ_HOME={shlex.quote(home)} kvq report {result['published'][0]} --open"
    )
    return 0


def demonstrate(model: str, size: Size) -> tuple[dict[str, Any], bytes]:
    """The whole line on one model; returns what goes into the JSON file, and the picture."""
    from kvq_calib.job.job import Evaluation, Job, Machine, Text, What
    from kvq_calib.model import find as models
    from kvq_calib.report import plots, tables
    from kvq_calib.text import corpus
    from kvq_runtime.cli.table import print_table

    files = models.resolve(model)
    text, machine = Text("demo", size.samples, size.length), Machine(threads=torch.get_num_threads())
    evaluation = Evaluation(eval_windows=size.windows, baselines=size.beside, also=size.also)
    asked = Job(What(model, size.recipes), text, machine, evaluation)
    held = size.samples // 8
    print(f"1. Calibrate {' and '.join(size.recipes)} on {size.samples - held} sequences of {size.length} tokens of "
          f"Python's own\n   documentation, measure on {size.windows} held-out windows, and publish.")  # fmt: skip
    measured, published, cost = _calibrate(asked, files, size)
    print(f"   {cost}")
    batch = corpus.select("demo", files.path, 1, size.length, split="held-out")
    print("\n2. Load the published artifact, and go on writing a held-out text, with it and in 16 bit.")
    _generate(files, published[0], batch.tokens_BT[0, : 3 * size.length // 4], size.write)
    print("\n3. What was measured before publishing: every token but the sinks encoded (full encode)"
          + (", and in use." if IN_USE in size.protocols else "."))  # fmt: skip
    records = [parse(one, TextRecord) for one in measured]
    rows = _rows(records)
    print_table([{name: _shown(name, value) for name, value in row.items()} for row in rows], json=False)
    print("\n".join("   " + line for line in tables.about_texts(records)))
    parameters = measured[0]["protocol"]["model"]["parameters"]
    note = f"{files.id} has {parameters / 1e6:.4g} million parameters"
    note += "; figures of so small a model say little about a large one" if parameters < 1e9 else ""
    result = {"model": files.id, "note": note, "published": [one.rpartition("@")[0] for one in published], "rows": rows}
    return result, plots.perplexity_by_bits(tables.named(records))


def _calibrate(asked, files, size: Size) -> tuple[list[dict], list[str], str]:
    """The evaluation's records, the references that were published, and what the calibration cost."""
    from kvq_calib.cli.progress import Bar
    from kvq_calib.evaluate import held_out
    from kvq_calib.evaluate.subject import find
    from kvq_calib.job import run
    from kvq_calib.job.prepare import prepare
    from kvq_calib.run import calibrate

    with tempfile.TemporaryDirectory() as folder:  # not a finished run of last time: the demo shows the work
        work = prepare(asked.with_settings(run=folder), files=files)
        bar = Bar(work.plan)
        work = replace(work, listener=bar)
        run.begin(asked, work)
        fitted = calibrate.fit(work)
        beside = [find(given, files) for given in asked.evaluation.baselines]
        begun = time.perf_counter()
        errors = held_out.PROTOCOL.error_windows if IN_USE in size.protocols else 0
        protocol = replace(held_out.PROTOCOL, protocols=size.protocols, error_windows=errors)
        records = held_out.evaluate(work, fitted, beside, size.windows, protocol, asked.beside(files))
        evaluation = time.perf_counter() - begun
        done, spent = list(run.publish(asked, work, fitted, records)), calibrate.seconds(work)
    bar.close()
    for made in done:
        print(f"   {made.reference}  sha256 {made.sha256[:12]}")
    forward, total = spent["forward"], sum(spent.values())
    cost = f"{total:.1f} s for the fit, {total / forward:.1f} times the model's own forward pass ({forward:.1f} s); "
    return records, [made.reference for made in done], cost + f"{evaluation:.1f} s for the evaluation"


def _generate(files, reference: str, prompt_T, write: int) -> None:
    from kvq_calib.evaluate.record import load_model
    from kvq_calib.text.tokenizer import whole
    from kvq_runtime.hf import KVQCache
    from kvq_runtime.hf.model import CACHE

    model, tokenizer = load_model(files, dtype=files.dtype), whole(files.path)
    settings = {"do_sample": True, "top_k": 20, "max_new_tokens": write, "pad_token_id": 0}

    def written(cache=None) -> str:
        torch.manual_seed(0)  # small models repeat themselves where the likeliest token is taken
        out = model.generate(prompt_T[None].long(), **{CACHE: cache}, **settings)  # type: ignore[operator]
        return " ".join(tokenizer.decode(out[0, len(prompt_T) :]).split())

    print(f"   given      ... {' '.join(tokenizer.decode(prompt_T).split())[-150:]}")
    print(f"   16 bit     {written()}")
    model.set_attn_implementation("kvq")
    cache = KVQCache.from_pretrained(reference, model=model)
    print(f"   this cache {written(cache)}\n")
    print("\n".join("   " + line for line in str(cache.memory_report()).splitlines()))


def _rows(records: Sequence[TextRecord]) -> list[dict]:
    """The table: 16 bit, then the records by what they cost, dearest first."""
    from kvq_calib.report import tables

    records = sorted(records, key=lambda one: -(((found := one.figures(FULL)) and found.kl) or 0.0))
    rows: list[dict[str, Any]] = [{
        "recipe": "16 bit",
        "bits": 16.0,
        "bits at 4096": 16.0,
        "bytes": 1.0,
        "perplexity": tables.reference(records, FULL),
    }]  # fmt: skip
    for record in records:
        bits = record.result.bits
        row: dict[str, Any] = {
            "recipe": record.result.recipe,
            "bits": bits["asymptotic"],
            "bits at 4096": bits["at_4096"],
            "bytes": bits["bytes_at_4096"] / bits["exact_bytes_at_4096"],
        }
        for name, part in record.result.protocols.items():
            spoken = SPOKEN[name]
            if isinstance(part, Unmeasured):
                row[spoken] = part.reason
                continue
            row |= {"perplexity": part.perplexity} if name == FULL else {}
            row |= {spoken: tables.relative(part), f"{spoken}, KL": part.kl}
            row |= {"in use, decoded": part.decoded and part.decoded.attention} if name == IN_USE else {}
        for text, other in record.elsewhere().items():
            part = other.figures(FULL)
            row |= {text: tables.relative(part), f"{text}, KL": part.kl} if part else {}
        rows.append(row)
    return rows


def _shown(name: str, value) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if name == "bytes" or name.endswith("decoded"):
        return f"{value:.1%}" if name == "bytes" else f"{value:.0%} of attention"
    if name.endswith("KL"):
        return f"{value:.5f}"
    return f"{value:.2f}" if name in ("bits", "bits at 4096") else f"{value:.3f}"


if __name__ == "__main__":
    sys.exit(main())
