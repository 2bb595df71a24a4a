"""Coupled codes against a search by hand, codebooks against clusters that are known, and what coupling is for."""

import numpy as np
import pytest
import torch
from scheme_fit import GEOMETRY, NOWHERE, WIDTH, fitted
from torch import Tensor

from kvq_calib.fit.fitted_codebook import centres_of_vectors, gain_shape
from kvq_runtime.codec.codec import Codec
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe, Scheme
from kvq_runtime.stages.fitted_codebook import Coupled


def activations(blocks: int = 8, seed: int = 0, alike: float = 0.0) -> Tensor:
    """Tokens [blocks, 128, C] with channels of unequal size; each shares so much of its variance with all others."""
    generator = torch.Generator().manual_seed(seed)
    own, common = (torch.randn(blocks, 128, width, generator=generator) for width in (WIDTH, 1))
    return (own * (1 - alike) ** 0.5 + common * alike**0.5) * 1.03 ** torch.arange(WIDTH) + 1


def error(codec: Codec, x: Tensor) -> float:
    out = codec.decode(codec.encode(x, NOWHERE), NOWHERE)
    return float((out - x).square().sum() / (x - x.mean((0, 1))).square().sum())


@pytest.mark.parametrize(("channels", "bits"), [(2, 4), (4, 8), (8, 2), (1, 3)])
def test_each_group_takes_the_nearest_of_its_own_centroids(channels, bits):
    """By numpy, from the artifact's tensor alone, in float64; the codes are the bytes that a block holds."""
    codec, x = fitted(Scheme(Coupled(channels, bits)), activations(4)).codec, activations(1, seed=1)
    points_GKE = codec.tensors["quantize.centroids"].double().numpy()
    assert points_GKE.shape == (WIDTH // channels, 2**bits, channels)
    fields = codec.encode(x, NOWHERE)
    x_TGE = x[0].double().numpy().reshape(128, -1, channels)
    distance_TGK = ((x_TGE[:, :, None] - points_GKE) ** 2).sum(-1)
    expected = np.take_along_axis(points_GKE[None], distance_TGK.argmin(-1)[:, :, None, None], 2)[:, :, 0]
    np.testing.assert_array_equal(codec.decode(fields, NOWHERE)[0].numpy(), expected.reshape(128, WIDTH))
    assert fields.keys() == {"codes"} and 8 * fields["codes"].nbytes == 128 * WIDTH * bits / channels
    if bits == 8:
        np.testing.assert_array_equal(fields["codes"][0].numpy(), distance_TGK.argmin(-1))


def test_centroids_are_the_means_of_clusters():
    """Of clusters that lie far apart, whatever their shape; a vector that comes often counts as often."""
    generator = np.random.default_rng(0)
    middles = np.array([[x, y, 0] for x in (-40, 0, 40) for y in (-40, 0, 40)], float)[:8]
    rows = np.repeat(middles, 60, 0) + generator.normal(size=(480, 3)) * (1, 2, 3)
    rows = np.concatenate([rows, np.repeat(rows[:1], 90, 0)])[generator.permutation(570)]
    nearest = ((rows[:, None] - middles) ** 2).sum(-1).argmin(1)
    expected = np.array([rows[nearest == cluster].mean(0) for cluster in range(8)])
    found = centres_of_vectors(torch.from_numpy(rows), 8, seed=0).numpy()
    np.testing.assert_allclose(found[np.lexsort(found.round().T)], expected[np.lexsort(expected.round().T)], atol=1e-6)
    few = centres_of_vectors(torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]]), 4, seed=0)
    assert few.tolist() == [[1, 2], [3, 4], [3, 4], [3, 4]]


