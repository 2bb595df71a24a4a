"""Evaluate artifacts and recipes on held-out text; return immutable records.

    {"artifact": sha256 of the artifact, or the name of a recipe without one,
     "corpus": digest of the corpus, "protocol": {...}, "environment": {...},
     "result": {"protocols": {"full": {...}, "in-use": {...}}, "bits": {...}, ...}}

Each protocol has figures with the share of decoded reads, or {"reason": why there are none}.

All candidates are evaluated in one pass over the text. A registry keeps the records of what it holds:
`registry.add_evaluation(record)`. `saved_results.py` keeps the score of each cache on a few windows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvq_calib.evaluate import perplexity
from kvq_calib.evaluate.caches import FullCache, fit_tokens, in_use, refusal
from kvq_calib.evaluate.candidate import Candidate, costs
from kvq_calib.evaluate.perplexity import REFERENCE, Score, layered
from kvq_calib.evaluate.saved_results import NOWHERE, SavedResults, code, digest_of
from kvq_calib.model import find
from kvq_calib.model.files import ModelFiles
from kvq_calib.model.streamed import Stream
from kvq_calib.run.device import free_on
from kvq_calib.run.plan import environment
from kvq_calib.text.corpus import Batch
from kvq_runtime.errors import counted
from kvq_runtime.geometry import Window
from kvq_runtime.recipe import Recipe
from kvq_runtime.registry.evaluation_records import FULL, IN_USE, PROTOCOLS

Progress = Callable[[int], object]
Candidates = Mapping[str, Candidate]  # by their digest


@dataclass(frozen=True)
class Protocol:
    """The protocol of an evaluation.

    step       tokens per forward pass, in use
    recent     exact newest tokens in use, before a dynamic window keeps more; None: those of each recipe
    sinks      exact first tokens; None: likewise
    protocols  "full", every token but the sinks encoded before it is read; "in-use"; or both. None: full, and in use if
               a recipe has no full encode
    precise    stop when the windows so far are enough (`perplexity.precise`); without it all windows are measured
    by_layer   run the model one layer at a time, by full encode alone; None: if it does not fit into memory
    """

    step: int = perplexity.STEP
    recent: int | None = None
    sinks: int | None = None
    protocols: tuple[str, ...] | None = None
    precise: bool = False
    by_layer: bool | None = None

    def __post_init__(self):
        names = (FULL,) if self.protocols is None else self.protocols
        if not names or not set(names) <= set(PROTOCOLS):
            raise ValueError(f"protocols={self.protocols!r}; use some of {PROTOCOLS}, or None")
        if self.by_layer and FULL not in names:
            raise ValueError(f"protocols={self.protocols!r}: {perplexity.ONLY_FULL}; use --protocol full")

    def candidate(self, given: Candidate) -> Candidate:
        """Return the candidate with as many exact tokens as it is measured with."""
        return replace(given, recipe=given.recipe.with_exact(self.sinks, self.recent).check())

    def of(self, recipes: Sequence[Recipe]) -> list[str]:
        """Return the names of the protocols that recipes are measured under."""
        chosen = self.protocols or ((FULL, IN_USE) if any(map(refusal, recipes)) else (FULL,))
        return [name for name in PROTOCOLS if name in chosen]

    def to_json(self, files: ModelFiles, batch: Batch, protocols: Sequence[str]) -> dict[str, Any]:
        """Describe protocol, model and text as in records."""
        windows, length = batch.tokens_BT.shape
        return {
            "name": "perplexity",
            "version": 2,
            "protocols": protocols,
            "model": files.about,
            "step": self.step,
            "recent": self.recent,
            "windows": windows,
            "length": length,
            "text": batch.description,
            **({} if self.sinks is None else {"sinks": self.sinks}),
        }


def load_model(files: ModelFiles, device: str = "cpu", dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load the whole model, in `dtype`; None: float32 on a CPU, else as stored."""
    model: Any = files.model(dtype or default_dtype(files, device))
    return model.to(device).eval()


