"""Whole models through transformers' own generate: `exact` is the stock cache, token for token; others stay close."""

from pathlib import Path

import pytest
import torch
from generating import WAYS, generate, kvq, padded, replayed, stock
from models import CONFIGS, prompt, random_model
from tiers import some, together
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvq_runtime.geometry import Sliding
from kvq_runtime.hf import KVQCache
from kvq_runtime.hf.model import announce_pass

LOSSY = [
    "exact-pre",
    "higgs-2bit",
    "higgs-4bit",
    "mean-higgs-2bit",
    "aqua-2bit",
    "aqua-2bit+position=post",
    "aqua-2bit+key.axis=channel+value.axis=channel",
    "aqua-2bit+all.predict.below=1,2",
    "rtn-4bit",
    "gear-4bit",
    "h2o+policies.heavy.share=0.4",
    "aqua-h2o-2bit+policies.heavy.share=0.4",
    "subkv-2bit",
    "subkv-2bit-by-layer",
    "subkv-aqua-2bit",
    "svdq-shadow-2bit-v4+policies.chunks.budget=16+policies.chunks.outliers=1",
    "svdq-shadow-online-2.25bit+policies.chunks.budget=16+policies.chunks.outliers=1",
]
QUICK = [("exact-pre", "greedy"), ("higgs-4bit", "beams"), (LOSSY[11], "beams"), ("subkv-2bit-by-layer", "sampling"),
         (LOSSY[15], "beams")]  # fmt: skip


# ---- exact is the stock cache ----


@pytest.mark.parametrize("case", some(together([*WAYS], ["sdpa", "eager"]), ("sampling", "eager"), ("lookup", "eager")))
def test_exact_generates_what_the_stock_cache_generates(case):
    way, attention = case
    model = random_model("llama", attention)
    ids = prompt(1 if way in ("lookup", "assisted") else 2)
    assert torch.equal(generate(model, ids, kvq("exact", model), way), generate(model, ids, stock(model), way))


@pytest.mark.parametrize("kind", some(CONFIGS, "qwen3", "yarn"))
@pytest.mark.parametrize("way", some(["greedy", "beams"], "greedy"))
def test_exact_is_exact_for_every_architecture_and_for_padded_rows(kind, way):
    model = random_model(kind)
    ids, mask = padded(prompt(3), 40, 33, 3)
    cache = kvq("exact", model)
    one = generate(model, ids, cache, way, attention_mask=mask)
    two = generate(model, ids, stock(model), way, attention_mask=mask)
    assert torch.equal(one, two)
    assert cache.blocks.layers[0].encoded >= 48


def test_turns_of_a_conversation_use_the_same_cache():
    model = random_model("qwen2")
    caches, texts = (kvq("exact", model), stock(model)), []
    for cache in caches:
        ids = prompt(2, 20)
        for turn in range(3):
            ids = generate(model, ids, cache, max_new_tokens=12)
            ids = torch.cat([ids, prompt(2, 9, seed=turn + 1)], 1)
        texts.append(ids)
    assert torch.equal(*texts)
    assert caches[0].get_seq_length() == caches[1].get_seq_length()
    caches[0].reset()
    assert caches[0].get_seq_length() == 0
    assert torch.equal(generate(model, ids, caches[0]), generate(model, ids, stock(model)))


@pytest.mark.parametrize("way", ["lookup", "assisted", "sliding"])
def test_a_second_assisted_turn_goes_on_behind_the_first(way):
    """transformers hands on the whole text again, whatever the cache holds."""
    model, ids, way = (mixed(), prompt(1), "lookup") if way == "sliding" else (random_model("llama"), prompt(1), way)
    cache, expected = kvq("exact", model), stock(model)
    for turn in range(2):
        plain = generate(model, ids, expected)
        assert torch.equal(generate(model, ids, cache, way), plain)
        assert cache.get_seq_length() == expected.get_seq_length() == plain.shape[1] - 1
        ids = torch.cat([plain, prompt(1, 9, seed=turn + 1)], 1)


