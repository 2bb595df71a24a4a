"""A gain for every token of latent channels: against a search by hand, and what it is for: tokens of unequal size."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scheme_fit import WIDTH, decoded, fitted, low_rank

from kvq_runtime.fit import mixed
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import latent
from kvq_runtime.recipe import Scheme
from kvq_runtime.stages.latent import Mixed
from kvq_runtime.stages.predict import Mean
from kvq_runtime.stages.rotate import Basis

GEOMETRY = Geometry(1, 1, 16)
STAGE = Mixed((4, 2, 1, 0), (1, 3, 5, 7), gain=3)
DEVIATION = np.array([4, 3, 2.5, 2, 1.5, 1, 0.8, 0.7, 0.5], np.float32)
ENDS = np.log(np.array([0.4, 3.0], np.float32))
TENSORS = {"deviation": torch.tensor(DEVIATION), "gain_ends": torch.tensor(ENDS)}


def latents(seed: int = 0, tokens: int = 24) -> torch.Tensor:
    """Latents [2, tokens, 9] of tokens whose sizes differ tenfold."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp(torch.randn(2, tokens, 1, generator=generator))
    return size * torch.randn(2, tokens, 9, generator=generator) * TENSORS["deviation"]


def by_hand(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(code of the gain, decoded latents) of one token: every gain is tried, every channel takes its nearest point."""
    bits = [4, 2, 2, 2, 1, 1, 1, 1, 1]
    gains = np.exp(np.linspace(*ENDS.astype(np.float64), 8))
    tried = []
    for gain in gains:
        points = [gain * sigma * latent.gaussian(b)[1].numpy() for b, sigma in zip(bits, DEVIATION, strict=True)]
        tried.append([own[np.abs(own - value).argmin()] for own, value in zip(points, z, strict=True)])
    best = int(((np.array(tried) - z) ** 2).sum(1).argmin())
    return best, np.array(tried[best])


def test_the_gain_with_the_least_error_is_taken():
    z = latents()
    fields = STAGE.encode(z, None, TENSORS, GEOMETRY)
    assert {name: (tuple(f.shape[1:]), f.dtype) for name, f in fields.items()} == STAGE.fields(
        24, 16, GEOMETRY, torch.bfloat16
    )
    chosen = STAGE.best_gain(z.mT, TENSORS, 16)
    found = STAGE.decode(fields, 16, GEOMETRY, TENSORS).float()
    for block in range(2):
        for token in range(24):
            code, expected = by_hand(z[block, token].double().numpy())
            assert chosen[block, 0, token] == code
            np.testing.assert_allclose(found[block, token], expected, rtol=2**-8)
    assert len(chosen.unique()) == 8


@pytest.mark.parametrize("codebook", ["gaussian", "trellis"])
def test_single_tokens_are_decoded_alone(codebook):
    stage, z = replace(STAGE, codebook=codebook), latents(2)
    fields = stage.encode(z, None, TENSORS, GEOMETRY)
    whole = stage.decode(fields, 16, GEOMETRY, TENSORS)
    block, token = torch.tensor([0, 1, 1, 0, 1]), torch.tensor([0, 23, 7, 12, 2])
    assert torch.equal(stage.at(fields, block, token, 24, GEOMETRY, TENSORS), whole[block, token])


def test_gains_are_chosen_anew_with_the_scales_that_follow_from_them(monkeypatch):
    """A gain by a token's size alone is a beginning: chosen by least error, scales after it, the sample loses less."""
    random, lost, stage = torch.Generator().manual_seed(3), [], STAGE
    size = torch.exp(0.3 * torch.randn(2, 512, 1, generator=random))
    z = size * torch.randn(2, 512, 9, generator=random) * TENSORS["deviation"]
    z_NR = z.flatten(0, 1)
    for again in (mixed.RESCALED, 0):
        monkeypatch.setattr(mixed, "RESCALED", again)
        made = mixed.with_gain(stage, z_NR, z_NR.square().mean(0).sqrt(), 16)
        back = stage.decode(stage.encode(z, None, made, GEOMETRY), 16, GEOMETRY, made).float()
        lost.append(float((back - z).square().sum()))
    assert lost[0] < 0.985 * lost[1]


def error(scheme: Scheme, fit: torch.Tensor, new: torch.Tensor) -> float:
    """Σ|x - x̂|² / Σ|x - μ|², relative to each token's own size."""
    wrong = (decoded(fitted(scheme, fit).codec, new) - new).square().sum(-1)
    return float((wrong / (new - 5).square().sum(-1)).mean())


def loud(x: torch.Tensor, spread: float, seed: int) -> torch.Tensor:
    """The same tokens, each times e to a normal number of this deviation, about the mean 5."""
    noise = torch.randn(*x.shape[:2], 1, generator=torch.Generator().manual_seed(seed))
    return (x - 5) * torch.exp(spread * noise) + 5


@pytest.mark.slow
@pytest.mark.parametrize("codebook", ["gaussian", "trellis"])
def test_tokens_of_unequal_size_have_less_error_at_equal_bits(codebook):
    """And where all tokens are of one size, what is lost are the gain's own bits."""
    plain = Scheme(Mixed(target=1.5, codebook=codebook), predict=Mean(), rotate=Basis())
    gained = replace(plain, quantize=replace(plain.quantize, gain=3))
    x, new = low_rank(), low_rank(seed=1)
    assert error(gained, loud(x, 0.7, 2), loud(new, 0.7, 3)) < 0.6 * error(plain, loud(x, 0.7, 2), loud(new, 0.7, 3))
    assert error(gained, x, new) < (1.25 if codebook == "trellis" else 1.15) * error(plain, x, new)


@pytest.mark.parametrize("target", [0.4375, 1.0, 1.9375])
def test_the_gain_is_part_of_the_total(target):
    found = fitted(Scheme(Mixed(target=target, gain=3), predict=Mean(), rotate=Basis()), low_rank())
    assert found.codec.bits() == target
    assert sum(count * bits for count, bits in found.scheme.quantize.runs(WIDTH)) == target * WIDTH - 3
    before = replace(found.scheme.quantize, counts=())
    assert sum(count * bits for count, bits in before.runs(WIDTH)) == target * WIDTH - 3
