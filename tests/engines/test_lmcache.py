"""A real LMCache on a CPU: chunks stored in its file tier, and loaded by another process. `make test-lmcache`."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("lmcache", reason="LMCache is in an environment of its own: make test-lmcache")

import stores
import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, PrefetchTaskSpec
from lmcache.v1.mp_observability import event_bus
from lmcache.v1.mp_observability.event import Event, EventType
from lmcache.v1.multiprocess.modules.lmcache_driven_transfer import get_layout_desc
from lmcache.v1.multiprocess.transfer_context import (
    compute_kv_layout,
    gather_paged_kv_to_cpu,
    scatter_cpu_to_paged_kv,
)
from lmcache.v1.platform.devices.cpu import cache_context

import kvq_runtime.prefix.lmcache  # noqa: F401  its log is caught from the first test on
from benchmarks.lmcache_chunks import PATIENCE, Tier, keys, tell
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
from benchmarks.lmcache_chunks import Tier, keys
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
    "apart, heads first": ((2, PAGES, 2, PAGE, 64), "HND", SHAPE),
    "apart in a page, tokens first": ((PAGES, 2, PAGE, 2, 64), "NHD", SHAPE),
    "apart in a page, heads first": ((PAGES, 2, 2, PAGE, 64), "HND", SHAPE),
}


def serde(recipe: str) -> dict:
    return {"type": "kvq", "cache": recipe, "model": str(ROOT / "artifacts" / "demo-model")}


def chunks(seed: int = 0) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(SHAPE, generator=random).bfloat16() for _ in NAMES]


def decoded(recipe: str, chunk: torch.Tensor) -> torch.Tensor:
    """What the recipe's codecs make of a chunk, without LMCache and without a chunk's bytes."""
    found = torch.empty_like(chunk)
    for layer, pair in enumerate(shared.build(preset(recipe), SIZE, {})):
        for role, codec in enumerate(pair):
            fields = codec.encode(chunk[role, layer].unflatten(0, (-1, 128)), Context())
            found[role, layer] = codec.decode(fields, Context()).flatten(0, 1).bfloat16()
    return found


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.data"))


@pytest.mark.parametrize(("recipe", "bits"), [("exact", 16), ("lloyd-3bit", 3.25), ("kivi-2bit", 3)])
def test_another_process_loads_what_one_has_stored(recipe: str, bits: float, tmp_path: Path):
    """Each number is the codec's; each file has the recipe's bits and a header."""
    torch.save(chunks(), tmp_path / "chunks.pt")
    given = [str(tmp_path), json.dumps(serde(recipe))]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", STORE, *given], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (size,) = {file.stat().st_size for file in files(tmp_path)}
    assert 0 < size - torch.Size(SHAPE).numel() * bits / 8 < FRAME
    with Tier(tmp_path, serde(recipe)) as tier:
        loaded = tier.get(NAMES, chunks()[0])
    assert len(loaded) == len(NAMES)
    for one, chunk in zip(loaded, chunks(), strict=True):
        assert torch.equal(one, decoded(recipe, chunk))


@pytest.mark.parametrize("recipe", ["aqua-2bit"])
def test_chunks_that_know_their_place_are_what_a_prefix_is(recipe: str, tmp_path: Path):
    """Those of a text's first tokens have sinks."""
    (tmp_path / "files").mkdir()
    given = serde(stores.aqua(tmp_path) if recipe == "aqua-2bit" else recipe)
    rows_2LTHD = stores.rows(256 * len(NAMES))
    text = [chunk.flatten(3).contiguous() for chunk in rows_2LTHD.split(256, 2)]
    with Tier(tmp_path / "files", given) as tier:
        tier.put(NAMES, text)
    assert all(file.stat().st_size < text[0].nbytes * 0.7 for file in files(tmp_path / "files"))
    with Tier(tmp_path / "files", given) as tier:
        loaded = tier.get(NAMES, text[0])
    wanted = stores.decoded(given["cache"], stores.ids(256 * len(NAMES)), rows_2LTHD)
    assert torch.equal(torch.cat(loaded, 2), wanted.flatten(3))