def test_crop_and_selection_of_rows():
    model, ids = random_model("llama"), prompt(3, 50)
    found = []
    with torch.no_grad():
        for cache in (kvq("exact", model), stock(model)):
            model(ids, past_key_values=cache)
            cache.crop(-5)
            cache.batch_select_indices(torch.tensor([2, 0]))
            cache.batch_repeat_interleave(2)
            cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
            found.append(model(ids[[0, 2, 2, 0], 45:], past_key_values=cache).logits)
            assert cache.batch_size == 4 if isinstance(cache, KVQCache) else True
    assert torch.equal(*found)


# ---- lossy recipes ----


@pytest.mark.parametrize("case", some(together(LOSSY, [*WAYS]), *QUICK))
def test_every_way_of_generating_works_with_lossy_recipes(case):
    name, way = case
    model = random_model("llama")
    ids = prompt(1 if way in ("lookup", "assisted") else 2)
    cache = kvq(name, model)
    model.set_attn_implementation(cache.attention or "sdpa")
    replayed(model, ids, cache, kvq(name, model), way)
    report = cache.memory_report()
    assert report.tokens == cache.get_seq_length() >= 78 and (report.kept < 55) == ("heavy" in name)
    evicts_or_waits = cache.blocks.recipe.arrival_dependent
    assert cache.blocks.layers[2].encoded >= (0 if evicts_or_waits else 48) and cache.blocks.reencoded == 0


@pytest.mark.parametrize("kind", some(["llama", "qwen3", "yarn"], "yarn"))
def test_logits_are_closer_the_more_bits_there_are(kind):
    """The relative error of the logits after a padded prompt, of a model that nobody trained."""
    model = random_model(kind)
    ids, mask = padded(prompt(2, 70), 70, 51)
    errors, expected = [], None
    with torch.no_grad():
        for name in (None, "rtn-8bit", "higgs-4bit", "higgs-3bit", "higgs-2bit", "higgs-2bit"):
            cache = stock(model) if name is None else kvq(name, model)
            model(ids[:, :60], attention_mask=mask[:, :60], past_key_values=cache)
            found = model(ids[:, 60:], attention_mask=mask, past_key_values=cache).logits
            expected = found if expected is None else expected
            errors.append(float((found - expected).norm() / expected.norm()))
    assert errors == sorted(errors)
    assert 0 < errors[1] < 0.03 and errors[2] < 0.35


@pytest.mark.parametrize("name", ["exact", "aqua-2bit"])
def test_models_in_bf16(name):
    model = random_model("qwen2").bfloat16()
    ids, mask = padded(prompt(2), 40, 22)
    cache = kvq(name, model)
    out = generate(model, ids, cache, attention_mask=mask)
    assert cache.blocks.layers[0].window_2BTC.dtype == torch.bfloat16
    if name == "exact":
        assert torch.equal(out, generate(model, ids, stock(model), attention_mask=mask))


# ---- models whose layers do not all attend to everything ----


def mixed() -> PreTrainedModel:
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    return random_model("qwen3", layer_types=kinds, num_hidden_layers=4, sliding_window=16, use_sliding_window=True)


@pytest.mark.parametrize("way", some(["greedy", "beams", "lookup"], "greedy"))
def test_sliding_layers_keep_transformers_own(way):
    model = mixed()
    ids = prompt(1 if way == "lookup" else 2)
    cache = kvq("exact", model)
    assert torch.equal(generate(model, ids, cache, way), generate(model, ids, stock(model), way))
    assert sorted(cache.blocks.layers) == [0, 1]
    for name in ("mean-higgs-2bit", "aqua-2bit"):  # a prediction is from the next layer below that attends to all
        cache = kvq(name, model)
        generate(model, ids, cache, way)
        assert cache.blocks.layers[1].encoded >= 48
        report = cache.memory_report()
        assert "of layers that slide or recur" in str(report)
        assert report.total_bytes == report.sequence_bytes + report.shared_bytes + report.sliding_bytes
        if way == "greedy":
            beside = Sliding.from_config(model.config.to_dict()).bytes(report.tokens)
            assert report.sliding_bytes == 2 * len(ids) * beside  # in float32


