"""SVDq's claims about its basis, values in the metric of the output projection, and bits met in total."""

import numpy as np
import pytest
import torch
from scheme_fit import GEOMETRY, NOWHERE, WIDTH, decoded, fitted, low_rank
from torch import Tensor

from kvq_calib.fit import rotate
from kvq_calib.fit.latent import water_fill
from kvq_calib.fit.statistics import QueryMoments
from kvq_runtime.artifact.recipe_text import read
from kvq_runtime.codec import codec
from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit.statistics import eigen, eigen_in
from kvq_runtime.recipe import Recipe, Scheme, preset
from kvq_runtime.stages.latent import Mixed
from kvq_runtime.stages.predict import Mean
from kvq_runtime.stages.rotate import Basis, OutputBasis, QueryBasis
from kvq_runtime.stages.rtn import Rtn


def error(made: Codec, x: Tensor) -> float:
    """Σ|x - x̂|² / Σ|x - μ|²."""
    decoded = made.restore(made.decode(made.encode(x, NOWHERE), NOWHERE).float(), NOWHERE)
    centred = x - x.mean((0, 1))
    return float((decoded - x).double().square().sum() / centred.double().square().sum())


# ---- the basis (SVDq, theorem 4.1 and section 4.3)


def test_latent_variances_are_the_eigenvalues():
    """And the eigenvalues are the squared singular values of the centred tokens, by numpy's own decomposition."""
    x = low_rank()
    rows = (x - x.mean((0, 1))).flatten(0, 1).double()
    values, vectors = eigen(rows.mT @ rows / len(rows))
    singular = np.linalg.svd(rows.numpy(), compute_uv=False)
    np.testing.assert_allclose(values, singular**2 / len(rows), rtol=1e-8, atol=1e-12)
    latents = rows @ vectors
    covariance = latents.mT @ latents / len(rows)
    torch.testing.assert_close(covariance, torch.diag(values), rtol=1e-8, atol=1e-10)
    assert bool((vectors.gather(0, vectors.abs().argmax(0, keepdim=True)) > 0).all())


def test_a_fitted_side_stores_the_leading_eigenvectors():
    x = low_rank()
    found = fitted(Scheme(Mixed((8, 4, 2, 0)), predict=Mean(), rotate=Basis()), x)
    rows = (x - x.mean((0, 1))).flatten(0, 1).double()
    values, vectors = eigen(rows.mT @ rows / len(rows))
    stored = found.tensors["rotate.basis"]
    assert stored.shape == (WIDTH, 48) and stored.dtype == torch.bfloat16
    assert float((stored[:, :16].double() * vectors[:, :16]).sum(0).abs().min()) > 0.999
    ratio = found.tensors["quantize.deviation"].double() / values[:48].sqrt()
    assert float(ratio.min()) > 0.8 and float(ratio.max()) < 1.25
    assert float(ratio[16:].mean()) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("name", ["svdq-2bit", "svdq-wf-2bit-v4", "svdq-2bit+key.quantize.codebook=block"])
def test_svdq_beats_rounding_by_channel_at_equal_bits(name):
    """Section 4.3: the relative error of 2-bit keys falls below a tenth of per-channel rounding's, squared below."""
    x, new = low_rank(), low_rank(seed=1)
    svdq = fitted(read(name).key, x).codec
    plain = fitted(Scheme(Rtn(2, 128), predict=Mean(), axis="channel"), x).codec
    assert svdq.bits() <= plain.bits()
    assert error(svdq, new) < 0.1 * error(plain, new)


def test_water_filling_beats_the_papers_schedule():
    x, new = low_rank(decay=0.08), low_rank(seed=1, decay=0.08)
    paper, filled = (fitted(preset(name).key, x).codec for name in ("svdq-2bit", "svdq-wf-2bit-v4"))
    assert filled.bits() == paper.bits() == 2
    assert error(filled, new) < 0.7 * error(paper, new)


# ---- values in the metric of the output projection


def projected(x_NTC: Tensor, weight_EQ: Tensor) -> Tensor:
    """What the output projection makes of values: each query head reads its KV head, through its own columns."""
    heads = x_NTC.unflatten(-1, (GEOMETRY.kv_heads, -1)).repeat_interleave(2, -2)
    return heads.flatten(-2) @ weight_EQ.mT


