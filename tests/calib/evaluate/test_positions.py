"""Token by token, without logits of whole windows: the figures of `perplexity.scores`, where they come from."""

import math
from itertools import pairwise

import pytest
import torch
from transformers.cache_utils import DynamicCache

from kvq_calib.evaluate import perplexity
from kvq_calib.evaluate.caches import FullCache
from kvq_calib.evaluate.record import load_model
from kvq_calib.model import find as models
from kvq_runtime.hf import KVQCache
from kvq_runtime.recipe import preset
from scripts import positions

FILES = models.resolve("demo")
LENGTH, STEP = 300, 50
RECIPE = preset("rtn-2bit").with_exact(4, 0)


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return load_model(FILES)


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    return torch.randint(2, FILES.vocabulary, (2, LENGTH), generator=random, dtype=torch.int32)


@pytest.fixture(scope="module")
def exact(model, tokens) -> torch.Tensor:
    return positions.states(model, tokens, DynamicCache(config=model.config))


@pytest.mark.parametrize("step", [None, STEP], ids=["full", "in use"])
def test_figures_are_those_of_whole_logits(model, tokens, exact, step):
    """By other code: a pass without its output layer, slices, and float32 against float64 of all logits."""

    def cache():
        return KVQCache(RECIPE, model) if step else FullCache(RECIPE, model, length=LENGTH)

    expected = perplexity.scores(model, tokens, {"own": cache}, step or LENGTH)
    states = positions.states(model, tokens, cache(), step)
    found = positions.trace(model, tokens, exact, states).score
    whole = expected["own"]
    assert found.kls == pytest.approx(whole.kls, rel=1e-4) and found.kl > 1e-3
    assert found.losses == pytest.approx(whole.losses, rel=1e-5)
    assert abs(found.agreed - whole.agreed) <= 1 and found.tokens == whole.tokens
    one = positions.part(found, positions.trace(model, tokens, exact, exact).score)
    relative, spread = whole.against(expected[perplexity.REFERENCE])
    assert one["relative"] == pytest.approx(relative, rel=1e-3) and one["relative_se"] == pytest.approx(
        spread, rel=1e-2
    )
    assert model.get_output_embeddings() is not None, "the output layer is back"


def test_the_same_states_diverge_by_nothing(model, tokens, exact):
    found = positions.trace(model, tokens, exact, exact)
    assert float(found.kl_WT.abs().max()) < 1e-12 and bool(found.agreed_WT.all())
    assert found.score.perplexity == pytest.approx(
        perplexity.scores(model, tokens, {}, LENGTH)[perplexity.REFERENCE].perplexity, rel=1e-5
    )


def test_small_divergences_are_not_rounding():
    """Logits of 30 and more, moved by a ten-thousandth: float64 of the same numbers agrees to a few digits."""
    random = torch.Generator().manual_seed(1)
    exact_TV = 8 * torch.randn(5, 4000, generator=random) + 30
    found_TV = exact_TV + 1e-4 * torch.randn(5, 4000, generator=random) + 3
    log_p, log_q = exact_TV.double().log_softmax(-1), found_TV.double().log_softmax(-1)
    expected_T = (log_p.exp() * (log_p - log_q)).sum(-1)
    assert float(expected_T.min()) > 1e-12 and float(expected_T.max()) < 1e-7
    torch.testing.assert_close(positions.divergence(exact_TV, found_TV), expected_T, rtol=0.02, atol=1e-13)


def test_parts_of_a_window_are_its_tokens():
    loss_WT = torch.arange(20, dtype=torch.float64).reshape(2, 10)
    found = positions.Trace(loss_WT, 2 * loss_WT, loss_WT > 4)
    bins = found.bins(3)
    assert [(one["from"], one["to"]) for one in bins] == [(1, 4), (4, 7), (7, 11)]
    assert (
        bins[0]["loss"] == [1.0, 11.0]
        and bins[2]["kl"] == [15.0, 35.0]
        and bins[1]["top1"] == pytest.approx(2 / 3, rel=1e-5)
    )
    widths = [after["from"] - one["from"] for one, after in pairwise(bins)]
    assert math.isclose((sum(one["loss"][0] * width for one, width in zip(bins, [*widths, 4], strict=True))) / 10, 4.5)


def test_what_was_encoded_is_counted_without_sinks(model, tokens):
    cache = KVQCache(RECIPE, model)
    assert positions.encoded(cache) == 0
    positions.states(model, tokens, cache, STEP)
    assert positions.encoded(cache) == LENGTH // 128 * 128 - 4


def test_a_model_that_does_more_than_multiply_is_refused(model, tokens, monkeypatch):
    monkeypatch.setattr(model.config, "final_logit_softcapping", 30.0, raising=False)
    with pytest.raises(ValueError, match="final_logit_softcapping: its logits are no product alone; use kvq eval"):
        positions.states(model, tokens, DynamicCache(config=model.config))