def test_a_crop_that_sliding_layers_cannot_follow_changes_nothing():
    model, ids = mixed(), prompt(1, 40)
    with torch.no_grad():
        cache, untouched = kvq("exact", model), kvq("exact", model)
        for held in (cache, untouched):
            model(ids[:, :30], past_key_values=held)
        with pytest.raises(RuntimeError, match="activate_past_recording"):
            cache.crop(-5)
        assert cache.get_seq_length() == 30
        found = [model(ids[:, 30:], past_key_values=held).logits for held in (cache, untouched)]
        assert torch.equal(*found)
        recorded = kvq("exact", model)
        recorded.activate_past_recording()
        model(ids[:, :30], past_key_values=recorded)
        recorded.crop(-5)
        assert recorded.get_seq_length() == 25


# ---- several caches, stopped passes, foreign models ----


def test_caches_of_one_model_do_not_meet():
    model, ids = random_model("llama"), prompt(2, 60)
    hooks = len(model.model._forward_pre_hooks)
    caches = [kvq("aqua-2bit", model), kvq("exact", model), stock(model), kvq("aqua-2bit", model)]
    assert len(model.model._forward_pre_hooks) == hooks + 1
    with torch.no_grad():
        together = [
            [model(ids[:, a:b], past_key_values=cache).logits for cache in caches] for a, b in ((0, 40), (40, 60))
        ]
        alone = kvq("aqua-2bit", model)
        apart = [model(ids[:, a:b], past_key_values=alone).logits for a, b in ((0, 40), (40, 60))]
    for step, lonely in zip(together, apart, strict=True):
        assert torch.equal(step[0], lonely) and torch.equal(step[3], lonely) and torch.equal(step[1], step[2])
    assert not torch.equal(together[1][0], together[1][2])


@pytest.mark.parametrize("name", ["exact", "aqua-2bit"])
@pytest.mark.parametrize("kind", ["full", "mixed"])
def test_a_forward_pass_that_fails_is_as_if_it_had_never_been(name, kind):
    if kind == "mixed" and name == "aqua-2bit":
        name = "mean-higgs-2bit"
    model = mixed() if kind == "mixed" else random_model("llama")
    ids = prompt(2, 60)
    cache, other = kvq(name, model), kvq(name, model)
    bounds = [(0, 40), (40, 44), (44, 45)]

    def fail(*_):
        raise KeyboardInterrupt

    with torch.no_grad():
        for a, b in bounds[: 1 if kind == "mixed" else 3]:
            hook = model.model.layers[2].register_forward_pre_hook(fail)
            with pytest.raises(KeyboardInterrupt):
                model(ids[:, a:b], past_key_values=cache)
            hook.remove()
            one = model(ids[:, a:b], past_key_values=cache).logits
            two = model(ids[:, a:b], past_key_values=other).logits
            assert torch.equal(one, two)
    assert cache.get_seq_length() == other.get_seq_length()


def test_positions_must_come_from_the_model():
    model, other = random_model("llama"), random_model("llama", seed=3)
    cache = kvq("aqua-2bit", model)
    with torch.no_grad(), pytest.raises(RuntimeError, match="make the cache with model=model"):
        other(prompt(1), past_key_values=cache)
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        model(prompt(1), past_key_values=cache)


def test_positions_on_several_axes_are_those_of_text_or_refused():
    """As Qwen 3.5 has them, of time, height and width: an image's differ."""
    model, axes = random_model("llama"), torch.arange(10).expand(3, 1, -1).clone()
    cache, given = kvq("aqua-2bit", model), {"input_ids": prompt(1, 10), "position_ids": axes}
    assert announce_pass(model.model, (), given | {"past_key_values": cache}) is not None
    axes[1:, :, 4:] += 1
    with pytest.raises(RuntimeError, match="position on each of several axes"):
        announce_pass(model.model, (), given | {"past_key_values": cache})
    assert announce_pass(model.model, (), given | {"past_key_values": kvq("higgs-2bit", model)}) is not None


# ---- trained models ----


@pytest.mark.slow
def test_stories_are_told_as_ever(test_data: Path):
    folder = test_data / "models" / "stories260K"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    golden = (folder / "greedy_golden.txt").read_text()
    for name in ("exact", "exact-pre"):
        cache = KVQCache.from_recipe(name, model)
        start = torch.tensor([[tokenizer.bos_token_id]])
        out = model.generate(start, past_key_values=cache, max_new_tokens=256, do_sample=False)
        assert tokenizer.decode(out[0], skip_special_tokens=True).strip() == golden.strip()
        assert cache.blocks.layers[0].encoded == 128
