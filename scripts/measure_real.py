"""Measure a real language model, SmolLM2-135M by default: a recipe, text, length and protocol at a time, for hours.

    python -m scripts.measure_real fit                      artifacts of the recipes, on each text that is fitted on
    python -m scripts.measure_real scores                   perplexity and divergence, also by position
    python -m scripts.measure_real left                     what of that is left, and about how long it takes
    python -m scripts.measure_real needles --first          what the 16-bit model finds, in both forms; then `needles`
    python -m scripts.measure_real conversation             several turns, the cache kept over them
    python -m scripts.measure_real greedy                   where 1,000 greedy tokens after 4,000 are first others
    python -m scripts.measure_real prefix                   the first token after a prompt that was kept
    python -m scripts.measure_real bench                    speed and memory beside transformers' caches
    python -m scripts.compare_models --records              page, tables and pictures, of all that: seconds

Each may be stopped at any time, and goes on where it was; `--recipes`, `--texts`, `--lengths`, `--protocols` and `--on`
choose a part. Records go to benchmarks/results/real/, scores as JSON lines: a newer line of the same counts. Artifacts,
hidden states of the 16-bit model and finished answers are kept under $KVQ_HOME, build/real by default. Texts are files
under KVQ_TEST_DATA and Python's documentation and code; what is not there is left out, with a sentence.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor
from transformers.cache_utils import DynamicCache

from kvq_calib.evaluate.caches import FullCache, WitnessCache, refusal
from kvq_calib.evaluate.ledger import Ledger, code
from kvq_calib.evaluate.perplexity import REFERENCE
from kvq_calib.evaluate.record import Protocol, load_model
from kvq_calib.evaluate.subject import Subject, costs
from kvq_calib.job.job import Evaluation, Job, Machine, Publication, Text, What
from kvq_calib.job.prepare import prepare
from kvq_calib.model import find
from kvq_calib.model import find as models
from kvq_calib.model.files import ModelFiles
from kvq_calib.run import calibrate
from kvq_calib.run.device import keep_memory
from kvq_calib.text import corpus
from kvq_calib.text.corpus import Batch
from kvq_calib.text.tokenizer import Encoder
from kvq_runtime.artifact import artifact, recipe_text
from kvq_runtime.disk import files as disk
from kvq_runtime.disk import strict_json
from kvq_runtime.hf import KVQCache
from kvq_runtime.registry.measured import FULL, IN_USE, PROTOCOLS
from scripts import positions, real_page
from scripts.real_page import RESULTS

ROOT = Path(__file__).parents[1]
MODEL = "smollm2-135m"
RECIPES = (  # every family at its usual bits
    "rtn-2bit", "rtn-4bit", "quarot-2bit", "kivi-2bit", "kivi-4bit", "gear-2bit", "higgs-2bit", "higgs-3bit",
    "higgs-4bit", "mean-higgs-2bit", "turboquant-2bit", "turboquant-3bit", "trellis-head-2bit", "polar-paper",
    "polar-online", "kvquant-2bit", "kvquant-3bit", "oscar-2bit", "wush-2bit", "squat-2bit", "squat-pre-2bit",
    "subkv-2bit", "h2o", "svdq-2bit-v4", "svdq-wf-1bit-v4", "zipcache-2bit", "aqua-1bit", "aqua-2bit", "aqua-3bit",
    "aqua-klt-1bit", "aqua-klt-2bit", "aqua-metric-0.5bit", "aqua-metric-1bit", "aqua-metric-2bit",
    "aqua-fisher-0.5bit", "aqua-fisher-1bit", "aqua-fisher-2bit", "aqua-fisher-3bit", "aqua-fisher-4bit",
)  # fmt: skip
SOME = ("rtn-4bit", "kivi-2bit", "kivi-4bit", "higgs-2bit", "higgs-4bit", "aqua-2bit", "aqua-klt-1bit",
        "aqua-fisher-1bit", "aqua-fisher-2bit")  # fmt: skip
# in which figures are measured; a name alone is embedded, a path is under KVQ_TEST_DATA
TEXTS = {
    "wikitext": "text/wikitext-2/valid.txt", "docs": "demo", "code": "demo-code",
    "book": "text/gutenberg/pg2600_war_and_peace.txt",
}  # fmt: skip
MIXED = ("wikitext", "docs", "code")  # as many sequences of each in a fit on "mix"
ON = ("wikitext", "docs", "mix")  # what is fitted on; the last only where it is asked for
WHOLE = ("book",)  # read in order, from anywhere: nobody fits on it
WINDOWS = {1024: 4, 4096: 2, 8192: 2}
SINKS, RECENT = 4, 0
SAMPLES, LENGTH = 24, 1024  # of a fit
TOGETHER = 4  # recipes in a run
BINS = 16  # parts of a window that figures are given for by position


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen command."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("what", choices=[
        "fit", "scores", "left", "needles", "conversation", "greedy", "prefix", "bench",
    ])  # fmt: skip
    top.add_argument("--model", default=MODEL, help="a name of the catalog or a folder (default: %(default)s)")
    top.add_argument("--name", default=MODEL, help="what records call it (default: %(default)s)")
    top.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where records go")
    top.add_argument("--recipes", nargs="+", metavar="NAME", help="default: of every family; of the slow ones, some")
    top.add_argument("--texts", nargs="+", choices=TEXTS, default=[*TEXTS], help="(default: all)")
    top.add_argument(
        "--lengths", nargs="+", type=int, metavar="L", default=[*WINDOWS], help="(default: 1024 4096 8192)"
    )
    top.add_argument("--windows", type=int, metavar="N", help="default: 4 of 1,024 tokens, 2 of more")
    top.add_argument("--protocols", nargs="+", choices=PROTOCOLS, default=[*PROTOCOLS], help="(default: both)")
    top.add_argument("--on", nargs="+", choices=ON, default=[*ON[:2]], help="fitted on (default: %(default)s)")
    top.add_argument("--samples", type=int, default=SAMPLES, help="sequences of a fit (default: %(default)s)")
    top.add_argument("--fit-length", type=int, default=LENGTH, help="tokens of one (default: %(default)s)")
    top.add_argument("--gradient-tokens", type=int, help="that gradients are of (default: as kvq-calibrate has it)")
    top.add_argument("--together", type=int, default=TOGETHER, help="recipes in a run of a fit (default: %(default)s)")
    top.add_argument("--again", action="store_true", help="fit, or measure, what there is already")
    top.add_argument("--first", action="store_true", help="of needles: the 16-bit model alone, in both forms")
    top.add_argument("--chat", action="store_true", help="of needles: in the chat form")
    top.add_argument("--tasks", nargs="+", metavar="TASK", help="of needles (default: what 16 bit answers)")
    top.add_argument("--threads", type=int, default=torch.get_num_threads(), help="(default: %(default)s)")
    top.add_argument("--device", default="cpu", help="of fits and passes (default: %(default)s)")
    args = top.parse_args(arguments)
    os.environ.setdefault("KVQ_HOME", str(ROOT / "build" / "real"))
    torch.set_num_threads(args.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    keep_memory()
    files = replace(models.resolve(args.model), id=args.name)
    if args.what not in ("fit", "scores", "left"):
        from scripts import real_use

        run = {"needles": real_use.needles, "conversation": real_use.talks, "greedy": real_use.greedy,
               "prefix": real_use.prefix}  # fmt: skip
        return run.get(args.what, real_use.bench)(args, files)
    home = Home(files, args)
    return {"fit": fit, "scores": scores, "left": left}[args.what](home, args)


@dataclass(frozen=True)
class Home:
    """The files that are kept of one model between calls, and what of it an artifact or a line depends on."""

    files: ModelFiles
    args: argparse.Namespace

    @property
    def folder(self) -> Path:
        return Path(os.environ["KVQ_HOME"]) / "real" / find.digest(self.files)[:16]

    def artifact(self, recipe: str, on: str) -> Path:
        """Return the path of a recipe's artifact, fitted on one of the texts."""
        given, gradients = f"{self.args.samples}x{self.args.fit_length}", self.args.gradient_tokens
        return self.folder / f"{on}-{given}{f'-g{gradients}' if gradients else ''}" / f"{recipe}.safetensors"

    def subject(self, recipe: str, on: str | None) -> Subject | None:
        """Find the subject of a name; None if it is still to be fitted, or was fitted with other settings."""
        if on is None:
            known = recipe_text.read(recipe)
            return Subject(recipe, known, {})
        path = self.artifact(recipe, on)
        if not path.is_file():
            return None
        asked = path.with_suffix(".json")  # the fit fills in what a recipe leaves open, as bits of channels
        if automatic(recipe) is None and not (asked.is_file() and asked.read_bytes() == _stated(recipe)):
            return None
        made, sha256 = artifact.load(path), disk.digest(path)[0]
        return Subject.of(made, sha256, recipe, published=False)

    def batch(self, text: str, length: int) -> Batch:
        """The windows of a text, chosen once: the same whichever text was fitted on."""
        windows = self.args.windows or WINDOWS.get(length, 2)
        choose = _whole if text in WHOLE else _held_out
        ledger, unit = Ledger(self.folder / "texts"), {"windows": [TEXTS[text], length, windows]}
        return Batch.of_json(ledger.kept(lambda: choose(text, self.files, length, windows).to_json(), **unit))

    def exact(self, model, batch: Batch) -> tuple[Tensor, positions.Trace]:
        """The 16-bit model's last hidden states and what its tokens cost, from a file once they were computed."""
        where, length = str(model.device.type), batch.tokens_BT.shape[1]
        path = self.folder / "exact" / f"{where}-{batch.digest}-{length}.safetensors"
        if not path.is_file():
            states = positions.states(model, batch.tokens_BT, DynamicCache(config=model.config))
            own = positions.trace(model, batch.tokens_BT, states, states)
            disk.make_folder(path.parent)
            disk.save(path, to_safetensors({"states": states, **vars(own)}))
        found = load_file(path)
        return found.pop("states"), positions.Trace(**found)


