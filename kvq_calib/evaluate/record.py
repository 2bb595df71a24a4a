"""Evaluate artifacts and recipes on held-out text, and put what was found into immutable records.

    {"artifact": sha256 of the artifact, or the name of a recipe without one,
     "corpus": digest of the corpus, "protocol": {...}, "environment": {...},
     "result": {"protocols": {"full": {...}, "in-use": {...}}, "bits": {...}, "layers": [...], ...}}

For each protocol there are figures with the shares of what was decoded, or {"reason": why there are none}, which
`kvq_runtime/registry/evaluation_records.py` reads. Texts of other kinds have figures of their own, in `texts` of
protocol and result, by name: by full encode alone where that is asked for and a recipe has one, as in use takes many
times longer.

All subjects are evaluated in one pass over the text. A registry keeps the records of what it holds:
`registry.add_evaluation(record)`. A ledger keeps finished units of the work, down to one cache on a few windows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvq_calib.evaluate import errors, perplexity
from kvq_calib.evaluate.caches import CountedCache, FullCache, fit_tokens, refusal
from kvq_calib.evaluate.ledger import NOWHERE, Ledger, code, digest_of
from kvq_calib.evaluate.perplexity import REFERENCE, Score, layered
from kvq_calib.evaluate.subject import Subject, costs
from kvq_calib.model import find
from kvq_calib.model.files import ModelFiles
from kvq_calib.model.streamed import Stream
from kvq_calib.run.device import free_on
from kvq_calib.run.plan import environment
from kvq_calib.text.corpus import Batch
from kvq_runtime.codec import codec
from kvq_runtime.errors import counted
from kvq_runtime.geometry import Geometry, Window
from kvq_runtime.recipe import Recipe
from kvq_runtime.registry.evaluation_records import FULL, IN_USE, PROTOCOLS

ERROR_WINDOWS = 4
ERROR_SUBJECTS = 16  # whose errors by layer are measured in one pass: each holds what it decoded in the layer below

Progress = Callable[[int], object]
Subjects = Mapping[str, Subject]  # what is measured, by its digest


@dataclass(frozen=True)
class Protocol:
    """The protocol of perplexity and errors.

    step           tokens per forward pass, in use
    prompt         in use: tokens of the first pass, which are not scored; 0: a step, which is
    rows           windows side by side; None: as many as make 8192 tokens
    sinks          exact first tokens; None: those of each recipe, as in use
    recent         exact newest tokens in use, before a dynamic window keeps more; None: likewise
    error_windows  windows on which errors by layer are measured; 0: none
    block          tokens that are encoded together; None: those of each recipe
    protocols      "full", every token but the sinks encoded before it is read; "in-use"; or both
    by_layer       run the model one layer at a time, by full encode alone; None: where it does not fit into memory
    """

    step: int = perplexity.STEP
    rows: int | None = None
    recent: int | None = None
    sinks: int | None = None
    error_windows: int = ERROR_WINDOWS
    block: int | None = None
    protocols: tuple[str, ...] = PROTOCOLS
    prompt: int = 0
    by_layer: bool | None = None

    def __post_init__(self):
        if not self.protocols or not set(self.protocols) <= set(PROTOCOLS):
            raise ValueError(f"protocols={self.protocols!r}; use some of {PROTOCOLS}")
        if self.by_layer and FULL not in self.protocols:
            raise ValueError(f"protocols={self.protocols!r}: {perplexity.ONLY_FULL}; use --protocol full")

    def subject(self, given: Subject, geometry: Geometry) -> Subject:
        """The subject as it is measured: see `recipe`."""
        recipe = self.recipe(given.recipe, geometry, given.tensors)
        same = recipe.window.block == given.recipe.window.block  # bounds are of blocks of one size
        return replace(given, recipe=recipe, bounds=given.bounds if same else None)

    def recipe(self, recipe: Recipe, geometry: Geometry, tensors: Mapping[str, Tensor]) -> Recipe:
        """The recipe as it is measured. Raises ValueError where its fit does not allow another block."""
        given = recipe.with_exact(self.sinks, self.recent)
        if self.block is not None:
            given = replace(given, window=replace(given.window, block=self.block))
        specs = codec.all_specs(given.check(geometry), geometry) if self.block and not given.fits_prompt else {}
        if any(tuple(tensors[name].shape) != tuple(shape) for name, (shape, _) in specs.items()):
            raise ValueError(f"{recipe.name} was fitted for blocks of {recipe.window.block}; leave out --block")
        return given.check()


def load_model(files: ModelFiles, device: str = "cpu", dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The whole model, from safetensors or GGUF; in `dtype`; None: float32 on a CPU, else as stored."""
    model: Any = files.model(dtype or _kind(files, device))
    return model.to(device).eval()


