"""Score a compressed cache token by token: what it costs at each position, of windows as long as the model takes.

Logits of 8,192 tokens of 49,152 words are 1.6 GB, and as many of the 16-bit model that they are held against. So a pass
ends before the output layer here, whose inputs are a hundredth of that, and the layer is applied to SLICE tokens of
both at a time. What the 16-bit model gave is a tensor that a file can hold: all recipes share one pass of it.

    loss     -log q(token), in nats                       p the 16-bit model, q the model with this cache
    kl       Σ p (log p - log q), in nats
    agreed   whether the likeliest tokens are the same

Differs from `kvq_calib/evaluate/perplexity.py`: figures are of tokens, not of windows; what attention read is not
counted, which would repeat it; and sums are in float32 of differences of logits, whose rounding is as small as those
are. With d = log-odds moved, kl = log Σ p e^d - Σ p d, for any constant in d.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvq_calib.evaluate.perplexity import Score, logits

SLICE = 128  # tokens whose logits are in memory
DIGITS = 6  # of a mean that a record keeps


@dataclass(frozen=True)
class Trace:
    """The cost of each token but the first of each window, [W, T - 1]: float64, float64, bool."""

    loss_WT: Tensor
    kl_WT: Tensor
    agreed_WT: Tensor

    @property
    def score(self) -> Score:
        """The same by window, as `perplexity.scores` gives it."""
        losses, kls = (values.mean(1).tolist() for values in (self.loss_WT, self.kl_WT))
        return Score(self.agreed_WT.numel(), int(self.agreed_WT.sum()), losses, kls)

    def bins(self, count: int) -> list[dict[str, Any]]:
        """Means of loss, divergence and agreement in equal parts of the windows; the first two by window."""
        edges = [self.loss_WT.shape[1] * place // count for place in range(count + 1)]
        found = []
        for start, stop in pairwise(edges):
            loss_W, kl_W, agreed_W = (
                values[:, start:stop].double().mean(1) for values in (self.loss_WT, self.kl_WT, self.agreed_WT)
            )
            found.append(
                {"from": start + 1, "to": stop + 1, "top1": _rounded(agreed_W.mean()), "loss": _rounded(loss_W),
                 "kl": _rounded(kl_W)}
            )  # fmt: skip
        return found


def _rounded(values: Tensor) -> Any:
    """Numbers with as many digits as count, so that a record is small."""
    found = values.tolist()
    return [float(f"{x:.{DIGITS}g}") for x in found] if isinstance(found, list) else float(f"{found:.{DIGITS}g}")


@torch.inference_mode()
def states(model: PreTrainedModel, tokens_BT: Tensor, cache: Cache, step: int | None = None) -> Tensor:
    """Return the input of the output layer for each token, [B, T, hidden], on the CPU.

    step   tokens of a forward pass; None: all in one
    """
    with _headless(model):
        return torch.cat([part.cpu() for part in logits(model, tokens_BT, cache, step or tokens_BT.shape[1])], 1)


@torch.inference_mode()
def trace(model: PreTrainedModel, tokens_BT: Tensor, exact_BTE: Tensor, found_BTE: Tensor) -> Trace:
    """Compare a cache's hidden states, E channels a token, with the 16-bit model's and with the text."""
    head, rows = model.get_output_embeddings(), []
    assert head is not None, "a language model has an output layer"
    for tokens_T, exact_TE, found_TE in zip(tokens_BT.long(), exact_BTE, found_BTE, strict=True):
        parts = []
        for start in range(0, len(tokens_T) - 1, SLICE):
            stop = min(start + SLICE, len(tokens_T) - 1)
            exact_TV, found_TV = (
                head(some[start:stop].to(model.device, model.dtype)).float() for some in (exact_TE, found_TE)
            )
            target_T = tokens_T[start + 1 : stop + 1].to(model.device)
            loss_T = found_TV.logsumexp(-1) - found_TV.gather(-1, target_T[:, None])[:, 0]
            agreed_T = exact_TV.argmax(-1) == found_TV.argmax(-1)
            parts.append((loss_T.double(), divergence(exact_TV, found_TV), agreed_T))
        rows.append([torch.cat(part).cpu() for part in zip(*parts, strict=True)])
    return Trace(*(torch.stack(part) for part in zip(*rows, strict=True)))


def divergence(exact_TV: Tensor, found_TV: Tensor) -> Tensor:
    """The KL divergence of each row's softmax from that of the other logits, [T], float64, nats."""
    p_TV, d_TV = exact_TV.softmax(-1), found_TV - exact_TV
    mass_T = p_TV.sum(-1, dtype=torch.float64)
    d_TV = d_TV - ((p_TV * d_TV).sum(-1, dtype=torch.float64) / mass_T).float()[:, None]  # so that all are small
    grown_T = (p_TV * d_TV.expm1()).sum(-1, dtype=torch.float64) / mass_T
    return grown_T.log1p() - (p_TV * d_TV).sum(-1, dtype=torch.float64) / mass_T


@contextmanager
def _headless(model: PreTrainedModel) -> Iterator[None]:
    """Let the model return the input of its output layer, in place of logits.

    Raises ValueError for a model that does more than multiply there.
    """
    config = model.config.get_text_config(decoder=True)
    more = [
        name for name in ("final_logit_softcapping", "logits_scaling", "logit_scale") if getattr(config, name, None)
    ]
    if more:
        raise ValueError(f"{type(model).__name__} has {', '.join(more)}: its logits are no product alone; use kvq eval")
    head = model.get_output_embeddings()
    model.set_output_embeddings(nn.Identity())
    try:
        yield
    finally:
        model.set_output_embeddings(head)


def encoded(cache: Any) -> int:
    """Tokens of the layer with the fewest that are in encoded blocks, sinks aside, or evicted, of a KVQCache."""
    blocks = cache.blocks
    held = min((store.encoded for store in blocks.layers.values()), default=0)
    return max(0, held - blocks.recipe.window.sinks) + blocks.positions.dropped


def part(found: Score, exact: Score, bins: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """The figures of one protocol, as records have them."""
    reference = {"reference_perplexity": exact.perplexity, "tokens": found.tokens}
    return reference | found.figures(exact) | ({"bins": list(bins)} if bins else {})
