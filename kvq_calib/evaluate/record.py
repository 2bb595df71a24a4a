"""Evaluate artifacts and recipes on held-out text, and put what was found into immutable records.

    {"artifact": sha256 of the artifact, or the name of a recipe without one,
     "corpus": digest of the corpus, "protocol": {...}, "environment": {...},
     "result": {"protocols": {"full": {...}, "in-use": {...}}, "bits": {...}, "layers": [...], ...}}

For each protocol there are figures with the shares of what was decoded, or {"reason": why there are none}; which is
asked of a record by `kvq_runtime/registry/measured.py`. Texts of other kinds have figures of their own, in `texts` of
protocol and result, by name: by full encode alone where that is asked for and a recipe has one, as in use takes many
times longer.

All subjects are evaluated in one pass over the text. A registry keeps the records of what it holds:
`registry.add_evaluation(record)`. A ledger keeps finished units of the work, down to one cache on a few windows.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvq_calib.evaluate import bits, errors, full, layered, perplexity
from kvq_calib.evaluate.full import FullCache
from kvq_calib.evaluate.ledger import NOWHERE, Ledger, code
from kvq_calib.evaluate.perplexity import REFERENCE, Score
from kvq_calib.evaluate.reads import CountedCache
from kvq_calib.evaluate.subject import Subject
from kvq_calib.model.files import ModelFiles
from kvq_calib.model.streamed import Stream
from kvq_calib.run.device import free_on
from kvq_calib.run.plan import environment
from kvq_calib.text.corpus import Batch
from kvq_runtime.codec import codec
from kvq_runtime.geometry import Geometry, Sliding, Window
from kvq_runtime.recipe import Recipe
from kvq_runtime.registry.measured import FULL, IN_USE, PROTOCOLS

ERROR_WINDOWS = 4
ERROR_SUBJECTS = 16  # whose errors by layer are measured in one pass: each holds what it decoded in the layer below

Progress = Callable[[int], object]
Pairs = Mapping[str, tuple[Recipe, Mapping[str, Tensor]]]  # what is measured, by its digest


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
            raise ValueError(f"protocols={self.protocols!r}: {layered.ONLY_FULL}; use --protocol full")

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
    if protocol.by_layer is None:
        protocol = replace(protocol, by_layer=not fits(files, device, dtype))
    used = environment(device, str(dtype or _kind(files, device)).removeprefix("torch."), torch.get_num_threads())
    ledger = ledger.within(model=[files.id, files.revision, weights(files)], environment=used, code=code())
    way = {"by_layer": True} if protocol.by_layer else {}  # which has no figures in use
    own = ledger.within(protocol=_protocol(files, batch, protocol, others), **way)
    recipes = [protocol.recipe(subject.recipe, files.geometry, subject.tensors) for subject in subjects]
    digests = [_digest(subject, recipe) for subject, recipe in zip(subjects, recipes, strict=True)]
    records: dict[str, Any] = {digest: own.read(record=digest) for digest in digests}
    left = {
        digest: (recipe, subject.tensors)
        for digest, recipe, subject in zip(digests, recipes, subjects, strict=True)
        if records[digest] is None
    }
    progress(work(files, batch, len(subjects), protocol, others) - work(files, batch, len(left), protocol, others))
    for digest, result in _results(files, batch, left, protocol, device, dtype, progress, ledger, others).items():
        subject = subjects[digests.index(digest)]
        about = _protocol(files, batch, protocol, others)
        about["model"]["parameters"] = result.pop("parameters")
        records[digest] = {
            "artifact": subject.sha256 or result["recipe"],
            "corpus": batch.description["corpus_digest"],
            "protocol": about,
            "environment": used,
            "result": result,
        }
        own.write(records[digest], record=digest)
    return [records[digest] for digest in digests]


def weights(files: ModelFiles) -> str:
    """A digest of a few weights of each layer: another model may take a folder's name."""
    probes = files.fingerprint().probes
    return hashlib.sha256(b"".join(probes[name].numpy().tobytes() for name in sorted(probes))).hexdigest()


