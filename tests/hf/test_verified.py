"""What a compressed cache drafts and the 16-bit cache verifies is the 16-bit cache's text."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from feeding import small
from generating import NEW, kvq, padded, stock
from models import prompt, random_model
from transformers import StoppingCriteriaList, SynthIDTextWatermarkingConfig
from transformers.cache_utils import Cache, DynamicCache, QuantizedLayer

from kvq_runtime import KVQCache, PrefixStore, preset, verified_generate
from kvq_runtime.hf import geometry_of
from kvq_runtime.hf.model import CACHE
from kvq_runtime.hf.verified import Verified, _Rounds

GREEDY = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 1}
RECIPES = ["exact", "exact-pre", "higgs-4bit", "kivi-2bit", "mean-higgs-2bit", "aqua-2bit", "h2o", "squat-online-2bit"]


@pytest.fixture
def model():
    return random_model("llama", "kvq")


def check(result: Verified, expected: torch.Tensor, first: int, draft: int) -> None:
    """The text is the expected one, and every token of it is accepted or the 16-bit cache's own."""
    assert torch.equal(result.sequences, expected)
    own = result.sequences.shape[1] - first - sum(result.accepted)
    assert len(result.accepted) - 1 <= own <= len(result.accepted), "one a pass, but where a draft ended the text"
    assert all(0 <= kept <= made <= draft for kept, made in zip(result.accepted, result.drafted, strict=True))
    assert sum(result.histogram.values()) == len(result.accepted)


@pytest.mark.parametrize("name", RECIPES)
def test_greedy_text_is_that_of_the_16_bit_cache(model, name):
    ids, cache, exact = prompt(1, 60), kvq(name, model), stock(model)
    expected = model.generate(ids, **GREEDY)
    result = verified_generate(model, cache, ids, draft=5, exact=exact, **GREEDY)
    check(result, expected, 60, 5)
    assert {cache.get_seq_length(), exact.get_seq_length()} == {60 + NEW - 1}, "both hold the text but its newest token"
    longer = torch.cat([result.sequences, prompt(1, 9)], 1)  # and go on with the next turn
    again = verified_generate(model, cache, longer, draft=5, exact=exact, **GREEDY)
    check(again, model.generate(longer, **GREEDY), longer.shape[1], 5)
    if name == "exact":
        assert result.histogram == {4: 1, 5: 6}
        assert str(result).startswith("7 passes of the 16-bit cache; 4.86 drafted tokens accepted in each, 100% of all")


@pytest.mark.parametrize("sampled", [False, True])
def test_a_better_recipe_is_accepted_more_often(model, sampled):
    settings = GREEDY | {"do_sample": sampled, "max_new_tokens": 60}
    names = ("exact", "higgs-4bit", "rtn-2bit")
    kept = [verified_generate(model, kvq(name, model), prompt(1, 60), **settings).mean_accepted for name in names]
    assert kept[0] > kept[1] > 2 * kept[2] > 0, kept


SLIDING = {
    "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
    "num_hidden_layers": 4, "sliding_window": 16, "use_sliding_window": True,
}  # fmt: skip


@pytest.mark.parametrize("settings, attention", [({}, "sdpa"), (SLIDING, "sdpa"), (SLIDING, "kvq")])
def test_other_models_and_attentions(settings, attention):
    model, ids = random_model("qwen3", attention, **settings), prompt(1, 40)
    if settings and transformers.__version__.startswith("5.17."):
        with pytest.raises(ValueError, match="sliding windows, which go back over one pass alone"):
            verified_generate(model, kvq("higgs-4bit", model), ids, **GREEDY)
        return
    check(verified_generate(model, kvq("higgs-4bit", model), ids, **GREEDY), model.generate(ids, **GREEDY), 40, 8)


def test_a_text_ends_where_generate_ends_it(model):
    """In the middle of a draft that goes on: at a token that ends texts, a length, what a criterion says."""
    ids, whole = prompt(1, 60), model.generate(prompt(1, 60), **GREEDY)
    end = int(whole[0, 68])
    until = StoppingCriteriaList([lambda tokens, scores, **_: torch.tensor([tokens.shape[1] >= 67])])
    for more in ({"eos_token_id": end}, {"max_new_tokens": 1}, {"max_new_tokens": 7}, {"stopping_criteria": until}):
        for name in ("exact", "kivi-2bit"):
            settings = GREEDY | more
            result = verified_generate(model, kvq(name, model), ids, draft=5, **settings)
            check(result, model.generate(ids, **settings), 60, 5)
            assert whole.shape[1] > result.sequences.shape[1]


