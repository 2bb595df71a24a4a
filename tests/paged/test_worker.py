"""A worker's pages and its kept prefixes: what one engine keeps another loads, and nothing damaged reaches a page."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import feeding
import fitted
import forked
import pytest
import torch
from feeding import GEOMETRY, RECIPES
from torch import Tensor

from kvq_runtime.engines import worker as module
from kvq_runtime.engines.scheduler import Order
from kvq_runtime.engines.worker import PrefixWorker
from kvq_runtime.prefix import chain, maintenance
from kvq_runtime.prefix.store import PrefixBlocks
from kvq_runtime.vllm.page import Rows, places_of

PAGE, KERNEL = 8, 4  # tokens of an engine's page, and of a cache's
COUNT = 5 * 16 + 3
ROWS = torch.randn(2, GEOMETRY.layers, COUNT, GEOMETRY.kv_heads, GEOMETRY.head_size).bfloat16()


def put(k_THD: Tensor, v_THD: Tensor, cache_BHNC: Tensor, slots_T: Tensor) -> None:
    """A backend whose keys lie backwards."""
    cache_BHNC[slots_T // KERNEL, :, slots_T % KERNEL] = torch.cat([k_THD.flip(-1), v_THD], -1)


class Engine:
    """Caches of all layers, and requests in pages of no order."""

    def __init__(self, path=None, name: str = "aqua-2bit", pending: int = 1 << 30):
        recipe = RECIPES[name]
        tensors = fitted.tensors(recipe, GEOMETRY)
        self.store = PrefixBlocks(path, recipe, GEOMETRY, tensors, model="m", rotary=feeding.rotary())
        shape = (64, GEOMETRY.kv_heads, KERNEL, 2 * GEOMETRY.head_size)
        self.caches = [torch.full(shape, 9.0, dtype=torch.bfloat16) for _ in range(GEOMETRY.layers)]
        places = places_of(self.caches[0], GEOMETRY.kv_heads, GEOMETRY.head_size, put)
        layers = [Rows(cache, places, PAGE // KERNEL) for cache in self.caches]
        self.keeper = PrefixWorker(self.store, layers, PAGE, pending)
        self.free = torch.randperm(31).add(1).tolist()

    def pages(self, tokens: int) -> tuple[int, ...]:
        return tuple(self.free.pop() for _ in range(-(-tokens // PAGE)))

    def slots(self, pages: tuple[int, ...], start: int, stop: int) -> Tensor:
        place = torch.arange(start, stop)
        return torch.tensor(pages)[place // PAGE] * PAGE + place % PAGE

    def compute(self, count: int) -> tuple[int, ...]:
        """A request whose keys and values the model has put into pages."""
        pages = self.pages(count)
        for layer, cache in enumerate(self.caches):
            put(*ROWS[:, layer, :count], cache, self.slots(pages, 0, count))
        return pages

    def rows(self, pages: tuple[int, ...], layer: int, start: int, stop: int) -> Tensor:
        """Keys and values [2, T, H, D] of a request's tokens, out of its pages."""
        slots = self.slots(pages, start, stop)
        k, v = self.caches[layer][slots // KERNEL, :, slots % KERNEL].chunk(2, -1)
        return torch.stack([k.flip(-1), v])

    def keep(self, stop: int, start: int = 0, tokens=range(COUNT), salt: str = "") -> dict[str, float]:
        pages = self.compute(stop)
        self.keeper.keep(Order("a", salt, tuple(tokens[:stop]), start, stop, pages[start // PAGE :]))
        for cache in self.caches:
            cache.fill_(9.0)  # pages are used again at once
        self.free += pages
        self.keeper.close()
        return {**self.keeper.take_counts()}

    def load(self, stop: int, start: int = 0, tokens=range(COUNT), salt: str = "") -> tuple[tuple[int, ...], int]:
        """Load into new pages; the pages of the whole text, and how many steps it took."""
        pages, steps = self.pages(stop), 0
        self.keeper.begin([Order("b", salt, tuple(tokens[:stop]), start, stop, pages[start // PAGE :])])
        done: set[str] = set()
        while not done:
            self.keeper.go_on()
            done, steps = self.keeper.take_loaded(), steps + 1
        assert done == {"b"}
        return pages, steps


def decoded(kept: PrefixBlocks, stop: int) -> list[Tensor]:
    return [torch.stack([k, v]).clone() for _, k, v in kept.decode(kept.load(range(COUNT), stop))]


@pytest.mark.parametrize("name", ["exact", "aqua-2bit", "higgs-2bit", "svdq-2bit", "kivi-2bit"])
def test_what_one_engine_keeps_another_loads(name: str, tmp_path, monkeypatch):
    """In slices, into other pages; before RoPE, and predicted from the layer below."""
    block = Engine(name=name).store.block
    monkeypatch.setattr(module, "SLICE", 2 * block)
    stop = COUNT // block * block
    one, other = Engine(tmp_path, name), Engine(tmp_path, name)
    counts = one.keep(stop)
    assert counts["tokens_kept"] == stop and counts["bytes_kept"] == sum(
        file.stat().st_size for file in tmp_path.rglob("*.safetensors")
    )
    pages, steps = other.load(stop)
    assert steps == -(-stop // (2 * block)) and not other.keeper.take_failed()
    counts = other.keeper.take_counts()
    assert (counts["loads"], counts["tokens_loaded"]) == (1, stop) and "blocks_damaged" not in counts
    whole = decoded(one.store, stop)
    for layer, expected in enumerate(whole):
        found = other.rows(pages, layer, 0, stop)
        error = (found.float() - expected.float()).norm() / expected.float().norm()
        assert error < 2e-2, f"layer {layer}: {error}"  # slices of other lengths, products rounded to bfloat16
        rounding = (expected.float() - ROWS[:, layer, :stop].float()).norm() / expected.float().norm()
        assert (rounding == 0) == (name == "exact") and (name != "exact" or torch.equal(found, expected))


def test_what_was_decoded_is_not_encoded_again(tmp_path):
    """Of a folder that has lost its third block: that is not kept, nor what follows, until it has been computed."""
    one, stop = Engine(tmp_path), COUNT // 16 * 16
    one.keep(48)
    names = chain.names(one.store.root, torch.arange(COUNT), 16)
    pages, _ = one.load(48)
    pages += one.compute(stop)[48 // PAGE :]
    order = Order("c", "", tuple(range(stop)), 0, stop, pages, decoded=frozenset({0, 1, 2}))
    one.store.shelf.drop(names[2])
    one.keeper.keep(order)
    one.keeper.close()
    assert [one.store.shelf.has(name) for name in names] == [True, True, False, False, False]
    assert "tokens_dropped" not in one.keeper.take_counts()
    assert one.keep(48)["tokens_kept"] == 16
    one.keeper.keep(order)
    one.keeper.close()
    assert one.store.longest(range(COUNT)) == stop


def test_a_folder_that_cannot_be_looked_into_any_more_costs_what_is_in_it_alone(tmp_path, caplog):
    """Nothing is loaded or kept, no request fails; and once the folder is back, all goes on."""
    engine = Engine(tmp_path)
    engine.keep(32)
    with closed(tmp_path):
        assert engine.store.longest(range(COUNT)) == engine.store.checked(range(COUNT)) == 0
        counts = engine.keep(64)
        assert engine.load(32)[1] == 1 and engine.keeper.take_failed()
    assert counts["blocks_refused"] == 4 and "tokens_kept" not in counts and "are not kept" in caplog.text
    assert engine.keep(64)["tokens_kept"] == 32 and engine.store.checked(range(COUNT)) == 64


@contextmanager
def closed(folder: Path) -> Iterator[None]:
    """Let this process not look into a folder, be it root's."""
    root = os.geteuid() == 0
    os.seteuid(65534) if root else folder.chmod(0)
    try:
        yield
    finally:
        os.seteuid(0) if root else folder.chmod(0o700)


def test_pages_that_are_there_are_left_as_they_are(tmp_path):
    """A load that begins inside of a block writes from there on."""
    one, other = Engine(tmp_path), Engine(tmp_path)
    one.keep(64)
    pages, _ = other.load(64, start=24)
    for layer, expected in enumerate(decoded(one.store, 64)):
        assert bool((other.rows(pages, layer, 0, 24)[1] == 9).all())
        assert torch.allclose(other.rows(pages, layer, 24, 64), expected[:, 24:], atol=0.05, rtol=0.05)
    untouched = torch.ones(64, dtype=torch.bool)
    for page in pages[3:]:
        untouched[2 * page : 2 * page + 2] = False
    assert bool((other.caches[0][untouched] == 9).all())


@pytest.mark.parametrize("damage", ["changed", "torn", "gone", "foreign"])
def test_a_block_that_is_damaged_late_fails_its_pages_and_those_behind(damage: str, tmp_path, monkeypatch, caplog):
    """After the scheduler's check: nothing of it is written into a page, and the others are loaded."""
    monkeypatch.setattr(module, "SLICE", 16)
    one, other = Engine(tmp_path), Engine(tmp_path)
    one.keep(64)
    files = sorted(tmp_path.rglob("*.safetensors"), key=lambda file: -file.stat().st_mtime)
    third, data = files[2], files[2].read_bytes()
    if damage == "gone":
        third.unlink()
    else:
        third.write_bytes({"changed": data[:-1] + b"\x01", "torn": data[:-9], "foreign": files[1].read_bytes()}[damage])
    pages, steps = other.load(64)
    assert steps == 3 and other.keeper.take_failed() == set(pages[4:])
    for layer, expected in enumerate(decoded(one.store, 32)):
        assert torch.allclose(other.rows(pages, layer, 0, 32), expected, atol=0.05, rtol=0.05)
        assert bool((other.rows(pages, layer, 32, 64)[1] == 9).all())
    counts = other.keeper.take_counts()
    assert (counts["tokens_loaded"], counts["loads_failed"]) == (32, 1)
    assert counts.get("blocks_damaged", 0) == (damage != "gone")
    assert ("damaged, and removed" in caplog.text) == (damage != "gone")
    again = other.keep(64)  # computed, and kept again
    assert again["tokens_kept"] == 32 and one.store.longest(range(64)) == 64


def test_blocks_are_kept_as_they_are_finished(tmp_path):
    """The same bytes as at once; a block whose beginning is not kept is not kept either."""
    parts, whole = Engine(tmp_path / "a"), Engine(tmp_path / "b")
    assert parts.keep(48, start=32) == {}
    for start, stop in ((0, 32), (32, 48), (48, 80)):
        assert parts.keep(stop, start)["tokens_kept"] == stop - start
    assert parts.keep(80) == {}
    whole.keep(80)
    names = [file.name for file in (tmp_path / "b").rglob("*.safetensors")]
    assert len(names) == 5
    for name in names:
        (one,), (other,) = (list((tmp_path / part).rglob(name)) for part in "ab")
        assert one.read_bytes() == other.read_bytes()


def test_what_exceeds_the_room_for_copies_is_not_kept_and_counted(tmp_path):
    block = 2 * GEOMETRY.layers * 16 * GEOMETRY.width * 2
    engine = Engine(tmp_path, pending=2 * block + 1)
    assert engine.keep(80)["tokens_dropped"] == 48 and engine.store.longest(range(80)) == 32
    assert engine.keep(80)["tokens_kept"] == 32 and engine.store.longest(range(80)) == 64


def test_a_full_disk_costs_the_blocks_and_no_step(tmp_path, monkeypatch, caplog):
    engine = Engine(tmp_path)

    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(engine.store.shelf, "put", full)
        assert engine.keep(32)["blocks_refused"] == 2 and "No space left" in caplog.text
    assert engine.keep(32)["tokens_kept"] == 32


def test_a_request_that_is_not_finite_is_not_kept(tmp_path, caplog):
    engine = Engine(tmp_path)
    pages = engine.compute(32)
    engine.caches[1][2 * pages[3]] = torch.nan
    engine.keeper.keep(Order("a", "", tuple(range(32)), 0, 32, pages))
    engine.keeper.close()
    assert engine.store.longest(range(32)) == 16 and "NaN" in caplog.text


def test_workers_share_a_folder(tmp_path):
    """Processes keep the same and their own prefixes, and load each other's, in one folder."""

    def work(seed: int) -> int:
        for turn in range(3):
            engine = Engine(tmp_path)
            tokens = [*range(32), *range(1000 * seed + turn, 1000 * seed + turn + 48)]
            engine.keep(80, tokens=tokens)
            pages, _ = engine.load(80, tokens=tokens)
            assert not engine.keeper.take_failed()
            for layer in range(GEOMETRY.layers):
                found = engine.rows(pages, layer, 0, 80).float()
                assert (found - ROWS[:, layer, :80].float()).norm() < found.norm()
        return 0

    children = [forked.process(work, seed) for seed in (1, 2)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0]
    assert not [*maintenance.damaged(tmp_path)]


def test_tenants_do_not_find_each_others(tmp_path):
    engine = Engine(tmp_path)
    engine.keep(32, salt="a")
    pages, _ = engine.load(32, salt="b")
    assert engine.keeper.take_failed() == set(pages)
    engine.load(32, salt="a")
    assert not engine.keeper.take_failed()


def test_pages_that_do_not_divide_a_block_are_refused():
    engine = Engine()
    with pytest.raises(ValueError, match=r"use pages of 16 tokens \(--block-size"):
        PrefixWorker(engine.store, engine.keeper.layers, 12, 1)
