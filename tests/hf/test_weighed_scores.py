"""Scores that a model alters, by learned sinks (gpt-oss's logits of no token) and soft caps (Gemma 2): packed codes are
attended to as decoded keys and values are, and tokens weighed so."""

import pytest
import torch
from architectures import random
from generating import kvq, padded, stock
from models import prompt
from tiers import some

CAP = 0.5  # most scores come near it


@pytest.fixture
def sinking():
    made = random("gpt_oss")
    with torch.no_grad():
        for layer in made.model.layers:
            layer.self_attn.sinks.copy_(torch.tensor([1.0, 2.0, 3.0, -4.0]))
    return made


def capped(cap: float = CAP):
    model = random("gemma2")
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = cap
    return model


def logits(model, cache, ids, attention: str, mask=None) -> torch.Tensor:
    model.set_attn_implementation(attention)
    found = []
    with torch.no_grad():
        for a, b in ((0, 40), (40, 41), (41, 60)):
            given = {} if mask is None else {"attention_mask": mask[:, :b]}
            found.append(model(ids[:, a:b], past_key_values=cache, **given).logits)
    return torch.cat(found, 1)


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 * float(expected.std()))


def check_packed(model, name: str, ids, mask) -> torch.Tensor:
    """Packed codes are read as decoded ones, whose logits are those of the stock cache if they are exact.

    Eager attention, the model's own, reads what was rotated in bfloat16, ours in float32.
    """
    caches = [kvq(name, model) for _ in range(2)]
    decoded, packed = (
        logits(model, one, ids, how, mask)[mask.bool()] for one, how in zip(caches, ("eager", "kvq"), strict=True)
    )
    assert max(store.encoded for store in caches[1].blocks.layers.values()) >= 32
    assert float((packed - decoded).abs().mean()) < 0.01 * float(decoded.std())
    if name in ("exact", "kivi-2bit"):
        near(packed, decoded)
    if name == "exact":
        near(packed, logits(model, stock(model), ids, "eager", mask)[mask.bool()])
    return packed


@pytest.mark.parametrize("lengths", some([(60, 60), (53, 60)], (53, 60)))
@pytest.mark.parametrize("name", some(["exact", "kivi-2bit", "aqua-2bit"], "kivi-2bit"))
def test_packed_codes_are_read_with_learned_sinks(name, lengths, sinking):
    check_packed(sinking, name, *padded(prompt(2, 60), *lengths))


@pytest.mark.parametrize("lengths", some([(60, 60), (53, 60)], (53, 60)))
@pytest.mark.parametrize("name", some(["exact", "kivi-2bit", "aqua-2bit"], "exact"))
def test_packed_codes_are_read_with_soft_caps(name, lengths):
    ids, mask = padded(prompt(2, 60), *lengths)
    packed = check_packed(capped(), name, ids, mask)
    if name == "exact":
        free = logits(capped(1e6), kvq(name, capped(1e6)), ids, "kvq", mask)[mask.bool()]
        assert float((free - packed).norm() / packed.norm()) > 0.02, "the cap changes something"


@pytest.mark.parametrize("name", ["h2o", "snapkv"])
def test_recipes_that_weigh_tokens_are_refused_with_learned_sinks(name, sinking):
    with pytest.raises(ValueError, match="weighs tokens by attention, of which this model's learned sinks"):
        logits(sinking, kvq(name, sinking), prompt(2, 60), "kvq")
