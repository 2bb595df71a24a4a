"""Products of bfloat16 on a machine that has no instructions for them, which is pretended."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvq_runtime.ops import product
from kvq_runtime.stages.predict import MLP, Linear, LowRank


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_the_result_is_the_exact_one_rounded(monkeypatch: pytest.MonkeyPatch):
    """Where a machine sums in float32, as with instructions: less than one last bit of bfloat16 beside it."""
    monkeypatch.setattr(product, "multiplies_bfloat16", lambda: False)
    x, y, bias = numbers(40, 96), numbers(96, 24, seed=1), numbers(24, seed=2)
    exact = x.double() @ y.double()
    for found, expected in ((product.matmul(x, y), exact), (product.addmm(bias, x, y), exact + bias.double())):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-5)


class Products(TorchDispatchMode):
    """The dtypes of what is multiplied as matrices meanwhile."""

    def __init__(self):
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm"):
            self.dtypes |= {x.dtype for x in args}
        return op(*args, **kwargs or {})


@pytest.mark.parametrize("stage", [Linear(), LowRank(rank=8), MLP()], ids=lambda stage: stage.kind)
def test_predictions_multiply_no_bfloat16(stage, monkeypatch: pytest.MonkeyPatch):
    """With instructions and without they agree to bfloat16's rounding, and without no product is of bfloat16."""
    specs = stage.specs(32, 16)
    tensors = {
        name: 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        for seed, (name, (shape, dtype)) in enumerate(specs.items())
    }
    z = numbers(2, 8, 32)
    monkeypatch.setattr(product, "multiplies_bfloat16", lambda: True)
    native = stage.apply(z, tensors)
    monkeypatch.setattr(product, "multiplies_bfloat16", lambda: False)
    with Products() as products:
        wide = stage.apply(z, tensors)
    assert products.dtypes == {torch.float32}
    assert wide.dtype == native.dtype == torch.bfloat16
    torch.testing.assert_close(wide, native, rtol=2**-6, atol=2**-7)


@pytest.mark.parametrize("has", [True, False])
def test_what_the_machine_has(has: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has, "avx2": True}, raising=False)
    assert product.multiplies_bfloat16.__wrapped__() is has
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # an older torch
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has)
    assert product.multiplies_bfloat16.__wrapped__() is has
