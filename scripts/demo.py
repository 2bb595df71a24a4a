"""`make demo`: the whole pipeline on the embedded model, or another: calibrate, measure, publish, load, generate."""

import argparse
import json
import os
import shlex
import shutil
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from kvq_calib.cli import outcome
from kvq_calib.cli.progress import Bar
from kvq_calib.evaluate.record import load_model
from kvq_calib.job import run
from kvq_calib.job.job import Job
from kvq_calib.job.prepare import prepare
from kvq_calib.model import find as models
from kvq_calib.model.files import ModelFiles
from kvq_calib.report import plots
from kvq_calib.text import corpus
from kvq_calib.text.tokenizer import whole
from kvq_runtime.hf import KVQCache
from kvq_runtime.hf.model import CACHE
from kvq_runtime.registry.evaluation_records import parse

LENGTH, WRITTEN = 1024, 48  # tokens of a sequence, and to generate


def main(argv: list[str] | None = None) -> int:
    """Run the demo; return its exit code."""
    top = argparse.ArgumentParser("scripts.demo", description=__doc__)
    top.add_argument("--full", action="store_true", help="more text")
    top.add_argument("--model", default="demo", help="another model: a folder, or a name that kvq-calibrate takes")
    top.add_argument("--json", metavar="FILE", default="build/demo.json", help="records; the picture lies beside it")
    args = top.parse_args(argv)
    os.environ.setdefault("KVQ_HOME", str(Path("build/kvq").absolute()))
    samples, windows = (96, 12) if args.full else (16, 3)
    baselines = ("higgs-2bit",) if args.model == "demo" else ("kivi-4bit", "higgs-4bit", "kivi-2bit", "higgs-2bit")
    files, path = models.resolve(args.model), Path(args.json)
    folder = path.with_suffix(".run")
    job = Job(
        args.model, corpus="demo", samples=samples, seq_len=LENGTH, threads=torch.get_num_threads(), run=str(folder),
        eval_windows=windows, baselines=baselines,
    )  # fmt: skip
    print(f"1. Calibrate aqua-2bit on {samples - samples // 8} sequences of {LENGTH} tokens of Python's documentation, "
          f"measure on {windows} held-out windows, and publish.")  # fmt: skip
    shutil.rmtree(folder, ignore_errors=True)  # last time's finished run: the demo shows the work
    work = prepare(job, files=files)
    with closing(Bar(work.plan)) as bar:
        done, spent = run.complete(job, replace(work, listener=bar))
    found = json.loads((folder / "evaluation.json").read_text())
    records = [parse(one) for one in found]
    outcome.show(done, records)
    outcome.show_cost(sum(spent.values()), spent)
    print("\n2. Load the published artifact, and go on writing a held-out text, with it and in 16 bit.")
    _generate(files, done[0].reference)
    path.write_text(json.dumps({"published": [made.record() for made in done], "records": found}, indent=1) + "\n")
    path.with_suffix(".png").write_bytes(plots.png(plots.cost_by_bits(records)))
    print(f"\nRecords are in {path}, their picture in {path.with_suffix('.png')}. As a page: "
          f"KVQ_HOME={shlex.quote(os.environ['KVQ_HOME'])} kvq report {done[0].name} --open")  # fmt: skip
    print(f"More text, in several times the time: make {'demo' if args.model == 'demo' else 'demo-real'} "
          "DEMO_ARGS=--full")  # fmt: skip
    return 0


def _generate(files: ModelFiles, reference: str) -> None:
    """Print what the model writes with a 16-bit cache and with the artifact's, and the bytes of the latter."""
    model, tokenizer = load_model(files, dtype=files.dtype), whole(files.path)
    prompt_T = corpus.select("demo", files.path, 1, LENGTH, split="held-out").tokens_BT[0, : 3 * LENGTH // 4]
    settings = {"do_sample": True, "top_k": 20, "max_new_tokens": WRITTEN, "pad_token_id": 0}

    def written(cache=None) -> str:
        torch.manual_seed(0)  # small models repeat themselves if the likeliest token is taken
        out = model.generate(prompt_T[None].long(), **{CACHE: cache}, **settings)  # type: ignore[operator]
        return " ".join(tokenizer.decode(out[0, len(prompt_T) :]).split())

    print(f"   given      ... {' '.join(tokenizer.decode(prompt_T).split())[-150:]}")
    print(f"   16 bit     {written()}")
    model.set_attn_implementation("kvq")
    cache = KVQCache.from_pretrained(reference, model=model)
    print(f"   this cache {written(cache)}\n")
    print("\n".join("   " + line for line in str(cache.memory_report()).splitlines()))


if __name__ == "__main__":
    sys.exit(main())
