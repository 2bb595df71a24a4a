"""What a scheduler orders: which tokens of a request are loaded, which are kept, and what no request may load."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import fitted
import pytest
import torch
from feeding import GEOMETRY, RECIPES

from kvq_runtime.engines.scheduler import Planner, Text, text_of
from kvq_runtime.prefix.store import PrefixBlocks

RECIPE = RECIPES["rtn-2bit"]
PAGE, BLOCK = 8, RECIPE.window.block


def store(part: int = 0, path=None) -> PrefixBlocks:
    return PrefixBlocks(path, RECIPE, GEOMETRY, fitted.tensors(RECIPE, GEOMETRY), model=f"m {part}")


def fill(kept: PrefixBlocks, count: int, salt: str = "") -> None:
    rows = [torch.randn(count, GEOMETRY.kv_heads, GEOMETRY.head_size).bfloat16() for _ in range(GEOMETRY.layers)]
    kept.under(salt).put(range(count), rows, rows)


def request(count: int, **other: Any) -> Text:
    """As vLLM has it."""
    given = {"request_id": "a", "all_token_ids": list(range(count)), "prompt_token_ids": [*range(count)]}
    given |= {"num_preemptions": 0, "cache_salt": None, "mm_features": [], "prompt_embeds": None}
    return text_of(SimpleNamespace(**given | {"lora_request": None} | other))


def pages(name: str) -> list[int]:
    return [*range(100, 140)]


def test_whole_blocks_that_all_workers_have_are_loaded_but_not_the_newest_tokens():
    stores = [store(0), store(1)]
    fill(stores[0], 5 * BLOCK)
    fill(stores[1], 3 * BLOCK)
    long, exact = request(100), request(3 * BLOCK)
    assert Planner(stores, PAGE, 0).matched(long, 0) == 3 * BLOCK
    assert Planner(stores, PAGE, 0).matched(long, 2 * PAGE) == 3 * BLOCK - 2 * PAGE
    assert Planner(stores, PAGE, 0).matched(exact, 0) == 2 * BLOCK  # one token has to be computed
    assert Planner(stores[:1], PAGE, 30).matched(long, 0) == 4 * BLOCK
    assert Planner(stores, PAGE, 0).matched(long, 4 * BLOCK) == 0


def test_an_order_has_the_pages_of_its_tokens():
    planner = Planner([store()], PAGE, 0)
    fill(planner.stores[0], 3 * BLOCK)
    one = request(70)
    assert planner.matched(one, PAGE) == 3 * BLOCK - PAGE
    planner.allocated(one, 3 * BLOCK - PAGE)
    (load,) = planner.orders({}, pages).loads
    assert (load.start, load.stop, load.tokens) == (PAGE, 3 * BLOCK, tuple(range(3 * BLOCK)))
    assert load.pages == tuple(range(101, 100 + 3 * BLOCK // PAGE))
    assert planner.orders({}, pages).loads == []
    planner.allocated(one, 0)  # the load has ended
    (keep,) = planner.orders({"a": (0, 66)}, pages).keeps
    assert (keep.start, keep.stop, len(keep.pages)) == (0, 64, 64 // PAGE)


def test_blocks_are_kept_once_they_are_computed_and_their_tokens_known():
    planner, one = Planner([store()], PAGE, 0), request(40)
    assert planner.matched(one, 0) == 0
    planner.allocated(one, 0)
    assert [(o.start, o.stop) for o in planner.orders({"a": (0, 31)}, pages).keeps] == [(0, 16)]
    assert planner.orders({"a": (0, 31)}, pages).keeps == []
    drafts = planner.orders({"a": (0, 64)}, pages).keeps  # eight drafts may be refused: 40 tokens are known
    assert [(o.start, o.stop) for o in drafts] == [(16, 32)]
    one.tokens.extend([7] * 24)  # type: ignore[attr-defined]
    assert [(o.start, o.stop) for o in planner.orders({"a": (0, 64)}, pages).keeps] == [(32, 64)]
    planner.finished(["a"])
    assert planner.orders({"a": (0, 100)}, pages).keeps == []


def test_what_is_in_a_loaded_page_is_decoded_until_something_is_computed_into_it():
    """Whoever shares it; the page of another text may be the same one."""
    planner = Planner([store()], PAGE, 0)
    fill(planner.stores[0], 2 * BLOCK)
    assert planner.matched(request(70), 0) == 2 * BLOCK
    planner.allocated(request(70), 2 * BLOCK)
    planner.orders({}, pages)
    for name, before, decoded in (
        ("a", 32, {0, 1}),
        ("b", 33, {0, 1}),
        ("c", 17, {0, 1}),
        ("d", 8, {0}),
        ("e", 0, set()),
    ):
        planner.allocated(request(70, request_id=name), 0)
        (keep,) = planner.orders({name: (before, 70)}, pages).keeps
        assert (keep.start, keep.stop, keep.decoded) == (0, 64, decoded), name


def test_a_load_that_failed_is_not_tried_again_and_a_preempted_request_is():
    """Else a worker that cannot see the folder would make a request wait for ever."""
    planner, one = Planner([store()], PAGE, 0), request(70)
    fill(planner.stores[0], 64)
    assert planner.matched(one, 0) == 64
    planner.allocated(one, 64)
    assert planner.matched(one, 0) == 0
    assert planner.matched(replace(one, resets=1), 0) == 64


def test_room_that_is_waited_for_costs_one_look(monkeypatch):
    planner, one, looked = Planner([store()], PAGE, 0), request(70), []
    fill(planner.stores[0], 64)
    whole = PrefixBlocks.checked
    monkeypatch.setattr(PrefixBlocks, "checked", lambda *given: looked.append(given[3]) or whole(*given))
    assert [planner.matched(one, computed) for computed in (32, 32, 40, 0)] == [32, 32, 24, 64]
    assert looked == [32, 0]  # again once less is computed than was looked at


def test_a_damaged_block_is_never_promised(tmp_path, caplog):
    planner, one = Planner([store(path=tmp_path)], PAGE, 0), request(70)
    fill(planner.stores[0], 64)
    path = sorted(tmp_path.rglob("*.safetensors"), key=lambda file: file.stat().st_mtime)[1]
    path.write_bytes(path.read_bytes()[:-3] + b"abc")
    found = planner.matched(one, 0)
    assert found < 64 and found % BLOCK == 0 and "damaged, and removed" in caplog.text
    assert planner.take_counts() == {"lookups": 1, "blocks_damaged": 1} and not path.exists()


@pytest.mark.parametrize("other", [
    {"mm_features": ["an image"]}, {"prompt_embeds": torch.zeros(1)}, {"lora_request": "an adapter"},
    {"prompt_token_ids": None}, {"skip_reading_prefix_cache": True}, {"cache_salt": "another"},
    {"prompt_is_token_ids": [True]},
])  # fmt: skip
def test_what_tokens_alone_do_not_decide_is_not_loaded(other):
    planner = Planner([store()], PAGE, 0)
    fill(planner.stores[0], 64)
    assert planner.matched(request(70, **other), 0) == 0
    if "cache_salt" not in other and "skip_reading_prefix_cache" not in other:
        planner.allocated(request(70, **other), 0)
        assert planner.orders({"a": (0, 70)}, pages).keeps == []


def test_a_tenant_finds_what_was_kept_for_it():
    planner = Planner([store()], PAGE, 0)
    fill(planner.stores[0], 64, salt="mine")
    assert planner.matched(request(70, cache_salt="mine"), 0) == 64
    assert planner.matched(request(70, request_id="b"), 0) == 0
