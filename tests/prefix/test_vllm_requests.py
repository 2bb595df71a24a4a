"""vLLM's connector without vLLM: what one server keeps another loads, and nothing damaged reaches a page."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from feeding import GEOMETRY
from kept_blocks import EACH, decoded, files, store
from tiny_artifact import tiny
from torch import Tensor
from transformers import AutoConfig

from kvq_runtime.artifact import artifact
from kvq_runtime.errors import ArtifactError
from kvq_runtime.prefix import vllm_requests
from kvq_runtime.prefix.store import PrefixBlocks
from kvq_runtime.prefix.vllm_requests import (
    PageRows,
    PrefixScheduler,
    PrefixWorker,
    Transfer,
    open_store,
    places_of,
)

# tokens of an engine's page, of a cache's, of rtn-2bit's and aqua-2bit's blocks, and of their windows
PAGE, KERNEL, BLOCK, RECENT = 8, 4, 16, 12
COUNT = 5 * BLOCK + 3
ROWS = torch.randn(2, GEOMETRY.layers, 6 * 32, GEOMETRY.kv_heads, GEOMETRY.head_size).bfloat16()


# ---- the scheduler


def request(count: int, name: str = "a", **other: Any) -> SimpleNamespace:
    """As vLLM has it."""
    tokens = list(range(count))
    given = {"request_id": name, "all_token_ids": tokens, "prompt_token_ids": tokens, "cache_salt": None}
    return SimpleNamespace(
        **given | {"mm_features": [], "prompt_embeds": None, "prompt_is_token_ids": None, "lora_request": None} | other
    )


def pages(name: str) -> list[int]:
    return [*range(100, 140)]


def spans(transfers: list[Transfer]) -> list[tuple[int, int]]:
    return [(transfer.start, transfer.stop) for transfer in transfers]


@pytest.fixture
def scheduler(tmp_path: Path) -> PrefixScheduler:
    """Of a folder with four blocks."""
    kept = store(tmp_path)
    kept.put(range(64), [*ROWS[0, :, :64]], [*ROWS[1, :, :64]])
    return PrefixScheduler(kept, PAGE)


def test_whole_blocks_are_loaded_but_not_the_newest_tokens(scheduler):
    """As many tokens are computed as the recipe's window holds."""
    assert scheduler.store.codec.recipe.window.recent == RECENT
    for name, count, computed, expected in [
        ("a", 100, 0, 64), ("b", 100, 2 * PAGE, 64 - 2 * PAGE), ("c", 63 + RECENT, 0, 48), ("d", 100, 64, 0),
    ]:  # fmt: skip
        assert scheduler.matched(request(count, name), computed) == expected


def test_a_transfer_has_the_pages_of_its_tokens(scheduler):
    sent = request(64 + RECENT)
    assert scheduler.matched(sent, PAGE) == 64 - PAGE == scheduler.matched(sent, PAGE)  # asked again, without room
    scheduler.allocated(sent, 64 - PAGE)
    (load,) = scheduler.transfers({}, pages)[0]
    assert spans([load]) == [(PAGE, 64)] and load.tokens == tuple(range(64))
    assert load.pages == tuple(range(101, 108)) and scheduler.transfers({}, pages)[0] == []
    assert scheduler.matched(sent, 0) == 0  # a load that failed is not tried again
    scheduler.allocated(sent, 0)  # the load has ended
    sent.all_token_ids.extend([7] * 6)
    (keep,) = scheduler.transfers({"a": (64, 82)}, pages)[1]  # decoded blocks are not encoded again
    assert spans([keep]) == [(64, 80)] and keep.pages == (108, 109)


def test_blocks_are_kept_once_they_are_computed_and_their_tokens_known(scheduler):
    sent = request(40)
    scheduler.allocated(sent, 0)
    assert spans(scheduler.transfers({"a": (0, 31)}, pages)[1]) == [(0, 16)]
    assert scheduler.transfers({"a": (16, 31)}, pages)[1] == []
    assert spans(scheduler.transfers({"a": (31, 64)}, pages)[1]) == [(16, 32)]  # of drafts 24 may be refused
    sent.all_token_ids.extend([7] * 24)
    assert spans(scheduler.transfers({"a": (64, 65)}, pages)[1]) == [(32, 64)]
    assert spans(scheduler.transfers({"a": (20, 64)}, pages)[1]) == [(16, 64)]  # computed again after a failure
    scheduler.finished("a")
    assert scheduler.transfers({"a": (0, 100)}, pages)[1] == []


