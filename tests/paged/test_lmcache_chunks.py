"""Chunks as LMCache hands them out, without LMCache: a prefix's blocks, the recipe's bytes, no damaged ones."""

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import feeding
import fitted
import kept_blocks
import mutate
import pytest
import safetensors.torch
import torch
from torch import Tensor

from kvq_runtime.artifact import artifact, fingerprint, recipe_text
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.codec import codec as codecs
from kvq_runtime.codec import shared
from kvq_runtime.codec.codec import Context
from kvq_runtime.engines.served_recipe import Source
from kvq_runtime.errors import ArtifactError
from kvq_runtime.geometry import Geometry
from kvq_runtime.lmcache.chunk import LMCACHE, ChunkCodec, Chunks, Settings, read_settings
from kvq_runtime.prefix.block_file import Block
from kvq_runtime.recipe import preset

SIZE = Geometry(2, 2, 32)
TOKENS = 64
KEY = b"a chunk"
FRAME = 700  # bytes of a block's file beside its fields, at most
RECIPES = [
    "exact", "rtn-2bit", "quarot-2bit", "higgs-2bit", "higgs-head-3bit", "turboquant-3bit", "lloyd-2bit", "polar-3bit",
    "lloyd-3bit+value.quantize.bits=2", "oscar-2bit",
    "kivi-2bit-r32", "squat-2bit+window.block=32",
]  # fmt: skip


