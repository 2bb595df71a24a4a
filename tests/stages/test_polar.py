"""PolarQuant: errors as published or measured, the transform against one that computes angles, and codebooks: the exact
ones as published, and those of a calibration.
"""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from coding import HEADS, gaussian, one, relative, there_and_back
from scipy.integrate import quad
from torch import Tensor

from kvq_calib.fit import nuq
from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit import polar as polar_fit
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import polar
from kvq_runtime.recipe import Recipe, Scheme, preset
from kvq_runtime.stages.polar import Polar, PolarFitted
from kvq_runtime.stages.rotate import Hadamard, Random

# bits of each level → relative squared error of Gaussian vectors of 128 with exact radii, and bits per element
ERRORS = {
    (4, 2, 2, 2): (0.0321, 3.875),
    (4, 2, 2, 2, 2, 2, 2): (0.0352, 3.125),
}


# --- the transform
# Lloyd–Max centroids of the angles, (level, bits) → the lower half; the upper one mirrors it at π/4
TABLES = {
    (2, 2): [0.30976, 0.63398],
    (3, 2): [0.42625, 0.67438],
    (4, 2): [0.52422, 0.70591],
    (7, 2): [0.69122, 0.75711],
}


def slow(x: np.ndarray, bits: tuple[int, ...], kind: str) -> np.ndarray:
    """Angles with atan2, the nearest centroid, and back, one pair after the other."""
    if not bits:
        return x
    level = 1 + slow.depth - len(bits)
    pairs = x.reshape(-1, 2)
    radius, angle = np.hypot(pairs[:, 0], pairs[:, 1]), np.arctan2(pairs[:, 1], pairs[:, 0]) % (2 * np.pi)
    centroids = polar.codebook(level, bits[0])[1].numpy()
    nearest = np.abs(angle[:, None] - centroids).argmin(1)
    points = polar.points(level, bits[0], kind).numpy()[nearest]
    return (slow(radius, bits[1:], kind)[:, None] * points).reshape(-1)


CASES = [
    (Polar(), 64, 4),
    (Polar(), 80, 4),
    (Polar((3, 2, 2, 1), 0, points="mean"), 64, 6),
    (Polar((6, 4, 1), 3, 24), 96, 3),
]


@pytest.mark.parametrize("stage, head_size, depth", CASES)
def test_agrees_with_the_slow_transform(stage, head_size, depth):
    """All but the float16 of radii and the bf16 of decoding."""
    geometry = Geometry(1, 2, head_size)
    x = gaussian(2, 3, geometry.width, seed=head_size) * torch.linspace(0.5, 4, geometry.width)
    slow.depth = depth
    bits = (*stage.bits, *stage.bits[-1:] * depth)[:depth]
    expected = torch.from_numpy(slow(x.double().numpy().reshape(-1), bits, stage.points)).view(x.shape)
    assert relative(there_and_back(one(stage, geometry), x) - expected, expected) < 2**-15


# --- errors and bits


@pytest.mark.parametrize("bits", ERRORS)
def test_error_and_bits_on_gaussian_vectors(bits):
    levels = 4 if len(bits) == 4 else 0
    made, x = one(Polar(bits, levels)), 3 * gaussian(4, 512, 1024)
    error, billed = ERRORS[bits]
    assert relative(x - there_and_back(made, x), x) == pytest.approx(error, rel=0.01)
    assert made.bits() == billed


def test_the_papers_bill():
    """62 bits per 16 elements; to the last level 3.125 bits."""
    for name, bits in (("polar-paper", 62 / 16), ("polar-3bit", 3.125)):
        assert Codec(preset(name), 0, "value", HEADS, {}).bits() == bits


@pytest.mark.parametrize("bits", [(4, 2), (3, 2, 2, 1)])
def test_unit_points_keep_norms_and_mean_points_lose_least(bits):
    """A mean point is the projection of what it stands for: ⟨x, x̂⟩ = ‖x̂‖², so no factor would improve it."""
    x = gaussian(4, 512, 1024)
    unit, mean = (there_and_back(one(Polar(bits, 0, points=kind)), x) for kind in ("unit", "mean"))
    norms = [part.unflatten(-1, (8, 128)).norm(dim=-1) for part in (x, unit)]
    torch.testing.assert_close(*norms, rtol=0.005, atol=0)  # of which most is the bf16 of the points
    assert relative(x - mean, x) < relative(x - unit, x)
    assert float((x * mean).sum() / mean.square().sum()) == pytest.approx(1, abs=0.005)
    assert relative(mean, x) == pytest.approx(1 - relative(x - mean, x), rel=0.005)


def test_preconditioning_makes_any_data_gaussian():
    """With channels of unequal size angles have another density; a random rotation brings back the right one.

    A signed Hadamard does not always: where every other channel is nearly silent, its neighbours come out nearly
    equal, at an angle of π/4, which is a boundary of sectors: the worst place.
    """
    x = gaussian(2, 512, 1024) * torch.tensor([1.0, 0.1]).repeat(512) * torch.logspace(0, 1, 128).repeat(8)
    turns = None, Random(), Hadamard("head")
    plain, turned, aligned = (relative(x - there_and_back(one(Polar(), rotate=turn), x), x) for turn in turns)
    assert turned == pytest.approx(0.0321, rel=0.03)
    assert plain > 1.3 * turned and aligned > 1.5 * turned


# --- settings


