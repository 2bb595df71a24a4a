"""The script that makes the embedded model: repeatable, and with biases that grow."""

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts import train_demo_model as script

pytestmark = pytest.mark.slow
SENTENCE = "the cache of a small model holds keys and values of every token that it has seen"
WORDS = SENTENCE.split()
TEXTS = [" ".join(WORDS[(i * k) % len(WORDS)] for i in range(600)) for k in (1, 3, 5, 7)]


@pytest.fixture(autouse=True)
def small_text(monkeypatch):
    """Text that is quick to tokenize."""
    monkeypatch.setattr(script, "read", lambda sources, split: TEXTS if split == "fit" else TEXTS[:2])


def run(folder, *more: str) -> float:
    given = ["--out", str(folder / "model"), "--length", "64", "--batch", "2", "--steps", "6"]
    return script.main([*given, *more])


def weights(folder) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype="auto").state_dict()


def test_a_run_learns_and_can_be_loaded(tmp_path):
    result = run(tmp_path, "--steps", "15")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "one 1234, it's\n\n  def f(x):\treturn"
    stored = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert tokenizer(text)["input_ids"] == stored.encode(text).ids, "transformers and the file tokenize alike"
    assert result < 0.5 * len(tokenizer), "no better than guessing among half of the tokens"
    assert tokenizer.decode(tokenizer("keys and values")["input_ids"]) == "keys and values"
    assert model.dtype == torch.bfloat16
    for layer in model.model.layers:
        for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            assert projection.bias.abs().max() > 1e-3


def test_going_on_from_a_model_keeps_its_tokenizer_and_starts_at_its_weights(tmp_path, demo_model):
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype="auto").state_dict()
    run(tmp_path, "--start-from", str(demo_model), "--steps", "0")
    found = weights(tmp_path)
    assert all(torch.equal(found[name], model[name]) for name in model)
    saved = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert saved.get_vocab() == AutoTokenizer.from_pretrained(demo_model).get_vocab()


def test_the_same_command_makes_the_same_weights(tmp_path):
    for name in ("one", "two"):
        run(tmp_path / name)
    first, second = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_seed_fixes_the_weights():
    first, again, other = (script.make_model(2048, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_held_out_perplexity_needs_a_window():
    with pytest.raises(ValueError, match="give more text"):
        script.perplexity(None, torch.zeros(64, dtype=torch.long), length=64)


def test_a_model_of_other_heads_takes_over_what_fits(tmp_path):
    run(tmp_path / "one")
    given = ["--start-from", str(tmp_path / "one" / "model"), "--heads", "8", "--head-size", "32", "--steps", "0"]
    run(tmp_path / "two", *given)
    wide, narrow = weights(tmp_path / "one"), weights(tmp_path / "two")
    keys, queries = "model.layers.3.self_attn.k_proj.weight", "model.layers.3.self_attn.q_proj.weight"
    assert narrow[keys].shape == (64, 256) and wide[keys].shape == (128, 256)
    assert torch.equal(narrow[queries], wide[queries])
    assert torch.equal(narrow["model.embed_tokens.weight"], wide["model.embed_tokens.weight"])
