"""Build `kvq_runtime/ops/grids.safetensors` again and print each grid's error, beside what is published, and digest.

    python scripts/build_grids.py [d2_n16 ...]      only these; the others stay

Takes some minutes. Put the digests into `DIGESTS` of `kvq_runtime/ops/grid.py`. A grid of n points in d dimensions is
optimal for a standard Gaussian, by Lloyd's iteration:

    assign  every sample to its nearest point;   move  every point to the mean of its samples

The samples are not drawn but spread: scrambled Sobol points through the inverse normal distribution, whose error falls
nearly as 1/N. Several starts are tried briefly and the best few are finished on more samples, since Lloyd's iteration
stops in local minima that are up to 1% worse. A point that lost all its samples moves next to the most loaded one.
Sums are float64 and the seeds fixed, so that one machine makes the same grid each time; the grids kvq uses are pinned.

Source: Lloyd, 1982; Pagès & Printems, 2003 (optimal quadratic quantization of the Gaussian).
Differs: HIGGS's grids come from a stochastic variant (CLVQ), 10 million fresh samples per step; the error is the same.
"""

import math
import sys
import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.quasirandom import SobolEngine

from kvq_runtime.ops.grid import scan

FILE = Path(__file__).parents[1] / "kvq_runtime" / "ops" / "grids.safetensors"
# error per dimension of HIGGS's own grids, or of a good local minimum where they ship none
PUBLISHED = {
    "d2_n16": 0.10756,
    "d2_n64": 0.02974,
    "d2_n256": 0.00776,
    "d4_n64": 0.18425,
    "d4_n256": 0.09643,
    "d8_n256": 0.32233,
}


@dataclass(frozen=True)
class Effort:
    """The effort of a fit: `starts` short runs on 2**`scout` samples, the best `finalists` of them on 2**`samples`.

    A run ends when an iteration improves the error by less than `tolerance` of itself, or after `iterations`.
    """

    starts: int = 12
    scout: int = 15
    finalists: int = 2
    samples: int = 19
    iterations: int = 200
    tolerance: float = 4e-6


def gaussian(dim: int, log2_count: int, seed: int) -> Tensor:
    """Spread 2**log2_count points like a standard Gaussian: float32 [N, dim], the same for the same seed."""
    uniform = SobolEngine(dim, scramble=True, seed=seed).draw(1 << log2_count, dtype=torch.float64)
    # Sobol coordinates are multiples of 2^-30 from 0; half a step inward keeps the inverse finite
    return torch.special.ndtri((uniform * (1 - 2.0**-30)) + 2.0**-31).float()


def error(x_ND: Tensor, grid: Tensor) -> float:
    """The mean squared distance of samples to their nearest points, per dimension."""
    return float((x_ND - grid[scan(x_ND, grid)]).double().square().mean())


def lloyd(x_ND: Tensor, grid: Tensor, iterations: int, tolerance: float) -> tuple[Tensor, float]:
    """Iterate from `grid` float32 [n, d]: the grid and its error per dimension on the samples."""
    samples, last = x_ND.double(), math.inf
    for _ in range(iterations):
        codes = scan(x_ND, grid)
        now = float((x_ND - grid[codes]).double().square().mean())
        if last - now < tolerance * now:
            return grid, now
        last = now
        grid = _means(samples, codes, grid)
    return grid, error(x_ND, grid)


def fit(dim: int, size: int, effort: Effort = Effort(), seed: int = 0) -> Tensor:
    """The grid of `size` points, float32 [size, dim], sorted by norm and then by coordinates."""
    scout = gaussian(dim, effort.scout, seed)
    runs = []
    for start in range(effort.starts):
        chosen = torch.randperm(len(scout), generator=torch.Generator().manual_seed(seed + start))[:size]
        runs.append(lloyd(scout, scout[chosen], effort.iterations, 10 * effort.tolerance))
    runs.sort(key=lambda run: run[1])
    samples = gaussian(dim, effort.samples, seed + 1)
    ends = [lloyd(samples, grid, effort.iterations, effort.tolerance) for grid, _ in runs[: effort.finalists]]
    return _sorted(min(ends, key=lambda run: run[1])[0])


def _means(samples_ND: Tensor, codes_N: Tensor, grid: Tensor) -> Tensor:
    """The mean of each point's samples; a point without any takes a place close to the most loaded one."""
    count = codes_N.bincount(minlength=len(grid))
    sums = torch.stack([codes_N.bincount(column, len(grid)) for column in samples_ND.unbind(1)], 1)
    moved = sums / count.clamp_min(1)[:, None]
    for empty in (count == 0).nonzero()[:, 0].tolist():
        busiest = int(count.argmax())
        moved[empty] = moved[busiest] + 1e-3
        count[empty] = count[busiest] = count[busiest] // 2
    return moved.float()


def _sorted(grid: Tensor) -> Tensor:
    rows = sorted(grid.tolist(), key=lambda row: (sum(value * value for value in row), row))
    return torch.tensor(rows, dtype=torch.float32)


def build(names: list[str], effort: Effort) -> dict[str, Tensor]:
    """Fit the grids of these names and print how they do on samples that they were not fitted on."""
    grids = {}
    for name in names:
        dim, size = (int(part[1:]) for part in name.split("_"))
        begun = time.perf_counter()
        grid = grids[name] = fit(dim, size, effort)
        found = error(gaussian(dim, 21, seed=1_000_003), grid)
        digest = sha256(grid.numpy().tobytes()).hexdigest()
        print(
            f"{name}: {found:.5f} per dimension, published {PUBLISHED[name]:.5f} ({found / PUBLISHED[name] - 1:+.2%})"
        )
        print(f'    ({dim}, {size}): "{digest}",  # {time.perf_counter() - begun:.0f} s', flush=True)
    return grids


def main() -> None:
    names = sys.argv[1:] or list(PUBLISHED)
    if unknown := [name for name in names if name not in PUBLISHED]:
        raise SystemExit(f"no grids named {unknown}; there are {sorted(PUBLISHED)}")
    kept = load(FILE.read_bytes()) if FILE.exists() else {}
    FILE.write_bytes(save(kept | build(names, Effort())))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
