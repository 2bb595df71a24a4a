"""RoPE: the rotation is complex multiplication, and its inverse is one whatever the cosines were scaled by."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq_runtime.ops import rope


def tables(tokens: int, half: int, scaling: float, dtype: torch.dtype = torch.float32):
    angle = torch.arange(tokens)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    return (angle.cos() * scaling).to(dtype)[None], (angle.sin() * scaling).to(dtype)[None]


def keys(tokens: int, size: int) -> torch.Tensor:
    return torch.randn(2, tokens, 3, size, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("rotated", [8, 16])
@pytest.mark.parametrize("scaling", [1.0, 1.35])
def test_rotate_is_complex_multiplication(rotated, scaling):
    x, (cos, sin) = keys(11, 16), tables(11, rotated // 2, scaling)
    half = rotated // 2
    turned = torch.complex(x[..., :half], x[..., half:rotated]) * torch.complex(cos, sin)[:, :, None]
    expected = torch.cat([turned.real, turned.imag, x[..., rotated:]], -1)
    torch.testing.assert_close(rope.rotate(x, cos, sin), expected)


@settings(deadline=None)
@given(st.sampled_from([1.0, 0.5, 1.2079, 3.0]), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans())
def test_the_inverse_undoes_scaling_and_rounded_cosines(scaling, dtype, partial):
    x = keys(40, 16)
    cos, sin = tables(40, 4 if partial else 8, scaling, dtype)
    back = rope.unrotate(rope.rotate(x, cos.float(), sin.float()), cos, sin)
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-5)


def test_the_inverse_of_the_models_own_bf16_arithmetic():
    """Keys as a bf16 model caches them: undone to within the rounding of that model's key, not worse with position."""
    x, (cos, sin) = keys(3000, 32).bfloat16(), tables(3000, 16, 1.0, torch.bfloat16)
    back = rope.unrotate(rope.rotate(x, cos, sin), cos, sin)
    assert back.dtype == torch.float32
    pair = x.float().unflatten(-1, (2, 16)).norm(dim=-2).repeat(1, 1, 1, 2)
    assert ((back - x.float()).abs() <= 2**-6 * pair).all()
    assert float((back - x.float()).norm() / x.float().norm()) < 2**-8
