"""Measure what a compressed cache costs a model: held-out perplexity, divergence from the 16-bit model, agreement.

Tokens arrive in steps, as in decoding: each step attends to what the cache gives back for the steps before it, with
sinks and recent window as in use. A prompt may come first, in one pass; its tokens are not scored, since none of them
reads the cache. A step as long as the windows is one forward pass, as for a full encode (`caches.py`).
The 16-bit model takes the same steps once, with transformers' own DynamicCache; its logits are kept while the compared
caches are filled after it, one at a time, each gone before the next.
Our own attention serves the recipes that need it, the model's the others, so that no result depends on what else is
compared.
Full encodes of a model that does not fit into memory go through it a layer at a time (`layered`), with one reading of
its weights; figures are those of the whole model but for rounding. The device holds one layer, and each cache packed:

    embed → layer 0: 16 bit, cache A, cache B, ... → layer 1: likewise → ... → head, a few windows at a time

    perplexity   exp of the mean of -log q(token)                 over all tokens but the first of each window
    kl           mean of Σ p (log p - log q), in nats             p the 16-bit model, q the model with this cache:
                 Σ p (x - y) + log Σ exp y - log Σ exp x          of their logits x and y
    top1         share of places where the likeliest tokens agree
    beyond       share of blocks whose error is beyond 99.9% of those in calibration

And score what may follow a text, which multiple-choice tasks ask (`loglikelihoods`).

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

from kvq_calib.evaluate.caches import CountedCache, Reads, answering, attending
from kvq_calib.evaluate.ledger import NOWHERE, Ledger
from kvq_calib.model.attention import passes
from kvq_calib.model.streamed import Stream
from kvq_calib.text.corpus import digest_of
from kvq_runtime.hf.model import CACHE

REFERENCE = "16 bit"
STEP = 32
PART = 128  # tokens whose logits come at once
AT_ONCE = 1 << 20  # logits compared at once, in float64: fresh memory costs more than the sums
ROW_TOKENS = 8192  # tokens of the windows that go through the model side by side
ROW_LOGITS = 1 << 28  # and their logits, which are kept: with large vocabularies fewer windows, at least one
ONLY_FULL = "windows went through the model one layer at a time, which is done by full encode alone"
State = tuple[Tensor, CountedCache | None]  # hidden states [B, T, E] on the CPU, and the cache that they are of


@dataclass
class Score:
    """Sums over tokens; `losses` and `kls` have the means of each window, in nats.

    reads            of a cache that counts what is read from it; None: it does not
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
    def of(kept: Mapping[str, Any]) -> "Score":
        """Make a score from what `asdict` made of one."""
        return Score(**{**kept, "reads": None if kept["reads"] is None else Reads(**kept["reads"])})

    def counted(self, cache: Cache | None) -> None:
        """Take in what a cache has counted, if it counts."""
        if not isinstance(cache, CountedCache):
            return
        self.reads, errors = cache.reads, cache.blocks.encoder.errors
        self.blocks, self.beyond = (0, 0) if errors is None else (errors.blocks, int(errors.beyond))

    def add(self, other: "Score") -> None:
        """Take other windows in."""
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
        """Mean of -log q: windows are of one length."""
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
        """perplexity / the reference's - 1, and the standard error of that over windows; None for one window."""
        gaps = [own - other for own, other in zip(self.losses, reference.losses, strict=True)]
        mean, error = mean_and_error(gaps)
        return math.expm1(mean), None if error is None else math.exp(mean) * error

    def figures(self, reference: "Score") -> dict[str, Any]:
        """The figures of records."""
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
    """The mean, and its standard error; None of one value."""
    count, mean = len(values), sum(values) / len(values)
    squares = sum((one - mean) ** 2 for one in values)
    return mean, math.sqrt(squares / (count - 1) / count) if count > 1 else None