def automatic(recipe: str) -> float | None:
    """The budget of `auto-1.1bit`; None of a recipe with bits of its own."""
    named = recipe.startswith("auto-") and recipe.endswith("bit")
    return float(recipe.removeprefix("auto-").removesuffix("bit")) if named else None


def is_fitted(recipe: str) -> bool:
    """True if a part of a recipe depends on a text."""
    return automatic(recipe) is not None or recipe_text.read(recipe).fitted


def source(text: str) -> str | None:
    """A text as `--corpus` takes it; None where its file is not here."""
    if text == "mix":
        parts = [found for one in MIXED if (found := source(one))]
        return corpus.MIX.join(parts) if len(parts) == len(MIXED) else None
    given = TEXTS[text]
    if "/" not in given:
        return given
    path = Path(os.environ.get("KVQ_TEST_DATA", ".")) / given
    return str(path) if path.is_file() else None


def at_hand(texts: Sequence[str]) -> list[str]:
    """The texts that are here; the others are listed on stderr."""
    for text in texts:
        if source(text) is None:
            files = TEXTS.get(text, "one of its parts")
            print(f"{text} is left out: {files} is not under KVQ_TEST_DATA", file=sys.stderr)
    return [text for text in texts if source(text) is not None]


def positional() -> str:
    """The text whose longest windows are measured by position: the documentation, where there is no book."""
    return "book" if source("book") else "docs"


