"""A real LMCache on a CPU: chunks stored in its file tier, and loaded by another process. `make test-lmcache`."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("lmcache", reason="LMCache is in an environment of its own: make test-lmcache")

import torch
from lmcache.v1.multiprocess.modules.lmcache_driven_transfer import get_layout_desc
from lmcache.v1.multiprocess.transfer_context import (
    compute_kv_layout,
    gather_paged_kv_to_cpu,
    scatter_cpu_to_paged_kv,
)
from lmcache.v1.platform.devices.cpu import cache_context
from lmcache_tier import PATIENCE, Tier, keys

import kvq_runtime.prefix.lmcache  # noqa: F401  its log is caught from the first test on
from kvq_runtime.codec import shared
from kvq_runtime.codec.codec import Context
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import preset

ROOT = Path(__file__).parents[2]
SIZE = Geometry(6, 2, 64)  # the embedded model's
SHAPE = (2, SIZE.layers, 256, SIZE.width)
NAMES = keys("a text", 3)
FRAME = 1400  # bytes of a chunk of two blocks beside their fields, at most
STORE = """
import json, sys, torch
from pathlib import Path
from lmcache_tier import Tier, keys
folder = Path(sys.argv[1])
with Tier(folder, json.loads(sys.argv[2])) as tier:
    tier.put(keys("a text", 3), torch.load(folder / "chunks.pt"))
"""  # in another process

PAGE, PAGES = 128, 8
# What an engine registers of each layer, its `kv_layout`, and the shape LMCache makes of a chunk where the engine moves
# it. The first two are vLLM's, of a GPU and of a CPU.
LAYOUTS = {
    "fused, tokens first": ((PAGES, PAGE, 2, 128), "NHD", (6, 256, 256)),
    "fused, heads first": ((PAGES, 2, PAGE, 128), "HND", (6, 256, 256)),
    "apart, tokens first": ((2, PAGES, PAGE, 2, 64), "NHD", SHAPE),
    "apart in a page, heads first": ((PAGES, 2, 2, PAGE, 64), "HND", SHAPE),
}


def serde(recipe: str) -> dict:
    return {"type": "kvq", "cache": f"{recipe}+key_bias=kept", "model": str(ROOT / "artifacts" / "demo-model")}


def chunks() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=random).bfloat16() for _ in NAMES]


def decoded(recipe: str, chunk: torch.Tensor) -> torch.Tensor:
    """What the recipe's codecs make of a chunk, without LMCache and without a chunk's bytes."""
    out = torch.empty_like(chunk)
    for layer, pair in enumerate(shared.build(preset(recipe), SIZE, {})):
        for role, codec in enumerate(pair):
            fields = codec.encode(chunk[role, layer].unflatten(0, (-1, 128)), Context())
            out[role, layer] = codec.decode(fields, Context()).flatten(0, 1).bfloat16()
    return out


def files(folder: Path, count: int | None = None) -> list[Path]:
    """The chunks in a folder, once there are so many."""
    until = time.monotonic() + PATIENCE
    while count is not None and len([*folder.glob("*.data")]) < count and time.monotonic() < until:
        time.sleep(0.01)
    return sorted(folder.glob("*.data"))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "such chunks are not kept" in record.message]


@pytest.mark.parametrize(("recipe", "bits"), [("exact", 16), ("lloyd-3bit", 3.25), ("kivi-2bit", 3)])
def test_another_process_loads_what_one_has_stored(recipe: str, bits: float, tmp_path: Path):
    """Each number is the codec's; each file has the recipe's bits and a header."""
    torch.save(chunks(), tmp_path / "chunks.pt")
    arguments = [str(tmp_path), json.dumps(serde(recipe))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", STORE, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (size,) = {file.stat().st_size for file in files(tmp_path)}
    assert 0 < size - torch.Size(SHAPE).numel() * bits / 8 < FRAME
    with Tier(tmp_path, serde(recipe)) as tier:
        loaded = tier.get(NAMES, chunks()[0])
    assert len(loaded) == len(NAMES)
    for back, chunk in zip(loaded, chunks(), strict=True):
        assert torch.equal(back, decoded(recipe, chunk))


def test_a_chunk_that_cannot_be_kept_does_not_take_others_with_it(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """LMCache stores a request's chunks as one task. The log says it once, wherever the number is."""
    for layer, text in enumerate(("a text", "another text")):
        damaged = chunks()
        damaged[1][0, layer, 0, 0] = torch.nan
        with Tier(tmp_path, serde("lloyd-3bit")) as tier:
            tier.put(keys(text, 3), damaged, stored=False)
            assert len(files(tmp_path, 2 * layer + 2)) == 2 * layer + 2
        with Tier(tmp_path, serde("lloyd-3bit")) as tier:
            assert len(tier.get(keys(text, 3), damaged[0])) == 1  # a prefix ends where a chunk is missing
    (warning,) = warnings(caplog)
    assert "NaN or infinity" in warning


