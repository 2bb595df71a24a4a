"""A cache whose blocks the decode kernel reads attends as the torch path does over the same blocks."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from feeding import RECIPES, rotary, tensors, turned
from parity import DEVICE, error
from torch import Tensor

from kvq_runtime import attend
from kvq_runtime.cache import BlockCache
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import dispatch
from kvq_runtime.recipe import Recipe, Side
from kvq_runtime.stages.rtn import Rtn

pytest.importorskip("triton")
from kvq_runtime.fused import FixedStream

TOLERANCE = 4e-3  # float16 operands of the kernel's products, bfloat16 codebooks of the torch path
ONE = Geometry(layers=1, kv_heads=2, head_size=32)
RATIO = 2  # query heads of a KV head
SCALE = ONE.head_size**-0.5


def kivi(bits: int, position: str = "post") -> Recipe:
    """KIVI with a key group for each block, in blocks of 16."""
    window = {"sinks": 2, "recent": 8, "block": 16}
    key, value = Side(Rtn(bits, 16), axis="channel", **window), Side(Rtn(bits, "head"), **window)
    return Recipe(f"kivi-{bits}-{position}", key, value, position)  # type: ignore[arg-type]


# families (a) and (b) of the kernel
FAMILIES = {
    **{recipe.name: recipe for recipe in (kivi(2), kivi(4), kivi(2, "pre"))},
    **{name: RECIPES[name] for name in ("rtn-2bit", "quarot-head-4bit", "higgs-head-2bit", "lloyd-3bit", "polar-3bit")},
}
PADDED = torch.tensor([21, 0])


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """On a CPU, in Triton's interpreter."""
    with dispatch.forced(True):
        yield


class Driver:
    """A cache of one layer, fed with random keys, values and queries, and compared at every pass."""

    def __init__(self, recipe: Recipe, starts: Tensor | None = None, rows: int = 2, dtype: torch.dtype = torch.float32):
        self.cache = BlockCache(recipe, ONE, max_tokens=256)
        x = turned(tensors(300, rows, ONE), ONE)
        self.x = x.to(DEVICE, dtype)
        self.q = torch.randn(rows, 2 * RATIO, 300, 32, generator=torch.Generator().manual_seed(3)).to(DEVICE, dtype)
        self.real = None if starts is None else torch.arange(300, device=DEVICE) >= starts.to(DEVICE)[:, None]
        self.at = 0

    def announce(self, count: int) -> Tensor | None:
        """Tell the cache of the next tokens; the mask that a model would give."""
        stop, real = self.at + count, self.real
        positions = torch.arange(self.at, stop)[None] if real is None else (real.cumsum(1) - 1).clamp(min=0)
        turning = rotary(ONE)
        turning = replace(turning, frequencies_K=turning.frequencies_K.to(DEVICE))
        positions = positions.to(DEVICE) if real is None else positions[:, self.at : stop]
        self.cache.timeline.announce(None if real is None else real[:, self.at : stop], positions, turning)
        if real is None:
            return None
        causal = torch.ones(count, stop, dtype=torch.bool, device=DEVICE).tril(self.at)
        return causal & real[:, None, None, :stop]

    def step(self, count: int = 1, expected: bool = True) -> tuple[Tensor, Tensor | None]:
        """One pass: (what the cache answers, what the torch path does)."""
        mask, part, cache = self.announce(count), slice(self.at, self.at + count), self.cache
        cache.take(0, *self.x[0, :, :, part].unbind(0))
        out, wanted = cache.attend(0, self.q[:, :, part], mask, SCALE), None
        if expected:
            with dispatch.forced(False):
                wanted = attend.attend(cache.history, 0, self.q[:, :, part], mask, SCALE)
        cache.finish(0)
        self.at += count
        return out, wanted

    def check(self, count: int = 1) -> None:
        """A pass in which both agree, where a row has tokens at all."""
        out, wanted = self.step(count)
        assert wanted is not None
        rows = slice(None) if self.real is None else self.real[:, self.at - count : self.at].all(1)
        assert error(out[rows], wanted[rows]) < TOLERANCE
        assert not torch.equal(out[rows], wanted[rows])  # two roads


@pytest.mark.parametrize("starts", [None, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("name", FAMILIES)
def test_kernel_and_torch_agree(name, starts):
    driver = Driver(FAMILIES[name], starts)
    driver.step(58, expected=False)
    streams = driver.cache.layers[0]
    blocks = streams[0].blocks
    assert all(isinstance(stream, FixedStream) and stream.blocks for stream in streams)
    for count in (1, 15, 1) if starts is None else (2,):
        driver.check(count)
    assert streams[0].blocks > blocks or starts is not None


def test_sixteen_bits():
    driver = Driver(FAMILIES["higgs-head-2bit"], PADDED, dtype=torch.bfloat16)
    driver.step(40, expected=False)
    driver.check()


def test_sinks_that_arrive_after_the_prompt():
    driver = Driver(FAMILIES["rtn-2bit"], torch.tensor([31, 0]))
    driver.step(33, expected=False)
    for _ in range(4):
        driver.check()
    assert driver.cache.layers[0][0].blocks


def test_reset_crop_and_other_rows():
    driver = Driver(FAMILIES["rtn-2bit"], PADDED)
    driver.step(70, expected=False)
    for change in (lambda: driver.cache.crop(68), lambda: driver.cache.crop(37), lambda: driver.cache.reset()):
        driver.check()
        change()
        driver.at = driver.cache.length
    driver.step(60, expected=False)
    for rows in ([1, 0], [0, 0], [1, 0, 1]):
        driver.check()
        chosen = torch.tensor(rows, device=DEVICE)
        driver.cache.select(chosen)
        driver.x, driver.q, driver.real = driver.x[:, :, chosen], driver.q[chosen], driver.real[chosen]  # type: ignore
    driver.check()