def _held_out(text: str, files: ModelFiles, length: int, windows: int) -> Batch:
    """Windows of a held-out part that repeat no fit part of any text that is fitted on; fewer, if it has fewer."""
    given, beside = source(text), [found for one in MIXED if (found := source(one))]
    assert given is not None, "what is not at hand is not asked for"
    return corpus.select_fewer(given, files.path, windows, length, 0, 2, beside)


def _whole(text: str, files: ModelFiles, length: int, windows: int) -> Batch:
    """Windows of one text in its own order, as far from each other and from its ends as it allows."""
    given = source(text)
    assert given is not None, "what is not at hand is not asked for"
    found = corpus.load(given)
    encoder = Encoder(files.path)
    (ids,) = encoder.plain([found.texts[0]])
    gap = (len(ids) - windows * length) // (windows + 1)
    if gap < 0:
        raise ValueError(f"{text} has {len(ids)} tokens; give fewer than {windows} windows of {length}")
    rows = [ids[start : start + length] for start in (gap + place * (length + gap) for place in range(windows))]
    tokens_BT = torch.tensor(rows, dtype=torch.int32)
    digest = corpus.digest_of(tokens_BT)
    about = {"source": found.name, "corpus_digest": found.digest, "split": "whole", "mode": "contiguous",
             "samples": windows, "seq_len": length, "tokenizer_sha256": encoder.digest,
             "token_digest": digest}  # fmt: skip
    return Batch(tokens_BT, digest, about)