def _tensors(name: str, size: Geometry, seed: int = 0) -> Mapping[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    specs = codecs.all_specs(recipe_text.read(name), size)
    return {name: torch.randn(shape, generator=random).to(dtype) for name, (shape, dtype) in specs.items()}


def _codec(name: str, tokens: int = TOKENS, size: Geometry = SIZE, seed: int = 0, dtype=torch.bfloat16) -> ChunkCodec:
    recipe = recipe_text.read(name)
    LMCACHE.check(recipe, size)
    return ChunkCodec(recipe, size, _tensors(name, size, seed), tokens, dtype)


def _kept(codec: ChunkCodec, chunk: Tensor, key: bytes = KEY, start: int = 0) -> Tensor:
    data = torch.zeros(codec.bytes, dtype=torch.uint8)
    codec.encode(chunk, key, data, start)
    return data


@pytest.mark.parametrize("name", RECIPES)
def test_a_chunk_is_what_its_blocks_are(name: str):
    """Encoded and decoded by each layer's codecs as they are; in the bytes that the recipe states, and headers."""
    codec, recipe = _codec(name), recipe_text.read(name)
    chunk = torch.randn(codec.shape_2LTC).to(codec.dtype)
    data = _kept(codec, chunk)
    found = torch.empty_like(chunk)
    codec.decode(data, KEY, found)
    block = recipe.window.block if TOKENS % recipe.window.block == 0 else TOKENS
    bits = 0.0
    for layer, pair in enumerate(shared.build(codec.recipe, SIZE, _tensors(name, SIZE))):
        for role, one in enumerate(pair):
            fields = one.encode(chunk[role, layer].unflatten(0, (-1, block)), Context())
            wanted = one.restore(one.decode(fields, Context()), Context())
            assert torch.equal(found[role, layer], wanted.flatten(0, 1).to(codec.dtype))
            bits += one.bits(codec.dtype) * TOKENS * SIZE.width
    assert bits / 8 < len(data) < bits / 8 + FRAME * TOKENS / block


PLACED = ("aqua-2bit", "exact-pre", "mean-higgs-2bit", "squat-pre-2bit", "svdq-2bit")


@pytest.mark.parametrize("name", kept_blocks.each(PLACED))
def test_a_chunk_that_knows_its_place_is_what_a_prefix_has_there(name: str):
    """Before RoPE, across layers, coded: of the text's first tokens, some of which stay exact, and of later ones."""
    kept = kept_blocks.store(name=name)
    size = 2 * kept.block
    tokens, (keys, values) = kept_blocks.ids(3 * size), kept_blocks.rows(3 * size)
    assert kept.put(tokens, keys, values) == 3 * size
    recipe, geometry = kept.format.recipe, kept.format.geometry
    codec = ChunkCodec(recipe, geometry, fitted.tensors(recipe, geometry), size, torch.bfloat16, feeding.rotary())
    chunks = torch.stack([torch.stack(keys), torch.stack(values)]).flatten(3).split(size, 2)
    for number, chunk in enumerate(chunks):
        out = torch.empty_like(chunk)
        start = number * size if "positions" in recipe.needs else 0
        data = _kept(codec, chunk.contiguous(), start=start)
        codec.decode(data, KEY, out)
        blocks = kept.load(tokens)[2 * number : 2 * number + 2]
        for layer, *pair in kept.decode(blocks, start=number * size):
            for role, x_THD in enumerate(pair):
                assert torch.equal(out[role, layer], x_THD.flatten(1)), (number, layer, role)
    if "positions" in recipe.needs:
        with pytest.raises(ValueError, match=f"start=1; {name} encodes blocks of {kept.block} tokens"):
            _kept(codec, chunks[0].contiguous(), start=1)


def test_chunks_are_told_from_all_others():
    """Whatever is changed, cut, moved to another key, or written otherwise is an error, and nothing is decoded."""
    codec = _codec("oscar-2bit")
    chunk = torch.randn(codec.shape_2LTC).to(codec.dtype)
    data = _kept(codec, chunk)
    out = torch.full_like(chunk, 7.0)
    for place in [*range(100), len(data) // 2]:
        damaged = data.clone()
        damaged[place] ^= 1 << place % 8
        with pytest.raises(ArtifactError, match=r"^(header|size|chain|tensors|content): "):
            codec.decode(damaged, KEY, out)
    with pytest.raises(ArtifactError, match="size: .* cut off"):
        codec.decode(data[: len(data) // 2], KEY, out)
    with pytest.raises(ArtifactError, match="header: this is no chunk"):
        codec.decode(data[:9], KEY, out)
    with pytest.raises(ArtifactError, match="chain: the file is of another place"):
        codec.decode(data, b"another chunk", out)
    for other in (_codec("oscar-2bit", seed=1), _codec("oscar-2bit+value.rotate.metric=output")):
        with pytest.raises(ArtifactError, match="chain: of another recipe, artifact"):
            other.decode(torch.cat([data, data]), KEY, out)
    assert bool((out == 7.0).all())
    codec.decode(torch.cat([data, data]), KEY, out)  # what is behind it does not matter
    found = torch.empty_like(chunk)
    codec.decode(torch.cat([data.new_zeros(3), data])[3:], KEY, found)  # nor where in memory it begins
    assert torch.equal(found, out)


def _altered(codec: ChunkCodec, data: Tensor, alter: Callable[[Block], object]) -> Tensor:
    """A chunk with its digests made again, as whoever may write to a tier can."""
    first, blocks = codec._blocks(data.numpy().data, KEY)
    alter(blocks[-1])
    return torch.frombuffer(codec._framed(blocks, KEY, first), dtype=torch.uint8)


def _scales(block: Block, layer: int, role: int) -> list[Tensor]:
    return [field for field in block.fields[layer][role].values() if field.is_floating_point()]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_chunk_with_a_scale_that_is_not_finite_is_not_decoded(value):
    codec = _codec("rtn-2bit")
    chunk = torch.randn(codec.shape_2LTC).to(codec.dtype)
    out = torch.full_like(chunk, 7.0)
    data = _altered(codec, _kept(codec, chunk), lambda block: _scales(block, 0, 0)[0].view(-1)[1:2].fill_(value))
    with pytest.raises(ArtifactError, match=r"finite: packed\.float16 has NaN or infinity"):
        codec.decode(data, KEY, out)
    assert bool((out == 7.0).all())


@pytest.mark.parametrize("name", ["rtn-2bit", "higgs-2bit", "kivi-2bit-r32"])
def test_a_chunk_with_a_scale_that_overflows_is_not_decoded(name):
    """A finite scale, of the last layer's values: nothing of the layers before it is written either."""
    codec = _codec(name, dtype=torch.float16)
    chunk = torch.randn(codec.shape_2LTC).to(codec.dtype)

    def alter(block: Block) -> None:
        for scale in _scales(block, 1, 1):
            scale.fill_(torch.finfo(scale.dtype).max)

    data, out = _altered(codec, _kept(codec, chunk), alter), torch.full_like(chunk, 7.0)
    with pytest.raises(ArtifactError, match="finite: layer 1 decodes to NaN or infinity"):
        codec.decode(data, KEY, out)
    assert bool((out == 7.0).all())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_no_mutant_of_a_chunk_decodes_to_what_is_not_finite(dtype):
    """300 changes of bytes, half with the digests made again: refused, the same, or finite numbers."""
    codecs = [_codec(name, dtype=dtype) for name in RECIPES]
    kept = [_kept(codec, torch.randn(codec.shape_2LTC).to(codec.dtype)) for codec in codecs]
    counts = Counter()
    for number in range(300):
        draw = random.Random(number)
        place = draw.randrange(len(codecs))
        codec, good = codecs[place], kept[place]

        def alter(block: Block, draw=draw) -> None:
            fields = block.fields[draw.randrange(2)][draw.randrange(2)]
            bytes_X = fields[draw.choice(sorted(fields))].view(-1).view(torch.uint8)
            start = draw.randrange(len(bytes_X))
            fill = draw.choice((b"\x00\x7c", b"\xff\x7b", b"\x80\x7f", b"\xff", draw.randbytes(8))) * 400
            stop = min(len(bytes_X), start + draw.choice((1, 8, 400)))
            bytes_X[start:stop] = torch.frombuffer(bytearray(fill[: stop - start]), dtype=torch.uint8)

        if number % 2:
            data = _altered(codec, good, alter)
        else:
            data = mutate.some_bytes(good.numpy().tobytes(), kept[place - 1].numpy().tobytes(), draw)
            data = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
        out = torch.full(codec.shape_2LTC, 7.0).to(codec.dtype)
        try:
            codec.decode(data, KEY, out)
        except ArtifactError:
            counts["refused"] += 1
            assert bool((out == 7.0).all()), number
            continue
        same = torch.equal(data[: len(good)], good)
        counts["same" if same else "decoded"] += 1
        assert same or number % 2, "bytes were changed, and the digest did not tell"
        assert bool(out.isfinite().all()), f"{number}: {codec.recipe.name}"
    assert counts["refused"] > 100 and counts["decoded"] > 50


def test_what_is_not_finite_is_not_kept():
    codec = _codec("rtn-4bit")
    chunk = torch.randn(codec.shape_2LTC).to(codec.dtype)
    chunk[1, 1, 5, 3] = math.nan
    with pytest.raises(ValueError, match="NaN or infinity"):
        _kept(codec, chunk)
    with pytest.raises(ValueError, match="a chunk of .* for a codec of"):
        _kept(codec, chunk[:, :1])


def test_what_waits_for_a_prompt_is_refused_with_the_nearest_that_does_not():
    with pytest.raises(ValueError, match="waits for a") as refused:
        LMCACHE.check(recipe := recipe_text.read("polar-online"), Geometry(28, 4, 128))
    assert f"LMCache's chunks cannot be kept by {recipe.name}: " in str(refused.value)
    near = str(refused.value).partition("keep them by is ")[2].partition(",")[0]
    LMCACHE.check(preset(near), Geometry(28, 4, 128))


def test_chunks_of_any_length_where_tokens_are_rounded_alone():
    """Else a chunk is whole blocks, and what says so names the option."""
    codec = _codec("lloyd-3bit", tokens=50)
    chunk = torch.randn(codec.shape_2LTC).to(codec.dtype)
    found = torch.empty_like(chunk)
    codec.decode(_kept(codec, chunk), KEY, found)
    assert (found - chunk).norm() < 0.3 * chunk.norm()
    with pytest.raises(ValueError, match="--chunk-size that 32 divides"):
        _codec("kivi-2bit-r32", tokens=50)


def _artifact(name: str, size: Geometry) -> Artifact:
    probes = {name: torch.randn(shape).to(dtype) for name, (shape, dtype) in fingerprint.specs(size).items()}
    print_of = fingerprint.Fingerprint(size, {"rope_type": "default", "rope_theta": 1e4}, False, probes)
    return Artifact(preset(name), print_of, _tensors(name, size), {}, {})


def test_each_worker_keeps_its_own_heads():
    """Tensor parallelism: what ranks decode, side by side, is what one worker would, by an artifact of all heads."""
    whole = Geometry(2, 4, 32)
    fitted = _artifact("oscar-2bit", whole)
    chunks = Chunks(Settings(Source("mine", fitted.recipe, fitted), whole, 32, 1))
    codec = chunks.codec((2, 2, TOKENS, whole.width), torch.float32)
    chunk = torch.randn(codec.shape_2LTC)
    wanted, parts = torch.empty_like(chunk), []
    codec.decode(_kept(codec, chunk), KEY, wanted)
    for rank, part in enumerate(chunk.chunk(2, -1)):
        own = chunks.codec(tuple(part.shape), torch.float32, rank, 2)
        parts.append(torch.empty_like(part))
        own.decode(_kept(own, part.contiguous()), KEY, parts[-1])
    torch.testing.assert_close(torch.cat(parts, -1), wanted)
    one, other = (chunks.codec((2, 2, TOKENS, whole.width // 2), torch.float32, rank, 2) for rank in range(2))
    with pytest.raises(ArtifactError, match="chain: "):
        other.decode(_kept(one, chunk[..., : whole.width // 2].contiguous()), KEY, torch.empty_like(parts[0]))


def test_fused_keys_and_values_are_the_same_bytes_as_those_apart():
    """As vLLM has them, a head's key before its value: by an artifact, of one worker and of each of two."""
    whole = Geometry(2, 4, 32)
    fitted = _artifact("oscar-2bit", whole)
    chunks = Chunks(Settings(Source("mine", fitted.recipe, fitted), whole, 32, 1))
    apart = torch.randn(2, 2, TOKENS, whole.width)
    for rank, ranks in [(0, 1), (0, 2), (1, 2)]:
        part = apart.chunk(ranks, -1)[rank].contiguous()
        heads = part.unflatten(-1, (-1, 32))
        rows = torch.stack([torch.cat(list(heads[:, :, :, h]), -1) for h in range(heads.shape[3])], 2).flatten(2)
        for chunk in (rows, rows[None]):
            codec = chunks.codec(tuple(chunk.shape), torch.float32, rank, ranks)
            data = _kept(codec, chunk)
            assert torch.equal(data, _kept(chunks.codec(tuple(part.shape), torch.float32, rank, ranks), part))
            out = torch.full_like(chunk, 7.0)
            codec.decode(data, KEY, out)
            wanted = torch.empty_like(part)
            codec.decode(data, KEY, wanted)
            heads = wanted.unflatten(-1, (-1, 32))
            rows = torch.stack([torch.cat(list(heads[:, :, :, h]), -1) for h in range(heads.shape[3])], 2).flatten(2)
            assert torch.equal(out.view_as(rows), rows)


def test_chunks_that_an_artifact_says_nothing_of_are_refused():
    whole = Geometry(4, 2, 32)
    fitted = _artifact("oscar-2bit", whole)
    chunks = Chunks(Settings(Source("mine", fitted.recipe, fitted), whole, 32, 1))
    for shape, message in [
        ((2, 2, TOKENS, 64), "pipeline parallelism"), ((2, TOKENS, 128), "pipeline parallelism"),
        ((2, 4, TOKENS, 96), "96 channels"), ((2, 8, TOKENS, 64), "8 layers"), ((3, 4, TOKENS, 64), "attention"),
        ((4, TOKENS * 64), "attention"), ((2, 1, 4, TOKENS, 64), "attention"), ((4, TOKENS, 96), "fused keys and"),
        ((4, TOKENS, 576), "288 channels"), ((1, 4, TOKENS, 576), "288 channels"), ((2, 4, TOKENS, 48), "48 is no"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            chunks.codec(shape, torch.bfloat16)
    for shape in [(4, TOKENS, 64), (1, 4, TOKENS, 64), (2, 4, TOKENS, 32)]:  # half the heads
        with pytest.raises(ValueError, match="a chunk of 1 heads where 1 workers have 2 each"):
            chunks.codec(shape, torch.bfloat16, 0, 1)
        assert chunks.codec(shape, torch.bfloat16, 1, 2).geometry == Geometry(4, 1, 32)
    alike = Chunks(Settings(Source("lloyd-3bit", preset("lloyd-3bit"), None), whole, 32, 1))
    assert alike.codec((2, 2, TOKENS, 64), torch.bfloat16).geometry == Geometry(2, 2, 32)
    assert alike.codec((2, TOKENS, 128), torch.bfloat16, 1, 2).geometry == Geometry(2, 2, 32)
    by_layer = preset("lloyd-3bit").with_schemes(0, *preset("lloyd-2bit").at(0))
    unlike = Chunks(Settings(Source("mine", by_layer, None), whole, 32, 1))
    with pytest.raises(ValueError, match="pipeline parallelism"):
        unlike.codec((2, 2, TOKENS, 64), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float64])
def test_numbers_that_are_not_16_or_32_bits_wide_are_refused(dtype: torch.dtype):
    """An fp8 cache is uint8 in vLLM: no numbers, though they could be rounded."""
    for name in ("lloyd-3bit", "exact"):
        chunks = Chunks(read_settings({"cache": name, "head_size": 64}))
        with pytest.raises(ValueError, match="bfloat16, float16, float32 are kept: .* not in fp8"):
            chunks.codec((2, 4, 128, 128), dtype)


def test_layers_that_slide_are_not_taken_for_those_that_do_not(demo_model: Path, tmp_path: Path):
    """LMCache has chunks of three of either: what treats all alike keeps them, all else is refused at the start."""
    kinds = ["sliding_attention", "full_attention"] * 3
    config = json.loads((demo_model / "config.json").read_text()) | {"model_type": "gemma3_text", "sliding_window": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | {"layer_types": kinds}))
    model = str(tmp_path)
    for name in ("lloyd-3bit", "kivi-2bit"):
        chunks = Chunks(read_settings({"cache": name, "model": model}))
        for layers in (1, 3, 6):
            assert chunks.codec((2, layers, 256, 128), torch.bfloat16).geometry == Geometry(layers, 2, 64)
        with pytest.raises(ValueError, match="a chunk of 7 layers .*; the model has 3 layers .*, and 3 that slide"):
            chunks.codec((2, 7, 256, 128), torch.bfloat16)
    shape = Geometry(3, 2, 64)
    (tmp_path / "model.safetensors").symlink_to(demo_model / "model.safetensors")
    weights = safetensors.torch.load_file(demo_model / "model.safetensors")
    ours = fingerprint.from_config(
        config | {"layer_types": kinds}, lambda n, name: weights[f"model.layers.{n}.self_attn.{name}.weight"]
    )
    path = str(tmp_path / "mine.safetensors")
    artifact.save(Artifact(preset("oscar-2bit"), ours, _tensors("oscar-2bit", shape), {}, {}), path)
    for name in ("exact-pre", path):
        with pytest.raises(
            ValueError, match="3 layers of .* slide, and LMCache does not say which layers a chunk is of"
        ):
            read_settings({"cache": name, "model": model})


def test_latents_are_not_taken_for_fused_heads(demo_model: Path, tmp_path: Path):
    """By the model's configuration where it is named; where it is not, one row of a token may be either."""
    config = json.loads((demo_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"kv_lora_rank": 48}))
    with pytest.raises(ValueError, match="kv_lora_rank says that it caches otherwise"):
        read_settings({"cache": "lloyd-3bit", "model": str(tmp_path)})
    chunks = Chunks(read_settings({"cache": "lloyd-3bit", "head_size": 64}))
    assert chunks.codec((2, 4, TOKENS, 128), torch.bfloat16).geometry == Geometry(4, 2, 64)
    for shape in [(4, TOKENS, 512), (1, 4, TOKENS, 512)]:
        with pytest.raises(ValueError, match='give the serde "model" in its place'):
            chunks.codec(shape, torch.bfloat16)


def test_settings_are_checked_before_anything_is_served(demo_model: Path, tmp_path: Path):
    """A recipe and a model, or a head's size; an artifact and its own model."""
    demo = str(demo_model)
    assert read_settings({"cache": "lloyd-3bit", "model": demo}).geometry == Geometry(6, 2, 64)
    assert read_settings({"cache": "lloyd-3bit", "head_size": 64, "workers": 2}).workers == 2
    turned = read_settings({"cache": "exact-pre", "model": demo}).rotary
    assert turned is not None and len(turned.frequencies_K) == 32
    config = json.loads((demo_model / "config.json").read_text())
    weights = safetensors.torch.load_file(demo_model / "model.safetensors")
    ours = fingerprint.from_config(config, lambda n, name: weights[f"model.layers.{n}.self_attn.{name}.weight"])
    path = str(tmp_path / "mine.safetensors")
    artifact.save(Artifact(preset("oscar-2bit"), ours, _tensors("oscar-2bit", ours.geometry), {}, {}), path)
    found = read_settings({"cache": path, "model": demo})
    assert found.source.recipe.name == "oscar-2bit" and found.geometry == Geometry(6, 2, 64)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5, "rope_parameters": None}))
    for given, message in [
        ({"model": demo}, 'give "cache"'), ({"cache": "lloyd-3bit"}, "one of them"),
        ({"cache": "lloyd-3bit", "model": demo, "head_size": 64}, "one of them"),
        ({"cache": "lloyd-3bit", "modle": demo}, r"unknown settings \['modle'\]"),
        ({"cache": "lloyd-3bit", "head_size": "64"}, "head_size='64'; give a whole number"),
        ({"cache": "exact-pre", "head_size": 64}, 'exact-pre undoes RoPE; give "model"'),
        ({"cache": 3, "model": demo}, "cache=3; give text"), ({"cache": path, "head_size": 64}, "an artifact is"),
        ({"cache": "no-such-name", "model": demo}, "no-such-name"), ({"cache": "oscar-2bit", "model": demo}, "fitted"),
        ({"cache": "lloyd-3bit", "model": "no/such"}, "no config.json of no/such"),
        ({"cache": path, "model": str(tmp_path / "other")}, "rope is .* in the model"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message) as refused:
            read_settings(given)
        assert str(refused.value).startswith('serde "kvq": ')