def test_head_sizes():
    paper = preset("polar-paper").check(Geometry(2, 2, 80))
    with pytest.raises(ValueError, match="does not fit a vector of 80 elements; use a power of two"):
        preset("polar-3bit").check(Geometry(2, 2, 80))
    with pytest.raises(ValueError, match="does not fit a vector of 72 elements; use a multiple of 16"):
        paper.check(Geometry(2, 2, 72))


def density(level: int, angle: float) -> float:
    return math.sin(2 * angle) ** (2 ** (level - 1) - 1)


@pytest.mark.parametrize("level, bits", TABLES)
def test_codebooks_are_the_published_ones(level, bits):
    role = torch.tensor(TABLES[level, bits], dtype=torch.float64)
    expected = torch.cat([role, math.pi / 2 - role.flip(0)])
    torch.testing.assert_close(polar.codebook(level, bits)[1], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("level, bits", [(2, 4), (4, 2), (10, 2)])
def test_a_centroid_and_a_mean_point_are_the_means_of_their_cell(level, bits):
    """Lloyd's two conditions, and E[cos], E[sin], by another integration."""
    boundaries, centroids = polar.codebook(level, bits)
    torch.testing.assert_close(boundaries, (centroids[1:] + centroids[:-1]) / 2)
    ends = [0.0, *boundaries.tolist(), math.pi / 2]
    for code, (low, high) in enumerate(pairwise(ends)):
        near = [math.pi / 4] if low < math.pi / 4 < high else None
        mass, *means = (
            quad(lambda t, f=f: f(t) * density(level, t), low, high, points=near)[0]
            for f in (lambda t: 1, lambda t: t, math.cos, math.sin)
        )
        assert centroids[code] == pytest.approx(means[0] / mass, abs=1e-6)
        found = polar.points(level, bits, "mean")[code].tolist()
        assert found == pytest.approx([mean / mass for mean in means[1:]], abs=1e-6)


# --- codebooks from the calibration


def fitted(stage: PolarFitted, x: Tensor, rotate=None) -> Codec:
    """A codec with the codebooks of x, [N, T, C]; the sample is all of it."""
    scheme = Scheme(stage, rotate=rotate)
    bare = Codec(Recipe("test", scheme, scheme), 0, "key", HEADS, {})
    rows_NC = bare.rotated(x).flatten(0, 1)
    tensors = polar_fit.codebooks(stage, rows_NC, HEADS, lambda x_N, count: nuq.centres(x_N, count, 0))
    return Codec(Recipe("test", scheme, scheme), 0, "key", HEADS, {f"quantize.{n}": t for n, t in tensors.items()})


def unequal(seed: int) -> Tensor:
    """Heads whose channels have unequal size, and a mean: as keys after no rotation."""
    x = gaussian(1, 512, 1024, seed=seed) * torch.tensor([1.0, 0.1]).repeat(512) * torch.logspace(0, 1, 128).repeat(8)
    return x + 2 * torch.cos(torch.arange(1024))


@pytest.mark.parametrize("points", ["unit", "mean"])
def test_after_a_rotation_fitted_codebooks_are_the_exact_ones(points):
    """What the paper's theory says: the density is known, so k-means finds what Lloyd and Max computed."""
    stage = PolarFitted((3, 2), 4, points=points)
    made = fitted(stage, unequal(0), Random())
    found = made.tensors["quantize.points"].split([8, 4, 4, 4])
    for level in (2, 3, 4):
        expected = polar.points(level, 2, points).float()
        torch.testing.assert_close(found[level - 1], expected, atol=0.03, rtol=0)
    new = unequal(1)
    exact = relative(new - there_and_back(one(Polar((3, 2), 4, points=points), rotate=Random()), new), new)
    assert relative(new - there_and_back(made, new), new) == pytest.approx(exact, rel=0.05)


def test_without_a_rotation_only_fitted_codebooks_will_do():
    """Angles of channels as they are have another density than the exact codebooks are for."""
    x, new = unequal(0), unequal(1)
    exact, own = one(Polar()), fitted(PolarFitted(), x)
    errors = [relative(new - there_and_back(made, new), new) for made in (exact, own)]
    assert errors[1] < 0.9 * errors[0]
    assert own.bits() == exact.bits() == 62 / 16  # the codebooks are shared


def test_fitted_centroids_are_the_means_of_their_angles():
    """Lloyd's condition, equation 4, of every level, with angles from numpy."""
    x = unequal(0)
    made = fitted(PolarFitted((4, 3, 2), 3), x)
    tables = made.tensors["quantize.points"].split([16, 8, 4])
    radii = x.double().numpy().reshape(-1)
    for table in tables:
        pairs = radii.reshape(-1, 2)
        radii, angle = np.hypot(pairs[:, 0], pairs[:, 1]), np.arctan2(pairs[:, 1], pairs[:, 0]) % (2 * np.pi)
        centroids = np.arctan2(*table.flip(1).numpy().T) % (2 * np.pi)
        nearest = np.abs(angle[:, None] - centroids).argmin(1)
        means = [angle[nearest == code].mean() for code in range(len(table))]
        assert np.abs(means - centroids).max() < 0.03


def test_a_fit_to_zeros_and_zero_rows():
    made = fitted(PolarFitted(levels=0), torch.zeros(1, 8, 1024))
    assert not there_and_back(made, torch.zeros(1, 2, 1024)).any()
    x = unequal(2)
    x[0, 3] = 0
    made = fitted(PolarFitted(), x)
    out = there_and_back(made, x)
    assert out.isfinite().all() and not out[0, 3].any()