def fit(home: Home, args: argparse.Namespace) -> int:
    """Fit what has no artifact yet, a few recipes in a run; those with a budget alone."""
    for on in at_hand(args.on):
        names = [name for name in args.recipes or RECIPES if is_fitted(name)]
        names = [name for name in names if args.again or home.subject(name, on) is None]
        plain = [name for name in names if automatic(name) is None]
        runs = [plain[start : start + args.together] for start in range(0, len(plain), args.together)]
        for run in [*runs, *([name] for name in names if automatic(name) is not None)]:
            begun, spent = time.perf_counter(), time.process_time()
            made = _fitted(home, run, on)
            for name in run:
                path = home.artifact(name, on)
                disk.make_folder(path.parent)
                if automatic(name) is None:
                    disk.save(path.with_suffix(".json"), _stated(name))
                called = name if automatic(name) is not None else recipe_text.read(name).name
                disk.save(path, artifact.to_bytes(made[called]))
            seconds = f"{time.perf_counter() - begun:.0f} s, {time.process_time() - spent:.0f} of processors"
            print(f"{', '.join(run)}, fitted on {on}: {seconds}", file=sys.stderr, flush=True)
    return 0


def _stated(recipe: str) -> bytes:
    """A recipe as it is asked for."""
    return strict_json.dumps(recipe_text.read(recipe).to_json()).encode()


def _fitted(home: Home, names: Sequence[str], on: str) -> dict[str, Any]:
    """Artifacts by name. A run of the same goes on where it was stopped; what it has is of this code alone."""
    args, budget = home.args, automatic(names[0])
    what = What(str(home.files.path), ("auto",) if budget else tuple(names), (budget,) if budget else ())
    text = Text(source(on), args.samples, args.fit_length, transfer="none", gradient_tokens=args.gradient_tokens)
    machine = Machine(args.device, "float32", args.threads)
    work = prepare(Job(what, text, machine, Evaluation(False), Publication(False)), files=home.files)
    folder = home.folder / "runs" / f"{work.plan.digest[:16]}-{code()[:8]}"
    return calibrate.calibrate(replace(work, folder=folder))


