"""Have a model answer questions about texts in a cache: greedily in steps, or all at once by a full encode."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvq_calib.evaluate.cases import Case
from kvq_calib.evaluate.full import FullCache
from kvq_calib.evaluate.perplexity import attending
from kvq_calib.evaluate.reads import CountedCache, Reads
from kvq_calib.evaluate.subject import Subject


def stepped(model: PreTrainedModel, cache: Cache, some: Sequence[Case]) -> list[list[list[int]]]:
    """Put texts of one shape into a cache, and have their questions answered greedily: tokens by text and question."""

    def passed(ids_BT: Tensor) -> Tensor:
        with attending(model, cache):
            logits = model(ids_BT.to(model.device), past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True).cpu()

    passed(torch.tensor([case.context for case in some]))
    if isinstance(cache, CountedCache) and cache.reads is not None:
        cache.reads = Reads()  # what the questions and answers read is counted
    answers: list[list[list[int]]] = [[] for _ in some]
    last = torch.zeros(len(some), 0, dtype=torch.long)
    for number, steps in enumerate(some[0].steps):
        given = [passed(torch.cat([last, torch.tensor([case.asked[number] for case in some])], 1))]
        for _ in range(steps - 1):
            given.append(passed(given[-1]))
        last = given[-1]
        for row, tokens in enumerate(torch.cat(given, 1).tolist()):
            answers[row].append(tokens)
    return answers


def read_share(cache: CountedCache) -> float:
    """The share of what questions and answers read that was decoded; of what is held, where reads are not counted."""
    if cache.reads is not None:
        return cache.reads.shares["reads"] + cache.reads.shares["unread"]
    return held_share(cache)


def held_share(cache: CountedCache) -> float:
    """The share of the tokens in a cache that is encoded, sinks aside, in the layer with the least."""
    stores = cache.blocks.layers.values()
    return min(len(cache.decoded(store.encoded)) / max(store.length, 1) for store in stores)


def encoded(model: PreTrainedModel, subject: Subject, some: Sequence[Case]) -> tuple[list[list[list[int]]], float]:
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
        logits = model(tokens_BT, past_key_values=cache, use_cache=True, logits_to_keep=tail + 1).logits
    likeliest = logits.argmax(-1).cpu()
    answers: list[list[list[int]]] = [[] for _ in some]
    place = 0
    for asked, steps in zip(some[0].asked, some[0].steps, strict=True):
        place += len(asked)
        for row, tokens in enumerate(likeliest[:, place : place + steps].tolist()):
            answers[row].append(tokens)
        place += steps
    return answers, held_share(cache)
