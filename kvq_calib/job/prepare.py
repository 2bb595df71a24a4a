"""Prepare a job: find the model, complete the plan, and check what would stop hours of work at their end."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from kvq_calib.evaluate import held_out, record
from kvq_calib.evaluate.caches import encodes
from kvq_calib.evaluate.subject import find
from kvq_calib.job.job import Job, Machine, Text
from kvq_calib.model import find as models
from kvq_calib.model.files import ModelFiles
from kvq_calib.run import budget, checkpoint
from kvq_calib.run.device import cores, free_on
from kvq_calib.run.plan import Plan, make
from kvq_calib.run.run import EVERY, Copies, InFiles, InMemory, Listener, Run, silent
from kvq_calib.text import corpus
from kvq_calib.text.documents import EMBEDDED
from kvq_calib.text.tokenizer import Encoder
from kvq_runtime.artifact import recipe_text
from kvq_runtime.ops import product
from kvq_runtime.registry.hub.client import publishing
from kvq_runtime.registry.reference import check_version, home
from kvq_runtime.vllm import plugin

ENGINES = ("vllm",)
PLAIN = "higgs-2bit"  # it needs no fit, and suits every model


def prepare(job: Job, listener: Listener = silent, files: ModelFiles | None = None) -> Run:
    """Find the model, complete the plan and name the run folder.

    files   of the model, where it was found already: `models.look_up`, for a plan without its weights
    """
    what, text, machine = job.what, job.text, job.machine
    automatic = [asked for asked in what.recipes if asked == budget.AUTOMATIC]
    if bool(automatic) != bool(what.bits):
        raise ValueError(
            f"recipes {list(what.recipes)}, bits {list(what.bits)}: --bits says what --recipe auto may cost; "
            "give both, as in --recipe auto --bits 2.1, or neither"
        )
    if what.engine not in (None, *ENGINES):
        raise ValueError(f"--for {what.engine}; use {' or '.join(ENGINES)}, or leave it out")
    recipes = [recipe_text.read(asked) for asked in what.recipes if asked != budget.AUTOMATIC]
    files = files or models.resolve(what.model, what.revision)  # which may be a long download
    for recipe in recipes if what.engine else ():
        plugin.check_recipe(recipe, files.geometry)
    budgets = {}
    for bits in what.bits:
        recipes.append((budget.served if what.engine else budget.shared)(bits, files.geometry))
        if what.engine:
            budgets[recipes[-1].name] = bits
    if text.transfer not in (None, corpus.NONE) and not budgets:
        raise ValueError(
            f"--transfer {text.transfer} is a text to measure settings on, for --recipe auto --for vllm "
            "with --bits; give these, or leave it out"
        )
    chosen = (text.corpus, text.samples, text.seq_len, text.seed, text.held_out)
    used = (machine.device, machine.dtype, machine.threads or max(1, cores() // (machine.workers or 1)))
    transfer = _transfer(text, files) if budgets else None
    plan = make(files, recipes, *chosen, *used, budgets, transfer, text.gradient_tokens)
    folder = Path(machine.run) if machine.run else home() / "runs" / plan.digest[:16]
    return Run(plan, files, folder, listener, activations=_activations(machine, plan, files))


def _activations(machine: Machine, plan: Plan, files: ModelFiles) -> InFiles:
    """On the device, else in host memory, where half of what is free has room for two layers' of them; in files where
    workers exchange them."""
    every = EVERY if machine.checkpoint_every is None else machine.checkpoint_every
    if every <= 0 or machine.workers is not None:
        return InFiles()
    needs = plan.needs(files)
    held, at_work = 2 * needs["held"], needs["layer"] + needs["chunk"]
    on_gpu = plan.device.startswith("cuda")
    if on_gpu and held + at_work <= torch.cuda.mem_get_info(plan.device)[0] // 2:
        return InMemory(every, plan.device)
    fits = held + (0 if on_gpu else at_work) <= psutil.virtual_memory().available // 2
    return InMemory(every, copies=Copies(plan.device) if on_gpu else None) if fits else InFiles()


def _transfer(text: Text, files: ModelFiles) -> str | None:
    """The text of another kind that settings are measured on."""
    if text.transfer == corpus.NONE:
        return None
    return text.transfer or next((one for one in files.entry.beside(text.corpus) if one in EMBEDDED), None)


def not_alone(job: Job, work: Run) -> Job:
    """The job with plain HIGGS of 2 bits beside one recipe: one figure alone shows little."""
    alone = job.evaluation.evaluate and not job.evaluation.baselines and len(work.plan.recipes) < 2
    return job.with_settings(baselines=(PLAIN,)) if alone else job


@publishing()
def preflight(job: Job, work: Run) -> list[str]:
    """Check before hours of work what would stop them at their end; returns notes.

    Raises ValueError for invalid settings, RuntimeError for a machine that cannot do it.
    """
    notes = [*_check_settings(job, work), *_check_machine(job, work)]
    for target in job.publication.targets:
        for recipe in work.plan.recipes:
            target.check_name(job.artifact_name(work.files, recipe.name))
        target.check_writable()
    return notes


def _check_settings(job: Job, work: Run) -> Iterator[str]:
    """Names, bounds and baselines; yields notes."""
    files, plan, evaluation = work.files, work.plan, job.evaluation
    length = min(plan.seq_len, files.context)
    for recipe in plan.recipes:
        checkpoint.check_beside(job.artifact_name(files, recipe.name))
    if job.publication.version is not None:
        check_version(job.publication.version)
    corpus.others(job.beside(files))
    if evaluation.bounds.given and not evaluation.evaluate:
        raise ValueError("bounds need an evaluation; leave out --no-eval, or the bounds")
    for recipe in plan.recipes if evaluation.bounds.given else ():
        if not encodes(recipe, length):
            raise ValueError(
                f"a bound on {recipe.name} could not be judged: in windows of {length} tokens, as long as the "
                f"sequences, no block of {recipe.window.block} is encoded; use a longer --seq-len, or leave out the "
                "bounds"
            )
    names = [recipe.name for recipe in plan.recipes]
    if files.local:
        names += [find(baseline, files, job.publication.registry).name for baseline in evaluation.baselines]
    elif evaluation.baselines:
        yield "the model's weights are not here: whether the baselines are of this model is checked later"
    if len(set(names)) < len(names):
        raise ValueError(f"recipes {job.what.recipes} and baselines {evaluation.baselines}; name each once")
    if plan.seq_len > files.context:
        yield f"sequences of {plan.seq_len} tokens exceed the model's context of {files.context}"


def _check_machine(job: Job, work: Run) -> Iterator[str]:
    """Arithmetic, cores, disk and memory; yields notes."""
    files, plan, folder, workers = work.files, work.plan, work.folder, job.machine.workers or 1
    if files.dtype == torch.bfloat16 and plan.dtype == "float32" and (said := product.without_bfloat16(plan.device)):
        yield said
    together, here = plan.threads * workers, cores()
    if together > here and "RAY_ADDRESS" not in os.environ:
        yield (
            f"{together} threads, {plan.threads} in each of {workers} processes, wait for each other on {here} cores; "
            "leave out --threads"
        )
    needs = plan.needs(files)
    _writable(folder)
    free = shutil.disk_usage(_existing(folder)).free
    if free < needs["disk"]:
        raise RuntimeError(f"the run needs {needs['disk'] / 1e9:.1f} GB in {folder}, and {free / 1e9:.1f} GB are free")
    memory = free_on(plan.device)
    if memory < needs["layer"] + needs["chunk"]:
        asked = (needs["layer"] + needs["chunk"]) / 1e9
        raise RuntimeError(
            f"a layer and a chunk need {asked:.1f} GB on {plan.device}, and {memory / 1e9:.1f} GB are free"
        )
    if job.evaluation.evaluate and not record.fits(files, plan.device):
        whole = record.whole_bytes(files, plan.device) / 1e9
        yield (
            f"the whole model takes {whole:.1f} GB, and {memory / 1e9:.1f} GB are free on {plan.device}: evaluation "
            "runs it one layer at a time, by full encode alone"
        )


def rehearse(job: Job, work: Run) -> list[str]:
    """Choose all texts of a run, as `begin` does, and keep nothing: what a dry run checks beside `preflight`.

    Returns notes: texts of the Hub are not downloaded for this. Raises as `corpus.select` does.
    """
    plan, files, asked = work.plan, work.files, job.evaluation
    given = [plan.corpus, *(corpus.others(job.beside(files)).values() if asked.evaluate else ())]
    remote = [source for source in given if corpus.is_remote(source)]
    if plan.corpus in remote:
        Encoder(files.path)
    else:
        corpus.select(plan.corpus, files.path, plan.samples, plan.seq_len, plan.seed)
    if asked.evaluate and plan.corpus not in remote:
        with tempfile.TemporaryDirectory() as folder:
            elsewhere = replace(work, folder=Path(folder))
            held_out.choose(elsewhere, () if remote else job.beside(files), asked.eval_windows)
    about = "not downloaded for a dry run, so that it is not checked whether there is enough text"
    return [f"{', '.join(remote)}: {about}"] if remote else []


def _writable(folder: Path) -> None:
    """RuntimeError where nothing can be written to the folder, or made in the nearest one above it."""
    there = _existing(folder)
    what = f"nothing can be written in {there}"
    if not there.is_dir():
        what = f"{there} is a file"
    elif not os.statvfs(there).f_blocks:
        what = f"the file system of {there} has no room for files"
    elif os.access(there, os.W_OK | os.X_OK):
        return
    raise RuntimeError(f"{what}; name another folder for the run: --run DIR, or $KVQ_HOME for all of kvq")


def _existing(path: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
