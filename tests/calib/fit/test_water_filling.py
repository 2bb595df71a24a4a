"""Water-filling gives every bit where it helps most: against all allocations, and against the textbook's formula."""

import itertools

import pytest
import torch

from kvq_calib.fit.latent import water_fill
from kvq_runtime.ops import latent


@pytest.mark.parametrize("seed", range(4))
def test_water_filling_is_the_best_of_all_allocations(seed):
    distortions = [latent.distortion(bits) for bits in range(4)]
    variances = torch.exp(2 * torch.randn(4, generator=torch.Generator().manual_seed(seed)))
    every = list(itertools.product(range(4), repeat=4))

    def cost(bits) -> float:
        return sum(float(v) * distortions[b] for v, b in zip(variances, bits, strict=True))

    for budget in range(13):
        found = water_fill(variances, budget, distortions)
        assert sum(found) == budget
        assert cost(found) == pytest.approx(min(cost(bits) for bits in every if sum(bits) == budget))


def test_water_filling_in_fine_steps_is_the_textbooks():
    """b_r = max(0, ½ log₂ λ_r / θ), with θ what every channel above it is left with."""
    variances = torch.exp(-0.2 * torch.arange(40.0))
    fine, budget = 64, 1500
    found = torch.tensor(water_fill(variances, budget, [4.0 ** (-step / fine) for step in range(10 * fine)])) / fine
    log = variances.log2()
    low, high = -60.0, 10.0
    for _ in range(100):
        theta = (low + high) / 2
        low, high = (theta, high) if float(((log - theta) / 2).clamp_min(0).sum()) > budget / fine else (low, theta)
    assert float((found - ((log - low) / 2).clamp_min(0)).abs().max()) <= 1 / fine


def test_what_water_filling_refuses():
    with pytest.raises(ValueError, match="at most 1 bits"):
        water_fill(torch.ones(3), 4, [1.0, 0.4])
    with pytest.raises(ValueError, match="less and less"):
        water_fill(torch.ones(3), 2, [1.0, 0.9, 0.1])
