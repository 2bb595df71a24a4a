"""Rounding: the nearest level that can be stored; evenly spaced numbers are exact."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq_runtime.ops import pack, rtn

GROUPS = st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=9)


def encoded(x: torch.Tensor, bits: int, range: rtn.Range) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Unpacked codes, step and low end."""
    codes, step, *low = rtn.encode(x, bits, range)
    return pack.unpack(codes, bits, x.shape[-1]), step, low[0] if low else None


def nearest_level(x: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    return (x.double()[..., None] - levels.double()).abs().amin(-1)


@settings(deadline=None)
@given(GROUPS, st.sampled_from([1, 2, 3, 4, 8]))
def test_codes_are_the_nearest_of_the_stored_levels(values, bits):
    x = torch.tensor(values)
    codes = torch.arange(2**bits, dtype=torch.uint8)
    for range in ("minmax", "absmax"):
        chosen, step, low = encoded(x, bits, range)
        decoded = rtn.decode(chosen, step, low, bits)
        levels = rtn.decode(codes, step, low, bits)
        slack = 1e-3 * float(step) + 1e-5
        assert ((x - decoded).double().abs() <= nearest_level(x, levels) + slack).all()


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_ends_are_reached_and_a_uniform_ramp_is_exact(bits):
    ramp = torch.arange(2**bits).float() * 0.25 - 1
    codes, step, low = encoded(ramp, bits, "minmax")
    assert torch.equal(codes, torch.arange(2**bits, dtype=torch.uint8))
    assert torch.equal(rtn.decode(codes, step, low, bits), ramp)
    codes = encoded(ramp - ramp.mean(), bits, "absmax")[0]
    assert torch.equal(codes, torch.arange(2**bits, dtype=torch.uint8))
