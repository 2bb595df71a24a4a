"""The device is told of all layers at once, in copies that are not waited for."""

import pytest
import torch
from feeding import RECIPES, rotary, tensors, turned
from fused_driver import with_kernels  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode

from kvq_runtime.cache import BlockCache
from kvq_runtime.geometry import Geometry

pytest.importorskip("triton")


class Copies(TorchDispatchMode):
    """Counts what is sent to the device, without waiting for it, and what else is copied: on it, or on the host."""

    def __init__(self):
        super().__init__()
        self.sent = self.others = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "aten::copy_":
            sent = args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking", False)
            self.sent, self.others = self.sent + sent, self.others + (not sent)
        return func(*args, **(kwargs or {}))


def published(layers: int) -> list[tuple[int, int]]:
    """(sent, others) after a pass in which a slab is new, and after one in which none is."""
    recipe, geometry = RECIPES["rtn-2bit"], Geometry(layers, 1, 64)
    cache, window = BlockCache(recipe, geometry, max_tokens=256), recipe.window
    x, found = turned(tensors(8 * window.block, 1, geometry), geometry), []
    at = 0
    for count in (window.recent + 3 * window.block, window.block, 1):
        cache.positions.announce(None, torch.arange(at, at + count)[None], rotary(geometry))
        for layer in range(layers):
            cache.take(layer, *x[layer, :, :, at : at + count].unbind(0))
            cache.finish(layer)
        at += count
        if all(store.index.stale for store in cache.layers.values()):
            with Copies() as copies:
                cache.fused.publish(cache.layers)
            found.append((copies.sent, copies.others))
    stores = cache.layers.values()
    wanted = [[store.blocks, store.window_start, store.window_2BTC.shape[2], 0] for store in stores]
    assert wanted[0][0] == 4 and [store.index.counts.tolist() for store in stores] == wanted
    return found


def test_counts_of_all_layers_are_one_copy():
    """Beside them the addresses of new slabs, of keys and of values, and once the sinks, which are on the device."""
    assert published(3) == [(1 + 2 * 3, 3 + 2 * 3), (1, 0)]


def test_a_device_counts_what_the_host_does_after_every_change():
    """The window's append counts on; a crop, other rows and an undone pass are told."""
    recipe, geometry = RECIPES["rtn-2bit"], Geometry(3, 1, 64)
    cache, window = BlockCache(recipe, geometry, max_tokens=256), recipe.window
    x = turned(tensors(8 * window.block, 2, geometry), geometry)

    def step(count: int, layers: int = 3) -> None:
        at = cache.length
        cache.positions.announce(None, torch.arange(at, at + count)[None], rotary(geometry))
        for layer in range(layers):
            cache.take(layer, *x[layer, :, :, at : at + count].unbind(0))
            cache.finish(layer)

    changes = (
        lambda: step(window.recent + 2 * window.block - 2), lambda: step(1), lambda: step(1),
        lambda: cache.crop(cache.length - 1), lambda: step(1), lambda: step(1, layers=2), lambda: step(1),
        lambda: cache.reorder(torch.tensor([1, 0])), lambda: step(1),
    )  # fmt: skip
    for change in changes:
        change()
        if cache.step is None:
            cache.fused.publish(cache.layers)
        for store in cache.layers.values():
            if not store.index.stale:
                held = [store.blocks, store.window_start, store.window_2BTC.shape[2], 0]
                assert store.index.counts.tolist() == held
                assert torch.equal(store.index.sinks_2BSC, store.sinks_2BSC)
