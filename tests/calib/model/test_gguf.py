"""A GGUF file is a model: the weights, RoPE and tokens that transformers has of it, and nothing else is read as one."""

import json
import struct
import sys
import time
import tracemalloc
import warnings
from pathlib import Path

import pytest
import tiny
import tiny_gguf
import torch
from tiny_gguf import Type
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

from kvq_calib.cli import calibrate
from kvq_calib.evaluate import record, tasks
from kvq_calib.model import find as models
from kvq_calib.model import gguf
from kvq_calib.model.streamed import Stream
from kvq_calib.text import tokenizer
from kvq_calib.text.tokenizer import Encoder
from kvq_runtime import KVQCache
from kvq_runtime.artifact import gguf_mean
from kvq_runtime.disk import gguf as header
from kvq_runtime.errors import ArtifactError, NotFound
from kvq_runtime.geometry import Geometry

TOKENS = torch.arange(96).view(2, 48) * 5 % 256


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


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return made()


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(TOKENS).logits


def streamed(files: models.ModelFiles) -> Tensor:
    stream = Stream(files, dtype=torch.float32)
    h_BTE = stream.embed(TOKENS)
    for layer in range(stream.layers):
        h_BTE = stream.layer(layer).forward(h_BTE).h_BTE
    return stream.head()(h_BTE)


