"""Measure tasks of retrieval through the compressed cache: right answers by task, length and depth.

    in-use   a text goes into the cache in one pass, which reads exact keys and values, as a prompt does; its question
             comes in a second pass, and the answer token by token, greedily: they read what the cache gives back
    full     text, question and right answer in one forward pass, every token but the sinks encoded before it is read:
             an answer is right if each of its tokens is the likeliest after the right ones before it, which is to say
             if greedy steps would have found it. For tasks whose answers are tokens; those in words are decoded

The 16-bit model does the first once, and its figures stand under both. A run in which nothing was encoded that a
question could read gives a reason, and no figures. The score of a text is the share of its questions that were answered
right, or of RULER's references that the answer contains.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvq_calib.evaluate import bits, full
from kvq_calib.evaluate.answers import encoded, read_share, stepped
from kvq_calib.evaluate.cases import Case, known, make, of_symbols
from kvq_calib.evaluate.ledger import NOWHERE, Ledger, code
from kvq_calib.evaluate.perplexity import REFERENCE, ROW_TOKENS
from kvq_calib.evaluate.reads import CountedCache
from kvq_calib.evaluate.record import load_model, weights
from kvq_calib.evaluate.subject import Subject
from kvq_calib.model.files import ModelFiles
from kvq_calib.run.plan import environment
from kvq_calib.tasks.ruler import Haystack
from kvq_runtime.recipe import Recipe
from kvq_runtime.registry.measured import FULL, IN_USE, PROTOCOLS

Progress = Callable[[int], object]
Texts = Mapping[tuple[int, str], Sequence[tuple[float, Case]]]  # by length and task: (depth, text)
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
LENGTHS = (1024, 4096)


@dataclass(frozen=True)
class Plan:
    """The questions of an evaluation: `samples` texts of each task, length and depth.

    protocols   "in-use", "full", or both
    haystack    text of those of RULER's tasks that use essays
    chat        texts and questions in words are a user's turn, in the model's own form
    steps       the most tokens of an answer in words; None: the benchmark's
    """

    tasks: tuple[str, ...]
    lengths: tuple[int, ...] = LENGTHS
    depths: tuple[float, ...] = DEPTHS
    samples: int = 5
    seed: int = 0
    protocols: tuple[str, ...] = PROTOCOLS
    haystack: Haystack | None = None
    chat: bool = False
    steps: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The plan in records: of a haystack name and digest; `chat` and `steps` if set."""
        given = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "haystack"}
        found = {name: value for name, value in given.items() if name not in ("chat", "steps") or value}
        text = self.haystack
        return found | ({"haystack": {"name": text.name, "digest": text.digest}} if text else {})

    def __post_init__(self):
        if not self.tasks or not self.lengths or not self.depths or self.samples < 1:
            raise ValueError(f"{self}; give at least one task, length, depth and text of each")
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
    """One record for the 16-bit model, then one per subject. `progress` gets the number of `work(...)` tokens done.

    Raises ValueError for a task that the model cannot be asked, or texts longer than it was made for.
    """
    unknown = [task for task in plan.tasks if task not in known(files)]
    if unknown:
        raise ValueError(f"tasks {', '.join(unknown)}; {files.id} can be asked {', '.join(known(files))}")
    if max(plan.lengths) > files.context:
        raise ValueError(f"texts of {max(plan.lengths)} tokens; {files.id} was made for at most {files.context}")
    texts = {
        (length, task): cases(files, task, length, plan) for length in plan.lengths for task in plan.tasks
    }  # before any work: one that is too short for its task is refused
    model = load_model(files, device, dtype)
    used = environment(device, str(model.dtype).removeprefix("torch."), torch.get_num_threads())
    ledger = ledger.within(model=[files.id, files.revision, weights(files)], environment=used, code=code())
    about = {"name": "tasks", "version": 1, "model": {"id": files.id, "revision": files.revision}} | plan.to_json()
    about["model"]["parameters"] = model.num_parameters()
    digest = _digest(plan)
    found = []
    for subject in (None, *subjects):
        if subject is None:  # it has no cache to encode: one measurement stands under each protocol
            parts = dict.fromkeys(plan.protocols, _part(model, files, None, plan, texts, IN_USE, progress, ledger))
            progress(work(plan, 0) - work(plan, 0) // len(plan.protocols))
        else:
            parts = {name: _part(model, files, subject, plan, texts, name, progress, ledger) for name in plan.protocols}
        result = {"recipe": subject.recipe.name if subject else REFERENCE, "protocols": parts}
        if subject is not None:
            for name, part in parts.items():
                part |= {} if "reason" in part else {"reference": found[0]["result"]["protocols"][name]["tasks"]}
            result["window"] = asdict(subject.recipe.window)
            result["bits"] = bits.costs(subject.recipe, files.geometry, max(plan.lengths))
        artifact = subject.sha256 if subject is not None and subject.sha256 else result["recipe"]
        found.append({"artifact": artifact, "corpus": digest, "protocol": about, "environment": used, "result": result})
    return found


def work(plan: Plan, subjects: int) -> int:
    """Return the tokens that `evaluate` reports to `progress`, in all."""
    texts = len(plan.tasks) * len(plan.depths) * plan.samples * sum(plan.lengths)
    return texts * (1 + subjects) * len(plan.protocols)


def _digest(plan: Plan) -> str:
    """Return a digest of all that the texts follow from, but for the tokenizer of a model that is asked in words."""
    texts = {name: value for name, value in plan.to_json().items() if name != "protocols"}
    return hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()


def cases(files: ModelFiles, task: str, length: int, plan: Plan) -> list[tuple[float, Case]]:
    """(depth, text) of a task at a length; no two texts of a plan have a seed in common."""
    found = []
    for place, depth in enumerate(plan.depths):
        for number in range(plan.samples):
            seed = (plan.seed * len(plan.depths) + place) * plan.samples + number
            found.append((depth, make(files, task, seed, length, depth, plan.haystack, plan.chat, plan.steps)))
    return found


def _part(
    model: PreTrainedModel, files: ModelFiles, subject: Subject | None, plan: Plan, texts: Texts, protocol: str,
    progress: Progress, ledger: Ledger,
) -> dict[str, Any]:  # fmt: skip
    """The scores of one recipe under one protocol, or the reason why there are none."""
    count = len(plan.depths) * plan.samples
    cells: list[dict[str, Any]] = []
    shares: dict[int, float] = {}
    for length in plan.lengths:
        for task in plan.tasks:
            unit = {"task": task, "length": length, "plan": plan.to_json(), "tasks": protocol if subject else REFERENCE}
            unit |= {"subject": [subject.sha256, subject.recipe.to_json()] if subject else None}
            kept: dict[str, Any] | None = ledger.read(**unit)
            if kept is None:
                kept = _scores(model, files, subject, texts[length, task], length, plan, protocol)
                ledger.write(kept, **unit)
            progress(count * length)
            if "reason" in kept:
                return {"reason": kept["reason"]}
            cells += [{"task": task, "length": length, "depth": depth} | summary(kept["scores"][str(depth)])
                      for depth in plan.depths]  # fmt: skip
            if kept["decoded"] is not None:
                shares[length] = min(shares.get(length, 1.0), kept["decoded"])
    scores = {task: [x for cell in cells if cell["task"] == task for x in cell["scores"]] for task in plan.tasks}
    for cell in cells:
        del cell["scores"]
    found: dict[str, Any] = {"tasks": {task: summary(some, False) for task, some in scores.items()}, "cells": cells}
    return found | ({"decoded": {str(length): share for length, share in shares.items()}} if subject else {})


def summary(scores: Sequence[float], whole: bool = True) -> dict[str, Any]:
    """Mean of scores, its standard error over texts (None of one), and how many they are; `whole`: the scores too."""
    count, mean = len(scores), sum(scores) / len(scores)
    error = math.sqrt(sum((one - mean) ** 2 for one in scores) / (count - 1) / count) if count > 1 else None
    return {"accuracy": mean, "se": error, "texts": count} | ({"scores": list(scores)} if whole else {})


@torch.inference_mode()
def _scores(
    model: PreTrainedModel,
    files: ModelFiles,
    subject: Subject | None,
    texts: Sequence[tuple[float, Case]],
    length: int,
    plan: Plan,
    protocol: str,
) -> dict[str, Any]:
    """The scores of all texts of a task and length, by depth, and the least share of a text that was decoded."""
    if subject is not None and protocol == FULL:
        refused = full.refusal(subject.recipe) or (
            None if of_symbols(files) else "answers in words are decoded in steps"
        )
        if refused is not None:
            return {"reason": refused}
    found: dict[str, list[float]] = {str(depth): [] for depth in plan.depths}
    decoded = None
    for group in _groups(texts, max(1, ROW_TOKENS // length)):
        some = [case for _, case in group]
        if subject is None:
            answers, share = stepped(model, DynamicCache(config=model.config), some), None
        elif protocol == IN_USE:
            cache = CountedCache(subject.recipe, model, subject.tensors)
            answers, share = stepped(model, cache, some), read_share(cache)
        else:
            answers, share = encoded(model, subject, some)
        if subject is not None and share is not None:
            if share <= 0:
                return {"reason": _nothing(subject.recipe, length, protocol)}
            decoded = share if decoded is None else min(decoded, share)
        for (depth, case), given in zip(group, answers, strict=True):
            found[str(depth)].append(case.score(given))
    return {"scores": found, "decoded": decoded}


def _groups(given: Sequence[tuple[float, Case]], rows: int) -> Iterator[list[tuple[float, Case]]]:
    """Texts of one shape, at most `rows` at a time, in their order."""
    group: list[tuple[float, Case]] = []
    for one in given:
        if group and (len(group) == rows or group[0][1].shape != one[1].shape):
            yield group
            group = []
        group.append(one)
    yield group


def _nothing(recipe: Recipe, length: int, protocol: str) -> str:
    """The sentence for a run in which nothing was encoded that a question read."""
    window = recipe.window
    exact = window.recent if protocol == IN_USE else 0
    return (f"nothing was encoded: texts of {length} tokens are shorter than {exact} recent tokens and a block of "
            f"{window.block}, or all sinks; use longer ones")  # fmt: skip
