"""Continuations through the cache: exact is the model, rows do not matter to each other, and what was read is noted."""

import pytest
import torch
from transformers.cache_utils import DynamicCache

from kvq_calib.evaluate.caches import CountedCache, WitnessCache, attending
from kvq_calib.evaluate.perplexity import Continuation, loglikelihoods
from kvq_calib.evaluate.record import load_model
from kvq_calib.model import find as models
from kvq_runtime.artifact import recipe_text

SHORT = "+window.recent=0"  # so that a block is encoded as soon as it is full
LENGTHS = (150, 290, 30)


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return load_model(models.resolve("demo"))


@pytest.fixture(scope="module")
def rows(model):
    random = torch.Generator().manual_seed(0)
    return [torch.randint(2, model.config.vocab_size, (length,), generator=random).tolist() for length in LENGTHS]


ASKED = [Continuation(0, (5, 7)), Continuation(1, tuple(range(3, 203))), Continuation(2, (9,)), Continuation(2, (11,))]


def cache(model, name: str) -> WitnessCache:
    return WitnessCache(recipe_text.read(name), model)


@torch.inference_mode()
def test_exact_is_the_model_without_a_cache(model, rows):
    asked = [Continuation(1, (*rows[1][-199:], 4)), *ASKED[2:]]
    found = loglikelihoods(model, cache(model, f"exact{SHORT}"), rows, asked, 32)
    assert found == loglikelihoods(model, DynamicCache(config=model.config), rows, asked, 32)
    logq = model(torch.tensor([rows[1]])).logits[0, -200:].double().log_softmax(-1)
    wanted = torch.tensor([*rows[1][-199:], 4])
    assert found[0][0] == pytest.approx(float(logq.gather(-1, wanted[:, None]).sum()), rel=1e-5)
    last = model(torch.tensor([rows[2]])).logits[0, -1]
    likeliest = Continuation(2, (int(last.argmax()),))
    assert [greedy for _, greedy in loglikelihoods(model, cache(model, "exact"), rows, [likeliest], 32)] == [True]


def test_rows_side_by_side_are_scored_as_alone(model, rows):
    together = cache(model, f"kivi-2bit{SHORT}")
    found = loglikelihoods(model, together, rows, ASKED, 32)
    shares = together.shares(len(rows))
    for row, tokens in enumerate(rows):
        own = [one for one in ASKED if one.row == row]
        alone = cache(model, f"kivi-2bit{SHORT}")
        again = loglikelihoods(model, alone, [tokens], [Continuation(0, one.tokens) for one in own], 32)
        for one, (value, greedy) in zip(own, again, strict=True):
            assert found[ASKED.index(one)] == (pytest.approx(value, rel=1e-5), greedy)
        assert shares[row] == pytest.approx(alone.shares(1)[0])
    exact = loglikelihoods(model, cache(model, f"exact{SHORT}"), rows, ASKED, 32)
    assert abs(found[1][0] - exact[1][0]) > 0.01 and shares[1] > 0.2, "two bits were read"
    assert found[2] == (pytest.approx(exact[2][0], rel=1e-5), exact[2][1]) and shares[2] == 0, "30 tokens stay exact"


def test_a_witness_sees_what_attention_counts(model, rows):
    seen, counted = (kind(recipe_text.read(f"rtn-2bit{SHORT}"), model) for kind in (WitnessCache, CountedCache))
    for one in (seen, counted):
        loglikelihoods(model, one, [rows[1]], [Continuation(0, (3,))], 32)
    coded = sum(int(some) for _, some in seen.passes)
    assert coded * model.config.num_hidden_layers == counted.reads.decoded_pairs > 0
    first = 32 * 33 // 2  # pairs of the first pass, into an empty cache
    read = sum(int(some) for some, _ in seen.passes)
    assert (read + first) * model.config.num_hidden_layers == counted.reads.pairs


@torch.inference_mode()
def test_what_is_padded_on_the_left_is_not_read(model, rows):
    """As generation pads its prompts; the prompt's own pass is not counted, and neither is what follows an answer."""
    given = torch.tensor([rows[1], [0] * (290 - 150) + rows[0]])
    mask = (torch.arange(290) >= torch.tensor([[0], [140]])).long()
    held = cache(model, f"rtn-2bit{SHORT}")
    with attending(model, held):
        settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
        model.generate(given, attention_mask=mask, past_key_values=held, **settings)
    sinks = held.blocks.recipe.window.sinks
    whole, padded = (256 - sinks), (256 - 140 - sinks)
    assert [int(one[1][0]) for one in held.passes] == [whole] * 2
    assert [int(one[1][1]) for one in held.passes] == [padded] * 2
    assert held.shares(2, [1, 0]) == [pytest.approx(whole / 291), 0.0]
