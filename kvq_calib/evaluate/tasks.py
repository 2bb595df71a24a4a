"""Measure tasks of retrieval through the compressed cache: right answers by task, length and depth.

    in-use   a text goes into the cache in one pass, which reads exact keys and values, as a prompt does; its question
             comes in a second pass, and the answer token by token, greedily: they read what the cache gives back
    full     text, question and right answer in one forward pass, every token but the sinks encoded before it is read:
             an answer is right if each of its tokens is the likeliest after the right ones before it, which is to say
             if greedy steps would have found it. For tasks whose answers are tokens; those in words are decoded

The 16-bit model does the first once, and its figures stand under both. A run in which nothing was encoded that a
question could read gives a reason, and no figures. The score of a text is the share of its questions that were answered
right, or of RULER's references that the answer contains. Texts are of symbols for the recall model; for any other they
are in words, as RULER's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from kvq_calib.evaluate.caches import CountedCache, FullCache, Reads, attending, nothing, refusal
from kvq_calib.evaluate.ledger import NOWHERE, Ledger, digest_of
from kvq_calib.evaluate.perplexity import REFERENCE, ROW_TOKENS, mean_and_error
from kvq_calib.evaluate.record import load_model, of_subject, setting
from kvq_calib.evaluate.subject import Subject
from kvq_calib.model.files import ModelFiles
from kvq_calib.tasks import ruler, synthetic
from kvq_calib.tasks.ruler import Haystack
from kvq_calib.text import corpus, tokenizer
from kvq_runtime.hf.model import CACHE
from kvq_runtime.registry.measured import FULL, IN_USE, PROTOCOLS

Progress = Callable[[int], object]
Texts = Mapping[tuple[int, str], Sequence[tuple[float, "Case"]]]  # by length and task: (depth, text)
Answers = Sequence[Sequence[int]]  # tokens by question of a text
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
LENGTHS = (1024, 4096)


@dataclass(frozen=True)
class Case:
    """A text as tokens, its questions, how many tokens answer each, and the score of answers.

    right   the tokens of the right answers; None: answers are words
    """

    context: tuple[int, ...]
    asked: tuple[tuple[int, ...], ...]
    steps: tuple[int, ...]
    score: Callable[[Answers], float]
    right: tuple[tuple[int, ...], ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Cases of one shape go through the model side by side."""
        return (len(self.context), *map(len, self.asked), *self.steps)


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
        for name in ("tasks", "lengths", "depths"):  # of what is there twice every text would count twice
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
    used, ledger = setting(files, device, model.dtype, ledger)
    about = {"name": "tasks", "version": 1, "model": files.about} | plan.to_json()
    # of all that the texts follow from, but for the tokenizer of a model that is asked in words
    digest = digest_of({name: value for name, value in plan.to_json().items() if name != "protocols"})
    found, at_work = list[dict[str, Any]](), _Work(model, files, plan, texts, progress, ledger)
    for subject in (None, *subjects):
        if subject is None:  # it has no cache to encode: one measurement stands under each protocol
            parts = dict.fromkeys(plan.protocols, at_work.part(None, IN_USE))
            progress(work(plan, 0) - work(plan, 0) // len(plan.protocols))
        else:
            parts = {name: at_work.part(subject, name) for name in plan.protocols}
            for name, part in parts.items():
                part |= {} if "reason" in part else {"reference": found[0]["result"]["protocols"][name]["tasks"]}
        found.append(of_subject(files, subject, parts, max(plan.lengths), digest, about, used))
    return found


def work(plan: Plan, subjects: int) -> int:
    """Return the tokens that `evaluate` reports to `progress`, in all."""
    texts = len(plan.tasks) * len(plan.depths) * plan.samples * sum(plan.lengths)
    return texts * (1 + subjects) * len(plan.protocols)


def cases(files: ModelFiles, task: str, length: int, plan: Plan) -> list[tuple[float, Case]]:
    """(depth, text) of a task at a length; no two texts of a plan have a seed in common."""
    found = []
    for place, depth in enumerate(plan.depths):
        for number in range(plan.samples):
            seed = (plan.seed * len(plan.depths) + place) * plan.samples + number
            found.append((depth, make(files, task, seed, length, depth, plan.haystack, plan.chat, plan.steps)))
    return found


@dataclass(frozen=True)
class _Work:
    """Everything that the measurements of an evaluation share."""

    model: PreTrainedModel
    files: ModelFiles
    plan: Plan
    texts: Texts
    progress: Progress
    ledger: Ledger

    def part(self, subject: Subject | None, protocol: str) -> dict[str, Any]:
        """The scores of one recipe under one protocol, or the reason why there are none."""
        plan, scores = self.plan, dict[str, list[float]]()
        cells: list[dict[str, Any]] = []
        shares: dict[str, float] = {}
        for length, task in ((length, task) for length in plan.lengths for task in plan.tasks):
            unit = {"task": task, "length": length, "plan": plan.to_json(), "tasks": protocol if subject else REFERENCE}
            unit |= {"subject": subject and subject.identity}
            find = partial(self._scores, subject, self.texts[length, task], length, protocol)
            kept: dict[str, Any] = self.ledger.kept(find, **unit)
            self.progress(len(plan.depths) * plan.samples * length)
            if "reason" in kept:
                return {"reason": kept["reason"]}
            for depth in plan.depths:
                found = kept["scores"][str(depth)]
                scores.setdefault(task, []).extend(found)
                cells.append({"task": task, "length": length, "depth": depth} | summary(found))
            if kept["decoded"] is not None:
                shares[str(length)] = min(shares.get(str(length), 1.0), kept["decoded"])
        tasks = {task: summary(scores[task]) for task in plan.tasks}
        return {"tasks": tasks, "cells": cells} | ({"decoded": shares} if subject else {})

    @torch.inference_mode()
    def _scores(
        self, subject: Subject | None, texts: Sequence[tuple[float, Case]], length: int, protocol: str
    ) -> dict[str, Any]:
        """The scores of all texts of a task and length, by depth, and the least share of a text that was decoded."""
        model = self.model
        if subject is not None and protocol == FULL:
            in_words = None if of_symbols(self.files) else "answers in words are decoded in steps"
            if (refused := refusal(subject.recipe) or in_words) is not None:
                return {"reason": refused}
        found: dict[str, list[float]] = {str(depth): [] for depth in self.plan.depths}
        decoded = None
        for group in _groups(texts, max(1, ROW_TOKENS // length)):
            some = [case for _, case in group]
            if subject is None:
                answers, share = stepped(model, DynamicCache(config=model.config), some), None
            elif protocol == IN_USE:
                cache = CountedCache(subject.recipe, model, subject.tensors)
                answers, share = stepped(model, cache, some), cache.read_share
            else:
                answers, share = encoded(model, subject, some)
            if share is not None:
                if subject is not None and share <= 0:
                    return {"reason": nothing(subject.recipe, length, full=protocol == FULL)}
                decoded = share if decoded is None else min(decoded, share)
            for (depth, case), given in zip(group, answers, strict=True):
                found[str(depth)].append(case.score(given))
        return {"scores": found, "decoded": decoded}


def summary(scores: Sequence[float]) -> dict[str, Any]:
    """Mean of scores, its standard error over texts (None of one), and how many they are."""
    mean, error = mean_and_error(scores)
    return {"accuracy": mean, "se": error, "texts": len(scores)}


def stepped(model: PreTrainedModel, cache: Cache, some: Sequence[Case]) -> list[Answers]:
    """Put texts of one shape into a cache, and have their questions answered greedily: tokens by text and question."""

    def passed(ids_BT: Tensor) -> Tensor:
        with attending(model, cache):
            logits = model(ids_BT.to(model.device), **{CACHE: cache}, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True).cpu()

    passed(torch.tensor([case.context for case in some]))
    if isinstance(cache, CountedCache) and cache.reads is not None:
        cache.reads = Reads()  # what the questions and answers read is counted
    answers = []  # by question
    last = torch.zeros(len(some), 0, dtype=torch.long)
    for number, steps in enumerate(some[0].steps):
        given = [passed(torch.cat([last, torch.tensor([case.asked[number] for case in some])], 1))]
        for _ in range(steps - 1):
            given.append(passed(given[-1]))
        last = given[-1]
        answers.append(torch.cat(given, 1).tolist())
    return list(zip(*answers, strict=True))


def encoded(model: PreTrainedModel, subject: Subject, some: Sequence[Case]) -> tuple[list[Answers], float]:
    """Full encode of texts with their right answers: the likeliest tokens in their places, and the share encoded."""
    rows = []
    for case in some:
        assert case.right is not None, "a full encode is of answers that are tokens"
        rows.append([*case.context, *(t for pair in zip(case.asked, case.right, strict=True) for p in pair for t in p)])
    tokens_BT = torch.tensor(rows).to(model.device)
    length = tokens_BT.shape[1]
    cache = FullCache(subject.recipe, model, subject.tensors, length=length)
    cache.reads = None  # counting would repeat attention; what was encoded is asked of the cache
    tail = length - len(some[0].context)
    with attending(model, cache):
        logits = model(tokens_BT, **{CACHE: cache}, use_cache=True, logits_to_keep=tail + 1).logits
    likeliest = logits.argmax(-1).cpu()
    answers, place = [], 0
    for asked, steps in zip(some[0].asked, some[0].steps, strict=True):
        place += len(asked)
        answers.append(likeliest[:, place : place + steps].tolist())
        place += steps
    return list(zip(*answers, strict=True)), cache.held_share


def _groups(given: Sequence[tuple[float, Case]], rows: int) -> Iterator[list[tuple[float, Case]]]:
    """Texts of one shape, at most `rows` at a time, in their order."""
    group: list[tuple[float, Case]] = []
    for one in given:
        if group and (len(group) == rows or group[0][1].shape != one[1].shape):
            yield group
            group = []
        group.append(one)
    yield group


def known(files: ModelFiles) -> Sequence[str]:
    """The tasks that a model can be asked: those of symbols if it speaks them, else RULER's."""
    return list(synthetic.TASKS if of_symbols(files) else ruler.TASKS)


def make(
    files: ModelFiles, task: str, seed: int, length: int, depth: float, haystack: Haystack | None = None,
    chat: bool = False, steps: int | None = None,
) -> Case:  # fmt: skip
    """One text of at most `length` tokens, of symbols exactly that number, with question and answer.

    haystack   text of those of RULER's tasks that use essays
    chat       text and question are a user's turn, in the model's own form, and the answer begins in the next
    steps      the most tokens of an answer in words; None: the benchmark's
    """
    if of_symbols(files):
        if chat:
            raise ValueError(f"{files.id} speaks in symbols and has no form for a chat; leave it out")
        return _symbolic(task, seed, length, depth)
    frame = turn(files.path) if chat else ("", "")
    return _worded(_tokenizer(files.path), task, seed, length, depth, haystack, frame, steps)


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
    """The documents of a corpus, as `--corpus` takes it, in which needles are hidden."""
    found = corpus.load(corpus.pin(source))
    return Haystack.of(found.name, found.digest, found.texts)


def of_symbols(files: ModelFiles) -> bool:
    """True if a model's tokenizer is that of the recall model."""
    if files.vocabulary != synthetic.SIZE or not (files.path / "tokenizer.json").is_file():
        return False
    return _tokenizer(files.path).get_vocab() == {word: id for id, word in enumerate(synthetic.words())}


@lru_cache(maxsize=4)
def _tokenizer(folder: Path) -> Tokenizer:
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(
            f"{folder} has no tokenizer.json, which makes texts into tokens; give the folder of a whole model"
        )
    return tokenizer.load(folder)[0]


def _symbolic(task: str, seed: int, length: int, depth: float) -> Case:
    made = synthetic.TASKS[task](seed, length, depth)
    asked, right = zip(*made.questions, strict=True)

    def score(answers: Answers) -> float:
        return sum(tuple(one) == other for one, other in zip(answers, right, strict=True)) / len(right)

    return Case(made.context, asked, tuple(map(len, right)), score, right)


def _worded(
    tokenizer: Tokenizer, task: str, seed: int, length: int, depth: float, essays: Haystack | None,
    frame: tuple[str, str] = ("", ""), steps: int | None = None,
) -> Case:  # fmt: skip
    chat = frame != ("", "")  # whose template has the token that begins a text

    def count(text: str) -> int:
        return len(tokenizer.encode("".join((frame[0], text, frame[1])), add_special_tokens=not chat).ids)

    made = ruler.fitted(task, seed, length, depth, count, essays, steps)
    context = frame[0] + made.context
    begun = made.begun.removeprefix(" Answer:").lstrip() if chat else made.begun
    whole = tokenizer.encode(context + made.question + frame[1] + begun, add_special_tokens=not chat)
    # the question begins with the token that its first character is in: the prompt is tokenized as one text
    cut = next(place for place, (_, end) in enumerate(whole.offsets) if end > len(context))

    def score(answers: Answers) -> float:
        return ruler.score(tokenizer.decode(list(answers[0])), made.references)

    return Case(tuple(whole.ids[:cut]), (tuple(whole.ids[cut:]),), (made.steps,), score)
