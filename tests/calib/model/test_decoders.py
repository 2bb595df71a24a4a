"""Every model that docs/models.md lists: run a layer at a time it is the whole model, and what is fitted to it serves.

What cannot be calibrated is refused in a sentence, from config.json alone.
"""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from architectures import FALCONS, MIXED, OWN, QUICK, random, stored, table
from generating import stock
from models import prompt
from safetensors.torch import load_file, save_file
from tiers import some
from transformers import AutoConfig, AutoModelForCausalLM, Llama4ForConditionalGeneration
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from kvq_calib.evaluate import caches, errors
from kvq_calib.evaluate.caches import CountedCache, FullCache
from kvq_calib.model import architecture, attention
from kvq_calib.model import find as models
from kvq_calib.model.files import OUTPUTS, ModelFiles
from kvq_calib.model.places import Walk
from kvq_calib.model.streamed import Stream
from kvq_calib.run import budget
from kvq_calib.run import calibrate as runs
from kvq_calib.run import plan as plans
from kvq_calib.run.run import Run
from kvq_calib.text import corpus
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.geometry import LOOPS, attending, caching, filled, stretches
from kvq_runtime.hf import KVQCache, fingerprint_of
from kvq_runtime.hf.model import CACHE, attention_modules, attention_of, decoder_of, layers_of, own_code
from kvq_runtime.ops import rope
from kvq_runtime.recipe import preset

ROWS = {kind: cells for kind, *cells in table()}
ROWS |= {kind: ROWS["falcon"] for kind in FALCONS} | {"falcon-": ["no", "decoded", "without queries"]}
MADE = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES | MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # {type: the class of its models}
TAKEN = [kind for kind, cells in ROWS.items() if cells[2] != "no"]
UNLISTED = {
    "minimax": "MiniMaxForCausalLM takes no cache but its own MiniMaxCache",
    "kosmos-2": "it needs pixel_values, and calibration runs",
    "paligemma": "layer 0 of PaliGemmaForConditionalGeneration attends in both directions",
}  # fmt: skip
REFUSED: dict[str, str] = {}  # types of the table that are not calibrated, and why


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Make the folder of a model, its norms and biases random too, once."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            model = random(kind)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.ndim == 1:
                        parameter.add_(torch.randn_like(parameter) * 0.2)
            made[kind] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(made[kind])
        return made[kind]

    return folder


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4 * float(expected.std()))


def beside(folder: Path) -> tuple[ModelFiles, Any]:
    """The model of a folder, and whole: run a layer at a time, it has the same logits."""
    files, ids = models.resolve(folder), prompt(2, 40)
    whole, stream = files.model(torch.float32).eval(), Stream(files, dtype=torch.float32)
    h = stream.embed(ids)
    for index in range(stream.layers):
        h = stream.layer(index).forward(h).h_BTE
    with torch.no_grad():
        near(stream.head()(h), whole(input_ids=ids).logits)
    return files, whole