def default_dtype(files: ModelFiles, device: str) -> torch.dtype:
    """Return the precision that a model is measured in: float32 on a CPU, else as stored."""
    return torch.float32 if device == "cpu" else files.dtype


def whole_bytes(files: ModelFiles, device: str, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of the whole model as an evaluation loads it."""
    return files.weight_bytes * (dtype or default_dtype(files, device)).itemsize // files.dtype.itemsize


def fits(files: ModelFiles, device: str, dtype: torch.dtype | None = None) -> bool:
    """Return whether the whole model leaves a tenth of the device's free memory."""
    return whole_bytes(files, device, dtype) <= 0.9 * free_on(device)


def setting(
    files: ModelFiles, device: str, dtype: torch.dtype, saved: SavedResults
) -> tuple[dict[str, Any], SavedResults]:
    """Return the environment for records, and the results of this code with a model in it."""
    used = environment(device, str(dtype).removeprefix("torch."), torch.get_num_threads())
    return used, saved.within(model=[files.id, files.revision, find.digest(files)], environment=used, code=code())


def of_candidate(
    files: ModelFiles, candidate: Candidate | None, parts: Mapping[str, Any], length: int, corpus: str,
    protocol: Mapping[str, Any], used: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """Return a record of a candidate, or without one of the 16-bit model.

    parts    figures by protocol; `length`: of the texts, tokens
    corpus   digest of the text; `used`: the environment
    """
    result: dict[str, Any] = {"recipe": candidate.recipe.name if candidate else REFERENCE, "protocols": parts}
    if candidate is not None:
        result["window"] = asdict(candidate.recipe.window)
        result["bits"] = costs(candidate.recipe, files.geometry, files.sliding, length)
    artifact = candidate.sha256 if candidate is not None and candidate.sha256 else result["recipe"]
    return {"artifact": artifact, "corpus": corpus, "protocol": protocol, "environment": used, "result": result}


def evaluate(
    files: ModelFiles,
    batch: Batch,
    candidates: Sequence[Candidate],
    protocol: Protocol = Protocol(),
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Progress = lambda tokens: None,
    saved: SavedResults = NOWHERE,
) -> list[dict[str, Any]]:
    """Return one record per candidate, in their order. `progress` gets the number of `work(...)` tokens done."""
    length = batch.tokens_BT.shape[1]
    if length > files.context:
        raise ValueError(f"windows of {length} tokens; {files.id} was made for at most {files.context}: use --length")
    if len({candidate.name for candidate in candidates}) < len(candidates):
        raise ValueError(f"{[candidate.name for candidate in candidates]}; name each once")
    dtype = dtype or default_dtype(files, device)
    if protocol.by_layer is None:
        protocol = replace(protocol, by_layer=not fits(files, device, dtype))
    if not candidates:
        return []
    used, saved = setting(files, device, dtype, saved)
    measured = [protocol.candidate(candidate) for candidate in candidates]
    by_digest = {digest_of(candidate.identity): candidate for candidate in measured}
    records = _Work(files, protocol, device, dtype, progress, saved).records(batch, by_digest, used)
    return [records[digest_of(candidate.identity)] for candidate in measured]


@dataclass(frozen=True)
class _Work:
    """Settings and text that all measurements of an evaluation share."""

    files: ModelFiles
    protocol: Protocol
    device: str
    dtype: torch.dtype
    progress: Progress
    saved: SavedResults

    def records(self, batch: Batch, candidates: Candidates, used: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Measure each candidate; return the records by digest."""
        tokens_BT, files, protocol = batch.tokens_BT, self.files, self.protocol
        blank = files.without_memory(self.dtype)
        for candidate in candidates.values():  # unsuitable recipes are refused before weights are read
            in_use(candidate.recipe, blank, candidate.tensors, candidate.bounds)
        scores, corpus = self._scores(tokens_BT, candidates), batch.description["corpus_digest"]
        records = {}
        for digest, candidate in candidates.items():
            names = protocol.of([candidate.recipe])
            parts = {name: self._part(name, candidate.recipe, tokens_BT, scores[name], digest) for name in names}
            counts = [len(scores[name][digest].losses) for name in names if digest in scores[name]]
            about = protocol.to_json(files, batch.first(min(counts, default=len(tokens_BT))), names)
            records[digest] = of_candidate(files, candidate, parts, tokens_BT.shape[1], corpus, about, used)
        return records

    def _scores(self, tokens_BT: Tensor, candidates: Candidates) -> dict[str, dict[str, Score]]:
        """Return scores by protocol and digest; the model is gone when this returns."""
        protocol, length = self.protocol, tokens_BT.shape[1]
        protocols = protocol.of([one.recipe for one in candidates.values()])
        stream = Stream(self.files, self.device, self.dtype) if protocol.by_layer else None
        model = load_model(self.files, self.device, self.dtype) if stream is None else stream.blank
        scores: dict[str, dict[str, Score]] = {name: {} for name in protocols}
        enough = (perplexity.precise,) if protocol.precise else ()
        for name in scores:
            asked = {digest: one for digest, one in candidates.items() if name in protocol.of([one.recipe])}
            suited = {digest: one for digest, one in asked.items() if self._refusal(name, one.recipe) is None}
            self.progress(tokens_BT.numel() * (len(candidates) - len(suited) + (not suited)))
            if not suited:
                continue
            make: Any = partial(FullCache, length=length) if name == FULL else in_use
            caches = {
                digest: partial(make, one.recipe, model, one.tensors, one.bounds) for digest, one in suited.items()
            }
            common = (self.progress, self.saved.within(protocol=name))
            if stream is not None:
                scores[name] = layered(stream, tokens_BT, caches, *common)
            else:
                step = protocol.step if name == IN_USE else length
                scores[name] = perplexity.scores(model, tokens_BT, caches, step, *common, *enough)
        return scores

    def _refusal(self, name: str, recipe: Recipe) -> str | None:
        """Return the reason why a recipe has no figures under a protocol, or None."""
        if name == FULL:
            return refusal(recipe)
        return perplexity.ONLY_FULL if self.protocol.by_layer else None

    def _part(
        self, name: str, recipe: Recipe, tokens_BT: Tensor, scores: Mapping[str, Score], digest: str
    ) -> dict[str, Any]:
        """Return a record's part for one protocol: figures and shares, or the reason for having no figures."""
        if digest not in scores:
            return {"reason": self._refusal(name, recipe)}
        score, reference, length = scores[digest], scores[REFERENCE], tokens_BT.shape[1]
        shares = score.reads.shares if score.reads is not None else None
        part = {"reference_perplexity": reference.perplexity, "tokens": score.tokens, "decoded": shares}
        fitted = fit_tokens(recipe, length) if name == FULL else None
        part |= {} if fitted is None else {"fitted_on": fitted}
        if shares is not None and shares["reads"] == shares["unread"] == 0:
            return part | {"reason": _nothing_encoded(name, recipe.window, self.protocol.step, length)}
        return part | score.figures(reference)


def _nothing_encoded(name: str, window: Window, step: int, length: int) -> str:
    """Explain why an evaluation encoded nothing, or nothing that was read afterwards."""
    if window.sinks >= length:
        return f"nothing was encoded: windows of {counted(length, 'token')} are all sinks"
    needs = f"a block of {counted(window.block, 'token')}"
    if name == IN_USE:
        recent = f"{counted(window.recent, 'recent token')}, " if window.recent else ""
        needs = f"{recent}{needs} and a step of {step} after it"
    return f"nothing was encoded: windows of {counted(length, 'token')} are shorter than {needs}"


def work(batch: Batch, candidates: Sequence[Candidate], protocol: Protocol) -> int:
    """Return the tokens that `evaluate` reports to `progress`, in all."""
    passes = (len(candidates) + 1) * len(protocol.of([one.recipe for one in candidates])) if candidates else 0
    return batch.tokens_BT.numel() * passes
