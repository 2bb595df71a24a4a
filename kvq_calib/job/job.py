"""A calibration as a user asks for it, from the command line, a flow or a script.

run(Job("demo"))            calibrate, evaluate, publish (`job/run.py`)
work = prepare(job)         step by step: find the model, complete the plan (`job/prepare.py`)
preflight(job, work)        check what would stop the run
complete(job, work)         begin, `run/calibrate.py`, evaluate, publish
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvq_calib.model import catalog
from kvq_calib.model.files import ModelFiles
from kvq_calib.run.bit_allocation import AUTOMATIC
from kvq_calib.run.device import usable
from kvq_calib.text import corpus
from kvq_runtime.artifact import recipe_text
from kvq_runtime.registry.rating import Bounds
from kvq_runtime.registry.reference import check_name
from kvq_runtime.registry.registry import Registry
from kvq_runtime.registry.resolve import open_registry


@dataclass(frozen=True)
class Job:
    """One calibration, in settings that JSON can hold; lists become tuples.

    model      a catalog name, a folder or a Hub id; `revision` of a Hub model
    recipes    names, files, either with settings: what `recipe_text.read` takes; or "auto"
    bits       of "auto": an artifact for each
    engine     "vllm": artifacts that it serves from its pages · "kernel": those that an attention kernel reads; "auto"
               then chooses among such recipes

    The text to fit to; None means the model's default.

    samples, held_out   sequences in all, and how many of them only measure the fit; `seq_len` tokens each
    seed                of the choice of sequences
    gradient_tokens     of recipes that take gradients: tokens of each corpus, at least; None: 4,096

    The machine that computes.

    dtype      of the forward pass; None: the model's
    threads    of a process, part of the plan; None: all cores of this machine, or each worker's share of them
    workers    processes that share the chunks (`workers.py`); None: this one. Equal threads make equal bytes
    run        folder of the run's files; None: under $KVQ_HOME/runs
    checkpoint_every   seconds between two checkpoints of activations in memory; 0: activations are files, and each
               layer is a checkpoint; None: five minutes

    The measurements before artifacts are published.

    evaluate       whether to measure on held-out text, in `eval_windows`; None: few, for a small part of the run
    baselines      recipes that need no fit, or artifacts, to measure too
    max_...        bounds; an artifact that exceeds one is not published

    The destination of artifacts.

    publish    whether to publish to `registry`: file:///folder or hf://org; None: $KVQ_REGISTRY, else
               $KVQ_HOME/registry
    push       another registry, hf://org, which numbers versions by itself
    name       of the artifact; None: MODEL-RECIPE
    version    its number; None: the next one
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}  # where a flow checks settings
    model: str
    recipes: Sequence[str] = ("aqua-2bit",)
    bits: Sequence[float] = ()
    engine: str | None = None
    revision: str | None = None
    corpus: str | None = None
    samples: int | None = None
    seq_len: int | None = None
    held_out: int | None = None
    seed: int = 0
    gradient_tokens: int | None = None
    device: str = "cpu"
    dtype: str | None = None
    threads: int | None = None
    workers: int | None = None
    run: str | None = None
    checkpoint_every: float | None = None
    evaluate: bool = True
    eval_windows: int | None = None
    baselines: Sequence[str] = ()
    max_perplexity_ratio: float | None = None
    max_kl: float | None = None
    max_beyond: float | None = None
    publish: bool = True
    registry: str | None = None
    push: str | None = None
    name: str | None = None
    version: str | None = None

    def __post_init__(self):
        for name in ("recipes", "bits", "baselines"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def check(self) -> None:
        """Check the names in the settings, as far as this takes no download; raise ValueError or RuntimeError."""
        catalog.check(self.model)
        for recipe in self.recipes:
            if recipe != AUTOMATIC:
                recipe_text.read(recipe)
        if self.corpus is not None:
            corpus.check(self.corpus)
        usable(self.device)
        _ = self.bounds, self.targets  # which raise for invalid ones

    @property
    def bounds(self) -> Bounds:
        """The bounds within which an artifact is published."""
        return Bounds(self.max_perplexity_ratio, self.max_kl, self.max_beyond)

    @property
    def targets(self) -> list[Registry]:
        """The registries to publish to."""
        urls = [*([self.registry] if self.publish else []), *([self.push] if self.push else [])]
        return [open_registry(url) for url in urls]

    def artifact_name(self, files: ModelFiles, recipe: str) -> str:
        """Return the name to publish under."""
        if self.name is not None and len(self.recipes) + max(0, len(self.bits) - 1) > 1:
            raise ValueError("--name names one artifact; leave it out with several recipes")
        return check_name(self.name or f"{files.id.split('/')[-1].lower().removesuffix('.gguf')}-{recipe}")
