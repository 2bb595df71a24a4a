"""Plan a calibration before it starts: its bytes depend on the plan alone."""

import hashlib
import json
import math
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from typing import Any

import torch

from kvq_calib.fit.scheme import SchemeFit
from kvq_calib.model import find
from kvq_calib.model.files import ModelFiles
from kvq_calib.run.device import usable
from kvq_calib.text import corpus
from kvq_runtime.codec import key_bias
from kvq_runtime.fit.fitting import requested
from kvq_runtime.fit.statistics import Statistic
from kvq_runtime.geometry import ROLES, Geometry
from kvq_runtime.ops import product
from kvq_runtime.recipe import Recipe, Scheme

CHUNK_TOKENS, GPU_CHUNK_TOKENS = 8192, 32768  # fewer do not outlast a GPU's launches
FITS = 5  # raised with each change of a fit's numbers or folder, so that no earlier run is resumed
BEGINNING = 4096  # fit tokens of each corpus to take gradients of
MEASURED = 4  # chunks to measure the settings of a budget on


@dataclass(frozen=True)
class Plan:
    """One calibration: a model, recipes, a corpus, and the numbers that its result depends on.

    samples, held_out   sequences in all, and how many of them only measure the fit
    chunk               sequences per chunk, the unit of work: never a matter of workers or free memory
    dtype, threads      of the forward pass; `environment` has the versions and the device beside them
    budgets             bits per element of the recipes, by name, whose settings a knapsack chooses
    draft               whether this is a draft (`bit_allocation.py`), which begins with what another run has begun with
    weights             of a model without a revision, whose name says nothing of it: its digest (`model/find.py`)
    texts               {corpus: sha256} of those that are files here
    gradient_tokens     of each corpus, of the fit part, that gradients are of, and a draft is fitted to: at least so
                        many, in whole sequences; None: BEGINNING
    """

    model: str
    revision: str | None
    geometry: Geometry
    recipes: tuple[Recipe, ...]
    corpus: str
    samples: int
    seq_len: int
    seed: int = 0
    held_out: int = 0
    chunk: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    environment: dict = field(default_factory=dict)
    budgets: dict[str, float] = field(default_factory=dict)
    draft: bool = False
    weights: str | None = None
    texts: dict[str, str] = field(default_factory=dict)
    gradient_tokens: int | None = None

    def __post_init__(self):
        names = [recipe.name for recipe in self.recipes]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"recipes {names}; name at least one, and each once")
        for name, least in (("samples", 1), ("seq_len", 2), ("held_out", 0), ("chunk", 1), ("threads", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}; use at least {least}")
        if self.gradient_tokens is not None and self.gradient_tokens < 1:
            raise ValueError(f"gradient_tokens={self.gradient_tokens}; use at least 1, or leave it out")
        if not 0 <= self.seed < 1 << 32:
            raise ValueError(f"seed={self.seed}; use a whole number from 0 to {(1 << 32) - 1}")
        if self.held_out >= self.samples:
            raise ValueError(f"held_out={self.held_out} leaves none of {self.samples} samples to fit on; use fewer")
        for recipe in self.recipes:
            recipe.check(self.geometry)
            if not recipe.fitted:
                raise ValueError(f"recipe {recipe.name} has nothing to fit; use KVQCache.from_recipe({recipe.name!r})")
            if recipe.window.block > self.seq_len or recipe.window.sinks >= self.seq_len:
                raise ValueError(
                    f"seq_len={self.seq_len} is shorter than a block of {recipe.name} ({recipe.window.block})"
                )

    @property
    def chunks(self) -> list[range]:
        """The sequences of each chunk; a chunk is fitted on or held out as a whole."""
        fitted = self.samples - self.held_out
        parts = (range(0, fitted), range(fitted, self.samples))
        return [part[at : at + self.chunk] for part in parts for at in range(0, len(part), self.chunk)]

    @property
    def fitted_chunks(self) -> int:
        """Return the number of chunks that are fitted on; the rest, if any, are held out."""
        return math.ceil((self.samples - self.held_out) / self.chunk)

    @property
    def measured_chunks(self) -> range:
        """The chunks that the settings of a budget are measured on: the first held-out ones, or of all."""
        first = self.fitted_chunks if self.held_out else 0
        return range(len(self.chunks))[first : first + MEASURED]

    @property
    def tokens(self) -> int:
        """Tokens in all, of the corpus."""
        return self.samples * self.seq_len

    def beginning(self) -> "Plan":
        """Plan the first sequences of the fit alone, with at least `gradient_tokens` of each corpus if it has them."""
        count = math.ceil((self.gradient_tokens or BEGINNING) / self.seq_len) * len(corpus.sources_of(self.corpus))
        count = min(count, self.samples - self.held_out)
        return replace(self, samples=count, held_out=0)

    @property
    def descends(self) -> bool:
        """True if a fit needs the model's gradients, which the hidden states of all layers are kept for."""
        return bool(self.budgets) or any(map(by_gradients, self.recipes))

    @property
    def depth(self) -> int:
        """Return how many decoded layers below it a layer may read."""
        inputs = (
            recipe.scheme(layer, role).inputs(layer, role)
            for recipe in self.recipes for layer in range(self.geometry.layers) for role in ROLES
        )  # fmt: skip
        return max((depth for one in inputs for depth in one.below), default=0)

    def to_json(self) -> dict:
        """Return the plan as JSON, without clock, host or path."""
        return asdict(self) | {"recipes": [recipe.to_json() for recipe in self.recipes]}

    @property
    def digest(self) -> str:
        """sha256 of the plan, which names its run folder."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def needs(self, files: ModelFiles) -> dict[str, int]:
        """Estimate bytes at most: on the device (layer, chunk), of two layers' activations (held), and of disk."""
        from kvq_calib.model.streamed import TILE

        width, itemsize = self.geometry.width, getattr(torch, self.dtype).itemsize
        token_rows = min(self.chunk, self.samples) * self.seq_len
        layer = max(files.layer_bytes(i) for i in range(self.geometry.layers)) * itemsize // files.dtype.itemsize
        hidden = self.tokens * files.hidden * itemsize
        decoded = self.tokens * 2 * width * 2 * len(self.recipes)
        inner, experts = files.config["intermediate_size"], files.config.get("num_experts_per_tok") or 0
        inside = min(token_rows, TILE) * 3 * inner  # an MLP at work
        if experts:  # which see a whole chunk, and are put together from tensors of single ones
            inside, layer = token_rows * experts * (2 * files.hidden + 3 * inner), 2 * layer
        chunk = (token_rows * (6 * files.hidden + 8 * width) + inside) * itemsize
        held = 2 * hidden + self.tokens * 2 * width * itemsize + (self.depth + 2) * decoded
        streams = self.beginning().tokens * files.hidden * itemsize * self.geometry.layers
        return {
            "layer": layer,
            "chunk": chunk,
            "held": held,
            "disk": held + streams * self.descends,
        }


def by_gradients(recipe: Recipe) -> bool:
    """Return whether a fit of the recipe needs the model's gradients."""
    return takes(recipe, "gradients")


def takes(recipe: Recipe, name: str) -> bool:
    """Return whether a fit of the recipe requests a statistic of this pass."""
    return any(name in one.passes for one in _requested(recipe))


def _requested(recipe: Recipe) -> Iterator[Statistic[Any]]:
    return (one for scheme in recipe.schemes for one in requested(scheme, SchemeFit.packages))


def divides(scheme: Scheme) -> bool:
    """Return whether the scheme shares the bits of its recipe."""
    return getattr(scheme.quantize, "shared", False)


def is_divided(recipe: Recipe) -> bool:
    """Return whether layers share bits of the recipe."""
    return any(map(divides, recipe.schemes))


def check(recipe: Recipe, files: ModelFiles) -> Recipe:
    """Return the recipe. Raises ValueError if the model's RoPE or the metric of its bases forbids its fit."""
    if "positions" in recipe.needs and files.rope_refusal:
        raise ValueError(
            f"{recipe.name} undoes RoPE, but of {files.id} {files.rope_refusal}; use a recipe that is fitted after "
            "RoPE and without a mean, or one that needs no fit"
        )
    if is_divided(recipe) and not by_gradients(recipe):
        raise ValueError(
            f"{recipe.name} divides its bits among layers without bases in the metric of gradients; use those of "
            "aqua-fisher-2bit, or quantize.shared=false"
        )
    return recipe


def environment(device: str, dtype: str, threads: int) -> dict:
    """Describe versions and the kind of machine, which the bytes of a run depend on."""
    described = {name: version(name) for name in ("kvq-runtime", "transformers")}
    described |= {"torch": torch.__version__, "machine": platform.machine()}
    described |= {"dtype": dtype, "threads": threads, "device": device, "cpu": torch.backends.cpu.get_cpu_capability()}
    if device == "cpu" and not product.multiplies_bfloat16():
        described["products"] = "float32"  # of bfloat16 numbers; else in bfloat16
    if device.startswith("cuda"):
        described["device"] = torch.cuda.get_device_name(device)
    return described


def set_arithmetic(plan: Plan) -> None:
    """Set this process' threads and precision to those of the plan; on a GPU, a fixed order of sums.

    Raises RuntimeError for settings of torch that change the numbers of a fit.
    """
    autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled(torch.device(plan.device).type)
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    if dtype != torch.float32 or device.type != "cpu" or autocast:
        raise RuntimeError(
            f"torch's default dtype is {dtype}, its default device {device}, "
            f"autocast is {'on' if autocast else 'off'}; a calibration needs float32, cpu and no autocast"
        )
    torch.set_num_threads(plan.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(plan.device.startswith("cuda"))
    # filling takes as long as the rest of some fits
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def make(
    files: ModelFiles,
    recipes: Sequence[Recipe],
    source: str | None = None,
    samples: int | None = None,
    seq_len: int | None = None,
    seed: int = 0,
    held_out: int | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    threads: int = 1,
    budgets: dict[str, float] | None = None,
    gradient_tokens: int | None = None,
) -> Plan:
    """Complete a plan with the model's defaults; a Hub corpus is pinned to a revision here.

    Raises ValueError for invalid settings, RuntimeError for a device that is not here or a Hub without answer.
    """
    from kvq_calib.model.streamed import default_dtype

    recipes = [check(key_bias.centred(recipe, files.key_biases), files) for recipe in recipes]
    known, device = files.entry, usable(device)
    samples = known.samples if samples is None else samples
    seq_len = min(known.seq_len, files.context) if seq_len is None else seq_len
    kind = dtype or str(default_dtype(files, torch.device(device))).removeprefix("torch.")
    held_out = samples // 8 if held_out is None else held_out
    chunk = max(1, (GPU_CHUNK_TOKENS if device.startswith("cuda") else CHUNK_TOKENS) // seq_len)
    return Plan(
        model=files.id,
        revision=files.revision,
        geometry=files.geometry,
        recipes=tuple(recipes),
        corpus=corpus.pin(source or known.corpus),
        samples=samples,
        seq_len=seq_len,
        seed=seed,
        held_out=held_out,
        chunk=chunk,
        device=device,
        dtype=kind,
        threads=threads,
        environment=environment(device, kind, threads) | {"fits": FITS},
        budgets=budgets or {},
        weights=None if files.revision else find.digest(files),
        texts=corpus.file_digests(source or known.corpus),
        gradient_tokens=gradient_tokens,
    )
