"""torch.compile of a model with our cache: the same tokens, and nothing that counts on the host is compiled."""

import pytest
import torch
from generating import kvq
from models import prompt, random_model
from torch._dynamo.utils import counters


@pytest.mark.slow
def test_a_compiled_model_gives_the_same_tokens_without_being_compiled_for_each_length():
    model, ids = random_model("llama", "kvq", num_hidden_layers=2), prompt(1, 40)
    asked = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 1}
    expected = model.generate(ids, past_key_values=kvq("kivi-2bit", model), **asked)
    torch._dynamo.reset()
    counters.clear()
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(model.generate(ids, past_key_values=kvq("kivi-2bit", model), **asked), expected)
    broken = {reason for reason in counters["graph_break"] if "torch.compiler.disable()" not in reason}
    assert not broken and counters["stats"]["unique_graphs"] < 30
