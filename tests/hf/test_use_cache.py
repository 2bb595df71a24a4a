"""A cache, and use_cache=False: `generate` hands on the whole text at every step."""

import pytest
import torch
from architectures import random
from generating import kvq
from models import prompt


def test_a_step_that_would_take_in_all_of_the_text_again_is_refused():
    model, ids = random("llama", use_cache=False), prompt(2, 60)
    asked = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 1}
    with pytest.raises(ValueError, match="holds 60 tokens, and use_cache=False .*; pass use_cache=True to generate"):
        model.generate(ids, past_key_values=kvq("exact", model), **asked)
    expected = model.generate(ids, **asked)
    found = model.generate(ids, past_key_values=kvq("exact", model), **asked, use_cache=True)
    assert torch.equal(found, expected)
