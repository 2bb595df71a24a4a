"""Measure the cost of a compressed cache: held-out perplexity, KL divergence from the 16-bit model, agreement with it.

Tokens arrive in steps, as in decoding: each step attends to the cache of the steps before it, with sinks and recent
window as in use. A step as long as the windows is one forward pass, as for a full encode (`caches.py`). The 16-bit
model takes the same steps once, with transformers' own DynamicCache. Of each pass the hidden states under the head are
kept: all caches' pass the head together, a few tokens at a time, so that logits take little memory.

Full encodes of a model that does not fit into memory run it a layer at a time (`layered`), with one reading of its
weights; figures equal those of the whole model but for rounding. The device holds one layer, and each cache packed:

    embed → layer 0: 16 bit, cache A, cache B, ... → layer 1: likewise → ... → head

    perplexity   exp of the mean of -log q(token)                 over all tokens but the first of each window
    kl           mean of Σ p (log p - log q), in nats             p the 16-bit model, q the model with this cache
    top1         share of places where the likeliest tokens agree
    beyond       share of blocks whose error is beyond 99.9% of those in calibration

Source: Shutova et al., 2025 (AQUA-KV), section 4: sequences encoded auto-regressively with the compressed cache.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
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
from kvq_calib.model.streamed import Head, Stream
from kvq_calib.text.corpus import digest_of
from kvq_runtime.hf import KVQCache
from kvq_runtime.hf.model import CACHE, decoder_of

REFERENCE = "16 bit"
STEP = 32
AT_ONCE = 1 << 23  # logits computed and compared at once, in float64
ROW_TOKENS, GPU_ROW_TOKENS = 4096, 8192  # tokens of the windows that go through the model side by side
ERROR = 0.01  # standard error of log perplexity that is small enough
LEAST = 4  # windows to compute it from
ONLY_FULL = "windows went through the model one layer at a time, which is done by full encode alone"


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


Caches = dict[str, tuple[Tensor, FullCache | None]]  # likewise, with the cache itself
State = tuple[Tensor, Score]  # hidden states [B, T, E] on the CPU, and what was counted of the cache


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and its standard error; None for one value."""
    count, mean = len(values), sum(values) / len(values)
    squares = sum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (count - 1) / count) if count > 1 else None


class Expected:
    """The distribution of a few tokens by the 16-bit model: p and log p [N, V], and the likeliest tokens [N].

    In float64: in float32 the terms' rounding is as large as a 4-bit cache's KL.
    """

    def __init__(self, logits_NV: Tensor):
        x_NV = logits_NV.double()
        self.log_p_NV = x_NV.sub_(x_NV.logsumexp(-1, keepdim=True))
        self.p_NV, self.top_N = self.log_p_NV.exp(), logits_NV.argmax(-1)

    def against(self, logits_NV: Tensor, target_N: Tensor) -> Tensor:
        """Return -log q(target), the KL divergence, and 1 where the likeliest tokens agree: float64 [3, N]."""
        y_NV = logits_NV.double()
        log_q_NV = y_NV.sub_(y_NV.logsumexp(-1, keepdim=True))
        losses_N = -log_q_NV.gather(-1, target_N[:, None])[:, 0]
        kls_N = torch.linalg.vecdot(self.p_NV, log_q_NV.neg_().add_(self.log_p_NV))
        return torch.stack([losses_N, kls_N, (logits_NV.argmax(-1) == self.top_N).double()])


