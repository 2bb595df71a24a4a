"""Learned sinks, gpt-oss's logits of no token: packed codes are attended to as decoded keys and values are."""

import pytest
import torch
from architectures import random
from generating import kvq, stock
from models import prompt

CUTS = ((0, 40), (40, 41), (41, 60))


@pytest.fixture(params=["gpt_oss", "granite_swa"])
def model(request):
    made = random(request.param)
    with torch.no_grad():
        for layer in made.model.layers:
            layer.self_attn.sinks.copy_(torch.tensor([1.0, 2.0, 3.0, -4.0]))
    return made


def logits(model, cache, ids, attention: str, **given) -> torch.Tensor:
    model.set_attn_implementation(attention)
    found = []
    with torch.no_grad():
        for a, b in CUTS:
            mask = {name: x[:, :b] for name, x in given.items()}
            found.append(model(ids[:, a:b], past_key_values=cache, **mask).logits)
    return torch.cat(found, 1)


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 * float(expected.std()))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["exact", "kivi-2bit", "higgs-2bit", "aqua-2bit"])
def test_packed_codes_are_read_as_decoded_ones(name, padded, model):
    """What is rotated is decoded to bfloat16 for the model's own attention, and attended to in float32 by ours."""
    ids, mask = prompt(2, 60), torch.ones(2, 60, dtype=torch.long)
    if padded:
        mask[0, :7] = 0
    caches = [kvq(name, model) for _ in range(2)]
    decoded, packed = (
        logits(model, one, ids, how, attention_mask=mask)[mask.bool()]
        for one, how in zip(caches, ("eager", "kvq"), strict=True)
    )
    if name in ("exact", "kivi-2bit"):
        near(packed, decoded)
    assert float((packed - decoded).abs().mean()) < 0.01 * float(decoded.std())
    assert max(store.encoded for store in caches[1].blocks.layers.values()) >= 32
    if name == "exact":
        near(packed, logits(model, stock(model), ids, "eager", attention_mask=mask)[mask.bool()])


def test_the_sinks_are_not_left_out(model):
    ids = prompt(2, 60)
    with_sinks = logits(model, kvq("exact", model), ids, "kvq")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-1e4)
    without = logits(model, kvq("exact", model), ids, "kvq")
    assert float((with_sinks - without).norm() / without.norm()) > 0.05


@pytest.mark.parametrize("name", ["h2o", "snapkv"])
def test_recipes_that_weigh_tokens_are_refused(name, model):
    with pytest.raises(ValueError, match="weighs tokens by attention, of which this model's learned sinks"):
        logits(model, kvq(name, model), prompt(2, 60), "kvq")
