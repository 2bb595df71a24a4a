"""Outliers kept exact: which ones, what they cost, and what they save, under several quantizers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe, Scheme
from kvq_runtime.stages.correct import Sparse
from kvq_runtime.stages.rotate import Random
from kvq_runtime.stages.rtn import Rtn

GEOMETRY = Geometry(1, 2, 64)
NOWHERE = Context()


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def made(scheme: Scheme) -> Codec:
    return Codec(Recipe("test", scheme, scheme).check(GEOMETRY), 0, "key", GEOMETRY, {})


def both_ways(scheme: Scheme, x: Tensor) -> Tensor:
    codec = made(scheme)
    return codec.decode(codec.encode(x, NOWHERE), NOWHERE).float()


def planted(axis: int, count: int = 1) -> tuple[Tensor, Tensor]:
    """Blocks [3, 128, 128] with `count` far elements in every row along the axis, and where they are."""
    x = gaussian(3, 128, 128)
    place = torch.rand(3, 128, 128, generator=torch.Generator().manual_seed(1)).topk(count, axis).indices
    far = torch.zeros_like(x).scatter_(axis, place, 1.0).bool()
    sign = gaussian(3, 128, 128, seed=2).sign()
    return torch.where(far, 50 * sign, x), far


SIDES = {
    "token": Scheme(Rtn(2, "all"), correct=Sparse(group="token")),
    "channel": Scheme(Rtn(2, 32), axis="channel", correct=Sparse(group="channel")),
    "rotated": Scheme(Rtn(2, "head"), rotate=Random(), correct=Sparse(group="token")),
}


@pytest.mark.parametrize("name", SIDES)
def test_planted_outliers_are_exact_and_stretch_no_range(name):
    """The rest comes out as if they had never been there: as the same block with medians in their places does."""
    scheme = SIDES[name]
    axis = 1 if scheme.axis == "channel" else 2
    x, far = planted(axis)
    out = both_ways(scheme, x)
    assert torch.equal(out[far], x[far].bfloat16().float())
    middle = torch.from_numpy(np.sort(x.numpy(), axis)).select(axis, 63).unsqueeze(axis)  # the lower of the two
    tame = both_ways(replace(scheme, correct=None), torch.where(far, middle, x))
    assert torch.equal(out[~far], tame[~far])
    alone = both_ways(replace(scheme, correct=None), x)
    assert float((out - x).square().sum()) < 0.12 * float((alone - x).square().sum())


def test_of_a_block_the_worst_rounded_elements_are_stored():
    """What remains is the quantizer's error without its 164 largest parts of a block, to a bfloat16's rounding."""
    x = gaussian(2, 128, 128) ** 3
    plain = both_ways(Scheme(Rtn(2, 32)), x)
    out = both_ways(Scheme(Rtn(2, 32), correct=Sparse(0.01, "block")), x)
    wrong = np.sort((plain - x).abs().flatten(1).numpy(), 1)
    left = np.sort((out - x).abs().flatten(1).numpy(), 1)
    count = round(0.01 * 128 * 128)
    assert np.allclose(left[:, count:], wrong[:, :-count], atol=0.02)
    changed = out != plain
    assert changed.flatten(1).sum(1).tolist() == [count, count]
    assert torch.equal(out[changed], x[changed].bfloat16().float())


@pytest.mark.parametrize("share", [0.004, 0.05])
@pytest.mark.parametrize("group, size", [("token", 128), ("channel", 128), ("block", 128 * 128)])
def test_what_is_billed_is_what_is_held(share, group, size):
    codec = made(Scheme(Rtn(2, 32), correct=Sparse(share, group)))
    fields = codec.encode(gaussian(1, 128, 128), NOWHERE)
    held = {name: field.untyped_storage().nbytes() for name, field in fields.items()}
    assert codec.bits() == 8 * sum(held.values()) / 128**2
    each = max(1, round(share * size))
    entries = each * 128**2 // size
    assert held["sparse_value"] == 2 * entries
    places = {128: 7, 128 * 128: 14}[size]
    assert entries * places / 8 <= held["sparse_place"] < entries * places / 8 + 2
    assert codec.bits() == pytest.approx(3 + (16 + places) * each / size, abs=0.01)
