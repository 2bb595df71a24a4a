"""A calibration as a user asks for it, from the command line, a flow or a script: settings in five groups.

run(Job(What("demo")))      calibrate, evaluate, publish (`job/run.py`)
work = prepare(job)         step by step: find the model, complete the plan (`job/prepare.py`)
preflight(job, work)        check what would stop the run
complete(job, work)         begin, `run/calibrate.py`, evaluate, publish
"""

from collections import ChainMap
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from kvq_calib.model.files import ModelFiles
from kvq_runtime.registry import resolve as registry
from kvq_runtime.registry.rating import Bounds
from kvq_runtime.registry.reference import check_name
from kvq_runtime.registry.registry import Registry


@dataclass(frozen=True)
class What:
    """The model, and the recipes to fit.

    model      a catalog name, a folder or a Hub id; `revision` of a Hub model
    recipes    names, files, either with settings: what `recipe_text.read` takes; or "auto"
    bits       of "auto": an artifact for each
    engine     "vllm": artifacts that it serves from its pages; "auto" then chooses among such settings
    """

    model: str
    recipes: tuple[str, ...] = ("aqua-2bit",)
    bits: tuple[float, ...] = ()
    engine: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class Text:
    """The text to fit to; None means the model's default.

    samples, held_out   sequences in all, and how many of them only measure the fit; `seq_len` tokens each
    seed                of the choice of sequences
    gradient_tokens     of recipes that take gradients: tokens of each corpus, at least; None: 4,096
    """

    corpus: str | None = None
    samples: int | None = None
    seq_len: int | None = None
    held_out: int | None = None
    seed: int = 0
    gradient_tokens: int | None = None


@dataclass(frozen=True)
class Machine:
    """The machine that computes.

    dtype      of the forward pass; None: the model's
    threads    of a process, part of the plan; None: all cores of this machine, or each worker's share of them
    workers    processes that share the chunks (`workers.py`); None: this one. Equal threads make equal bytes
    run        folder of the run's files; None: under $KVQ_HOME/runs
    checkpoint_every   seconds between two checkpoints of activations in memory; 0: activations are files, and each
               layer is a checkpoint; None: five minutes
    """

    device: str = "cpu"
    dtype: str | None = None
    threads: int | None = None
    workers: int | None = None
    run: str | None = None
    checkpoint_every: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """The measurements before artifacts are published, and their bounds.

    evaluate       whether to measure on held-out text, in `eval_windows`; None: few, for a small part of the run
    baselines      recipes that need no fit, or artifacts, to measure too
    max_...        bounds; an artifact that exceeds one is not published
    """

    evaluate: bool = True
    eval_windows: int | None = None
    baselines: tuple[str, ...] = ()
    max_perplexity_ratio: float | None = None
    max_kl: float | None = None
    max_beyond: float | None = None

    @property
    def bounds(self) -> Bounds:
        """The bounds within which an artifact is published."""
        return Bounds(self.max_perplexity_ratio, self.max_kl, self.max_beyond)


@dataclass(frozen=True)
class Publication:
    """The destination of artifacts.

    publish    whether to publish to `registry`: file:///folder or hf://org; None: $KVQ_REGISTRY, else
               $KVQ_HOME/registry
    push       another registry, hf://org, which numbers versions by itself
    name       of the artifact; None: MODEL-RECIPE
    version    its number; None: the next one
    """

    publish: bool = True
    registry: str | None = None
    push: str | None = None
    name: str | None = None
    version: str | None = None

    @property
    def targets(self) -> list[Registry]:
        """The registries to publish to."""
        urls = [*([self.registry] if self.publish else []), *([self.push] if self.push else [])]
        return [registry.open_registry(url) for url in urls]


@dataclass(frozen=True)
class Job:
    """One calibration. No two groups have a setting of the same name."""

    what: What
    text: Text = Text()
    machine: Machine = Machine()
    evaluation: Evaluation = Evaluation()
    publication: Publication = Publication()

    @classmethod
    def from_settings(cls, **settings: Any) -> Self:
        """Make a Job from the settings of all groups by name, as JSON holds them; lists become tuples."""
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
        groups: dict[str, Any] = {}
        for group in fields(cls):
            assert isinstance(group.type, type), "a group is a dataclass"
            names = {field.name for field in fields(group.type)} & given.keys()
            groups[group.name] = group.type(**{name: given.pop(name) for name in names})
        if given:
            raise TypeError(f"a Job has no setting {', '.join(given)}")
        return cls(**groups)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of all groups, by name."""
        return dict(ChainMap(*asdict(self).values()))

    def with_settings(self, **changed: Any) -> Self:
        """Return this job with some settings changed."""
        return self.from_settings(**self.settings | changed)

    def artifact_name(self, files: ModelFiles, recipe: str) -> str:
        """Return the name to publish under."""
        name = self.publication.name
        if name is not None and len(self.what.recipes) + max(0, len(self.what.bits) - 1) > 1:
            raise ValueError("--name names one artifact; leave it out with several recipes")
        return check_name(name or f"{files.id.split('/')[-1].lower().removesuffix('.gguf')}-{recipe}")
