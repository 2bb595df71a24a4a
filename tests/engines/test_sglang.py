"""SGLang's own host pool, controller and hashes, without its engine: what its pages have beyond every store's contract.

`make test-sglang`, with test_stores.py. No engine runs here: SGLang's needs a GPU, or its own kernels for a CPU.
"""

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="SGLang is in an environment of its own: make test-sglang")

import stores
import torch
from sglang_server import PAGE, Server
from torch import Tensor

from kvq_runtime.sglang import storage

TOKENS = stores.ids(5 * PAGE)


@pytest.fixture(scope="module")
def rows() -> Tensor:
    return stores.rows(len(TOKENS))


@pytest.fixture(scope="module")
def aqua(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stores.aqua(tmp_path_factory.mktemp("aqua"))


def decoded(recipe: str, rows_2LTHD: Tensor) -> Tensor:
    return stores.decoded(recipe, TOKENS, rows_2LTHD)


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


def test_pages_whose_beginning_is_not_kept_are_found_behind_it(rows: Tensor, tmp_path: Path):
    server = Server(tmp_path, "exact")
    assert server.keep(TOKENS, rows, 2 * PAGE) == len(TOKENS)
    assert Server(tmp_path, "exact").find(TOKENS)[0] == 0, "the first page is not kept"
    found, loaded = Server(tmp_path, "exact").find(TOKENS, 2 * PAGE)
    assert found == 3 * PAGE and torch.equal(loaded, rows[:, :, 2 * PAGE :])


def test_workers_have_their_heads(rows: Tensor, tmp_path: Path):
    for rank in (0, 1):
        own = rows[:, :, :, rank : rank + 1]
        assert Server(tmp_path, "lloyd-3bit", rank=rank, ranks=2).keep(TOKENS, own) == len(TOKENS)
    whole = decoded("lloyd-3bit", rows)
    for rank in (0, 1):
        found, loaded = Server(tmp_path, "lloyd-3bit", rank=rank, ranks=2).find(TOKENS)
        assert found == len(TOKENS) and torch.equal(loaded, whole[:, :, :, rank : rank + 1])


def test_of_pages_of_which_one_fails_none_counts(rows: Tensor, tmp_path: Path, caplog):
    """SGLang takes no part of a batch for kept; the files of those before are there."""
    broken = rows.clone()
    broken[0, 3, 4 * PAGE + 5] = float("nan")
    assert Server(tmp_path, "exact").keep(TOKENS, broken) == 0
    assert "NaN" in caplog.text and Server(tmp_path, "exact").find(TOKENS)[0] == 4 * PAGE


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
