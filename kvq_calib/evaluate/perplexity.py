"""Measure the cost of a compressed cache: held-out perplexity, KL divergence from the 16-bit model, agreement with it.

Tokens arrive in steps, as in decoding: each step attends to the cache of the steps before it, with sinks and recent
window as in use. A step as long as the windows is one forward pass, as for a full encode (`caches.py`). The 16-bit
model takes the same steps once, with transformers' own DynamicCache; its logits are kept while the compared caches are
filled, one at a time.

Full encodes of a model that does not fit into memory run it a layer at a time (`layered`), with one reading of its
weights; figures equal those of the whole model but for rounding. The device holds one layer, and each cache packed:

    embed → layer 0: 16 bit, cache A, cache B, ... → layer 1: likewise → ... → head, a few windows at a time

    perplexity   exp of the mean of -log q(token)                 over all tokens but the first of each window
    kl           mean of Σ p (log p - log q), in nats             p the 16-bit model, q the model with this cache:
                 Σ p (x - y) + log Σ exp y - log Σ exp x          of their logits x and y
    top1         share of places where the likeliest tokens agree
    beyond       share of blocks whose error is beyond 99.9% of those in calibration

Source: Shutova et al., 2025 (AQUA-KV), section 4: sequences encoded auto-regressively with the compressed cache.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from kvq_calib.evaluate.caches import (
    FullCache,
    Reads,
    answering,
    attending,
    count_reads,
    encoded_by_layer,
)
from kvq_calib.evaluate.saved_results import NOWHERE, SavedResults
from kvq_calib.model.streamed import Stream
from kvq_calib.text.corpus import digest_of
from kvq_runtime.hf import KVQCache
from kvq_runtime.hf.model import CACHE

REFERENCE = "16 bit"
STEP = 32
PART = 128  # tokens whose logits come at once
AT_ONCE = 1 << 20  # logits compared at once, in float64: fresh memory costs more than the sums
ROW_TOKENS = 8192  # tokens of the windows that go through the model side by side
ROW_LOGITS = 1 << 28  # and their logits, which are kept: with large vocabularies fewer windows, at least one
ONLY_FULL = "windows went through the model one layer at a time, which is done by full encode alone"
State = tuple[Tensor, FullCache | None]  # hidden states [B, T, E] on the CPU, and the cache that they are of


@dataclass
class Score:
    """Sums over tokens; `losses` and `kls` have the means of each window, in nats.

    reads            of a compressed cache; None: its queries choose what they read
    blocks, beyond   blocks of keys and of values, if their errors are measured, and those beyond
    """

    tokens: int = 0
    agreed: int = 0
    losses: list[float] = field(default_factory=list)
    kls: list[float] = field(default_factory=list)
    reads: Reads | None = None
    blocks: int = 0
    beyond: int = 0

    @staticmethod
    def of_json(saved: Mapping[str, Any]) -> "Score":
        """Make a score from what `asdict` made of one."""
        return Score(**{**saved, "reads": None if saved["reads"] is None else Reads(**saved["reads"])})

    def with_cache(self, cache: Cache | None, reads: Reads | None) -> "Score":
        """Add what was counted of a cache: reads, and errors of blocks."""
        errors = cache.blocks.encoder.errors if isinstance(cache, KVQCache) else None
        if errors is not None:
            self.blocks, self.beyond = errors.blocks, int(errors.beyond)
        self.reads = reads
        return self

    def add(self, other: "Score") -> None:
        """Add other windows."""
        self.tokens += other.tokens
        self.agreed += other.agreed
        self.losses += other.losses
        self.kls += other.kls
        self.blocks += other.blocks
        self.beyond += other.beyond
        if other.reads is not None:
            self.reads = self.reads or Reads()
            self.reads.add(other.reads)

    @property
    def loss(self) -> float:
        """Mean of -log q, over windows of one length."""
        return sum(self.losses) / len(self.losses)

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def kl(self) -> float:
        return sum(self.kls) / len(self.kls)

    @property
    def top1(self) -> float:
        return self.agreed / self.tokens

    def against(self, reference: "Score") -> tuple[float, float | None]:
        """Return perplexity / the reference's - 1, and its standard error over windows; None for one window."""
        gaps = [own - other for own, other in zip(self.losses, reference.losses, strict=True)]
        mean, error = mean_and_error(gaps)
        return math.expm1(mean), None if error is None else math.exp(mean) * error

    def figures(self, reference: "Score") -> dict[str, Any]:
        """Return the figures of a record."""
        relative, spread = self.against(reference)
        return {
            "perplexity": self.perplexity,
            "relative": relative,
            "relative_se": spread,
            "kl": self.kl,
            "top1": self.top1,
            **({"beyond": self.beyond / self.blocks} if self.blocks else {}),
            "windows": {"loss": self.losses, "reference_loss": reference.losses, "kl": self.kls},
        }


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and its standard error; None for one value."""
    count, mean = len(values), sum(values) / len(values)
    squares = sum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (count - 1) / count) if count > 1 else None


class Windows:
    """Windows that go through a model side by side, with their logits by the 16-bit model, computed once needed.

    exact   yields these logits, some tokens at a time: [B, tokens, vocabulary]
    """

    def __init__(self, tokens_BT: Tensor, device: torch.device, exact: Callable[[], Iterable[Tensor]]):
        self.tokens_BT, self._exact = tokens_BT.to(device).long(), exact

    @cached_property
    def expected(self) -> list[Tensor]:
        """Keep the 16-bit model's logits off the device."""
        return [logits.cpu() for logits in self._exact()]

    @cached_property
    def norms(self) -> list[Tensor]:
        """log Σ exp of these logits, [B, tokens] float64."""
        return [
            torch.cat([some.to(self.tokens_BT.device).double().logsumexp(-1).cpu() for some in logits.split(8, 1)], 1)
            for logits in self.expected
        ]

    def score(self, compared: Iterable[Tensor]) -> Score:
        """Compare logits with the text and with those of the 16-bit model."""
        batch, length = self.tokens_BT.shape
        score, losses = Score(), torch.zeros(batch, dtype=torch.float64, device=self.tokens_BT.device)
        kls = torch.zeros_like(losses)
        done = 1
        for expected, norm, logits in zip(self.expected, self.norms, compared, strict=False):
            target = self.tokens_BT[:, done : done + logits.shape[1]]
            done += logits.shape[1]
            if not target.numel():  # none after a last token
                continue
            step = max(1, AT_ONCE // logits[:, 0].numel())
            for start in range(0, target.shape[1], step):
                part = slice(start, min(start + step, target.shape[1]))
                # in float32 the terms' rounding is as large as a 4-bit cache's KL
                x, y, norm_p = (
                    x[:, part].to(target.device, torch.float64, copy=True) for x in (expected, logits, norm)
                )
                norm_q = y.logsumexp(-1)
                losses -= (y.gather(-1, target[:, part, None])[..., 0] - norm_q).sum(1)
                score.agreed += int((x.argmax(-1) == y.argmax(-1)).sum())
                gap, p = y.sub_(x).neg_(), x.sub_(norm_p[..., None]).exp_()  # in the place of y, then of x
                kls += gap.mul_(p).sum((1, 2)) + (norm_q - norm_p).sum(1)
            score.tokens += target.numel()
        score.losses, score.kls = ((sums / (length - 1)).tolist() for sums in (losses, kls))
        return score


@torch.inference_mode()
def scores(
    model: PreTrainedModel,
    tokens_BT: Tensor,
    caches: Mapping[str, Callable[[], Cache]],
    step: int = STEP,
    progress: Callable[[int], object] = lambda tokens: None,
    saved: SavedResults = NOWHERE,
) -> dict[str, Score]:
    """Score the 16-bit model ("16 bit") and each cache on the same windows.

    tokens_BT  windows of one length
    caches     makes an empty cache, by name
    step       tokens per forward pass
    progress   gets the number of tokens done, counted once per cache
    saved      keeps the score of each cache on each group of rows
    """
    length = tokens_BT.shape[1]
    if length < 2 or step < 1:
        raise ValueError(f"windows of {length} tokens in steps of {step}; use at least 2 and 1")
    totals = {name: Score() for name in (REFERENCE, *caches)}
    for group in tokens_BT.split(rows_of(length, model.config.get_text_config(decoder=True).vocab_size)):
        windows = Windows(group, model.device, partial(logits, model, group, None, step))
        for name, total in totals.items():
            unit = {"score": name, "tokens": digest_of(group), "step": step}
            total.add(Score.of_json(saved.kept(partial(_score, model, windows, caches.get(name), step), **unit)))
            progress(group.numel())
    return totals


def _score(model: PreTrainedModel, windows: Windows, make: Callable[[], Cache] | None, step: int) -> dict[str, Any]:
    """Score a new cache, or without one the 16-bit model."""
    if make is None:
        return asdict(windows.score(windows.expected))
    cache, reads = make(), Reads()
    score = windows.score(logits(model, windows.tokens_BT, cache, step, reads))
    return asdict(score.with_cache(cache, reads if reads.pairs else None))


def rows_of(length: int, vocabulary: int) -> int:
    """Return how many windows go through a model side by side.

    No result depends on it but by rounding, and where a dynamic window decides for all rows together.
    """
    return max(1, min(ROW_TOKENS // length, ROW_LOGITS // (length * vocabulary)))


def logits(
    model: PreTrainedModel, tokens_BT: Tensor, cache: Cache | None, step: int, reads: Reads | None = None
) -> Iterator[Tensor]:
    """Yield the logits of each pass, PART tokens at a time: [B, tokens, vocabulary].

    cache   None: transformers' own
    reads   gets the reads of all passes
    """
    cache, length = DynamicCache(config=model.config) if cache is None else cache, tokens_BT.shape[1]
    for start in range(0, length, step):
        tokens = range(start, min(start + step, length))
        ids_BT = tokens_BT[:, start : tokens.stop].to(model.device).long()
        before = encoded_by_layer(cache) if isinstance(cache, KVQCache) else None
        with attending(model, cache):
            out = model(ids_BT, **{CACHE: cache}, use_cache=True).logits
        if isinstance(cache, KVQCache) and before is not None and reads is not None:
            reads.add(count_reads(cache, before, tokens) or Reads())
        yield from out.split(PART, 1)


@torch.inference_mode()
def layered(
    stream: Stream,
    tokens_BT: Tensor,
    caches: Mapping[str, Callable[[], FullCache]],
    progress: Callable[[int], object] = lambda tokens: None,
    saved: SavedResults = NOWHERE,
) -> dict[str, Score]:
    """Score full encodes as `scores` does, running the model a layer at a time.

    caches   makes an empty cache of `stream.blank`, by name; its hidden states go on from layer to layer by themselves
    """
    length, names = tokens_BT.shape[1], (REFERENCE, *caches)
    groups = tokens_BT.split(rows_of(length, stream.files.vocabulary))
    units = [{name: {"layered": name, "tokens": digest_of(group)} for name in names} for group in groups]
    results: list[dict[str, Any]] = [{name: saved.read(**unit) for name, unit in own.items()} for own in units]
    left = [name for name in names if any(own[name] is None for own in results)]
    progress(tokens_BT.numel() * (len(names) - len(left)))
    if left:
        states: list[dict[str, State]] = []
        for group in groups:
            embedded = stream.embed(group.long()).cpu()
            own = {
                name: None if name == REFERENCE else caches[name]() for name in {REFERENCE: 0, **dict.fromkeys(left)}
            }
            states.append({name: (embedded, cache) for name, cache in own.items()})
        _through(stream, states, tokens_BT.numel() * len(left), progress)
        head = stream.head()
        for group, own, scores, unit in zip(groups, states, results, units, strict=True):
            windows = Windows(group, stream.device, partial(_logits_of_head, head, own[REFERENCE][0]))
            for name in left:
                hidden, cache = own[name]
                score = windows.score(windows.expected if cache is None else _logits_of_head(head, hidden))
                reads = None if cache is None else count_reads(cache, ({}, 0), range(length))
                scores[name] = asdict(score.with_cache(cache, reads))
                saved.write(scores[name], **unit[name])
    totals = {name: Score() for name in names}
    for scores in results:
        for name, total in totals.items():
            total.add(Score.of_json(scores[name]))
    return totals


def _through(stream: Stream, groups: list[dict[str, State]], tokens: int, progress: Callable[[int], object]) -> None:
    """Run all states through all layers; `tokens` are reported in all."""
    done, total = 0, stream.layers * sum(map(len, groups))
    for index in range(stream.layers):
        layer = stream.layer(index)
        for states in groups:
            for name, (hidden, cache) in states.items():
                states[name] = layer.through(hidden, partial(answering, cache) if cache else None).cpu(), cache
                done += 1
                progress(tokens * done // total - tokens * (done - 1) // total)
        del layer


def _logits_of_head(head: Any, hidden_BTE: Tensor) -> Iterator[Tensor]:
    """Yield logits [B, tokens, V], PART tokens at a time."""
    return (head(part.to(head.device)) for part in hidden_BTE.split(PART, 1))
