"""KVQuant's codebook: fitted points against an optimal clustering, the ends of channels, and what they are for."""

import itertools

import numpy as np
import pytest
import torch
from scheme_fit import blocks, chunks
from torch import Tensor

from kvq_calib.fit import nuq
from kvq_calib.fit.scheme import SchemeFit
from kvq_calib.fit.statistics import Moments
from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.fit.statistics import Statistics
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe, Scheme, preset
from kvq_runtime.stages.correct import Sparse
from kvq_runtime.stages.nuq import Nuq
from kvq_runtime.stages.rtn import Rtn

GEOMETRY = Geometry(1, 2, 32)
WIDTH = GEOMETRY.width
NOWHERE = Context()


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def activations(blocks: int = 24, seed: int = 0) -> Tensor:
    """Tokens [blocks, 128, C] with heavy tails, whose channels differ in size and in mean."""
    channel = torch.arange(WIDTH)
    heavy = draws(blocks, 128, WIDTH, seed=seed) * (1 + 0.6 * draws(blocks, 128, WIDTH, seed=seed + 50).square())
    return heavy * 1.06**channel + 5 * torch.cos(channel)


def fitted(scheme: Scheme, x_NTC: Tensor, half="key") -> Codec:
    moments = Moments(WIDTH)
    moments.update(x_NTC)
    recipe = Recipe("test", scheme, scheme, "pre").check(GEOMETRY)
    fit = SchemeFit(recipe, 0, half, GEOMETRY, Statistics(moments.value().mean_C.float()))
    cut = len(x_NTC) // 2
    fit.fit(chunks([(blocks(x_NTC[:cut], 0), NOWHERE), (blocks(x_NTC[cut:], cut), NOWHERE)]))
    return fit.codec


def error(codec: Codec, x: Tensor) -> float:
    out = codec.decode(codec.encode(x, NOWHERE), NOWHERE).float()
    return float((out - x).double().square().sum() / (x - x.mean((0, 1))).double().square().sum())


# ---- clusters


@pytest.mark.parametrize("seed", range(2))
def test_clusters_of_few_numbers_are_the_best_of_all(seed):
    x = np.sort(draws(14, seed=seed).double().numpy())

    def cost(cuts: tuple[int, ...]) -> float:
        return sum(((part - part.mean()) ** 2).sum() for part in np.split(x, cuts))

    best = min(itertools.combinations(range(1, 14), 3), key=cost)
    found = nuq.centres(torch.from_numpy(x), 4, 0)
    np.testing.assert_allclose(found, [part.mean() for part in np.split(x, best)])


# ---- the fit


@pytest.mark.parametrize("scale, group", [("channel", "block"), ("token", "token")])
def test_points_are_means_of_what_they_stand_for(scale, group):
    """k-means' condition, on what is no outlier: so no other codebook of the same cells has less error."""
    x = activations()
    codec = fitted(Scheme(Nuq(3, scale), correct=Sparse(group=group)), x)
    points = codec.tensors["quantize.points"].double()
    assert len(points) == 8 and bool((points.diff() > 0).all()) and float(points.abs().max()) <= 1
    rows = x.flatten(0, 1)
    if scale == "channel":
        u = (rows - codec.tensors["quantize.middle"]) / codec.tensors["quantize.half"]
    else:  # the range of a token without its one farthest element, the 1% of 64
        median = rows.median(1, keepdim=True).values
        far = (rows - median).abs().argmax(1, keepdim=True)
        kept = rows.scatter(1, far, median)
        low, high = kept.amin(1, keepdim=True), kept.amax(1, keepdim=True)
        u = (2 * rows - low - high) / (high - low)
    u = u[u.abs() <= 1 + 1e-6].double()
    nearest = (u[:, None] - points).abs().argmin(1)
    means = torch.stack([u[nearest == code].mean() for code in range(8)])
    assert float((means - points).abs().max()) < 0.01


# ---- the paper's claims


def test_nuq_beats_even_steps_between_the_same_ends():
    """Section 3.3. Even steps are a codebook too: the same codec with other points."""
    x, new = activations(), activations(seed=1)
    codec = fitted(Scheme(Nuq(3, "channel"), correct=Sparse(group="block")), x)
    even = Codec(Recipe("test", codec.scheme, codec.scheme, "pre"), 0, "key", GEOMETRY,
                 codec.tensors | {"quantize.points": torch.linspace(-1, 1, 8)})  # fmt: skip
    assert error(codec, new) < 0.8 * error(even, new)


@pytest.mark.slow
def test_one_percent_of_outliers_pays_for_itself():
    """Section 3.4: less error than one more bit for every element would bring."""
    x, new = activations(), activations(seed=1)
    sparse = fitted(Scheme(Nuq(3, "token"), correct=Sparse(group="token")), x, "value")
    dense = fitted(Scheme(Nuq(4, "token")), x, "value")
    assert sparse.bits() < dense.bits()
    assert error(sparse, new) < error(fitted(Scheme(Nuq(3, "token")), x, "value"), new)
    keys, bare = (fitted(Scheme(Nuq(3, "channel"), correct=c), x) for c in (Sparse(group="block"), None))
    assert error(keys, new) < 0.6 * error(bare, new)


@pytest.mark.slow
def test_channels_of_unequal_size_want_ranges_of_their_own():
    """Section 3.1: per channel beats per token at fewer bits."""
    x, new = activations(), activations(seed=1)
    per_channel = fitted(preset("kvquant-3bit").key, x)
    per_token = fitted(Scheme(Nuq(3, "token"), correct=Sparse(group="block")), x)
    rounding = fitted(Scheme(Rtn(3, 64)), x)
    assert per_channel.bits() < per_token.bits()
    assert error(per_channel, new) < 0.7 * error(per_token, new)
    assert error(per_channel, new) < 0.5 * error(rounding, new)


def test_a_channel_without_a_range_and_a_zero_token():
    x = activations()
    x[..., 3] = 7.0
    codec = fitted(preset("kvquant-3bit").key, x)
    x[0, 9] = 0
    out = codec.decode(codec.encode(x[:1], NOWHERE), NOWHERE)
    assert out.isfinite().all() and float((out[0, :8, 3] - 7).abs().max()) < 0.03
    values = fitted(preset("kvquant-3bit").value, x, "value")
    assert not values.decode(values.encode(x[:1], NOWHERE), NOWHERE)[0, 9].any()
