"""Measure needle tasks through the compressed cache: right answers by task, length and depth.

A text goes into the cache in one pass, which reads exact keys and values, as a prompt does. Its question comes in a
second pass, and the answer token by token, greedily: they read what the cache gives back. Answers through which nothing
encoded was read give a reason in place of figures.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from kvq_calib.evaluate.caches import CountedCache, Reads, attending, nothing
from kvq_calib.evaluate.ledger import NOWHERE, Ledger, digest_of
from kvq_calib.evaluate.perplexity import REFERENCE, ROW_TOKENS, mean_and_error
from kvq_calib.evaluate.record import load_model, of_subject, setting
from kvq_calib.evaluate.subject import Subject
from kvq_calib.model.files import ModelFiles
from kvq_calib.tasks import needles
from kvq_calib.tasks.needles import STEPS, Haystack
from kvq_calib.text import corpus, tokenizer
from kvq_runtime.hf.model import CACHE
from kvq_runtime.registry.evaluation_records import IN_USE

Progress = Callable[[int], object]
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
LENGTHS = (1024, 4096)


@dataclass(frozen=True)
class Case:
    """A text and its question as tokens, and the score of the tokens that answer it."""

    context: tuple[int, ...]
    asked: tuple[int, ...]
    score: Callable[[Sequence[int]], float]


@dataclass(frozen=True)
class Plan:
    """The questions of an evaluation: `samples` texts of each task, length and depth.

    chat   text and question are a user's turn, in the model's own form
    """

    tasks: tuple[str, ...]
    haystack: Haystack
    lengths: tuple[int, ...] = LENGTHS
    depths: tuple[float, ...] = DEPTHS
    samples: int = 5
    seed: int = 0
    chat: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the plan as records have it: of a haystack name and digest."""
        given = {setting.name: getattr(self, setting.name) for setting in fields(self)}
        return given | {"haystack": {"name": self.haystack.name, "digest": self.haystack.digest}}

    def __post_init__(self):
        if not self.tasks or not self.lengths or not self.depths or self.samples < 1:
            raise ValueError(f"{self}; give at least one task, length, depth and text of each")
        for name in ("tasks", "lengths", "depths"):  # a repeated one would count every text twice
            given = getattr(self, name)
            if len(set(given)) < len(given):
                raise ValueError(f"{name}={given}; name each once")
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"depths={self.depths}; use 0 to 1")


def evaluate(
    files: ModelFiles,
    subjects: Sequence[Subject],
    plan: Plan,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Progress = lambda tokens: None,
    ledger: Ledger = NOWHERE,
) -> list[dict[str, Any]]:
    """Return one record for the 16-bit model, then one per subject. `progress` gets `work(...)` tokens in all.

    Raises ValueError for texts longer than the model was made for, or shorter than their task needs.
    """
    if max(plan.lengths) > files.context:
        raise ValueError(f"texts of {max(plan.lengths)} tokens; {files.id} was made for at most {files.context}")
    texts = {(length, task): cases(files, task, length, plan) for length in plan.lengths for task in plan.tasks}
    model = load_model(files, device, dtype)
    used, ledger = setting(files, device, model.dtype, ledger)
    about = {"name": "tasks", "version": 1, "protocols": [IN_USE], "model": files.about} | plan.to_json()
    digest = digest_of(plan.to_json())  # of all that the texts follow from, but for the tokenizer
    found = list[dict[str, Any]]()
    for subject in (None, *subjects):
        unit = {"plan": plan.to_json(), "tasks": REFERENCE if subject is None else subject.identity}
        part = _part(model, subject, plan, texts, progress, ledger.within(**unit))
        if found and "reason" not in part:
            part["reference"] = found[0]["result"]["protocols"][IN_USE]["tasks"]
        found.append(of_subject(files, subject, {IN_USE: part}, max(plan.lengths), digest, about, used))
    return found


def work(plan: Plan, subjects: int) -> int:
    """Return the tokens that `evaluate` reports to `progress`, in all."""
    return len(plan.tasks) * len(plan.depths) * plan.samples * sum(plan.lengths) * (1 + subjects)


def cases(files: ModelFiles, task: str, length: int, plan: Plan) -> list[tuple[float, Case]]:
    """Return (depth, text) of a task at a length; no two texts of a plan have a seed in common."""
    found = []
    for place, depth in enumerate(plan.depths):
        for number in range(plan.samples):
            seed = (plan.seed * len(plan.depths) + place) * plan.samples + number
            found.append((depth, make(files, task, seed, length, depth, plan.haystack, plan.chat)))
    return found


