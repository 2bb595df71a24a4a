"""Models whose files hold quantized weights: read as the packages that write them dequantize them, and calibrated.

`packed_weights.safetensors` has weights as compressed-tensors 0.20.0 and bitsandbytes 0.50.2 pack them, and as they
unpack them again.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from architectures import random
from models import prompt
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kvq_calib.evaluate import errors
from kvq_calib.model import find as models
from kvq_calib.model import supported
from kvq_calib.model.packed import PackedFiles
from kvq_calib.model.streamed import Stream
from kvq_calib.run import calibrate as runs
from kvq_calib.run import plan as plans
from kvq_calib.run.run import Run
from kvq_calib.text import corpus
from kvq_runtime.errors import ArtifactError
from kvq_runtime.hf import KVQCache, fingerprint_of
from kvq_runtime.recipe import preset

GOLDEN = load_file(Path(__file__).parent / "packed_weights.safetensors")
CASES = sorted({name.split(".")[0] for name in GOLDEN})
NAME = "model.layers.0.mlp.up_proj"
BITS = {"int4-group": 4, "int4-zero": 4, "int8-channel-packed": 8}
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def files_of(folder: Path, tensors: dict[str, torch.Tensor], bits: int = 4) -> PackedFiles:
    save_file(tensors, folder / "model.safetensors")
    groups = {"group_0": {"weights": {"num_bits": bits}}}
    config = {"architectures": ["LlamaForCausalLM"], "quantization_config": {"config_groups": groups}}
    return PackedFiles(folder, "packed", None, config)


@pytest.mark.parametrize("case", CASES)
def test_weights_are_what_their_package_makes_of_them(case, tmp_path):
    parts = {name.removeprefix(f"{case}."): x for name, x in GOLDEN.items() if name.startswith(f"{case}.")}
    expected = parts.pop("expected")
    files = files_of(tmp_path, {f"{NAME}.{part}": x for part, x in parts.items()}, BITS.get(case, 4))
    assert list(files.names) == [f"{NAME}.weight"]
    found = files.copied(f"{NAME}.weight", torch.device("cpu"), torch.float32)
    rounded = case.startswith("bnb") and "int8" not in case  # to bfloat16, in which it was packed
    torch.testing.assert_close(found, expected, rtol=2**-8 if rounded else 1e-6, atol=0)
    stored = files._stored(f"{NAME}.weight")
    assert stored.shape == tuple(expected.shape) and files._bytes(f"{NAME}.weight") == 2 * expected.numel()


def test_damaged_parts_are_named(tmp_path):
    parts = {f"{NAME}.weight_packed": GOLDEN["int4-group.weight_packed"], f"{NAME}.weight_scale": torch.ones(16, 3)}
    files = files_of(tmp_path, parts)
    with pytest.raises(ArtifactError, match=rf"{NAME}.weight cannot be dequantized: .*; download it again"):
        files.copied(f"{NAME}.weight", torch.device("cpu"), torch.float32)
    (tmp_path / "alone").mkdir()
    with pytest.raises(ArtifactError, match="has scale and no codes"):
        files_of(tmp_path / "alone", {f"{NAME}.weight_scale": torch.ones(8, 1)}).copied(
            f"{NAME}.weight", torch.device("cpu"), torch.float32
        )


def fp8(weight: torch.Tensor, block: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in blocks of `block` x `block`, and their scales."""
    rows, columns = (-(-size // block) for size in weight.shape)
    padded = torch.zeros(rows * block, columns * block)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    tiles = padded.view(rows, block, columns, block)
    scale = tiles.abs().amax((1, 3)).clamp_min(1e-6) / 448
    codes = (tiles / scale[:, None, :, None]).view_as(padded)[: weight.shape[0], : weight.shape[1]]
    return codes.contiguous().to(torch.float8_e4m3fn), scale


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts [E, columns, rows] as bytes [E, rows, groups, 16] and exponents [E, rows, groups]."""
    groups = weight.mT.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1).clamp_min(1e-20) / 6).log2().ceil()
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (scaled < 0)
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8), (exponents + 127).to(torch.uint8)


@pytest.fixture(scope="module", params=["fp8", "mxfp4", "qwen3_moe"])
def quantized(request, tmp_path_factory):
    """A small model's folder, its weights in that format."""
    kind = {"fp8": "llama", "mxfp4": "gpt_oss"}.get(request.param, request.param)
    folder = tmp_path_factory.mktemp(request.param)
    random(kind).save_pretrained(folder)
    tensors, made = load_file(folder / "model.safetensors"), {}
    for name, x in tensors.items():
        if kind == "gpt_oss" and name.endswith(("gate_up_proj", "down_proj")):
            made[f"{name}_blocks"], made[f"{name}_scales"] = mxfp4(x)
        elif kind != "gpt_oss" and name.endswith("proj.weight"):
            made[name], made[f"{name}_scale_inv"] = fp8(x)
        else:
            made[name] = x
    save_file(made, folder / "model.safetensors")
    method = "mxfp4" if kind == "gpt_oss" else "fp8"
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "weight_block_size": [32, 32]}
    (folder / "config.json").write_text(json.dumps(config))
    return SimpleNamespace(folder=folder, method=method, stored=made, before=tensors)


def test_formats_of_models_are_read_as_transformers_does(quantized):
    files = models.resolve(quantized.folder)
    assert isinstance(files, PackedFiles) and files.quantization == quantized.method
    count = 0
    for name in files.names:
        found = files.copied(name, torch.device("cpu"), torch.float32)
        if f"{name}_blocks" in quantized.stored:
            parts = (quantized.stored[f"{name}_{part}"] for part in ("blocks", "scales"))
            expected = convert_moe_packed_tensors(*parts, dtype=torch.float32)
        elif f"{name}_scale_inv" in quantized.stored:
            parts = (quantized.stored[f"{name}{end}"] for end in ("", "_scale_inv"))
            expected = Fp8Dequantize(None)._dequantize_one(*parts, torch.float32)
        else:
            assert torch.equal(found, quantized.stored[name])
            continue
        count += 1
        torch.testing.assert_close(found, expected.float(), rtol=2**-8, atol=0)
        assert 0 < float((found - quantized.before[name]).norm() / found.norm()) < 0.2
    assert count >= 6


def test_they_are_calibrated_as_served(quantized, tmp_path, monkeypatch):
    files, ids = models.resolve(quantized.folder), prompt(1, 256, seed=1)
    monkeypatch.setattr(corpus, "select", lambda *given: SimpleNamespace(tokens_BT=ids, description={"source": "x"}))
    plan = plans.make(files, [preset("aqua-2bit")], "demo", samples=1, seq_len=256, held_out=0)
    artifact = runs.calibrate(Run(plan, files, tmp_path / "run"))["aqua-2bit"]
    model = files.model(torch.float32).eval()
    assert files.fingerprint().quantized and fingerprint_of(model).geometry == files.geometry
    stream, h = Stream(files, dtype=torch.float32), None
    h = stream.embed(ids)
    for layer in range(stream.layers):
        h = stream.layer(layer).forward(h).h_BTE
    with torch.no_grad():
        expected = model(ids).logits
    torch.testing.assert_close(stream.head()(h), expected, rtol=0, atol=1e-3 * float(expected.std()))
    cache = KVQCache.from_artifact(artifact, model)
    out = model.generate(ids, past_key_values=cache, max_new_tokens=2, do_sample=False, pad_token_id=1)
    assert out.shape == (1, 258)
    rows = errors.by_layer(stream, ids, {"aqua": (artifact.recipe, artifact.tensors)})["aqua"]
    assert all(0 < row["attention_error_encoded"] < 0.5 for row in rows)


def test_other_methods_are_refused(tmp_path):
    random("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.qweight"] = tensors.pop("model.layers.0.self_attn.q_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match="quantized weights, by gptq; kvq reads those by fp8, .*: calibrate the 16-bit"
    ):
        models.resolve(tmp_path)
    config["quantization_config"]["quant_method"] = "compressed-tensors"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"in a form that kvq does not read \(.*q_proj.qweight\); calibrate the 16-bit"
    ):
        models.resolve(tmp_path)