def _digest(subject: Subject, recipe: Recipe) -> str:
    return hashlib.sha256(json.dumps([subject.sha256, recipe.to_json()], sort_keys=True).encode()).hexdigest()


def _results(files, batch: Batch, pairs: Pairs, protocol: Protocol, device: str, dtype, progress: Progress,
             ledger: Ledger, others: Mapping[str, Batch]) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Measure each (recipe, tensors); return the results by digest."""
    if not pairs:
        return {}
    tokens_BT = batch.tokens_BT
    found, parameters, kind = _scores(files, tokens_BT, pairs, protocol, device, dtype, progress, ledger)
    layers = _errors(Stream(files, device, kind), tokens_BT, pairs, protocol, progress, ledger)
    results = {}
    for digest, (recipe, _) in pairs.items():
        parts = {name: _part(name, recipe, protocol, tokens_BT, scores, digest) for name, scores in found.items()}
        result = {"recipe": recipe.name, "parameters": parameters, "protocols": parts}
        result["window"] = asdict(recipe.window)
        result["bits"] = bits.costs(recipe, files.geometry, tokens_BT.shape[1], Sliding.from_config(files.config))
        result["layers"] = layers.get(digest, [])
        results[digest] = result
    for text, other in others.items():
        for name, some in _elsewhere(protocol, pairs).items():
            only = replace(protocol, protocols=(name,))
            found, *_ = _scores(files, other.tokens_BT, some, only, device, dtype, progress, ledger)
            for digest, (recipe, _) in some.items():
                part = _part(name, recipe, protocol, other.tokens_BT, found[name], digest)
                results[digest].setdefault("texts", {})[text] = {"protocols": {name: part}}
    return results


def _elsewhere(protocol: Protocol, pairs: Pairs) -> dict[str, Pairs]:
    """Return what to measure on a text of another kind, by protocol."""
    if protocol.by_layer:
        return {FULL: pairs}
    if len(set(protocol.protocols)) < len(PROTOCOLS):
        return {name: pairs for name in protocol.protocols}
    without = {digest: pair for digest, pair in pairs.items() if full.refusal(pair[0]) is not None}
    return {FULL: {digest: pair for digest, pair in pairs.items() if digest not in without}, IN_USE: without}


def _scores(files, tokens_BT: Tensor, pairs: Pairs, protocol: Protocol, device: str, dtype, progress, ledger):
    """Scores by protocol and digest, the model's parameters and its dtype; the model is gone when this returns."""
    if not pairs:
        progress(tokens_BT.numel() * len(protocol.protocols))
        return {name: {} for name in protocol.protocols}, 0, None
    length = tokens_BT.shape[1]
    if protocol.by_layer:
        stream = Stream(files, device, dtype or _kind(files, device))
        left = {digest: pair for digest, pair in pairs.items() if full.refusal(pair[0]) is None}
        beside = len(protocol.protocols) - 1  # in use is not measured
        progress(tokens_BT.numel() * (len(pairs) - len(left) + beside * (len(pairs) + 1)))
        caches = {digest: _cache(FULL, stream.blank, *pair, length) for digest, pair in left.items()}
        scored = layered.scores(stream, tokens_BT, caches, protocol.rows, progress, ledger.within(encoded=FULL))
        return (
            {name: scored if name == FULL else {} for name in PROTOCOLS if name in protocol.protocols},
            stream.blank.num_parameters(),
            stream.dtype,
        )
    model = load_model(files, device, dtype)
    found: dict[str, dict[str, Score]] = {}
    for name in (one for one in PROTOCOLS if one in protocol.protocols):
        left = {digest: pair for digest, pair in pairs.items() if name == IN_USE or full.refusal(pair[0]) is None}
        progress(tokens_BT.numel() * (len(pairs) - len(left) + (not left)))
        if not left:
            found[name] = {}
            continue
        caches = {digest: _cache(name, model, *pair, length) for digest, pair in left.items()}
        step, prompt = (protocol.step, protocol.prompt) if name == IN_USE else (length, 0)
        kept = ledger.within(encoded=name)
        found[name] = perplexity.scores(model, tokens_BT, caches, step, protocol.rows, progress, kept, prompt)
    return found, model.num_parameters(), model.dtype


