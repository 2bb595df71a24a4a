"""One break-even length a cache, of the dtype that it has, and what is said of one that the model never reaches."""

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from kvq_runtime import KVQCache


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"), "llama", layers=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_empty_cache_and_a_filled_one_say_the_same_length(folder, dtype):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    cache = KVQCache.from_recipe("higgs-4bit", model=model)
    empty = cache.memory_report()
    with torch.inference_mode():
        model(torch.arange(64)[None], past_key_values=cache)
    filled = cache.memory_report()
    assert empty.smaller_than_16bit_from == filled.smaller_than_16bit_from
    assert empty.dtype == filled.dtype == str(dtype).removeprefix("torch.")
    assert ("exact tokens are in float32" in str(filled)) == (dtype == torch.float32)


def test_a_length_that_the_model_never_reaches_is_a_warning(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    start = KVQCache.from_recipe("higgs-4bit", model=model).memory_report().smaller_than_16bit_from
    for positions, warned in ((start - 1, True), (start, False)):
        model.config.max_position_embeddings = positions
        said = str(KVQCache.from_recipe("higgs-4bit", model=model).memory_report())
        assert (
            f"WARNING: smaller from {start:,} tokens on, and the model was made for {positions:,}" in said
        ) == warned


def test_attention_that_decodes_the_whole_history_is_said_once_with_the_line_that_mends_it(folder, caplog):
    from kvq_runtime.hf import announced

    announced._told.clear()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def told(attention: str, step: torch.Tensor) -> list[str]:
        caplog.clear()
        model.set_attn_implementation(attention)
        for _ in range(2):
            cache = KVQCache.from_recipe("higgs-4bit", model=model)
            with torch.inference_mode():
                model(torch.arange(128).repeat(3)[None] % 256, past_key_values=cache)
                for _ in range(2):
                    model(step, past_key_values=cache)
        return [one.getMessage() for one in caplog.records if "decodes the whole history" in one.getMessage()]

    one, several = torch.tensor([[1]]), torch.tensor([[1, 2]])
    assert told("kvq", one) == told("sdpa", several) == [], "no step, but a text that is read"
    (said,) = told("sdpa", one)
    assert 'model.set_attn_implementation("kvq")' in said