CASES = {
    "llama": (Type.Q4_1, {}),
    "llama, tied": (Type.F16, {"tie_word_embeddings": True}),
    "mistral": (Type.Q8_0, {"sliding_window": None}),
    "qwen2": (Type.Q5_0, {}),
    "qwen3": (Type.BF16, {"head_dim": 128}),  # transformers' loader does not read another size
    "gemma3_text": (Type.Q8_0, {"head_dim": 256, "num_hidden_layers": 8, "sliding_window": 16}),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers_own_loader(name: str, tmp_path: Path):
    kind, settings = CASES[name]
    path = tiny_gguf.write(made(name.partition(",")[0], **settings), tmp_path / "model.gguf", kind)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    files = models.resolve(path)
    torch.testing.assert_close(streamed(files), logits(theirs), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits(record.load_model(files)), logits(theirs), rtol=1e-5, atol=1e-5)
    assert files.quantization == (kind.name if kind not in (Type.F16, Type.BF16) else None)
    assert files.parameters == theirs.num_parameters()
    assert list(files.attending) == ([5] if name == "gemma3_text" else [0, 1])
    assert Geometry.from_config(header.config(header.read(path), path)) == files.geometry


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128},
        {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192},
        {"rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 2048},
    ],
    ids=lambda rope: f"{rope['rope_type']}-{rope.get('factor', 1):g}",
)  # fmt: skip
def test_rope_is_that_of_the_model(rope: dict, tmp_path: Path):
    """transformers' own loader reads no scaling, so the model itself is the reference; float32 is exact."""
    model, said = made(rope_parameters=rope, attention_bias=True), {}
    if rope["rope_type"] == "llama3":
        factors = gguf_mean.frequencies({**rope, "rope_type": "default"}, 16) / gguf_mean.frequencies(rope, 16)
        said["rope_freqs.weight"] = factors.float()
        if rope["original_max_position_embeddings"] != 8192:  # which no file says
            said["llama.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        assert len(set(factors.tolist())) > 2
    elif "factor" in rope:
        said |= {"llama.rope.scaling.type": rope["rope_type"], "llama.rope.scaling.factor": rope["factor"]}
        said["llama.rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
    files = models.resolve(tiny_gguf.write(model, tmp_path / "model.gguf", **said))
    assert files.config["rope_parameters"] == rope
    assert torch.equal(logits(record.load_model(files)), logits(model))
    torch.testing.assert_close(streamed(files), logits(model), rtol=1e-5, atol=1e-5)


def test_rows_are_those_of_the_whole_matrix(llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = gguf.read(tiny_gguf.write(llama, tmp_path / "model.gguf", Type.Q4_0), "tiny")
    table = files.tensor("model.embed_tokens.weight")
    assert torch.equal(files.rows("model.embed_tokens.weight", TOKENS), table[TOKENS])
    name = "model.layers.1.self_attn.q_proj.weight"
    whole = files.tensor(name)
    monkeypatch.setattr(gguf, "PIECE", 4 * 64 * 3)  # three rows at a time
    assert torch.equal(files.tensor(name), whole)
    assert 0 < (whole - llama.get_parameter(name)).norm() / whole.norm() < 0.15


def test_of_a_table_only_the_rows_that_are_asked_for_take_memory(tmp_path: Path):
    files = gguf.read(tiny_gguf.write(made(vocab_size=1 << 15), tmp_path / "model.gguf", Type.Q8_0), "tiny")
    name = "model.embed_tokens.weight"
    files.rows(name, TOKENS)
    tracemalloc.start()
    files.rows(name, TOKENS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < files._bytes(name) / 8


def test_without_the_package_an_error_says_so(llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tiny_gguf.write(llama, tmp_path / "model.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        RuntimeError, match=r"a GGUF file needs gguf: the extra `gguf` of kvq brings it: pip install -e '.\[gguf\]'"
    ):
        models.resolve(path)


REFUSED = {
    "gemma2": ({"general.architecture": "gemma2"}, "architecture gemma2; supported are llama, qwen2, qwen3, gemma3"),
    "experts": ({"llama.expert_count": 8}, "llama.expert_count=8, and calibration knows no llama with that"),
    "windows": ({"llama.attention.sliding_window": 4096}, "llama.attention.sliding_window=4096"),
    "parts": ({"split.count": 3}, "one of 3 parts; join them first: llama-gguf-split --merge"),
    "latents": ({"llama.attention.kv_lora_rank": 512}, "one latent for all heads"),
    "values": ({"llama.attention.value_length": 8}, "keys of 16 and values of another size"),
    "uneven": ({"llama.attention.head_count_kv": [2, 1]}, "layers with different attention.head_count_kv"),
    "partial": ({"llama.rope.dimension_count": 8}, "rotates 8 of 16 channels"),
    "longrope": ({"llama.rope.scaling.type": "longrope"}, "RoPE scaling 'longrope'"),
    "attention's factor": (
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.attn_factor": 2.0,
            "llama.rope.scaling.original_context_length": 128,
        },
        "RoPE scaling 'yarn'",
    ),
    "factors": ({"rope_freqs.weight": torch.tensor([1.0, 1, 1, 1, 2, 2, 2, 2])}, "other factors than Llama 3's"),
    "layers": ({"llama.block_count": 5}, "no weights for layer 2 of 5"),
    "no layers": ({"llama.block_count": None}, "block_count of llama is None; a whole number"),
    "many layers": ({"llama.block_count": 1 << 30}, "its metadata has num_hidden_layers=1073741824"),
    "heads": ({"llama.attention.head_count": 0}, "attention.head_count of llama is 0"),
    "base": ({"llama.rope.freq_base": float("nan")}, "llama.rope.freq_base=nan; a number above 0"),
    "a text": ({"llama.attention.layer_norm_rms_epsilon": "x"}, "rms_epsilon='x'; a number above 0"),
    "a foreign tensor": ({"blk.0.ssm_in.weight": torch.ones(4)}, "a tensor 'blk.0.ssm_in.weight', which is none of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused(name: str, llama, tmp_path: Path):
    said, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        path = tmp_path / "model.gguf"
        if "general.architecture" in said:
            data = tiny_gguf.write(llama, path).read_bytes()
            path.write_bytes(data.replace(b"\5\0\0\0\0\0\0\0llama", b"\6\0\0\0\0\0\0\0gemma2", 1))
        else:
            tiny_gguf.write(llama, path, **said)
        models.resolve(path)


def test_a_type_that_cannot_be_dequantized_is_refused(llama, tmp_path: Path):
    path = tiny_gguf.write(llama, tmp_path / "model.gguf")
    data = path.read_bytes()
    at = data.index(b"blk.0.attn_k.weight") + len(b"blk.0.attn_k.weight") + 4 + 16
    for kind in (24, 99):  # int8, and none
        path.write_bytes(data[:at] + struct.pack("<I", kind) + data[at + 4 :])
        with pytest.raises(ValueError, match=f"ggml's type {kind}, which the package gguf cannot dequantize"):
            models.resolve(path)


def test_files_that_are_cut_off_are_refused(llama, tmp_path: Path):
    path = tiny_gguf.write(llama, tmp_path / "model.gguf", Type.Q8_0)
    whole, cut = path.read_bytes(), tmp_path / "cut.gguf"
    for size in (*range(0, 1200, 7), *range(1200, len(whole), 4999), len(whole) - 33):
        cut.write_bytes(whole[:size])
        with pytest.raises(ArtifactError, match=r"cut\.gguf.*download it again"):
            models.resolve(cut)


COUNTS = {  # {what: bytes that follow the magic}
    "tensors": struct.pack("<IQQ", 3, 1 << 62, 0),
    "values": struct.pack("<IQQ", 3, 0, 1 << 62),
    "a name": struct.pack("<IQQQ", 3, 0, 1, 1 << 62),
    "a text": struct.pack("<IQQQ1sIQ", 3, 0, 1, 1, b"a", 8, 1 << 62),
    "numbers": struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 0, 1 << 62),
    "texts": struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 8, 1 << 26),
    "lists in lists": struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"a", 9, 9, 1),
    "dimensions": struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"a", 1 << 30),
    "a version": struct.pack(">IQQ", 3, 0, 0),
    "a type": struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 77),
    "twice": struct.pack("<IQQ", 3, 0, 2) + 2 * struct.pack("<Q1sIB", 1, b"a", 0, 1),
}


@pytest.mark.parametrize("what", COUNTS)
def test_a_header_cannot_take_memory_or_time(what: str, tmp_path: Path):
    path = tmp_path / "hostile.gguf"
    path.write_bytes(b"GGUF" + COUNTS[what] + bytes(64))
    begun = time.thread_time()
    tracemalloc.start()
    with pytest.raises(ArtifactError, match=r"hostile\.gguf: no whole GGUF file \("):
        header.read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20 and time.thread_time() - begun < 1


def test_a_tensor_of_a_huge_shape_is_refused(llama, tmp_path: Path):
    path = tiny_gguf.write(llama, tmp_path / "model.gguf")
    data = path.read_bytes()
    at = data.index(b"blk.0.attn_k.weight") + len(b"blk.0.attn_k.weight") + 4
    path.write_bytes(data[:at] + struct.pack("<QQ", 1 << 40, 1 << 20) + data[at + 16 :])
    with pytest.raises(ArtifactError, match="self_attn.k_proj.weight ends at byte .* download it again"):
        models.resolve(path)


def test_tokens_are_those_of_transformers(llama, tmp_path: Path):
    path = tiny_gguf.write(llama, tmp_path / "model.gguf", **{"tokenizer.ggml.merges": ["1 2", "a b", "Ġ Ġ"]},
                           **{"tokenizer.ggml.tokens": [*tiny_gguf.bytes_to_unicode().values(), "12", "ab", "ĠĠ"]},
                           **{"llama.vocab_size": 259})  # fmt: skip
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ours = Encoder(path)
    assert ours.whole("ab 12") == theirs("ab 12").input_ids and len(ours.whole("ab 12")) == 3
    assert ours.bounded(["ab"]) == [[*theirs("ab").input_ids, 0]] and (ours.boundary, ours.size) == ("eos", 256)
    # SmolLM's digits are tokens of their own, which transformers' conversion leaves out
    path = tiny_gguf.write(llama, tmp_path / "digits.gguf", **{"tokenizer.ggml.merges": ["1 2", "a b"]},
                           **{"tokenizer.ggml.tokens": [*tiny_gguf.bytes_to_unicode().values(), "12", "ab"]},
                           **{"tokenizer.ggml.pre": "smollm"})  # fmt: skip
    assert len(Encoder(path).whole("ab 12")) == 4


def test_a_chat_model_in_a_gguf_file_is_asked_in_its_own_form(tmp_path: Path):
    llama = made("llama", **CASES["llama"][1])
    template = "{% for one in messages %}[{{ one.role }}]{{ one.content }}{% endfor %}[answer]"
    path = tiny_gguf.write(llama, tmp_path / "chat.gguf", tokenizer__chat_template=template)
    assert tasks.turn(path) == ("[user]", "[answer]")


def test_a_large_vocabulary_is_not_read_again_for_the_type_of_its_tokenizer(tmp_path: Path, monkeypatch):
    """transformers reads 262,144 tokens as numpy arrays of a byte or so each, minutes where processors are busy."""
    from transformers import modeling_gguf_pytorch_utils as slow

    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "a", "b", "ab", "\u2581", "\u2581ab", *(f"t{n}" for n in range(247))]
    path = tiny_gguf.write(
        made("gemma3_text", **CASES["gemma3_text"][1]), tmp_path / "model.gguf", tokenizer__ggml__model="llama",
        tokenizer__ggml__tokens=tokens, tokenizer__ggml__scores=[-float(n) for n in range(256)],
        tokenizer__ggml__token_type=[3, 3, 3, 2, *[1] * 252], tokenizer__ggml__bos_token_id=2,
        tokenizer__ggml__eos_token_id=1, tokenizer__ggml__unknown_token_id=3, tokenizer__ggml__padding_token_id=0,
    )  # fmt: skip
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name).backend_tokenizer.to_str()
    asked = []
    monkeypatch.setattr(slow, "load_gguf_checkpoint", lambda *given, **settings: asked.append(given))
    ours = tokenizer.whole(path)
    assert ours.backend_tokenizer.to_str() == theirs and not asked


