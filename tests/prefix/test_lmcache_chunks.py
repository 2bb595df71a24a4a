"""Chunks as LMCache hands them out, without LMCache: a prefix's blocks, the recipe's bytes, no damaged ones."""

import json
import math
import shutil
from pathlib import Path

import feeding
import fitted
import pytest
import safetensors.torch
import torch
from kept_blocks import decoded, ids, recipe_of, rows, store
from torch import Tensor

from kvq_runtime.artifact import fingerprint
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.errors import ArtifactError
from kvq_runtime.geometry import Geometry
from kvq_runtime.prefix.lmcache_chunk import ChunkCodec, ChunkCodecs, read_settings
from kvq_runtime.recipe import preset
from kvq_runtime.vllm.served_recipe import ServedRecipe, model_config

SIZE, TOKENS, KEY = feeding.GEOMETRY, 64, b"a chunk"
FRAME = 700  # bytes of a block's file beside its fields, at most


def chunk_codec(name: str, shape=(2, 3, TOKENS, 64), seed: int = 0, dtype=torch.bfloat16, model="") -> ChunkCodec:
    recipe = recipe_of(name)
    return ChunkCodec(recipe, SIZE, fitted.tensors(recipe, SIZE, seed), shape, dtype, model)


def a_chunk(codec: ChunkCodec) -> Tensor:
    return torch.randn(codec._apart, generator=torch.Generator().manual_seed(0)).to(codec.codec.dtype)


def encoded(codec: ChunkCodec, chunk: Tensor, key: bytes = KEY) -> Tensor:
    data = torch.zeros(codec.bytes, dtype=torch.uint8)
    codec.encode(chunk, key, data)
    return data


@pytest.mark.parametrize("name", ["exact", "higgs-2bit", "kivi-2bit", "squat-2bit"])
def test_a_chunk_is_what_a_prefix_has_there(name: str, tmp_path: Path):
    """In the bytes that the recipe states, and headers; the exact first tokens of a prefix are encoded like others."""
    kept, size = store(tmp_path, name), 2 * store(tmp_path, name).block
    kept.put(ids(2 * size), *rows(2 * size))
    chunks = torch.stack([torch.stack(layers) for layers in rows(2 * size)]).flatten(3).split(size, 2)
    codec = chunk_codec(name, chunks[0].shape)
    for start, chunk in zip((0, size), chunks, strict=True):
        out = torch.empty_like(chunk)
        data = encoded(codec, chunk.contiguous())
        codec.decode(data, KEY, out)
        whole = decoded(kept, kept.load(ids(start + size), start), start)
        sinks = 0 if start else kept.codec.recipe.window.sinks
        for layer, pair in whole.items():
            for role, x_THD in enumerate(pair):
                assert torch.equal(out[role, layer][sinks:], x_THD.flatten(1)[sinks:]), (start, layer, role)
    fields = [field for pair in kept.load(ids(size))[0].fields.values() for part in pair for field in part.values()]
    packed = sum(field.numel() * field.itemsize for field in fields)
    assert 2 * packed < len(data) < 2 * (packed + FRAME)