def test_processors_of_scores_and_streamers_are_as_in_generate(model):
    ids, settings = prompt(1, 60), GREEDY | {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 9}
    heard = []
    streamer = SimpleNamespace(put=lambda tokens: heard.extend(tokens.flatten().tolist()), end=lambda: heard.append(-1))
    result = verified_generate(model, kvq("higgs-4bit", model), ids, streamer=streamer, **settings)
    check(result, model.generate(ids, **settings), 60, 8)
    assert heard == [*result.sequences[0].tolist(), -1]


def test_a_prompt_is_read_once_and_prefixes_are_taken_from_stores(model, tmp_path):
    ids, read = prompt(1, 90), []
    expected = model.generate(ids, **GREEDY)
    embedding = model.get_input_embeddings()
    handle = embedding.register_forward_pre_hook(lambda _, args: read.append(args[0].shape[1]))
    verified_generate(model, kvq("higgs-4bit", model), ids, **GREEDY)
    assert read[0] == 89 and max(read[1:]) <= 9
    geometry = geometry_of(model)
    stores = [PrefixStore(tmp_path, small(preset(name), geometry), model=model) for name in ("exact", "higgs-4bit")]
    for store in stores:
        store.generate(ids, **GREEDY)
    for exact in (stores[0].load(ids), stores[0].load_decoded(ids)):
        read.clear()
        result = verified_generate(model, stores[1].load(ids), ids, exact=exact, **GREEDY)
        check(result, expected, 90, 8)
        assert max(read) <= 90 - 64 + 8, "kept tokens are read again"
    handle.remove()


class Rounded(QuantizedLayer):
    """One of transformers' quantized layers, whose library is not needed: it goes back in its newest tokens alone."""

    def _quantize(self, tensor, axis):
        return tensor

    def _dequantize(self, q_tensor):
        return q_tensor


@pytest.mark.parametrize("settings, attention", [({}, "kvq"), (SLIDING, "sdpa")])
@pytest.mark.parametrize("at", [0, 2, 4, 5, 11])
def test_a_round_that_stops_midway_leaves_the_text_before_it(at, settings, attention):
    """In the prompt's pass, in a draft's, in a verification's: what comes next goes on from what was heard."""
    if settings and transformers.__version__.startswith("5.17."):
        pytest.skip("verified_generate refuses these layers")
    model, ids, heard, passes = random_model("qwen3", attention, **settings), prompt(1, 60), [], [0]
    cache, exact = kvq("higgs-4bit", model), stock(model)
    expected = model.generate(ids, **GREEDY)

    def stop(*_) -> None:
        passes[0] += 1
        if passes[0] == at + 1:
            raise KeyboardInterrupt

    streamer = SimpleNamespace(put=lambda tokens: heard.extend(tokens.flatten().tolist()), end=lambda: None)
    handle = model.get_decoder().layers[1].mlp.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        verified_generate(model, cache, ids, draft=4, exact=exact, streamer=streamer, **GREEDY)
    handle.remove()
    lengths = {cache.get_seq_length(), *(layer.get_seq_length() for layer in exact.layers)}
    assert max(lengths) <= len(heard) - 1, "a token that was only drafted is held"
    left = GREEDY | {"max_new_tokens": 60 + NEW - len(heard)}
    result = verified_generate(model, cache, torch.tensor([heard]), draft=4, exact=exact, **left)
    assert torch.equal(result.sequences, expected)


@pytest.mark.gpu
def test_a_16_bit_cache_is_kept_in_the_memory_of_the_host(model):
    model, ids = model.to("cuda"), prompt(1, 60).to("cuda")
    result = verified_generate(model, kvq("higgs-4bit", model), ids, cache_implementation="offloaded", **GREEDY)
    check(result, model.generate(ids, **GREEDY), 60, 8)


class Told:
    """A cache of a number of tokens."""

    def __init__(self):
        self.length = 0

    def get_seq_length(self) -> int:
        return self.length

    def crop(self, count: int) -> None:
        assert count <= 0
        self.length += count

    def activate_past_recording(self) -> None:
        """Nothing slides."""


