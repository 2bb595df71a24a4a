"""Score full encodes one layer at a time: of models that do not fit into memory, with one reading of their weights.

    embed → layer 0: 16 bit, cache A, cache B, ... → layer 1: likewise → ... → head, a few windows at a time

Each cache's hidden states go on from layer to layer by themselves, in host memory. Layers are those of
`model/streamed.py`, what caches do in them is `full.FullCache`, so that figures are those of the whole model but for
rounding. The device holds one layer, and each cache as it is packed.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvq_calib.evaluate import perplexity
from kvq_calib.evaluate.ledger import NOWHERE, Ledger
from kvq_calib.evaluate.perplexity import PART, REFERENCE, Score, Windows
from kvq_calib.evaluate.reads import CountedCache, answering
from kvq_calib.model.streamed import Stream

ONLY_FULL = "windows went through the model one layer at a time, which is done by full encode alone"


@torch.inference_mode()
def scores(
    stream: Stream,
    tokens_BT: Tensor,
    caches: Mapping[str, Callable[[], CountedCache]],
    rows: int | None = None,
    progress: Callable[[int], object] = lambda tokens: None,
    ledger: Ledger = NOWHERE,
) -> dict[str, Score]:
    """`perplexity.scores` of full encodes, the same figures; a ledger keeps them once all layers are done.

    caches   makes an empty cache of `stream.blank`, by name
    rows     windows that go through a layer side by side
    """
    length = tokens_BT.shape[1]
    rows = rows or perplexity.rows_of(length, stream.files.vocabulary)
    groups = [tokens_BT[start : start + rows] for start in range(0, len(tokens_BT), rows)]
    names = (REFERENCE, *caches)
    units = [
        {name: {"layered": name, "tokens": perplexity.digest(group), "step": length} for name in names}
        for group in groups
    ]
    kept = [{name: ledger.read(**unit) for name, unit in own.items()} for own in units]
    left = [name for name in names if any(own[name] is None for own in kept)]
    progress(tokens_BT.numel() * (len(names) - len(left)))
    if left:
        passes = [
            _pass(stream, group, caches, [REFERENCE, *(name for name in left if name != REFERENCE)]) for group in groups
        ]
        _through(stream, passes, lambda done, of: progress(_share(tokens_BT.numel() * len(left), done, of)))
        head = stream.head()
        for group, states, own, told in zip(groups, passes, units, kept, strict=True):
            windows = Windows(group, stream.device, partial(_logits, head, states[REFERENCE][0]))
            for name in left:
                hidden, cache = states[name]
                score = windows.score(windows.expected if cache is None else _logits(head, hidden))
                score.reads = None if cache is None else cache.reads
                told[name] = asdict(score)
                ledger.write(told[name], **own[name])
    found = {name: Score() for name in names}
    for told in kept:
        for name, score in found.items():
            made: Any = told[name]
            score.add(Score.of(made))
    return found


State = tuple[Tensor, CountedCache | None]  # hidden states [B, T, E] on the CPU, and the cache that they are of


def _pass(
    stream: Stream, tokens_BT: Tensor, caches: Mapping[str, Callable[[], CountedCache]], names: list[str]
) -> dict[str, State]:
    """What goes through the layers, of some windows: the 16-bit model, and caches by name."""
    embedded = stream.embed(tokens_BT.long()).cpu()
    return {name: (embedded, None if name == REFERENCE else caches[name]()) for name in names}


def _through(stream: Stream, passes: list[dict[str, State]], progress: Callable[[int, int], object]) -> None:
    """Take all states through all layers."""
    done, of = 0, stream.layers * sum(map(len, passes))
    for index in range(stream.layers):
        layer = stream.layer(index)
        for states in passes:
            for name, (hidden, cache) in states.items():
                states[name] = layer.through(hidden, partial(answering, cache) if cache else None).cpu(), cache
                done += 1
                progress(done, of)
        del layer


def _share(total: int, done: int, of: int) -> int:
    """What of a total comes with the last of `done` parts."""
    return total * done // of - total * (done - 1) // of


def _logits(head: Any, hidden_BTE: Tensor):
    """Logits [B, tokens, V], PART tokens at a time."""
    return (head(part.to(head.device)) for part in hidden_BTE.split(PART, 1))
