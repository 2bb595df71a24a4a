"""Soft caps on scores (Gemma 2): packed codes are attended to as decoded keys and values are, and tokens weighed so."""

import pytest
import torch
from architectures import random
from generating import generate, kvq, padded, stock
from models import prompt

CAP = 0.5  # most scores come near it


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


def near(found: torch.Tensor, expected: torch.Tensor, most: float = 1e-3) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=most * float(expected.std()))


@pytest.mark.parametrize("lengths", [(60, 60), (53, 60)])
@pytest.mark.parametrize("name", ["exact", "kivi-2bit", "higgs-4bit", "aqua-2bit", "aqua-absorbed-2bit-2"])
def test_packed_codes_are_read_as_decoded_ones(name, lengths):
    model = capped()
    ids, mask = padded(prompt(2, 60), *lengths)
    caches = [kvq(name, model) for _ in range(2)]
    decoded, packed = (
        logits(model, one, ids, how, mask)[mask.bool()] for one, how in zip(caches, ("eager", "kvq"), strict=True)
    )
    assert max(store.encoded for store in caches[1].blocks.layers.values()) >= 32
    assert float((packed - decoded).abs().mean()) < 0.01 * float(decoded.std())  # eager reads rotated ones in bfloat16
    if name in ("exact", "kivi-2bit"):
        near(packed, decoded)
    if name == "exact":
        near(packed, logits(model, stock(model), ids, "eager", mask)[mask.bool()])
        free = logits(capped(1e6), kvq(name, model), ids, "kvq", mask)[mask.bool()]
        assert float((free - packed).norm() / packed.norm()) > 0.02, "the cap changes something"


def test_beams_of_padded_prompts():
    model = capped()
    ids, mask = padded(prompt(2, 60), 53, 60)
    model.set_attn_implementation("eager")
    expected = generate(model, ids, stock(model), "beams", attention_mask=mask)
    model.set_attn_implementation("kvq")
    assert torch.equal(generate(model, ids, kvq("exact", model), "beams", attention_mask=mask), expected)


@pytest.mark.parametrize("name", ["exact+policies.chunks=on", "snapkv"])
def test_policies_that_hold_all_tokens_change_nothing(name):
    """They choose by capped weights, here with room for all."""
    model, ids = capped(), prompt(2, 60)
    found = logits(model, kvq(name, model), ids, "kvq")
    near(found, logits(model, stock(model), ids, "eager"))
