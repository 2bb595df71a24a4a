"""What a model asks of PyTorch's attention reaches the function that answers in its place, or is refused."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from kvq_calib.model.attention import answered
from kvq_runtime.hf.attention import dense

Q, K, V = torch.randn(3, 2, 4, 6, 8, generator=torch.Generator().manual_seed(0))


class Own(nn.Module):
    """Attention by code of its own."""

    def forward(self, key: torch.Tensor = K, **given) -> torch.Tensor:
        return scaled_dot_product_attention(Q, key, V, **given)


@pytest.mark.parametrize("given", [
    {}, {"is_causal": True}, {"scale": 0.1}, {"attn_mask": torch.ones(6, 6).tril().bool()[None, None]},
    {"dropout_p": 0.4}, {"dropout_p": 1.0},
])  # fmt: skip
def test_an_answer_is_pytorchs(given):
    module, found = Own(), []
    for answer in (False, True):
        torch.manual_seed(0)
        if answer:
            with answered([module], dense):
                found.append(module(**given))
        else:
            found.append(module(**given))
    torch.testing.assert_close(*found)
    assert "forward" not in vars(module)


def test_heads_that_pytorch_would_share_are_refused():
    module = Own()
    with answered([module], dense), pytest.raises(ValueError, match="Own has .* share heads of keys .*models.md"):
        module(K[:, :2], enable_gqa=True)
