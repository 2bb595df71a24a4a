"""Encode numbers one by one with the codebook that is optimal for their distribution (Lloyd–Max).

A codebook has sorted centroids, each the mean of its cell, and boundaries halfway between neighbours. It is computed
from the exact density, in float64, when it is first needed.

    sphere    a coordinate of a random unit vector in K dimensions, times √K; density ∝ (1 - z²/K)^((K-3)/2)

which is what every element of a group of K becomes after a random rotation and division by its root mean square.

Source: Lloyd, 1982; Max, 1960; Zandieh et al., 2025 (TurboQuant), section 3.1.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from kvq_runtime.ops import dispatch
from kvq_runtime.ops.constant import constant
from kvq_runtime.ops.pack import pack
from kvq_runtime.ops.rotation import Rotation, rotate

Scale = Literal["plain", "norm", "least_squares"]

CELLS = 1 << 16  # of the numerical integration
BITS = (1, 2, 3, 4)


def solve(low: float, high: float, density: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the 2^bits - 1 boundaries and 2^bits centroids, float64, that have the least squared error.

    density   any multiple of it, at the middles of equal steps from `low` to `high`; symmetric about the middle
    """
    step = (high - low) / len(density)
    middles = low + step * (torch.arange(len(density), dtype=torch.float64) + 0.5)
    mass, moment = (running(part) for part in (density, density * middles))
    levels = (torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits
    centroids = low + step * torch.searchsorted(mass, levels * mass[-1]).double()

    def means(boundaries: Tensor) -> Tensor:
        cells = cell_means((boundaries - low) / step, mass, moment)
        return (cells + (low + high) - cells.flip(0)) / 2

    centroids = iterate(centroids, means, 1e-13 * (high - low), 10_000)[1]
    return _between(centroids), centroids


def iterate(
    centroids: Tensor, means: Callable[[Tensor], Tensor], tolerance: float, limit: int
) -> tuple[Tensor, Tensor]:
    """Move centroids to the means of their cells until none moves by `tolerance`, at most `limit` times.

    means    boundaries → the means of the cells between them

    Returns boundaries and the means of their cells; boundaries are halfway between means only as far as it converged.
    """
    boundaries = _between(centroids)
    for _ in range(limit):
        boundaries = _between(centroids)
        last, centroids = centroids, means(boundaries)
        if float((centroids - last).abs().max()) < tolerance:
            break
    return boundaries, centroids


def centres(x_N: Tensor, count: int) -> Tensor:
    """The rising means of `count` cells of some numbers, float64; of fewer different numbers, all, the last repeated.

    It starts from points as dense as the cube root of the density, which is the best for many of them (Panter and Dite,
    1951); a cell that holds nothing keeps its middle.
    """
    rising = x_N.double().flatten().sort().values
    distinct = rising.unique_consecutive()
    if not len(distinct):
        raise ValueError("no numbers to find centres of; use at least one")
    if len(distinct) <= count:
        return distinct[torch.arange(count, device=x_N.device).clamp(max=len(distinct) - 1)]
    sums = running(rising)
    cells = 16 * count
    edges = rising[torch.arange(cells + 1, device=x_N.device) * (len(rising) - 1) // cells]
    points = running(edges.diff() ** (2 / 3))  # a cell of equal mass has a density of 1 / its width
    levels = (torch.arange(count, dtype=torch.float32, device=x_N.device) + 0.5) / count * points[-1]
    start = edges[torch.searchsorted(points, levels).clamp(max=cells)]

    def means(boundaries: Tensor) -> Tensor:
        inside = torch.searchsorted(rising, boundaries)
        places = torch.cat([inside.new_zeros(1), inside, inside.new_full((1,), len(rising))])
        ends = torch.cat([rising[:1], boundaries, rising[-1:]])
        sizes = places.diff()
        return torch.where(sizes > 0, sums[places].diff() / sizes.clamp_min(1), (ends[1:] + ends[:-1]) / 2)

    return iterate(start, means, 1e-9 * float(rising[-1] - rising[0]), 300)[1]


def _between(centroids: Tensor) -> Tensor:
    return (centroids[1:] + centroids[:-1]) / 2


def cell_means(boundaries: Tensor, mass: Tensor, moment: Tensor) -> Tensor:
    """Return the mean of a quantity inside every cell: running integrals of the density and of density times quantity.

    boundaries   in steps of the running integrals
    """
    ends = (_at(boundaries, running).diff() for running in (moment, mass))
    return torch.div(*ends)


def running(x: Tensor) -> Tensor:
    """Integrate from the low end to every edge of the steps, in steps: one element more than there are steps."""
    return torch.cat([x.new_zeros(1), x.cumsum(0)])


def _at(place: Tensor, running: Tensor) -> Tensor:
    """Return the running integral at fractional places, with its two ends."""
    below = place.floor().clamp(0, len(running) - 2).long()
    inner = torch.lerp(running[below], running[below + 1], place - below)
    return torch.cat([running[:1], inner, running[-1:]])


@constant(64)
def sphere(size: int, bits: int) -> tuple[Tensor, Tensor]:
    """Solve for boundaries and centroids, float32, of elements of random vectors of `size` with root mean square 1."""
    if bits not in BITS:
        raise ValueError(f"bits={bits}; use 1, 2, 3 or 4")
    if size < 4:
        raise ValueError(f"a vector of {size} elements; use at least 4")
    high = min(size**0.5, 12.0)  # the density beyond 12 deviations is nothing
    z = high * ((torch.arange(CELLS, dtype=torch.float64) + 0.5) * 2 / CELLS - 1)
    density = ((size - 3) / 2 * torch.log1p(-z.square() / size)).exp()  # at the middles of CELLS steps
    boundaries, centroids = solve(-high, high, density, bits)
    return boundaries.float(), centroids.float()


@dispatch.paired("groups.encode_lloyd")
def encode(x: Tensor, bits: int, scale: Scale, rotation: Rotation = None) -> tuple[Tensor, Tensor]:
    """Rotate vectors [..., K] of any float dtype, at least 4 elements, and encode each element by its cell.

    scale   s of x̂ = s·c, where c are the centroids and ‖x‖/√K = rms the vector's own size:
            "plain" rms · "norm" rms·√K/‖c‖, so that x̂ is as long as x · "least_squares" ⟨x,c⟩/⟨c,c⟩

    Returns packed codes of 1 to 4 bits, uint8 [..., bytes], and scales float16 [...].
    """
    x = rotate(x, rotation)
    boundaries, centroids = sphere(x.shape[-1], bits)
    rms = torch.linalg.vector_norm(x, dim=-1).div_(x.shape[-1] ** 0.5)
    unit = x / rms.where(rms > 0, 1.0)[..., None]
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for boundary in boundaries.tolist():
        codes += unit > boundary
    return pack(codes, bits), _scale(x, rms, codes, centroids.to(x.device), scale).half()


def _scale(x: Tensor, rms: Tensor, codes: Tensor, centroids: Tensor, scale: Scale) -> Tensor:
    """Return the scales float32 [...]; centroids are rounded to bfloat16, as they are decoded."""
    if scale == "plain":
        return rms
    chosen = centroids.bfloat16().float()[codes.int()]
    norm = torch.linalg.vector_norm(chosen, dim=-1)
    return rms * x.shape[-1] ** 0.5 / norm if scale == "norm" else torch.linalg.vecdot(x, chosen) / norm.square()
