"""Evaluate artifacts and recipes on held-out text, and put what was found into immutable records.

    {"artifact": sha256 of the artifact, or the name of a recipe without one,
     "corpus": digest of the corpus, "protocol": {...}, "environment": {...}, "result": {...}}

All subjects are evaluated in one pass over the text. A registry keeps the records of what it holds:
`registry.add_evaluation(record)`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvq_calib.capture import Stream
from kvq_calib.corpus import Batch
from kvq_calib.evaluate import bits, errors, perplexity
from kvq_calib.evaluate.perplexity import REFERENCE, Score
from kvq_calib.plan import environment
from kvq_calib.weights import ModelFiles
from kvq_runtime import fingerprint, registry
from kvq_runtime.artifact import Artifact, load
from kvq_runtime.hf import KVQCache
from kvq_runtime.recipe import Recipe, presets

ERROR_WINDOWS = 4


@dataclass(frozen=True)
class Subject:
    """What is evaluated.

    name       as the user gave it
    sha256     of the artifact; None for a recipe that needs none
    published  whether a registry holds it, and so keeps its records
    """

    name: str
    recipe: Recipe
    tensors: Mapping[str, Tensor]
    sha256: str | None = None
    published: bool = False

    @staticmethod
    def of(artifact: Artifact, sha256: str, name: str | None = None, published: bool = True) -> "Subject":
        """An artifact at hand."""
        return Subject(name or artifact.recipe.name, artifact.recipe, artifact.tensors, sha256, published)


@dataclass(frozen=True)
class Protocol:
    """How perplexity and errors are measured.

    step           tokens per forward pass
    rows           windows side by side; None: as many as make 8192 tokens
    recent         exact newest tokens; None: what each recipe says, as in use
    error_windows  windows on which errors by layer are measured; 0: none
    """

    step: int = perplexity.STEP
    rows: int | None = None
    recent: int | None = None
    error_windows: int = ERROR_WINDOWS


def find(given: str, files: ModelFiles, registry_url: str | None = None) -> Subject:
    """A recipe that needs no calibration, by name; else an artifact: a reference or a path.

    Raises ValueError for a recipe that must be fitted and is in no registry, ArtifactError for another model's.
    """
    known = presets().get(given)
    if known is not None and not known.fitted:
        return Subject(given, known, {})
    try:
        found = registry.resolve(given, registry_url)
    except registry.NotFound as error:
        if known is None:
            raise
        raise ValueError(f"recipe {given} has fitted stages, and no artifact has that name: {error}") from None
    artifact = load(found.path, found.sha256, found.size)
    fingerprint.compare(artifact.fingerprint, files.fingerprint())
    return Subject.of(artifact, found.sha256, given, published=bool(found.version))


def load_model(files: ModelFiles, device: str = "cpu", dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The whole model, from safetensors only; float32 on a CPU, else as stored, unless `dtype` says otherwise."""
    dtype = dtype or (torch.float32 if device == "cpu" else files.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(
        files.path, dtype=dtype, use_safetensors=True, trust_remote_code=False, local_files_only=True
    )
    return model.to(device).eval()


def evaluate(
    files: ModelFiles,
    batch: Batch,
    subjects: Sequence[Subject],
    protocol: Protocol = Protocol(),
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Callable[[int], object] = lambda tokens: None,
) -> list[dict[str, Any]]:
    """One record per subject, in their order. `progress` hears how many of `work(...)` tokens were done."""
    length = batch.tokens_BT.shape[1]
    if length > files.context:
        raise ValueError(f"windows of {length} tokens; {files.id} was made for at most {files.context}: use --length")
    recipes = {subject.name: with_recent(subject.recipe, protocol.recent) for subject in subjects}
    if len(recipes) < len(subjects):
        raise ValueError(f"{[subject.name for subject in subjects]}; name each once")
    pairs = {subject.name: (recipes[subject.name], subject.tensors) for subject in subjects}
    found, parameters, kind = _scores(files, batch.tokens_BT, pairs, protocol, device, dtype, progress)
    layers: dict[str, list] = {}
    if protocol.error_windows:
        some = batch.tokens_BT[: protocol.error_windows]
        layers = errors.by_layer(Stream(files, device, kind), some, pairs, protocol.step, progress)
    shared = {
        "corpus": batch.description["corpus_digest"],
        "protocol": _protocol(files, batch, protocol, parameters),
        "environment": environment(device, str(kind).removeprefix("torch."), torch.get_num_threads()),
    }
    records = []
    for subject in subjects:
        recipe, tensors = pairs[subject.name]
        result = {"recipe": recipe.name} | _measures(found[subject.name], found[REFERENCE])
        result["bits"] = bits.costs(recipe, files.geometry, length, tensors, device)
        result["layers"] = layers.get(subject.name, [])
        records.append({"artifact": subject.sha256 or recipe.name, **shared, "result": result})
    return records


def _scores(files, tokens_BT: Tensor, pairs, protocol: Protocol, device: str, dtype, progress):
    """Scores by name, the model's parameters and its dtype; the model itself is gone when this returns."""
    model = load_model(files, device, dtype)
    caches = {name: lambda pair=pair: KVQCache(pair[0], model, pair[1]) for name, pair in pairs.items()}
    found = perplexity.scores(model, tokens_BT, caches, protocol.step, protocol.rows, progress)
    return found, model.num_parameters(), model.dtype


def _measures(score: Score, reference: Score) -> dict[str, Any]:
    relative, spread = score.against(reference)
    return {
        "perplexity": score.perplexity,
        "reference_perplexity": reference.perplexity,
        "relative": relative,
        "relative_se": spread,
        "kl": score.kl,
        "top1": score.top1,
        "tokens": score.tokens,
    }


def work(files: ModelFiles, batch: Batch, subjects: int, protocol: Protocol) -> int:
    """How many tokens `evaluate` reports to `progress`, in all."""
    windows, length = batch.tokens_BT.shape
    return length * (windows * (subjects + 1) + min(protocol.error_windows, windows) * files.geometry.layers)


def with_recent(recipe: Recipe, recent: int | None) -> Recipe:
    """The recipe with another recent window; None: itself."""
    if recent is None:
        return recipe

    def changed(pair):
        return tuple(replace(side, recent=recent) for side in pair)

    key, value = changed((recipe.key, recipe.value))
    return replace(recipe, key=key, value=value, layers={n: changed(pair) for n, pair in recipe.layers.items()}).check()


def _protocol(files: ModelFiles, batch: Batch, protocol: Protocol, parameters: int) -> dict[str, Any]:
    windows, length = batch.tokens_BT.shape
    return {
        "name": "perplexity",
        "version": 1,
        "model": {"id": files.id, "revision": files.revision, "parameters": parameters},
        "step": protocol.step,
        "windows": windows,
        "length": length,
        "recent": protocol.recent,
        "error_windows": min(protocol.error_windows, windows),
        "text": batch.description,
    }
