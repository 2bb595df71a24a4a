"""Score full encodes of a model that does not fit into memory: one layer at a time, with one reading of its weights.

    embed → layer 0: 16 bit, cache A, cache B, ... → layer 1: likewise → ... → head, a few windows at a time

Each cache's hidden states go on from layer to layer by themselves, in host memory. Layers are those of
`model/streamed.py`, so that figures are those of the whole model but for rounding. The device holds one layer, and each
cache as it is packed.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvq_calib.evaluate.caches import CountedCache, answering
from kvq_calib.evaluate.ledger import NOWHERE, Ledger
from kvq_calib.evaluate.perplexity import PART, REFERENCE, Score, Windows, rows_of
from kvq_calib.model.streamed import Stream
from kvq_calib.text.corpus import digest_of


@torch.inference_mode()
def layered(
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
    length, names = tokens_BT.shape[1], (REFERENCE, *caches)
    groups = tokens_BT.split(rows or rows_of(length, stream.files.vocabulary))
    units = [
        {name: {"layered": name, "tokens": digest_of(group), "step": length} for name in names} for group in groups
    ]
    kept: list[dict[str, Any]] = [{name: ledger.read(**unit) for name, unit in own.items()} for own in units]
    left = [name for name in names if any(own[name] is None for own in kept)]
    progress(tokens_BT.numel() * (len(names) - len(left)))
    if left:
        made: dict[str, Callable[[], CountedCache | None]] = {REFERENCE: lambda: None, **caches}
        at_work: list[dict[str, State]] = []
        for group in groups:
            embedded = stream.embed(group.long()).cpu()
            at_work.append({name: (embedded, made[name]()) for name in dict.fromkeys([REFERENCE, *left])})
        _through(stream, at_work, tokens_BT.numel() * len(left), progress)
        head = stream.head()
        for group, states, own, told in zip(groups, at_work, units, kept, strict=True):
            windows = Windows(group, stream.device, partial(_of_head, head, states[REFERENCE][0]))
            for name in left:
                hidden, cache = states[name]
                score = windows.score(windows.expected if cache is None else _of_head(head, hidden))
                score.reads = None if cache is None else cache.reads
                told[name] = asdict(score)
                ledger.write(told[name], **own[name])
    found = {name: Score() for name in names}
    for told in kept:
        for name, score in found.items():
            score.add(Score.of(told[name]))
    return found


State = tuple[Tensor, CountedCache | None]  # hidden states [B, T, E] on the CPU, and the cache that they are of


def _through(stream: Stream, groups: list[dict[str, State]], tokens: int, progress: Callable[[int], object]) -> None:
    """Take all states through all layers; `tokens` is what is reported in all."""
    done, of = 0, stream.layers * sum(map(len, groups))
    for index in range(stream.layers):
        layer = stream.layer(index)
        for states in groups:
            for name, (hidden, cache) in states.items():
                states[name] = layer.through(hidden, partial(answering, cache) if cache else None).cpu(), cache
                done += 1
                progress(tokens * done // of - tokens * (done - 1) // of)
        del layer


def _of_head(head: Any, hidden_BTE: Tensor) -> Iterator[Tensor]:
    """Logits [B, tokens, V], PART tokens at a time."""
    return (head(part.to(head.device)) for part in hidden_BTE.split(PART, 1))
