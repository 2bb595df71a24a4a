"""Models are found by name, read tensor by tensor, and refused with a reason when they cannot be captured."""

import json
import shutil
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import (
    filter_repo_objects,
)
from transformers import (
    AutoModelForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kvq_calib.cli import calibrate
from kvq_calib.model import find as models
from kvq_runtime.artifact import fingerprint
from kvq_runtime.errors import NotFound
from kvq_runtime.geometry import Geometry


@pytest.fixture
def folder(demo_model: Path, tmp_path: Path) -> Path:
    """A copy of the embedded model, to spoil."""
    return Path(shutil.copytree(demo_model, tmp_path / "copy"))


def _edit(folder: Path, **changes) -> Path:
    """Change keys of config.json; None removes one, "null" sets null."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    config = {key: None if value == "null" else value for key, value in config.items() if value is not None}
    file.write_text(json.dumps(config))
    return folder


def test_the_demo_model_is_read_as_transformers_reads_it(demo_model: Path):
    files = models.resolve("demo")
    model = AutoModelForCausalLM.from_pretrained(demo_model)
    config = model.config
    assert files.geometry == Geometry(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    assert files.parameters == model.num_parameters()
    assert files.dtype == model.dtype and files.revision is None and files.entry.corpus == "demo"
    own = dict(model.named_parameters())
    for name in files.tensors:
        assert torch.equal(files.tensor(name), own[name]), name
    size = sum(p.numel() * p.element_size() for p in model.model.layers[1].parameters())
    assert files.layer_bytes(1) == size
    assert files.weight_bytes == sum(p.numel() * p.element_size() for p in own.values())
    attention = [layer.self_attn for layer in model.model.layers]
    found = fingerprint.from_config(config.to_dict(), lambda i, name: getattr(attention[i], name).weight)
    fingerprint.check_match(files.fingerprint(), found)


def test_the_installed_demo_model_is_found(demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = Path(shutil.copytree(demo_model, tmp_path / "kvq_demo_model"))
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "kvq_demo_model", raising=False)
    assert models.resolve("demo").path == demo_model  # a checkout's own model is never the stale one
    monkeypatch.setattr(models, "CHECKOUT", tmp_path / "site-packages")
    assert models.resolve("demo").path == package
    sys.modules.pop("kvq_demo_model")


def test_shards_are_one_model(tmp_path: Path):
    config = Qwen2Config(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=64)  # fmt: skip
    model = Qwen2ForCausalLM(config)
    for name, shard in (("one", "1GB"), ("many", "5KB")):
        model.save_pretrained(tmp_path / name, max_shard_size=shard)
    one, many = (models.resolve(tmp_path / name) for name in ("one", "many"))
    shards = sorted(set(many.tensors.values()))
    assert len(shards) > 2 and one.tensors.keys() == many.tensors.keys()
    assert all(torch.equal(one.tensor(name), many.tensor(name)) for name in one.tensors)
    assert one.geometry == Geometry(2, 2, 8)  # no head_dim in the configuration
    assert one.weight_bytes == many.weight_bytes
    (tmp_path / "many" / shards[1]).unlink()
    with pytest.raises(ValueError, match="which is not in"):
        models.resolve(tmp_path / "many")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"architectures": None}, "of model_type qwen2 Qwen2ForCausalLM is calibrated"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE type 'dynamic'; supported are default"),
        ({"layer_types": ["full_attention"] * 5 + ["sliding_attention"]}, "has no sliding_window"),
        (
            {"layer_types": ["sliding_attention"] * 6, "use_sliding_window": True, "sliding_window": 64},
            "no layer of this model",
        ),
        ({"num_hidden_layers": 7, "layer_types": None}, "no weights for layer 6 of 7"),
    ],
)
def test_what_cannot_be_captured_is_refused(folder: Path, changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        models.resolve(_edit(folder, **changes))


def test_only_safetensors_are_opened(folder: Path):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no model\.safetensors .* found pytorch_model\.bin, which may run code"):
        models.resolve(folder)


def test_an_index_cannot_point_out_of_the_folder(folder: Path):
    shutil.move(folder / "model.safetensors", folder.parent / "model.safetensors")
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"names '\.\./model\.safetensors'"):
        models.resolve(folder)


@pytest.mark.parametrize("name", ["qwen2.5-7", "/nowhere/at-all", "a/b/c"])
def test_an_unknown_name_is_answered_with_known_ones(name: str):
    instead = "did you mean qwen2.5-7b or" if "qwen" in name else "kvq-calibrate --list-models lists the catalog"
    with pytest.raises(NotFound, match=f"model '{name}': no such folder, .*; {instead}"):
        models.resolve(name)


def test_no_hub_is_asked_for_a_file_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "model").write_bytes(b"")
    with pytest.raises(ValueError, match=r"org/model is a file, but no \.gguf; give that, or the folder of a model"):
        models.resolve("org/model")


def test_a_hub_model_is_downloaded_without_code_or_pickles(folder: Path, monkeypatch: pytest.MonkeyPatch):
    asked = {}
    snapshot = Path(shutil.copytree(folder, folder.parent / "snapshots" / ("c" * 40)))
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda hub, **given: asked.update(given, hub=hub) or snapshot
    )
    files = models.resolve("qwen2.5-7b", revision="v1")
    assert (asked["hub"], asked["revision"]) == ("Qwen/Qwen2.5-7B", "v1")
    assert (files.id, files.revision) == ("Qwen/Qwen2.5-7B", "c" * 40)
    assert files.entry.name == "qwen2.5-7b"
    wanted = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json",
              "tokenizer.model", "vocab.json", "merges.txt"]  # fmt: skip
    unwanted = [
        "pytorch_model.bin",
        "modeling_qwen2.py",
        "consolidated.safetensors",
        "original/params.json",
        "tokenizer.py",
    ]
    patterns = {name: asked[name] for name in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(wanted + unwanted, **patterns)) == wanted


@pytest.mark.slow
def test_a_plan_needs_no_weights_of_a_hub_model(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """A dry run reads the configuration; what it says is what the downloaded model would give."""
    snapshot = Path(shutil.copytree(folder, folder.parent / "snapshots" / ("c" * 40)))
    (snapshot / "model.safetensors").unlink()
    asked = []

    def download(hub, revision, allow_patterns, **_):
        asked.append(allow_patterns)
        return snapshot

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    given = [
        "--model",
        "qwen2.5-7b",
        "--corpus",
        "demo",
        "--samples",
        "4",
        "--seq-len",
        "256",
        "--baseline",
        "higgs-2bit",
    ]
    assert calibrate.main([*given, "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = ["model.safetensors", "model-00001-of-00002.safetensors", "config.json", "tokenizer.json"]
    assert list(filter_repo_objects(names, allow_patterns=asked[0])) == names[2:] and len(asked) == 1
    shutil.copy(folder / "model.safetensors", snapshot)
    assert calibrate.main([*given, "--dry-run", "--json"]) == 0
    here = json.loads(capsys.readouterr().out)
    assert found.pop("download_bytes") == models.resolve(folder).weight_bytes > 0 == here.pop("download_bytes")
    assert found == here and found["revision"] == "c" * 40


def test_damaged_files_of_a_model_are_named(folder: Path, capsys):
    weights, config = folder / "model.safetensors", folder / "config.json"
    given = ["--model", str(folder), "--samples", "4", "--seq-len", "256"]
    whole = weights.read_bytes()
    for data in (whole[:-1000], whole[:100], b""):
        weights.write_bytes(data)
        assert calibrate.main(given) == 1
        assert f"{weights}: no whole safetensors file" in (said := capsys.readouterr().err) and said.count("\n") == 1
    weights.write_bytes(whole)
    for text in ('{"architectures": ["Qwen2ForCausalLM"', "[]", ""):
        config.write_text(text)
        assert calibrate.main(given) == 1
        assert f"kvq-calibrate: {config}: " in capsys.readouterr().err
    shutil.rmtree(folder)
    with pytest.raises(NotFound):
        models.resolve(folder)


def test_without_a_network_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    def offline(*_, **__):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(RuntimeError, match=r"could not download Qwen/Qwen2\.5-7B, .* give a folder"):
        models.resolve("qwen2.5-7b")
