"""Generate the 16-bit cache's text from a compressed one: draft with its codes, verify with exact keys and values.

Self-speculative decoding. A round drafts tokens one by one with the compressed cache; one forward pass with the 16-bit
cache then reads them all, and keeps the first that it would have written itself, with one more token of its own. Both
caches go back to the text that is kept. So the text is the 16-bit cache's, and how many of the drafted tokens are kept
measures the compressed one.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", arXiv:2211.17192, algorithm 1.
Differs: the draft is the model's own, with another cache (as in QuantSpec, arXiv:2502.10424, whose caches share bits).

V = tokens of the vocabulary.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
    __version__,
)
from transformers.cache_utils import Cache, StaticLayer

from kvq_runtime.errors import check_type
from kvq_runtime.hf.attention import KVQLayer
from kvq_runtime.hf.cache import KVQCache
from kvq_runtime.hf.model import CACHE, check_model, indexed

MADE = {CACHE, "use_cache", "position_ids", "cache_position", "logits_to_keep"}  # by `generate` itself
OTHER = (  # ways of generating, and of reading a prompt
    "assistant_model", "prompt_lookup_num_tokens", "prefill_chunk_size", "use_mtp", "penalty_alpha", "dola_layers",
)  # fmt: skip


@dataclass(frozen=True)
class Verified:
    """A text that was drafted and verified; `print` it for the figures.

    sequences   prompt and new tokens, int64 [1, T], as `generate` returns
    drafted     tokens that each round drafted; fewer than asked for where the text would have ended
    accepted    how many of these the 16-bit cache kept
    """

    sequences: Tensor
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def mean_accepted(self) -> float:
        """Mean acceptance length: drafted tokens that a round kept, the 16-bit cache's own one not among them."""
        return sum(self.accepted) / len(self.accepted)

    @property
    def histogram(self) -> dict[int, int]:
        """Rounds by the number of tokens that they accepted."""
        return dict(sorted(Counter(self.accepted).items()))

    def __str__(self) -> str:
        share = sum(self.accepted) / sum(self.drafted)
        rounds = ", ".join(f"{length}: {count}" for length, count in self.histogram.items())
        return (
            f"{len(self.accepted)} passes of the 16-bit cache; {self.mean_accepted:.2f} drafted tokens accepted in "
            f"each, {share:.0%} of all; passes by accepted tokens: {rounds}"
        )


