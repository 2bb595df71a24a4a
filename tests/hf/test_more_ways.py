"""What is given to `generate` beside a prompt: with `exact` each setting does what it does with the stock cache."""

import pytest
import torch
from generating import NEW, generate, kvq, stock
from models import prompt, random_model
from tiers import some
from transformers import StoppingCriteria, StoppingCriteriaList

ATTENTION = ["sdpa", "kvq"]
SETTINGS = {
    "several samples of a prompt": {"way": "sampling", "num_return_sequences": 3},
    "several beams returned": {"way": "beams", "num_return_sequences": 2},
    "sampling beams": {"way": "beams", "do_sample": True},
    "penalties and banned words": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "bad_words_ids": [[5]]},
    "guidance": {"guidance_scale": 1.5},
}


class Until(StoppingCriteria):
    """Stop every row at this length."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids, scores, **_):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


class Heard:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.tokens: list[int] = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.tokens.append(-1)


@pytest.mark.parametrize("attention", some(ATTENTION, "kvq"))
@pytest.mark.parametrize("what", some(SETTINGS, "sampling beams", "guidance"))
def test_settings_of_generate_do_what_they_do_with_the_stock_cache(what, attention):
    model, ids, settings = random_model("llama", attention), prompt(2), SETTINGS[what]
    one, two = (generate(model, ids, make(model), **settings) for make in (exact, plain))
    assert torch.equal(one, two)


def exact(model):
    return kvq("exact", model)


def plain(model):
    """The stock cache, under attention of transformers' own."""
    model.set_attn_implementation("sdpa")
    return stock(model)


@pytest.mark.parametrize("attention", some(ATTENTION, "kvq"))
def test_embeddings_in_place_of_tokens(attention):
    model, ids = random_model("llama", attention), prompt(2)
    given = {"inputs_embeds": model.get_input_embeddings()(ids), "max_new_tokens": NEW, "do_sample": False}
    one = model.generate(past_key_values=kvq("exact", model), pad_token_id=1, **given)
    assert torch.equal(one, model.generate(past_key_values=plain(model), pad_token_id=1, **given))


@pytest.mark.parametrize("attention", some(ATTENTION, "kvq"))
def test_streamers_criteria_and_the_dictionary_of_outputs(attention):
    model, ids, found = random_model("llama", attention), prompt(1), []
    for make in (exact, plain):
        heard, stop = Heard(), StoppingCriteriaList([Until(60)])
        settings = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
        out = generate(model, ids, make(model), streamer=heard, stopping_criteria=stop, **settings)
        assert heard.tokens == [*out.sequences[0].tolist(), -1] and out.sequences.shape == (1, 60)
        assert len(out.scores) == len(out.logits) == 20
        found.append(out)
    assert torch.equal(found[0].sequences, found[1].sequences)
    torch.testing.assert_close(found[0].logits, found[1].logits, rtol=1e-3, atol=1e-4)