def compare(head: Head, tokens_BT: Tensor, hidden: Mapping[str, Tensor]) -> dict[str, Score]:
    """Score hidden states under the head, [B, T, E], against the text and the first of them, the 16-bit model's.

    All pass the head side by side, a few tokens at a time: their logits would take a hundred times their memory.
    """
    target_N = tokens_BT[:, 1:].flatten().to(head.device).long()
    rows = {name: h_BTE[:, :-1].flatten(0, 1) for name, h_BTE in hidden.items()}
    # whole: small tensors that stay would split the memory of large ones that come and go
    measured = {name: torch.empty(3, len(target_N), dtype=torch.float64) for name in rows}
    at_once = max(1, AT_ONCE // head.vocabulary)
    for start in range(0, len(target_N), at_once):
        part, expected = slice(start, start + at_once), None
        for name, h_NE in rows.items():
            logits_NV = head(h_NE[None, part].to(head.device))[0]
            expected = expected or Expected(logits_NV)
            measured[name][:, part] = expected.against(logits_NV, target_N[part])
    scores = {}
    for name, figures_3N in measured.items():
        losses, kls, agreed = figures_3N.unflatten(1, (len(tokens_BT), -1))
        scores[name] = Score(agreed.numel(), int(agreed.sum()), losses.mean(1).tolist(), kls.mean(1).tolist())
    return scores


@torch.inference_mode()
def scores(
    model: PreTrainedModel,
    tokens_BT: Tensor,
    caches: Mapping[str, Callable[[], Cache]],
    step: int = STEP,
    progress: Callable[[int], object] = lambda tokens: None,
    saved: SavedResults = NOWHERE,
    enough: Callable[[Sequence[Score]], bool] = lambda scores: False,
) -> dict[str, Score]:
    """Score the 16-bit model ("16 bit") and each cache on the same windows.

    tokens_BT  windows of one length
    caches     makes an empty cache, by name
    step       tokens per forward pass
    progress   gets the number of tokens done, counted once per cache
    saved      keeps the score of each cache on each group of rows
    enough     says, after each group, whether the windows so far do
    """
    length = tokens_BT.shape[1]
    if length < 2 or step < 1:
        raise ValueError(f"windows of {length} tokens in steps of {step}; use at least 2 and 1")
    totals, head = {name: Score() for name in (REFERENCE, *caches)}, Head.of(model)
    groups = tokens_BT.split(rows_of(length, model.device))
    for number, group in enumerate(groups, 1):
        units = {name: {"score": name, "tokens": digest_of(group), "step": step} for name in totals}
        found: dict[str, Any] = {name: saved.read(**unit) for name, unit in units.items()}
        left = [name for name in totals if found[name] is None]
        progress(group.numel() * (len(totals) - len(left)))
        states: dict[str, State] = {}
        for name in dict.fromkeys((REFERENCE, *left)) if left else ():
            cache = caches[name]() if name in caches else None
            states[name] = hidden_states(model, group, cache, step)
            progress(group.numel() * (name in left))
        found |= _finish(head, group, states, left, units, saved)
        for name, total in totals.items():
            total.add(Score.of_json(found[name]))
        if enough(list(totals.values())):
            progress(sum(map(Tensor.numel, groups[number:])) * len(totals))
            break
    return totals


def precise(scores: Sequence[Score]) -> bool:
    """Return whether each is known well enough beside the first, the 16-bit model's.

    The standard error of log(perplexity / the reference's), over at least LEAST windows, is at most ERROR, or a tenth
    of a larger loss.
    """
    reference, *others = scores
    gaps = [mean_and_error([a - b for a, b in zip(one.losses, reference.losses, strict=True)]) for one in others]
    errors = (error is not None and error <= max(ERROR, abs(mean) / 10) for mean, error in gaps)
    return len(reference.losses) >= LEAST and all(errors)


def rows_of(length: int, device: torch.device) -> int:
    """Return how many windows go through a model side by side.

    No result depends on it but by rounding, and where a dynamic window decides for all rows together.
    """
    return max(1, (GPU_ROW_TOKENS if device.type == "cuda" else ROW_TOKENS) // length)


def hidden_states(model: PreTrainedModel, tokens_BT: Tensor, cache: Cache | None, step: int) -> State:
    """Return the hidden states under the head, off the device, and what was counted of a cache.

    cache   None: transformers' own
    """
    used, reads, length = DynamicCache(config=model.config) if cache is None else cache, Reads(), tokens_BT.shape[1]
    decoder, parts = decoder_of(model), []
    for start in range(0, length, step):
        tokens = range(start, min(start + step, length))
        ids_BT = tokens_BT[:, start : tokens.stop].to(model.device).long()
        before = encoded_by_layer(used) if isinstance(used, KVQCache) else None
        with attending(model, used):
            parts.append(decoder(ids_BT, **{CACHE: used}, use_cache=True).last_hidden_state.cpu())
        if isinstance(used, KVQCache) and before is not None:
            reads.add(count_reads(used, before, tokens) or Reads())
    return torch.cat(parts, 1), Score().with_cache(cache, reads if reads.pairs else None)


def _finish(
    head: Head, tokens_BT: Tensor, states: Mapping[str, State], left: Sequence[str],
    units: Mapping[str, Mapping[str, Any]], saved: SavedResults,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Score the states of one group of windows, and save what is `left` to be saved."""
    scores = compare(head, tokens_BT, {name: hidden for name, (hidden, _) in states.items()})
    for name in left:
        scores[name].add(states[name][1])
        saved.write(asdict(scores[name]), **units[name])
    return {name: asdict(scores[name]) for name in left}


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
    groups = tokens_BT.split(rows_of(length, stream.device))
    units = [{name: {"layered": name, "tokens": digest_of(group)} for name in names} for group in groups]
    results: list[dict[str, Any]] = [{name: saved.read(**unit) for name, unit in own.items()} for own in units]
    left = [name for name in names if any(own[name] is None for own in results)]
    progress(tokens_BT.numel() * (len(names) - len(left)))
    if left:
        states: list[Caches] = []
        for group in groups:
            embedded = stream.embed(group.long()).cpu()
            states.append({REFERENCE: (embedded, None)})
            states[-1] |= {name: (embedded, caches[name]()) for name in left if name != REFERENCE}
        _through(stream, states, tokens_BT.numel() * len(left), progress)
        head, every = stream.head(), range(length)
        for group, own, scores, unit in zip(groups, states, results, units, strict=True):
            counted = {
                name: (hidden, Score().with_cache(cache, None if cache is None else count_reads(cache, ({}, 0), every)))
                for name, (hidden, cache) in own.items()
            }
            scores |= _finish(head, group, counted, left, unit, saved)
    totals = {name: Score() for name in names}
    for scores in results:
        for name, total in totals.items():
            total.add(Score.of_json(scores[name]))
    return totals


def _through(
    stream: Stream,
    groups: list[Caches],
    tokens: int,
    progress: Callable[[int], object],
) -> None:
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