def _kind(files: ModelFiles, device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else files.dtype


def setting(files: ModelFiles, device: str, dtype: torch.dtype, ledger: Ledger) -> tuple[dict[str, Any], Ledger]:
    """The environment as records have it, and the ledger of what this code finds of a model in it."""
    used = environment(device, str(dtype).removeprefix("torch."), torch.get_num_threads())
    return used, ledger.within(model=[files.id, files.revision, find.digest(files)], environment=used, code=code())


def of_subject(
    files: ModelFiles, subject: Subject | None, parts: Mapping[str, Any], length: int, corpus: str,
    about: Mapping[str, Any], used: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """A record of what was measured of a subject, or of the 16-bit model.

    parts    figures by protocol; `length`: of the texts, tokens
    corpus   digest of the text; `about`: the protocol; `used`: the environment
    """
    result: dict[str, Any] = {"recipe": subject.recipe.name if subject else REFERENCE, "protocols": parts}
    if subject is not None:
        result["window"] = asdict(subject.recipe.window)
        result["bits"] = costs(subject.recipe, files.geometry, files.sliding, length)
    artifact = subject.sha256 if subject is not None and subject.sha256 else result["recipe"]
    return {"artifact": artifact, "corpus": corpus, "protocol": about, "environment": used, "result": result}


def whole_bytes(files: ModelFiles, device: str, dtype: torch.dtype | None = None) -> int:
    """The bytes of the whole model as an evaluation loads it."""
    return files.weight_bytes * (dtype or _kind(files, device)).itemsize // files.dtype.itemsize


def fits(files: ModelFiles, device: str, dtype: torch.dtype | None = None) -> bool:
    """True if the whole model leaves a tenth of what is free on the device."""
    return whole_bytes(files, device, dtype) <= 0.9 * free_on(device)


def evaluate(
    files: ModelFiles,
    batch: Batch,
    subjects: Sequence[Subject],
    protocol: Protocol = Protocol(),
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Progress = lambda tokens: None,
    ledger: Ledger = NOWHERE,
    others: Mapping[str, Batch] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """One record per subject, in their order. `progress` gets the number of `work(...)` tokens done.

    others   texts of other kinds, by name, on which figures are measured too
    """
    length = max(one.tokens_BT.shape[1] for one in (batch, *others.values()))
    if length > files.context:
        raise ValueError(f"windows of {length} tokens; {files.id} was made for at most {files.context}: use --length")
    if not 0 <= protocol.prompt < length - 1:
        raise ValueError(f"a prompt of {protocol.prompt} tokens in windows of {length}; use 0 to {length - 2}")
    if len({subject.name for subject in subjects}) < len(subjects):
        raise ValueError(f"{[subject.name for subject in subjects]}; name each once")
    dtype = dtype or _kind(files, device)
    if protocol.by_layer is None:
        protocol = replace(protocol, by_layer=not fits(files, device, dtype))
    used, ledger = setting(files, device, dtype, ledger)
    way = {"by_layer": True} if protocol.by_layer else {}  # which has no figures in use
    own = ledger.within(protocol=_protocol(files, batch, protocol, others), **way)
    asked = [protocol.subject(subject, files.geometry) for subject in subjects]
    digests = [digest_of(one.identity) for one in asked]
    records: dict[str, Any] = {digest: own.read(record=digest) for digest in digests}
    left = {digest: one for digest, one in zip(digests, asked, strict=True) if records[digest] is None}
    progress(work(files, batch, len(subjects), protocol, others) - work(files, batch, len(left), protocol, others))
    at_work = _Work(files, protocol, device, dtype, progress, ledger)
    for digest, made in at_work.records(batch, left, others, used).items() if left else ():
        own.write(made, record=digest)
        records[digest] = made
    return [records[digest] for digest in digests]


@dataclass(frozen=True)
class _Work:
    """Everything that the measurements of an evaluation share."""

    files: ModelFiles
    protocol: Protocol
    device: str
    dtype: torch.dtype
    progress: Progress
    ledger: Ledger

    def records(
        self, batch: Batch, left: Subjects, others: Mapping[str, Batch], used: Mapping[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """Measure each subject; return the records by digest."""
        tokens_BT, files = batch.tokens_BT, self.files
        stream = Stream(files, self.device, self.dtype)
        for one in left.values():
            CountedCache(one.recipe, stream.blank, one.tensors, one.bounds)  # what it refuses, before weights are read
        found = self._scores(tokens_BT, left, self.protocol.protocols)
        layers = self._errors(stream, tokens_BT, left)
        about, corpus = _protocol(files, batch, self.protocol, others), batch.description["corpus_digest"]
        records = {}
        for digest, subject in left.items():
            parts = {name: self._part(name, subject.recipe, tokens_BT, found[name], digest) for name in found}
            records[digest] = of_subject(files, subject, parts, tokens_BT.shape[1], corpus, about, used)
            records[digest]["result"]["layers"] = layers.get(digest, [])
        for text, other in others.items():
            for name, some in self._elsewhere(left).items():
                found = self._scores(other.tokens_BT, some, (name,))
                for digest, subject in some.items():
                    part = self._part(name, subject.recipe, other.tokens_BT, found[name], digest)
                    records[digest]["result"].setdefault("texts", {})[text] = {"protocols": {name: part}}
        return records

    def _elsewhere(self, subjects: Subjects) -> dict[str, Subjects]:
        """Return what to measure on a text of another kind, by protocol."""
        if self.protocol.by_layer:
            return {FULL: subjects}
        if len(set(self.protocol.protocols)) < len(PROTOCOLS):
            return {name: subjects for name in self.protocol.protocols}
        without = {digest: one for digest, one in subjects.items() if refusal(one.recipe) is not None}
        return {FULL: {digest: one for digest, one in subjects.items() if digest not in without}, IN_USE: without}

    def _scores(self, tokens_BT: Tensor, subjects: Subjects, protocols: Sequence[str]) -> dict[str, dict[str, Score]]:
        """Scores by protocol and digest; the model is gone when this returns."""
        if not subjects:
            self.progress(tokens_BT.numel() * len(protocols))
            return {name: {} for name in protocols}
        length, protocol = tokens_BT.shape[1], self.protocol
        stream = Stream(self.files, self.device, self.dtype) if protocol.by_layer else None
        model = load_model(self.files, self.device, self.dtype) if stream is None else stream.blank
        found: dict[str, dict[str, Score]] = {}
        for name in (one for one in PROTOCOLS if one in protocols):
            left = {digest: one for digest, one in subjects.items() if self._refusal(name, one.recipe) is None}
            self.progress(tokens_BT.numel() * (len(subjects) - len(left) + (not left)))
            empty = partial(FullCache, length=length) if name == FULL else CountedCache
            caches = {
                digest: partial(empty, one.recipe, model, one.tensors, one.bounds) for digest, one in left.items()
            }
            common, kept = (protocol.rows, self.progress), self.ledger.within(encoded=name)
            if not left:
                found[name] = {}
            elif stream is not None:
                found[name] = layered(stream, tokens_BT, caches, *common, kept)
            else:
                step, prompt = (protocol.step, protocol.prompt) if name == IN_USE else (length, 0)
                found[name] = perplexity.scores(model, tokens_BT, caches, step, *common, kept, prompt)
        return found

    def _refusal(self, name: str, recipe: Recipe) -> str | None:
        """The reason why a recipe has no figures under a protocol, or None."""
        if name == FULL:
            return refusal(recipe)
        return perplexity.ONLY_FULL if self.protocol.by_layer else None

    def _errors(self, stream: Stream, tokens_BT: Tensor, subjects: Subjects) -> dict[str, list[dict[str, Any]]]:
        """Errors by layer, of a few subjects in a pass over the model."""
        step, prompt, some = self.protocol.step, self.protocol.prompt, tokens_BT[: self.protocol.error_windows]
        if not len(some):
            return {}
        unit = {"tokens": some.tolist(), "step": step, "prompt": prompt}
        found: dict[str, Any] = {digest: self.ledger.read(errors=digest, **unit) for digest in subjects}
        left = [digest for digest, rows in found.items() if rows is None]
        self.progress(_error_work(self.files, some, len(subjects)) - _error_work(self.files, some, len(left)))
        for start in range(0, len(left), ERROR_SUBJECTS):
            group = {one: (subjects[one].recipe, subjects[one].tensors) for one in left[start : start + ERROR_SUBJECTS]}
            for digest, rows in errors.by_layer(stream, some, group, step, self.progress, prompt).items():
                self.ledger.write(rows, errors=digest, **unit)
                found[digest] = rows
        return found

    def _part(
        self, name: str, recipe: Recipe, tokens_BT: Tensor, scores: Mapping[str, Score], digest: str
    ) -> dict[str, Any]:
        """Return a record's part for one protocol: figures and shares, or the reason why there are no figures."""
        if digest not in scores:
            return {"reason": self._refusal(name, recipe)}
        score, reference, length = scores[digest], scores[REFERENCE], tokens_BT.shape[1]
        shares = score.reads.shares if score.reads is not None else None
        about = {"reference_perplexity": reference.perplexity, "tokens": score.tokens, "decoded": shares}
        fitted = fit_tokens(recipe, length) if name == FULL else None
        about |= {} if fitted is None else {"fitted_on": fitted}
        if shares is not None and shares["reads"] == shares["unread"] == 0:
            return about | {"reason": _nothing(name, recipe.window, self.protocol.step, length)}
        return about | score.figures(reference)


def _error_work(files: ModelFiles, some: Tensor, subjects: int) -> int:
    return some.numel() * files.geometry.layers * -(-subjects // ERROR_SUBJECTS)


def _nothing(name: str, window: Window, step: int, length: int) -> str:
    """The sentence for an evaluation that has encoded nothing, or nothing that was read afterwards."""
    if window.sinks >= length:
        return f"nothing was encoded: windows of {counted(length, 'token')} are all sinks"
    needs = f"a block of {counted(window.block, 'token')}"
    if name == IN_USE:
        needs = (
            f"{counted(window.recent, 'recent token')}, " if window.recent else ""
        ) + f"{needs} and a step of {step} after it"
    return f"nothing was encoded: windows of {counted(length, 'token')} are shorter than {needs}"


def work(
    files: ModelFiles,
    batch: Batch,
    subjects: int,
    protocol: Protocol,
    others: Mapping[str, Batch] = MappingProxyType({}),
) -> int:
    """Return the tokens that `evaluate` reports to `progress`, in all."""
    if not subjects:
        return 0
    some = batch.tokens_BT[: protocol.error_windows]
    asked = len(set(protocol.protocols))
    elsewhere = sum(one.tokens_BT.numel() for one in others.values()) * (subjects + asked)
    return batch.tokens_BT.numel() * (subjects + 1) * asked + elsewhere + _error_work(files, some, subjects)


def _protocol(files: ModelFiles, batch: Batch, protocol: Protocol, others: Mapping[str, Batch]) -> dict[str, Any]:
    windows = len(batch.tokens_BT)
    given = {"sinks": protocol.sinks, "block": protocol.block, "prompt": protocol.prompt or None}
    given = {name: count for name, count in given.items() if count is not None}  # older records do not speak of them
    given |= {"texts": {name: _windows(one) for name, one in others.items()}} if others else {}
    return {
        "name": "perplexity",
        "version": 2,
        "protocols": [name for name in PROTOCOLS if name in protocol.protocols],
        "model": files.about,
        "step": protocol.step,
        "recent": protocol.recent,
        "error_windows": min(protocol.error_windows, windows),
        **_windows(batch),
        **given,
    }


def _windows(batch: Batch) -> dict[str, Any]:
    windows, length = batch.tokens_BT.shape
    return {"windows": windows, "length": length, "text": batch.description}
