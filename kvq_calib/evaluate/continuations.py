"""Score what may follow a text, through a cache: what multiple-choice tasks ask."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvq_calib.evaluate.caches import attending
from kvq_runtime.hf.model import CACHE


@dataclass(frozen=True)
class Continuation:
    """The last tokens of a row and the one after it.

    row      its number
    tokens   what is scored: the row has all of them but the last
    """

    row: int
    tokens: tuple[int, ...]


@torch.inference_mode()
def loglikelihoods(
    model: PreTrainedModel, cache: Cache, rows: Sequence[Sequence[int]], asked: Sequence[Continuation], step: int
) -> list[tuple[float, bool]]:
    """Return, for each continuation, the sum of log q(token), in nats, and whether each token is the likeliest.

    Context and continuation arrive in steps: a token that came in the same pass as all that is before it would read
    exact keys, and the answer to a question of one token would test nothing. Rows begin together and are padded on the
    right, which the cache knows: so blocks begin where they begin alone, and no row's figures depend on its neighbours
    but by rounding, or where a policy decides for all rows together.

    rows   token ids of context and continuation without its last token, each of at least one token
    step   tokens a pass
    """
    lengths = [len(row) for row in rows]
    longest, device = max(lengths), model.device
    tokens_BT = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    mask_BT = torch.arange(longest, device=device) < torch.tensor(lengths, device=device)[:, None]
    padded = min(lengths) < longest
    wanted = [torch.tensor(one.tokens, device=device) for one in asked]
    sums, greedy = [0.0] * len(asked), [True] * len(asked)
    for start in range(0, longest, step):
        stop = min(start + step, longest)
        with attending(model, cache):
            mask = mask_BT[:, :stop].long() if padded else None
            given = tokens_BT[:, start:stop]
            logits = model(given, attention_mask=mask, **{CACHE: cache}, use_cache=True).logits
        for number, (one, tokens) in enumerate(zip(asked, wanted, strict=True)):
            first = lengths[one.row] - len(tokens)
            begin, end = max(first, start), min(lengths[one.row], stop)
            if begin >= end:
                continue
            logq = logits[one.row, begin - start : end - start].double().log_softmax(-1)
            here = tokens[begin - first : end - first]
            sums[number] += float(logq.gather(-1, here[:, None]).sum())
            greedy[number] &= bool((logq.argmax(-1) == here).all())
    return list(zip(sums, greedy, strict=True))
