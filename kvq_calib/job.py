"""What a user asks for, from the command line, a flow or a script: resolve it, check it, do it, publish it."""

import hashlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from kvq_calib import budget, models, report
from kvq_calib.plan import Plan, home, make
from kvq_calib.run import Listener, Run, calibrate, seconds
from kvq_calib.weights import ModelFiles
from kvq_runtime import artifact, registry
from kvq_runtime.artifact import Artifact
from kvq_runtime.memory import asymptotic_bits
from kvq_runtime.recipe import preset
from kvq_runtime.reference import check_name, check_version


@dataclass(frozen=True)
class Job:
    """One calibration as asked for; None means the model's default.

    model      a catalog name, a folder or a Hub id; `revision` of a Hub model
    name       of the artifact; by default MODEL-RECIPE
    version    its number; by default the next one
    bits       of the recipe "auto": an artifact for each
    run        where the run's files go; by default under $KVQ_HOME/runs
    publish    whether the artifacts go to the registry
    """

    model: str
    recipes: tuple[str, ...] = ("aqua-2bit",)
    bits: tuple[float, ...] = ()
    revision: str | None = None
    corpus: str | None = None
    samples: int | None = None
    seq_len: int | None = None
    held_out: int | None = None
    seed: int = 0
    device: str = "cpu"
    dtype: str | None = None
    threads: int = 1
    registry: str | None = None
    name: str | None = None
    version: str | None = None
    run: str | None = None
    publish: bool = True

    def prepare(self) -> tuple[ModelFiles, Plan]:
        """Find the model and complete the plan."""
        files = models.resolve(self.model, self.revision)
        if ("auto" in self.recipes) != bool(self.bits):
            raise ValueError(
                f"recipes {list(self.recipes)}, bits {list(self.bits)}: --bits says what --recipe auto may cost; "
                "give both, as in --recipe auto --bits 2.1, or neither"
            )
        recipes = [preset(name) for name in self.recipes if name != "auto"]
        chosen = [budget.recipe(bits, files.geometry) for bits in self.bits]
        budgets = {recipe.name: bits for recipe, bits in zip(chosen, self.bits, strict=True)}
        text = (self.corpus, self.samples, self.seq_len, self.seed, self.held_out)
        machine = (self.device, self.dtype, self.threads)
        return files, make(files, (*recipes, *chosen), *text, *machine, budgets)

    def folder(self, plan: Plan) -> Path:
        """Where the run's files are."""
        return Path(self.run) if self.run else home() / "runs" / plan.digest[:16]

    def artifact_name(self, files: ModelFiles, recipe: str) -> str:
        """The name to publish under."""
        if self.name is not None and len(self.recipes) + max(0, len(self.bits) - 1) > 1:
            raise ValueError("--name names one artifact; leave it out with several recipes")
        return check_name(self.name or f"{files.id.split('/')[-1].lower()}-{recipe}")


@dataclass(frozen=True)
class Done:
    """One published (or only fitted) artifact.

    layers   of a recipe with a budget: what was chosen
    """

    recipe: str
    name: str
    version: str
    sha256: str
    bits: float
    key_error: float
    value_error: float
    layers: list[dict] = field(default_factory=list)

    def row(self, full: bool = False) -> dict:
        """A line of the result table; `full`: with the whole digest, and what was chosen."""
        return {
            "recipe": self.recipe,
            "artifact": f"{self.name}@{self.version}" if self.version else self.name,
            "sha256": self.sha256 if full else self.sha256[:12],
            "bits": round(self.bits, 4),
            "key error": round(self.key_error, 5),
            "value error": round(self.value_error, 5),
        } | ({"layers": self.layers} if full and self.layers else {})


def preflight(job: Job, files: ModelFiles, plan: Plan) -> list[str]:
    """Check before hours of work what would stop them at their end; returns notes.

    Raises ValueError for settings that cannot be, RuntimeError for a machine that cannot do it.
    """
    notes = []
    for recipe in plan.recipes:
        job.artifact_name(files, recipe.name)
    if job.version is not None:
        check_version(job.version)
    if plan.device.startswith("cuda") and not torch.cuda.is_available():
        raise RuntimeError(f"device {plan.device}, but this machine has no usable CUDA device; use --device cpu")
    if plan.seq_len > files.context:
        notes.append(f"sequences of {plan.seq_len} tokens exceed the model's context of {files.context}")
    needs, folder = plan.needs(files), job.folder(plan)
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
    root = registry.open_registry(job.registry).root
    if job.publish and not os.access(_existing(root), os.W_OK):
        raise RuntimeError(f"the registry {root} cannot be written to; choose another with --registry")
    return notes


def run(job: Job, listener: Listener = lambda progress: None) -> tuple[list[Done], dict[str, float]]:
    """Do the job: calibrate, and publish unless told not to. Returns what was made, and seconds by stage."""
    files, plan = job.prepare()
    work = Run(plan, files, job.folder(plan), listener)
    fitted = calibrate(work)
    return list(publish(job, files, fitted)), seconds(work)


def publish(job: Job, files: ModelFiles, fitted: dict[str, Artifact]) -> Iterable[Done]:
    """Publish artifacts with their card and plots."""
    for recipe, made in fitted.items():
        name, data = job.artifact_name(files, recipe), artifact.to_bytes(made)
        version, chosen = "", "budget" in made.fit
        if job.publish:
            beside = report.files(made, name=name)
            version = registry.open_registry(job.registry).publish(name, data, job.version, beside).version
        measures = made.fit["layers"]
        errors = [sum(layer[half]["relative_error"] for layer in measures) / len(measures) for half in ("key", "value")]
        bits = asymptotic_bits(made.recipe, made.fingerprint.geometry)
        layers = report.by_layer(made) if chosen else []
        yield Done(recipe, name, version, hashlib.sha256(data).hexdigest(), bits, errors[0], errors[1], layers)


def _existing(path: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
