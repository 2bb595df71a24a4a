"""A calibration as a user asks for it, from the command line, a flow or a script: check, calibrate, evaluate, publish.

run(Job("demo"))            all of it
work = job.prepare()        step by step: the model found, the plan complete; once for all that follows
preflight(job, work)
complete(job, work)         = begin, `run/calibrate.py`, evaluate, publish
"""

import hashlib
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from kvq_calib.evaluate import full, gate, held_out
from kvq_calib.evaluate.gate import Bounds
from kvq_calib.evaluate.subject import Subject, find
from kvq_calib.model import find as models
from kvq_calib.model.files import ModelFiles
from kvq_calib.report import card as report
from kvq_calib.report import licenses, names, plots, tables
from kvq_calib.report.published import Place, Published, figures
from kvq_calib.run import budget, calibrate, checkpoint
from kvq_calib.run.device import cores
from kvq_calib.run.plan import Plan, make
from kvq_calib.run.run import Executor, Listener, Run, silent
from kvq_calib.text import corpus, others
from kvq_calib.text.documents import EMBEDDED
from kvq_calib.text.tokenizer import Encoder
from kvq_runtime.artifact import ARTIFACT_FILE, artifact, recipe_text
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.disk import files as disk
from kvq_runtime.ops import product
from kvq_runtime.registry import card
from kvq_runtime.registry import resolve as registry
from kvq_runtime.registry.reference import check_name, check_version, home
from kvq_runtime.registry.registry import Registry
from kvq_runtime.store.memory import asymptotic_bits
from kvq_runtime.vllm import served

ENGINES = ("vllm",)
PLAIN = "higgs-2bit"  # it needs no fit, and suits every model


