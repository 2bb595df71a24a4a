"""Scalar Lloyd–Max on the sphere: codebooks and errors as measured, TurboQuant's and ours, and three ways to scale."""

from itertools import pairwise

import pytest
import torch
from coding import gaussian, one, relative, there_and_back
from scipy.integrate import quad

from kvq_runtime.ops import lloyd
from kvq_runtime.stages.codebook import Lloyd
from kvq_runtime.stages.rotate import Hadamard, Random

# the error of a coordinate of vectors of 128, and of Gaussian numbers
ERRORS = {1: 0.3609, 2: 0.1160, 3: 0.03397, 4: 0.00932}
GAUSSIAN_ERRORS = {1: 0.36338, 2: 0.11748, 3: 0.03455, 4: 0.00950}


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [5, 128, 1024])
def test_centroids_are_the_means_of_their_cells(size, bits):
    """Lloyd's two conditions by another integration, and for vectors of 128 the published error."""
    boundaries, centroids = (part.tolist() for part in lloyd.sphere(size, bits))
    middles = [sum(pair) / 2 for pair in pairwise(centroids)]
    assert boundaries == pytest.approx(middles, abs=1e-6)
    end = min(size**0.5, 11)

    def density(z: float) -> float:
        return max(0, 1 - z * z / size) ** ((size - 3) / 2)

    error, ends = 0.0, [-end, *boundaries, end]
    for centroid, (low, high) in zip(centroids, pairwise(ends), strict=True):
        mass, moment = quad(density, low, high)[0], quad(lambda z: z * density(z), low, high)[0]
        assert moment / mass == pytest.approx(centroid, abs=1e-5)
        error += quad(lambda z, c=centroid: (z - c) ** 2 * density(z), low, high)[0] / quad(density, -end, end)[0]
    if size == 128:
        assert error == pytest.approx(ERRORS[bits], rel=0.001)
    if size == 1024:
        assert error == pytest.approx(GAUSSIAN_ERRORS[bits], rel=0.003)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_error_and_bits_on_gaussian_vectors(bits):
    made, x = one(Lloyd(bits, scale="plain")), 3 * gaussian(4, 512, 1024)
    assert relative(x - there_and_back(made, x), x) == pytest.approx(ERRORS[bits], rel=0.01)
    assert made.bits() == bits + 16 / 128


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_the_scales_keep_what_they_promise(bits):
    """The norm; or the least error, whose residual is orthogonal to what was decoded."""
    x = gaussian(2, 512, 1024)
    plain, norm, least = (there_and_back(one(Lloyd(bits, scale=s)), x) for s in ("plain", "norm", "least_squares"))
    norms = [part.unflatten(-1, (8, 128)).norm(dim=-1) for part in (x, norm)]
    torch.testing.assert_close(*norms, rtol=0.008, atol=0)  # the bf16 of scales and products
    assert relative(x - least, x) < min(relative(x - plain, x), relative(x - norm, x))
    assert float((least * (x - least)).sum() / x.square().sum()) == pytest.approx(0, abs=0.003)


@pytest.mark.parametrize("rotate", [Random(), Hadamard("head")])
def test_a_rotation_makes_any_data_gaussian(rotate):
    x = gaussian(2, 512, 1024) * torch.logspace(-0.5, 0.5, 128).repeat(8)
    plain, turned = (relative(x - there_and_back(one(Lloyd(2, scale="plain"), rotate=r), x), x) for r in (None, rotate))
    assert turned == pytest.approx(ERRORS[2], rel=0.03)
    assert plain > 1.2 * turned
