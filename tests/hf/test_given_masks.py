"""Masks [B, 1, T, all tokens] of the caller's own."""

import pytest
import torch
from generating import kvq, stock
from models import prompt, random_model

from kvq_runtime.hf.model import CACHE


@pytest.mark.parametrize("attention, hides", [("kvq", None), ("sdpa", None), ("sdpa", torch.finfo(torch.float32).min)])
def test_a_mask_hides_tokens(attention, hides):
    """Where it is of bool, or, under other attentions than ours, added to scores."""
    model, ids = random_model("llama", attention), prompt(2, 63)
    seen = torch.ones(63, 63, dtype=torch.bool).tril().expand(2, 1, -1, -1).clone()
    seen[:, :, 60:, 10:30] = False
    mask = seen if hides is None else torch.zeros(seen.shape).masked_fill(~seen, hides)
    found = []
    for cache in (kvq("exact", model), stock(model)):
        with torch.no_grad():
            model(ids[:, :60], attention_mask=mask[:, :, :60, :60], **{CACHE: cache})
            found.append(model(ids[:, 60:], attention_mask=mask[:, :, 60:], **{CACHE: cache}).logits)
    torch.testing.assert_close(*found, rtol=0, atol=1e-4)


def test_a_mask_that_is_added_to_scores_is_refused():
    model = random_model("llama", "kvq")
    cache = kvq("exact", model)
    mask = torch.zeros(2, 1, 60, 60).masked_fill(~torch.ones(60, 60, dtype=torch.bool).tril(), -torch.inf)
    with torch.no_grad(), pytest.raises(ValueError, match="takes masks of bool"):
        model(prompt(2, 60), attention_mask=mask, **{CACHE: cache})
    assert cache.get_seq_length() == 0


def test_a_mask_that_hides_older_tokens_is_not_taken_for_padding():
    """A kernel reads padding alone, and is asked where that is all that a pass's mask says."""
    model, ids = random_model("llama", "kvq"), prompt(2, 64)
    cache = kvq("exact", model)
    mask = torch.ones(2, 64, dtype=torch.long)
    mask[0, :5] = 0
    hole = mask.clone()
    hole[:, 20:30] = 0
    with torch.no_grad():
        for start, stop, given, told in ((0, 60, mask, True), (60, 61, mask, True), (61, 62, hole, False),
                                         (62, 64, torch.ones_like(mask), False)):  # fmt: skip
            model(ids[:, start:stop], attention_mask=given[:, :stop], **{CACHE: cache})
            assert cache.blocks.positions.told is told
