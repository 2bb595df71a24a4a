"""Ask a model through the compressed cache: needle tasks, answered greedily, and log-likelihoods of continuations.

The text of a needle task goes into the cache in one pass, which reads exact keys and values, as a prompt does. Its
question comes in a second pass, and the answer token by token, greedily: they read the cache. If nothing that was read
had been encoded, a reason replaces the figures.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from kvq_calib.evaluate import needles
from kvq_calib.evaluate.caches import attending, encoded_share, in_use
from kvq_calib.evaluate.candidate import Candidate
from kvq_calib.evaluate.needles import STEPS, Haystack
from kvq_calib.evaluate.perplexity import REFERENCE, mean_and_error
from kvq_calib.evaluate.record import load_model, of_candidate, setting
from kvq_calib.evaluate.saved_results import NOWHERE, SavedResults, digest_of
from kvq_calib.model.files import ModelFiles
from kvq_calib.text import corpus, tokenizer
from kvq_runtime.hf import KVQCache
from kvq_runtime.hf.model import CACHE
from kvq_runtime.registry.evaluation_records import IN_USE

Progress = Callable[[int], object]
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
LENGTHS = (1024, 4096)


@dataclass(frozen=True)
class Case:
    """A text and its question as tokens, and the score of the answer's tokens."""

    context: tuple[int, ...]
    question: tuple[int, ...]
    score: Callable[[Sequence[int]], float]


