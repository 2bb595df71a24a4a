"""SGLang's own host pool, controller and hashes, without its engine: pages stored, and loaded by another server.

`make test-sglang`. No engine runs here: SGLang's needs a GPU, or its own kernels for a CPU.
"""

import json
import logging
import queue
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is in an environment of its own: make test-sglang")

import fitted
import no_torchvision  # noqa: F401, before SGLang
import torch
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
    HybridCacheController,
    PrefetchOperation,
    StorageOperation,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_storage_hash_str
from torch import Tensor

from kvq_runtime.artifact import artifact, fingerprint
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.engines import source
from kvq_runtime.hf.model import rotary_of_folder
from kvq_runtime.prefix.store import PrefixBlocks
from kvq_runtime.recipe import preset
from kvq_runtime.sglang import storage

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "artifacts" / "demo-model"
LAYERS, HEADS, SIZE, PAGE, SLOTS = 6, 2, 64, 128, 2048
TOKENS = list(range(1000, 1000 + 5 * PAGE))


class Server:
    """What of a server keeps pages: a host pool, and SGLang's controller with the backend that it makes."""

    def __init__(
        self, folder: Path, recipe: str, layout: str = "page_first", rank: int = 0, ranks: int = 1, **more: Any
    ):
        heads, page, dtype = HEADS // ranks, more.pop("page", PAGE), more.pop("dtype", torch.bfloat16)
        device = [torch.zeros(1, heads, SIZE, dtype=dtype) for _ in range(LAYERS)]
        pointers = torch.zeros(LAYERS, dtype=torch.uint64)
        info = MHABufferInfo(
            buffers=KVBuffers(
                k=tuple(device), v=tuple(device), k_data_ptrs=pointers, v_data_ptrs=pointers, layout=KVBufferLayout.NHD
            ),
            page_size=page, head_num=heads, head_dim=SIZE, v_head_dim=SIZE, dtype=dtype,
            device=torch.device("cpu"),
        )  # fmt: skip
        self.pool = MHATokenToKVPoolHost(
            info, 1.0, 0, page, layout, pin_memory=False, device_capacity_tokens=0, start_layer=0, end_layer=LAYERS,
            host_token_capacity=SLOTS,
        )  # fmt: skip
        extra = {
            "backend_name": "kvq", "module_path": "kvq_runtime.sglang.storage", "class_name": "KVQStorage",
            "interface_v1": 1, "path": str(folder), "recipe": recipe, "model": str(MODEL),
        } | more  # fmt: skip
        config = HiCacheStorageConfig(
            rank, ranks, 0, 1, 0, 1, False, False, layout == "page_first", "demo", extra_config=extra
        )
        controller = HybridCacheController.__new__(HybridCacheController)  # without its threads and processes
        controller.page_size, controller.storage_host_pool = page, self.pool
        controller.storage_backend = StorageBackendFactory.create_backend("dynamic", config, self.pool)
        controller.storage_backend.register_mem_pool_host(self.pool)
        controller.page_get_func, controller.page_set_func = (
            controller._page_get_zero_copy, controller._page_set_zero_copy
        )  # fmt: skip
        controller.prefetch_sync_queue, controller.storage_config = queue.Queue(), config
        controller.mem_pool_host = SimpleNamespace(layout_lease=nullcontext)
        self.controller, self.backend = controller, controller.storage_backend

    def keep(self, tokens: list[int], rows_2LTHD: Tensor, prefix: int = 0) -> int:
        """Write rows of all but the first `prefix` tokens into the pool, and have them kept; returns how many are."""
        slots = self._slots(len(tokens) - prefix)
        for place, slot in enumerate(slots.view(-1, self.pool.page_size)[:, 0].tolist()):
            span = slice(prefix + place * self.pool.page_size, prefix + (place + 1) * self.pool.page_size)
            self.backend._page(slot).copy_(rows_2LTHD[:, :, span])
        keys = get_storage_hash_str(tokens, None, page_size=self.pool.page_size)
        before = prefix // self.pool.page_size
        operation = StorageOperation(slots, tokens[prefix:], hash_value=keys[before:], prefix_keys=keys[:before])
        self.controller._page_backup(operation)
        return prefix + operation.completed_tokens

    def find(self, tokens: list[int], prefix: int = 0) -> tuple[int, Tensor]:
        """How many tokens SGLang finds and loads of these after `prefix`, and the rows that are in the pool then.

        Where it finds, it tells the keys of the last node's ancestors, without that node's own, and none at the root.
        """
        keys = get_storage_hash_str(tokens, None, page_size=self.pool.page_size)
        before = prefix // self.pool.page_size
        last = keys[before - 1] if before else None
        operation = PrefetchOperation(SimpleNamespace(rid="one"), tokens[prefix:], last, keys[: max(0, before - 1)])
        operation.hash_value, hit = self.controller._storage_hit_query(operation)
        operation.host_indices = self._slots(hit)
        self.controller._page_transfer(operation)
        loaded = 0
        while not self.controller.prefetch_sync_queue.empty():
            ack = self.controller.prefetch_sync_queue.get()
            loaded = max(loaded, ack.completed_tokens or 0)
        pages = [self.backend._page(slot) for slot in operation.host_indices[: loaded : self.pool.page_size].tolist()]
        return loaded, torch.cat(pages, 2) if pages else torch.empty(2, LAYERS, 0, HEADS, SIZE)

    def _slots(self, tokens: int) -> Tensor:
        """Slots of whole pages, in no order."""
        pages = torch.randperm(SLOTS // self.pool.page_size, generator=torch.Generator().manual_seed(tokens))
        first_P = pages[: tokens // self.pool.page_size, None] * self.pool.page_size
        return (first_P + torch.arange(self.pool.page_size)).flatten()


@pytest.fixture(scope="module")
def rows() -> Tensor:
    """Keys after RoPE and values of the model for TOKENS, [2, layers, tokens, heads, head size]."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([TOKENS]) % model.config.vocab_size, past_key_values=cache)
    return torch.stack([torch.stack([x[0].transpose(0, 1) for x in (one.keys, one.values)]) for one in cache.layers], 1)


@pytest.fixture(scope="module")
def aqua(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An artifact of the model, with the tensors that a fit would find drawn at random."""
    config, recipe = source.config(str(MODEL), None), preset("aqua-2bit")
    print_of = fingerprint.from_config(config, source._weights(MODEL))
    path = tmp_path_factory.mktemp("aqua") / "kvq.safetensors"
    path.write_bytes(
        artifact.to_bytes(Artifact(recipe, print_of, fitted.tensors(recipe, print_of.geometry), {"model": "demo"}, {}))
    )
    return str(path)


def decoded(recipe: str, rows_2LTHD: Tensor) -> Tensor:
    """What kvq's own store of the same tokens gives, without SGLang."""
    given = source.read(recipe)
    geometry = source.match(given, source.config(str(MODEL), None), str(MODEL), None)
    store = PrefixBlocks(
        None, given.recipe, geometry, given.tensors, model="x", rotary=rotary_of_folder(MODEL, torch.bfloat16)
    )
    store.put(TOKENS, rows_2LTHD[0], rows_2LTHD[1])
    return torch.stack([torch.stack([k, v]) for _, k, v in store.decode(store.load(TOKENS))], 1).clone()


@pytest.mark.parametrize("layout", storage.LAYOUTS)
def test_pages_of_every_layout_are_found_by_another_server(layout: str, rows: Tensor, tmp_path: Path):
    """What a layout keeps every other loads, bit for bit in 16 bits."""
    assert Server(tmp_path, "exact", layout).keep(TOKENS, rows) == len(TOKENS)
    for other in storage.LAYOUTS:
        found, loaded = Server(tmp_path, "exact", other).find(TOKENS)
        assert found == len(TOKENS) and torch.equal(loaded, rows)


@pytest.mark.parametrize("name", ["kivi-2bit", "lloyd-3bit", "aqua-2bit"])
def test_numbers_are_the_stores_own(name: str, aqua: str, rows: Tensor, tmp_path: Path):
    """Of a recipe by channel, one by token, and one before RoPE that predicts layers from those below."""
    recipe = aqua if name == "aqua-2bit" else name
    server = Server(tmp_path, recipe)
    assert server.keep(TOKENS[: 2 * PAGE], rows) == 2 * PAGE
    assert server.keep(TOKENS, rows, 2 * PAGE) == len(TOKENS)  # as it is computed, request by request
    found, loaded = Server(tmp_path, recipe).find(TOKENS)
    assert found == len(TOKENS) and torch.equal(loaded, decoded(recipe, rows))
    found, loaded = Server(tmp_path, recipe).find(TOKENS, 3 * PAGE)  # the first pages are in the server's memory
    assert found == 2 * PAGE and torch.equal(loaded, decoded(recipe, rows)[:, :, 3 * PAGE :])


def test_other_tokens_and_other_recipes_are_not_found(rows: Tensor, tmp_path: Path):
    server = Server(tmp_path, "exact")
    assert server.keep(TOKENS, rows, 2 * PAGE) == len(TOKENS)
    assert Server(tmp_path, "exact").find(TOKENS)[0] == 0, "the first page is not kept"
    found, loaded = Server(tmp_path, "exact").find(TOKENS, 2 * PAGE)
    assert found == 3 * PAGE and torch.equal(loaded, rows[:, :, 2 * PAGE :])
    assert server.keep(TOKENS, rows) == len(TOKENS)
    other = [*TOKENS[: 2 * PAGE], 7, *TOKENS[2 * PAGE + 1 :]]
    assert Server(tmp_path, "exact").find(other)[0] == 2 * PAGE
    assert Server(tmp_path, "lloyd-3bit").find(TOKENS)[0] == 0


def test_a_damaged_page_ends_what_is_loaded_and_is_written_again(rows: Tensor, tmp_path: Path):
    server = Server(tmp_path, "exact")
    server.keep(TOKENS, rows)
    (third,) = server.backend._names(get_storage_hash_str(TOKENS, None, page_size=PAGE)[2])
    (path,) = (path for path in tmp_path.rglob("*") if path.name.startswith(third))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    found, loaded = Server(tmp_path, "exact").find(TOKENS)
    assert found == 2 * PAGE and torch.equal(loaded, rows[:, :, : 2 * PAGE]) and not path.exists()
    assert server.keep(TOKENS, rows) == len(TOKENS)
    assert Server(tmp_path, "exact").find(TOKENS)[0] == len(TOKENS)


def test_workers_have_their_heads(rows: Tensor, tmp_path: Path):
    for rank in (0, 1):
        own = rows[:, :, :, rank : rank + 1]
        assert Server(tmp_path, "lloyd-3bit", rank=rank, ranks=2).keep(TOKENS, own) == len(TOKENS)
    whole = decoded("lloyd-3bit", rows)
    for rank in (0, 1):
        found, loaded = Server(tmp_path, "lloyd-3bit", rank=rank, ranks=2).find(TOKENS)
        assert found == len(TOKENS) and torch.equal(loaded, whole[:, :, :, rank : rank + 1])


def test_what_is_not_finite_and_a_full_disk_keep_what_was_before(rows: Tensor, tmp_path: Path, monkeypatch, caplog):
    server = Server(tmp_path, "exact")
    broken = rows.clone()
    broken[0, 3, 4 * PAGE + 5] = float("nan")
    assert server.keep(TOKENS, broken) == 0, "SGLang takes no part of a batch of pages that failed for kept"
    assert "NaN" in caplog.text and Server(tmp_path, "exact").find(TOKENS)[0] == 4 * PAGE

    def full(name: str, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(server.backend.store.shelf, "put", full)
    assert server.keep(TOKENS, rows) == 0 and "No space left" in caplog.text


def test_without_the_keys_before_nothing_is_kept_and_it_is_said_once(rows: Tensor, tmp_path: Path, caplog):
    server = Server(tmp_path, "exact")
    page = torch.arange(PAGE)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert server.backend.batch_set_v1(["a"], page, None) == [False]
    assert caplog.text.count("hicache_storage_pass_prefix_keys") == 1


@pytest.mark.parametrize(("recipe", "more", "message"), [
    ("exact", {"recent": 3}, "SGLang decides"), ("exact", {"dtype": torch.uint8}, "--kv-cache-dtype"),
    ("exact", {"model": None}, 'lacks "model"'), ("exact", {"salt": "x"}, "has salt"),
    ("exact", {"interface_v1": 0}, "interface_v1"), ("exact", {"page": 64}, "--page-size 128"),
    ("subkv-2bit", {}, "KVQStorage, recipe subkv-2bit"), ("aqua-2bit", {}, "has to be fitted"),
    ("exact", {"model": "nowhere/at-all"}, "no config.json"),
])  # fmt: skip
def test_what_cannot_be_kept_is_refused_at_the_start(recipe: str, more: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises((ValueError, RuntimeError), match=message):
        Server(tmp_path, recipe, **more)


def test_an_artifact_of_another_model_is_refused(aqua: str, tmp_path: Path):
    found = json.loads((MODEL / "config.json").read_text()) | {"rope_theta": 7.0, "rope_parameters": None}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(found))
    with pytest.raises((ValueError, RuntimeError), match="fingerprint"):
        Server(tmp_path / "kept", aqua, model=str(tmp_path / "model"))
