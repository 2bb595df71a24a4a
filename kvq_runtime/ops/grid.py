"""Encode vectors of d elements by the nearest of n grid points that are optimal for a standard Gaussian.

A group of K elements is K/d vectors; vector i is elements (i, i + K/d, i + 2K/d, ...), so that each component of the
grid multiplies a contiguous slice of the group. One scale per group: the group is divided by its root mean square,
encoded, and the stored scale is the least-squares one, s = ⟨x, ĝ⟩ / ⟨ĝ, ĝ⟩, which costs nothing and undoes the
shrinking of decoded vectors.

Source: Malinovskii et al., 2024 (HIGGS), algorithm 1; AQUA-KV uses d=2, n=16, 64, 256 for 2, 3 and 4 bits.
Differs: the least-squares scale (they store the norm), float16 (their cache keeps float32).
"""

from hashlib import sha256
from importlib import resources

import torch
from safetensors.torch import load
from torch import Tensor

from kvq_runtime.ops import dispatch
from kvq_runtime.ops.constant import constant
from kvq_runtime.ops.pack import pack
from kvq_runtime.ops.rotation import Rotation, rotate

# sha256 of each grid's float32 little-endian bytes; `python scripts/build_tables.py` builds them again.
DIGESTS: dict[tuple[int, int], str] = {
    (2, 16): "367091fd25bd3b3fc6f43a4a60b6f61bfa5a8f4a3ff9442e0890158d642b0501",
    (2, 64): "4c4416b2496308747d9b3121cda3580185a2ecd0e2261c6e13512cea0faaf812",
    (2, 256): "7cd1f1c7104bb30848b6e6ae0d0ef20d7e1592fa2b1d178b87ca0197203947c2",
    (4, 64): "a2d8bf226429c50162a1235eb345ce12293206d9818792ca5f02e04b1a2e717d",
    (4, 256): "1854945beba13c801ddeaccb9bd57686046602972750da358ca0d5f710867379",
    (8, 256): "a1dfb8dc3bb3a0867b69ad8b708c1bb3df3fa612cb10e2332fc52bdf40bd425d",
}

# Cells of a two-dimensional grid's table: squares of 1/128 within ±4. A power of two, so that finding a cell is exact.
_FINE, _SIDE = 128, 1024
_BLOCK = 4  # by so many cells they are looked at first: at 8, twice as many corners of 256 points are left


@constant(3)
def tables(file: str) -> dict[str, Tensor]:
    """Return the tables of a file of this folder, by name."""
    return load((resources.files("kvq_runtime") / "ops" / f"{file}.safetensors").read_bytes())


def pinned(kind: str, name: str, table: Tensor, digest: str) -> Tensor:
    """Return the table itself, checked against its pinned digest."""
    present = sha256(table.view(torch.uint8).numpy().tobytes()).hexdigest()
    if present != digest:
        raise RuntimeError(f"{kind} {name} has sha256 {present}, pinned is {digest}; reinstall kvq-runtime")
    return table


@constant(16)
def points(dim: int, size: int) -> Tensor:
    """Return the grid, float32 [size, dim], checked against its pinned digest."""
    name = f"d{dim}_n{size}"
    if (dim, size) not in DIGESTS:
        raise ValueError(f"no grid with dim={dim} size={size}; there are {sorted(DIGESTS)}")
    return pinned("grid", name, tables("grids")[name], DIGESTS[dim, size])


