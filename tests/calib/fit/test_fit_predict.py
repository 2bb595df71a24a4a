"""Predictors fitted from moments: against other people's solvers, brute force and planted maps."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from torch import Tensor

from kvq_calib.fit import predict
from kvq_calib.fit.predict import fit_mlp, inverse_root, rounded
from kvq_calib.fit.statistics import Centred
from kvq_runtime.ops import pack, rtn
from kvq_runtime.stages.predict import MLP, Linear

INPUTS, WIDTH, COUNT = 24, 10, 4000


def correlated(inputs: int, count: int, seed: int, mean: float = 0.0) -> Tensor:
    """Float64 rows with a spread of scales and correlations."""
    random = torch.Generator().manual_seed(seed)
    mix = torch.randn(inputs, inputs, generator=random, dtype=torch.float64) * torch.logspace(0, -1.5, inputs)
    offset = mean * torch.randn(inputs, generator=random, dtype=torch.float64)
    return torch.randn(count, inputs, generator=random, dtype=torch.float64) @ mix.mT + offset


def problem(seed: int = 0, noise: float = 0.3, mean: float = 3.0, width: int = WIDTH, inputs: int = INPUTS):
    random = torch.Generator().manual_seed(seed + 1)
    z = correlated(inputs, COUNT, seed, mean)
    planted = torch.randn(inputs, width, generator=random, dtype=torch.float64)
    y = z @ planted + 2 + noise * torch.randn(COUNT, width, generator=random, dtype=torch.float64)
    return z, y, planted


def joint(z: Tensor, y: Tensor) -> Centred:
    """The moments, by numpy."""
    together = np.cov(torch.cat([z, y], 1).numpy(), rowvar=False, bias=True)
    inputs = z.shape[1]
    return Centred(
        xx_II=torch.from_numpy(together[:inputs, :inputs].copy()),
        xy_IO=torch.from_numpy(together[:inputs, inputs:].copy()),
        mean_x_I=z.mean(0),
        mean_y_O=y.mean(0),
        yy_OO=torch.from_numpy(together[inputs:, inputs:].copy()),
        count=len(z),
    )


@pytest.mark.parametrize("ridge", [0.0, 1e-3, 0.3])
def test_ridge_is_scikit_learns_on_centred_data(ridge):
    z, y, _ = problem()
    moments = joint(z, y)
    alpha = ridge * len(z) * float(moments.xx_II.diagonal().mean())
    theirs = Ridge(alpha=alpha, fit_intercept=True, solver="cholesky").fit(z.numpy(), y.numpy())
    ours = predict.ridge_map(moments, ridge)
    torch.testing.assert_close(ours, torch.from_numpy(theirs.coef_.T), rtol=1e-7, atol=1e-9)
    stored = predict.fit_linear(moments, ridge)
    assert torch.equal(stored["weight"], ours.to(torch.bfloat16))


def test_the_bias_takes_up_the_mean_of_the_rounding():
    """With a large input mean, a bias made for the unrounded weight would leave |mean| · 2^-9."""
    z, y, _ = problem(mean=50.0)
    found = predict.fit_linear(joint(z, y), 1e-3)
    left = (y - z @ found["weight"].double() - found["bias"].double()).mean(0)
    assert left.abs().max() < 1e-4
    assert found["bias"].dtype == torch.float32


def test_fewer_samples_than_inputs_still_solve_and_nonsense_does_not():
    z, y, _ = problem()
    assert predict.ridge_map(joint(z[:10], y[:10]), 1e-3).isfinite().all()
    moments = joint(z, y)
    broken = moments.xx_II - 2 * torch.diag(moments.xx_II.diagonal())
    with pytest.raises(RuntimeError, match="not positive definite; use more samples"):
        predict.ridge_map(replace(moments, xx_II=broken), 1e-3)


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_low_rank_is_the_best_of_its_rank(rank):
    """Eckart and Young in the whitened metric: what is lost are the singular values left out."""
    z, y, _ = problem(seed=3)
    moments = joint(z, y)
    values, vectors = np.linalg.eigh(moments.xx_II.numpy())
    role, inverse_half = (vectors * values**power @ vectors.T for power in (0.5, -0.5))
    left, singular, right = np.linalg.svd(inverse_half @ moments.xy_IO.numpy(), full_matrices=False)
    best = inverse_half @ (left[:, :rank] * singular[:rank]) @ right[:rank]
    found = predict.fit_low_rank(moments, rank, ridge=0.0)
    product = found["down"].double() @ found["up"].double()
    assert np.linalg.matrix_rank(product.numpy()) == rank
    full = predict.ridge_map(moments, 0.0)
    lost = [float(np.square(role @ (full.numpy() - given)).sum()) for given in (best, product.numpy())]
    assert lost[0] == pytest.approx(np.square(singular[rank:]).sum(), rel=1e-6)
    assert lost[0] <= lost[1] <= lost[0] + 1e-4 * np.square(singular).sum()  # bf16 factors


def gptq_case(inputs: int, width: int, seed: int = 5):
    z = correlated(inputs, COUNT, seed)
    covariance = z.mT @ z / len(z) + 1e-3 * torch.eye(inputs, dtype=torch.float64)
    weight = torch.randn(inputs, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return covariance, weight


def loss(covariance: Tensor, difference: Tensor) -> float:
    return float((difference * (covariance @ difference)).sum())


@pytest.mark.parametrize("inputs", [16, 64, 100, 192])
def test_gptq_beats_rounding_and_fits_the_stored_layout(inputs):
    covariance, weight = gptq_case(inputs, 12)
    found = rounded(weight, inverse_root(covariance))
    predictor = Linear(storage="gptq4")
    specs = predictor.specs(inputs, 12)
    assert {n: (tuple(t.shape), t.dtype) for n, t in found.items()} == {n: specs[n] for n in ("codes", "step", "low")}
    decoded = predictor.matrix(found, inputs).double()
    groups = [rtn.encode(part.mT, 4) for part in weight.split(64)]
    plain = torch.cat([rtn.decode(pack.unpack(codes, 4, 64), step, low, 4).mT for codes, step, low in groups]).double()
    assert loss(covariance, decoded - weight) < 0.7 * loss(covariance, plain - weight)
    assert loss(covariance, decoded - weight) < 0.01 * loss(covariance, weight)


def test_gptq_is_optimal_brain_quantization_in_a_fixed_order():
    """The textbook form: after each input, remove it and update all others by the inverse of what remains."""
    covariance, weight = gptq_case(16, 5)
    found = rounded(weight, inverse_root(covariance))
    step, low = found["step"].double()[:, 0], found["low"].double()[:, 0]
    rest, expected = weight.clone(), []
    for i in range(16):
        inverse = torch.linalg.inv(covariance[i:, i:])
        code = ((rest[i] - low) / step).round().clamp(0, 15)
        expected.append(low + step * code)
        rest[i:] -= torch.outer(inverse[:, 0] / inverse[0, 0], rest[i] - expected[-1])
    decoded = Linear(storage="gptq4").matrix(found, 16)
    torch.testing.assert_close(decoded, torch.stack(expected).to(torch.bfloat16), rtol=0, atol=0)


@pytest.mark.parametrize("norm", ["layer", "none"])
def test_the_mlp_learns_and_repeats_itself(norm):
    random = torch.Generator().manual_seed(0)
    z = 5 * torch.randn(2000, 12, generator=random)
    scaled = z / 5 if norm == "none" else torch.nn.functional.layer_norm(z, (12,))
    y = 30 * torch.tanh(scaled @ torch.randn(12, 6, generator=random) / 4)
    first, second = (fit_mlp(MLP(norm=norm), z, y, 3, steps=300, batch=256) for _ in range(2))
    specs = MLP(norm=norm).specs(12, 6)
    assert {n: (tuple(t.shape), t.dtype) for n, t in first.items()} == {n: s for n, s in specs.items() if n != "mean"}
    assert all(torch.equal(first[name], second[name]) for name in first)
    residual = y - MLP(norm=norm).apply(z, first)
    assert float(residual.mean(0).abs().max()) < 1e-3 * float(y.std())
    assert float(residual.var()) < 0.2 * float(y.var())