def test_a_chunk_is_kept_only_if_it_is_said_where_it_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """By what is stored, or by what a prompt is looked up for; where the latter alone is said, nothing waits for it."""
    monkeypatch.setattr("kvq_runtime.prefix.lmcache.PATIENCE", 1000.0)
    (tmp_path / "files").mkdir()
    with Tier(tmp_path / "files", serde(stores.aqua(tmp_path))) as tier:
        tier.put(keys("said", 3), chunks(), told=False, stored=False)
        assert len(tier.get(keys("said", 3), chunks()[0])) == 3  # from LMCache's memory
        hashes = [name.chunk_hash for name in NAMES]
        looked_up = Event(EventType.MP_LOOKUP, metadata={"chunk_hashes": hashes, "chunk_size": 256})
        event_bus.get_event_bus().publish(looked_up)
        tier.put(NAMES, chunks(), told=False)
    assert len(files(tmp_path / "files")) == len(NAMES)
    said = [record.message for record in caplog.records if record.name == "lmcache.kvq"]
    assert sum("does not say where it begins; such chunks are not kept" in line for line in said) == 1


def test_a_worker_that_stores_before_the_one_that_says_where_is_waited_for(tmp_path: Path):
    (tmp_path / "files").mkdir()
    with Tier(tmp_path / "files", serde(stores.aqua(tmp_path))) as tier:
        tell(NAMES[:1], 256)
        tier.put(NAMES, chunks(), told=False, stored=False)
        time.sleep(0.3)
        tell(NAMES, 256)
        _wait_for(tmp_path / "files", len(NAMES))


