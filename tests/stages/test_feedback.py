"""SQuat's lemmas, worked out once more and slowly; and its promise on rounded keys: errors that queries do not see."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import feedback
from kvq_runtime.recipe import Recipe, Scheme
from kvq_runtime.stages.codebook import Grid
from kvq_runtime.stages.feedback import QueryOrthogonal
from kvq_runtime.stages.latent import Mixed
from kvq_runtime.stages.rotate import Basis, Hadamard, Random
from kvq_runtime.stages.rtn import Rtn

NOWHERE = Context()
GEOMETRY = Geometry(1, 2, 64)
HEADS, SIZE = GEOMETRY.kv_heads, GEOMETRY.head_size


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moment(rank: int = 20, heads: int = HEADS, size: int = SIZE, seed: int = 1) -> Tensor:
    """E[q qᵀ] of queries with a spectrum of `rank` directions, falling: [H, D, D]."""
    directions = torch.linalg.qr(gaussian(heads, size, size, seed=seed)).Q[..., :rank]
    return directions * torch.exp(-0.1 * torch.arange(rank)) @ directions.mT


def seen(error_HDK: Tensor, moment_HDD: Tensor) -> float:
    """Σ |Q̂ e|² = Σ e C eᵀ."""
    error = error_HDK.double()
    return float((error * (moment_HDD @ error)).sum())


# ---- the closed form ----


def papers_moves(metric_DD: Tensor, size: int) -> list[Tensor]:
    """B_t H_t for t = 1, ..., T - 1: algorithm 1, lines 8 and 9, with lemma 3 for A_t⁻¹."""
    width = len(metric_DD)
    inverse = torch.linalg.inv(metric_DD)
    of_a = {width // size: metric_DD}
    for t in range(width // size - 1, 0, -1):
        m, n, o = (
            of_a[t + 1][: t * size, : t * size],
            of_a[t + 1][t * size :, : t * size],
            of_a[t + 1][t * size :, t * size :],
        )
        of_a[t] = m - n.mT @ torch.linalg.inv(o) @ n
    return [inverse[t * size :, : t * size] @ of_a[t][:, -size:] for t in range(1, width // size)]


@pytest.mark.parametrize("blocks", [2, 4, 64])
@pytest.mark.parametrize("weight", [1e-3, 1.0, 300.0])
def test_moves_are_those_of_the_papers_recursion(blocks, weight):
    metric = feedback.metric(moment(), weight)
    moves = feedback.updates(metric, blocks)
    assert len(moves) == blocks - 1
    for head in range(HEADS):
        for found, expected in zip(moves, papers_moves(metric[head], SIZE // blocks), strict=True):
            assert (found[head] - expected).norm() <= 1e-6 * expected.norm()


def test_the_metric_of_a_subspace_is_that_of_scaled_singular_vectors():
    queries, rank, lam = gaussian(300, SIZE), 7, 1e-3
    _, values, vectors = torch.linalg.svd(queries)
    subspace = values[:rank, None] * vectors[:rank]  # Q̂ of algorithm 1, line 6
    expected = torch.eye(SIZE, dtype=torch.float64) + lam * subspace.mT @ subspace
    found = feedback.metric(queries.mT @ queries / 300, lam * 300, rank)
    assert (found - expected).norm() < 1e-9 * expected.norm()


def test_what_queries_see_falls_with_lambda_before_anything_is_rounded():
    """The optimum for a given error of the first half, in closed form."""
    first, seen_at = gaussian(HEADS, SIZE // 2, 40), []
    for lam in (0.0, 1e-3, 1e-2, 0.1, 1.0, 10.0, 1e3, 1e5):
        (move,) = feedback.updates(feedback.metric(moment(), lam), 2)
        seen_at.append(seen(torch.cat([first, move @ first], 1), moment()))
    assert all(after < before for before, after in pairwise(seen_at))
    assert seen_at[-1] < 1e-6 * seen_at[0]  # 20 directions can be avoided with 32 channels


# ---- rounded keys ----


def one(scheme: Scheme, metric: Tensor | None = None, geometry: Geometry = GEOMETRY) -> Codec:
    """A codec of keys, with the moves of this metric, in float32."""
    tensors = {}
    if metric is not None:
        turn = scheme.feedback.turn(scheme.axis, scheme.rotate, geometry)
        metric = metric if turn is None else turn.double().mT @ metric @ turn.double()
        moves = feedback.updates(metric, scheme.feedback.blocks)
        tensors = {f"feedback.update_{number}": move.float() for number, move in enumerate(moves, 1)}
    return Codec(Recipe("test", scheme, replace(scheme, feedback=None)), 0, "key", geometry, tensors)


def keys(blocks: int = 4, geometry: Geometry = GEOMETRY) -> Tensor:
    """[N, 128, C], channels of unequal size and mean."""
    channel = gaussian(2, geometry.width, seed=7)
    return (gaussian(blocks, 128, geometry.width, seed=8) * (0.3 + channel[0].abs()) + 2 * channel[1]).float()


def errors(made: Codec, x_NTC: Tensor) -> Tensor:
    """What is decoded less what was given: [N, H, D, T]."""
    decoded = made.decode(made.encode(x_NTC, NOWHERE), NOWHERE).float()
    return (decoded - x_NTC).unflatten(-1, (made.geometry.kv_heads, -1)).permute(0, 2, 3, 1)


STAGE = QueryOrthogonal(blocks=2)
SIDES = {
    "channel": Scheme(Rtn(2, 32), axis="channel"),
    "token": Scheme(Rtn(2, 16)),
    "random": Scheme(Grid(2, 16, 16), rotate=Random("head")),
    "tokens turned": Scheme(Grid(2, 16, 32), rotate=Hadamard("all"), axis="channel"),
}


@pytest.mark.parametrize("scheme", SIDES.values(), ids=SIDES.keys())
def test_without_lambda_it_is_plain_rounding(scheme):
    x = keys()
    found = one(replace(scheme, feedback=STAGE), feedback.metric(moment(), 0.0)).encode(x, NOWHERE)
    plain = one(scheme).encode(x, NOWHERE)
    assert found.keys() == plain.keys() and all(torch.equal(found[name], plain[name]) for name in plain)


# of two halves, the second has nowhere to push its own error: its half of what is seen stays
@pytest.mark.parametrize(("blocks", "most"), [(2, 0.6), (4, 0.5), (8, 0.5)])
def test_queries_of_twenty_directions_see_half_of_the_error(blocks, most):
    x, seen_at = keys(), []
    for lam in (0.0, 1.0, 3.0, 10.0, 30.0, 100.0, 1e3):
        made = one(replace(SIDES["channel"], feedback=replace(STAGE, blocks=blocks)), feedback.metric(moment(), lam))
        seen_at.append(seen(errors(made, x), moment()))
    assert min(seen_at) <= most * seen_at[0]
    assert seen_at[1:4] == sorted(seen_at[:4], reverse=True)[1:]
    assert errors(made, x).square().sum() > errors(one(SIDES["channel"]), x).square().sum()  # at the cost of the whole


@pytest.mark.parametrize("scheme", SIDES.values(), ids=SIDES.keys())
def test_it_composes_with_rotations_and_roundings(scheme):
    """With B turned into P, queries see less after any rotation; with P as it was they would not."""
    x, metric = keys(), feedback.metric(moment(), 10.0)
    found, plain = (
        seen(errors(made, x), moment()) for made in (one(replace(scheme, feedback=STAGE), metric), one(scheme))
    )
    assert found < 0.8 * plain


# ---- what cannot be ----


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (Scheme(Rtn(2, 32)), Scheme(Rtn(2, 32), feedback=STAGE), "give feedback to keys alone"),
        (Scheme(Mixed(), rotate=Basis()), None, "not mixed"),
        (Scheme(Rtn(2, 64)), None, "group=64 crosses blocks of 32 channels; use a divisor of 32"),
        (Scheme(Rtn(2, 32), rotate=Hadamard("all")), None, 'mixes heads of 64; give rotate group="head"'),
        (Scheme(Rtn(2, 32), feedback=QueryOrthogonal(queries="before")), None, "multiplied by queries after RoPE"),
        (
            Scheme(Rtn(2, 32), feedback=QueryOrthogonal(blocks=3)),
            None,
            r"blocks=3 does not divide head size 64; .*2, 4",
        ),
    ],
)
def test_what_cannot_be_is_refused(key, value, message):
    key = key if value is not None or key.feedback is not None else replace(key, feedback=STAGE)
    with pytest.raises(ValueError, match=message):
        Recipe("r", key, value or Scheme(Rtn(2, 32))).check(GEOMETRY)
