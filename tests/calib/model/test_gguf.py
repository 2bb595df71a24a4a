"""A GGUF file is converted once into a folder, whose weights and tokens are those of transformers' own loader."""

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import tiny
import tiny_gguf
import torch
from tiny_gguf import Type
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

from kvq_calib.cli import calibrate
from kvq_calib.model import find as models
from kvq_calib.model import gguf
from kvq_calib.text.tokenizer import Encoder
from kvq_runtime import KVQCache
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.registry import rating


def made(architecture: str = "llama", seed: int = 0, **settings) -> PreTrainedModel:
    """A random model whose rows are multiples of ggml's blocks."""
    torch.manual_seed(seed)
    given = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
             "rms_norm_eps": 2.0**-20, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **given | settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVQ_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


CASES = {
    "llama": (Type.Q4_1, {}),
    "qwen3": (Type.BF16, {"head_dim": 128}),
    "gemma3_text": (Type.Q8_0, {"head_dim": 256, "num_hidden_layers": 8, "sliding_window": 16}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_folder_has_the_weights_of_transformers_own_loader(name: str, tmp_path: Path, home: Path):
    kind, settings = CASES[name]
    path = tiny_gguf.write(made(name, **settings), tmp_path / "model.gguf", kind, **{"general.license": "mit"})
    files = models.resolve(path)
    assert files.path.parent == home / "gguf" and files.id == "model.gguf" and files.dtype == torch.bfloat16
    assert files.quantization == (None if kind is Type.BF16 else kind.name)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    ours = AutoModelForCausalLM.from_pretrained(files.path)
    for (one, weight), (other, expected) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert one == other and torch.equal(weight, expected), one
    assert "license: mit" in (files.path / "README.md").read_text()


def test_a_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tiny_gguf.write(made(), tmp_path / "model.gguf", Type.F16)
    first, convert, again = gguf.converted(path), gguf.convert, []
    monkeypatch.setattr(gguf, "convert", lambda *given: again.append(given) or convert(*given))
    assert gguf.converted(path.rename(tmp_path / "other.gguf")) == first and not again
    tiny_gguf.write(made(seed=1), path, Type.F16)
    assert gguf.converted(path) != first and len(again) == 1


@pytest.mark.slow
def test_a_killed_conversion_leaves_nothing_half(tmp_path: Path, home: Path):
    path = tiny_gguf.write(made(), tmp_path / "model.gguf", Type.F16)
    code = (
        "import os, signal; from pathlib import Path; from kvq_calib.model import gguf; convert = gguf.convert\n"
        "gguf.convert = lambda *given: (convert(*given), os.kill(os.getpid(), signal.SIGKILL))\n"
        f"gguf.converted(Path({str(path)!r}))"
    )
    killed = subprocess.run([sys.executable, "-c", code], env=dict(os.environ), capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    assert [one.suffix for one in (home / "gguf").iterdir() if one.is_dir()] == [".draft"]
    folder = gguf.converted(path)
    assert not folder.suffix and (folder / "model.safetensors").is_file()
    assert [one for one in (home / "gguf").iterdir() if one.is_dir()] == [folder]


def test_tokens_are_those_of_transformers(tmp_path: Path):
    tokens = [*tiny_gguf.bytes_to_unicode().values(), "12", "ab", "ĠĠ"]
    said = {"tokenizer.ggml.merges": ["1 2", "a b", "Ġ Ġ"], "tokenizer.ggml.tokens": tokens}
    path = tiny_gguf.write(made(vocab_size=259), tmp_path / "model.gguf", **said)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = Encoder(gguf.converted(path))
    assert ours.whole("ab 12") == theirs("ab 12").input_ids and len(ours.whole("ab 12")) == 3
    assert ours.bounded(["ab"]) == [[*theirs("ab").input_ids, 0]] and (ours.boundary, ours.size) == ("eos", 259)
    # SmolLM's digits are tokens of their own, which transformers' conversion leaves out
    path = tiny_gguf.write(made(vocab_size=259), tmp_path / "digits.gguf", **said, **{"tokenizer.ggml.pre": "smollm"})
    assert len(Encoder(gguf.converted(path)).whole("ab 12")) == 4
    # Llama 3's texts begin with BOS, and its whole words need no merges; transformers' conversion leaves both out
    said = {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.bos_token_id": 5, "tokenizer.ggml.tokens": tokens}
    path = tiny_gguf.write(made(vocab_size=259), tmp_path / "words.gguf", **said)
    assert Encoder(gguf.converted(path)).whole("12") == [5, tokens.index("12")]


def test_text_is_split_as_the_model_splits_it_or_a_caution_is_given(tmp_path: Path, kvq):
    """A missing `tokenizer.ggml.pre` is taken from the architecture, where that has a tokenizer of its own."""
    text, splits = "'Tis 1234 days-\n\n  left", {}
    cases = [("own", "qwen2", "qwen2"), ("missing", "qwen2", None), ("default", "qwen2", "default")]
    cases += [("other", "qwen2", "deepseek-coder"), ("llama", "llama", None)]
    for name, architecture, pre in cases:
        said = {} if pre is None else {"tokenizer.ggml.pre": pre}
        path = tiny_gguf.write(made(architecture, head_dim=16), tmp_path / f"{name}.gguf", **said)
        files = models.resolve(path)
        split = Tokenizer.from_file(str(files.path / "tokenizer.json")).pre_tokenizer
        splits[name] = [piece for piece, _ in split.pre_tokenize_str(text)]
        caution = rating.fit_warning(files.provenance)
        assert (caution is None) == (name not in ("other", "llama")), name
    assert splits["missing"] == splits["default"] == splits["own"] != splits["other"]
    given = ["kivi-4bit", "--model", str(path), "--corpus", str(tiny.text(tmp_path)), "--windows", "1"]
    code, _, errors = kvq("eval", *given, "--length", "192", "--protocol", "full")
    assert code == 0 and "CAUTION: the GGUF file's tokenizer.ggml.pre is missing or unknown" in errors


@pytest.mark.parametrize(
    ("architecture", "said", "wanted"),
    [
        ("qwen3", {"qwen3.attention.layer_norm_rms_epsilon": None}, "lacks qwen3.attention.layer_norm_rms_epsilon"),
        ("gemma3_text", {"gemma3.attention.sliding_window": None}, "lacks gemma3.attention.sliding_window"),
        ("gemma3_text", {"gemma3.rope.freq_base": None}, r"RoPE's base is 10000, and transformers reads 1e\+06"),
        ("llama", {"llama.rope.scaling.factor": 4.0}, "scales RoPE"),
        ("llama", {"rope_factors_long.weight": torch.ones(8)}, "scales RoPE"),
        ("llama", {"tokenizer.ggml.eos_token_id": None}, "lacks tokenizer.ggml.eos_token_id"),
        ("llama", {"tokenizer.ggml.pre": "llama-bpe"}, "lacks tokenizer.ggml.bos_token_id"),
    ],
)
def test_a_key_that_transformers_would_make_up_is_refused(architecture: str, said: dict, wanted: str, tmp_path: Path):
    """Where its default is not llama.cpp's, or llama.cpp has none."""
    settings = CASES.get(architecture, (None, {}))[1] | {"num_hidden_layers": 2}
    path = tiny_gguf.write(made(architecture, **settings), tmp_path / "model.gguf", **said)
    with pytest.raises(ValueError, match=f"{wanted}.*; use the model in Hugging Face format"):
        models.resolve(path)


def test_other_files_are_refused(tmp_path: Path, home: Path):
    path = tmp_path / "model.gguf"
    for said, wanted in [
        ({"general.architecture": "bloom"}, "model_type='bloom' is not a family that kvq serves; use a model of llama"),
        ({"split.count": 2}, "is one of 2 parts; join them: llama-gguf-split --merge"),
        ({"rope_freqs.weight": torch.ones(8)}, "scales RoPE, which .* use the model in Hugging Face format"),
        ({"llama.rope.scaling.type": "yarn"}, "scales RoPE"),
        ({"tokenizer.ggml.model": None}, "has no tokenizer; convert the whole model"),
    ]:
        tiny_gguf.write(made(), path, **said)
        with pytest.raises(ValueError, match=wanted):
            models.resolve(path)
    data = tiny_gguf.write(made(), path).read_bytes()
    for cut in (0, 100, len(data) // 2):
        path.write_bytes(data[:cut])
        with pytest.raises(ArtifactError, match="no whole GGUF file .*; download it again"):
            models.resolve(path)
    with pytest.raises(NotFound, match="no such file"):
        gguf.converted(tmp_path / "none.gguf")
    tiny_gguf.write(made(), path)
    with pytest.raises(ValueError, match=r"no config\.json; give .*model\.gguf"):
        models.resolve(tmp_path)
    with pytest.raises(ValueError, match="revision 'v1' is of a model on the Hub, and .* is a file"):
        models.resolve(path, "v1")


def test_the_largest_gemma2_scales_scores_by_its_width():
    """144 of 4608 / 32, where transformers' default is the head size."""
    for layers, scale in ((42, 256), (46, 144)):
        shape = {"num_hidden_layers": layers, "hidden_size": 4608, "num_attention_heads": 32}
        config = AutoConfig.for_model("gemma2", **shape)
        gguf._settle(Path("x"), {"general.architecture": "gemma2"}, config)
        assert config.query_pre_attn_scalar == scale


def test_without_the_package_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tiny_gguf.write(made(), tmp_path / "model.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(RuntimeError, match="a GGUF file needs gguf: the extra `gguf`"):
        models.resolve(path)


@pytest.mark.slow
def test_from_a_file_to_a_cache(tmp_path: Path, kvq, capsys):
    """Fitted on a 4-bit file: its card says so, the same weights are silent, and the originals warn."""
    original = made()
    path = tiny_gguf.write(original, tmp_path / "Tiny.Q4_1.gguf", Type.Q4_1, **{"general.license": "mit"})
    text = tiny.text(tmp_path)
    given = ["--model", str(path), "--corpus", str(text), "--recipe", "aqua-2bit", "--samples", "3", "--held-out", "1"]
    assert calibrate.main([*given, "--seq-len", "192", "--no-eval", "--json"]) == 0
    guessed = "CAUTION: the GGUF file's tokenizer.ggml.pre is missing"
    assert guessed in capsys.readouterr().err
    assert calibrate.main([*given, "--seq-len", "192", "--dry-run"]) == 0 and guessed in capsys.readouterr().err
    name = "tiny.q4_1-aqua-2bit"
    assert kvq("pull", name, "-o", tmp_path / "out")[0] == 0
    assert "Caution: the GGUF file's tokenizer.ggml.pre" in (tmp_path / "out" / "README.md").read_text()
    code, shown, _ = kvq("show", name, "--json")
    assert code == 0 and json.loads(shown)["provenance"]["quantization"] == "Q4_1"
    served = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KVQCache.from_pretrained(name, model=served)
    with pytest.warns(UserWarning, match=r"differ by 0\.\d+ of their norm; .* 0.5 where either is quantized"):
        KVQCache.from_pretrained(name, model=original)
