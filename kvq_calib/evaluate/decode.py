"""Follow the 16-bit model's own greedy text with compressed caches, token by token: where, and how far, do they leave?

A prompt of held-out text goes into every cache in one pass, which reads exact keys and values. Then the 16-bit model
chooses its likeliest token, every cache reads that token, and so on for thousands of tokens. At each of them

    kl      Σ p (log p - log q), in nats     p the 16-bit model's next token, q the model's with this cache
    first   the first token in which the likeliest differ: up to there the cache's own greedy text is the 16-bit
            model's, after it another. (A policy that decides for all rows together sees rows that would have left)
    accepted  of DRAFT tokens that the cache drafts, about those that verification with a 16-bit cache keeps: the
            first round begins after an exact pass, and rounds that the end of the text cuts are left out
    trend   by how much kl grows in 1,000 tokens, since something was encoded: least squares in each window

Tokens that would end the text are passed over, by all alike. A small model's greedy text soon repeats itself, and is
then so sure that no cache differs: the 16-bit model's entropy stands beside every figure.

Differs from what arrives in steps (`perplexity.py`): the text is the model's own, and a pass is one token.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from kvq_calib.evaluate.caches import WitnessCache, attending, nothing
from kvq_calib.evaluate.ledger import NOWHERE, Ledger
from kvq_calib.evaluate.perplexity import ROW_TOKENS, mean_and_error
from kvq_calib.evaluate.record import load_model, of_subject, setting
from kvq_calib.evaluate.subject import Subject
from kvq_calib.model.files import ModelFiles
from kvq_calib.text.corpus import Batch, digest_of
from kvq_runtime.hf.model import CACHE
from kvq_runtime.registry.measured import DECODE

PROMPT, LENGTH, BINS = 256, 4096, 8
DRAFT = 8


@dataclass(frozen=True)
class Plan:
    """The length of greedy text, and the parts it is reported in.

    length   tokens of prompt and continuation; the windows of the text are the prompts
    bins     equal parts of the continuation, with figures for each
    """

    length: int = LENGTH
    bins: int = BINS


def evaluate(
    files: ModelFiles,
    batch: Batch,
    subjects: Sequence[Subject],
    plan: Plan = Plan(),
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    progress: Callable[[int], object] = lambda tokens: None,
    ledger: Ledger = NOWHERE,
) -> list[dict[str, Any]]:
    """One record per subject. `progress` gets the number of `work(...)` tokens done.

    Raises ValueError where the length leaves fewer tokens than bins, or is more than the model was made for.
    """
    windows, prompt = batch.tokens_BT.shape
    count = plan.length - prompt
    if plan.length > files.context or count < plan.bins:
        raise ValueError(
            f"prompts of {prompt} tokens, followed to {plan.length}; use at least {prompt + plan.bins}, and at most "
            f"{files.context}, which {files.id} was made for"
        )
    model = load_model(files, device, dtype)
    used, ledger = setting(files, device, model.dtype, ledger)
    some = batch.tokens_BT.split(max(1, ROW_TOKENS // plan.length))
    found = [_kept(model, some_BT, subjects, count, progress, ledger.within(decode=count)) for some_BT in some]
    about = {
        "name": DECODE, "version": 1, "protocols": [DECODE], "prompt": prompt, **asdict(plan), "windows": windows,
        "text": batch.description, "model": files.about,
    }  # fmt: skip
    corpus = batch.description["corpus_digest"]
    return [
        of_subject(files, subject, {DECODE: figures(subject, own, plan.bins, prompt)}, plan.length, corpus, about, used)
        for subject, *own in zip(subjects, *found, strict=True)
    ]


def work(batch: Batch, subjects: int, plan: Plan) -> int:
    """Return the tokens that `evaluate` reports to `progress`, in all."""
    windows, prompt = batch.tokens_BT.shape
    return windows * (plan.length - prompt) * subjects


def _kept(model, tokens_BT: Tensor, subjects: Sequence[Subject], count: int, progress, ledger: Ledger):
    """The trace of each subject on a few windows, of which only those that are not known are followed."""
    units = [{"prompts": digest_of(tokens_BT), "subject": one.identity} for one in subjects]
    found: list[Any] = [ledger.read(**unit) for unit in units]
    left = [number for number, one in enumerate(found) if one is None]
    progress(len(tokens_BT) * count * (len(subjects) - len(left)))
    if left:
        caches = [WitnessCache(subjects[number].recipe, model, subjects[number].tensors) for number in left]
        made = traces(model, tokens_BT, caches, count, lambda: progress(len(tokens_BT) * len(left)))
        for number, one in zip(left, made, strict=True):
            ledger.write(one, **units[number])
            found[number] = one
    return found


@torch.inference_mode()
def traces(
    model: PreTrainedModel, tokens_BT: Tensor, caches: Sequence[Cache], count: int, stepped: Callable[[], object]
) -> list[dict[str, Any]]:
    """Follow the 16-bit model's greedy text for `count` tokens after prompts, with each cache.

    Of each cache, by row and token: {"kl", "agreed" (0 or 1), "entropy" of p in nats}; and by row and pass but the
    first "decoded", the share of reads that were encoded; "tokens", the text that was followed.
    """
    exact, given = DynamicCache(config=model.config), tokens_BT.to(model.device).long()
    ends = ends_of(model)
    path, entropies = [], []
    kls: list[list[Tensor]] = [[] for _ in caches]
    agreed: list[list[Tensor]] = [[] for _ in caches]
    for _ in range(count):
        logp_BV = next_tokens(model, exact, given)
        likeliest_B = _likeliest(logp_BV, ends)
        entropies.append(-(logp_BV.exp() * logp_BV).sum(-1))
        for number, cache in enumerate(caches):
            logq_BV = next_tokens(model, cache, given)
            kls[number].append((logp_BV.exp() * (logp_BV - logq_BV)).sum(-1))
            agreed[number].append(_likeliest(logq_BV, ends) == likeliest_B)
        given = likeliest_B[:, None]
        path.append(likeliest_B)
        stepped()
    common = {"entropy": torch.stack(entropies, 1).tolist(), "tokens": torch.stack(path, 1).tolist()}
    return [
        {"kl": torch.stack(kl, 1).tolist(), "agreed": torch.stack(same, 1).int().tolist(), **common}
        | {"decoded": cache.by_pass(len(tokens_BT)) if isinstance(cache, WitnessCache) else []}
        for kl, same, cache in zip(kls, agreed, caches, strict=True)
    ]


def next_tokens(model: PreTrainedModel, cache: Cache, given_BT: Tensor) -> Tensor:
    """log of the distribution of the next token, [B, V], float64: float32's rounding is as large as a small kl."""
    with attending(model, cache):
        out = model(given_BT, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
    return out.logits[:, -1].double().log_softmax(-1)


def ends_of(model: PreTrainedModel) -> list[int]:
    """The tokens that end a text."""
    given = getattr(model.generation_config, "eos_token_id", None)
    return [] if given is None else [given] if isinstance(given, int) else list(given)


def _likeliest(log_BV: Tensor, ends: Sequence[int]) -> Tensor:
    if ends:
        log_BV = log_BV.index_fill(-1, torch.tensor(ends, device=log_BV.device), -math.inf)
    return log_BV.argmax(-1)


def figures(subject: Subject, found: Sequence[Mapping[str, Any]], bins: int, prompt: int) -> dict[str, Any]:
    """Return a record's figures: means over windows, each window, and each part of the continuation; or a reason."""
    kl_WT, agreed_WT, entropy_WT, decoded_WT = (
        torch.tensor([row for one in found for row in one[name]], dtype=torch.float64)
        for name in ("kl", "agreed", "entropy", "decoded")
    )
    decoded_WT = torch.nn.functional.pad(decoded_WT, (1, 0))  # the first token is the prompt's own pass's
    count = kl_WT.shape[1]
    if not bool(decoded_WT.any()):
        return {"reason": nothing(subject.recipe, prompt + count)}
    begins = int(decoded_WT.any(0).int().argmax())
    slopes = 1000 * _slopes(kl_WT[:, begins:])
    return _means(kl_WT, agreed_WT, entropy_WT) | {
        "accepted": _accepted(agreed_WT),
        "encoded_from": begins,
        "trend": dict(zip(("kl_per_1000", "se"), mean_and_error(slopes.tolist()), strict=True)),
        "windows": [_window(*row) for row in zip(kl_WT, agreed_WT, strict=True)],
        "bins": [
            {"from": start, "to": stop}
            | _bin(*(values[:, start:stop] for values in (kl_WT, agreed_WT, entropy_WT, decoded_WT)))
            for start, stop in pairwise(count * number // bins for number in range(bins + 1))
        ],
    }


def _accepted(agreed_WT: Tensor) -> float | None:
    """Mean of the tokens that rounds of DRAFT drafted tokens keep, each of which adds one of the 16-bit model's own;
    None where no window is as long as a round."""
    kept = []
    for agreed_T in agreed_WT:
        start = 0
        while start + DRAFT <= len(agreed_T):
            kept.append(int(agreed_T[start : start + DRAFT].cumprod(0).sum()))
            start += kept[-1] + 1
    return sum(kept) / len(kept) if kept else None


def _window(kl_T: Tensor, agreed_T: Tensor) -> dict[str, Any]:
    """One window: `first` and `kl_max_at` count tokens of the continuation from 0; first None: it never left."""
    left = (agreed_T == 0).nonzero()
    return {
        "first": int(left[0]) if len(left) else None,
        "kl": float(kl_T.mean()),
        "kl_max": float(kl_T.max()),
        "kl_max_at": int(kl_T.argmax()),
        "top1": float(agreed_T.mean()),
    }


def _bin(kl_WT: Tensor, agreed_WT: Tensor, entropy_WT: Tensor, decoded_WT: Tensor) -> dict[str, float | None]:
    """A part of the continuation; kl_worst: of the window with the highest."""
    return _means(kl_WT, agreed_WT, entropy_WT) | {
        "kl_worst": float(kl_WT.mean(1).max()),
        "kl_max": float(kl_WT.max()),
        "decoded": float(decoded_WT.mean()),
    }


def _means(kl_WT: Tensor, agreed_WT: Tensor, entropy_WT: Tensor) -> dict[str, Any]:
    mean, spread = mean_and_error(kl_WT.mean(1).tolist())
    return {"kl": mean, "kl_se": spread, "top1": float(agreed_WT.mean()), "entropy": float(entropy_WT.mean())}


def _slopes(values_WT: Tensor) -> Tensor:
    """Return the slope of a least-squares line for each row, per token; 0 for a single token."""
    place_T = torch.arange(values_WT.shape[1], dtype=torch.float64)
    place_T = place_T - place_T.mean()
    return (values_WT * place_T).sum(1) / place_T.square().sum().clamp(min=1)
