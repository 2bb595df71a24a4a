"""Drive a cache of one layer whose blocks the decode kernel reads, and the torch path over the same blocks."""

from collections.abc import Iterator
from dataclasses import replace

import fitted
import pytest
import torch
from feeding import RECIPES, rotary, tensors, turned
from parity import DEVICE, error
from torch import Tensor

from kvq_runtime.attention.path import Query
from kvq_runtime.cache import BlockCache
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import dispatch
from kvq_runtime.ops.dense import Softmax
from kvq_runtime.recipe import Recipe, Scheme, Window
from kvq_runtime.stages.predict import Mean
from kvq_runtime.stages.rtn import Rtn

TOLERANCE = 4e-3  # float16 operands of the kernel's products, bfloat16 codebooks of the torch path
ONE = Geometry(layers=1, kv_heads=1, head_size=64)
RATIO = 2  # query heads of a KV head
SCALE = ONE.head_size**-0.5


def kivi(bits: int, block: int = 16) -> Recipe:
    """KIVI, keys in groups of 16: a block or a part of it."""
    group = 16
    value = Scheme(Rtn(bits, "head" if group == block else group))
    key = replace(value, quantize=Rtn(bits, group), axis="channel")
    return Recipe(f"kivi-{bits}-{block}", key, value, window=Window(2, 8, block))


def centred(roles: str) -> Recipe:
    """KIVI with the mean removed of one side or both."""
    made = kivi(2)
    schemes = {role: replace(getattr(made, role), predict=Mean()) for role in roles.split()}
    return replace(made, name=f"mean-{made.name}-{roles.replace(' ', '-')}", **schemes)


# families (a) and (b) of the kernel
FAMILIES = {
    **{recipe.name: recipe for recipe in (kivi(2), kivi(2, block=32))},
    **{name: RECIPES[name] for name in ("rtn-2bit", "quarot-head-4bit", "higgs-head-2bit")},
    **{name: replace(RECIPES[name], window=Window(2, 8, 32)) for name in ("lloyd-3bit", "mean-lloyd-3bit-post")},
    **{
        name: RECIPES[name]
        for name in ("polar-3bit", "polar-paper-fitted+all.quantize.levels=0+all.quantize.points=mean")
    },
}
MEANS = {
    **{name: RECIPES[name] for name in ("mean-higgs-head-2bit-post",)},
    **{one.name: one for one in (centred("key value"), centred("value"), centred("key"))},
}
FAMILIES |= MEANS
PADDED = torch.tensor([21, 0])


@pytest.fixture(autouse=True)
def with_kernels() -> Iterator[None]:
    """On a CPU, in Triton's interpreter."""
    with dispatch.forced(True):
        yield


class Driver:
    """A cache of one layer, fed with random keys, values and queries, and compared at every pass."""

    def __init__(self, recipe: Recipe, starts: Tensor | None = None, rows: int = 2, dtype: torch.dtype = torch.float32):
        self.cache = BlockCache(recipe, ONE, fitted.tensors(recipe, ONE) or None, max_tokens=256)
        x = turned(tensors(300, rows, ONE), ONE)
        self.x = x.to(DEVICE, dtype)
        self.q = torch.randn(rows, RATIO, 300, ONE.head_size, generator=torch.Generator().manual_seed(3)).to(
            DEVICE, dtype
        )
        self.real = None if starts is None else torch.arange(300, device=DEVICE) >= starts.to(DEVICE)[:, None]
        turning = rotary(ONE)
        self.turning = replace(turning, frequencies_K=turning.frequencies_K.to(DEVICE))
        self.at, self.silent = 0, False  # tokens so far; whether passes say nothing of padding
        self.cap: float | None = None  # of scores

    def announce(self, count: int) -> Tensor | None:
        """Tell the cache of the next tokens; the mask that a model would give."""
        stop, real = self.at + count, self.real
        if real is None:
            positions = torch.arange(self.at, stop, device=DEVICE)[None]
        else:
            positions = (real.cumsum(1) - 1).clamp(min=0)[:, self.at : stop]
        told = None if real is None or self.silent else real[:, self.at : stop]
        self.cache.positions.announce(told, positions, self.turning)
        if real is None or self.silent:
            return None
        causal = torch.ones(count, stop, dtype=torch.bool, device=DEVICE).tril(self.at)
        return causal & real[:, None, None, :stop]

    def step(self, count: int = 1, expected: bool = True) -> tuple[Tensor, Tensor | None]:
        """One pass: (what the cache answers, what the torch path does)."""
        mask, part, cache = self.announce(count), slice(self.at, self.at + count), self.cache
        cache.take(0, *self.x[0, :, :, part].unbind(0))
        out, wanted = cache.attend(0, self.q[:, :, part], mask, SCALE, Softmax(self.cap)), None
        if expected:
            with dispatch.forced(False):
                road = cache.paths.reference
                wanted = road.attend(Query(cache.layers[0], self.q[:, :, part], mask, SCALE, self.cap))[0]
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
