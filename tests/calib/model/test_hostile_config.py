"""A model's config.json that is damaged, or made to harm, is refused in a sentence that names it, and at once."""

import json
import shutil
import time
from pathlib import Path

import pytest
import tiny
import torch

from kvq_calib.model import files, find, supported
from kvq_calib.text import corpus, tokenizer

TEXTS = {  # {what: (the file, what is said)}
    "brackets": ("[" * 200_000, "config.json: invalid JSON"),
    "objects": ('{"a":' * 200_000, "config.json: invalid JSON"),
    "nothing": ("", "config.json: invalid JSON"),
    "a list": ("[]", "expected an object, got \\[\\]"),
    "null": ("null", "expected an object, got None"),
    "no text": ("\udcff", "config.json: invalid JSON"),
    "a digit more": ("1" * 5000, "config.json: invalid JSON"),
    "spaces": (" " * (files.CONFIG_LIMIT + 1), "config.json: 16777217 bytes; at most 16777216 are allowed"),
}
CHANGES = [(name, value) for name, (least, _) in supported.SIZES.items() for value in (least - 1, 10**12)] + [
    ("num_hidden_layers", value) for value in ("2", 2.0, True, [1])
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    folder.mkdir()
    tiny.save(folder, "llama", layers=2)
    return folder


def refused(model: Path, folder: Path, text: str, message: str) -> None:
    shutil.copytree(model, folder)
    (folder / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    begun = time.thread_time()
    with pytest.raises(ValueError, match=message):
        find.read(folder, "tiny")
    assert time.thread_time() - begun < 2


@pytest.mark.parametrize("text, message", TEXTS.values(), ids=TEXTS)
def test_what_is_no_object_of_settings_is_refused(text, message, model, tmp_path):
    refused(model, tmp_path / "hostile", text, message)


@pytest.mark.parametrize("name, value", CHANGES, ids=[f"{name}={value}" for name, value in CHANGES])
def test_a_size_that_no_model_has_is_refused(name, value, model, tmp_path):
    given = json.loads((model / "config.json").read_text()) | {name: value}
    refused(model, tmp_path / "hostile", json.dumps(given), f"tiny: config.json has {name}=.*whole number from [01] to")


@pytest.mark.parametrize("name", supported.NEEDED)
def test_a_size_that_is_missing_is_named(name, model, tmp_path):
    given = json.loads((model / "config.json").read_text())
    del given[name]
    refused(model, tmp_path / "hostile", json.dumps(given), f"tiny: config.json has {name}=None")


def test_sizes_that_have_a_default_may_be_missing(model, tmp_path):
    given = json.loads((model / "config.json").read_text())
    folder = tmp_path / "bare"
    shutil.copytree(model, folder)
    (folder / "config.json").write_text(json.dumps(given | {"head_dim": None}))
    assert find.read(folder, "tiny").geometry.head_size == given["hidden_size"] // given["num_attention_heads"]


OTHERS = {
    "rope_parameters": ([1], "RoPE settings .*; an object is needed"),
    "architectures": (5, "has architectures=5; of model_type llama LlamaForCausalLM is calibrated"),
    "layer_types": (3, "layer_types=3; a list"),
    "num_key_value_heads": (3, "num_key_value_heads=3; a divisor of num_attention_heads=4 is needed"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_settings_of_another_type_are_refused(name, model, tmp_path):
    value, message = OTHERS[name]
    given = json.loads((model / "config.json").read_text()) | {name: value}
    refused(model, tmp_path / "hostile", json.dumps(given), message)


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("value", ["flash_attention_2", "own/kernel", 5])
def test_attention_that_a_file_names_is_not_asked_for(name, value, model, tmp_path):
    """It may not be installed, or come from a repository."""
    folder = Path(shutil.copytree(model, tmp_path / "named"))
    given = json.loads((model / "config.json").read_text()) | {name: value, "auto_map": {"AutoModelForCausalLM": 5}}
    (folder / "config.json").write_text(json.dumps(given))
    found = find.read(folder, "tiny").model(torch.float32)
    assert found.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("text", ["", "{}", "[" * 200_000, '{"model": {"type": "BPE"}}', "\udcff"])
def test_a_tokenizer_that_is_none_is_refused(text, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match="tokenizer.json is no tokenizer: .*; download the model again"):
        tokenizer.Encoder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_file_without_end_is_not_read(name, demo_model, tmp_path):
    folder = copied(demo_model, tmp_path)
    with (folder / name).open("r+b") as file:
        file.truncate(1 << 28)  # of zeros, which take no room
    with pytest.raises(ValueError, match=f"{name}: 268435456 bytes; at most .* are allowed"):
        tokenizer.Encoder(folder)


def test_an_index_without_end_or_of_another_kind_is_refused(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    for text, message in (("[]", "expected an object"), ('{"weight_map": {"a": 1}}', "does not name the file of each")):
        index.write_text(text)
        with pytest.raises(ValueError, match=message):
            files.weight_map(tmp_path)
    with index.open("r+b") as file:
        file.truncate(1 << 28)
    with pytest.raises(ValueError, match="at most 67108864 are allowed"):
        files.weight_map(tmp_path)


@pytest.mark.parametrize("text", ["", "[1]", "[" * 200_000])
def test_settings_of_a_tokenizer_that_are_no_object_are_refused(text, demo_model, tmp_path):
    folder = copied(demo_model, tmp_path)
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(ValueError, match="tokenizer_config.json: "):
        tokenizer.Encoder(folder)


@pytest.mark.parametrize("given", [5, [1], {"content": [1]}, {}, None])
def test_an_end_of_text_that_is_no_token_is_looked_for_in_the_configuration(given, demo_model, tmp_path):
    folder = copied(demo_model, tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": given}))
    assert tokenizer.Encoder(folder).bounded(["a"]) == tokenizer.Encoder(demo_model).bounded(["a"])
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": "x"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="names no end-of-text token"):
        tokenizer.Encoder(folder)


def test_a_folder_without_a_tokenizer_is_refused(demo_model, tmp_path):
    folder = copied(demo_model, tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="has no tokenizer.json with a vocabulary"):
        tokenizer.Encoder(folder)


def test_tokens_that_the_model_does_not_know_are_refused(demo_model, tmp_path):
    folder = copied(demo_model, tmp_path)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 300}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"makes token \d+, and the model knows 300"):
        corpus.select("demo", folder, 2, 64)


def copied(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")))
