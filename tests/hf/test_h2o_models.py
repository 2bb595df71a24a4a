"""Heavy hitters in whole models: what is held is read as if the rest were masked."""

from dataclasses import replace

import fitted
import pytest
import torch
from feeding import make, small
from generating import stock
from heavy import EXACT, held
from models import prompt, random_model
from tiers import some

from kvq_runtime.hf import KVQCache, geometry_of
from kvq_runtime.recipe import preset
from kvq_runtime.recipes.h2o import HeavyHitters


def cached(name: str, model, share: float = 0.4) -> KVQCache:
    recipe = replace(small(preset(name), geometry_of(model)), policies=(HeavyHitters(share),))
    return KVQCache(recipe, model, fitted.tensors(recipe, geometry_of(model)) or None)


def test_other_attention_is_refused_by_name():
    model = random_model("llama")
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match='h2o needs attention, which sdpa .*attn_implementation\\("kvq"'),
    ):
        model(prompt(), past_key_values=cached("h2o", model))
    with pytest.raises(RuntimeError, match=r"h2o-small needs attention, which update\(\) does not see"):
        make(EXACT).update(0, torch.zeros(1, 1, 64), torch.zeros(1, 1, 64))
    cache, rows_BTC = make(EXACT), torch.zeros(1, 1, 64)
    cache.take(0, rows_BTC, rows_BTC)
    step = cache.step
    with pytest.raises(RuntimeError, match="does not see"):
        cache.update(1, rows_BTC, rows_BTC)
    assert step is not None and cache.step is step, "the pass that is under way goes on"


@pytest.mark.parametrize("kind", some(["llama", "qwen3", "yarn"], "yarn"))
def test_a_model_reads_what_is_held_as_if_the_rest_were_masked(kind):
    """The stock cache with everything else masked out gives the same logits, at the same positions."""
    model, ids = random_model(kind, attention="kvq"), prompt(2, 90)
    cache = cached("h2o", model)
    whole = stock(model)
    with torch.no_grad():
        one = model(ids[:, :70], past_key_values=cache).logits
        two = model(ids[:, :70], past_key_values=whole).logits
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
        for at in range(70, 90):
            seen = torch.zeros(2, 1, 1, at + 1, dtype=torch.bool)
            for row, tokens in enumerate(held(cache.blocks)):
                seen[row, 0, 0, [*tokens, at]] = True
            assert cache.get_seq_length() == at and cache.get_mask_sizes(1, 0) == (at + 1, 0)
            one = model(ids[:, at : at + 1], past_key_values=cache).logits
            model.set_attn_implementation("sdpa")
            two = model(ids[:, at : at + 1], attention_mask=seen, past_key_values=whole).logits
            model.set_attn_implementation("kvq")
            torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)
    assert cache.memory_report().kept < 50