def test_a_fit_is_the_same_again_and_moves_no_centroid():
    """Lloyd's condition: a centroid is the mean of the sample's tokens whose nearest it is."""
    x = activations()
    codec = fitted(Scheme(Coupled(2, 4)), x).codec
    points_GKE = codec.tensors["quantize.centroids"]
    assert torch.equal(points_GKE, fitted(Scheme(Coupled(2, 4)), x).codec.tensors["quantize.centroids"])
    x_NGE = x.flatten(0, 1).unflatten(-1, (-1, 2)).double().numpy()
    for group, points_KE in enumerate(points_GKE.double().numpy()):
        nearest = ((x_NGE[:, group, None] - points_KE) ** 2).sum(-1).argmin(1)
        means = np.array([x_NGE[nearest == k, group].mean(0) for k in range(16)])
        assert np.abs(means - points_KE).max() < 0.05 * x_NGE[:, group].std()


def test_gain_and_shape_are_means_of_lengths_and_of_directions():
    """Of each cluster, by numpy; a centre that no vector is nearest to stays."""
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(400, 6)) * np.linspace(0.5, 2, 400)[:, None]
    start = torch.cat([torch.from_numpy(rows[:7]), torch.full((1, 6), 90.0, dtype=torch.float64)])
    found = gain_shape(torch.from_numpy(rows), start)
    nearest = ((rows[:, None] - found.numpy()) ** 2).sum(-1).argmin(1)
    length = np.linalg.norm(rows, axis=1)
    for cluster in range(7):
        own = nearest == cluster
        shape = (rows[own] / length[own, None]).mean(0)
        expected = shape / np.linalg.norm(shape) * length[own].mean()
        np.testing.assert_allclose(found[cluster].numpy(), expected, rtol=1e-9)
    assert found[7].tolist() == [90.0] * 6


def test_gain_shape_centroids_keep_the_length_of_what_they_stand_for():
    """In eight dimensions with 16 centroids; the squared error is no smaller than that of means."""
    calibration, x = activations(16), activations(8, seed=1)
    calibration, x = calibration - calibration.mean((0, 1)), x - x.mean((0, 1))
    ratio, errors = {}, {}
    for means in ("euclidean", "gain-shape"):
        codec = fitted(Scheme(Coupled(4, 4, means=means)), calibration).codec
        parts, found = (
            t.flatten(0, 1).unflatten(-1, (-1, 4)) for t in (x, codec.decode(codec.encode(x, NOWHERE), NOWHERE))
        )
        ratio[means], errors[means] = float(found.norm(dim=-1).mean() / parts.norm(dim=-1).mean()), error(codec, x)
    assert ratio["euclidean"] < 0.9 and ratio["gain-shape"] == pytest.approx(1, abs=0.02)
    assert errors["euclidean"] < errors["gain-shape"] < 1.2 * errors["euclidean"]


def test_coupling_is_worth_more_the_more_channels_share():
    """At 2 bits an element: of independent channels little, of alike ones much (the paper's figure 2)."""
    errors = {}
    for alike in (0.0, 0.9):
        calibration, x = activations(16, alike=alike), activations(8, seed=1, alike=alike)
        errors[alike] = [error(fitted(Scheme(Coupled(c, b)), calibration).codec, x) for c, b in ((1, 2), (2, 4))]
    one, two = errors[0.0]
    assert one == pytest.approx(0.1175, rel=0.05) and 0.85 * one < two < one  # Max, 1960: 0.1175
    one, two = errors[0.9]
    assert one == pytest.approx(0.1175, rel=0.1) and two < 0.7 * one


def test_channels_that_do_not_divide_a_head_are_refused():
    scheme = Scheme(Coupled(8, 8))
    assert scheme.bits(128, GEOMETRY) == 1
    with pytest.raises(ValueError, match="coupled: channels=8 does not divide head size 12"):
        Recipe("r", scheme, scheme).check(Geometry(1, 2, 12))
    with pytest.raises(ValueError, match="bits=9; use 1 to 8"):
        Coupled(2, 9)
    with pytest.raises(ValueError, match="channels=0; use 1 or more"):
        Coupled(0)
    with pytest.raises(ValueError, match="means='medians'; use one of .*euclidean"):
        Coupled(means="medians")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match='coupled is fitted to tokens; use axis "token"'):
        Recipe("r", Scheme(Coupled(), axis="channel"), Scheme(Coupled())).check()
