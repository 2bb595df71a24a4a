"""SVDq's claims, water-filling against all allocations, and the escape of tokens that nobody foresaw."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kvq_calib.fit import metric
from kvq_calib.fit.allocate import water_fill
from kvq_calib.fit.layer import Blocks, SideFit
from kvq_calib.statistics import Moments
from kvq_runtime import codec
from kvq_runtime.codec import Codec, Context
from kvq_runtime.fit import basis
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import latent
from kvq_runtime.recipe import Recipe, Side, preset
from kvq_runtime.stages.escape import Escape
from kvq_runtime.stages.mixed import Mixed
from kvq_runtime.stages.predict import Mean
from kvq_runtime.stages.rotate import Basis, OutputBasis
from kvq_runtime.stages.rtn import Rtn

GEOMETRY = Geometry(2, 2, 32)
WIDTH = GEOMETRY.width
NOWHERE = Context()


def low_rank(blocks: int = 24, seed: int = 0, decay: float = 0.15) -> Tensor:
    """Tokens [blocks, 128, C] whose variances fall exponentially along a hidden basis, about a mean far from zero."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(99))).Q
    latents = torch.randn(blocks, 128, WIDTH, generator=generator) * torch.exp(-decay * torch.arange(WIDTH))
    return latents @ hidden.mT + 5


def fitted(side: Side, x_NTC: Tensor, half="key", weight_EQ: Tensor | None = None) -> SideFit:
    """A side of layer 0 fitted on these blocks, in two chunks, under this output projection."""
    moments = Moments(WIDTH)
    moments.update(x_NTC)
    weights = None if weight_EQ is None else metric.output(weight_EQ, GEOMETRY)
    found = SideFit(Recipe("test", side, side, "pre"), 0, half, GEOMETRY, moments.value(), weights)
    cut = len(x_NTC) // 2
    chunks = [blocks(x_NTC[:cut], 0), blocks(x_NTC[cut:], cut)]
    if found.needs_residuals:
        found.solve_residuals([found.residuals(chunk, NOWHERE, 0) for chunk in chunks], 0)
    return found


def blocks(x_NTC: Tensor, first: int) -> Blocks:
    mask, numbers = torch.ones(x_NTC.shape[:2], dtype=torch.bool), torch.arange(first, first + len(x_NTC))
    return Blocks(x_NTC, mask, (mask, mask), numbers, torch.zeros_like(numbers))


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
    values, vectors = basis.eigen(rows.mT @ rows / len(rows))
    singular = np.linalg.svd(rows.numpy(), compute_uv=False)
    np.testing.assert_allclose(values, singular**2 / len(rows), rtol=1e-8, atol=1e-12)
    latents = rows @ vectors
    covariance = latents.mT @ latents / len(rows)
    torch.testing.assert_close(covariance, torch.diag(values), rtol=1e-8, atol=1e-10)
    assert bool((vectors.gather(0, vectors.abs().argmax(0, keepdim=True)) > 0).all())


def test_a_fitted_side_stores_the_leading_eigenvectors():
    x = low_rank()
    found = fitted(Side(Mixed((8, 4, 2, 0)), predict=Mean(), rotate=Basis()), x)
    rows = (x - x.mean((0, 1))).flatten(0, 1).double()
    values, vectors = basis.eigen(rows.mT @ rows / len(rows))
    stored = found.tensors["rotate.basis"]
    assert stored.shape == (WIDTH, 48) and stored.dtype == torch.bfloat16
    assert float((stored[:, :16].double() * vectors[:, :16]).sum(0).abs().min()) > 0.999
    ratio = found.tensors["quantize.deviation"].double() / values[:48].sqrt()
    assert float(ratio.min()) > 0.8 and float(ratio.max()) < 1.25
    assert float(ratio[16:].mean()) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("name", ["svdq-2bit", "svdq-wf-2bit", "svdq-2bit-block"])
def test_svdq_beats_rounding_by_channel_at_equal_bits(name):
    """Section 4.3: the relative error of 2-bit keys falls below a tenth of per-channel rounding's, squared below."""
    x, new = low_rank(), low_rank(seed=1)
    svdq = fitted(preset(name).key, x).codec
    plain = fitted(Side(Rtn(2, 128), predict=Mean(), axis="channel"), x).codec
    assert svdq.bits() <= plain.bits()
    assert error(svdq, new) < 0.1 * error(plain, new)


def test_water_filling_beats_the_papers_schedule():
    x, new = low_rank(decay=0.08), low_rank(seed=1, decay=0.08)
    paper, filled = (fitted(preset(name).key, x).codec for name in ("svdq-2bit", "svdq-wf-2bit"))
    assert filled.bits() == paper.bits() == 2
    assert error(filled, new) < 0.7 * error(paper, new)


@pytest.mark.parametrize("codebook", ["gaussian", "uniform"])
def test_one_outlier_in_the_calibration_stretches_no_range(codebook):
    """Ranges that cover it would cost the other tokens a hundredfold."""
    x, new = low_rank(), low_rank(seed=1)
    side = Side(Mixed(target=2.0, codebook=codebook), predict=Mean(), rotate=Basis())
    clean = error(fitted(side, x).codec, new)
    broken = x.clone()
    broken[3, 7] = x[3, 7] + 30 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(3))
    assert error(fitted(side, broken).codec, new) < 4 * clean


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
    found = metric.output(weight, GEOMETRY) - metric.RIDGE * torch.eye(WIDTH)
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
    moment, weights = x.mT @ x / len(x), metric.output(output_weight(), GEOMETRY)
    values, made, dual = basis.eigen_in(weights, moment)
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
        made = fitted(Side(Mixed(target=bits), predict=Mean(), rotate=kind), x, "value", weight).codec
        wrong = decoded(made, new) - new
        inside[kind.kind] = float(wrong.square().sum())
        behind[kind.kind] = float(projected(wrong, weight).square().sum())
        assert made.bits() == bits
    assert behind["output_basis"] < 0.8 * behind["basis"]
    assert inside["output_basis"] > inside["basis"]


