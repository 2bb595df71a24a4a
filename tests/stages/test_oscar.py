"""OSCAR's rotations: what they equalise, computed another way; and heads of their own."""

import math

import numpy as np
import pytest
import torch

from kvq_calib.fit import rotate as fit
from kvq_calib.fit.statistics import Attended
from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit.statistics import Queried, QueryMoment, ResidualMoment, Statistics
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import pack
from kvq_runtime.recipe import Recipe, Scheme, Window
from kvq_runtime.stages.rotate import Oscar
from kvq_runtime.stages.rtn import Clipped, Rtn

GEOMETRY = Geometry(layers=1, kv_heads=3, head_size=16)


def moment(size: int, seed: int, spread: float = 4.0) -> torch.Tensor:
    """A second moment, float64, whose eigenvalues differ by e^spread."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    return turn @ torch.diag(torch.linspace(0, spread, size, dtype=torch.float64).exp()) @ turn.mT


# ---- OSCAR: the metric alike on all channels ----


def test_the_rotation_is_orthogonal_and_no_channel_weighs_more():
    """Of all orthogonal rotations the largest diagonal of RᵀMR is at least tr M / D; this one has it."""
    metric = moment(16, 10)
    rotation = fit.spectral(metric)
    assert torch.allclose(rotation.mT @ rotation, torch.eye(16, dtype=torch.float64), atol=1e-12)
    weight = (rotation.mT @ metric @ rotation).diagonal()
    assert torch.allclose(weight, metric.trace() / 16 + torch.zeros(16).double())
    generator = torch.Generator().manual_seed(11)
    for _ in range(50):
        other = torch.linalg.qr(torch.randn(16, 16, generator=generator, dtype=torch.float64)).Q
        assert (other.mT @ metric @ other).diagonal().max() > weight.max()


def test_the_rotation_is_the_authors_composition():
    """U H P by numpy, column by column: U ascending, H Sylvester's, ranks at their bits reversed."""
    metric = moment(8, 12)
    values, vectors = np.linalg.eigh(metric.numpy())
    vectors = vectors * np.sign(vectors[abs(vectors).argmax(0), range(8)])
    hadamard = np.array([[(-1) ** bin(i & j).count("1") for j in range(8)] for i in range(8)]) / math.sqrt(8)
    reversed_bits = [0, 4, 2, 6, 1, 5, 3, 7]
    falling = np.argsort(-values)
    mixed = vectors @ hadamard
    expected = np.empty((8, 8))
    for rank, place in enumerate(reversed_bits):
        expected[:, place] = mixed[:, falling[rank]]
    assert np.allclose(fit.spectral(metric).numpy(), expected, atol=1e-12)


def test_heads_of_other_sizes_are_mixed_in_strides():
    mixing = fit.mixing(12)
    assert torch.allclose(mixing.mT @ mixing, torch.eye(12, dtype=torch.float64))
    assert [int(row.nonzero()[:, 0].max() - row.nonzero()[:, 0].min()) for row in mixing] == [9] * 12
    assert (mixing != 0).sum(1).tolist() == [4] * 12


def test_values_are_weighed_by_what_queries_see_in_their_keys():
    """Σ w v vᵀ / Σ w token by token, in numpy; masked tokens left out; chunks add up."""
    generator = torch.Generator().manual_seed(13)
    k_NTC, v_NTC = torch.randn(2, 2, 5, 48, generator=generator)
    metric = torch.stack([moment(16, seed, 2.0) for seed in (14, 15, 16)])
    mask = torch.tensor([[False, True, True, True, True], [True] * 5])
    whole, parts = Attended(metric), Attended(metric)
    whole.update(k_NTC, v_NTC, mask)
    for row in range(2):
        part = Attended(metric)
        part.update(k_NTC[row : row + 1], v_NTC[row : row + 1], mask[row : row + 1])
        parts.merge(part)
    for head in range(3):
        total, weights = np.zeros((16, 16)), 0.0
        for row, token in mask.nonzero().tolist():
            k, v = (x[row, token, 16 * head : 16 * head + 16].double().numpy() for x in (k_NTC, v_NTC))
            weight = k @ metric[head].numpy() @ k
            total, weights = total + weight * np.outer(v, v), weights + weight
        for sums in (whole, parts):
            assert np.allclose(sums.value()[head].numpy(), total / weights)