def verified_generate(
    model: PreTrainedModel,
    cache: KVQCache,
    input_ids: Tensor,
    *,
    draft: int = 8,
    exact: Cache | None = None,
    **settings: Any,
) -> Verified:
    """Generate what the model writes with its 16-bit cache, drafted with a compressed one.

        cache = KVQCache.from_pretrained("qwen2.5-7b-aqua-2bit", model=model)
        result = verified_generate(model, cache, **inputs, max_new_tokens=100)
        print(tokenizer.decode(result.sequences[0]), result)

    cache      drafts; empty, or with the prompt's first tokens, as `PrefixStore.load` gives it
    input_ids  one prompt, int64 [1, T], without padding
    draft      tokens that are drafted before each pass of the 16-bit cache, at least 1
    exact      a 16-bit cache to use, such as `PrefixStore(path, "exact", model=model).load(ids)`; None: a new one
    settings   of `model.generate`. `cache_implementation="offloaded"` keeps the 16-bit cache in host memory (on CUDA)

    Greedy search gives the tokens of `model.generate(**inputs)`, but for ties: passes of several tokens round otherwise
    than those of one. Sampling draws from the same distribution, not the same tokens. Processors and criteria must
    depend on tokens and scores alone. Afterwards both caches hold the text but its newest token; after an error or
    Ctrl-C what earlier rounds kept. Where both are empty the prompt is read once.

    Raises ValueError for several rows, beams, padding, inputs that are no tokens, a `guidance_scale`, SynthID, a prompt
    in chunks, other ways of drafting, static and quantized caches, and recurrent layers; RuntimeError where what going
    back would need was evicted (H2O).
    """
    _check_given(model, cache, input_ids, draft)
    streamer, counts = settings.get("streamer"), []

    def decode(
        model: Any, input_ids: Tensor, logits_processor: LogitsProcessorList, stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        others = [name for name in OTHER if settings.get(name) or getattr(generation_config, name, None)]
        _check(input_ids, cache, generation_config, kwargs, others, logits_processor)
        exact, sample = kwargs[CACHE], bool(generation_config.do_sample)
        rounds = _Rounds(model, cache, exact, logits_processor, stopping_criteria, sample)
        tokens = input_ids.to(model.device)
        ended = False
        while not ended:
            before = tokens.shape[1]
            try:
                if not counts:
                    rounds.read_prompt(tokens[:, :-1])
                tokens, drafted, accepted, ended = rounds.next(tokens, draft)
            except BaseException:
                rounds.go_back(before - 1)
                raise
            counts.append((drafted, accepted))
            if streamer is not None:
                for token in tokens[0, before:].cpu():
                    streamer.put(token[None])
        if streamer is not None:
            streamer.end()
        return tokens

    generate: Any = model.generate
    given = {} if exact is None else {CACHE: exact}
    sequences = generate(input_ids, custom_generate=decode, **given, **settings)
    drafted, accepted = zip(*counts, strict=True)
    return Verified(sequences, drafted, accepted)


def _check_given(model: PreTrainedModel, cache: KVQCache, input_ids: Tensor, draft: int) -> None:
    """Refuse arguments of other types, before `generate` fails on them; TypeError or ValueError."""
    check_model(model)
    check_type("cache", cache, KVQCache, "a KVQCache, which drafts")
    if indexed(model):
        raise ValueError(
            f"{type(model).__name__} chooses tokens by keys of an indexer, which no second cache is given; use generate"
        )
    if not isinstance(input_ids, Tensor) or input_ids.is_floating_point() or input_ids.dim() != 2:
        shape = f", of shape {list(input_ids.shape)}" if isinstance(input_ids, Tensor) else ""
        kind = getattr(input_ids, "dtype", type(input_ids).__name__)
        raise ValueError(f"input_ids are {kind}{shape}; give the ids of one prompt, int64 [1, T]")
    if not input_ids.shape[1]:
        raise ValueError("input_ids are empty; give a prompt of at least one token")
    if isinstance(draft, bool) or not isinstance(draft, int) or draft < 1:
        raise ValueError(f"draft={draft}; use a whole number of tokens, at least 1")


def _check(
    input_ids: Tensor, cache: KVQCache, config: GenerationConfig, given: dict[str, Any], ways: list[str],
    processors: LogitsProcessorList,
) -> None:  # fmt: skip
    """Refuse what is not generated in this way."""
    exact = given.get(CACHE)
    mask = given.get("attention_mask")
    others = [name for name, value in given.items() if value is not None and name not in MADE]
    if mask is not None and bool(mask.all()):
        others.remove("attention_mask")
    what = None
    if len(input_ids) != 1:
        what = f"{len(input_ids)} rows; give one prompt, and neither num_beams nor num_return_sequences"
    elif cache._recurrent:
        what = f"a model with {cache._recurrent}, whose state cannot go back; use generate"
    elif cache._stock and __version__.startswith("5.17."):
        what = "layers with sliding windows, which go back over one pass alone in transformers 5.17; use 5.18 or newer"
    elif others:
        what = f"{', '.join(others)}; give tokens alone, without padding"
    elif config.return_dict_in_generate or (config.guidance_scale or 1) != 1:
        what = "return_dict_in_generate or guidance_scale; leave both out"
    elif ways:
        what = f"{', '.join(ways)}; it reads the prompt, drafts and chooses in its own way: leave that out"
    elif any(isinstance(one, SynthIDTextWatermarkLogitsProcessor) for one in processors):
        what = "SynthID's watermark, which counts what is only drafted; use WatermarkingConfig, or generate"
    elif not isinstance(exact, Cache) or exact is cache:
        what = "no 16-bit cache of its own; leave out use_cache, or give another cache as exact"
    elif any(isinstance(one, StaticLayer) or not one.is_croppable or hasattr(one, "_quantize") for one in exact.layers):
        what = (
            f"a {type(exact).__name__}, whose layers are quantized or cannot go back; leave out cache_implementation, "
            'or use "offloaded"'
        )
    elif max(one.get_seq_length() for one in (cache, exact)) >= input_ids.shape[1]:
        what = f"a cache with more tokens than precede the newest of the prompt's {input_ids.shape[1]}; reset() it"
    if what is not None:
        raise ValueError(f"verified_generate was given {what}")


class _Rounds:
    """The rounds of one text: `cache` drafts, `exact` verifies. `sample`: draw tokens, in place of the likeliest."""

    def __init__(
        self, model: Any, cache: KVQCache, exact: Cache, processors: LogitsProcessorList,
        criteria: StoppingCriteriaList, sample: bool,
    ):  # fmt: skip
        self.model, self.cache, self.exact = model, cache, exact
        self.processors, self.criteria, self.sample = processors, criteria, sample
        for held in (cache, exact):
            held.activate_past_recording()  # of sliding windows, which could not go back without

    def read_prompt(self, tokens_1T: Tensor) -> None:
        """Read what precedes the prompt's newest token, for both caches: a first pass attends to exact keys and values,
        which go into the 16-bit cache too. Where one holds something, or wants to know positions, each reads its own.
        """
        cache, exact = self.cache, self.exact
        if cache.get_seq_length() or exact.get_seq_length() or isinstance(exact, KVQCache) or not tokens_1T.numel():
            return
        if 0 < len(exact.layers) < len(cache.layers):  # a model that loops adds what one lacks, when it reads it
            return

        def update(key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            exact.update(key_states, value_states, layer_idx, *args, **kwargs)
            return type(cache).update(cache, key_states, value_states, layer_idx, *args, **kwargs)

        cache.update = update  # type: ignore[method-assign]
        try:
            self._logits(cache, tokens_1T, 1)
        finally:
            del cache.update

    def next(self, tokens_1T: Tensor, draft: int) -> tuple[Tensor, int, int, bool]:
        """Lengthen a text by one round: (text, drafted tokens, accepted ones, whether it has ended)."""
        drafted_1T, chances = tokens_1T, []
        while len(chances) < draft and not (chances and self._ended(drafted_1T)):
            chances.append(self._chances(drafted_1T, self._logits(self.cache, drafted_1T, 1)))
            drafted_1T = torch.cat([drafted_1T, chances[-1].multinomial(1)[None]], 1)
        first, accepted, ended = tokens_1T.shape[1], 0, False
        for place, logits_V in enumerate(self._logits(self.exact, drafted_1T, len(chances) + 1)):
            p_V, agreed = self._chances(tokens_1T, logits_V[None]), False
            if place < len(chances):
                token, q_V = drafted_1T[0, first + place], chances[place]
                agreed = bool(torch.rand((), dtype=torch.float32, device=p_V.device) * q_V[token] < p_V[token])
                rest_V = (p_V - q_V).clamp_min(0)
                p_V = torch.zeros_like(p_V).index_fill(0, token, 1) if agreed else rest_V if rest_V.any() else p_V
            tokens_1T = torch.cat([tokens_1T, p_V.multinomial(1)[None]], 1)
            accepted, ended = accepted + agreed, self._ended(tokens_1T)
            if ended or not agreed:
                break
        for held in (self.cache, self.exact):
            held.crop(min(0, tokens_1T.shape[1] - 1 - held.get_seq_length()))
        return tokens_1T, len(chances), accepted, ended

    def go_back(self, length: int) -> None:
        """Keep at most so many tokens, in layers that a pass has reached before it stopped, and in the others."""
        for held in (self.cache, self.exact):
            layers: list[Any] = [*held.layers]
            kept = min([length, *(layer.get_seq_length() for layer in layers)])
            if isinstance(held, KVQCache):
                held.blocks.settle()
                if kept < held.blocks.length:
                    held.blocks.crop(kept)
            for layer in layers:  # once each: what a sliding window has not recorded is lost
                if layer.is_initialized and not isinstance(layer, KVQLayer):
                    layer.crop(min(0, kept - layer.get_seq_length()))

    def _logits(self, held: Cache, tokens_1T: Tensor, count: int) -> Tensor:
        """Read the tokens that a cache does not hold; the logits after the newest `count`, float32 [count, V]."""
        given = tokens_1T[:, held.get_seq_length() :]
        out = self.model(given, **{CACHE: held}, use_cache=True, logits_to_keep=count)
        return out.logits[0, -count:].to(torch.float32, copy=True)

    def _chances(self, tokens_1T: Tensor, logits_1V: Tensor) -> Tensor:
        """The distribution of the token after a text, [V]: of greedy search, 1 for the likeliest."""
        given: Any = tokens_1T, logits_1V
        scores_V = self.processors(*given)[0]
        if self.sample:
            return scores_V.softmax(0)
        return torch.zeros_like(scores_V).index_fill(0, scores_V.argmax(), 1)

    def _ended(self, tokens_1T: Tensor) -> bool:
        given: Any = tokens_1T, None  # as transformers' own loop gives them
        return bool(self.criteria(*given).all())
