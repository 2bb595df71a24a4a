"""Blocks in the order of the decode kernel: the same bytes, and the same codes when they are taken back."""

import pytest
import torch

from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.codec.kernel_order import kernel_order
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe, Scheme, Window
from kvq_runtime.stages.codebook import Grid, Lloyd
from kvq_runtime.stages.rotate import Hadamard
from kvq_runtime.stages.rtn import Rtn

GEOMETRY = Geometry(1, 2, 64)
QUANTIZERS = [Rtn(3, 32), Grid(2, 16, "head"), Lloyd(2, "head"), Lloyd(3, "head"), Lloyd(2, 32)]


@pytest.mark.parametrize("quantize", QUANTIZERS, ids=str)
@pytest.mark.parametrize("role", ["key", "value"])
def test_there_and_back(quantize, role):
    scheme = Scheme(quantize, rotate=Hadamard("head"))
    order = kernel_order(scheme, 32, GEOMETRY, role)
    assert order is not None
    codec = Codec(Recipe("test", scheme, scheme, window=Window(0, 0, 32)), 0, role, GEOMETRY, {})
    fields = codec.encode(torch.randn(6, 32, GEOMETRY.width), Context())
    blocks = {name: x.unflatten(0, (2, 3)) for name, x in fields.items()}
    arranged = order.arranged(blocks)
    assert {name: x.nbytes for name, x in arranged.items()} == {name: x.nbytes for name, x in blocks.items()}
    found = order.collected(arranged)
    assert all(torch.equal(found[name], x) for name, x in blocks.items())


@pytest.mark.parametrize("bits", [3, 4])
def test_codes_of_a_symmetric_codebook_are_stored_as_sign_and_magnitude(bits):
    order = kernel_order(Scheme(Lloyd(bits, "head")), 32, GEOMETRY, "value")
    assert order is not None
    sign = 1 if bits == 3 else 8  # set where positive
    codes = torch.arange(2**bits)
    stored = torch.tensor(order.stored)
    assert torch.equal(stored & sign > 0, codes >= 2 ** (bits - 1))
    assert torch.equal(stored.flip(0), stored ^ sign)