@pytest.mark.parametrize("kind", some(TAKEN, *QUICK))
def test_a_streamed_model_is_the_whole_model(kind, folders):
    files = models.resolve(folders(kind))
    whole = files.model(torch.float32).eval()
    if files.hidden_queries is not None:
        pass
    elif own_code(whole):  # which reads its configuration, and is told nothing
        whole.config._attn_implementation = "eager"
    else:
        whole.set_attn_implementation("eager")
    ids, cache, queries, states = prompt(2, 40), stock(whole), [], []
    for layer in layers_of(decoder_of(whole)):
        layer.register_forward_pre_hook(lambda module, args: states.append(args[0]))
    for module in {*attention_modules(whole).values()}:
        module.register_forward_hook(lambda module, args, out: queries.append(out[1:2]))
    with torch.no_grad():
        expected = whole(input_ids=ids, **{CACHE: cache})
    stream = Stream(files, dtype=torch.float32)
    assert stream.turns == (ROWS[kind][0] == "yes") == (stream.files.rope_refusal is None)
    heads, size, h = stream.files.geometry.kv_heads, stream.files.geometry.head_size, stream.embed(ids)
    tables, carried = stream.rope(40), stream._decoder.carried
    for index, below in enumerate(stretches(stream.files.config)):
        number, second = divmod(below.start, caching(files.config))
        if not second:
            outs = carried.outs(h, number)
            near(stream._under.layer(number, outs)[0] if carried.held else outs[number - 1], states[number])
        place, layer = stream.files.attending[index], stream.layer(index)
        seen, part = layer.forward(h, queries=True), layer.project(h, queries=True)
        shown = ["k_NTC", "v_NTC"] + ["q_NTC"] * (ROWS[kind][2] == "yes")
        assert all(torch.equal(getattr(seen, name), getattr(part, name)) for name in shown)
        k = rope.rotate(seen.k_NTC.unflatten(-1, (heads, -1)), *(x[:, : seen.k_NTC.shape[1]] for x in tables))
        k, v = k.transpose(1, 2), seen.v_NTC.unflatten(-1, (-1, size)).transpose(1, 2)
        for found, own in zip((k, v), stored(whole, cache, filled(files.config)[place]), strict=True):
            near(found, own)
        if files.joined and seen.q_NTC is not None:
            assert seen.expand is not None
            expanded = seen.expand(*(x.transpose(1, 2).flatten(2) for x in (k, v)))[0]
            q = seen.q_NTC.unflatten(-1, (-1, expanded.shape[-1])).transpose(1, 2)
            expanded = expanded.repeat_interleave(q.shape[1] // expanded.shape[1], 1)
        h = seen.h_BTE
        assert (seen.q_NTC is None) == (files.hidden_queries is not None) == (ROWS[kind][2] != "yes")
        if seen.q_NTC is None:
            continue
        if not files.joined:
            q = rope.rotate(seen.q_NTC.unflatten(-1, (-1, size)), *tables).transpose(1, 2)
            expanded = k.repeat_interleave(q.shape[1] // heads, 1)
        scores = q @ expanded.mT * q.shape[-1] ** -0.5
        if seen.softmax.cap:
            scores = torch.tanh(scores / seen.softmax.cap) * seen.softmax.cap
        hidden = torch.ones(40, 40).triu(1).bool() if seen.mask is None else ~seen.mask
        scores = scores.masked_fill(hidden, -torch.inf)
        (weights,) = queries[index]
        near(scores.softmax(-1), weights / weights.sum(-1, keepdim=True))  # without learned sinks
    near(stream.head()(h), expected.logits)


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa", "glm5_next", "qwen4_exp_text", "minimax_m3_vl_text"])
def test_errors_are_of_the_tokens_that_a_model_has_chosen(kind, folders):
    """Attention to what is captured is the model's own, which chooses 16 of 40 tokens, or 16 and a few, for a query."""
    files, ids, outputs = models.resolve(folders(kind)), prompt(2, 40), {}
    whole, stream = files.model(torch.float32).eval(), Stream(files, dtype=torch.float32)
    for n, layer in enumerate(layers_of(decoder_of(whole))):
        if n in files.attending:
            attention_of(layer).register_forward_hook(lambda module, args, out, n=n: outputs.__setitem__(n, out[0]))
    with torch.no_grad():
        expected = whole(input_ids=ids).logits
    h = stream.embed(ids)
    for index, n in enumerate(files.attending):
        layer = stream.layer(index)
        seen = layer.forward(h, queries=True)
        assert seen.mask is None or 16 <= int(seen.mask.sum(-1).max()) <= 24
        chunk, pair = attention.inputs(seen, stream.rope(40), files.geometry), (seen.k_NTC, seen.v_NTC)
        pair = (attention.apply_rope(pair[0], stream.rope(40), 1), pair[1]) if files.latents else (chunk.k, chunk.v)
        out = attention.attend(chunk, pair, pair, attention.tiles(40), files.geometry.head_size)
        module = layer._attention[n]
        if kind == "qwen4_exp_text":  # whose output is gated
            assert out.shape == (2, 40, module.o_proj.in_features)
        else:
            near(module.o_proj(out), outputs[n])
        h = seen.h_BTE
    exact, losses = preset("exact"), []
    each: list[Any] = [FullCache(exact, whole, {}, length=40), CountedCache(exact.with_exact(0, 0), whole, {})]
    for cache in each:
        with torch.no_grad(), caches.attending(whole, cache):
            found = torch.cat([whole(part, past_key_values=cache).logits for part in ids.split(40, 1)], 1)
        losses.append(float((found - expected).norm()))
        if files.latents:  # the first 16 queries of a row read all up to them
            tails = 6 * (1 + 2 + 3) if kind == "glm5_next" else 0  # of pools of four that are not full
            assert cache.reads.pairs == 2 * len(files.attending) * (16 * 17 // 2 + 24 * 16 + tails)
    assert max(losses) < 1e-3


@pytest.mark.parametrize("kinds", [["hybrid"] * 3, ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"]])
def test_gradients_go_through_what_a_router_hands_to_the_next(kinds, tmp_path):
    """They are those of the whole model, by autograd; a layer that slides hands it on within a stretch."""
    random("zaya", layer_types=kinds, num_hidden_layers=len(kinds), sliding_window=16).save_pretrained(tmp_path)
    files, whole = beside(tmp_path)
    stream, ids, below = Stream(files, dtype=torch.float32), prompt(2, 40), {}
    for n, layer in enumerate(layers_of(decoder_of(whole))):
        layer.register_forward_pre_hook(lambda module, args, n=n: below.__setitem__(n, args[0]))
    logits = whole(input_ids=ids).logits
    weight, places = torch.randn_like(logits), [part.start for part in stretches(files.config)]
    expected = torch.autograd.grad((logits * weight).sum(), [below[n] for n in places])
    h = [stream.embed(ids)]
    for index in range(stream.layers):
        h.append(stream.layer(index).forward(h[-1]).h_BTE)
    assert [one.shape[-1] for one in h] == [64, *[64 + 24] * stream.layers]
    above = h[-1].requires_grad_()
    with torch.enable_grad():
        (above,) = torch.autograd.grad((stream.head()._logits(above) * weight).sum(), above)
    for index in reversed(range(stream.layers)):
        above = stream.layer(index).gradients(h[index], above)[0]
        near(above[..., :64], expected[index])


@pytest.mark.parametrize("kind", ["gpt2", "gpt_bigcode", "modernbert-decoder", "opt", "llama"])
def test_the_projection_behind_attention(kind, folders):
    """By its input and output in the whole model, without its bias."""
    files, seen = models.resolve(folders(kind)), []
    whole = files.model(torch.float32).eval()
    module = attention_of(layers_of(decoder_of(whole))[files.attending[1]])
    projection = next(getattr(module, name) for name in OUTPUTS if hasattr(module, name))
    projection.register_forward_hook(lambda _module, given, out: seen.extend((given[0], out)))
    with torch.no_grad():
        whole(input_ids=prompt(2, 40))
    bias = 0 if projection.bias is None else projection.bias.detach()
    near(seen[0] @ files.output_projection(1).mT, seen[1] - bias)


def test_embeddings_of_another_width_than_the_layers(tmp_path):
    """Of OPT-350m, whose norms stand behind attention and MLP."""
    random("opt", word_embed_proj_dim=32, do_layer_norm_before=False).save_pretrained(tmp_path)
    files, _ = beside(tmp_path)
    assert (files.hidden, files.inner) == (64, 96)


@pytest.mark.parametrize("names", ["authors", "modules"])
@pytest.mark.parametrize("kind", ["kimi_k25", "molmo2", "cosmos3_edge", "cosmos3_omni", "qianfan_ocr", "hunyuan_vl",
                                  "sarvam_moe", "longcat_flash"])  # fmt: skip
def test_names_of_tensors_are_those_that_transformers_reads(kind, names, folders, tmp_path):
    """As the model's authors published them, or as transformers' modules have them."""
    folder = shutil.copytree(folders(kind), tmp_path / kind)
    before = load_file(folder / "model.safetensors")
    if names == "modules":
        made = models.resolve(folder).model(torch.float32).state_dict()
        tensors = {name: one.clone() for name, one in made.items()}
    else:
        tensors = {name.replace("model.blocks.", "model.layers."): one for name, one in before.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    files, whole = beside(folder)
    assert fingerprint_of(whole).to_json() == files.fingerprint().to_json()
    probes = fingerprint_of(whole).probes
    assert all(torch.equal(one, probes[name]) for name, one in files.fingerprint().probes.items())
    within = sum(one.numel() for one in layers_of(decoder_of(whole)).state_dict().values())
    assert sum(files.layer_bytes(layer) for layer in range(files.geometry.layers)) == 4 * within
    whole = sum(one.nbytes for one in tensors.values())
    assert 4 * within < files.weight_bytes < whole + (kind in ("sarvam_moe", "longcat_flash"))


@pytest.mark.parametrize("kind", some(TAKEN, *QUICK))
def test_what_is_fitted_serves(kind, folders, tmp_path, monkeypatch):
    """A recipe that undoes RoPE where it can be, and one that is fitted after RoPE: both generate."""
    folder = folders(kind)
    files, before = models.resolve(folder), ROWS[kind][0] == "yes"
    rate = files.geometry.rate
    text = SimpleNamespace(tokens_BT=prompt(1, 256 * rate, seed=1), description={"source": "random"})
    monkeypatch.setattr(corpus, "select", lambda *given: text)
    after = "zipcache-2bit" if files.joined or files.hidden_queries else "oscar-2bit"
    made = fitted(files, tmp_path, after, *(["aqua-2bit"] if before else []))
    model: Any = files.model(torch.float32).eval()
    assert fingerprint_of(model).to_json() == files.fingerprint().to_json()
    for name, artifact in made.items():
        cache = KVQCache.from_artifact(artifact, model)
        if cache.attention:
            model.set_attn_implementation(cache.attention)
        given = {CACHE: cache, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 1}
        out = model.generate(prompt(1, 280 * rate), **given)
        encoded = max(cache.blocks.layers.items())[1].encoded
        assert out.shape == (1, 280 * rate + 4) and encoded == 128, name
    if not before:
        with pytest.raises(
            ValueError, match=f"aqua-2bit undoes RoPE, but of {re.escape(files.id)} .*; use a recipe that is"
        ):
            fitted(files, tmp_path, "aqua-2bit")


def test_layers_that_slide_are_evaluated_as_they_are(folders, tmp_path, monkeypatch):
    """By full encode and in use: nothing is lost where all is exact, and only what a cache compresses is counted."""
    files, ids = models.resolve(folders("gemma3_text")), prompt(2, 256, seed=1)
    text = SimpleNamespace(tokens_BT=ids, description={"source": "random"})
    monkeypatch.setattr(corpus, "select", lambda *given: text)
    model = AutoModelForCausalLM.from_pretrained(files.path, dtype=torch.float32).eval()
    made, exact = fitted(files, tmp_path, "aqua-2bit")["aqua-2bit"], preset("exact")
    losses = []
    for recipe, tensors in ((exact, {}), (made.recipe, made.tensors)):
        whole: Any = FullCache(recipe, model, tensors, length=256)
        steps: Any = CountedCache(recipe.with_exact(0, 0), model, tensors)
        with torch.no_grad():
            expected = model(ids).logits
            with caches.attending(model, whole):
                found = model(ids, past_key_values=whole).logits
            with caches.attending(model, steps):
                parts = [model(part, past_key_values=steps).logits for part in ids.split(64, 1)]
        losses.append([float((one - expected).norm() / expected.norm()) for one in (found, torch.cat(parts, 1))])
        assert whole.reads.pairs == steps.reads.pairs == 2 * 2 * 256 * 257 // 2
        assert steps.reads.decoded_pairs == 2 * 2 * 128 * 128
    assert max(losses[0]) < 1e-5 and min(losses[1]) > 1e-3 and max(losses[1]) < 0.5, losses
    rows = errors.by_layer(Stream(files, dtype=torch.float32), ids, {"aqua": (made.recipe, made.tensors)})["aqua"]
    assert len(rows) == 2 and all(0 < row["attention_error_encoded"] < 0.5 for row in rows)


def fitted(files: ModelFiles, folder: Path, *names: str) -> dict[str, Artifact]:
    length = 256 * files.geometry.rate
    plan = plans.make(files, [preset(name) for name in names], "demo", samples=1, seq_len=length, held_out=0)
    return runs.calibrate(Run(plan, files, folder / "run"))


@pytest.mark.parametrize("kind", REFUSED | UNLISTED)
def test_what_cannot_be_calibrated_is_refused_from_its_configuration(kind, tmp_path):
    random(kind).config.save_pretrained(tmp_path)
    given = json.loads((tmp_path / "config.json").read_text())
    given["architectures"] = [type(random(kind)).__name__]
    (tmp_path / "config.json").write_text(json.dumps(given))
    with pytest.raises(ValueError, match=(REFUSED | UNLISTED)[kind] + ".*models.md"):
        models.resolve(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(MADE.keys() - {kind.strip("+") for kind in ROWS}))
def test_every_other_type_is_refused_from_its_configuration(kind, tmp_path):
    """With transformers' defaults, which are those of a model that there is."""
    if kind in ("gemma4_assistant", "shieldgemma2"):
        pytest.skip("would be taken, or has no defaults")
    given = AutoConfig.for_model(kind).to_diff_dict() | {"model_type": kind}
    given["architectures"] = [MADE[kind]]
    (tmp_path / "config.json").write_text(json.dumps(given))
    with pytest.raises(ValueError, match=r"models\.md|is needed|kvq takes|timm"):
        models.resolve(tmp_path)


@pytest.mark.parametrize("kind, width", [("gptj", 256), ("dbrx", 32)])
def test_a_type_that_calls_the_width_of_its_layers_otherwise(kind, width, folders):
    if own_code(random(kind)):
        pytest.skip(f"in this transformers {kind} attends by code of its own, and is refused")
    files = models.resolve(folders(kind))
    assert (files.inner, files.chosen_experts) == (width, 2 if kind == "dbrx" else 0)


@pytest.mark.parametrize("settings, why", [
    ({}, "a pass goes through 6 layers, and by its configuration 4; "),
    ({"hc_count": 2}, "made of several outputs below, which have more than one stream; "),
    ({"n_recurrent_loops": 3}, "made of several outputs below, which its decoder writes into; "),
])  # fmt: skip
def test_passes_that_are_not_known_are_refused(settings, why, tmp_path, monkeypatch):
    """As of a model that loops by settings of other names, that has several streams, too, or whose norms write into
    their input."""
    model = random("dory")
    model.save_pretrained(tmp_path)
    if "n_recurrent_loops" in settings:
        monkeypatch.setattr(type(model.model.norm), "_norm", lambda norm, x: x.mul_(x.norm(dim=-1, keepdim=True)))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    monkeypatch.setattr("kvq_runtime.geometry.LOOPS", LOOPS if settings else ())
    with pytest.raises(ValueError, match=why + ".*models.md"):
        models.resolve(tmp_path)


def test_modules_between_layers_whose_outputs_are_handed_on_are_refused(tmp_path, monkeypatch):
    random("inkling2_loop_text").save_pretrained(tmp_path)
    monkeypatch.setattr(Walk, "held", lambda *_given: ())
    with pytest.raises(ValueError, match="message_input stand neither under its layers alone nor above; .*models.md"):
        models.resolve(tmp_path)


def test_attention_that_a_fingerprint_does_not_know_is_refused(tmp_path, monkeypatch):
    random("ctrl").save_pretrained(tmp_path)
    monkeypatch.setattr(architecture, "NAMES", architecture.NAMES[:1])
    with pytest.raises(ValueError, match="MultiHeadAttention has no k_proj and v_proj.*models.md"):
        models.resolve(tmp_path)


def test_layers_that_share_what_is_not_run_with_them_are_refused(tmp_path):
    kinds = [f"{kind}_attention" for kind in ("sliding", "full", "full", "full", "sliding", "full")]
    random("gemma3n_text", layer_types=kinds).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="keys and values of a layer of type sliding_attention below layer 3.*models.md"
    ):
        models.resolve(tmp_path)


@pytest.mark.parametrize("kind, why", [
    ("qwen3_moe", "by its configuration layers 1, 2 attend to every token, by its masks none; docs/models.md"),
    ("llama", "by its configuration layers 1, 2 attend to every token, by its masks 0, 1, 2, 3; docs/models.md"),
])  # fmt: skip
def test_what_slides_is_asked_of_the_masks(kind, why, tmp_path):
    """A configuration may say what the model does not do."""
    random(f"{kind}+").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(json.loads((tmp_path / "config.json").read_text()) | MIXED))
    with pytest.raises(ValueError, match=why):
        models.resolve(tmp_path)


def test_the_first_layer_by_token_needs_one_that_reads_the_tokens(folders):
    files = models.resolve(folders("gemma3_text"))
    recipe = budget.recipe(4, files.geometry, files.vocabulary)
    with pytest.raises(ValueError, match="stores the first layer by token, but .* is its layer 1, whose keys depend"):
        plans.make(files, [recipe], "demo", samples=1, seq_len=256, held_out=0, vocabularies={recipe.name: 97})


def test_recipes_that_read_queries_need_attention_that_takes_a_function(folders):
    files = models.resolve(folders("falcon+"))
    with pytest.raises(ValueError, match="needs queries or weights .* attends by code of its own"):
        plans.check(preset("aqua-snapkv-2bit"), files)
    assert plans.check(preset("aqua-2bit"), files) == preset("aqua-2bit")
    other = models.resolve(folders("gpt_neox"))
    assert plans.check(preset("aqua-snapkv-2bit"), other).name == "aqua-snapkv-2bit"


@pytest.mark.parametrize("kind, name, why", [
    ("bloom", "oscar-2bit", "is fitted to queries or outputs of heads, but of .* attends by code of its own"),
    ("jetmoe", "oscar-2bit", "is fitted to queries .* keys and values that JetMoeDecoderLayer changes behind a cache"),
    ("jetmoe", "aqua-snapkv-2bit", "needs queries or weights .* that JetMoeDecoderLayer changes behind a cache"),
    ("gpt_oss", "aqua-snapkv-2bit", "needs queries or weights .* this model's learned sinks take a share"),
    ("bloom", "aqua-2bit", "undoes RoPE, but of .*as zipcache-2bit"),
])  # fmt: skip
def test_what_needs_queries_that_are_hidden_is_refused_when_it_is_planned(kind, name, why, folders):
    files = models.resolve(folders(kind))
    with pytest.raises(ValueError, match=why):
        plans.check(preset(name), files)


def test_the_table_has_them_all():
    assert {kind for kind, cells in ROWS.items() if cells[2] == "no"} == REFUSED.keys()


@pytest.mark.parametrize("settings", [{}, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                           "original_max_position_embeddings": 128}}])  # fmt: skip
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_what_is_turned_back_is_what_the_projection_puts_out(kind, settings, tmp_path, monkeypatch):
    tiny.save(tmp_path, kind)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    files, ids = models.resolve(tmp_path), prompt(2, 40)
    found = []
    for tapped in (True, False):
        monkeypatch.setattr(ModelFiles, "tapped", tapped)
        stream = Stream(files, dtype=torch.float32)
        h, layer = stream.embed(ids), stream.layer(1)
        seen = layer.forward(h, queries=True)
        found.append([seen.k_NTC, seen.v_NTC, seen.q_NTC, *layer.gradients(h, h.cos())])
    for turned, expected in zip(*reversed(found), strict=True):
        near(turned, expected)


@pytest.mark.parametrize("kind", ["granite", "cohere", "gemma"])
def test_gradients_of_logits_that_are_scaled(kind, folders):
    """∂/∂h of the two log probabilities, by autograd through all of the head."""
    stream = Stream(models.resolve(folders(kind)), dtype=torch.float32)
    head, h = stream.head(), torch.randn(7, 64, generator=torch.Generator().manual_seed(0)) * 3
    uniform = torch.rand(7, 2, generator=torch.Generator().manual_seed(1))
    found, h = head.gradient(h, uniform), h.requires_grad_()
    log = head._logits(h[None])[0].log_softmax(-1)
    drawn = torch.searchsorted(log.exp().cumsum(-1).detach(), uniform).clamp(max=96)
    first, second = log.gather(1, drawn).unbind(1)
    near(found, torch.autograd.grad((first - second).sum() / 2**0.5, h)[0])


def test_the_text_of_a_folder_that_transformers_reads_alone(tmp_path):
    """Of Llama 4, whose model of images transformers 5.24 does not run."""
    config: Any = AutoConfig.for_model("llama4", **OWN["llama4"])
    Llama4ForConditionalGeneration(config).save_pretrained(tmp_path)
    files, whole = beside(tmp_path)
    assert fingerprint_of(whole).to_json() == files.fingerprint().to_json()
    assert (files.chosen_experts, files.sliding.window) == (4, 16)


@pytest.mark.parametrize("kind", ["dots1", "qwen3_moe"])
def test_tensors_have_the_dtypes_that_the_loader_gives_them(kind, folders):
    """Biases of dots1's routers stay float32 whatever is asked for."""
    stream = Stream(models.resolve(folders(kind)), dtype=torch.bfloat16)
    whole = AutoModelForCausalLM.from_pretrained(folders(kind), dtype=torch.bfloat16)
    found = [
        {name: x.dtype for name, x in model.state_dict().items()}
        for model in (stream.layer(1)._modules[1], whole.model.layers[1])
    ]
    assert found[0] == found[1] and (torch.float32 in found[0].values()) == (kind == "dots1")


def test_a_model_with_experts_needs_room_for_those_a_token_goes_through(folders):
    plain, sparse = (models.resolve(folders(kind)) for kind in ("qwen3", "qwen3_moe"))
    assert (plain.chosen_experts, sparse.chosen_experts) == (0, 2)
    text = {"source": "demo", "samples": 8, "seq_len": 256}
    needs = [plans.make(one, (preset("oscar-2bit"),), **text).needs(one) for one in (plain, sparse)]
    assert needs[1]["chunk"] > needs[0]["chunk"] and needs[1]["layer"] >= 2 * sparse.layer_bytes(0)


RAW = {  # what the files of models say that were saved before transformers knew layer_types
    "gemma2": {"layer_types": None, "sliding_window": 16},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "attention"]},
    "qwen3_next": {"layer_types": None, "full_attention_interval": 2},
    "qwen2_vl": {"text_config": None, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
}


@pytest.mark.parametrize("kind", RAW)
def test_files_that_leave_settings_to_transformers(kind, folders, tmp_path):
    shutil.copytree(folders(kind), tmp_path / kind)
    path = tmp_path / kind / "config.json"
    config = json.loads(path.read_text())
    if kind == "qwen2_vl":
        text = config.pop("text_config")
        config |= {name: value for name, value in text.items() if name not in ("model_type", "rope_parameters")}
        config["rope_theta"] = 10000.0
    config = {name: value for name, value in (config | RAW[kind]).items() if value is not None}
    path.write_text(json.dumps(config))
    found = models.resolve(tmp_path / kind)
    if kind != "qwen3_next":
        assert found.geometry == models.resolve(folders(kind)).geometry
    assert list(found.attending) == list(attending(config)), "from the file alone"