@dataclass(frozen=True)
class Job:
    """One calibration as asked for; None means the model's default.

    model      a catalog name, a folder or a Hub id; `revision` of a Hub model
    recipes    names, files, either with settings: what `recipe_text.read` takes; "auto", or "auto-vocab", whose first
               layer may be stored by token
    name       of the artifact; by default MODEL-RECIPE
    version    its number; by default the next one
    bits       of these two: an artifact for each
    engine     "vllm": artifacts that it can serve from its pages; "auto" then chooses among such settings
    transfer   of "auto-vocab", or for an engine: a text of another kind, on whose fit part settings are measured as
               well; None: an embedded one; "none": none
    threads    of a process; None: all cores of this machine, or each worker's share of them. A part of the plan
    workers    processes that share the chunks (`workers.py`); None: this one does all; with the same threads the bytes
               are the same
    run        where the run's files go; by default under $KVQ_HOME/runs
    publish    whether the artifacts go to the registry
    push       another registry, hf://org, that they go to as well; it gives them numbers of its own
    evaluate   whether they are measured on held-out text before that; `eval_windows` of it (default: a small part of
               the run), beside `baselines`: recipes that need no fit, or artifacts
    also       texts of other kinds that they are measured on too (`text/others.py`); bounds are not judged on them.
               None: the model's; ("none",): none
    max_...    what an artifact may cost at the most, else it is not published
    """

    model: str
    recipes: tuple[str, ...] = ("aqua-2bit",)
    bits: tuple[float, ...] = ()
    engine: str | None = None
    revision: str | None = None
    corpus: str | None = None
    transfer: str | None = None
    samples: int | None = None
    seq_len: int | None = None
    held_out: int | None = None
    seed: int = 0
    device: str = "cpu"
    dtype: str | None = None
    threads: int | None = None
    workers: int | None = None
    registry: str | None = None
    name: str | None = None
    version: str | None = None
    run: str | None = None
    publish: bool = True
    push: str | None = None
    evaluate: bool = True
    eval_windows: int | None = None
    baselines: tuple[str, ...] = ()
    also: tuple[str, ...] | None = None
    max_perplexity_ratio: float | None = None
    max_kl: float | None = None

    @classmethod
    def from_settings(cls, **settings: Any) -> "Job":
        """A Job from settings that JSON or a flow's parameters hold: lists become tuples."""
        given: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in settings.items()}
        return cls(**given)

    @property
    def bounds(self) -> Bounds:
        """The bounds within which an artifact is published."""
        return Bounds(self.max_perplexity_ratio, self.max_kl)

    def beside(self, files: ModelFiles) -> tuple[str, ...]:
        """The texts of other kinds to measure on."""
        return files.entry.beside(self.corpus) if self.also is None else self.also

    @property
    def targets(self) -> list[Registry]:
        """The registries that the artifacts go to."""
        urls = [*([self.registry] if self.publish else []), *([self.push] if self.push else [])]
        return [registry.open_registry(url) for url in urls]

    def prepare(self, listener: Listener = silent, files: ModelFiles | None = None) -> Run:
        """Find the model, complete the plan and name the run folder.

        files   of the model, where it was found already: `models.look_up`, for a plan without its weights
        """
        files = files or models.resolve(self.model, self.revision)
        automatic = [text for text in self.recipes if text in budget.AUTOMATIC]
        if bool(automatic) != bool(self.bits):
            raise ValueError(
                f"recipes {list(self.recipes)}, bits {list(self.bits)}: --bits says what --recipe auto may cost; "
                "give both, as in --recipe auto --bits 2.1, or neither"
            )
        if self.engine not in (None, *ENGINES):
            raise ValueError(f"--for {self.engine}; use {' or '.join(ENGINES)}, or leave it out")
        if self.engine and budget.BY_TOKEN in automatic:
            raise ValueError(
                f"--recipe {budget.BY_TOKEN} --for {self.engine}: its first layer is stored before RoPE, which "
                "pages cannot hold; use --recipe auto"
            )
        recipes = [recipe_text.read(text) for text in self.recipes if text not in automatic]
        for recipe in recipes if self.engine else ():
            served.check(recipe, files.geometry)
        budgets, vocabularies = {}, {}
        for text, bits in itertools.product(automatic, self.bits):
            if not budget.measured(text, self.engine):
                recipes.append(budget.shared(bits, files.geometry))
                continue
            tokens = files.vocabulary if text == budget.BY_TOKEN else 0
            recipes.append(budget.recipe(bits, files.geometry, tokens, self.engine))
            budgets[recipes[-1].name] = bits
            vocabularies |= {recipes[-1].name: tokens} if tokens else {}
        text = (self.corpus, self.samples, self.seq_len, self.seed, self.held_out)
        machine = (self.device, self.dtype, self.threads or max(1, cores() // (self.workers or 1)))
        if self.transfer not in (None, others.NONE) and not budgets:
            raise ValueError(
                f"--transfer {self.transfer} is a text to measure settings on, for --recipe auto-vocab or --for vllm, "
                "with --bits; give these, or leave it out"
            )
        transfer = self._transfer(files) if budgets else None
        plan = make(files, recipes, *text, *machine, budgets, vocabularies, transfer)
        return Run(plan, files, Path(self.run) if self.run else home() / "runs" / plan.digest[:16], listener)

    def _transfer(self, files: ModelFiles) -> str | None:
        """The text of another kind that settings are measured on."""
        if self.transfer == others.NONE:
            return None
        return self.transfer or next((text for text in files.entry.beside(self.corpus) if text in EMBEDDED), None)

    def artifact_name(self, files: ModelFiles, recipe: str) -> str:
        """The name to publish under."""
        if self.name is not None and len(self.recipes) + max(0, len(self.bits) - 1) > 1:
            raise ValueError("--name names one artifact; leave it out with several recipes")
        return check_name(self.name or f"{files.id.split('/')[-1].lower().removesuffix('.gguf')}-{recipe}")


def not_alone(job: Job, work: Run) -> Job:
    """The job with plain HIGGS of 2 bits beside one recipe: one figure alone shows little."""
    if not job.evaluate or job.baselines or len(work.plan.recipes) > 1:
        return job
    return replace(job, baselines=(PLAIN,))


def preflight(job: Job, work: Run) -> list[str]:
    """Check before hours of work what would stop them at their end; returns notes.

    Raises ValueError for settings that cannot be, RuntimeError for a machine that cannot do it.
    """
    files, plan, notes = work.files, work.plan, []
    for recipe in plan.recipes:
        job.artifact_name(files, recipe.name)
    if job.version is not None:
        check_version(job.version)
    others.parse(job.beside(files))
    if job.bounds.given and not job.evaluate:
        raise ValueError("bounds need an evaluation; leave out --no-eval, or the bounds")
    length = min(plan.seq_len, files.context)
    for recipe in plan.recipes if job.bounds.given else ():
        if full.encodes(recipe, length):
            continue
        raise ValueError(
            f"a bound on {recipe.name} could not be judged: in windows of {length} tokens, as long as the sequences, "
            f"no block of {recipe.window.block} is encoded; use a longer --seq-len, or leave out the bounds"
        )
    names = [recipe.name for recipe in plan.recipes]
    if files.headers is None:
        names += [find(baseline, files, job.registry).name for baseline in job.baselines]
    elif job.baselines:
        notes.append("the model's weights are not here: whether the baselines are of this model is checked later")
    if len(set(names)) < len(names):
        raise ValueError(f"recipes {job.recipes} and baselines {job.baselines}; name each once")
    if plan.seq_len > files.context:
        notes.append(f"sequences of {plan.seq_len} tokens exceed the model's context of {files.context}")
    if files.dtype == torch.bfloat16 and plan.dtype == "float32" and (said := product.without_bfloat16(plan.device)):
        notes.append(said)
    together, here = plan.threads * (job.workers or 1), cores()
    if together > here and "RAY_ADDRESS" not in os.environ:
        notes.append(
            f"{together} threads, {plan.threads} in each of {job.workers or 1} processes, wait for each other on "
            f"{here} cores; leave out --threads"
        )
    needs, folder = plan.needs(files), work.folder
    _writable(folder)
    free = shutil.disk_usage(_existing(folder)).free
    if free < needs["disk"]:
        raise RuntimeError(f"the run needs {needs['disk'] / 1e9:.1f} GB in {folder}, and {free / 1e9:.1f} GB are free")
    memory = psutil.virtual_memory().available
    if plan.device.startswith("cuda"):
        memory = torch.cuda.mem_get_info()[0]
    if memory < needs["layer"] + needs["chunk"]:
        asked = (needs["layer"] + needs["chunk"]) / 1e9
        raise RuntimeError(
            f"a layer and a chunk need {asked:.1f} GB on {plan.device}, and {memory / 1e9:.1f} GB are free"
        )
    whole = whole_bytes(files, plan)
    if job.evaluate and memory < whole:
        raise RuntimeError(
            f"the evaluation needs the whole model, {whole / 1e9:.1f} GB on {plan.device}, and {memory / 1e9:.1f} GB "
            "are free; leave it out with --no-eval, and measure the artifact later: kvq eval"
        )
    for target in job.targets:
        for recipe in plan.recipes:
            target.check_name(job.artifact_name(files, recipe.name))
        target.check_writable()
    return notes


def rehearse(job: Job, work: Run) -> list[str]:
    """Choose all texts of a run, as `begin` does, and keep nothing: what a dry run checks beside `preflight`.

    Returns notes: texts of the Hub are not downloaded for this. Raises as `corpus.select` does.
    """
    plan, files = work.plan, work.files
    given = [plan.corpus, *(others.parse(job.beside(files)).values() if job.evaluate else ())]
    remote = [source for source in given if corpus.is_remote(source)]
    if plan.corpus in remote:
        Encoder(files.path)
    else:
        corpus.select(plan.corpus, files.path, plan.samples, plan.seq_len, plan.seed)
    if job.evaluate and plan.corpus not in remote:
        with tempfile.TemporaryDirectory() as folder:
            elsewhere = replace(work, folder=Path(folder))
            held_out.choose(elsewhere, job.eval_windows)
            held_out.choose_others(elsewhere, () if remote else job.beside(files), job.eval_windows)
    about = "not downloaded for a dry run, so that it is not checked whether there is enough text"
    return [f"{', '.join(remote)}: {about}"] if remote else []


def run(job: Job, listener: Listener = silent) -> tuple[list[Published], dict[str, float]]:
    """Calibrate, evaluate, publish. Returns the artifacts, and seconds by stage."""
    return complete(job, job.prepare(listener))


def complete(job: Job, work: Run) -> tuple[list[Published], dict[str, float]]:
    """`run` of a job that is prepared already."""
    with checkpoint.claimed(work.folder):
        begin(job, work)
        with executor(job, work) as execute:
            fitted = calibrate.fit(replace(work, executor=execute))
        begun = time.perf_counter()
        records = evaluate(job, work, fitted)
        spent = {"evaluation": time.perf_counter() - begun} if records else {}
        return list(publish(job, work, fitted, records)), calibrate.seconds(work) | spent


def fit(work: Run) -> list[Subject]:
    """Fit the recipes in the run folder, and publish nothing; Conflict if another process does just that."""
    return [
        Subject.of(fitted, hashlib.sha256(artifact.to_bytes(fitted)).hexdigest(), name, published=False)
        for name, fitted in calibrate.calibrate(work).items()
    ]


def executor(job: Job, work: Run) -> AbstractContextManager[Executor]:
    """Who executes the chunks: this process, or workers for as long as this is entered."""
    if job.workers is None:
        return nullcontext(work.executor)
    from kvq_calib.run import workers  # which imports ray

    return workers.ray_executor(work, job.workers)


def begin(job: Job, work: Run) -> None:
    """Open the run, and choose its texts: what is missing is found before the work."""
    calibrate.start(work)
    if job.evaluate:
        held_out.choose(work, job.eval_windows)
        held_out.choose_others(work, job.beside(work.files), job.eval_windows)


def evaluate(job: Job, work: Run, fitted: Mapping[str, Artifact]) -> list[dict[str, Any]]:
    """Measure what was fitted, and write evaluation.json in the run folder: artifacts, then baselines."""
    if not job.evaluate:
        return []
    beside = [find(given, work.files, job.registry) for given in job.baselines]
    records = held_out.evaluate(work, fitted, beside, job.eval_windows, also=job.beside(work.files))
    records = [gate.judged(one, job.bounds) for one in records[: len(fitted)]] + records[len(fitted) :]
    text = json.dumps(records, indent=1) + "\n"
    disk.save(work.folder / "evaluation.json", text.encode())
    return records


def publish(
    job: Job, work: Run, fitted: Mapping[str, Artifact], records: Sequence[Mapping[str, Any]] = ()
) -> Iterable[Published]:
    """Publish artifacts that keep the bounds, with their records, cards and plots; leave others in the run folder."""
    targets, license, drawn, named = job.targets, licenses.of_model(work.files.path), {}, []
    if records:
        named = names.named(records, [*fitted, *job.baselines])
        drawn = {"error-by-layer.png": plots.error_by_layer(named)}
        drawn["perplexity-by-bits.png"] = plots.perplexity_by_bits(named)
    for number, (recipe, made) in enumerate(fitted.items()):
        name, data = job.artifact_name(work.files, recipe), artifact.to_bytes(made)
        own = records[number] if records else None
        failed = gate.passes(own, job.bounds) if own else []
        shown = [named[number], *named[:number], *named[number + 1 :]] if own else []
        layers = tables.by_layer(made) if "budget" in made.fit else []
        beside, folder = report.files(made, shown, name, drawn, license), work.folder / name
        chosen = [] if failed else targets
        places = tuple(_publish(target, name, data, job.version, beside, own) for target in chosen)
        _leave(folder, ({} if places else {ARTIFACT_FILE: data}) | beside, own)
        measures = made.fit["layers"]
        errors = [sum(layer[role]["relative_error"] for layer in measures) / len(measures) for role in ("key", "value")]
        bits = asymptotic_bits(made.recipe, made.fingerprint.geometry)
        version = places[0].reference.rpartition("@")[2] if places else ""
        made_of = (recipe, name, version, hashlib.sha256(data).hexdigest(), bits, errors[0], errors[1])
        found = figures(own) if own else {}
        yield Published(*made_of, failed=failed, layers=layers, places=places, folder=str(folder), **found)


def _publish(
    target: Registry,
    name: str,
    data: bytes,
    number: str | None,
    beside: Mapping[str, bytes],
    own: Mapping[str, Any] | None,
) -> Place:
    """Publish to one registry, with a snippet that loads from there."""
    text = card.addressed(beside["README.md"].decode(), target.url, name)
    known = target.current_state(name).with_digest(hashlib.sha256(data).hexdigest())
    version = target.publish(name, data, number, {**beside, "README.md": text.encode()})
    if own:
        target.add_evaluation(own, name)
    local = target.url.startswith("file:")
    reference = f"{name if local else f'{target.url}/{name}'}@{version.version}"
    return Place(target.url, reference, str(target.fetch(name, version)) if local else None, known is None)


def _leave(folder: Path, contents: Mapping[str, bytes], own: Mapping[str, Any] | None) -> None:
    """Put an artifact's card, plots and record where its run is, in the shape that `kvq pull` gives."""
    disk.make_folder(folder)
    record = {"evaluation.json": (json.dumps(own, indent=1) + "\n").encode()} if own else {}
    for name, content in {**contents, **record}.items():
        disk.save(folder / name, content)


def whole_bytes(files: ModelFiles, plan: Plan) -> int:
    """The bytes of the whole model as `kvq eval` loads it."""
    return files.weight_bytes * (4 if plan.device == "cpu" else files.dtype.itemsize) // files.dtype.itemsize


def _writable(folder: Path) -> None:
    """RuntimeError where nothing can be written to the folder, or made in the nearest one above it."""
    there = _existing(folder)
    if not os.access(there, os.W_OK | os.X_OK):
        what = f"nothing can be written in {there}"
        raise RuntimeError(f"{what}; name another folder for the run: --run DIR, or $KVQ_HOME for all of kvq")


def _existing(path: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