@dataclass(frozen=True)
class Unit:
    """One measurement: a recipe, fitted on a text or not at all, on the windows of a text under a protocol."""

    recipe: str
    on: str | None
    text: str
    length: int
    protocol: str

    @property
    def step(self) -> int | None:
        """Tokens of a pass: all, or of a long window a 64th, that it takes no more passes than a short one."""
        return None if self.protocol == FULL else max(32, self.length // 64)


def units(args: argparse.Namespace, files: ModelFiles) -> Iterator[Unit]:
    """All that is asked for, the short lengths first, and of each the full encode."""
    for length in sorted(args.lengths):
        for protocol in (one for one in PROTOCOLS if one in args.protocols):
            for text in at_hand(args.texts) if length <= files.context else ():
                if text in WHOLE and length < max(args.lengths):
                    continue  # it is there for positions
                yield from (Unit(REFERENCE, None, text, length, FULL) for _ in range(protocol == FULL))
                for recipe in args.recipes or RECIPES:
                    ons = at_hand(args.on) if is_fitted(recipe) else [None]
                    yield from (Unit(recipe, on, text, length, protocol) for on in ons)


def left(home: Home, args: argparse.Namespace) -> int:
    """Print what is left, and how long it takes: if nothing alike was measured, in proportion to tokens."""
    lines = real_page.read(args.results)
    rows = [(unit, key) for unit, key in _keys(home, args) if args.again or key not in lines]
    known: dict[Any, list[float]] = {}
    for one in lines.values():
        known.setdefault((one["protocol"], one["length"]), []).append(one["seconds"])
    for length in args.lengths:
        for protocol in args.protocols:
            some = [unit for unit, _ in rows if (unit.length, unit.protocol) == (length, protocol)]
            spent = known.get((protocol, length))
            about = f", about {sum(spent) / len(spent) * len(some) / 3600:.1f} hours" if spent else ""
            print(f"{length} tokens, {protocol}: {len(some)} left{about}")
    missing = [f"{name} on {on}" for on in at_hand(args.on) for name in args.recipes or RECIPES
               if is_fitted(name) and home.subject(name, on) is None]  # fmt: skip
    print(f"to be fitted: {', '.join(missing) or 'nothing'}")
    return 0


def _keys(home: Home, args: argparse.Namespace) -> Iterator[tuple[Unit, str]]:
    """Units that can be measured, and what of each a line is of."""
    digests: dict[tuple[str, str | None], str | None] = {(REFERENCE, None): ""}
    for unit in units(args, home.files):
        who = (unit.recipe, unit.on)
        if who not in digests:
            found = home.subject(*who)
            digests[who] = None if found is None else found.sha256 or real_page.digest(found.recipe.to_json())
            if digests[who] is None:
                print(f"{unit.recipe} on {unit.on} is left out: it is not fitted; `fit` does that", file=sys.stderr)
        if digests[who] is not None:
            tokens = home.batch(unit.text, unit.length).digest
            about = {**asdict(unit), "step": unit.step, "sinks": SINKS, "recent": RECENT, "tokens": tokens}
            device = [] if args.device == "cpu" else [args.device]
            yield unit, real_page.digest([about, digests[who], find.digest(home.files), *device])


def scores(home: Home, args: argparse.Namespace) -> int:
    """Measure what is left, a line each."""
    known = real_page.read(args.results)
    missing = [(unit, key) for unit, key in _keys(home, args) if args.again or key not in known]
    if not missing:
        print("all of it is measured", file=sys.stderr)
        return 0
    model = load_model(home.files, args.device, torch.float32)
    for number, (unit, key) in enumerate(missing, 1):
        batch = home.batch(unit.text, unit.length)
        found, took = real_page.timed(partial(measure, home, model, unit, batch), args.device)
        found |= took | {"date": datetime.now(UTC).date().isoformat()}
        real_page.keep_text(args.results, batch)
        real_page.append(args.results, {"key": key, **asdict(unit), "tokens": batch.digest, **found})
        said = found["part"].get("kl", found["part"].get("reason"))
        print(f"{number} of {len(missing)}: {unit.recipe} ({unit.on}), {unit.text}, {unit.length}, {unit.protocol}: "
              f"{said}, {found['seconds']} s", file=sys.stderr, flush=True)  # fmt: skip
    return 0


def measure(home: Home, model, unit: Unit, batch: Batch) -> dict[str, Any]:
    """Measure one unit; return a line's figures, or the reason why there are none."""
    files, tokens_BT = home.files, batch.tokens_BT
    bins = BINS if unit.text == positional() and unit.length == max(home.args.lengths) else 0
    about = {"model": files.about, "sinks": SINKS, "recent": RECENT, "step": unit.step}
    exact, reference = home.exact(model, batch)
    if unit.recipe == REFERENCE:
        own = reference.score
        return {"part": positions.part(own, own, reference.bins(bins) if bins else ()), **about}
    subject = home.subject(unit.recipe, unit.on)
    assert subject is not None, "what is not fitted has no key"
    recipe = Protocol(sinks=SINKS, recent=RECENT).recipe(subject.recipe, files.geometry, subject.tensors)
    about |= {
        "artifact": subject.sha256, "window": asdict(recipe.window),
        "bits": costs(recipe, files.geometry, files.sliding, unit.length),
    }  # fmt: skip
    reason = refusal(recipe) if unit.protocol == FULL else None
    if reason is not None:
        return {"part": {"reason": reason}, **about}
    if unit.protocol == FULL:
        cache: KVQCache = FullCache(recipe, model, subject.tensors, length=unit.length)
        cache.reads = None  # counting repeats attention
    else:
        assert unit.protocol == IN_USE
        cache = WitnessCache(recipe, model, subject.tensors)
    states = positions.states(model, tokens_BT, cache, unit.step)
    share = positions.encoded(cache) / unit.length
    if share <= 0:
        return {"part": {"reason": f"nothing was encoded of windows of {unit.length} tokens"}, **about}
    found = positions.trace(model, tokens_BT, exact, states)
    part = positions.part(found.score, reference.score, found.bins(bins) if bins else ())
    return {"part": part, "encoded": share, **about}


if __name__ == "__main__":
    sys.exit(main())
