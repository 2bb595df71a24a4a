"""Models whose attention reads what a cache has decoded: latents of all heads (MLA), layers that share keys. What is
fitted to them is what they cache, and serves."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from architectures import E2B, random, stored
from generating import generate, padded, stock
from models import prompt
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, PreTrainedModel

from kvq_calib.evaluate import errors, perplexity
from kvq_calib.evaluate.caches import CountedCache, FullCache
from kvq_calib.evaluate.perplexity import layered
from kvq_calib.model import find as models
from kvq_calib.model.carried import Carried
from kvq_calib.model.decoder import noting
from kvq_calib.model.files import ModelFiles
from kvq_calib.model.streamed import Stream
from kvq_calib.run import budget
from kvq_calib.run import calibrate as runs
from kvq_calib.run import plan as plans
from kvq_calib.run.run import Run
from kvq_calib.text import corpus
from kvq_runtime.artifact import artifact
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.geometry import ENTRIES, ROLES, caching, stretches
from kvq_runtime.hf import KVQCache, fingerprint_of
from kvq_runtime.hf.attention import halves
from kvq_runtime.hf.model import CACHE
from kvq_runtime.ops import rope
from kvq_runtime.recipe import preset

FOUR = "aqua-4bit-first-16bit"
KINDS = ["minicpm3", "gemma3n_text", "gemma4_text", "mimo_v2_flash", "longcat_flash", "deepseek_v4"]
SETTINGS = {
    "gemma4_text": E2B,
    "deepseek_v4": {
        "max_position_embeddings": 1024,
        "index_topk": 1024,  # rounding does not change what an indexer chooses
    },
}
NAMES = ["aqua-2bit", FOUR, "svdq-2bit-v4", "aqua-fisher-2bit"]


@pytest.fixture(scope="module", params=KINDS)
def model(request) -> PreTrainedModel:
    return random(request.param, **SETTINGS.get(request.param, {}))


@pytest.fixture(scope="module")
def files(model, tmp_path_factory) -> ModelFiles:
    folder = tmp_path_factory.mktemp(model.config.model_type)
    model.save_pretrained(folder)
    return models.resolve(folder)


@pytest.fixture(scope="module")
def made(files, tmp_path_factory) -> dict[str, Artifact]:
    """Fits to eight sequences of random tokens, measured on two others."""
    length = 256 * files.geometry.rate
    text = SimpleNamespace(tokens_BT=prompt(10, length, seed=1), description={"source": "random"})
    plan = plans.make(files, list(map(preset, NAMES)), "demo", samples=10, seq_len=length, held_out=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "select", lambda *given: text)
        return runs.calibrate(Run(plan, files, tmp_path_factory.mktemp("run")))


def test_what_is_captured_is_what_the_whole_model_caches(model, files):
    ids, own = prompt(2, 40), stock(model)
    with torch.no_grad():
        model(ids, **{CACHE: own})
    stream = Stream(files, dtype=torch.float32)
    h = stream.embed(ids)
    for index, place in enumerate(files.attending):
        seen = stream.layer(index).forward(h)
        h = seen.h_BTE
        keys, values = stored(model, own, place)
        tables = stream.rope(40 // files.geometry.rate)
        k = rope.rotate(seen.k_NTC.unflatten(-1, (files.geometry.kv_heads, -1)), *tables).transpose(1, 2)
        v = seen.v_NTC.unflatten(-1, (files.geometry.kv_heads, -1)).transpose(1, 2)
        for found, expected in ((k, keys), (v, values)):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.std()))


@pytest.mark.parametrize("config, largest", [
    ({"mlp_layer_types": ["hash_moe", "moe"]}, 2**24 - 1),
    ({"indexer_types": ["full", "shared"], "index_topk": 3}, 2**16 - 1),
])  # fmt: skip
def test_whole_numbers_go_with_hidden_states_in_every_dtype(config, largest):
    carried = Carried.of({"hidden_size": 4, "num_hidden_layers": 2, "hc_mult": 2} | config)
    h, numbers = torch.randn(1, 5, 2, 4).bfloat16(), torch.tensor([0, 255, 256, 40_000, largest])
    numbers = numbers[None, :, None].expand(1, 5, carried.numbers)
    packed = carried.pack(h, [], numbers)
    assert packed.shape[-1] == carried.width
    assert all(torch.equal(*pair) for pair in zip(carried.unpack(packed)[::2], (h, numbers.int()), strict=True))


class Noted(DynamicCache):
    """Transformers' own cache, of which what attention reads can be differentiated by."""

    def update(self, key_states, value_states, layer_idx, *args, **given):
        read = super().update(key_states, value_states, layer_idx, *args, **given)
        self.read = {**getattr(self, "read", {}), layer_idx: read}
        return read


