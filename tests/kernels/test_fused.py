"""A cache whose blocks the decode kernel reads attends as the torch path does over the same blocks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from architectures import random
from feeding import RECIPES, anything, feed_in, make, newest, oldest, rotary, tensors
from fused_driver import FAMILIES, ONE, PADDED, RATIO, SCALE, TOLERANCE, Driver, with_kernels  # noqa: F401
from generating import padded
from models import prompt, random_model
from owned_bytes import owned
from parity import DEVICE, error
from tiers import some
from torch import Tensor

from kvq_runtime.artifact.recipe_text import read
from kvq_runtime.hf import KVQCache
from kvq_runtime.ops import dispatch
from kvq_runtime.recipe import preset

pytest.importorskip("triton")
from kvq_runtime.attention import long_query
from kvq_runtime.attention.fused import refusal
from kvq_runtime.attention.path import Query
from kvq_runtime.hf.cuda_graphs import captured
from kvq_runtime.hf.model import CACHE

# one of each layout for `make test`
QUICK = ("kivi-2-16", "lloyd-3bit", "mean-higgs-head-2bit-post")


@pytest.mark.parametrize("name", some(FAMILIES, *QUICK))
def test_kernel_and_torch_agree(name):
    """One row whose blocks are padded, and a step over the end of a block."""
    driver = Driver(FAMILIES[name], PADDED[:1], rows=1)
    driver.step(57, expected=False)
    store = driver.cache.layers[0]
    assert store.index is not None and store.blocks
    for count in (1, 2):
        driver.check(count)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kivi-2-32", "quarot-head-4bit", "mean-lloyd-3bit-post"])
def test_rows_with_other_padding(name):
    driver = Driver(FAMILIES[name], PADDED)
    driver.step(68, expected=False)
    driver.check(2)


@pytest.mark.slow
def test_reset_crop_and_other_rows():
    driver = Driver(FAMILIES["rtn-2bit"], PADDED)
    driver.step(70, expected=False)
    for change in (lambda: driver.cache.crop(68), lambda: driver.cache.crop(37), lambda: driver.cache.reset()):
        driver.check()
        change()
        driver.at = driver.cache.length
    driver.step(60, expected=False)
    for rows in ([1, 0], [0, 0], [1, 0, 1]):
        driver.check()
        chosen = torch.tensor(rows, device=DEVICE)
        driver.cache.reorder(chosen)
        driver.x, driver.q, driver.real = driver.x[:, :, chosen], driver.q[chosen], driver.real[chosen]  # type: ignore
    driver.check()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kivi-2-16", "lloyd-3bit"])
def test_blocks_are_the_same_however_many_are_due(name):
    one, two = Driver(FAMILIES[name], PADDED), Driver(FAMILIES[name], PADDED)
    one.step(96, expected=False)
    for _ in range(3):
        two.step(32, expected=False)
    a, b = one.cache.layers[0], two.cache.layers[0]
    assert a.blocks == b.blocks > 1
    for role in (0, 1):
        fields, others = (store.fields(role, 0, store.blocks) for store in (a, b))
        assert all(torch.equal(field, others[name]) for name, field in fields.items())


# ---- what the kernel does not answer -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, says",
    [
        ("svdq-2bit", "no kernel for its keys; kernels read latents of a basis a head"),
        ("h2o-higgs-2bit", "keeps tokens by their attention weights"),
        ("svdq-shadow-2bit-v4", "chunks that each query asks for"),
        ("polar-online", "a codec of its own"),
        ("squat-pre-2bit", "no kernel for its keys; kernels read keys after RoPE"),
    ],
)
def test_other_recipes_say_so(name, says):
    reason = refusal(preset(name), ONE)
    assert reason is not None and says in reason and "decoded" in reason and name in reason
    assert refusal(FAMILIES["rtn-2bit"], ONE) is None
    assert refusal(read("polar-paper-fitted+all.rotate=none"), ONE) is None  # whatever is fitted
    assert refusal(preset("mean-higgs-head-2bit-post"), ONE) is None
    assert "registers" in str(refusal(preset("mean-higgs-head-2bit-post"), replace(ONE, head_size=256)))


def test_a_mean_and_rope_on_a_part_of_the_head(monkeypatch):
    """The kernel does not answer; the torch path does."""
    part = rotary(ONE)
    monkeypatch.setattr("fused_driver.rotary", lambda geometry: replace(part, frequencies_K=part.frequencies_K[:8]))
    driver = Driver(FAMILIES["mean-higgs-head-2bit-post"])
    driver.step(58, expected=False)
    out, wanted = driver.step(1)
    assert wanted is not None and torch.equal(out, wanted)
    assert driver.cache.layers[0].index is not None and not driver.cache.fused.regular


def test_a_recipe_without_a_kernel_takes_the_torch_path():
    driver = Driver(RECIPES["higgs-head-4bit"])
    driver.step(40, expected=False)
    out, wanted = driver.step(1)
    assert wanted is not None and torch.equal(out, wanted)
    assert driver.cache.layers[0].index is None


def answered(driver: Driver, count: int, mask: Tensor | None) -> Tensor | None:
    """What the kernel, if it is asked, answers to the newest `count` queries."""
    q_BHTD = driver.q[:, :, driver.at - count : driver.at]
    found = driver.cache.fused.attend(Query(driver.cache.layers[0], q_BHTD, mask, SCALE))
    return None if found is None else found[0]


def test_masks_that_are_not_left_padding():
    driver = Driver(FAMILIES["rtn-2bit"])
    driver.step(40, expected=False)
    assert answered(driver, 1, None) is not None
    assert answered(driver, 1, torch.ones(1, 1, 1, 40, dtype=torch.bool)) is None  # nobody announced it
    driver.real = torch.arange(300, device=DEVICE) != torch.tensor([[5], [60]], device=DEVICE)  # a hole
    driver.cache.reset()
    driver.at = 0
    driver.step(40, expected=False)
    out, wanted = driver.step(1)
    assert wanted is not None and torch.equal(out, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("starts, name", [(PADDED, "kivi-2-16"), (torch.tensor([70, 0]), "mean-higgs-head-2bit-post")])
def test_many_queries_attend_slab_by_slab(name, starts, monkeypatch):
    monkeypatch.setattr("kvq_runtime.kernels.attend.launch.attend", None)
    driver = Driver(FAMILIES[name], starts)
    driver.step(90, expected=False)
    driver.check(33)  # 66 rows of queries per KV head
    monkeypatch.setattr("kvq_runtime.attention.long_query.SCORES", 1000)
    driver.check(66)


@pytest.mark.parametrize(
    "dtype, most, starts", [(torch.bfloat16, 4e-3, PADDED), (torch.float16, 5e-4, None), (torch.float32, 1e-6, PADDED)]
)
def test_many_queries_are_multiplied_in_the_models_dtype(dtype, most, starts, monkeypatch):
    """And are as near to float64 over the same decoded tokens as operands and results of that dtype are."""
    multiplied, types = long_query.multiplied, set()

    def noted(a, b, *rest, **settings):
        types.update((a.dtype, b.dtype))
        return multiplied(a, b, *rest, **settings)

    monkeypatch.setattr(long_query, "multiplied", noted)
    driver = Driver(FAMILIES["higgs-head-2bit"], starts, dtype=dtype)
    driver.step(90, expected=False)
    count, store = 66, driver.cache.layers[0]
    mask = driver.announce(count)
    part = slice(driver.at, driver.at + count)
    driver.cache.take(0, *driver.x[0, :, :, part].unbind(0))
    k_BHTD, v_BHTD = (
        x.double().unflatten(2, (ONE.kv_heads, -1)).transpose(1, 2).repeat_interleave(RATIO, 1)
        for x in driver.cache.decoder.whole(0)
    )
    out = driver.cache.attend(0, driver.q[:, :, part], mask, SCALE)
    seen = torch.ones(count, part.stop, dtype=torch.bool, device=DEVICE).tril(driver.at) if mask is None else mask
    s_BHTT = (driver.q[:, :, part].double() @ k_BHTD.mT * SCALE).masked_fill(~seen, -torch.inf)
    assert store.blocks and types == {dtype} and out.dtype == dtype
    assert error(out, s_BHTT.softmax(-1) @ v_BHTD) < most


@pytest.mark.slow
def test_slabs_are_merged_by_their_largest_score():
    """Scores of some hundreds, whose exponentials are no float32."""
    driver = Driver(FAMILIES["kivi-2-16"])
    driver.q *= 60
    driver.step(90, expected=False)
    out, wanted = driver.step(66)
    assert wanted is not None and out.isfinite().all()
    assert float((driver.x[0, 0, :, :90].flatten(0, 1).norm(dim=1).max() * driver.q.norm(dim=-1).max()) * SCALE) > 200
    assert error(out, wanted) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kivi-2-16", "higgs-head-2bit"])
def test_capped_scores_on_all_paths(name):
    """A step, then more queries than the kernel takes, where most scores come near the cap."""
    driver = Driver(FAMILIES[name], PADDED)
    driver.cap = 1.5
    driver.step(90, expected=False)
    driver.check()
    driver.check(66)


@pytest.mark.parametrize("query, starts", [(newest, None), (oldest, None), (anything, PADDED)])
@pytest.mark.slow
def test_a_dynamic_window_hears_the_kernel(query, starts):
    """What the kernel's log-sum-exp says of the two tokens that count is what the torch path's weights say."""
    x, recipe = tensors(220, geometry=ONE), RECIPES["subkv-2bit"]
    real = None if starts is None else torch.arange(220) >= starts[:, None]
    caches = [make(recipe, ONE), make(recipe, ONE)]
    for size in (40, 1, 1, 1, 40, 1, 1, 1, 124, 1, 1, 1):
        for kernel, cache in zip((True, False), caches, strict=True):
            with dispatch.forced(kernel):
                feed_in(cache, x, [size], real_BT=real, query=query)
        one, two = caches
        assert one.layers[0].index is not None and two.layers[0].index is None
        assert one.layers[0].blocks == two.layers[0].blocks
        found, wanted = (cache.policies[0].gaps for cache in caches)
        assert found.keys() == wanted.keys()
        for layer, gap_B in found.items():
            torch.testing.assert_close(gap_B, wanted[layer], rtol=0.02, atol=2e-4, equal_nan=True)
    assert one.layers[0].blocks > 1
    with pytest.raises(RuntimeError, match="no graph: the dynamic policy of subkv-2bit asks the host"):
        captured(one, lambda: None)


def test_the_report_is_what_the_cache_owns():
    driver = Driver(FAMILIES["mean-higgs-head-2bit-post"], PADDED)
    for count in (40, 1):
        driver.step(count, expected=False)
        report = driver.cache.memory_report()
        assert report.total_bytes == sum(owned(driver.cache).values())
        assert report.parts["tables"] > 0


# ---- whole models ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_learned_sinks_beside_packed_codes():
    """The kernel says how large the sum of its weights is, and the sinks' share is taken off."""
    model: Any = random("gpt_oss").to(DEVICE)
    ids, found = prompt(2, 48).to(DEVICE), []
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.tensor([1.0, 2.0, 3.0, -4.0]))
    for kernels in (True, False):
        model.set_attn_implementation("kvq")
        with dispatch.forced(kernels), torch.no_grad():
            cache = KVQCache(FAMILIES["quarot-head-4bit"], model)
            model(ids[:, :46], past_key_values=cache)
            found.append(torch.cat([model(ids[:, t : t + 1], past_key_values=cache).logits for t in (46, 47)], 1))
        assert (cache.blocks.layers[0].index is not None) == kernels and cache.blocks.layers[0].blocks
    assert error(*found) < 4 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 2])
def test_models_generate_as_with_torch(beams):
    model: Any = random_model("qwen2", attention="kvq", num_hidden_layers=2, head_dim=64)
    model.to(DEVICE)
    ids, mask = (x.to(DEVICE) for x in padded(prompt(2, 44), 44, 30))
    settings = {"max_new_tokens": 3, "pad_token_id": 1, "do_sample": False, "num_beams": beams}
    found, after = [], []
    for kernels in (True, False):
        model.set_attn_implementation("kvq")
        with dispatch.forced(kernels), torch.no_grad():
            cache = KVQCache(FAMILIES["rtn-2bit"], model)
            given = {CACHE: cache, "return_dict_in_generate": True, "output_logits": True}
            found.append(torch.stack(model.generate(ids, attention_mask=mask, **settings, **given).logits))
            model.set_attn_implementation("sdpa")  # any other attention is served decoded tensors
            after.append(model(ids[:1, :1].expand(2 * beams, 1), past_key_values=cache).logits)
        store = cache.blocks.layers[0]
        assert (store.index is not None) == kernels and store.blocks
    assert cache.refusal is None
    assert error(*found) < 4 * TOLERANCE
    assert error(*after) < 4 * TOLERANCE
