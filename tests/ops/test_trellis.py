"""Paths through a trellis: the best of all, decoded bit by bit, nearer to the bound than grids; and the builder."""

import itertools

import numpy as np
import pytest
import torch

from kvq_runtime.ops import latent, trellis
from kvq_runtime.stages.latent import Mixed
from scripts import build_tables

EACH = range(1, trellis.BITS + 1)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_hand(codes: list[int], bits: int) -> list[float]:
    """The values that codes stand for: each is looked up by the last bits written so far."""
    text, found = "0" * trellis.MEMORY, []
    table = trellis.table(bits).double()
    for code in codes:
        text += f"{code:0{bits}b}"
        found.append(float(table[int(text[-trellis.MEMORY :], 2)]))
    return found


@pytest.mark.parametrize("bits", EACH)
def test_codes_decode_to_the_last_bits(bits):
    codes = torch.randint(0, 2**bits, (2, 3, 24), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
    deviation = torch.tensor([0.5, 1.0, 3.0])
    found = trellis.decode_path(codes, deviation, bits)
    for block, channel in itertools.product(range(2), range(3)):
        expected = np.array(by_hand(codes[block, channel].tolist(), bits)) * float(deviation[channel])
        np.testing.assert_allclose(found[block, channel], expected, rtol=1e-6)


@pytest.mark.parametrize(("bits", "tokens"), [(1, 9), (2, 5), (3, 3), (5, 2)])
def test_no_other_path_has_less_weighted_error(bits, tokens):
    """Every path of a short block is tried, in float64; gains of tokens differ fourfold."""
    z, deviation = numbers(2, 3, tokens), torch.tensor([0.7, 1.0, 2.0])
    gain = torch.exp(0.7 * numbers(2, tokens, seed=1))
    found = trellis.decode_path(trellis.encode_path(z / gain[:, None], deviation, bits, gain[:, None]), deviation, bits)
    assert torch.equal(trellis.on_path(z / gain[:, None], deviation, bits, gain[:, None]), found)
    error = (found.double() * gain[:, None] - z).square().sum(-1)
    paths = np.array([by_hand(list(path), bits) for path in itertools.product(range(2**bits), repeat=tokens)])
    for block, channel in itertools.product(range(2), range(3)):
        tried = paths * float(deviation[channel]) * gain[block].double().numpy()
        least = ((tried - z[block, channel].double().numpy()) ** 2).sum(1).min()
        assert float(error[block, channel]) == pytest.approx(least, rel=1e-5)


@pytest.mark.parametrize("bits", EACH)
def test_the_error_of_a_gaussian_channel(bits):
    """As stated, a fifth below that of Lloyd–Max codes, and above the rate-distortion bound."""
    z, one = numbers(20, 60, 128, seed=7), torch.ones(60)
    error = float((trellis.decode_path(trellis.encode_path(z, one, bits), one, bits) - z).square().mean())
    assert error == pytest.approx(trellis.DISTORTIONS[bits], rel=0.02)
    assert 4.0**-bits < error < latent.distortion(bits) / 1.2


@pytest.mark.parametrize("bits", EACH)
def test_what_stands_for_paths_has_their_moments(bits):
    """Size of what is decoded, and what it has in common with what was encoded: all that a linear fit reads."""
    z, deviation = 3 * numbers(20, 60, 128, seed=8), torch.full((60,), 3.0)
    moments = []
    for found in (
        trellis.decode_path(trellis.encode_path(z, deviation, bits), deviation, bits),
        latent.like_path(z, deviation, bits),
    ):
        moments.append([float((found - z).square().mean()), float((found * z).mean()), float(found.square().mean())])
    assert moments[1][0] == pytest.approx(moments[0][0], rel=0.02)
    assert moments[1][1:] == pytest.approx(moments[0][1:], rel=0.005)


def test_water_filling_sees_what_paths_leave():
    plain, paths = Mixed(target=2.0).distortions(), Mixed(target=2.0, codebook="trellis").distortions()
    assert len(plain) == len(paths) == 8
    assert plain[0] == paths[0] and plain[6:] == paths[6:]
    steps = [first - second for first, second in itertools.pairwise(paths)]
    assert steps == sorted(steps, reverse=True) and min(steps) > 0


def test_the_builder_lowers_the_error_and_repeats_itself():
    x = build_tables.sequences(1 << 14, seed=5)
    fits = [build_tables.fit_trellis(2, 7, rounds, samples=64) for rounds in (0, 1, 8)]
    errors = [build_tables.trellis_error(x, values, 2) for values in fits]
    assert errors[0] > 1.01 * errors[1] > 1.02 * errors[2]
    assert torch.equal(build_tables.fit_trellis(2, 7, 1, 64), fits[1])
