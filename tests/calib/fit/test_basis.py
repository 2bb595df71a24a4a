"""SVDq's claims about its basis, errors in the metric of gradients, and bits met in total."""

import numpy as np
import pytest
import torch
from scheme_fit import GEOMETRY, NOWHERE, WIDTH, decoded, fitted, low_rank
from torch import Tensor

from kvq_calib.fit import rotate
from kvq_calib.fit.latent import water_fill
from kvq_runtime.artifact.recipe_text import read
from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit.statistics import eigen, eigen_in
from kvq_runtime.recipe import Recipe, Scheme
from kvq_runtime.stages.latent import Mixed
from kvq_runtime.stages.predict import Mean
from kvq_runtime.stages.rotate import Basis, GradientBasis
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


@pytest.mark.parametrize("name", ["svdq-2bit", "svdq-wf-2bit-v4"])
def test_svdq_beats_rounding_by_channel_at_equal_bits(name):
    """Section 4.3: the relative error of 2-bit keys falls below a tenth of per-channel rounding's, squared below."""
    x, new = low_rank(), low_rank(seed=1)
    svdq = fitted(read(name).key, x).codec
    plain = fitted(Scheme(Rtn(2, 128), predict=Mean(), axis="channel"), x).codec
    assert svdq.bits() <= plain.bits()
    assert error(svdq, new) < 0.1 * error(plain, new)


def test_a_basis_by_head_has_the_eigenvectors_of_each_head():
    """Channel j is of head j mod 2; its column has nothing of the other head."""
    x = low_rank()
    scheme = Scheme(Mixed((4, 0), (48, 16), codebook="stepped"), predict=Mean(), rotate=Basis("head"))
    stored = fitted(scheme, x).tensors["rotate.basis"]
    assert stored.shape == (2, WIDTH // 2, 24)
    back = Basis("head").pair(WIDTH, GEOMETRY, {"basis": stored})
    assert back is not None and torch.equal(back[0], back[1].mT)
    rows = (x - x.mean((0, 1))).flatten(0, 1).double()
    for head, at in enumerate((slice(0, 32), slice(32, 64))):
        vectors = eigen(rows[:, at].mT @ rows[:, at] / len(rows))[1]
        assert float((stored[head, :, :8].double() * vectors[:, :8]).sum(0).abs().min()) > 0.99
        dense = back[0][:, head::2]
        assert torch.equal(dense[at], stored[head]) and float(dense.square().sum()) == float(dense[at].square().sum())


# ---- in the metric of gradients


def gradients() -> Tensor:
    """The second moment of gradients, [H, D, D]; the first channels of a head count most."""
    size = GEOMETRY.head_size
    g_HND = torch.randn(2, 400, size, generator=torch.Generator().manual_seed(5)) / (1 + torch.arange(size))
    return (g_HND.mT @ g_HND).double() / 400


def cost(wrong_NTC: Tensor) -> float:
    """Σ e M eᵀ over tokens and KV heads."""
    e_NHD = wrong_NTC.flatten(0, 1).double().unflatten(-1, (2, -1))
    return float(torch.einsum("nhd,hde,nhe->", e_NHD, gradients(), e_NHD))


def test_the_metric_is_what_an_error_costs_over_all_heads():
    wrong = torch.randn(50, 1, WIDTH, generator=torch.Generator().manual_seed(6))
    found = rotate.gradient_metric(gradients()) - rotate.RIDGE * torch.eye(WIDTH)
    costs = torch.einsum("ntc,cd,ntd->n", wrong.double(), found, wrong.double())
    by_hand = torch.tensor([cost(one[None]) for one in wrong], dtype=torch.float64)
    torch.testing.assert_close(costs / costs[0], by_hand / by_hand[0])
    assert float(found.diagonal().mean()) == pytest.approx(1)
    with pytest.raises(ValueError, match="errors cost nothing here"):
        rotate.gradient_metric(torch.zeros(2, 32, 32))


def test_a_basis_and_its_dual_are_inverse_and_diagonal_in_the_metric():
    """DᵀB = 1, Bᵀ S B = Λ, Dᵀ M D = 1: latents are uncorrelated, and an error of them costs its square."""
    x = (low_rank(4) - 5).flatten(0, 1).double()
    moment, weights = x.mT @ x / len(x), rotate.gradient_metric(gradients())
    values, made, dual = eigen_in(weights, moment)
    one = torch.eye(WIDTH, dtype=torch.float64)
    torch.testing.assert_close(dual.mT @ made, one, atol=1e-8, rtol=0)
    torch.testing.assert_close(dual.mT @ weights @ dual, one, atol=1e-8, rtol=0)
    torch.testing.assert_close(made.mT @ moment @ made, torch.diag(values), atol=1e-8, rtol=0)


def test_a_gradient_basis_has_errors_that_cost_less():
    """At equal bits, and more error in the values themselves: the one is traded for the other."""
    x, new, inside, costs = low_rank(decay=0.05), low_rank(decay=0.05, seed=1), {}, {}
    for kind in (Basis(), GradientBasis()):
        made = fitted(Scheme(Mixed(target=1.0), predict=Mean(), rotate=kind), x, "value", gradients()).codec
        wrong = decoded(made, new) - new
        inside[kind.kind], costs[kind.kind] = float(wrong.square().sum()), cost(wrong)
        assert made.bits() == 1
    assert costs["gradient_basis"] < 0.8 * costs["basis"]
    assert inside["gradient_basis"] > inside["basis"]


# ---- recipes


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (Scheme(Mixed()), "belong together"),
        (Scheme(Rtn(2), rotate=Basis()), "belong together"),
        (Scheme(Mixed(), rotate=Basis(), axis="channel"), 'need axis "token"'),
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
        smoothed, plain = (rotate.gradient_metric(few_HDD, ridge) for ridge in (rotate.RIDGE, 1e-3))
        costs = []
        for metric_CC in (smoothed, plain):
            values_C, basis_CC, dual_CC = eigen_in(metric_CC, moment_CC)
            bits = torch.tensor(water_fill(values_C, 64, [4.0**-b for b in range(8)]))
            error_C = 4.0**-bits * (basis_CC * (moment_CC @ basis_CC)).sum(0)
            costs.append(float((error_C * (dual_CC * (torch.block_diag(*true_HDD) @ dual_CC)).sum(0)).sum()))
        ratios.append(costs[0] / costs[1])
    assert np.mean(ratios) < 0.97
