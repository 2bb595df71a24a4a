"""A decode step recorded as one graph gives what steps taken one by one do, and asks the device nothing."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from feeding import RECIPES
from frozen import Silent, frozen
from fused_driver import FAMILIES, ONE, PADDED, SCALE, Driver, with_kernels  # noqa: F401
from models import prompt, random_model
from operations import no_kernels, operations
from parity import DEVICE
from tiers import some
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvq_runtime.cache import BlockCache
from kvq_runtime.hf import KVQCache

pytest.importorskip("triton")
from kvq_runtime.hf.cuda_graphs import captured, trial


def replayed(name: str, starts: Tensor | None, record: Callable | None, count: int = 4) -> None:
    """A recorded step gives, token after token and over a flush, what steps taken one by one do, bit for bit.

    Without padding it is given a mask as long as the cache at that moment, as by transformers 5.17 while it records.
    """
    one, two = Driver(FAMILIES[name], starts), Driver(FAMILIES[name], starts)
    recent, block = FAMILIES[name].window.recent, FAMILIES[name].window.block
    for driver in (one, two):
        driver.step(recent + 3 * block - 3, expected=False)  # the third step from here encodes a block
        driver.silent = True
        driver.step(1, expected=False)
        driver.cache.crop(driver.at - 1)
        driver.at -= 1
    k_BTC, v_BTC, q_BHTD = one.x[0, 0, :, :1].clone(), one.x[0, 1, :, :1].clone(), one.q[:, :, :1].clone()

    def step() -> Tensor:
        one.announce(1)
        one.cache.take(0, k_BTC, v_BTC)
        mask = torch.ones(1, 1, 1, one.cache.layers[0].length, dtype=torch.bool) if starts is None else None
        out = one.cache.attend(0, q_BHTD, mask, SCALE)
        one.cache.finish(0)
        return out

    again = captured(one.cache, step, *([] if record is None else [lambda s: record(one.cache, s, q_BHTD)]))
    blocks = one.cache.layers[0].blocks
    for at in range(one.at, one.at + count):
        for held, new in ((k_BTC, one.x[0, 0]), (v_BTC, one.x[0, 1]), (q_BHTD, one.q)):
            held.copy_(new.narrow(-2, at, 1))
        out, (wanted, _) = again(), two.step(1, expected=False)
        assert torch.equal(out, wanted)
    assert one.cache.layers[0].blocks > blocks
    assert one.cache.length == two.cache.length


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, starts", [("rtn-2bit", None), ("higgs-head-2bit", PADDED), ("mean-lloyd-3bit-post", PADDED)]
)
def test_a_step_depends_on_nothing_that_the_host_counts(name, starts):
    replayed(name, starts, frozen)


def test_what_is_not_the_kernels_is_not_recorded():
    driver = Driver(FAMILIES["rtn-2bit"])
    driver.step(58, expected=False)
    step = partial(driver.step, 1, expected=False)
    driver.cache.fused.fits = lambda *given: False
    with pytest.raises(RuntimeError, match="cannot be recorded"):
        captured(driver.cache, step)


@pytest.mark.gpu
@pytest.mark.parametrize("starts", [None, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_is_one_graph(name, starts):
    replayed(name, starts, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Tensor.cpu is the interpreter's here")
@pytest.mark.parametrize(
    "name", some(["rtn-2bit", "kivi-2-16", "mean-higgs-head-2bit-post"], "mean-higgs-head-2bit-post")
)
def test_a_step_asks_the_device_nothing(name, monkeypatch):
    driver = Driver(FAMILIES[name], PADDED)
    driver.step(58, expected=False)
    driver.silent = True
    driver.step(1, expected=False)
    driver.step(1, expected=False)
    driver.announce(1)
    new = driver.x[0, :, :, driver.at : driver.at + 1].unbind(0)
    launched = []
    monkeypatch.setattr("kvq_runtime.kernels.attend.launch.attend", lambda q, *rest: launched.append(q) or (q, q))
    with pytest.MonkeyPatch.context() as patch, Silent(patch):
        driver.cache.take(0, *new)
        driver.cache.attend(0, driver.q[:, :, :1], None, SCALE)
        driver.cache.finish(0)
    assert launched


def test_recording_is_refused_where_it_cannot_be():
    driver = Driver(RECIPES["higgs-head-4bit"])
    driver.step(40, expected=False)
    with pytest.raises(RuntimeError, match="no kernel for its keys"):
        captured(driver.cache, lambda: None)
    driver = Driver(FAMILIES["rtn-2bit"])
    driver.step(58, expected=False)
    with pytest.raises(RuntimeError, match="no tokens yet"):
        captured(BlockCache(FAMILIES["rtn-2bit"], ONE), lambda: None)
    left = driver.cache.layers[0]
    driver.step(left.window.recent + left.window.block - left.window_2BTC.shape[2] - 1, expected=False)
    with pytest.raises(RuntimeError, match="encodes a block"):
        captured(driver.cache, lambda: None)
    driver.step(1, expected=False)
    again = captured(driver.cache, lambda: driver.step(1, expected=False)[0], lambda step: (None, lambda: None))
    driver.cache.reset()
    with pytest.raises(RuntimeError, match="record it again"):
        again()


@pytest.mark.slow
def test_rows_that_change_places_take_their_padding_along():
    """After the recording, without an eager step in between, which would look for it."""
    one, two = Driver(FAMILIES["rtn-2bit"], PADDED), Driver(FAMILIES["rtn-2bit"], PADDED)
    for driver in (one, two):
        driver.step(58, expected=False)
        driver.silent = True
    k_BTC, v_BTC, q_BHTD = one.x[0, 0, :, :1].clone(), one.x[0, 1, :, :1].clone(), one.q[:, :, :1].clone()

    def step() -> Tensor:
        one.announce(1)
        one.cache.take(0, k_BTC, v_BTC)
        out = one.cache.attend(0, q_BHTD, None, SCALE)
        one.cache.finish(0)
        return out

    again = captured(one.cache, step, lambda step: frozen(one.cache, step, q_BHTD))
    rows = torch.tensor([1, 0], device=DEVICE)
    for driver in (one, two):
        driver.cache.reorder(rows)
        driver.x, driver.q = driver.x[:, :, rows], driver.q[rows]
    for held, new in ((k_BTC, one.x[0, 0]), (v_BTC, one.x[0, 1]), (q_BHTD, one.q)):
        held.copy_(new.narrow(-2, one.at, 1))
    assert torch.equal(again(), two.step(1, expected=False)[0])


@pytest.mark.parametrize("padded, waits", [(False, 1), (True, 3)])
def test_an_eager_step_with_a_mask_waits_for_the_device(padded, waits):
    """Once to see that nothing is padded; with padding for the model's mask, ours and the starts."""
    with no_kernels(), torch.no_grad():
        model = random_model("llama", attention="kvq", head_dim=64)
        cache, ids, mask = KVQCache(RECIPES["rtn-2bit"], model), prompt(2, 20), torch.ones(2, 26, dtype=torch.long)
        mask[0, :5] = not padded
        places, found = (mask.cumsum(1) - 1).clamp(min=0), []
        for first, last in ((0, 20), (20, 21), (21, 22), (22, 23)):
            given = {"attention_mask": mask[:, :last], "position_ids": places[:, first:last]}
            found.append(operations(lambda: model(ids[:, : last - first], past_key_values=cache, **given)))  # noqa: B023
        assert not cache.blocks.layers[0].blocks and cache.blocks.layers[0].index is not None
        assert [counts["waits"] for counts in found[2:]] == [waits, waits]


# ---- launches ------------------------------------------------------------------------------------------------------

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
def test_a_step_is_three_launches(monkeypatch):
    """Append, attend and merge."""
    from triton.runtime.interpreter import InterpretedFunction

    driver, launched = Driver(FAMILIES["lloyd-3bit"]), []
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
