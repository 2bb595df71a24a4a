"""The full encode: held to an independent forward pass in float64, what is exact in it, and what is counted."""

import copy
import json
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import many_versions as many
import pytest
import tiny
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM

import kvq_calib
import kvq_runtime
from kvq_calib.evaluate import caches, ledger, perplexity, record
from kvq_calib.evaluate.caches import CountedCache, FullCache, Reads, attending
from kvq_calib.evaluate.ledger import NOWHERE, Ledger
from kvq_calib.evaluate.subject import find
from kvq_calib.model import find as models
from kvq_calib.report import plots, sections, tables
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
    torch.set_num_threads(1)
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
    """Logits of a Llama in float64, each layer's keys and values replaced by what its codecs decode, and the shares of
    attention's weight and of reads that were decoded. Only `encode`, `decode` and `restore` are the code's own."""
    weights = {name: value.double() for name, value in model.state_dict().items()}
    (batch, length), window = tokens_BT.shape, recipe.window
    whole = length // window.block * window.block
    angles = torch.arange(length)[:, None, None] * model.model.rotary_emb.inv_freq.double()
    cos, sin = angles.cos(), angles.sin()
    visible = torch.ones(length, length).tril().bool()
    is_decoded = torch.zeros(length, dtype=torch.bool)
    is_decoded[window.sinks : whole] = True
    share, h, below = 0.0, weights["model.embed_tokens.weight"][tokens_BT], []

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
        share += float(p[..., is_decoded].sum(-1).mean()) / GEOMETRY.layers
        out = torch.einsum("bhts,bshd->bthd", p, v_hat).flatten(2)
        h = h + out @ weights[start + "self_attn.o_proj.weight"].T
        x = norm(h, start + "post_attention_layernorm.weight")
        gate_, up = (x @ weights[f"{start}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        h = h + (torch.nn.functional.silu(gate_) * up) @ weights[start + "mlp.down_proj.weight"].T
    reads = sum(is_decoded[: q + 1].sum().item() for q in range(length)) / (length * (length + 1) / 2)
    return norm(h, "model.norm.weight") @ weights["lm_head.weight"].T, share, reads


def distance(found, expected) -> float:
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@pytest.mark.parametrize("name", ["exact", "higgs-2bit", "kivi-2bit-r32", "mean-higgs-2bit", "aqua-2bit"])
def test_logits_are_those_of_a_forward_pass_by_hand(small, name):
    """After RoPE, per channel, before RoPE with a mean, and predicted from the decoded layer below."""
    recipe = preset(name)
    tensors = tensors_of(recipe)
    cache = FullCache(recipe, small.model, tensors, length=LENGTH)
    found = logits_of(small.model, small.tokens, cache)
    expected, attention, reads = by_hand(small.model, small.tokens, recipe, tensors)
    # a step of rounding may fall to the other side in float32; what must not be missed is a hundred times as large
    assert distance(found, expected) < 2e-3
    with torch.inference_mode():
        exact = small.model(small.tokens).logits.double()
    assert (distance(exact, expected) < 1e-4) if name == "exact" else (distance(exact, expected) > 0.1)
    assert cache.reads is not None
    assert cache.reads.shares["attention"] == pytest.approx(attention, abs=1e-3)
    assert cache.reads.shares["reads"] == pytest.approx(reads, abs=1e-12)


def test_the_exact_recipe_is_the_16_bit_model_to_the_last_bit(small):
    caches = {"exact": lambda: FullCache(preset("exact"), small.model, {}, length=LENGTH)}
    found = perplexity.scores(small.model, small.tokens, caches, LENGTH)
    assert found["exact"].losses == found[perplexity.REFERENCE].losses and found["exact"].kl == 0
    assert found["exact"].tokens == 2 * (LENGTH - 1)


@pytest.mark.parametrize("recent, block, step", [(0, 16, 24), (20, 32, 32), (0, 128, 7)])
def test_shares_in_use_are_those_of_a_count_by_hand(small, recent, block, step):
    """With a codec that changes nothing, weights are those of the model, and only the window says what was decoded."""
    recipe = replace(preset("exact"), window=Window(sinks=3, recent=recent, block=block))
    cache = CountedCache(recipe, small.model)
    with torch.inference_mode(), attending(small.model, cache):
        for part in small.tokens.split(step, 1):
            small.model(part, past_key_values=cache, use_cache=True)
    assert cache.reads is not None
    assert cache.reads.shares == pytest.approx(counted_by_hand(small, recipe.window, step), rel=1e-4)


def counted_by_hand(small, window: Window, step: int, prompt: int = 0) -> dict[str, float]:
    """The shares of the queries behind a prompt that comes in one pass; those before it are in passes of `step`."""
    small.model.set_attn_implementation("eager")
    with torch.inference_mode():
        weights = small.model(small.tokens, output_attentions=True).attentions
    small.model.set_attn_implementation("sdpa")
    attention, reads, pairs = 0.0, 0, 0
    for query in range(prompt, LENGTH):
        before = prompt + (query - prompt) // step * step  # tokens of the passes before this query's
        encoded = max(0, before - window.recent) // window.block * window.block
        reads, pairs = reads + max(0, encoded - window.sinks), pairs + query + 1
        attention += sum(
            float(p[:, :, query, window.sinks : max(window.sinks, encoded)].sum(-1).mean()) for p in weights
        )
    return {"attention": attention / (LENGTH - prompt) / len(weights), "reads": reads / pairs, "unread": 0.0}


def test_shares_are_those_of_the_tokens_that_are_scored(small):
    """A prompt reads nothing decoded, and is no part of what a record says was read."""
    recipe = replace(preset("exact"), window=Window(sinks=3, recent=20, block=32))
    found = perplexity.scores(
        small.model, small.tokens, {"x": lambda: CountedCache(recipe, small.model)}, 24, prompt=100
    )
    assert found["x"].reads is not None
    assert found["x"].reads.shares == pytest.approx(counted_by_hand(small, recipe.window, 24, 100), rel=1e-4)


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
    recipe = preset(name).with_exact(recent=0)
    given, step = (recipe, model, tensors_of(recipe)), LENGTH if full else 50

    def made(bounds):
        return FullCache(*given, bounds, length=LENGTH) if full else CountedCache(*given, bounds)

    places = [(layer, role) for layer in range(GEOMETRY.layers) for role in (0, 1)]
    errors = dict.fromkeys(places, 0.0)

    def noted(self, layer, role, codec, x, context, decoded, counted):
        add(self, layer, role, codec, x, context, decoded, counted)
        gap = x.float() - decoded.float() - (0 if codec.predictor is None else codec.mean(context))
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


def test_a_ledger_tells_prompts_apart(small, tmp_path):
    """A score that was kept is that of the same prompt."""
    for prompt in (0, 100, 200, 100):
        found = perplexity.scores(small.model, small.tokens, {}, LENGTH, ledger=Ledger(tmp_path), prompt=prompt)
        assert found[perplexity.REFERENCE].tokens == 2 * (LENGTH - 1 - prompt)
    assert len(list(tmp_path.glob("*.json"))) == 3


def test_what_a_mask_hides_has_no_share():
    """A row with padding before it, in one pass: its softmax is over what it sees."""
    q, k = (torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    mask = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6).clone()
    mask[0, ..., :2] = torch.eye(6, dtype=torch.bool)[:, :2]  # padding sees itself alone
    reads = Reads()
    reads.count(q, k, 6, range(1, 4), mask, 0.3)
    weights = (0.3 * q.double() @ k.double().mT).masked_fill(~mask, -torch.inf).softmax(-1)
    assert reads.decoded_weight == pytest.approx(float(weights[..., 1:4].sum()))
    assert (reads.pairs, reads.decoded_pairs) == (int(mask.sum()), int(mask[..., 1:4].sum()))


@pytest.mark.parametrize("length", [31, 32])
def test_whether_a_window_encodes_anything_is_known_before(small, length):
    recipe = replace(preset("rtn-2bit"), window=Window(sinks=3, recent=64, block=32))
    cache = FullCache(recipe, small.model, length=length)
    logits_of(small.model, small.tokens[:, :length], cache)
    assert caches.encodes(recipe, length) == (cache.blocks.layers[0].encoded > 0) == (length == 32)


def test_our_own_attention_is_counted_as_the_models_is(small):
    """Which attention answers is no part of what is counted."""
    found = []
    for inner in ("sdpa", "kvq"):
        cache = CountedCache(preset("aqua-2bit").with_exact(recent=40), small.model, tensors_of(preset("aqua-2bit")))
        cache.inner = inner
        with torch.inference_mode(), attending(small.model, cache):
            for part in small.tokens.split(32, 1):
                small.model(part, past_key_values=cache, use_cache=True)
        assert cache.reads is not None
        found.append(cache.reads.shares)
    assert found[0] == pytest.approx(found[1], rel=2e-3) and found[0]["reads"] > 0.2


def test_evicted_tokens_are_counted_as_not_read(small):
    recipe = preset("h2o").with_exact(recent=0)
    cache = CountedCache(recipe, small.model)
    unread = 0
    with torch.inference_mode(), attending(small.model, cache):
        for part in small.tokens.split(30, 1):
            unread += part.shape[1] * cache.blocks.positions.dropped
            small.model(part, past_key_values=cache, use_cache=True)
    assert cache.reads is not None and unread > 0
    assert cache.reads.shares["unread"] == pytest.approx(unread / (LENGTH * (LENGTH + 1) / 2))
    assert cache.reads.pairs == 2 * 3 * LENGTH * (LENGTH + 1) // 2


def test_a_fit_to_the_prompt_sees_the_first_half_alone(small):
    recipe, other = preset("svdq-online-2bit"), small.tokens.clone()
    other[:, LENGTH // 2 :] = other[:, LENGTH // 2 :].flip(1)
    fitted = []
    for tokens in (small.tokens, other):
        cache = FullCache(recipe, small.model, length=LENGTH)
        logits_of(small.model, tokens, cache)
        fitted.append([tensor for codec in cache.blocks.layers[1].codecs for tensor in codec.tensors])
    assert fitted[0] and all(torch.equal(*pair) for pair in zip(*fitted, strict=True))
    assert caches.fit_tokens(recipe, LENGTH) == LENGTH // 2 and caches.fit_tokens(preset("kivi-2bit"), LENGTH) is None
    other[:, 5] = 7
    cache = FullCache(recipe, small.model, length=LENGTH)
    logits_of(small.model, other, cache)
    assert not torch.equal(fitted[0][0], next(iter(cache.blocks.layers[1].codecs[0].tensors)))


def test_queries_are_fitted_to_as_well(small):
    """SQuat's online feedback takes queries, which only attention sees."""
    cache = FullCache(preset("squat-online-2bit"), small.model, length=LENGTH)
    plain = FullCache(preset("kivi-2bit"), small.model, length=LENGTH)
    found, other = (logits_of(small.model, small.tokens, one) for one in (cache, plain))
    assert distance(found, other) > 1e-3 and torch.isfinite(found).all()


def test_what_is_predicted_is_encoded_at_once_from_one_prediction(small, monkeypatch):
    """A matrix product, and a search for paths, of one block after the other take several times as long."""
    seen, own = [], Linear.apply
    monkeypatch.setattr(Linear, "apply", lambda self, z, tensors: seen.append(tuple(z.shape)) or own(self, z, tensors))
    recipe = preset("aqua-2bit")
    logits_of(small.model, small.tokens, FullCache(recipe, small.model, tensors_of(recipe), length=LENGTH))
    blocks = 2 * (LENGTH // 128)
    assert seen == [(blocks, 128, 32), (blocks, 128, 64)] * 2  # keys and values of the two layers above the first


def test_what_counts_reads_is_a_fused_kernel():
    """Without one, attention's weights of all heads are written out, which takes five times as long."""
    q_BHTD, k_BHTD = torch.randn(2, 1, 2, 64, 16, generator=torch.Generator().manual_seed(1))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        Reads().count(q_BHTD, k_BHTD, 64, range(4, 32), None, 0.25)


def test_one_pass_a_cache(small):
    cache = FullCache(preset("higgs-2bit"), small.model, length=LENGTH)
    logits_of(small.model, small.tokens, cache)
    with pytest.raises(RuntimeError, match="one forward pass"):
        logits_of(small.model, small.tokens[:, :1], cache)


@pytest.mark.parametrize("name, word", [("subkv-2bit", "stay exact"), ("h2o", "held, or read"),
                                        ("svdq-shadow-2bit-v4", "held, or read")])  # fmt: skip
def test_what_chooses_tokens_has_no_full_encode(small, name, word):
    recipe = preset(name)
    assert word in (caches.refusal(recipe) or "")
    with pytest.raises(ValueError, match=word):
        caches.encoding_all(recipe, LENGTH)


def evaluated(small, names, length=256, kept=NOWHERE, **settings):
    batch = corpus.select(str(tiny.text(small.folder)), small.folder, 2, length, 0, "held-out")
    subjects = [find(name, small.files) for name in names]
    return record.evaluate(small.files, batch, subjects, record.Protocol(**settings), ledger=kept)


def test_a_block_of_another_size_changes_nothing_in_a_full_encode(small):
    """KIVI's rounding in blocks of 32 and 128 is one and the same; in use it is, too, once the blocks are."""
    names = ["kivi-2bit", "kivi-2bit-r32"]
    found = evaluated(small, names, recent=0, error_windows=0)
    told = [parse(one) for one in found]
    ways = [[one.figures(name) for one in told] for name in PROTOCOLS]
    assert ways[0][0] == ways[0][1] and ways[1][0].kl != ways[1][1].kl
    assert [one["result"]["window"]["block"] for one in found] == [128, 32]
    assert [row["block"] for row in tables.comparison(told)[1:]] == [128, 32]
    alike = evaluated(small, names, recent=0, block=32, error_windows=0, protocols=("in-use",))
    assert parse(alike[0]).figures("in-use") == parse(alike[1]).figures("in-use")
    assert alike[0]["protocol"]["block"] == 32 and "block" not in found[0]["protocol"]
    assert set(alike[0]["result"]["protocols"]) == {"in-use"}


def test_what_was_kept_of_another_setting_or_protocol_is_not_taken(small, tmp_path):
    settings = [{"sinks": 0}, {"sinks": 4}, {"sinks": 4, "block": 32}, {"sinks": 4, "step": 256}]
    alone, kept = (
        [evaluated(small, ["kivi-2bit"], recent=0, error_windows=0, kept=folder, **one)[0] for one in settings]
        for folder in (NOWHERE, Ledger(tmp_path))
    )
    assert alone == kept
    ways = {json.dumps(one["result"]["protocols"]["full"]) for one in alone}
    assert len(ways) == 2, "sinks change a full encode; block and step do not"
    assert "a step of 256" in alone[3]["result"]["protocols"]["in-use"]["reason"]


def test_what_other_code_measured_is_not_taken(small, tmp_path, monkeypatch):
    def run():
        return evaluated(small, ["kivi-2bit"], error_windows=0, protocols=("full",), kept=Ledger(tmp_path))

    def measured_again(*given):
        raise InterruptedError

    once = run()
    monkeypatch.setattr(record.perplexity, "scores", measured_again)
    assert run() == once
    monkeypatch.setattr(record, "code", lambda: "of yesterday")
    with pytest.raises(InterruptedError):
        run()


def test_code_is_every_source_of_both_packages(tmp_path, monkeypatch):
    found = set()
    for package in (kvq_runtime, kvq_calib):
        root = tmp_path / package.__name__
        (root / "room").mkdir(parents=True)
        monkeypatch.setattr(package, "__path__", [str(root)])
    for name, text in (("a.py", "1"), ("a.py", "2"), ("room/b.py", "2"), ("room/c.py", "2"), ("data.json", "{}")):
        for package in ("kvq_runtime", "kvq_calib"):
            (tmp_path / package / name).write_text(text)
            found.add(ledger.code.__wrapped__())
    assert len(found) == 8  # of five changes of each package the last is none


def test_another_block_than_the_fits_is_refused_where_the_fit_depends_on_it():
    recipe = preset("squat-2bit")
    tensors = {name: torch.zeros(*shape) for name, (shape, _) in codecs.all_specs(recipe, GEOMETRY).items()}
    name = next(iter(tensors))
    with pytest.raises(ValueError, match="fitted for blocks of 128"):
        record.Protocol(block=64).recipe(recipe, GEOMETRY, {**tensors, name: torch.zeros(1, 1, 1, 1)})
    assert record.Protocol(block=64).recipe(preset("higgs-2bit"), GEOMETRY, {}).window.block == 64
    with pytest.raises(ValueError, match="protocols"):
        record.Protocol(protocols=("half",))


def test_nothing_encoded_is_said_and_no_zero_is_printed(small):
    found = evaluated(small, ["higgs-2bit", "h2o"], length=100)
    parts, told = found[0]["result"]["protocols"], parse(found[0])
    assert parts["full"]["reason"] == (
        "nothing was encoded: windows of 100 tokens are shorter than a block of 128 tokens"
    )
    assert "128 recent tokens, a block of 128 tokens and a step of 32" in parts["in-use"]["reason"]
    assert parts["full"]["decoded"]["reads"] == 0 and "kl" not in parts["full"]
    texts = [json.dumps(make([told])) for make in (tables.table, tables.comparison, tables.notes)]
    texts.append(json.dumps([one["rows"] for one in sections.evaluations([told])]))
    for text in texts:
        assert "0.00%" not in text and "100.0" not in text
    assert all("nothing was encoded" in text for text in (texts[0], texts[2], texts[3]))
    assert plots.perplexity_by_bits([told])
    failed = rating.failed_bounds(told, Bounds(perplexity_ratio=1.5, kl=1.0))
    assert len(failed) == 1 and "cannot be judged" in failed[0] and "nothing was encoded" in failed[0]
    assert rating.failed_bounds(told, Bounds()) == []
    assert rating.with_gate(found[0], Bounds(kl=1.0))["result"]["gate"]["protocol"] is None
    # of windows in which all are sinks, too
    sinks = evaluated(small, ["higgs-2bit"], length=100, sinks=100, error_windows=0)
    assert "are all sinks" in sinks[0]["result"]["protocols"]["full"]["reason"]


def test_the_gate_judges_the_full_encode_where_there_is_one():
    def made(full, in_use):
        return parse(many.of_parts(full=full, in_use=in_use))

    cheap, dear = (
        {"perplexity": 12.0, "relative": cost, "kl": cost, "decoded": {"reads": 0.9}} for cost in (0.001, 0.1)
    )
    bounds = Bounds(perplexity_ratio=1.01)
    (reason,) = rating.failed_bounds(made(dear, cheap), bounds)
    assert "full encode: 1.1, allowed 1.01" in reason and rating.failed_bounds(made(cheap, dear), bounds) == []
    (reason,) = rating.failed_bounds(made({"reason": "it chooses"}, dear), bounds)
    assert "in use: 1.1" in reason and rating.failed_bounds(made({"reason": "it chooses"}, cheap), bounds) == []
    nothing = cheap | {"decoded": {"reads": 0}}  # tokens were evicted, and the others read exactly
    assert "cannot be judged" in rating.failed_bounds(made({"reason": "it chooses"}, nothing), bounds)[0]
    assert rating.failed_bounds(made({"reason": "it chooses"}, cheap | {"decoded": None}), bounds) == []


def test_a_record_has_both_and_says_what_was_fitted_on(small):
    one, other = evaluated(small, ["svdq-online-2bit", "subkv-2bit"], recent=0, error_windows=0)
    parts = one["result"]["protocols"]
    assert list(parts) == ["full", "in-use"] == one["protocol"]["protocols"] and one["protocol"]["version"] == 2
    assert parts["full"]["fitted_on"] == 128 and "fitted_on" not in parts["in-use"]
    assert parts["full"]["decoded"]["reads"] > parts["in-use"]["decoded"]["reads"] > 0
    assert parts["full"]["decoded"]["attention"] > parts["in-use"]["decoded"]["attention"] > 0
    one, other = parse(one), parse(other)
    assert one.decisive[0] == "full" and other.decisive[0] == "in-use"
    rows = tables.table([one, other])
    assert [row["protocol"] for row in rows] == [None, "full encode", "in use", "full encode", "in use"]
    assert "fitted to the first 128 tokens" in rows[1]["decoded"] and "chooses" in rows[3]["decoded"]
    assert tables.notes([one, other])[1:] == [
        "subkv-2bit: full encode: it chooses how long tokens stay exact, so that no full encode is its own."
    ]
    row = tables.comparison([one, other])[2]
    assert row["full"] == "none" and row["full KL"] is None and row["in use"].startswith(("+", "-"))
