"""Packing: nothing is lost, nothing is wasted, and the layout is the one that is written down."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq_runtime.ops import pack


@st.composite
def codes(draw):
    bits = draw(st.integers(1, 8))
    rows = draw(st.lists(st.lists(st.integers(0, 2**bits - 1), min_size=7, max_size=7), min_size=1, max_size=3))
    count = draw(st.integers(1, 7))
    return bits, torch.tensor([row[:count] for row in rows], dtype=torch.uint8)


def by_hand(values: list[int], bits: int) -> list[int]:
    """Byte j of a plane holds codes j, j + n/s, j + 2n/s, ...; planes of 8, 4, 2 and 1 bits, low bits first."""
    out, shift = [], 0
    for width in [width for width in (8, 4, 2, 1) if bits & width]:
        per_byte = 8 // width
        size = -(-len(values) // per_byte)
        for j in range(size):
            byte = 0
            for stream in range(per_byte):
                place = j + stream * size
                value = values[place] if place < len(values) else 0
                byte |= (value >> shift) % 2**width << (stream * width)
            out.append(byte)
        shift += width
    return out


@settings(deadline=None)
@given(codes())
def test_round_trip_and_layout(case):
    bits, given_codes = case
    packed = pack.pack(given_codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape[-1] == pack.packed_size(given_codes.shape[-1], bits)
    assert torch.equal(pack.unpack(packed, bits, given_codes.shape[-1]), given_codes)
    assert packed.tolist() == [by_hand(row, bits) for row in given_codes.tolist()]


@pytest.mark.parametrize("bits", [1, 7, 8, 14, 17, 24])
@pytest.mark.parametrize("count", [5, 129])
def test_places_of_any_width(bits, count):
    places = torch.randint(0, 2**bits, (2, count), generator=torch.Generator().manual_seed(bits))
    packed = pack.pack_places(places, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (2, pack.places_size(count, bits))
    assert torch.equal(pack.unpack_places(packed, bits, count), places)
    assert count * bits / 8 <= packed.shape[1] <= count * bits / 8 + 3
