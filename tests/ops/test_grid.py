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


@pytest.mark.parametrize("size", SIZES)
def test_points_are_pinned_and_in_order(size):
    points = grid.points(*size)
    assert points.dtype == torch.float32 and tuple(points.shape) == (size[1], size[0])
    assert (points.square().sum(1).diff() > -1e-6).all()
    assert float(points.mean(0).abs().max()) < 0.2
    assert sorted(grid.DIGESTS) == SIZES


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
@pytest.mark.parametrize("spread", [0.3, 1.0, 5.0])
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


@pytest.mark.parametrize("size", [16, 64, 256])
def test_a_cell_of_one_point_has_it_at_each_corner(size):
    """And every other cell has two, or lies at the edge of the table."""
    cells = grid._cells(size, torch.device("cpu")).view(grid._SIDE, grid._SIDE)
    axis = torch.arange(-grid._SIDE // 2, grid._SIDE // 2 + 1, dtype=torch.float64) / grid._FINE
    corner = grid.scan(torch.cartesian_prod(axis, axis), grid.points(2, size).double()).view(len(axis), -1)
    four = torch.stack([corner[:-1, :-1], corner[1:, :-1], corner[:-1, 1:], corner[1:, 1:]])
    inner = (four == four[0]).all(0)
    inner[[0, -1]] = inner[:, [0, -1]] = False
    assert torch.equal(cells.long(), four[0].where(inner, -1))


def test_ties_go_to_the_lowest_index():
    points = grid.points(2, 64)
    twice = torch.cat([points, points])
    assert torch.equal(grid.scan(vectors(5000, 2), twice), grid.scan(vectors(5000, 2), points))


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


@pytest.mark.parametrize("size", [(2, 16), (4, 64)])
def test_encoding_does_not_depend_on_company(size):
    x = vectors(300, 512)
    codes, scale = grid.encode(x, *size)
    for row in (0, 7, 299):
        alone = grid.encode(x[row], *size)
        assert torch.equal(alone[0], codes[row]) and torch.equal(alone[1], scale[row])


@pytest.mark.parametrize("size", SIZES)
def test_zeros_nothing_and_nonsense(size):
    assert not grid.encode(torch.zeros(2, 3, 16), *size)[1].any()
    count, bits = 16 // size[0], size[1].bit_length() - 1
    assert grid.encode(torch.zeros(0, 16), *size)[0].shape == (0, pack.packed_size(count, bits))
    assert grid.encode(torch.tensor([[float("nan")] * 16, [1.0] * 16]), *size)[1].isfinite().tolist() == [False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_nearest_on_a_gpu(size):
    x = vectors(100_000, size[0])
    assert (grid.nearest(x.cuda(), *size).cpu() != grid.nearest(x, *size)).float().mean() < 1e-4


def test_the_builder_finds_lloyd_and_maxs_quantizer():
    """The optimal 4 points of a scalar Gaussian, as tabulated by Max in 1960."""
    effort = build_tables.Effort(starts=3, scout=12, finalists=1, samples=15, iterations=200, tolerance=1e-7)
    found = build_tables.fit_grid(1, 4, effort)
    assert sorted(found.flatten().tolist()) == pytest.approx([-1.510, -0.4528, 0.4528, 1.510], abs=0.01)
    assert torch.equal(found, build_tables.fit_grid(1, 4, effort))
    assert build_tables.grid_error(build_tables.spread(1, 15, seed=9), found) == pytest.approx(0.1175, rel=5e-3)


def test_a_point_without_samples_finds_a_place():
    x = build_tables.spread(2, 12, seed=0)
    start = torch.cat([x[:6], torch.full((2, 2), 100.0) + torch.eye(2)])
    found, error = build_tables.lloyd(x, start, 50, 1e-6)
    assert found.isfinite().all() and float(found.abs().max()) < 5
    assert len(build_tables.scan(x, found).unique()) == 8
    assert error < build_tables.grid_error(x, start)
    first = build_tables.lloyd(x, start, 1, 0.0)[0]
    loads = build_tables.scan(x, start).bincount(minlength=8)
    assert float((first[6] - first[loads.argmax()]).norm()) < 0.01


@pytest.mark.parametrize("dim", [1, 2, 8])
def test_spread_samples_are_gaussian(dim):
    x = build_tables.spread(dim, 14, seed=3).double()
    assert x.isfinite().all()
    assert float(x.mean(0).abs().max()) < 2e-3
    assert float((x.mT @ x / len(x) - torch.eye(dim)).abs().max()) < 1e-2