def test_chunks_are_told_from_all_others():
    """Whatever is changed, cut, moved to another key, or written otherwise is an error."""
    codec = chunk_codec("squat-2bit")
    chunk = a_chunk(codec)
    data, out = encoded(codec, chunk), torch.empty_like(chunk)
    for place in [*range(0, 100, 3), len(data) // 2]:
        damaged = data.clone()
        damaged[place] ^= 1 << place % 8
        with pytest.raises(ArtifactError, match=r"^(header|chain|tokens|tensors|content): "):
            codec.decode(damaged, KEY, out)
    for count in (9, len(data) // 2):
        with pytest.raises(ArtifactError, match="^header: "):
            codec.decode(data[:count], KEY, out)
    with pytest.raises(ArtifactError, match="chain: "):
        codec.decode(data, b"another chunk", out)
    for other in (chunk_codec("squat-2bit", seed=1), chunk_codec("squat-2bit", model="m"), chunk_codec("kivi-2bit")):
        with pytest.raises(ArtifactError, match="^(chain|header): "):
            other.decode(torch.cat([data, data]), KEY, out)
    codec.decode(data, KEY, out)
    found = torch.empty_like(chunk)
    codec.decode(torch.cat([data.new_zeros(3), data, data])[3:], KEY, found)  # wherever in memory, whatever follows
    assert torch.equal(found, out)


def altered(codec: ChunkCodec, data: Tensor, alter) -> Tensor:
    """A chunk whose last block was altered, with its digest made again, as whoever may write to a tier can."""
    link, raw = codec._links(KEY)[-1], bytearray(data.numpy().tobytes())
    block = codec.codec.from_bytes(bytes(raw[-codec._block_bytes :]), link)
    alter(block)
    raw[-codec._block_bytes :] = codec.codec.to_bytes(block, link)
    return torch.frombuffer(raw, dtype=torch.uint8)


@pytest.mark.parametrize(("value", "message"), [
    (math.nan, r"finite: packed\.float16 has NaN"), (65504.0, f"finite: layer {SIZE.layers - 1} decodes to NaN"),
])  # fmt: skip
def test_a_chunk_with_a_scale_that_is_not_finite_or_overflows_is_not_decoded(value: float, message: str):
    codec = chunk_codec("rtn-2bit", dtype=torch.float16)
    chunk = a_chunk(codec)

    def alter(block) -> None:
        for scale in block.fields[SIZE.layers - 1][1].values():
            if scale.is_floating_point():
                scale.fill_(value)

    with pytest.raises(ArtifactError, match=message):
        codec.decode(altered(codec, encoded(codec, chunk), alter), KEY, torch.empty_like(chunk))


def test_what_cannot_be_kept_is_refused():
    codec = chunk_codec("rtn-2bit")
    chunk = a_chunk(codec)
    chunk[1, 1, 5, 3] = math.nan
    with pytest.raises(ValueError, match="NaN or infinity"):
        encoded(codec, chunk)
    with pytest.raises(ValueError, match="--chunk-size that 16 divides"):
        chunk_codec("rtn-2bit", (2, SIZE.layers, 50, SIZE.width))
    for dtype in (torch.uint8, torch.float8_e4m3fn, torch.float64):  # an fp8 cache is uint8 in vLLM
        with pytest.raises(ValueError, match="bfloat16, float16, float32 are kept"):
            chunk_codec("exact", dtype=dtype)


def codecs_of(name: str, whole: Geometry) -> ChunkCodecs:
    recipe, probes = feeding.small(preset(name), whole), dict[str, Tensor]()
    print_of = fingerprint.Fingerprint(whole, {"rope_type": "default", "rope_theta": 1e4}, False, probes)
    made = Artifact(recipe, print_of, fitted.tensors(recipe, whole), {}, {}) if recipe.fitted else None
    return ChunkCodecs(ServedRecipe(recipe, made, {} if made is None else made.tensors), whole)


def fuse(chunk: Tensor, size: int) -> Tensor:
    """Keys and values apart as vLLM has them, each head's key before its value."""
    heads = chunk.unflatten(-1, (-1, size))
    return torch.stack([torch.cat(list(heads[:, :, :, h]), -1) for h in range(heads.shape[3])], 2).flatten(2)


def test_each_worker_keeps_its_heads_in_every_layout():
    """What two ranks decode, side by side, is what one worker would; fused or apart, the bytes are the same."""
    whole = Geometry(2, 4, 32)
    codecs, chunk, shape = codecs_of("oscar-2bit", whole), torch.randn(2, 2, TOKENS, 128), (2, 2, TOKENS, 64)
    wanted, codec = torch.empty_like(chunk), codecs.codec(chunk.shape, torch.float32)
    codec.decode(encoded(codec, chunk), KEY, wanted)
    parts, files = [], []
    for rank, part in enumerate(chunk.chunk(2, -1)):
        apart, codec = torch.empty(shape), codecs.codec(shape, torch.float32, rank, 2)
        files.append(encoded(codec, part.contiguous()))
        codec.decode(files[-1], KEY, apart)
        parts.append(apart)
        for rows_LTW in (fuse(part, 32), fuse(part, 32)[None]):
            codec, out = codecs.codec(rows_LTW.shape, torch.float32, rank, 2), torch.empty_like(rows_LTW)
            assert torch.equal(encoded(codec, rows_LTW), files[-1])
            codec.decode(files[-1], KEY, out)
            assert torch.equal(out.view(rows_LTW.shape[-3:]), fuse(apart, 32))
    torch.testing.assert_close(torch.cat(parts, -1), wanted)
    with pytest.raises(ArtifactError, match="chain: "):
        codecs.codec(shape, torch.float32, 1, 2).decode(files[0], KEY, parts[0])


def test_chunks_of_other_shapes_are_refused():
    """Of some layers, as under pipeline parallelism, of other heads, and of no keys and values."""
    codecs = codecs_of("rtn-2bit", Geometry(4, 2, 32))
    for shape in [(2, 2, TOKENS, 64), (2, TOKENS, 128), (2, 4, TOKENS, 96), (3, 4, TOKENS, 64), (4, TOKENS * 64)]:
        with pytest.raises(ValueError, match="a chunk of shape|workers cannot share"):
            codecs.codec(shape, torch.bfloat16)
    for shape in [(4, TOKENS, 64), (1, 4, TOKENS, 64), (2, 4, TOKENS, 32)]:  # half the heads
        with pytest.raises(ValueError, match="a chunk of shape"):
            codecs.codec(shape, torch.bfloat16, 0, 1)
        assert codecs.codec(shape, torch.bfloat16, 1, 2).geometry == Geometry(4, 1, 32)


def test_another_model_of_the_same_name_is_told_by_its_files(demo_model: Path, tmp_path: Path):
    """A fine-tune, another RoPE or another quantization in the same folder."""
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(demo_model / file, tmp_path / file)
    settings = {"cache": "lloyd-3bit+key_bias=kept", "model": str(tmp_path)}
    models = [read_settings(settings).model, read_settings(settings).model]
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    safetensors.torch.save_file({name: x * 1.5 for name, x in weights.items()}, tmp_path / "model.safetensors")
    models.append(read_settings(settings).model)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": 1e3, "rope_parameters": None}))
    models.append(read_settings(settings).model)
    assert models[0] == models[1] and len({*models}) == 3


def test_settings_are_checked_before_anything_is_served(demo_model: Path, tmp_path: Path):
    demo, config = str(demo_model), model_config(str(demo_model), None)
    for served in ("kivi-4bit", "exact", "lloyd-3bit+key_bias=kept"):
        assert read_settings({"cache": served, "model": demo}).geometry == Geometry(6, 2, 64)
    sliding = {"model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"] * 3,
               "sliding_window": 64}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(dict(config) | sliding))
    for settings, message in [
        ({"model": demo}, "give cache and model"), ({"cache": 3, "model": demo}, "cache=3; give text"),
        ({"cache": "aqua-2bit", "model": demo}, "fitted"), ({"cache": "exact-pre", "model": demo}, "positions"),
        ({"cache": "lloyd-3bit", "model": demo}, "has a bias.*kivi-4bit.*lloyd-3bit.key_bias=kept"),
        ({"cache": "lloyd-3bit", "model": "no/such"}, "no config.json of no/such"),
        ({"cache": "lloyd-3bit", "model": str(tmp_path)}, "slide or recur"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message) as refused:
            read_settings(settings)
        assert str(refused.value).startswith('serde "kvq": ')