def test_a_chunk_that_cannot_be_kept_does_not_take_others_with_it(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """LMCache stores a request's chunks as one task. The log says it once, wherever the number is."""
    for layer, text in enumerate(("a text", "another text")):
        given = chunks()
        given[1][0, layer, 0, 0] = torch.nan
        with Tier(tmp_path, serde("lloyd-3bit")) as tier:
            tier.put(keys(text, 3), given, stored=False)
            _wait_for(tmp_path, 2 * layer + 2)
        with Tier(tmp_path, serde("lloyd-3bit")) as tier:
            assert len(tier.get(keys(text, 3), given[0])) == 1  # a prefix ends where a chunk is missing
    said = [record.message for record in caplog.records if "such chunks are not kept" in record.message]
    assert len(said) == 1 and "NaN or infinity" in said[0]


def _wait_for(folder: Path, count: int) -> None:
    """Until so many chunks are there, and no more."""
    until = time.monotonic() + PATIENCE
    while len(files(folder)) < count and time.monotonic() < until:
        time.sleep(0.01)
    assert len(files(folder)) == count


def test_a_server_without_an_event_bus_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given = serde(stores.aqua(tmp_path))
    bus = event_bus.EventBus(event_bus.EventBusConfig(enabled=False))
    monkeypatch.setattr("kvq_runtime.prefix.lmcache.get_event_bus", lambda: bus)
    with pytest.raises(ValueError, match="start it without --disable-observability"):
        Tier(tmp_path, given)


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
        assert len(tier.get(NAMES, chunks()[0])) == 1
        tier.put(NAMES[1:2], chunks()[1:2], stored=False)
    with Tier(tmp_path, serde("lloyd-3bit")) as tier:
        tier.put(NAMES, chunks())
    with Tier(tmp_path, serde("lloyd-3bit")) as tier:
        assert len(tier.get(NAMES, chunks()[0])) == 3


def test_another_recipes_chunks_are_a_miss(tmp_path: Path):
    """Of more bytes or of fewer, or of as many; all are removed at once, and the next request writes them."""
    for first, second in [
        ("lloyd-3bit", "lloyd-2bit"),
        ("lloyd-2bit", "lloyd-3bit"),
        ("quarot-2bit", "rtn-2bit"),
    ]:
        folder = tmp_path / f"{first}-{second}"
        folder.mkdir()
        with Tier(folder, serde(first)) as tier:
            tier.put(NAMES, chunks())
        with Tier(folder, serde(second)) as tier:
            assert tier.get(NAMES, chunks()[0]) == []
        assert files(folder) == []


@pytest.mark.parametrize(
    ("recipe", "message"),
    [("aqua-2bit", "has to be fitted"), ("mean-higgs-2bit", "fitted"), ("no-such-recipe", "no-such-recipe"),
     ("svdq-online-2bit", "nearest recipe that it can keep them by")],
)  # fmt: skip
def test_what_cannot_be_kept_stops_the_start(recipe: str, message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message) as refused:
        Tier(tmp_path, serde(recipe))
    assert 'serde "kvq": ' in str(refused.value)


def test_chunks_of_another_model_are_not_stored(tmp_path: Path):
    """LMCache goes on: the request's chunks are in its memory, not in its files."""
    with Tier(tmp_path, serde("lloyd-3bit")) as tier:
        odd = [torch.randn(2, 7, 256, 128).bfloat16() for _ in NAMES]
        tier.put(NAMES, odd, stored=False)
        assert all(torch.equal(one, other) for one, other in zip(tier.get(NAMES, odd[0]), odd, strict=True))
        tier.put(keys("another text", 3), chunks(1))
    assert len(files(tmp_path)) == 3


def test_layers_that_slide_are_kept_as_chunks_of_their_own(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """As LMCache has them with --separate-object-groups; else a chunk has several tensors, and the log says it once."""
    shapes, given = [torch.Size((2, layers, 256, 128)) for layers in (5, 1)], {"head_size": SIZE.head_size}
    layouts, random = (
        [MemoryLayoutDesc([shape], [torch.bfloat16]) for shape in shapes],
        torch.Generator().manual_seed(0),
    )
    names = [[replace(name, object_group_id=group) for name in NAMES] for group in range(2)]
    with Tier(tmp_path, {"type": "kvq", "cache": "lloyd-3bit"} | given) as tier:
        for own, layout in zip(names, layouts, strict=True):
            for held in tier.manager.reserve_write(own, layout).values():
                assert held.tensor is not None
                held.tensor.copy_(torch.randn(held.tensor.shape, generator=random))
        tier.manager.finish_write([*names[0], *names[1]])
        _wait_for(tmp_path, 6)
        together = MemoryLayoutDesc(shapes, [torch.bfloat16] * 2)
        for text in ("one", "another"):
            tier.manager.reserve_write(keys(text, 3), together)
            tier.manager.finish_write(keys(text, 3))
            tier.put(keys(f"{text} more", 3), chunks(), stored=False)  # behind it
        _wait_for(tmp_path, 12)
    with Tier(tmp_path, {"type": "kvq", "cache": "lloyd-3bit"} | given) as tier:
        rows = [GroupedObjectKeys(own, n, layout) for n, (own, layout) in enumerate(zip(names, layouts, strict=True))]
        handle = tier.manager.submit_prefetch_task(PrefetchTaskSpec(rows))
        assert tier.manager.wait_prefetch_status(handle, PATIENCE)
        found = tier.manager.query_prefetch_status(handle)
        assert found is not None and [one.popcount() for one in found.hit_cells] == [3, 3]
    said = [record.message for record in caplog.records if "a chunk of 2 tensors" in record.message]
    assert len(said) == 1 and "--separate-object-groups; such chunks are not kept" in said[0]


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
    assert all(tuple(cache.shape) == shape for cache in caches.values())
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
    (size,) = {file.stat().st_size for file in files(tmp_path)}
    assert 0 < size - torch.Size(SHAPE).numel() * 3 / 8 < FRAME
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


def test_latents_are_refused_and_the_log_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """LMCache makes chunks of a latent cache in the form of fused ones, and each would be another line of its log."""
    caches = {f"{n}": torch.randn(PAGES, PAGE, 576).bfloat16() for n in range(SIZE.layers)}
    made = gather_paged_kv_to_cpu(caches, [0, 1, 2, 3, 4, 5], 2)
    assert {tuple(chunk.shape) for chunk in made} == {(6, 256, 576)}
    for given in (serde("lloyd-3bit"), {"type": "kvq", "cache": "lloyd-3bit", "head_size": 32}):
        with Tier(tmp_path, given) as tier:
            for text in ("one", "another"):
                tier.put(keys(text, 3), made, stored=False)
                assert len(tier.get(keys(text, 3), made[0])) == 3  # from LMCache's memory
        said = [record.message for record in caplog.records if record.name == "lmcache.kvq"]
        lines = [line for line in said if "chunk" in line]
        caplog.clear()
        reason = "576 is no number of fused" if "model" in given else 'give the serde "model"'
        assert len(lines) == 1 and reason in lines[0] and "such chunks are not kept" in lines[0], lines
    assert files(tmp_path) == []
