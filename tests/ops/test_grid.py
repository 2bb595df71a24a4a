"""Gaussian grids: as good as published, nearest points really nearest, scales least-squares, and the builder itself."""

import numpy as np
import pytest
import torch
from scipy.spatial import cKDTree
from scipy.special import ndtri
from scipy.stats import qmc

from kvq_runtime.ops import grid, pack
from scripts import build_tables

# (dimension, points) → mean squared error per dimension of the grids that HIGGS ships, or of a good local minimum
PUBLISHED = {
    (2, 16): 0.10756,
    (2, 64): 0.02974,
    (2, 256): 0.00776,
    (4, 64): 0.18425,
    (4, 256): 0.09643,
    (8, 256): 0.32233,
}
SIZES = sorted(PUBLISHED)


def vectors(count: int, dim: int, spread: float = 1.0) -> torch.Tensor:
    return spread * torch.randn(count, dim, generator=torch.Generator().manual_seed(dim))


def brute(x: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    return torch.cat([(part.double()[:, None] - points.double()).square().sum(-1).argmin(1) for part in x.split(2048)])


@pytest.mark.parametrize("size", SIZES)
def test_error_is_the_published_one(size):
    dim, _ = size
    x = ndtri(qmc.Sobol(dim, rng=np.random.default_rng(5)).random_base2(16))
    distance, _ = cKDTree(grid.points(*size).double().numpy()).query(x)
    assert np.square(distance).mean() / dim == pytest.approx(PUBLISHED[size], rel=5e-3 if dim < 8 else 1e-2)


def test_a_changed_grid_is_refused(monkeypatch):
    monkeypatch.setitem(grid.DIGESTS, (2, 16), "0" * 64)
    grid.points.cache_clear()
    with pytest.raises(RuntimeError, match="pinned is 0000"):
        grid.points(2, 16)
    monkeypatch.undo()
    assert len(grid.points(2, 16)) == 16
    with pytest.raises(ValueError, match="there are"):
        grid.points(3, 16)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spread", [0.3, 5.0])
def test_nearest_is_nearest(size, spread):
    """At spread 5 most vectors lie beyond the table of cells."""
    x, points = vectors(8_000, size[0], spread), grid.points(*size)
    assert torch.equal(grid.nearest(x, *size).long(), brute(x, points))
    assert torch.equal(grid.scan(x, points), brute(x, points))


@pytest.mark.parametrize("size", [(2, 16), (2, 256)])
def test_nearest_on_the_edges_of_cells(size):
    axis = torch.arange(-520, 521, 8) / 128
    x = torch.cartesian_prod(axis, axis)
    assert torch.equal(grid.nearest(x, *size).long(), brute(x, grid.points(*size)))


@pytest.mark.parametrize("size", SIZES)
def test_scales_are_least_squares(size):
    """No other scale decodes closer: the error is orthogonal to what is decoded, up to the float16 of the scale."""
    x = vectors(64, 1024) * torch.logspace(-2, 2, 64)[:, None]
    codes, scale = grid.encode(x, *size)
    codes = pack.unpack(codes, size[1].bit_length() - 1, 1024 // size[0])
    decoded = grid.points(*size)[codes.int()].mT.flatten(-2) * scale.float()[..., None]
    share = ((x - decoded) * decoded).sum(1) / decoded.square().sum(1)
    assert float(share.abs().max()) < 2**-10
    assert float(((x - decoded).square().sum(1) / x.square().sum(1)).mean() / PUBLISHED[size]) == pytest.approx(
        1, abs=0.02
    )


def test_the_builder_finds_lloyd_and_maxs_quantizer():
    """The optimal 4 points of a scalar Gaussian, as tabulated by Max in 1960."""
    effort = build_tables.Effort(starts=3, scout=12, finalists=1, samples=15, iterations=200, tolerance=1e-7)
    found = build_tables.fit_grid(1, 4, effort)
    assert sorted(found.flatten().tolist()) == pytest.approx([-1.510, -0.4528, 0.4528, 1.510], abs=0.01)
    assert torch.equal(found, build_tables.fit_grid(1, 4, effort))
    assert build_tables.grid_error(build_tables.spread(1, 15, seed=9), found) == pytest.approx(0.1175, rel=5e-3)