def _cache(name: str, model, recipe: Recipe, tensors: Mapping[str, Tensor], length: int) -> Callable[[], CountedCache]:
    """Makes an empty cache for a protocol."""
    if name == IN_USE:
        return lambda: CountedCache(recipe, model, tensors)
    return lambda: FullCache(recipe, model, tensors, length=length)


def _errors(
    stream: Stream, tokens_BT: Tensor, pairs: Pairs, protocol: Protocol, progress: Progress, ledger: Ledger
) -> dict[str, list[dict[str, Any]]]:
    """Errors by layer, of a few subjects in a pass over the model."""
    some = tokens_BT[: protocol.error_windows]
    if not len(some):
        return {}
    unit = {"tokens": some.tolist(), "step": protocol.step, "prompt": protocol.prompt}
    found: dict[str, Any] = {digest: ledger.read(errors=digest, **unit) for digest in pairs}
    left = [digest for digest, rows in found.items() if rows is None]
    progress(_error_work(stream.files, some, len(pairs)) - _error_work(stream.files, some, len(left)))
    for start in range(0, len(left), ERROR_SUBJECTS):
        group = {digest: pairs[digest] for digest in left[start : start + ERROR_SUBJECTS]}
        for digest, rows in errors.by_layer(stream, some, group, protocol.step, progress, protocol.prompt).items():
            ledger.write(rows, errors=digest, **unit)
            found[digest] = rows
    return found


def _error_work(files: ModelFiles, some: Tensor, subjects: int) -> int:
    return some.numel() * files.geometry.layers * -(-subjects // ERROR_SUBJECTS)


def _part(
    name: str, recipe: Recipe, protocol: Protocol, tokens_BT: Tensor, scores: Mapping[str, Score], digest: str
) -> dict[str, Any]:
    """Return a record's part for one protocol: figures and shares, or the reason why there are no figures."""
    if digest not in scores:
        return {"reason": full.refusal(recipe) if name == FULL else layered.ONLY_FULL}
    score, reference, length = scores[digest], scores[REFERENCE], tokens_BT.shape[1]
    shares = score.reads.shares if score.reads is not None else None
    about: dict[str, Any] = {"reference_perplexity": reference.perplexity, "tokens": score.tokens, "decoded": shares}
    fitted = full.fit_tokens(recipe, length) if name == FULL else None
    about |= {} if fitted is None else {"fitted_on": fitted}
    if shares is not None and shares["reads"] == shares["unread"] == 0:
        return about | {"reason": _nothing(name, recipe.window, protocol.step, length)}
    relative, spread = score.against(reference)
    return about | {
        "perplexity": score.perplexity,
        "relative": relative,
        "relative_se": spread,
        "kl": score.kl,
        "top1": score.top1,
        "windows": {"loss": score.losses, "reference_loss": reference.losses, "kl": score.kls},
    }


def _nothing(name: str, window: Window, step: int, length: int) -> str:
    """The sentence for an evaluation that has encoded nothing, or nothing that was read afterwards."""
    if window.sinks >= length:
        return f"nothing was encoded: windows of {length} tokens are all sinks"
    needs = f"a block of {window.block} tokens"
    if name == IN_USE:
        needs = (f"{window.recent} recent tokens, " if window.recent else "") + f"{needs} and a step of {step} after it"
    return f"nothing was encoded: windows of {length} tokens are shorter than {needs}"


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
        "model": {"id": files.id, "revision": files.revision},
        "step": protocol.step,
        "recent": protocol.recent,
        "error_windows": min(protocol.error_windows, windows),
        **_windows(batch),
        **given,
    }


def _windows(batch: Batch) -> dict[str, Any]:
    windows, length = batch.tokens_BT.shape
    return {"windows": windows, "length": length, "text": batch.description}
