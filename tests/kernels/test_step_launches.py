"""A decode step, as it is recorded, launches three kernels a layer, whatever the family: append, attend, merge."""

import pytest
import torch
from fused_driver import FAMILIES, SCALE, Driver, with_kernels  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode

from kvq_runtime.hf.cuda_graphs import trial

pytest.importorskip("triton")

FREE = ("aten.empty", "aten.new_empty", "aten.empty_like", "aten.detach", "aten._unsafe_view", "aten.lift_fresh")


class Computed(TorchDispatchMode):
    """The ops that compute: all but views, and memory that is not filled."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if not func.is_view and not name.startswith(FREE):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts in the interpreter, which a GPU replaces")
@pytest.mark.parametrize("name", ["lloyd-3bit"])
def test_a_step_is_three_launches(name, monkeypatch):
    from triton.runtime.interpreter import InterpretedFunction

    driver, launched = Driver(FAMILIES[name]), []
    driver.step(58, expected=False)
    driver.step(1, expected=False)
    store = driver.cache.layers[0]
    assert store.blocks and store.index is not None
    while store.index.stale or store.beyond(store.recent, 1):  # the step before, or this one, encodes a block
        driver.step(1, expected=False)
    driver.announce(1)
    new = [x.clone() for x in driver.x[0, :, :, driver.at : driver.at + 1]]
    q_BHTD = driver.q[:, :, :1].to(torch.bfloat16).contiguous()
    monkeypatch.setattr(InterpretedFunction, "run", lambda self, *args, **given: launched.append(self.fn.__name__))
    with trial(driver.cache), torch.autocast("cpu", torch.bfloat16), Computed() as computed:
        driver.cache.take(0, *new)
        driver.cache.attend(0, q_BHTD, None, SCALE)
        driver.cache.finish(0)
    assert launched == ["_append", "attend", "merge"]
    assert computed.names == []
