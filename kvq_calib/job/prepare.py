"""Prepare a job: find the model, complete the plan, and check what would stop hours of work at their end."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from kvq_calib.evaluate import quality_checks, record
from kvq_calib.evaluate.caches import encodes
from kvq_calib.evaluate.candidate import find
from kvq_calib.job.job import Job
from kvq_calib.model import find as models
from kvq_calib.model.files import ModelFiles
from kvq_calib.run import bit_allocation
from kvq_calib.run.device import cores, free_on
from kvq_calib.run.plan import Plan, make
from kvq_calib.run.run import EVERY, InFiles, InMemory, Listener, Run, silent
from kvq_calib.text import corpus
from kvq_calib.text.tokenizer import Encoder
from kvq_runtime.artifact import recipe_text
from kvq_runtime.attention import fused
from kvq_runtime.ops import product
from kvq_runtime.registry.reference import check_version, home
from kvq_runtime.vllm import plugin

AUTOMATIC = {  # what `auto` is, by engine
    None: bit_allocation.auto_recipe,
    "kernel": bit_allocation.auto_kernel_recipe,
    "vllm": bit_allocation.auto_vllm_recipe,
}
PLAIN = "higgs-2bit"  # it needs no fit, and suits every model


def prepare(job: Job, listener: Listener = silent, files: ModelFiles | None = None) -> Run:
    """Find the model, complete the plan and name the run folder.

    files   of the model, if it was found already: by `models.look_up`, for a plan without its weights
    """
    if (bit_allocation.AUTOMATIC in job.recipes) != bool(job.bits):
        raise ValueError(
            f"recipes {list(job.recipes)}, bits {list(job.bits)}: --bits says what --recipe auto may cost; "
            "give both, as in --recipe auto --bits 2.1, or neither"
        )
    if job.engine not in (None, *AUTOMATIC):
        raise ValueError(f"--for {job.engine}; use one of {sorted(filter(None, AUTOMATIC))}, or leave it out")
    recipes = [recipe_text.read(name) for name in job.recipes if name != bit_allocation.AUTOMATIC]
    files = files or models.resolve(job.model, job.revision)  # which may be a long download
    for recipe in recipes if job.engine else ():
        recipe.check(files.geometry)
        if job.engine == "vllm":
            plugin.check_recipe(recipe)
        elif (why := fused.refusal(recipe, files.geometry)) is not None:
            raise ValueError(f"--for kernel: {why}: use fisher-head-3bit, or leave out --for")
    budgets = {}
    for bits in job.bits:
        recipes.append(AUTOMATIC[job.engine](bits, files.geometry))
        if job.engine == "vllm":
            budgets[recipes[-1].name] = bits
    chosen = (job.corpus, job.samples, job.seq_len, job.seed, job.held_out)
    used = (job.device, job.dtype, job.threads or max(1, cores() // (job.workers or 1)))
    plan = make(files, recipes, *chosen, *used, budgets, job.gradient_tokens)
    folder = Path(job.run) if job.run else home() / "runs" / plan.digest[:16]
    return Run(plan, files, folder, listener, activations=_activations(job, plan, files))


def _activations(job: Job, plan: Plan, files: ModelFiles) -> InFiles:
    """Keep activations in memory if those of two layers fit into half of the free memory; else, and with workers, in
    files."""
    every = EVERY if job.checkpoint_every is None else job.checkpoint_every
    if every <= 0 or job.workers is not None:
        return InFiles()
    needs = plan.needs(files)
    held, computing = 2 * needs["held"], needs["layer"] + needs["chunk"]
    fits = held + (0 if plan.device.startswith("cuda") else computing) <= psutil.virtual_memory().available // 2
    return InMemory(every) if fits else InFiles()


def not_alone(job: Job, work: Run) -> Job:
    """Return the job with plain HIGGS of 2 bits as the baseline of a single recipe: one figure alone shows little."""
    alone = job.evaluate and not job.baselines and len(work.plan.recipes) < 2
    return replace(job, baselines=(PLAIN,)) if alone else job


def preflight(job: Job, work: Run) -> list[str]:
    """Check before hours of work what would stop them at their end; return notes.

    Raises ValueError for invalid settings, RuntimeError for a machine that is too small.
    """
    notes = [*_check_settings(job, work), *_check_machine(job, work)]
    for target in job.targets:
        target.check_writable()
    return notes


def _check_settings(job: Job, work: Run) -> Iterator[str]:
    """Check names, bounds and baselines; yield notes."""
    files, plan = work.files, work.plan
    length = min(plan.seq_len, files.context)
    for recipe in plan.recipes:
        job.artifact_name(files, recipe.name)
    if job.version is not None:
        check_version(job.version)
    if job.bounds.given and not job.evaluate:
        raise ValueError("bounds need an evaluation; leave out --no-eval, or the bounds")
    for recipe in plan.recipes if job.bounds.given else ():
        if not encodes(recipe, length):
            raise ValueError(
                f"bounds of {recipe.name}: windows of {length} tokens, as long as the sequences, encode no block of "
                f"{recipe.window.block}; use a longer --seq-len, or leave out the bounds"
            )
    names = [recipe.name for recipe in plan.recipes]
    if files.local:
        names += [find(baseline, files, job.registry).name for baseline in job.baselines]
    elif job.baselines:
        yield "the model's weights are not here: whether the baselines are of this model is checked later"
    if len(set(names)) < len(names):
        raise ValueError(f"recipes {job.recipes} and baselines {job.baselines}; name each once")
    if plan.seq_len > files.context:
        yield f"sequences of {plan.seq_len} tokens exceed the model's context of {files.context}"


def _check_machine(job: Job, work: Run) -> Iterator[str]:
    """Check cores, disk and memory; yield notes."""
    files, plan, workers = work.files, work.plan, job.workers or 1
    if files.dtype == torch.bfloat16 and plan.dtype == "float32" and (note := product.without_bfloat16(plan.device)):
        yield note
    threads = plan.threads * workers
    if threads > cores() and "RAY_ADDRESS" not in os.environ:
        yield f"{threads} threads in {workers} processes exceed {cores()} cores; leave out --threads"
    needs = plan.needs(files)
    folder = next(path for path in (work.folder.absolute(), *work.folder.absolute().parents) if path.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise RuntimeError(f"{folder}: nothing can be written there; name another folder: --run DIR, or $KVQ_HOME")
    free, memory = shutil.disk_usage(folder).free, free_on(plan.device)
    if free < needs["disk"]:
        raise RuntimeError(
            f"the run needs {needs['disk'] / 1e9:.1f} GB in {work.folder}, and {free / 1e9:.1f} GB are free"
        )
    if memory < needs["layer"] + needs["chunk"]:
        both = (needs["layer"] + needs["chunk"]) / 1e9
        raise RuntimeError(
            f"a layer and a chunk need {both:.1f} GB on {plan.device}, and {memory / 1e9:.1f} GB are free"
        )
    if job.evaluate and not record.fits(files, plan.device):
        whole = record.whole_bytes(files, plan.device) / 1e9
        yield (
            f"the model takes {whole:.1f} GB, and {memory / 1e9:.1f} GB are free on {plan.device}: evaluation runs it "
            "one layer at a time, by full encode alone"
        )


def rehearse(job: Job, work: Run) -> list[str]:
    """Choose the text of a run, as `begin` does, and keep nothing; do not download text from the Hub. Return notes.

    Raises as `corpus.select` does.
    """
    plan, files = work.plan, work.files
    if corpus.is_remote(plan.corpus):
        Encoder(files.path)
        return [f"{plan.corpus}: not downloaded by a dry run, so not checked for enough text"]
    corpus.select(plan.corpus, files.path, plan.samples, plan.seq_len, plan.seed)
    if job.evaluate:
        with tempfile.TemporaryDirectory() as folder:
            quality_checks.choose(replace(work, folder=Path(folder)), job.eval_windows)
    return []
