"""A policy that nobody has heard of, defined in this file, works in a cache: every hook, undo, crop, rows, memory."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from feeding import GEOMETRY, RECIPES, feed, feed_in, make, same, state, tensors
from owned_bytes import owned
from torch import Tensor

from kvq_runtime import recipe as recipes
from kvq_runtime.policies.policy import CacheParts, Policy
from kvq_runtime.policy_setting import PolicySetting
from kvq_runtime.recipe import Recipe
from kvq_runtime.store.layer import LayerStore
from kvq_runtime.store.step import Step
from kvq_runtime.store.storage import storage_bytes


@dataclass(frozen=True)
class Patience(PolicySetting):
    """Encode a block when it has been due for `passes` forward passes; note its largest key."""

    kind: ClassVar[str] = "patience"
    slot: ClassVar[str] = "patience"
    arrival_dependent: ClassVar[bool] = True
    passes: int = 2

    def policy(self, cache: CacheParts) -> Policy:
        return PatiencePolicy(self, cache)

    def extra_bits(self, role, dtype) -> float:
        return 8 * dtype.itemsize / (16 * GEOMETRY.width) if role == "key" else 0.0


class PatiencePolicy(Policy):
    def __init__(self, setting: Patience, cache: CacheParts):
        self.setting, self.cache = setting, cache
        self.waited = torch.zeros(0)  # passes, by row: as if rows could differ
        self.calls: list[str] = []
        self.largest: dict[int, Tensor] = {}

    def begin(self, step: Step) -> None:
        self.calls.append(f"begin {step.before} {step.count}")
        step.on_undo(self._restore, self.waited)
        if not len(self.waited):
            self.waited = torch.zeros(step.batch)
        due = any(store.beyond(store.recent, step.count) for store in self.cache.stores.values())
        self.waited = self.waited + 1 if due else torch.zeros_like(self.waited)

    def may_encode(self, layer: int) -> bool:
        return bool((self.waited >= self.setting.passes).all())

    def encoding(self, store: LayerStore, count: int) -> None:
        self.largest[store.layer] = store.window_2BTC[0, :, : count * store.window.block].amax((1, 2))

    def end(self, step: Step) -> None:
        self.calls.append(f"end {sorted(step.done)}")

    def crop(self, length: int) -> None:
        self.calls.append(f"crop {length}")
        self.waited = self.waited[:0] if length == 0 else self.waited

    def reorder(self, rows: Tensor) -> None:
        self.waited = self.waited[rows]

    def bytes(self) -> dict[str, int]:
        return {"patience": storage_bytes([self.waited]), "largest": storage_bytes(self.largest.values())}

    def _restore(self, waited: Tensor) -> None:
        self.waited = waited


BASE = RECIPES["higgs-2bit"]  # blocks of 16, 12 recent tokens
PATIENT = replace(BASE, name="patient", policies=(Patience(),)).check()


def test_blocks_wait_and_carry_what_the_policy_stores():
    x, cache = tensors(100), make(PATIENT)
    feed_in(cache, x, [28, 4])  # a block is due after the first pass; in the second it has waited once
    assert cache.layers[0].blocks == 0 and cache.policies[0].calls == ["begin 0 28", "end [0, 1, 2]", "begin 28 4",
                                                                       "end [0, 1, 2]"]  # fmt: skip
    feed_in(cache, x, [1])
    for layer, store in cache.layers.items():
        assert store.blocks == 1
        assert torch.equal(cache.policies[0].largest[layer], x[layer, 0, :, :16].amax((1, 2)))
    report = cache.memory_report()
    assert report.total_bytes == sum(owned(cache).values())
    assert report.parts["patience"] == 2 * 4 and report.parts["largest"] == 3 * 2 * 4
    assert report.asymptotic_bits == make(BASE).memory_report().asymptotic_bits + 16 / (2 * 16 * GEOMETRY.width) * 2


def test_a_pass_that_fails_or_stops_is_undone():
    x, cache, other = tensors(100), make(PATIENT), make(PATIENT)
    for each in (cache, other):
        feed_in(each, x, [28, 4])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(PatiencePolicy, "end", lambda self, step: 1 / 0)
        feed(cache, x, 32, 33)  # all layers have encoded a block
    assert cache.layers[0].blocks == 0 and torch.equal(cache.policies[0].waited, other.policies[0].waited)
    feed(cache, tensors(100, seed=4), 32, 60, layers=[0, 1])
    assert cache.length == 32
    for each in (cache, other):
        feed_in(each, x, [3, 1, 20, 1, 1, 1])
    assert cache.layers[0].blocks == 2 and same(state(cache), state(other))
    assert cache.reencoded == 0


def test_it_follows_crops_and_rows():
    x, rows = tensors(100), torch.tensor([1, 1, 0])
    cache, other = make(PATIENT), make(PATIENT)
    feed_in(cache, x, [28, 4, 1])
    cache.reorder(rows)
    feed_in(other, x[:, :, rows], [28, 4, 1])
    for each in (cache, other):
        feed_in(each, x[:, :, rows], [30, 1, 1])
        each.crop(20)
        assert each.policies[0].calls[-1] == "crop 20" and each.reencoded == 4
        feed_in(each, x[:, :, rows], [30, 1])
    assert same(state(cache), state(other)) and cache.memory_report().total_bytes == sum(owned(cache).values())
    cache.crop(0)
    feed_in(cache, x, [28])
    assert cache.rows == 2


def test_a_recipe_holds_it_in_its_list_of_policies(monkeypatch):
    known = recipes.policy_kinds()
    kinds = known | {"patience": Patience}
    monkeypatch.setattr(recipes, "policy_kinds", lambda: kinds)
    stated = replace(PATIENT, policies=(Patience(3),)).to_json()
    assert stated["policies"] == [{"kind": "patience", "passes": 3}]
    assert Recipe.from_json(stated).policies == (Patience(3),)
    with pytest.raises(ValueError, match="policies must be a list"):
        Recipe.from_json(stated | {"policies": {"kind": "patience"}})
    with pytest.raises(ValueError, match="use an object with a kind of"):
        Recipe.from_json(stated | {"policies": [{"kind": "unknown"}]})
    assert BASE.to_json()["policies"] == []
