"""Measure what a compressed cache costs a model: held-out perplexity, divergence from the 16-bit model, agreement.

Tokens arrive in steps, as in decoding: each step attends to what the cache gives back for the steps before it, with
sinks and recent window as in use. The 16-bit model takes the same steps with transformers' own DynamicCache, beside
all compared caches: one pass over the text, and no logits are kept longer than a step.

    perplexity   exp of the mean of -log q(token)                 over all tokens but the first of each window
    kl           mean of Σ p (log p - log q), in nats             p the 16-bit model, q the model with this cache
    top1         share of places where the likeliest tokens agree

Source: Shutova et al., 2025 (AQUA-KV), section 4: sequences encoded auto-regressively with the compressed cache.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

REFERENCE = "16 bit"
STEP = 32
ROW_TOKENS = 8192  # tokens of the windows that go through the model side by side


@dataclass
class Score:
    """Sums over tokens; `losses` has the mean loss of each window, in nats."""

    tokens: int = 0
    kl_sum: float = 0.0
    agreed: int = 0
    losses: list[float] = field(default_factory=list)

    @property
    def loss(self) -> float:
        """Mean of -log q: windows are of one length."""
        return sum(self.losses) / len(self.losses)

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def kl(self) -> float:
        return self.kl_sum / self.tokens

    @property
    def top1(self) -> float:
        return self.agreed / self.tokens

    def against(self, reference: "Score") -> tuple[float, float | None]:
        """perplexity / the reference's - 1, and the standard error of that over windows; None for one window."""
        gaps = [own - other for own, other in zip(self.losses, reference.losses, strict=True)]
        mean = sum(gaps) / len(gaps)
        if len(gaps) < 2:
            return math.expm1(mean), None
        spread = sum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1)
        return math.expm1(mean), math.exp(mean) * math.sqrt(spread / len(gaps))


@torch.inference_mode()
def scores(
    model: PreTrainedModel,
    tokens_BT: Tensor,
    caches: Mapping[str, Callable[[], Cache]],
    step: int = STEP,
    rows: int | None = None,
    progress: Callable[[int], object] = lambda tokens: None,
) -> dict[str, Score]:
    """Score the 16-bit model ("16 bit") and each cache on the same windows.

    tokens_BT  windows of one length
    caches     makes an empty cache, by name
    step       tokens per forward pass
    rows       windows that go through side by side (default: 8192 tokens' worth); no result depends on it but by
               rounding
    progress   is told how many tokens were done, counted once per cache
    """
    windows, length = tokens_BT.shape
    if length < 2 or step < 1:
        raise ValueError(f"windows of {length} tokens in steps of {step}; use at least 2 and 1")
    makers = {REFERENCE: lambda: DynamicCache(config=model.config), **caches}
    found = {name: Score() for name in makers}
    rows = rows or max(1, ROW_TOKENS // length)
    for start in range(0, windows, rows):
        _score_windows(model, tokens_BT[start : start + rows], makers, step, found, progress)
    return found


def _score_windows(model, tokens_BT: Tensor, makers, step: int, found: dict[str, Score], progress) -> None:
    tokens_BT = tokens_BT.to(model.device).long()
    batch, length = tokens_BT.shape
    caches = {name: make() for name, make in makers.items()}
    losses = {name: torch.zeros(batch, dtype=torch.float64, device=model.device) for name in makers}
    for start in range(0, length, step):
        given, target = tokens_BT[:, start : start + step], tokens_BT[:, start + 1 : start + step + 1]
        expected: Tensor | None = None
        for name, cache in caches.items():
            logits = model(given, past_key_values=cache, use_cache=True).logits[:, : target.shape[1]]
            log_q = logits.double().log_softmax(-1)  # in float32 the terms' rounding is as large as a 4-bit cache's KL
            expected = log_q if expected is None else expected
            losses[name] -= log_q.gather(-1, target[..., None]).sum((1, 2))
            found[name].kl_sum += float((expected.exp() * (expected - log_q)).sum())
            found[name].agreed += int((expected.argmax(-1) == log_q.argmax(-1)).sum())
            found[name].tokens += target.numel()
            progress(given.numel())
    for name, total in losses.items():
        found[name].losses += (total / (length - 1)).tolist()