@pytest.mark.parametrize("other", [
    {"mm_features": ["an image"]}, {"prompt_embeds": torch.zeros(1)}, {"lora_request": "an adapter"},
    {"prompt_token_ids": None}, {"prompt_is_token_ids": [True]}, {"skip_reading_prefix_cache": True},
    {"cache_salt": "another"},
])  # fmt: skip
def test_what_tokens_alone_do_not_decide_is_neither_loaded_nor_kept(scheduler, other):
    sent = request(64 + RECENT, **other)
    assert scheduler.matched(sent, 0) == 0
    scheduler.allocated(sent, 0)
    keeps = scheduler.transfers({"a": (0, 70)}, pages)[1]
    assert spans(keeps) == ([(0, 64)] if {"cache_salt", "skip_reading_prefix_cache"} & other.keys() else [])
    assert all(keep.salt == (other.get("cache_salt") or "") for keep in keeps)


# ---- a worker


def put(k_THD: Tensor, v_THD: Tensor, cache_BHNC: Tensor, slots_T: Tensor) -> None:
    """A backend whose keys lie backwards."""
    cache_BHNC[slots_T // KERNEL, :, slots_T % KERNEL] = torch.cat([k_THD.flip(-1), v_THD], -1)


class Engine:
    """Caches of all layers, and requests in pages of no order."""

    def __init__(self, path: Path, name: str = "aqua-2bit"):
        self.store = store(path, name)
        shape = (64, GEOMETRY.kv_heads, KERNEL, 2 * GEOMETRY.head_size)
        self.caches = [torch.full(shape, 9.0, dtype=torch.bfloat16) for _ in range(GEOMETRY.layers)]
        places = places_of(self.caches[0], GEOMETRY.kv_heads, GEOMETRY.head_size, put)
        self.worker = PrefixWorker(self.store, [PageRows(x, places, PAGE // KERNEL) for x in self.caches], PAGE)
        self.free = torch.randperm(31).add(1).tolist()

    def pages(self, tokens: int) -> tuple[int, ...]:
        return tuple(self.free.pop() for _ in range(-(-tokens // PAGE)))

    def slots(self, pages: tuple[int, ...], start: int, stop: int) -> Tensor:
        place = torch.arange(start, stop)
        return torch.tensor(pages)[place // PAGE] * PAGE + place % PAGE

    def rows(self, pages: tuple[int, ...], layer: int, start: int, stop: int) -> Tensor:
        """Keys and values [2, T, H, D] of a request's tokens, out of its pages."""
        slots = self.slots(pages, start, stop)
        k, v = self.caches[layer][slots // KERNEL, :, slots % KERNEL].chunk(2, -1)
        return torch.stack([k.flip(-1), v])

    def keep(self, stop: int, start: int = 0, rows: Tensor = ROWS) -> None:
        """A request whose keys and values the model has put into pages, which are used again at once."""
        pages = self.pages(stop)
        for layer, cache in enumerate(self.caches):
            put(*rows[:, layer, :stop], cache, self.slots(pages, 0, stop))
        self.worker.keep(Transfer("a", "", tuple(range(stop)), start, stop, pages[start // PAGE :]))
        for cache in self.caches:
            cache.fill_(9.0)
        self.free += pages
        self.worker._writer.submit(lambda: None).result()  # all that waits is written

    def load(self, stop: int, start: int = 0) -> tuple[int, ...]:
        """Load into new pages; the pages of the whole text."""
        pages = self.pages(stop)
        self.worker.step([Transfer("b", "", tuple(range(stop)), start, stop, pages[start // PAGE :])])
        assert self.worker.take_loaded() == {"b"}
        return pages


@pytest.mark.parametrize("name", EACH)
def test_what_one_engine_keeps_another_loads(name: str, tmp_path):
    """Into other pages; before RoPE, and predicted from the layer below; from the middle of a block on."""
    writer, reader = Engine(tmp_path, name), Engine(tmp_path, name)
    stop = 3 * writer.store.block
    writer.keep(stop)
    pages = reader.load(stop)
    assert not reader.worker.take_failed()
    for layer, pair in decoded(writer.store, writer.store.load(range(stop))).items():
        loaded, expected = reader.rows(pages, layer, 0, stop), torch.stack(pair)
        assert torch.equal(loaded, expected)
        rounding = (expected.float() - ROWS[:, layer, :stop].float()).norm() / expected.float().norm()
        assert (rounding == 0) == name.startswith("exact") or name == "exact-pre"
    start = writer.store.block + PAGE
    untouched, pages = [cache.clone() for cache in reader.caches], reader.load(2 * writer.store.block, start)
    kept = torch.ones(64, dtype=torch.bool)
    for page in pages[start // PAGE :]:
        kept[2 * page : 2 * page + 2] = False
    for layer, pair in decoded(writer.store, writer.store.load(range(2 * writer.store.block))).items():
        expected = torch.stack(pair)[:, start:].float()
        loaded = reader.rows(pages, layer, start, 2 * writer.store.block).float()
        assert (loaded - expected).norm() < 0.02 * expected.norm()  # products of other lengths, rounded to bfloat16
        assert torch.equal(reader.caches[layer][kept], untouched[layer][kept])


@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_a_damaged_block_fails_its_pages_and_those_behind(damage: str, tmp_path, caplog):
    """Nothing of it is written into a page, and the others are loaded; computed, it is kept again."""
    writer, reader = Engine(tmp_path), Engine(tmp_path)
    writer.keep(64)
    third = writer.store.folder.path(writer.store.names(range(64))[2])
    data = third.read_bytes()
    third.unlink() if damage == "gone" else third.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    pages = reader.load(64)
    assert reader.worker.take_failed() == set(pages[4:])
    for layer, pair in decoded(writer.store, writer.store.load(range(32))).items():
        assert torch.allclose(reader.rows(pages, layer, 0, 32), torch.stack(pair), atol=0.05, rtol=0.05)
        assert bool((reader.rows(pages, layer, 32, 64)[1] == 9).all())
    assert ("damaged, and removed" in caplog.text) == (damage != "gone")
    reader.keep(64)
    assert third.read_bytes() == data and len(writer.store.load(range(64))) == 4


def test_blocks_are_kept_as_they_are_finished(tmp_path):
    """The same bytes as at once; a block whose beginning is not kept is not kept either."""
    parts, whole = Engine(tmp_path / "a"), Engine(tmp_path / "b")
    parts.keep(48, start=32)
    assert parts.store.longest(range(48)) == 0
    for start, stop in ((0, 32), (32, 48), (48, 80)):
        parts.keep(stop, start)
        assert parts.store.longest(range(COUNT)) == stop
    whole.keep(80)
    assert [x.read_bytes() for x in files(tmp_path / "a")] == [x.read_bytes() for x in files(tmp_path / "b")]


def test_what_cannot_be_kept_costs_its_blocks_and_no_step(tmp_path, monkeypatch, caplog):
    """Too many copies that wait, a disk that is full, numbers that are not finite."""
    engine, block = Engine(tmp_path), 2 * GEOMETRY.layers * BLOCK * GEOMETRY.width * 2
    with monkeypatch.context() as patched:
        patched.setattr(vllm_requests, "PENDING", 2 * block + 1)
        engine.keep(64)
    assert engine.store.longest(range(64)) == 32 and "32 tokens of prefixes are not kept" in caplog.text
    with monkeypatch.context() as patched:
        patched.setenv("KVQ_FAULT", "draft.opened:1:full")
        engine.keep(64)
    assert engine.store.longest(range(64)) == 32 and "No space left" in caplog.text
    broken = ROWS.clone()
    broken[0, 1, 50] = torch.nan
    engine.keep(64, rows=broken)
    assert engine.store.longest(range(64)) == 48 and "NaN" in caplog.text
    engine.keep(64)
    assert 16 * len(engine.store.load(range(64))) == 64


def test_pages_that_no_block_fills_and_backends_that_round_or_pack_are_refused(tmp_path):
    """The order of a backend's pages is measured, by what it writes."""
    engine = Engine(tmp_path)
    with pytest.raises(ValueError, match="give --block-size 16"):
        PrefixWorker(engine.store, engine.worker.layers, 12)

    def rounding(k_THD, v_THD, cache_BHNC, slots_T):
        put((k_THD / 16).round() * 16, v_THD, cache_BHNC, slots_T)

    cache = torch.zeros(2, GEOMETRY.kv_heads, KERNEL, 2 * GEOMETRY.head_size)
    with pytest.raises(ValueError, match="as they are"):
        places_of(cache, GEOMETRY.kv_heads, GEOMETRY.head_size, rounding)
    with pytest.raises(ValueError, match="16 or 32 bits"):
        places_of(cache.to(torch.uint8), GEOMETRY.kv_heads, GEOMETRY.head_size, put)


# ---- stores of a served model


@pytest.fixture
def served(demo_model: Path) -> dict[str, Any]:
    """As vLLM's ModelConfig has it."""
    config = AutoConfig.from_pretrained(demo_model)
    return {"hf_text_config": config, "model": str(demo_model), "revision": None, "dtype": torch.bfloat16,
            "quantization": None}  # fmt: skip


def opened(options: dict, model: dict[str, Any], rank: int = 0, ranks: int = 1) -> PrefixBlocks:
    return open_store(options, SimpleNamespace(**model), rank, ranks)


def test_a_worker_has_its_shard(served: dict, tmp_path: Path):
    """Shards share nothing but the folder, and as many servers as wanted find the same ones."""
    options = {"path": str(tmp_path), "recipe": "exact-pre"}
    stores = [opened(options, served, *which) for which in ((0, 1), (0, 2), (1, 2))]
    assert [shard.codec.geometry.kv_heads for shard in stores] == [2, 1, 1]
    assert len({shard.root for shard in stores}) == 3 and stores[0].codec.rotary is not None
    assert opened(options, served, 1, 2).root == stores[2].root
    assert opened(options, served, 3, 4).root == stores[2].root  # two workers have the same head


def test_other_weights_and_configurations_find_nothing(served: dict, tmp_path: Path):
    options = {"path": str(tmp_path / "kept"), "recipe": "rtn-2bit", "budget": "1GB"}
    first = opened(options, served).root
    shutil.copytree(served["model"], tmp_path / "model")
    moved = served | {"model": str(tmp_path / "model")}
    assert opened(options, moved).root == first  # the same files elsewhere are the same model
    weights = safetensors.torch.load_file(tmp_path / "model" / "model.safetensors")
    last = sorted(weights)[-1]
    safetensors.torch.save_file(weights | {last: weights[last] * 1.01}, tmp_path / "model" / "model.safetensors")
    config = AutoConfig.from_pretrained(served["model"], rms_norm_eps=0.1)
    others = [moved, *(served | change for change in (
        {"quantization": "fp8"}, {"dtype": torch.float32}, {"hf_text_config": config}
    ))]  # fmt: skip
    assert len({first, *(opened(options, model).root for model in others)}) == 5


def test_options_recipes_and_models_that_cannot_be_kept_are_refused(served: dict, tmp_path: Path):
    artifact.save(tiny(), tmp_path / "tiny.safetensors")
    for given, message in [
        ({"path": "x"}, "has path; give path and recipe"), ({"path": "x", "recipe": "exact", "salt": "s"}, "has path"),
        ({"recipe": "subkv-2bit"}, "as they arrive"), ({"recipe": str(tmp_path / "tiny.safetensors")}, "fingerprint"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            opened({"path": str(tmp_path / "kept")} | given if "recipe" in given else given, served)
    options, empty = {"path": str(tmp_path / "kept"), "recipe": "exact"}, tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ArtifactError, match="KVQConnector, recipe exact: no safetensors files"):
        opened(options, served | {"model": str(empty)})
    (empty / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{not json at all")
    with pytest.raises(ArtifactError, match="no safetensors file"):
        opened(options, served | {"model": str(empty)})