def test_a_damaged_chunk_is_a_miss_and_is_written_again(tmp_path: Path):
    """LMCache gives none of the request's chunks; the damaged file is gone, and the next request stores it."""
    with Tier(tmp_path, serde("lloyd-3bit")) as tier:
        tier.put(NAMES, chunks())
    path = next(file for file in files(tmp_path) if NAMES[1].chunk_hash.hex() in file.name)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with Tier(tmp_path, serde("lloyd-3bit")) as tier:
        assert tier.get(NAMES, chunks()[0]) == []
        assert len(files(tmp_path)) == 2 and path not in files(tmp_path)
    with Tier(tmp_path, serde("lloyd-3bit")) as tier:
        tier.put(NAMES, chunks())
    with Tier(tmp_path, serde("lloyd-3bit")) as tier:
        assert len(tier.get(NAMES, chunks()[0])) == 3
    with Tier(tmp_path, serde("lloyd-2bit")) as tier:
        assert tier.get(NAMES, chunks()[0]) == [] == files(tmp_path)  # another recipe's are removed at once


def test_chunks_of_another_model_stay_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """LMCache goes on with them, without files; a recipe that cannot be kept stops the start."""
    with pytest.raises(ValueError, match='serde "kvq": .* by their positions'):
        Tier(tmp_path, serde("exact-pre"))
    with Tier(tmp_path, serde("lloyd-3bit")) as tier:
        odd = [torch.randn(2, 7, 256, 128).bfloat16() for _ in NAMES]
        tier.put(NAMES, odd, stored=False)
        assert all(map(torch.equal, tier.get(NAMES, odd[0]), odd))
        tier.put(keys("another text", 3), chunks())
    assert len(files(tmp_path)) == 3 and sum("a chunk of shape" in line for line in warnings(caplog)) == 1


def pages_of(pair_2BTHD: torch.Tensor, shape: tuple[int, ...], layout: str) -> torch.Tensor:
    """Keys and values [2, pages, tokens, heads, size] as an engine has them, written by hand."""
    pair = pair_2BTHD if layout == "NHD" else pair_2BTHD.transpose(2, 3)
    if len(shape) == 4:
        return torch.cat([pair[0], pair[1]], -1).contiguous()
    return (pair if shape[0] == 2 else pair.transpose(0, 1)).contiguous()


@pytest.mark.parametrize("driven", ["by the engine", "by LMCache's server"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_pages_of_every_layout_come_back(name: str, driven: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """LMCache makes chunks of an engine's pages, and pages of chunks; between them each number is the codec's."""
    shape, layout, of_chunk = LAYOUTS[name]
    hints, random = {"kv_layout": layout}, torch.Generator().manual_seed(0)
    pairs = [torch.randn(2, PAGES, PAGE, 2, 64, generator=random).bfloat16() for _ in range(SIZE.layers)]
    caches = {f"{n}": pages_of(pair, shape, layout) for n, pair in enumerate(pairs)}
    planes = compute_kv_layout(caches, hints)[-1]
    blocks = [5, 0, 3, 6, 7, 1]  # two pages a chunk
    made = gather_paged_kv_to_cpu(caches, blocks, 2, hints)
    assert {tuple(chunk.shape) for chunk in made} == {of_chunk} and planes == (1 if len(shape) == 4 else 2)
    if driven == "by LMCache's server":
        monkeypatch.setattr("lmcache.v1.platform.devices.cuda.cache_context.unwrap_kv_cache_tensors", lambda x: x)
        context = cache_context.CPUCacheContext(list(caches.values()), 256, hints)
        (stated,) = get_layout_desc(context, 256, 0).shapes
        assert tuple(stated) == (planes, *of_chunk[-3:])
        made = [chunk.reshape(stated) for chunk in made]
    with Tier(tmp_path, serde("kivi-2bit")) as tier:
        tier.put(NAMES, made)
    with Tier(tmp_path, serde("kivi-2bit")) as tier:
        loaded = tier.get(NAMES, made[0])
    assert len(loaded) == len(NAMES)
    empty = {name: torch.zeros_like(cache) for name, cache in caches.items()}
    scatter_cpu_to_paged_kv(empty, blocks, [chunk.reshape(of_chunk) for chunk in loaded], 2, 0, hints)
    wanted = [torch.zeros_like(pair) for pair in pairs]
    for n in range(len(NAMES)):
        two = blocks[2 * n : 2 * n + 2]
        apart = torch.stack([pair[:, two] for pair in pairs], 1).flatten(2, 3).flatten(3)
        back = decoded("kivi-2bit", apart).unflatten(-1, (2, 64)).unflatten(2, (2, PAGE))
        for layer in range(SIZE.layers):
            wanted[layer][:, two] = back[:, layer]
    for cache, pair in zip(empty.values(), wanted, strict=True):
        assert torch.equal(cache, pages_of(pair, shape, layout))