def _part(
    model: PreTrainedModel, subject: Subject | None, plan: Plan,
    texts: Mapping[tuple[int, str], Sequence[tuple[float, Case]]], progress: Progress, ledger: Ledger,
) -> dict[str, Any]:  # fmt: skip
    """Return the scores of one recipe, or the reason why there are none."""
    scores: dict[str, list[float]] = {task: [] for task in plan.tasks}
    cells: list[dict[str, Any]] = []
    shares: dict[str, float] = {}
    for (length, task), some in texts.items():
        kept = ledger.kept(lambda some=some, length=length: _scores(model, subject, some, length),
                           task=task, length=length)  # fmt: skip
        progress(length * len(some))
        if "reason" in kept:
            return {"reason": kept["reason"]}
        for depth in plan.depths:
            found = [score for (at, _), score in zip(some, kept["scores"], strict=True) if at == depth]
            scores[task] += found
            cells.append({"task": task, "length": length, "depth": depth} | summary(found))
        if kept["decoded"] is not None:
            shares[str(length)] = min(shares.get(str(length), 1.0), kept["decoded"])
    tasks = {task: summary(found) for task, found in scores.items()}
    return {"tasks": tasks, "cells": cells} | ({"decoded": shares} if subject else {})


@torch.inference_mode()
def _scores(
    model: PreTrainedModel, subject: Subject | None, texts: Sequence[tuple[float, Case]], length: int
) -> dict[str, Any]:
    """Return the score of each text of a task and length, and the least share of a text that was decoded."""
    found, shares, rows = list[float](), list[float](), max(1, ROW_TOKENS // length)
    for _, group in groupby((case for _, case in texts), key=lambda case: (len(case.context), len(case.asked))):
        alike = list(group)  # of one shape, which go through the model side by side
        for start in range(0, len(alike), rows):
            some = alike[start : start + rows]
            if subject is None:
                answers = stepped(model, DynamicCache(config=model.config), some)
            else:
                cache = CountedCache(subject.recipe, model, subject.tensors)
                answers = stepped(model, cache, some)
                shares.append(cache.read_share)
                if shares[-1] <= 0:
                    return {"reason": nothing(subject.recipe, length)}
            found += [case.score(answer) for case, answer in zip(some, answers, strict=True)]
    return {"scores": found, "decoded": min(shares, default=None)}


def summary(scores: Sequence[float]) -> dict[str, Any]:
    """Return the mean of scores, its standard error over texts (None of one), and how many they are."""
    mean, error = mean_and_error(scores)
    return {"accuracy": mean, "se": error, "texts": len(scores)}


def stepped(model: PreTrainedModel, cache: Cache, some: Sequence[Case]) -> list[list[int]]:
    """Put texts of one shape into a cache, and have their questions answered greedily: the tokens of each answer."""

    def passed(ids_BT: Tensor) -> Tensor:
        with attending(model, cache):
            logits = model(ids_BT.to(model.device), **{CACHE: cache}, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True).cpu()

    passed(torch.tensor([case.context for case in some]))
    if isinstance(cache, CountedCache) and cache.reads is not None:
        cache.reads = Reads()  # only the reads of question and answer count
    given = [passed(torch.tensor([case.asked for case in some]))]
    for _ in range(STEPS - 1):
        given.append(passed(given[-1]))
    return torch.cat(given, 1).tolist()


def make(
    files: ModelFiles, task: str, seed: int, length: int, depth: float, haystack: Haystack, chat: bool = False
) -> Case:
    """Make one text of at most `length` tokens, its answer included."""
    tokenizer, frame = _tokenizer(files.path), turn(files.path) if chat else ("", "")

    def encode(text: str) -> Any:
        return tokenizer.encode(text, add_special_tokens=not chat)  # a chat's template has the token that begins a text

    def count(text: str) -> int:
        return len(encode("".join((frame[0], text, frame[1]))).ids)

    made = needles.longest(task, seed, length, depth, haystack, count)
    context, begun = frame[0] + made.context, made.begun.lstrip() if chat else made.begun
    whole = encode(context + made.question + frame[1] + begun)
    # the question begins with the token that its first character is in: the prompt is tokenized as one text
    cut = next(place for place, (_, end) in enumerate(whole.offsets) if end > len(context))
    return Case(tuple(whole.ids[:cut]), tuple(whole.ids[cut:]), lambda ids: made.score(tokenizer.decode(list(ids))))


@lru_cache(maxsize=4)
def turn(folder: Path) -> tuple[str, str]:
    """Return the text that a model's chat template puts before a user's first words, and the text after them.

    Raises ValueError for a model that has no template.
    """
    whole, mark = tokenizer.whole(folder), "\x00the user's words\x00"
    if not whole.chat_template:
        raise ValueError(f"{folder.name} has no chat template: it is no chat model; leave --chat out")
    said = whole.apply_chat_template([{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True)
    before, _, after = str(said).partition(mark)
    return before, after


def haystack(source: str) -> Haystack:
    """Return the documents of a corpus, as `--corpus` takes it, as a haystack."""
    found = corpus.load(corpus.pin(source))
    return Haystack.of_texts(found.name, found.digest, found.texts)


@lru_cache(maxsize=4)
def _tokenizer(folder: Path) -> Tokenizer:
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(
            f"{folder} has no tokenizer.json, which makes texts into tokens; give the folder of a whole model"
        )
    return tokenizer.load(folder)[0]