def test_sampled_text_has_the_distribution_of_the_16_bit_cache():
    """Two tokens of three, by their own chances after each token, from a draft of far other chances."""
    torch.manual_seed(1)
    chances = {"draft": torch.rand(3, 3).log() * 2, "exact": torch.rand(3, 3).log() * 2}
    caches = {name: Told() for name in chances}

    def forward(given, use_cache, logits_to_keep, **cache):
        name = next(name for name, own in caches.items() if own is cache[CACHE])
        caches[name].length += given.shape[1]
        return SimpleNamespace(logits=chances[name][given[:, -logits_to_keep:]])

    def plain(tokens, scores):
        return scores

    draws, counts = 2500, torch.zeros(3, 3)
    for _ in range(draws):
        caches["draft"].length = caches["exact"].length = 0
        rounds = _Rounds(forward, caches["draft"], caches["exact"], plain, lambda tokens, _: tokens[:1, 0] < 0, True)
        text = torch.zeros(1, 1, dtype=torch.long)
        while text.shape[1] < 3:
            text = rounds.next(text, 2)[0]
        counts[text[0, 1], text[0, 2]] += 1
    p, q = (chances[name].softmax(-1) for name in ("exact", "draft"))
    expected, drafted = (x[0, :, None] * x for x in (p, q))
    error = (expected * (1 - expected) / draws).sqrt()
    assert ((counts / draws - expected).abs() < 4 * error).all(), (counts / draws, expected)
    assert ((drafted - expected).abs() > 6 * error).any(), "the draft's own text would pass"


def test_what_is_refused(model):
    ids, cache = prompt(1, 20), kvq("higgs-4bit", model)
    rows, mask = padded(prompt(1, 20), 15)
    full = kvq("higgs-4bit", model)
    with torch.no_grad():
        model(ids, past_key_values=full)
    for message, given, settings in [
        ("draft=0; use", {}, {"draft": 0}),
        ("draft=2.5; use a whole number", {}, {"draft": 2.5}),
        (r"torch.int64, of shape \[20\]; give", {"input_ids": ids[0]}, {}),
        (r"torch.float32, of shape \[1, 20\]; give", {"input_ids": ids.float()}, {}),
        ("input_ids are list; give", {"input_ids": ids.tolist()}, {}),
        ("input_ids are empty", {"input_ids": ids[:, :0]}, {}),
        ("2 rows", {"input_ids": prompt(2, 20)}, {}),
        ("3 rows", {}, {"num_beams": 3}),
        ("2 rows", {}, {"num_return_sequences": 2, "do_sample": True}),
        ("attention_mask; give tokens alone, without padding", {"input_ids": rows}, {"attention_mask": mask}),
        ("return_dict_in_generate or guidance_scale", {}, {"return_dict_in_generate": True}),
        ("return_dict_in_generate or guidance_scale", {}, {"guidance_scale": 1.5}),
        ("no 16-bit cache of its own", {}, {"use_cache": False}),
        ("no 16-bit cache of its own", {}, {"exact": cache}),
        ("assistant_model; it reads the prompt", {}, {"assistant_model": model}),
        ("prompt_lookup_num_tokens; it reads", {}, {"prompt_lookup_num_tokens": 3}),
        ("prefill_chunk_size; it reads the prompt", {}, {"prefill_chunk_size": 8}),
        (
            "SynthID's watermark",
            {},
            {"watermarking_config": SynthIDTextWatermarkingConfig(5, [3, 5]), "do_sample": True},
        ),
        ("a StaticCache, whose layers are quantized or cannot", {}, {"cache_implementation": "static"}),
        (
            "a Cache, whose layers are quantized or cannot",
            {},
            {"exact": Cache([Rounded() for _ in range(3)])},
        ),
        ("a cache with more tokens than precede the newest of the prompt's 20", {"cache": full}, {}),
    ]:
        with pytest.raises(ValueError, match=message):
            verified_generate(model, **({"cache": cache, "input_ids": ids} | given), **(GREEDY | settings))
    for wrong, given in (("model", ("demo", cache)), ("cache", (model, DynamicCache()))):
        with pytest.raises(TypeError, match=f"{wrong} is of type"):
            verified_generate(*given, ids)
    recurrent = random_model("llama", "kvq")
    held = KVQCache.from_recipe("higgs-4bit", recurrent)
    held._recurrent = "recurrent layers"
    with pytest.raises(ValueError, match="recurrent layers, whose state cannot go back"):
        verified_generate(recurrent, held, ids, **GREEDY)