def test_scales_of_other_forms(tmp_path):
    """Exponents in bytes; blocks that do not divide; a matrix without its scale, which is refused."""
    codes = torch.randn(20, 40, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    cpu, name = torch.device("cpu"), f"{NAME}.weight"
    exponents = torch.arange(120, 120 + 6, dtype=torch.uint8).view(2, 3)
    blocks = {"config_groups": {"a": {"weights": {"block_structure": [16, 16]}}}}
    save_file({name: codes, f"{name}_scale": exponents}, tmp_path / "model.safetensors")
    files = PackedFiles(tmp_path, "x", None, {"quantization_config": blocks})
    wide = (exponents.float() - 127).exp2().repeat_interleave(16, 0)[:20].repeat_interleave(16, 1)[:, :40]
    assert torch.equal(files.copied(name, cpu, torch.float32), codes.float() * wide)
    with pytest.raises(ArtifactError, match="3 scales of 40 rows or columns, in blocks of None"):
        PackedFiles(tmp_path, "x", None, {"quantization_config": {}}).copied(name, cpu, torch.float32)
    save_file({f"{NAME}s": codes, f"{NAME}s_scale_inv": torch.full((1, 1), 2.0)}, tmp_path / "model.safetensors")
    fused = PackedFiles(tmp_path, "x", None, {"quantization_config": {}})
    assert torch.equal(fused.copied(f"{NAME}s", cpu, torch.float32), codes.float() * 2)
    save_file({name: codes}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="in F8_E4M3 without a scale that kvq knows; calibrate the 16-bit model"):
        PackedFiles(tmp_path, "x", None, {"quantization_config": {}}).copied(name, cpu, torch.float32)


@pytest.mark.parametrize("given, why", [
    ({"transform_config": {"config_groups": {"R1": {}}}}, "has rotated weights, which kvq does not read"),
    ({"format": "nvfp4-pack-quantized"}, "has weights in the form nvfp4-pack-quantized"),
])  # fmt: skip
def test_forms_that_are_not_read_are_refused(given, why, tmp_path):
    config = {"architectures": ["LlamaForCausalLM"]}
    files = PackedFiles(
        tmp_path, "x", None, config | {"quantization_config": {"quant_method": "compressed-tensors"} | given}
    )
    with pytest.raises(ValueError, match=why):
        supported.check(files)