def test_an_output_basis_is_billed_twice_a_basis():
    found = fitted(Side(Mixed(target=2.0), predict=Mean(), rotate=OutputBasis()), low_rank(), "value", output_weight())
    stored = found.side.quantize.stored(WIDTH)
    held = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in found.codec.shared}
    assert sum(held.values()) == WIDTH * 4 + stored * 4 + 2 * (WIDTH * stored * 2)


# ---- bits


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


@pytest.mark.parametrize("target", [0.4375, 1.0, 1.25, 1.9375, 3.0])
def test_the_total_is_met_to_the_bit(target):
    found = fitted(Side(Mixed(target=target), predict=Mean(), rotate=Basis()), low_rank())
    assert found.codec.bits() == target
    assert sum(count * bits for count, bits in found.side.quantize.runs(WIDTH)) == target * WIDTH
    recipe = Recipe("test", found.side, found.side, "pre")
    assert Recipe.from_json(recipe.to_json()) == recipe
    specs = codec.specs(recipe, 0, "key", GEOMETRY)
    assert {name: (tuple(t.shape), t.dtype) for name, t in found.tensors.items()} == specs


# ---- the escape


def escaping(slots: int = 1) -> tuple[Codec, Codec, Tensor]:
    """A codec with the escape, the same without, and a block that was not fitted on."""
    side = Side(Mixed(target=1.5), predict=Mean(), rotate=Basis(), correct=Escape(slots))
    found = fitted(side, low_rank())
    without = replace(found.side, correct=None)
    tensors = {name: tensor for name, tensor in found.tensors.items() if not name.startswith("correct")}
    return found.codec, Codec(Recipe("test", without, without, "pre"), 0, "key", GEOMETRY, tensors), low_rank(1, seed=5)


def decoded(made: Codec, x: Tensor) -> Tensor:
    return made.restore(made.decode(made.encode(x, NOWHERE), NOWHERE).float(), NOWHERE)


def test_a_planted_outlier_is_caught_marked_and_billed():
    made, plain, x = escaping()
    planted = x.clone()
    planted[0, 37] = 5 + 40 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(8))
    fields = made.encode(planted, NOWHERE)
    assert fields["escape_place"].tolist() == [[37]] and fields["escape_wanted"].tolist() == [[1]]
    assert Escape.count(fields) == (1, 1)
    found, clipped = decoded(made, planted), decoded(plain, planted)
    energy = float(planted[0, 37].square().sum())
    assert float((clipped - planted)[0, 37].square().sum()) > 0.5 * energy
    assert float((found - planted)[0, 37].square().sum()) < 1e-4 * energy
    others = torch.arange(128) != 37
    assert torch.equal(found[:, others], clipped[:, others])
    held = sum(8 * tensor.untyped_storage().nbytes() for tensor in fields.values())
    assert made.bits() == held / x.numel() > plain.bits() + 8 / 128


def test_ordinary_tokens_do_not_escape():
    made, plain, x = escaping(3)
    fields = made.encode(x, NOWHERE)
    assert Escape.count(fields) == (0, 0) and fields["escape_place"].tolist() == [[-1, -1, -1]]
    assert torch.equal(decoded(made, x), decoded(plain, x))


def test_the_worst_get_the_slots_and_the_others_are_counted():
    made, _, x = escaping(2)
    noise = torch.randn(WIDTH, generator=torch.Generator().manual_seed(8))
    for place, size in ((3, 20), (50, 60), (90, 30)):
        x[0, place] = 5 + size * noise
    fields = made.encode(x, NOWHERE)
    assert fields["escape_place"].tolist() == [[50, 90]]
    assert Escape.count(fields) == (2, 3)


def test_of_copies_the_last_one_is_served():
    """Copies of a real token fill the slots before it, where padding and exact sinks lie."""
    made, _, x = escaping()
    x[0, :5] = 5 + 40 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(8))
    assert made.encode(x, NOWHERE)["escape_place"].tolist() == [[4]]


# ---- recipes


@pytest.mark.parametrize(
    ("side", "message"),
    [
        (Side(Mixed()), "belong together"),
        (Side(Rtn(2), rotate=Basis()), "belong together"),
        (Side(Mixed(), rotate=Basis(), block=20), "multiple of 8 tokens"),
        (Side(Mixed(), rotate=Basis(), axis="channel"), 'need axis "token"'),
        (Side(Mixed(), rotate=OutputBasis()), "weighs values"),
        (Side(Rtn(2, 16), axis="channel", correct=Escape()), 'escape needs axis "token"'),
    ],
)
def test_sides_that_cannot_be(side, message):
    with pytest.raises(ValueError, match=message):
        Recipe("r", side, side).check(GEOMETRY)


@pytest.mark.parametrize("bits", [1.0, 1.25, 1.5, 2.0])
def test_bits_in_a_name_are_those_of_a_predicted_layer(bits):
    recipe, geometry = preset(f"aqua-klt-{bits:g}bit"), Geometry(28, 4, 128)
    for half in ("key", "value"):
        assert codec.bits(recipe.side(1, half), geometry) == pytest.approx(bits, abs=0.002)
        assert codec.bits(recipe.side(0, half), geometry) == pytest.approx(4, abs=0.002)
