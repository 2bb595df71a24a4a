"""GEAR's low rank of a rounding error: as good as it can be, never harmful, and what it costs."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvq_runtime.artifact.recipe_text import read
from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe, Scheme, preset
from kvq_runtime.recipes import kivi
from kvq_runtime.stages.correct import LowRank, LowRankSparse, Sparse
from kvq_runtime.stages.rotate import Hadamard
from kvq_runtime.stages.rtn import Rtn

GEOMETRY = Geometry(1, 2, 64)
NOWHERE = Context()
SIDES = {"keys": kivi.keys(2, 64), "values": kivi.values(2, 64), "rotated": Scheme(Rtn(2, "head"), rotate=Hadamard())}


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def blocks(kind: str) -> Tensor:
    """Blocks [3, 128, C]: without any structure; or a few waves over tokens, in amounts that differ by channel."""
    if kind == "white":
        return gaussian(3, 128, 128)
    waves = torch.sin(torch.arange(128)[:, None] * torch.tensor([0.05, 0.11, 0.3]))
    return waves @ (4 * gaussian(3, 3, 128, seed=1)) + 0.3 * gaussian(3, 128, 128)


def both_ways(scheme: Scheme, x: Tensor) -> Tensor:
    codec = Codec(Recipe("test", scheme, scheme).check(GEOMETRY), 0, "key", GEOMETRY, {})
    return codec.decode(codec.encode(x, NOWHERE), NOWHERE).double()


def by_head(x_NTC: Tensor) -> Tensor:
    return x_NTC.unflatten(-1, (GEOMETRY.kv_heads, -1)).transpose(1, 2)


def least(error_NTC: Tensor, rank: int) -> Tensor:
    """The squared error [N, H] of the best approximation of this rank (Eckart and Young), from all singular values."""
    return torch.linalg.svdvals(by_head(error_NTC))[..., rank:].square().sum(-1)


# ---- the paper's claims


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("kind", ["white", "waves"])
@pytest.mark.parametrize("name", SIDES)
def test_what_is_left_is_what_the_best_matrix_of_the_rank_leaves(name, kind, rank):
    x = blocks(kind)
    plain = x - both_ways(SIDES[name], x)
    left = by_head(x - both_ways(replace(SIDES[name], correct=LowRank(rank)), x)).square().sum((-1, -2))
    torch.testing.assert_close(left, least(plain, rank), rtol=1e-5, atol=0)
    assert (left < by_head(plain).square().sum((-1, -2))).all()


@pytest.mark.parametrize("group", ["token", "channel"])
def test_outliers_are_exact_and_the_rest_is_as_if_they_had_not_been(group):
    """The directions are of what outliers leave, found without them; where both meet, the outlier wins."""
    scheme = SIDES["keys"] if group == "channel" else SIDES["values"]
    x = gaussian(2, 128, 128)
    x.diagonal(dim1=1, dim2=2).add_(60)  # one of every token, and of every channel
    sparse, both = (both_ways(replace(scheme, correct=c(share=0.02, group=group)), x) for c in (Sparse, LowRankSparse))
    assert torch.equal(both.diagonal(dim1=1, dim2=2), x.diagonal(dim1=1, dim2=2).bfloat16().double())
    left, plain = (by_head(x - out).square().sum((-1, -2)) for out in (both, sparse))
    assert (left <= least(x - sparse, 4)).all() and (left < plain).all()
    assert float(plain.sum()) < 0.1 * float((x - both_ways(scheme, x)).square().sum())


def test_every_part_of_gear_pays_in_error():
    """KIVI errs more than GEAR-L, GEAR-L more than GEAR, with codes of the same bits, on waves and outliers."""
    far = torch.rand(3, 128, 128, generator=torch.Generator().manual_seed(1)) > 0.99
    x = blocks("waves") + 20 * far
    for role, name in (("key", "keys"), ("value", "values")):
        found = [
            SIDES[name],
            read("gear-2bit+all.correct=low_rank").scheme(0, role),
            preset("gear-2bit").scheme(0, role),
        ]
        errors = [float((both_ways(scheme, x) - x).square().sum()) for scheme in found]
        assert errors[1] < 0.9 * errors[0] and errors[2] < 0.6 * errors[1]
