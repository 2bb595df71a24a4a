"""A model's config.json, index or tokenizer that is damaged, or made to harm, is refused in a sentence, and at once."""

import json
import shutil
import time
from pathlib import Path

import pytest
import tiny
import torch

from kvq_calib.model import config, files, find
from kvq_calib.text import corpus, tokenizer
from kvq_runtime import families

TEXTS = {  # {what: (the file, what is said)}
    "brackets": ("[" * 200_000, "config.json: invalid JSON"),
    "nothing": ("", "config.json: invalid JSON"),
    "a list": ("[]", "expected an object, got \\[\\]"),
    "no text": ("\udcff", "config.json: invalid JSON"),
    "spaces": (" " * (config.LIMIT + 1), "config.json: 16777217 bytes; at most 16777216 are allowed"),
}
SETTINGS = {
    "num_hidden_layers": (10**12, "num_hidden_layers=1000000000000; a whole number from 0 to"),
    "hidden_size": ("2", "hidden_size='2'; a whole number from 1 to"),
    "rope_parameters": ([1], "config.json is none of its model_type"),
    "architectures": (5, "has architectures=5; of model_type llama LlamaForCausalLM is calibrated"),
    "layer_types": (3, "layer_types=3; a list"),
    "num_key_value_heads": (3, "num_key_value_heads=3; a divisor of num_attention_heads=4 is needed"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model") / "tiny", "llama", layers=2)


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


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_no_model_has_is_refused(name, model, tmp_path):
    value, message = SETTINGS[name]
    given = json.loads((model / "config.json").read_text()) | {name: value}
    refused(model, tmp_path / "hostile", json.dumps(given), f"tiny: .*{message}")


def test_every_size_has_bounds(model, tmp_path):
    given = json.loads((model / "config.json").read_text())
    for number, name in enumerate(families.SIZES | config.SIZES):
        text = json.dumps(given | {name: 10**12})
        refused(model, tmp_path / str(number), text, f"tiny: config.json has {name}=.*whole number from [01] to")


@pytest.mark.parametrize("value", ["flash_attention_2", "own/kernel", 5])
def test_attention_that_a_file_names_is_not_asked_for(value, model, tmp_path):
    """It may not be installed, or come from a repository."""
    folder = Path(shutil.copytree(model, tmp_path / "named"))
    given = json.loads((model / "config.json").read_text())
    given |= {"attn_implementation": value, "_attn_implementation": value, "auto_map": {"AutoModelForCausalLM": 5}}
    (folder / "config.json").write_text(json.dumps(given))
    assert find.read(folder, "tiny").model(torch.float32).config._attn_implementation == "sdpa"


def test_an_index_without_end_or_of_another_kind_is_refused(tmp_path):
    index = tmp_path / files.INDEX
    for text, message in (("[]", "expected an object"), ('{"weight_map": {"a": 1}}', "does not name the file of each")):
        index.write_text(text)
        with pytest.raises(ValueError, match=message):
            files.tensors_of(tmp_path, "tiny", 1)
    with index.open("r+b") as file:
        file.truncate(1 << 28)
    with pytest.raises(ValueError, match="at most 67108864 are allowed"):
        files.tensors_of(tmp_path, "tiny", 1)


@pytest.mark.parametrize("text", ["", "{}", "[" * 200_000, "\udcff"])
def test_a_tokenizer_that_is_none_is_refused(text, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match="tokenizer.json is no tokenizer: .*; download the model again"):
        tokenizer.Encoder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_without_end_is_not_read(name, demo_model, tmp_path):
    folder = copied(demo_model, tmp_path)
    with (folder / name).open("r+b") as file:
        file.truncate(1 << 28)  # of zeros, which take no room
    with pytest.raises(ValueError, match=f"{name}: 268435456 bytes; at most .* are allowed"):
        tokenizer.Encoder(folder)


def test_a_tokenizer_of_another_model_is_refused(demo_model, tmp_path):
    folder = copied(demo_model, tmp_path)
    given = json.loads((folder / "config.json").read_text()) | {"vocab_size": 300}
    (folder / "config.json").write_text(json.dumps(given))
    (tmp_path / "text.txt").write_text("Some words that are tokens of no small number. " * 99)
    with pytest.raises(ValueError, match=r"makes token \d+, and the model has 300"):
        corpus.select(str(tmp_path / "text.txt"), folder, 2, 64)


def copied(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")))