def test_a_header_is_read_once_until_the_file_changes(llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A dry run asked for it seven times, and for a digest of the tokenizer three times."""
    path = tiny_gguf.write(llama, tmp_path / "model.gguf", Type.F16)
    opened, digested, read = [], [], header.files.opened
    monkeypatch.setattr(header.files, "opened", lambda path: (opened.append(path), read(path))[1])
    hashed = tokenizer.hashlib.sha256
    monkeypatch.setattr(tokenizer.hashlib, "sha256", lambda data: (digested.append(len(data)), hashed(data))[1])
    files = gguf.read(path, "tiny")
    assert files.names
    first, again = Encoder(path), Encoder(path)
    assert first.digest == again.digest and len(opened) == len(digested) == 1
    tiny_gguf.write(made(num_hidden_layers=3), path, Type.F16)
    assert len(gguf.read(path, "tiny").names) > len(files.names) and len(opened) == 2
    path.unlink()
    with pytest.raises(NotFound, match="no such file"):
        header.read(path)


def test_a_folder_of_a_gguf_file_says_what_to_give(llama, tmp_path: Path):
    tiny_gguf.write(llama, tmp_path / "model.gguf")
    with pytest.raises(ValueError, match=r"no config\.json; for its GGUF file give .*model\.gguf"):
        models.resolve(tmp_path)
    config = llama.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"no model\.safetensors .*; for its GGUF file give .*model\.gguf"):
        models.resolve(tmp_path)
    with pytest.raises(ValueError, match="revision 'v1' is of a model on the Hub, and .* is a file"):
        models.resolve(tmp_path / "model.gguf", "v1")


def test_from_a_file_to_a_cache(tmp_path: Path, kvq, capsys):
    """Fitted on a 4-bit file: its card says so, the same weights are silent, and the originals warn."""
    original = made()
    path = tiny_gguf.write(original, tmp_path / "Tiny.Q4_1.gguf", Type.Q4_1, **{"general.license": "mit"})
    text = tiny.text(tmp_path)
    given = ["--model", str(path), "--corpus", str(text), "--recipe", "aqua-2bit", "--samples", "3", "--held-out", "1"]
    assert calibrate.main([*given, "--seq-len", "192", "--dry-run"]) == 0
    assert "Q4_1, dequantized" in capsys.readouterr().out
    assert calibrate.main([*given, "--seq-len", "192", "--eval-windows", "1", "--also", "none", "--json"]) == 0
    capsys.readouterr()
    name = "tiny.q4_1-aqua-2bit"
    code, shown, _ = kvq("show", name, "--json")
    assert code == 0 and json.loads(shown)["provenance"]["quantization"] == "Q4_1"
    card = next((tmp_path / "kvq-home").rglob("README.md")).read_text()
    assert "license: mit" in card and "Q4_1, dequantized" in card and f'gguf_file = "{path.name}"' in card
    code, _, err = kvq(
        "eval", name, "--model", path, "--corpus", text, "--length", 192, "--windows", 1, "--also", "none"
    )
    assert code == 0, err
    assert "warning" not in err
    other = tiny_gguf.write(original, tmp_path / "original.gguf")
    code, _, err = kvq(
        "eval", name, "--model", other, "--corpus", text, "--length", 192, "--windows", 1, "--also", "none"
    )
    assert code == 0 and "warning: fingerprint: weights of layer" in err and "`kvq eval` on this model" in err
    other.unlink()
    served = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KVQCache.from_pretrained(name, model=served)
    with pytest.warns(
        UserWarning, match=r"differ by 0\.\d+ of their norm; .* 0.5 where either is quantized; .*kvq eval"
    ):
        KVQCache.from_pretrained(name, model=original)
    with pytest.raises(ArtifactError, match="weights of layer"):
        KVQCache.from_pretrained(name, model=made(seed=1))


def test_bytes_need_the_header_alone(llama, tmp_path: Path, as_json):
    path = tiny_gguf.write(llama, tmp_path / "model.gguf")
    row = as_json("bytes", "higgs-2bit", "--model", path, "--tokens", "1024")[0]
    assert row["GiB at 1024"] == round(1024 * 2 * 2 * 2 * 2 * 16 / (1 << 30), 3) and row["model"] == "model.gguf"
    path.write_bytes(path.read_bytes()[:5000])  # no tensor is there
    assert as_json("bytes", "higgs-2bit", "--model", path, "--tokens", "1024")[0] == row


def test_bytes_of_a_file_that_cannot_be_told_are_refused(llama, tmp_path: Path, kvq):
    """Layers that slide keep fewer tokens: taken for ones that attend to all, they would count too many bytes."""
    path = tmp_path / "model.gguf"
    assert kvq("bytes", "higgs-2bit", "--model", path)[::2] == (3, f"kvq: {path}: no such file\n")
    tiny_gguf.write(llama, path, **{"llama.attention.sliding_window": 4096})
    code, out, err = kvq("bytes", "higgs-2bit", "--model", path)
    assert (code, out) == (2, "") and "sliding_window=4096, and does not say which layers slide" in err