# ---- the codec: each head its own ----


def fitted(stage, scheme: Scheme, seed: int = 17) -> Codec:
    """A codec of keys with really fitted matrices, another for each head."""
    heads = [moment(16, seed + head) for head in range(3)]
    joined = torch.block_diag(*(moment(16, seed + 9 + head) for head in range(3)))
    known = {QueryMoment("after"): Queried(torch.stack(heads), 1.0), ResidualMoment(): joined}
    stats = Statistics(torch.zeros(48), known)
    recipe = Recipe("r", scheme, scheme, window=Window(block=8))
    _, tensors = fit.solve(stage, stats, Codec(recipe, 0, "key", GEOMETRY, {}))
    return Codec(recipe, 0, "key", GEOMETRY, {f"rotate.{name}": tensor for name, tensor in tensors.items()})


SCHEMES = [
    Scheme(Rtn(4, "head"), rotate=Oscar()),
    Scheme(Clipped(2, "head"), rotate=Oscar()),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: f"{scheme.rotate.kind}-{scheme.quantize}")
def test_every_head_is_rotated_by_its_own_and_back(scheme):
    """Head by head in numpy: rotate, let a codec without rotation round, rotate back with the inverse."""
    codec = fitted(scheme.rotate, scheme)
    x = torch.randn(2, 8, 48, generator=torch.Generator().manual_seed(18))
    forward = codec.tensors["rotate.rotation"].double().numpy()
    turned = np.einsum("nthd,hde->nthe", x.double().numpy().reshape(2, 8, 3, 16), forward)
    plain = Scheme(scheme.quantize)
    bare = Codec(Recipe("b", plain, plain, window=Window(block=8)), 0, "key", GEOMETRY, {})
    rounded = bare.rounded(torch.from_numpy(turned).float().reshape(2, 8, 48)).double().numpy().reshape(2, 8, 3, 16)
    expected = np.einsum("nthe,hed->nthd", rounded, np.linalg.inv(forward)).reshape(2, 8, 48)
    found = codec.rounded(x).double().numpy()
    assert np.linalg.norm(found - expected) < 0.01 * np.linalg.norm(expected)  # bfloat16 on the way back


def test_a_clip_cuts_the_largest_and_nothing_else():
    """By hand: magnitudes 1 to 16; with keep 0.75 the 13th smallest, 13, is the most that is left."""
    x = torch.tensor([i * (-1.0) ** i for i in range(1, 17)])[None, None]
    stage, geometry = Clipped(8, "head", keep=0.75), Geometry(1, 1, 16)
    fields = stage.encode(x, None, {}, geometry)
    decoded = stage.decode(fields, 16, geometry)[0, 0]
    assert torch.allclose(decoded, x[0, 0].clamp(-13, 13), atol=26 / 255)
    step, low = float(fields["step"]), float(fields["low"])
    assert low == -13 and step == pytest.approx(26 / 255, rel=1e-3)
    assert pack.unpack(fields["codes"], 8, 16).flatten()[[12, 13, 14, 15]].tolist() == [0, 255, 0, 255]


@pytest.mark.parametrize(
    ("scheme", "role", "position", "message"),
    [
        (Scheme(Rtn(2, "head"), rotate=Oscar("attended")), "key", "post", "does not weigh a key"),
        (Scheme(Rtn(2, "head"), rotate=Oscar()), "key", "pre", "queries weigh keys after RoPE"),
        (Scheme(Rtn(2, "all"), rotate=Oscar()), "key", "post", 'mixes heads of 16; use group="head"'),
    ],
)
def test_what_cannot_be_is_refused(scheme, role, position, message):
    plain = Scheme(Rtn(2, 8))
    pair = (scheme, plain) if role == "key" else (plain, scheme)
    with pytest.raises(ValueError, match=message):
        Recipe("r", *pair, position).check(Geometry(1, 2, 16))