def scan(x_ND: Tensor, grid: Tensor) -> Tensor:
    """Return the index of the nearest point of any grid, lowest on a tie: float [N, d] and [n, d] to int64 [N].

    argmin |x - g|² = argmax x·g - |g|²/2. The maximum is found in two steps, over the maxima of runs of points and then
    inside the best run, because an argmax costs ten times a maximum.
    """
    size = columns = len(grid)
    while columns > 16 and columns % 2 == 0:
        columns //= 2
    runs_DN = grid.view(columns, -1, grid.shape[1]).transpose(0, 1).reshape(grid.shape).mT  # column c: a point of run c
    bias = -0.5 * runs_DN.square().sum(0)
    strips = x_ND.split(_strip(x_ND) // size)
    return torch.cat([_scan(torch.addmm(bias, strip, runs_DN), columns) for strip in strips])


def _scan(scores_NS: Tensor, columns: int) -> Tensor:
    best, size = scores_NS, scores_NS.shape[1]
    while best.shape[1] > columns:
        best = torch.maximum(*best.chunk(2, 1))
    run = best.max(1).indices
    start = torch.arange(0, scores_NS.numel(), size, device=run.device).add_(run)
    inside = start[:, None] + torch.arange(0, size, columns, device=run.device)
    step = scores_NS.flatten().index_select(0, inside.flatten()).view(inside.shape).max(1).indices
    return run.mul_(size // columns).add_(step)


def _strip(x: Tensor) -> int:
    """Return how many numbers to work on at once: on a CPU, about what its cache holds."""
    return 1 << (26 if x.is_cuda else 19)


@constant(16)
def _cells(size: int, device: torch.device) -> Tensor:
    """Return the nearest point throughout each square cell, int16 [_SIDE²]; -1 where it is not one and the same.

    The points nearer to g than to any other are a convex set: if it has the four corners it has the cell. Blocks of
    cells are tested first, and then the corners inside those that have more than one nearest point.
    """
    grid = points(2, size).to(device, torch.float64)
    axis = torch.arange(_SIDE + 1, dtype=torch.float64, device=device).sub_(_SIDE // 2).div_(_FINE)
    coarse = torch.cartesian_prod(axis[::_BLOCK], axis[::_BLOCK])
    block = _common(scan(coarse, grid).short().view(_SIDE // _BLOCK + 1, -1))
    cells = block.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
    corner = torch.nn.functional.pad(cells, (0, 1, 0, 1), value=-1)
    for touched in (corner[1:, :-1], corner[:-1, 1:], corner[1:, 1:]):
        touched[cells < 0] = -1
    row, column = (corner < 0).nonzero(as_tuple=True)
    corner[row, column] = scan(torch.stack([axis[row], axis[column]], 1), grid).short()
    cells = _common(corner)
    cells[[0, -1]] = cells[:, [0, -1]] = -1  # what lies beyond the table is clamped into these
    return cells.flatten()


def _common(corner: Tensor) -> Tensor:
    """Return the code that the four corners of each square share, or -1."""
    shared = corner[:-1, :-1].clone()
    for other in (corner[1:, :-1], corner[:-1, 1:], corner[1:, 1:]):
        shared[shared != other] = -1
    return shared


def nearest(x: Tensor, dim: int, size: int) -> Tensor:
    """Return the index of the grid point nearest to each vector, as `scan` finds it: float32 [..., d] to int32 [...].

    In two dimensions nearly every vector lies in a cell of the plane that has one nearest point; only the others are
    scanned, in float64.
    """
    grid = points(dim, size).to(x.device)
    if dim != 2:
        return scan(x.reshape(-1, dim), grid).view(x.shape[:-1]).int()
    row, column = ((part * _FINE).floor_().int().add_(_SIDE // 2).clamp_(0, _SIDE - 1) for part in x.unbind(-1))
    codes = _cells(size, x.device).index_select(0, row.mul_(_SIDE).add_(column).flatten()).int()
    unclear = (codes < 0).nonzero()[:, 0]
    vectors = torch.stack([part.flatten().index_select(0, unclear) for part in x.unbind(-1)], 1)
    codes[unclear] = scan(vectors.double(), grid.double()).int()
    return codes.view(x.shape[:-1])


@dispatch.paired("groups.encode_grid")
def encode(x: Tensor, dim: int, size: int, rotation: Rotation = None) -> tuple[Tensor, Tensor]:
    """Rotate groups [..., K] of any float dtype, and encode their K/d vectors by points of a grid.

    dim, size   one of `DIGESTS`: d elements of a vector, n points; K is a multiple of d. Other ones are a ValueError

    Returns packed codes of log2(n) bits, uint8 [..., bytes], and scale float16 [...].
    """
    x = rotate(x, rotation)
    groups = x.reshape(-1, x.shape[-1])
    rows = max(1, _strip(x) // 2 // x.shape[-1])
    codes, scale = zip(*(_encode(strip, dim, size) for strip in groups.split(rows)), strict=True)
    codes = torch.cat(codes).view(*x.shape[:-1], x.shape[-1] // dim)
    return pack(codes, size.bit_length() - 1), torch.cat(scale).view(x.shape[:-1])


def _encode(x_NK: Tensor, dim: int, size: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 [N, K/d] and scales float16 [N] of float32 groups."""
    rms = torch.linalg.vector_norm(x_NK, dim=1).div_(x_NK.shape[1] ** 0.5)
    streams = (x_NK / rms.where(rms > 0, 1.0)[:, None]).unflatten(1, (dim, -1))
    codes = nearest(streams.mT, dim, size)
    grid = points(dim, size).to(x_NK.device)
    chosen = [part.index_select(0, codes.flatten()).view(codes.shape) for part in grid.mT.contiguous()]
    dot = sum(torch.linalg.vecdot(stream, part) for stream, part in zip(streams.unbind(1), chosen, strict=True))
    norm = grid.square().sum(1).index_select(0, codes.flatten()).view(codes.shape).sum(1)
    return codes.to(torch.uint8), (rms * dot / norm).half()
