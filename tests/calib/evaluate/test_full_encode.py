"""The full encode: held to an independent forward pass in float64, what is exact in it, and what is counted."""

import copy
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from kvq_calib.evaluate import caches, perplexity, record
from kvq_calib.evaluate.caches import FullCache, attending, in_use
from kvq_calib.evaluate.candidate import find
from kvq_calib.evaluate.perplexity import Score
from kvq_calib.model import find as models
from kvq_calib.model.streamed import Head
from kvq_calib.report import tables
from kvq_calib.text import corpus
from kvq_runtime.codec import codec as codecs
from kvq_runtime.codec import shared
from kvq_runtime.codec.codec import Context
from kvq_runtime.geometry import Geometry, Window
from kvq_runtime.recipe import preset
from kvq_runtime.registry import rating
from kvq_runtime.registry.evaluation_records import PROTOCOLS, parse
from kvq_runtime.registry.rating import Bounds
from kvq_runtime.stages.predict import Linear
from kvq_runtime.store import block_errors
from kvq_runtime.store.block_errors import BlockErrors

GEOMETRY = Geometry(3, 2, 16)
LENGTH = 300  # two blocks of 128, and a rest


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny.save(folder, "llama")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = torch.randint(1, 256, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    return SimpleNamespace(model=model, tokens=text, files=models.resolve(folder), folder=folder)


def tensors_of(recipe):
    """Tensors of a recipe that a fit could have found: small, and not the same everywhere."""
    random = torch.Generator().manual_seed(5)
    specs = codecs.all_specs(recipe, GEOMETRY).items()
    return {name: (0.1 * torch.randn(*shape, generator=random)).to(kind) for name, (shape, kind) in specs}


def logits_of(model, tokens_BT, cache):
    with torch.inference_mode(), attending(model, cache):
        return model(tokens_BT, past_key_values=cache, use_cache=True).logits.double()


def turned(x_BTHD, cos_T1K, sin_T1K):
    """RoPE by its formula: a pair (a, b) of the two halves becomes (a cos - b sin, b cos + a sin)."""
    a, b = x_BTHD.chunk(2, -1)
    return torch.cat([a * cos_T1K - b * sin_T1K, b * cos_T1K + a * sin_T1K], -1)


def by_hand(model, tokens_BT, recipe, tensors):
    """Logits of a Llama in float64, each layer's keys and values replaced by their decoded codes, and the share of
    reads that were decoded. Only `encode`, `decode` and `restore` are the code's own."""
    weights = {name: value.double() for name, value in model.state_dict().items()}
    (batch, length), window = tokens_BT.shape, recipe.window
    whole = length // window.block * window.block
    angles = torch.arange(length)[:, None, None] * model.model.rotary_emb.inv_freq.double()
    cos, sin = angles.cos(), angles.sin()
    visible = torch.ones(length, length).tril().bool()
    is_decoded = torch.zeros(length, dtype=torch.bool)
    is_decoded[window.sinks : whole] = True
    h, below = weights["model.embed_tokens.weight"][tokens_BT], []

    def norm(x, name):
        return weights[name] * x / (x.square().mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt()

    def decoded(codec, x_BTC, rope, keys):
        given = x_BTC.clone()
        given[:, : window.sinks] = x_BTC[:, window.sinks, None]
        blocks = given[:, :whole].reshape(-1, window.block, x_BTC.shape[-1]).float()
        parts = [table[:whole, 0].unflatten(0, (-1, window.block)).repeat(batch, 1, 1).float() for table in rope]
        context = Context(rope=(parts[0], parts[1]), keys=keys, below=below)
        centred = codec.decode(codec.encode(blocks, context), context)
        found = codec.restore(centred.float(), context).reshape(batch, whole, -1).double()
        return centred, torch.where(is_decoded[:, None], torch.cat([found, x_BTC[:, whole:]], 1), x_BTC)

    for layer, pair in enumerate(shared.build(recipe, GEOMETRY, tensors)):
        start = f"model.layers.{layer}."
        x = norm(h, start + "input_layernorm.weight")
        q, k, v = (x @ weights[f"{start}self_attn.{name}_proj.weight"].T for name in "qkv")
        heads = [part.unflatten(-1, (-1, 16)) for part in (q, k, v)]
        if recipe.position == "pre":
            centred, k_hat = decoded(pair[0], k, (cos, sin), None)
            k_hat = turned(k_hat.unflatten(-1, (-1, 16)), cos, sin)
        else:
            centred, k_hat = decoded(pair[0], turned(heads[1], cos, sin).flatten(2), (cos, sin), None)
            k_hat = k_hat.unflatten(-1, (-1, 16))
        v_centred, v_hat = decoded(pair[1], v, (cos, sin), centred)
        below = [(centred, v_centred), *below]
        q, v_hat = turned(heads[0], cos, sin), v_hat.unflatten(-1, (-1, 16))
        k_hat, v_hat = (x.repeat_interleave(2, 2) for x in (k_hat, v_hat))
        scores = torch.einsum("bthd,bshd->bhts", q, k_hat) / 4
        p = scores.masked_fill(~visible, -math.inf).softmax(-1)
        out = torch.einsum("bhts,bshd->bthd", p, v_hat).flatten(2)
        h = h + out @ weights[start + "self_attn.o_proj.weight"].T
        x = norm(h, start + "post_attention_layernorm.weight")
        gate_, up = (x @ weights[f"{start}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        h = h + (torch.nn.functional.silu(gate_) * up) @ weights[start + "mlp.down_proj.weight"].T
    reads = sum(is_decoded[: q + 1].sum().item() for q in range(length)) / (length * (length + 1) / 2)
    return norm(h, "model.norm.weight") @ weights["lm_head.weight"].T, reads


def distance(found, expected) -> float:
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@torch.inference_mode()
@pytest.mark.parametrize("name", ["exact", "kivi-2bit-r32", "mean-higgs-2bit", "aqua-2bit"])
def test_logits_are_those_of_a_forward_pass_by_hand(small, name):
    """After RoPE and per channel, before RoPE with a mean, and predicted from the decoded layer below."""
    recipe = preset(name)
    tensors = tensors_of(recipe)
    cache = FullCache(recipe, small.model, tensors, length=LENGTH)
    hidden, counted = perplexity.hidden_states(small.model, small.tokens, cache, LENGTH)
    logits = Head.of(small.model)(hidden).double()
    expected, share = by_hand(small.model, small.tokens, recipe, tensors)
    # a step of rounding may fall to the other side in float32; what must not be missed is a hundred times as large
    assert distance(logits, expected) < 2e-3
    exact = small.model(small.tokens).logits.double()
    assert (distance(exact, expected) < 1e-4) if name == "exact" else (distance(exact, expected) > 0.1)
    assert counted.reads.shares == {"reads": pytest.approx(share, abs=1e-12), "unread": 0}


def test_the_exact_recipe_is_the_16_bit_model_to_the_last_bit(small):
    make = {"exact": lambda: FullCache(preset("exact"), small.model, {}, length=LENGTH)}
    scores = perplexity.scores(small.model, small.tokens, make, LENGTH)
    assert scores["exact"].losses == scores[perplexity.REFERENCE].losses and scores["exact"].kl == 0
    assert scores["exact"].tokens == 2 * (LENGTH - 1)


def test_logits_are_few_at_a_time_and_a_cache_is_one_pass(small, monkeypatch):
    """Those of two windows of 152,000 tokens of vocabulary would be gigabytes."""
    make = {name: partial(FullCache, preset(name), small.model, {}, length=LENGTH) for name in ("exact", "kivi-2bit")}
    expected, sizes = perplexity.scores(small.model, small.tokens, make, LENGTH), []
    monkeypatch.setattr(perplexity, "AT_ONCE", 4096)
    hook = small.model.lm_head.register_forward_hook(lambda _module, _inputs, out: sizes.append(out.numel()))
    found = perplexity.scores(small.model, small.tokens, make, LENGTH)
    hook.remove()
    assert max(sizes) <= 4096 and sum(sizes) == 3 * 2 * (LENGTH - 1) * small.model.config.vocab_size
    assert found["kivi-2bit"].kls == pytest.approx(expected["kivi-2bit"].kls, rel=1e-5)


def test_windows_are_enough_when_their_error_is_a_hundredth_or_a_tenth_of_the_loss():
    def enough(*gaps: float) -> bool:
        return perplexity.precise([Score(losses=[2.0] * len(gaps)), Score(losses=[2.0 + gap for gap in gaps])])

    assert enough(0.01, 0.02, 0.03, 0.02) and not enough(0.01, 0.02, 0.03), "of three little is known"
    assert not enough(0.01, 0.04, 0.08, 0.01) and enough(0.51, 0.54, 0.58, 0.51)


def test_windows_end_when_they_are_enough(small, monkeypatch):
    monkeypatch.setattr(perplexity, "ROW_TOKENS", LENGTH)
    make, done = {"exact": partial(FullCache, preset("exact"), small.model, {}, length=LENGTH)}, []
    tokens = small.tokens.repeat(4, 1)
    scores = perplexity.scores(small.model, tokens, make, LENGTH, done.append, enough=perplexity.precise)
    assert {len(one.losses) for one in scores.values()} == {4} and sum(done) == 2 * tokens.numel()


@pytest.mark.parametrize("recent, block, step", [(0, 16, 24), (20, 32, 32)])
def test_reads_in_use_are_those_of_a_count_by_hand(small, recent, block, step):
    recipe = replace(preset("exact"), window=Window(sinks=3, recent=recent, block=block))
    make = {"x": lambda: in_use(recipe, small.model)}
    scores = perplexity.scores(small.model, small.tokens, make, step)
    decoded = pairs = 0
    for query in range(LENGTH):
        before = query // step * step  # tokens of the passes before this query's
        encoded = max(0, before - recent) // block * block
        decoded, pairs = decoded + max(0, encoded - 3), pairs + query + 1
    assert scores["x"].reads.shares == {"reads": pytest.approx(decoded / pairs), "unread": 0}


def test_evicted_tokens_are_counted_as_not_read(small):
    cache, dropped = in_use(preset("h2o").with_exact(recent=0), small.model), []
    hook = small.model.model.register_forward_hook(lambda *_: dropped.append(cache.blocks.positions.dropped))
    with torch.inference_mode():
        reads = perplexity.hidden_states(small.model, small.tokens, cache, 30)[1].reads
    hook.remove()
    unread = 30 * sum(dropped[:-1])
    assert reads.shares["unread"] == pytest.approx(unread / (LENGTH * (LENGTH + 1) / 2)) and unread > 0
    assert reads.pairs == 2 * 3 * LENGTH * (LENGTH + 1) // 2


@pytest.mark.parametrize("name", ["mean-higgs-2bit", "aqua-2bit"])
@pytest.mark.parametrize("full", [True, False])
def test_an_outlier_in_the_text_is_counted_and_read_as_it_is_decoded(small, name, full, monkeypatch):
    """A token whose keys and values in layer 0 are fifty times as long, in the second block of one of two windows."""
    model = copy.deepcopy(small.model)
    first, odd = model.model.layers[0].self_attn, 255
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0], model.model.embed_tokens.weight[odd] = 0, 0
        model.model.embed_tokens.weight[odd, 0] = 1
        for part in (first.k_proj, first.v_proj):
            part.weight[:, 0] *= 50
    plain = small.tokens.clamp(max=odd - 1)
    planted = plain.clone()
    planted[0, 200:204] = odd
    recipe = preset("aqua-2bit").with_exact(recent=0)
    given, step = (recipe, model, tensors_of(recipe)), LENGTH if full else 50

    def made(bounds):
        return FullCache(*given, bounds, length=LENGTH) if full else in_use(*given, bounds)

    places = [(layer, role) for layer in range(GEOMETRY.layers) for role in (0, 1)]
    errors = dict.fromkeys(places, 0.0)

    def noted(self, layer, role, gap, counted):
        add(self, layer, role, gap, counted)
        errors[layer, role] = max(errors[layer, role], float(block_errors.block_errors(gap, counted).max()))

    add = BlockErrors.add
    with monkeypatch.context() as patched:
        patched.setattr(BlockErrors, "add", noted)
        seen = made(dict.fromkeys(places, math.inf))
        with torch.inference_mode(), attending(model, seen):
            for part in plain.split(step, 1):
                model(part, past_key_values=seen, use_cache=True)
    bounds = {place: 1.25 * error for place, error in errors.items()}
    scored = partial(perplexity.scores, model, step=step)
    caches = {"counted": lambda: made(bounds), "not": lambda: made(None)}
    before, after = (scored(tokens, caches) for tokens in (plain, planted))
    assert before["counted"].blocks == after["counted"].blocks == 2 * 2 * 2 * 3
    assert before["counted"].beyond == 0 and 2 <= after["counted"].beyond <= 6  # of keys and of values, by layer
    assert after["counted"].losses == after["not"].losses and after["counted"].kls == after["not"].kls
    reference = after[perplexity.REFERENCE]
    assert after["counted"].figures(reference)["beyond"] == after["counted"].beyond / 24
    assert "beyond" not in after["not"].figures(reference)


def test_a_fit_to_the_prompt_sees_the_first_half_alone(small):
    recipe, other = preset("svdq-online-2bit"), small.tokens.clone()
    other[:, LENGTH // 2 :] = other[:, LENGTH // 2 :].flip(1)
    first = small.tokens.clone()
    first[:, 5] = 7
    fitted = []
    for tokens in (small.tokens, other, first):
        cache = FullCache(recipe, small.model, length=LENGTH)
        logits_of(small.model, tokens, cache)
        fitted.append([tensor for codec in cache.blocks.layers[1].codecs for tensor in codec.tensors])
    assert fitted[0] and all(torch.equal(*pair) for pair in zip(fitted[0], fitted[1], strict=True))
    assert not torch.equal(fitted[0][0], fitted[2][0])
    assert caches.fit_tokens(recipe, LENGTH) == LENGTH // 2 and caches.fit_tokens(preset("kivi-2bit"), LENGTH) is None


def test_predicted_blocks_are_encoded_at_once(small, monkeypatch):
    """A matrix product for one block after the other takes several times as long."""
    seen, own = [], Linear.apply
    monkeypatch.setattr(Linear, "apply", lambda self, z, tensors: seen.append(tuple(z.shape)) or own(self, z, tensors))
    recipe = preset("aqua-2bit")
    logits_of(small.model, small.tokens, FullCache(recipe, small.model, tensors_of(recipe), length=LENGTH))
    blocks = 2 * (LENGTH // 128)
    assert seen == [(blocks, 128, 32), (blocks, 128, 64)] * 2  # keys and values of the two layers above the first


def evaluated(small, names, length=256, **settings):
    batch = corpus.select(str(tiny.text(small.folder)), small.folder, 2, length, 0, "held-out")
    candidates = [find(name, small.files) for name in names]
    return record.evaluate(small.files, batch, candidates, record.Protocol(**{"protocols": PROTOCOLS} | settings))


def test_in_use_is_measured_by_default_where_there_is_no_full_encode(small):
    one, other = evaluated(small, ["kivi-2bit", "subkv-2bit"], recent=0, protocols=None)
    assert list(one["result"]["protocols"]) == one["protocol"]["protocols"] == ["full"]
    assert other["protocol"]["protocols"] == ["full", "in-use"] and parse(other).decisive[0] == "in-use"


def test_a_block_of_another_size_changes_nothing_in_a_full_encode(small):
    """KIVI's rounding in blocks of 32 and 128 is the same."""
    one, other = (parse(made) for made in evaluated(small, ["kivi-2bit", "kivi-2bit-r32"], recent=0))
    assert one.figures("full") == other.figures("full")
    assert one.figures("in-use").kl != other.figures("in-use").kl


def test_sinks_are_as_many_as_the_protocol_says(small):
    """KIVI has none of its own; if all tokens are sinks, nothing is encoded."""
    plain, four, every = (evaluated(small, ["kivi-2bit"], recent=0, sinks=n)[0] for n in (None, 4, 256))
    for protocol in ("full", "in-use"):
        parts = [one["result"]["protocols"][protocol] for one in (plain, four, every)]
        assert parts[0]["kl"] != parts[1]["kl"] > 0 and "all sinks" in parts[2]["reason"]
    assert "sinks" not in plain["protocol"] and four["protocol"]["sinks"] == 4


def test_nothing_encoded_is_said_and_no_zero_is_printed(small):
    (made,) = evaluated(small, ["higgs-2bit"], length=100)
    parts, told = made["result"]["protocols"], parse(made)
    assert parts["full"]["reason"] == (
        "nothing was encoded: windows of 100 tokens are shorter than a block of 128 tokens"
    )
    assert "128 recent tokens, a block of 128 tokens and a step of 32" in parts["in-use"]["reason"]
    assert parts["full"]["decoded"]["reads"] == 0 and "kl" not in parts["full"]
    assert "0.00%" not in str(tables.table([told])) and "nothing was encoded" in str(tables.notes([told]))
    (failed,) = rating.failed_bounds(told, Bounds(perplexity_ratio=1.5, kl=1.0))
    assert "cannot be judged" in failed and "nothing was encoded" in failed


def test_a_record_has_both_protocols_and_the_tokens_of_an_online_fit(small):
    one, other = evaluated(small, ["svdq-online-2bit", "subkv-2bit"], recent=0)
    parts = one["result"]["protocols"]
    assert list(parts) == ["full", "in-use"] == one["protocol"]["protocols"]
    assert parts["full"]["fitted_on"] == 128 and "fitted_on" not in parts["in-use"]
    assert parts["full"]["decoded"]["reads"] > parts["in-use"]["decoded"]["reads"] > 0
    one, other = parse(one), parse(other)
    assert one.decisive[0] == "full" and other.decisive[0] == "in-use"
    assert tables.notes([one, other])[1:] == [
        "subkv-2bit: full encode: it chooses how long tokens stay exact, so that no full encode is its own."
    ]
    row = tables.table([one, other])[2]
    assert row["full"] == "none" and row["full KL"] is None and row["in use"].startswith(("+", "-"))