def output_weight() -> Tensor:
    """Two query heads to a KV head; the first channels of a head weigh most."""
    weight = torch.randn(96, 2 * WIDTH, generator=torch.Generator().manual_seed(4))
    return weight / (1 + torch.arange(2 * WIDTH) % GEOMETRY.head_size)


def test_the_metric_is_what_an_error_costs_over_all_query_heads():
    """Σ over the query heads of ‖Wₕ e‖², for errors of each KV head alone."""
    weight, errors = output_weight(), torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(6))
    found = rotate.output_metric(weight, GEOMETRY) - rotate.RIDGE * torch.eye(WIDTH)
    cost = torch.einsum("nc,cd,nd->n", errors.double(), found, errors.double())
    by_hand = torch.zeros(50, dtype=torch.float64)
    for head in range(4):
        columns = weight[:, head * 32 : head * 32 + 32].double()
        kv = head // 2
        by_hand += (errors[:, kv * 32 : kv * 32 + 32].double() @ columns.mT).square().sum(1)
    torch.testing.assert_close(cost / cost[0], by_hand / by_hand[0])
    assert float(found.diagonal().mean()) == pytest.approx(1)


def test_an_output_basis_and_its_dual_are_inverse_and_diagonal_in_the_metric():
    """DᵀB = 1, Bᵀ S B = Λ, Dᵀ M D = 1: latents are uncorrelated, and an error of them costs its square."""
    x = (low_rank(4) - 5).flatten(0, 1).double()
    moment, weights = x.mT @ x / len(x), rotate.output_metric(output_weight(), GEOMETRY)
    values, made, dual = eigen_in(weights, moment)
    one = torch.eye(WIDTH, dtype=torch.float64)
    torch.testing.assert_close(dual.mT @ made, one, atol=1e-8, rtol=0)
    torch.testing.assert_close(dual.mT @ weights @ dual, one, atol=1e-8, rtol=0)
    torch.testing.assert_close(made.mT @ moment @ made, torch.diag(values), atol=1e-8, rtol=0)


@pytest.mark.parametrize("bits", [1.0, 2.0])
def test_an_output_basis_has_less_error_behind_the_output_projection(bits):
    """At equal bits, and more error in the values themselves: the one is traded for the other."""
    x, new, weight = low_rank(decay=0.05), low_rank(decay=0.05, seed=1), output_weight()
    inside, behind = {}, {}
    for kind in (Basis(), OutputBasis()):
        made = fitted(Scheme(Mixed(target=bits), predict=Mean(), rotate=kind), x, "value", weight).codec
        wrong = decoded(made, new) - new
        inside[kind.kind] = float(wrong.square().sum())
        behind[kind.kind] = float(projected(wrong, weight).square().sum())
        assert made.bits() == bits
    assert behind["output_basis"] < 0.8 * behind["basis"]
    assert inside["output_basis"] > inside["basis"]


# ---- keys in the metric of the queries


def queries(tokens: int = 400) -> Tensor:
    """Queries [tokens, 4 query heads, D] before RoPE; the first channels are loudest, and there is a mean."""
    size = GEOMETRY.head_size
    random = torch.Generator().manual_seed(5)
    return (torch.randn(tokens, 4, size, generator=random) + 0.5) / (1 + torch.arange(size))


def moment() -> Tensor:
    sums = QueryMoments(GEOMETRY)
    none = torch.ones(1, 400, 16), torch.zeros(1, 400, 16)
    sums.update(queries()[None], none)
    return sums.value()[0]