class Windows:
    """Windows that go through a model side by side, and their logits by the 16-bit model, once they are needed.

    exact    gives these logits, some tokens at a time: [B, tokens, vocabulary]
    prompt   first tokens, which are not scored
    """

    def __init__(self, tokens_BT: Tensor, device: torch.device, exact: Callable[[], Iterable[Tensor]], prompt: int = 0):
        self.tokens_BT, self.prompt, self._exact = tokens_BT.to(device).long(), prompt, exact

    @cached_property
    def expected(self) -> list[Tensor]:
        """The 16-bit model's logits, as it gave them, kept off the device."""
        return [logits.cpu() for logits in self._exact()]

    @cached_property
    def norms(self) -> list[Tensor]:
        """log Σ exp of these logits, [B, tokens] float64."""
        return [
            torch.cat([some.to(self.tokens_BT.device).double().logsumexp(-1).cpu() for some in logits.split(8, 1)], 1)
            for logits in self.expected
        ]

    def score(self, found: Iterable[Tensor], progress: Callable[[int], object] = lambda tokens: None) -> Score:
        """Compare logits with the text and with those of the 16-bit model."""
        batch, length = self.tokens_BT.shape
        score, losses = Score(), torch.zeros(batch, dtype=torch.float64, device=self.tokens_BT.device)
        kls = torch.zeros_like(losses)
        done = 1
        for expected, norm, logits in zip(self.expected, self.norms, found, strict=False):
            target = self.tokens_BT[:, done : done + logits.shape[1]]
            done += logits.shape[1]
            if not target.numel():  # none after a last token
                continue
            if done - 1 <= self.prompt and self.prompt:
                progress(target.numel())
                continue
            step = max(1, AT_ONCE // logits[:, 0].numel())
            for start in range(0, target.shape[1], step):
                part = slice(start, min(start + step, target.shape[1]))
                # in float32 the terms' rounding is as large as a 4-bit cache's KL
                x, y, norm_p = (
                    given[:, part].to(target.device, torch.float64, copy=True) for given in (expected, logits, norm)
                )
                norm_q = y.logsumexp(-1)
                losses -= (y.gather(-1, target[:, part, None])[..., 0] - norm_q).sum(1)
                score.agreed += int((x.argmax(-1) == y.argmax(-1)).sum())
                gap, p = y.sub_(x).neg_(), x.sub_(norm_p[..., None]).exp_()  # in the place of y, then of x
                kls += gap.mul_(p).sum((1, 2)) + (norm_q - norm_p).sum(1)
            score.tokens += target.numel()
            progress(target.numel())
        progress(batch)  # the first token of each window is given
        score.losses, score.kls = ((sums / (length - 1 - self.prompt)).tolist() for sums in (losses, kls))
        return score


@torch.inference_mode()
def scores(
    model: PreTrainedModel,
    tokens_BT: Tensor,
    caches: Mapping[str, Callable[[], Cache]],
    step: int = STEP,
    rows: int | None = None,
    progress: Callable[[int], object] = lambda tokens: None,
    ledger: Ledger = NOWHERE,
    prompt: int = 0,
) -> dict[str, Score]:
    """Score the 16-bit model ("16 bit") and each cache on the same windows.

    tokens_BT  windows of one length
    caches     makes an empty cache, by name
    step       tokens per forward pass
    rows       windows that go through side by side (default: 8192 tokens' worth, fewer where the vocabulary is large);
               no result depends on it but by rounding, and where a dynamic window decides for all rows together
    progress   gets the number of tokens done, counted once per cache
    ledger     keeps the score of each cache on each group of rows
    prompt     tokens of the first pass, which are not scored; 0: a step, which is
    """
    length = tokens_BT.shape[1]
    if length < 2 or step < 1:
        raise ValueError(f"windows of {length} tokens in steps of {step}; use at least 2 and 1")
    if not 0 <= prompt < length - 1:
        raise ValueError(f"a prompt of {prompt} tokens in windows of {length}; use 0 to {length - 2}")
    found = {name: Score() for name in (REFERENCE, *caches)}
    rows = rows or rows_of(length, model.config.get_text_config(decoder=True).vocab_size)
    for some in tokens_BT.split(rows):
        exact = partial(logits, model, some, None, step, prompt)
        windows = Windows(some, model.device, exact, prompt)
        for name, score in found.items():
            unit = {"score": name, "tokens": digest_of(some), "step": step} | ({"prompt": prompt} if prompt else {})
            kept = ledger.read(**unit)
            if kept is None:
                cache = None if name == REFERENCE else caches[name]()
                given = windows.expected if cache is None else logits(model, some, cache, step, prompt)
                made = windows.score(given, progress)
                made.counted(cache)
                kept = asdict(made)
                ledger.write(kept, **unit)
            else:
                progress(some.numel())
            score.add(Score.of(kept))
    return found


def rows_of(length: int, vocabulary: int) -> int:
    """Return how many windows go through a model side by side."""
    return max(1, min(ROW_TOKENS // length, ROW_LOGITS // (length * vocabulary)))


def logits(
    model: PreTrainedModel, tokens_BT: Tensor, cache: Cache | None, step: int, prompt: int = 0
) -> Iterator[Tensor]:
    """The logits of each pass, PART tokens at a time: [B, tokens, vocabulary]. None: transformers' own cache."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    for one in passes(tokens_BT.shape[1], step, prompt):
        given = tokens_BT[:, one.start : one.stop].to(model.device).long()
        with attending(model, cache):
            found = model(given, **{CACHE: cache}, use_cache=True).logits
        if one.stop == prompt and isinstance(cache, CountedCache) and cache.reads is not None:
            cache.reads = Reads()  # what is scored is counted
        yield from found.split(PART, 1)


@torch.inference_mode()
def layered(
    stream: Stream,
    tokens_BT: Tensor,
    caches: Mapping[str, Callable[[], CountedCache]],
    rows: int | None = None,
    progress: Callable[[int], object] = lambda tokens: None,
    ledger: Ledger = NOWHERE,
) -> dict[str, Score]:
    """`scores` of full encodes, the same figures, a layer at a time; a ledger keeps them once all layers are done.

    caches   makes an empty cache of `stream.blank`, by name; its hidden states go on from layer to layer by themselves
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
                score.counted(cache)
                told[name] = asdict(score)
                ledger.write(told[name], **own[name])
    found = {name: Score() for name in names}
    for told in kept:
        for name, score in found.items():
            score.add(Score.of(told[name]))
    return found


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