def test_gradients_are_those_of_what_the_whole_model_reads(model, files):
    ids, index = prompt(1, 24, seed=2), files.geometry.layers - 1
    last, outs = (stretches(files.config)[index].stop - 1) // caching(files.config), []
    place = files.attending[index]
    layers, cache, entries = model.get_decoder().layers, Noted(config=model.config), {}
    handles = [layers[last].register_forward_hook(lambda _module, _given, out: outs.append(out))]
    if files.joined == ENTRIES:
        hook = noting(entries, model.config.qk_rope_head_dim)
        handles.append(layers[place].self_attn.compressor.register_forward_hook(hook))
    model(ids, **{CACHE: cache})
    for handle in handles:
        handle.remove()
    out = outs[0][0] if isinstance(outs[0], tuple) else outs[0]
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    expected = torch.autograd.grad((out * weight).sum(), tuple(entries.values()) or cache.read[place])
    expected = halves(files.joined, *expected) if files.joined and not entries else expected
    weight = Carried.of(files.config).pack(weight, [], torch.zeros(1, 24, 1).long() if entries else None)
    stream = Stream(files, dtype=torch.float32)
    h = stream.embed(ids)
    for below in range(index):
        h = stream.layer(below).forward(h).h_BTE
    _, key, value = stream.layer(index).gradients(h, weight)
    tables = stream.rope(24 // files.geometry.rate)
    turned = rope.rotate(key.unflatten(-1, (files.geometry.kv_heads, -1)), *tables).transpose(1, 2)
    value = value.unflatten(-1, (files.geometry.kv_heads, -1)).transpose(1, 2)
    for found, one in zip((turned, value), expected, strict=True):
        torch.testing.assert_close(found, one, rtol=0, atol=1e-3 * float(one.std()))


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_decodes_to_what_the_fit_says(name, made, model, files):
    """Of the sequences that were held out, without a window: errors by layer and role, counted by themselves."""
    recipe, ids, seen = made[name].recipe.with_exact(recent=0), prompt(10, 256 * files.geometry.rate, seed=1), {}
    own, cache = stock(model), KVQCache(recipe, model, made[name].tensors)
    handed = cache.blocks.update

    def noted(layer, *given):
        found = handed(layer, *given)
        seen[layer] = [x.clone() for x in cache.blocks.decoder.whole(layer)]
        return found

    cache.blocks.update = noted
    with torch.no_grad():
        model(ids, **{CACHE: own})
        model(ids[8:], **{CACHE: cache})
    tables = [one[:, 4:] for one in Stream(files, dtype=torch.float32).rope(256)]
    for layer, place in enumerate(files.attending):
        exact = stored(model, own, place)
        for number, role in enumerate(ROLES):
            x = exact[number].transpose(1, 2)[:, 4:]
            error = float((x[8:].flatten(2) - seen[layer][number][:, 4:]).square().sum())
            x = rope.unrotate(x, *tables) if role == "key" else x  # means of keys are before RoPE
            variance = float((x[8:] - x[:8].mean((0, 1))).square().sum())
            assert error / variance == pytest.approx(made[name].fit["layers"][layer][role]["relative_error"], rel=0.02)


def test_what_is_exact_loses_nothing_and_more_bits_lose_less(made, model, files):
    """By full encode and in use, of the whole model and a layer at a time."""
    length = 256 * files.geometry.rate
    ids, exact, kls = prompt(2, length, seed=3), preset("exact"), {}
    subjects = {"exact": (exact, {})} | {name: (made[name].recipe, made[name].tensors) for name in NAMES}
    full = {
        name: partial(FullCache, recipe, model, tensors, length=length) for name, (recipe, tensors) in subjects.items()
    }
    steps = {name: partial(CountedCache, recipe.with_exact(0, 0), model, tensors)
             for name, (recipe, tensors) in subjects.items()}  # fmt: skip
    found = [perplexity.scores(model, ids, full, step=length), perplexity.scores(model, ids, steps, step=64)]
    stream = Stream(files, dtype=torch.float32)
    blank = {name: partial(FullCache, recipe, stream.blank, tensors, length=length)
             for name, (recipe, tensors) in subjects.items()}  # fmt: skip
    found.append(layered(stream, ids, blank))
    for scores in found:
        kls = {name: scores[name].kl for name in subjects}
        assert kls["exact"] < 1e-6 < kls[FOUR] < kls["aqua-2bit"] / 5 < 0.1, kls
        assert 0 < kls["aqua-fisher-2bit"] < 0.5
        if files.joined != ENTRIES:  # beside which attention reads tokens
            assert scores["aqua-2bit"].reads.shares["reads"] > 0.3
    for name in subjects:
        assert found[0][name].kl == pytest.approx(found[2][name].kl, rel=1e-3, abs=1e-7)
        if files.joined != ENTRIES:
            assert found[0][name].reads.pairs == found[2][name].reads.pairs
    rows = errors.by_layer(stream, ids, subjects)
    if files.joined == ENTRIES:
        assert all(row["attention_error"] is None and row["key_error"] < 1 for own in rows.values() for row in own)
        return
    for layer in range(files.geometry.layers):
        own = {name: rows[name][layer]["attention_error_encoded"] for name in subjects}
        assert own["exact"] < 1e-9 and own[FOUR] < own["aqua-2bit"] / 5 < 0.1, own


@pytest.mark.parametrize("way", ["greedy", "beams"])
def test_an_artifact_that_was_published_serves_padded_rows(way, made, model, tmp_path):
    artifact.save(made[FOUR], tmp_path / "fit")
    loaded = artifact.load(tmp_path / "fit")
    assert loaded.fingerprint.to_json() == fingerprint_of(model).to_json()
    length, entries = 300 * loaded.fingerprint.geometry.rate, loaded.fingerprint.geometry.rate > 1
    ids, mask = padded(prompt(2, length), length - 10, length)
    found, own = [], model.config._attn_implementation
    for attention in (own, own if entries else "kvq"):
        model.set_attn_implementation(attention)
        cache = KVQCache.from_artifact(loaded, model)
        found.append(generate(model, ids, cache, way, attention_mask=mask, max_new_tokens=8))
        assert all(store.encoded for store in cache.blocks.layers.values())
    model.set_attn_implementation(own)
    assert torch.equal(*found)
    if entries:  # which padding is pooled into
        return
    alone = KVQCache.from_artifact(loaded, model)
    with torch.no_grad():
        first = model(ids[:1, 10:], past_key_values=alone)
        step = model(found[0][:1, 300:301], past_key_values=alone).logits
        expected = model(found[0][:1, 10:301]).logits[:, -1:]
    assert first is not None and float((step - expected).norm() / expected.norm()) < 0.2


def test_what_cannot_be_fitted_or_served_is_refused(model, files):
    refused = {"aqua-h2o-2bit": "needs queries or weights of attention", "svdq-shadow-2bit-v4": "needs queries or"}
    if files.joined:
        refused |= dict.fromkeys(("squat-2bit", "oscar-2bit"), "is fitted to queries or outputs of heads")
    for name, why in refused.items():
        with pytest.raises(ValueError, match=f"{name} {why}"):
            plans.make(files, [preset(name)], "demo")
    if files.joined:
        recipe = budget.recipe(4, files.geometry, files.vocabulary)
        with pytest.raises(ValueError, match="is fitted to queries or outputs of heads, but .* use a recipe"):
            plans.make(files, [recipe], "demo", budgets={recipe.name: 4.0})


def test_latents_whose_files_name_the_projection_otherwise(tmp_path):
    """An artifact would not know its model: refused before work."""
    random("minicpm3").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("kv_a_proj_with_mqa", "kv_down"): x for name, x in weights.items()}
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="no kv_a_proj_with_mqa in a layer, by which an artifact knows its model"):
        plans.make(models.resolve(tmp_path), [preset("aqua-2bit")], "demo", samples=10, seq_len=256)