def score_errors(wrong_NTC: Tensor) -> float:
    """Σ over tokens, queries and query heads of (q e)², each query head against its KV head's part of the error."""
    parts = wrong_NTC.flatten(0, 1).double().numpy().reshape(-1, 2, GEOMETRY.head_size)
    q = queries().double().numpy()
    return sum(float(np.square(q[:, head] @ parts[:, head // 2].T).sum()) for head in range(4))


def test_the_metric_of_keys_is_what_an_error_costs_in_scores():
    wrong = torch.randn(50, 1, WIDTH, generator=torch.Generator().manual_seed(6))
    found = rotate.query_metric(moment()) - rotate.RIDGE * torch.eye(WIDTH)
    cost = torch.einsum("ntc,cd,ntd->n", wrong.double(), found, wrong.double())
    by_hand = torch.tensor([score_errors(one[None]) for one in wrong], dtype=torch.float64)
    torch.testing.assert_close(cost / cost[0], by_hand / by_hand[0], rtol=1e-5, atol=0)
    assert float(found.diagonal().mean()) == pytest.approx(1)
    with pytest.raises(ValueError, match="say nothing about keys"):
        rotate.query_metric(torch.zeros(2, 32, 32))


@pytest.mark.parametrize("bits", [1.0, 2.0])
def test_a_query_basis_has_less_error_in_scores(bits):
    """At equal bits, and more error in the keys themselves: the one is traded for the other."""
    x, new, inside, scores = low_rank(decay=0.05), low_rank(decay=0.05, seed=1), {}, {}
    for kind in (Basis(), QueryBasis()):
        made = fitted(Scheme(Mixed(target=bits), predict=Mean(), rotate=kind), x, "key", moment_HDD=moment()).codec
        wrong = decoded(made, new) - new
        inside[kind.kind], scores[kind.kind] = float(wrong.square().sum()), score_errors(wrong)
        assert made.bits() == bits
    assert scores["query_basis"] < 0.7 * scores["basis"]
    assert inside["query_basis"] > inside["basis"]


# ---- bits


@pytest.mark.parametrize("target", [0.4375, 1.0, 1.25, 1.9375, 3.0])
def test_the_total_is_met_to_the_bit(target):
    found = fitted(Scheme(Mixed(target=target), predict=Mean(), rotate=Basis()), low_rank())
    assert found.codec.bits() == target
    assert sum(count * bits for count, bits in found.scheme.quantize.runs(WIDTH)) == target * WIDTH
    recipe = Recipe("test", found.scheme, found.scheme, "pre")
    assert Recipe.from_json(recipe.to_json()) == recipe
    specs = codec.specs(recipe, 0, "key", GEOMETRY)
    assert {name: (tuple(t.shape), t.dtype) for name, t in found.tensors.items()} == specs


# ---- recipes


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (Scheme(Mixed()), "belong together"),
        (Scheme(Rtn(2), rotate=Basis()), "belong together"),
        (Scheme(Mixed(), rotate=Basis(), axis="channel"), 'need axis "token"'),
        (Scheme(Mixed(), rotate=OutputBasis()), "an output basis weighs values"),
        (Scheme(Mixed(), rotate=QueryBasis(queries="after")), "a query basis weighs keys"),
        (Scheme(Mixed(), rotate=QueryBasis()), 'use queries="after", or "pre"'),
    ],
)
def test_sides_that_cannot_be(scheme, message):
    with pytest.raises(ValueError, match=message):
        Recipe("r", scheme, scheme).check(GEOMETRY)


def test_a_metric_of_few_gradients_is_smoothed():
    """Directions and bits by few gradients of unequal size, judged by the metric that they are of."""
    random = np.random.default_rng(0)
    turn = [np.linalg.qr(random.normal(size=(16, 16)))[0] for _ in range(2)]
    true_HDD = torch.tensor(np.stack([q * np.geomspace(1, 1e-2, 16) @ q.T for q in turn]))
    moment_CC = torch.tensor(np.cov(random.normal(size=(32, 200)) * np.geomspace(3, 0.1, 32)[:, None]))
    roots_HDD = torch.linalg.cholesky(true_HDD).numpy()
    ratios = []
    for _ in range(20):
        size_N11 = np.exp(1.5 * random.normal(size=(60, 1, 1)))
        g_NHD = (size_N11 * random.normal(size=(60, 2, 16)))[..., None, :] @ roots_HDD.transpose(0, 2, 1)
        few_HDD = torch.tensor(np.einsum("nhd,nhe->hde", g_NHD[..., 0, :], g_NHD[..., 0, :]) / 60)
        smoothed, plain = rotate.gradient_metric(few_HDD), rotate.query_metric(few_HDD)  # a tenth, a thousandth
        costs = []
        for metric_CC in (smoothed, plain):
            values_C, basis_CC, dual_CC = eigen_in(metric_CC, moment_CC)
            bits = torch.tensor(water_fill(values_C, 64, [4.0**-b for b in range(8)]))
            error_C = 4.0**-bits * (basis_CC * (moment_CC @ basis_CC)).sum(0)
            costs.append(float((error_C * (dual_CC * (torch.block_diag(*true_HDD) @ dual_CC)).sum(0)).sum()))
        ratios.append(costs[0] / costs[1])
    assert np.mean(ratios) < 0.97
