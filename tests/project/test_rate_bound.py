"""The distance of codes from what any could reach, where it is known in closed form."""

import pytest
import torch

from kvq_runtime.ops import ladder, latent
from scripts import rate_bound


@pytest.mark.parametrize("bits", [1, 3, 5])
def test_equal_channels_are_all_as_far_from_the_bound(bits: int):
    paths, bound = rate_bound.errors(torch.full((10,), 3.0, dtype=torch.float64), bits)
    assert paths == pytest.approx(30 * latent.PATH_DISTORTIONS[bits])
    assert bound == pytest.approx(30 * 4.0**-bits)


def test_channels_below_the_level_are_left_out():
    """At 1 bit in the mean the two channels of 16 have 2 bits each, to a level of 1, and those of 1/2 none."""
    variances = torch.tensor([16.0, 0.5, 16.0, 0.5], dtype=torch.float64)
    paths, bound = rate_bound.errors(variances, 1)
    assert bound == pytest.approx(2 * 1 + 2 * 0.5)
    assert paths == pytest.approx(32 * latent.PATH_DISTORTIONS[2] + 1)


def test_rungs_are_read_as_deviations_and_other_channels_are_nothing():
    rung = torch.tensor([-ladder.LOWEST, 3 - ladder.LOWEST], dtype=torch.uint8)  # of 1 and of 2 steps
    found = rate_bound.stored({"layers.0.key.quantize.rung": rung, "layers.0.key.rotate.basis": torch.ones(2)}, 4)
    assert found.shape == (4,) and found[2:].count_nonzero() == 0
    assert all(abs(one.log2() - octave) <= 1 / ladder.PER for one, octave in zip(found[:2], (0, 2), strict=True))


def test_scalar_codes_are_a_quarter_of_a_bit_above_the_best_where_steps_are_small():
    """Of a Gaussian a uniform step leaves πe/6 times the least error: 0.254 bits."""
    variances = 4.0 ** (3 + torch.linspace(0, 1, 3000, dtype=torch.float64))
    assert rate_bound.least(variances, rate_bound.scalar(variances, 4.0)) == pytest.approx(4 - 0.254, abs=0.03)
    assert rate_bound.least(variances, float(variances.log2().mean().exp2()) * 3000 * 4.0**-4) == pytest.approx(4)


def test_a_channel_below_a_quarter_of_a_step_costs_its_variance():
    variances = torch.tensor([64.0, 1e-6], dtype=torch.float64)
    assert rate_bound.scalar(variances, 1.5) - rate_bound.scalar(variances[:1], 3) == pytest.approx(1e-6, rel=1e-3)
