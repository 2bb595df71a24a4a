"""Tokens whose errors count unequally: what is searched for, what that gains at equal bits, and how it is fitted."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from scheme_fit import GEOMETRY, WIDTH, blocks, chunks, low_rank
from torch import Tensor

from kvq_calib.fit.scheme import SchemeFit
from kvq_calib.fit.statistics import Moments
from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.fit.statistics import Statistics
from kvq_runtime.ops import latent, trellis
from kvq_runtime.recipe import Recipe, Scheme
from kvq_runtime.stages.latent import Mixed
from kvq_runtime.stages.predict import Mean
from kvq_runtime.stages.rotate import Basis

PATHS = Mixed(target=1.5, codebook="trellis", gain=3, weighed=True)
TOLD = 13 * torch.linspace(-1, 1, WIDTH) / WIDTH**0.5  # by which tokens below say how much their errors count: ln w


def planted(x_NTC: Tensor, noise: float = 0.0) -> Tensor:
    """Logarithms of how much errors of tokens count, [N, T]."""
    logs_NT = (x_NTC - 5) @ TOLD
    return logs_NT + noise * torch.randn(logs_NT.shape, generator=torch.Generator().manual_seed(7))


def fit(stage, x_NTC: Tensor, noise: float = 0.0) -> SchemeFit:
    """A scheme of this quantizer, fitted to blocks in two chunks, of which gradients say what errors count."""
    scheme, moments = Scheme(stage, predict=Mean(), rotate=Basis()), Moments(WIDTH)
    moments.update(x_NTC)
    statistics = Statistics(moments.value().mean_C.float())
    found, cut = SchemeFit(Recipe("test", scheme, scheme, "pre"), 0, "key", GEOMETRY, statistics), len(x_NTC) // 2
    halves = [(blocks(x_NTC[:cut], 0), Context()), (blocks(x_NTC[cut:], cut), Context())]
    found.fit(replace(chunks(halves), log_importance=lambda: planted(x_NTC, noise)[: cut // 2]))
    return found


def cost(codec: Codec, x_NTC: Tensor) -> float:
    """The mean error of blocks, as much as it counts."""
    centred = codec.centred(x_NTC, Context())
    error_NT = (codec.decode(codec.encode(x_NTC, Context()), Context()).float() - centred).square().sum(-1)
    return float((error_NT * planted(x_NTC).exp()).mean())


def test_a_path_has_the_least_error_of_all_as_errors_count():
    """Against every sequence of codes of eight tokens."""
    generator = torch.Generator().manual_seed(3)
    z_NRT, deviation = torch.randn(3, 2, 8, generator=generator), torch.tensor([1.0, 2.0])
    level_NT = torch.randint(-8, 8, (3, 8), generator=generator).to(torch.int8)
    scale_NT = latent.token_scale(level_NT)
    every = torch.tensor([*product((0, 1), repeat=8)], dtype=torch.uint8)
    for channel, sigma in enumerate(deviation):
        points = trellis.decode_path(every[None], sigma.repeat(256), 1)[0]
        z_NT = z_NRT[:, channel]
        best_N = ((points[None] - z_NT[:, None]) * scale_NT[:, None]).square().sum(-1).amin(1)
        codes = trellis.encode_path(z_NRT, deviation, 1, scale_NT[:, None])[:, channel]
        found_NT = trellis.decode_path(codes[:, None], sigma[None], 1)[:, 0]
        torch.testing.assert_close(((found_NT - z_NT) * scale_NT).square().sum(-1), best_N, rtol=1e-4, atol=0)


def test_levels_are_half_logarithms_in_few_steps():
    x_NTC, direction = torch.tensor([[[0.0, 3.0], [2.0, 3.0], [9.0, 3.0], [-9.0, 3.0]]]), torch.tensor([1.0, 0.1])
    levels = latent.importance(x_NTC, direction)  # 2 · (0.3, 2.3, 9.3, -8.7)
    assert levels.dtype == torch.int8 and levels.tolist() == [[1, 5, 8, -8]]
    assert latent.token_scale(levels)[0].square().log().tolist() == pytest.approx([0.5, 2.5, 4.0, -4.0])


@pytest.mark.slow
def test_what_counts_costs_less_at_equal_bits():
    x, new = low_rank(), low_rank(seed=1)
    alike = replace(PATHS, weighed=False)
    assert cost(fit(PATHS, x, noise=1.0).codec, new) < 0.85 * cost(fit(alike, x).codec, new)


def test_what_tells_importance_is_found_of_noisy_gradients():
    """The gradients of a quarter of the tokens are known."""
    x = low_rank()
    told = x.flatten(0, 1) - x.mean((0, 1))
    own = fit(PATHS, x, noise=1.0).tensors["quantize.importance"]
    assert float(torch.corrcoef(torch.stack([told @ own, told @ TOLD]))[0, 1]) > 0.95
    assert 0.7 < float((told @ own).std() / (told @ TOLD).std()) < 1.1  # a ridge makes it smaller


def test_a_scheme_in_which_nothing_would_weigh_is_refused():
    scheme = Scheme(PATHS, rotate=Basis())
    with pytest.raises(ValueError, match="needs a prediction"):
        Recipe("r", scheme, scheme, "pre").check(GEOMETRY)