@dataclass(frozen=True)
class Plan:
    """Questions of an evaluation: `samples` texts of each task, length and depth."""

    tasks: tuple[str, ...]
    haystack: Haystack
    lengths: tuple[int, ...] = LENGTHS
    depths: tuple[float, ...] = DEPTHS
    samples: int = 5
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the plan as records have it, with name and digest of the haystack."""
        settings = {setting.name: getattr(self, setting.name) for setting in fields(self)}
        return settings | {"haystack": {"name": self.haystack.name, "digest": self.haystack.digest}}

    def __post_init__(self):
        if not self.tasks or not self.lengths or not self.depths or self.samples < 1:
            raise ValueError(f"{self}; give at least one task, length, depth and text of each")
        for name in ("tasks", "lengths", "depths"):  # a repeated one would count every text twice
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name}={values}; name each once")
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"depths={self.depths}; use 0 to 1")


def evaluate(
    files: ModelFiles,
    candidates: Sequence[Candidate],
    plan: Plan,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Progress = lambda tokens: None,
    saved: SavedResults = NOWHERE,
) -> list[dict[str, Any]]:
    """Return one record for the 16-bit model, then one per candidate. `progress` gets `work(...)` tokens in all.

    Raises ValueError for texts longer than the model was made for, or shorter than their task needs.
    """
    if max(plan.lengths) > files.context:
        raise ValueError(f"texts of {max(plan.lengths)} tokens; {files.id} was made for at most {files.context}")
    cases = {(length, task): make_cases(files, task, length, plan) for length in plan.lengths for task in plan.tasks}
    model = load_model(files, device, dtype)
    used, saved = setting(files, device, model.dtype, saved)
    about = {"name": "tasks", "version": 1, "protocols": [IN_USE], "model": files.about} | plan.to_json()
    digest = digest_of(plan.to_json())
    records = list[dict[str, Any]]()
    for candidate in (None, *candidates):
        unit = {"plan": digest, "tasks": REFERENCE if candidate is None else candidate.identity}
        part = _part(model, candidate, plan, cases, progress, saved.within(**unit))
        if records and "reason" not in part:
            part["reference"] = records[0]["result"]["protocols"][IN_USE]["tasks"]
        records.append(of_candidate(files, candidate, {IN_USE: part}, max(plan.lengths), digest, about, used))
    return records


def work(plan: Plan, candidates: int) -> int:
    """Return the tokens that `evaluate` reports to `progress`, in all."""
    return len(plan.tasks) * len(plan.depths) * plan.samples * sum(plan.lengths) * (1 + candidates)


def make_cases(files: ModelFiles, task: str, length: int, plan: Plan) -> list[tuple[float, Case]]:
    """Make (depth, case) of a task at a length; no two texts of a plan share a seed."""
    first = plan.seed * len(plan.depths) * plan.samples
    depths = [depth for depth in plan.depths for _ in range(plan.samples)]
    return [(depth, make(files, task, first + number, length, depth, plan.haystack))
            for number, depth in enumerate(depths)]  # fmt: skip


def _part(
    model: PreTrainedModel, candidate: Candidate | None, plan: Plan,
    cases: Mapping[tuple[int, str], Sequence[tuple[float, Case]]], progress: Progress, saved: SavedResults,
) -> dict[str, Any]:  # fmt: skip
    """Return the scores of one recipe, or the reason for having none."""
    scores: dict[str, list[float]] = {task: [] for task in plan.tasks}
    cells: list[dict[str, Any]] = []
    shares: dict[str, float] = {}
    for (length, task), own in cases.items():
        answered = saved.kept(partial(_scores, model, candidate, [case for _, case in own]), task=task, length=length)
        progress(length * len(own))
        share, scored = answered["encoded"], answered["scores"]
        if share == 0:
            return {"reason": f"nothing was encoded: texts of {length} tokens are shorter than the recent tokens and a "
                    "block, or all sinks; use longer ones"}  # fmt: skip
        for depth in plan.depths:
            here = [score for (at, _), score in zip(own, scored, strict=True) if at == depth]
            cells.append({"task": task, "length": length, "depth": depth} | summary(here))
        scores[task] += scored
        if share is not None:
            shares[str(length)] = min(shares.get(str(length), 1.0), share)
    tasks = {task: summary(own) for task, own in scores.items()}
    return {"tasks": tasks, "cells": cells} | ({"decoded": shares} if candidate else {})


def _scores(model: PreTrainedModel, candidate: Candidate | None, cases: Sequence[Case]) -> dict[str, Any]:
    """Return the score of each text, and the least share of a text that was encoded; None for the 16-bit model."""
    scores, shares = list[float](), list[float]()
    for case in cases:
        if candidate is None:
            cache: Cache = DynamicCache(config=model.config)
        else:
            cache = in_use(candidate.recipe, model, candidate.tensors)
        scores.append(case.score(answer(model, cache, case)))
        shares += [encoded_share(cache)] if isinstance(cache, KVQCache) else []
    return {"scores": scores, "encoded": min(shares, default=None)}


def summary(scores: Sequence[float]) -> dict[str, Any]:
    """Return the mean of scores, its standard error over texts (None for one), and their number."""
    mean, error = mean_and_error(scores)
    return {"accuracy": mean, "se": error, "texts": len(scores)}


@torch.inference_mode()
def answer(model: PreTrainedModel, cache: Cache, case: Case) -> list[int]:
    """Put a text into a cache, and answer its question greedily; return the tokens of the answer."""

    def forward(*ids: int) -> int:
        with attending(model, cache):
            ids_BT = torch.tensor([ids], device=model.device)
            logits = model(ids_BT, **{CACHE: cache}, use_cache=True, logits_to_keep=1).logits
        return int(logits[0, -1].argmax())

    forward(*case.context)
    tokens = [forward(*case.question)]
    while len(tokens) < STEPS:
        tokens.append(forward(tokens[-1]))
    return tokens


def make(files: ModelFiles, task: str, seed: int, length: int, depth: float, haystack: Haystack) -> Case:
    """Make one text of at most `length` tokens, its answer included."""
    coder = _tokenizer(files.path)
    prompt = needles.longest(task, seed, length, depth, haystack, lambda text: len(coder.encode(text).ids))
    whole = coder.encode(prompt.context + prompt.question + prompt.begun)
    # the question begins with the token that its first character is in: the prompt is tokenized as one text
    cut = next(place for place, (_, end) in enumerate(whole.offsets) if end > len(prompt.context))
    return Case(tuple(whole.ids[:cut]), tuple(whole.ids[cut:]), lambda ids: prompt.score(coder.decode(list(ids))))


def haystack(source: str) -> Haystack:
    """Return the documents of a corpus, as `--corpus` takes it, as a haystack."""
    loaded = corpus.load(corpus.pin(source))
    return Haystack.of_texts(loaded.name, loaded.digest, loaded.texts)


@lru_cache(maxsize=4)
def _tokenizer(folder: Path) -> Tokenizer:
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} has no tokenizer.json; give the folder of a whole model")
    return tokenizer.load(folder)[0]


# ---- continuations ---------------------------------------------------------------------------------------------------

Continuation = tuple[int, ...]  # the last tokens of a row and the one after it


@torch.inference_mode()
def loglikelihoods(
    model: PreTrainedModel, cache: Cache, row: Sequence[int], continuations: Sequence[Continuation], step: int
) -> tuple[list[tuple[float, bool]], float]:
    """Score continuations through a cache.

    Returns, for each continuation, the sum of log q(token), in nats, and whether each token is the likeliest; then the
    share of the row's tokens that were encoded when its last token was read.

    The row arrives in steps: in one pass tokens would read exact keys, and the answer to a question of one token would
    test nothing.

    row    token ids of context and continuations without their last tokens, at least one
    step   tokens a pass
    """
    row_T = torch.tensor(row, device=model.device)
    sums, greedy, share = [0.0] * len(continuations), [True] * len(continuations), 0.0
    for start in range(0, len(row), step):
        stop = min(start + step, len(row))
        share = encoded_share(cache) if isinstance(cache, KVQCache) else 0.0
        with attending(model, cache):
            logits_TV = model(row_T[None, start:stop], **{CACHE: cache}, use_cache=True).logits[0]
        for number, tokens in enumerate(continuations):
            first = len(row) - len(tokens)  # the place that predicts the first of them
            begin = max(first, start)
            if begin >= stop:
                continue
            logq_TV = logits_TV[begin - start :].double().log_softmax(-1)
            target_T = torch.tensor(tokens[begin - first : stop - first], device=model.device)
            sums[number] += float(logq_TV.gather(-1, target_T[:, None]).sum())
            greedy[number] &= bool((logq_TV.argmax(-1) == target_T).all())
    return list(zip(sums, greedy, strict=True)), share
