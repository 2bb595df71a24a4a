"""Build the tables of `kvq_runtime/ops` again, and print each one's error and digest: grids, trellises, boundaries.

    python scripts/build_tables.py [d2_n16 k2_l8 gaussian ...]      only these; the others stay

Takes some minutes. Put the digests into `DIGESTS` of `grid.py`, or `trellis.py`, or `GAUSSIAN` of `latent.py`. Seeds
are fixed and sums are float64, so that one machine makes the same table each time; the tables kvq uses are pinned.

d2_n16   a grid of n points in d dimensions, optimal for a standard Gaussian, by Lloyd's iteration:

             assign  every sample to its nearest point;   move  every point to the mean of its samples

         The samples are not drawn but spread: scrambled Sobol points through the inverse normal distribution, whose
         error falls nearly as 1/N. Several starts are tried briefly and the best few are finished on more samples,
         since Lloyd's iteration stops in local minima that are up to 1% worse. A point that lost all its samples moves
         next to the most loaded one.
k2_l8    the values of the states of a trellis code of k bits and a memory of l:

             encode  Gaussian sequences by the best path through the trellis
             move    every state's value to the mean of the numbers that were encoded by it, in several rounds

         The values start as the middles of 2^L equal shares of a Gaussian, in a random order: neighbouring states,
         which one code tells apart, then decode to numbers far from each other.
gaussian the boundaries of Lloyd–Max codes of 0 to 8 bits, halfway between the means of cells, by the same iteration

         The means start from the asymptotically optimal density of points, a Gaussian of three times the variance. At 7
         and 8 bits the iteration, whose number of steps grows as the square of the points, is stopped some tenths of a
         percent short.

Source: Lloyd, 1982; Pagès & Printems, 2003 (optimal quadratic quantization of the Gaussian); Stewart, Gray and Linde,
1982 (trellis waveform coders).
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

from kvq_runtime.ops import latent, trellis
from kvq_runtime.ops.grid import scan
from kvq_runtime.ops.lloyd import iterate
from kvq_runtime.ops.trellis import best_path

OPS = Path(__file__).parents[1] / "kvq_runtime" / "ops"
# error per dimension of HIGGS's own grids, or of a good local minimum where they ship none
GRIDS = {
    "d2_n16": 0.10756,
    "d2_n64": 0.02974,
    "d2_n256": 0.00776,
    "d4_n64": 0.18425,
    "d4_n256": 0.09643,
    "d8_n256": 0.32233,
}
TRELLISES = [f"k{bits}_l{trellis.MEMORY}" for bits in range(1, trellis.BITS + 1)]
LENGTH = 128  # of the sequences: a path begins in state 0 in each of them
ROUNDS, SAMPLES = 100, 64
SETTLING, KEPT = 0.7, 0.9  # after so much of the rounds, so much of a round's sums is kept in the next


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


def spread(dim: int, log2_count: int, seed: int) -> Tensor:
    """Spread 2**log2_count points like a standard Gaussian: float32 [N, dim], the same for the same seed."""
    uniform = SobolEngine(dim, scramble=True, seed=seed).draw(1 << log2_count, dtype=torch.float64)
    # Sobol coordinates are multiples of 2^-30 from 0; half a step inward keeps the inverse finite
    return torch.special.ndtri((uniform * (1 - 2.0**-30)) + 2.0**-31).float()


def grid_error(x_ND: Tensor, grid: Tensor) -> float:
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
    return grid, grid_error(x_ND, grid)


def fit_grid(dim: int, size: int, effort: Effort = Effort(), seed: int = 0) -> Tensor:
    """The grid of `size` points, float32 [size, dim], sorted by norm and then by coordinates."""
    scout = spread(dim, effort.scout, seed)
    runs = []
    for start in range(effort.starts):
        chosen = torch.randperm(len(scout), generator=torch.Generator().manual_seed(seed + start))[:size]
        runs.append(lloyd(scout, scout[chosen], effort.iterations, 10 * effort.tolerance))
    runs.sort(key=lambda run: run[1])
    samples = spread(dim, effort.samples, seed + 1)
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


def sequences(numbers: int, seed: int) -> Tensor:
    """Sequences of a standard Gaussian: float32 [N, LENGTH]."""
    return torch.randn(numbers // LENGTH, LENGTH, generator=torch.Generator().manual_seed(seed))


def paths(x_NK: Tensor, values: Tensor, bits: int) -> Tensor:
    """The states of the best paths, each through a sequence as it is."""
    return best_path(x_NK[:, None], x_NK.new_ones(len(x_NK), 1), values, bits)


def trellis_error(x_NK: Tensor, table_S: Tensor, bits: int) -> float:
    """The mean squared error of best paths, the values rounded to bfloat16 as they are decoded."""
    values = table_S.bfloat16().float()
    return float((x_NK - values[paths(x_NK, values, bits)]).double().square().mean())


def fit_trellis(bits: int, memory: int, rounds: int, samples: int, seed: int = 0) -> Tensor:
    """The values of all states, float32 [2^memory]; in each round `samples` fresh numbers for each state."""
    size = 2**memory
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    values = torch.special.ndtri((order.double() + 0.5) / size).float()
    total = count = torch.zeros(size, dtype=torch.float64)
    for step in range(rounds):
        x_NK = sequences(samples * size, seed=1 + step)
        states = paths(x_NK, values, bits).flatten()
        kept = KEPT if step >= SETTLING * rounds else 0.0
        total = kept * total + states.bincount(x_NK.double().flatten(), size)
        count = kept * count + states.bincount(minlength=size)
        values = (total / count.clamp_min(1e-9)).float().where(count > 0, values)
    return values


def built_grid(dim: int, size: int) -> tuple[Tensor, float, str]:
    """A grid, its error on samples that it was not fitted on, and what that is held against."""
    grid = fit_grid(dim, size)
    found, published = grid_error(spread(dim, 21, seed=1_000_003), grid), GRIDS[f"d{dim}_n{size}"]
    return grid, found, f" per dimension, published {published:.5f} ({found / published - 1:+.2%})"


def built_trellis(bits: int, memory: int) -> tuple[Tensor, float, str]:
    """A table, its error on sequences that it was not fitted on, and what that is held against."""
    values = fit_trellis(bits, memory, ROUNDS, SAMPLES)
    found = trellis_error(sequences(1 << 18, seed=1_000_003), values, bits)
    return values.bfloat16(), found, f", bound {4.0**-bits:.5f}"


def gaussian_boundaries(bits: int) -> Tensor:
    """The 2^bits - 1 boundaries of a code, float64."""
    levels = (torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits
    return iterate(torch.special.ndtri(levels) * 3**0.5, latent.means, 1e-10, 4000)[0]


def built_boundaries() -> tuple[Tensor, float, str]:
    """All boundaries one after another, and the error of the longest code."""
    every = [gaussian_boundaries(bits) for bits in range(latent.MAX_BITS + 1)]
    x_N = spread(1, 21, seed=1_000_003)[:, 0].double()
    error = x_N - latent.means(every[-1])[torch.bucketize(x_N, every[-1])]
    return torch.cat(every), float(error.square().mean()), f" at {latent.MAX_BITS} bits"


def main() -> None:
    known = [*GRIDS, *TRELLISES, "gaussian"]
    names = sys.argv[1:] or known
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no tables named {unknown}; there are {known}")
    for name in names:
        begun, pair = time.perf_counter(), tuple(int(part[1:]) for part in name.split("_") if name != "gaussian")
        if name == "gaussian":
            make, file = built_boundaries, "codebooks"
        else:
            make, file = (built_grid, "grids") if name in GRIDS else (built_trellis, "trellises")
        table, found, beside = make(*pair)
        digest = sha256(table.view(torch.uint8).numpy().tobytes()).hexdigest()
        print(f"{name}: {found:.5f}{beside}")
        print(f'    {pair}: "{digest}",  # {time.perf_counter() - begun:.0f} s', flush=True)
        path = OPS / f"{file}.safetensors"
        path.write_bytes(save((load(path.read_bytes()) if path.exists() else {}) | {name: table}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
