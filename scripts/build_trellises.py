"""Build `kvq_runtime/ops/trellises.safetensors` again and print each table's error on a Gaussian, and its digest.

    python scripts/build_trellises.py [k2_l8 ...]      only these; the others stay

    encode  Gaussian sequences by the best path through the trellis
    move    every state's value to the mean of the numbers that were encoded by it, in the end of several rounds

The values start as the middles of 2^L equal shares of a Gaussian, in a random order: neighbouring states, which one
code tells apart, then decode to numbers far from each other. Seeds are fixed and sums are float64, so that one machine
makes the same table each time; the tables kvq uses are pinned. Takes some minutes. Put the digests into `DIGESTS` of
`kvq_runtime/ops/trellis.py`.

Source: Lloyd, 1982, as Stewart, Gray and Linde, 1982, have it for trellis waveform coders.
"""

import sys
import time
from hashlib import sha256
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from kvq_runtime.ops import latent_path
from kvq_runtime.ops.trellis import BITS, best_path

FILE = Path(__file__).parents[1] / "kvq_runtime" / "ops" / "trellises.safetensors"
NAMES = [f"k{bits}_l{memory}" for memory in (8, 10) for bits in BITS]
NAMES += [f"k{bits}_l{latent_path.MEMORY}" for bits in range(1, latent_path.MAX_BITS + 1)]
LENGTH = 128  # of the sequences: a path begins in state 0 in each of them
ROUNDS, SAMPLES = 100, 64
SETTLING, KEPT = 0.7, 0.9  # after so much of the rounds, so much of a round's sums is kept in the next


def gaussian(numbers: int, seed: int) -> Tensor:
    """Sequences of a standard Gaussian: float32 [N, LENGTH]."""
    return torch.randn(numbers // LENGTH, LENGTH, generator=torch.Generator().manual_seed(seed))


def paths(x_NK: Tensor, values: Tensor, bits: int) -> Tensor:
    """The states of the best paths, each through a sequence as it is."""
    return best_path(x_NK[:, None], x_NK.new_ones(len(x_NK), 1), values, bits)


def error(x_NK: Tensor, table_S: Tensor, bits: int) -> float:
    """The mean squared error of best paths, the values rounded to bfloat16 as they are decoded."""
    values = table_S.bfloat16().float()
    return float((x_NK - values[paths(x_NK, values, bits)]).double().square().mean())


def fit(bits: int, memory: int, rounds: int, samples: int, seed: int = 0) -> Tensor:
    """The values of all states, float32 [2^memory]; in each round `samples` fresh numbers for each state."""
    size = 2**memory
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    values = torch.special.ndtri((order.double() + 0.5) / size).float()
    total = count = torch.zeros(size, dtype=torch.float64)
    for step in range(rounds):
        x_NK = gaussian(samples * size, seed=1 + step)
        states = paths(x_NK, values, bits).flatten()
        kept = KEPT if step >= SETTLING * rounds else 0.0
        total = kept * total + states.bincount(x_NK.double().flatten(), size)
        count = kept * count + states.bincount(minlength=size)
        values = (total / count.clamp_min(1e-9)).float().where(count > 0, values)
    return values


def build(names: list[str]) -> dict[str, Tensor]:
    """Fit the tables of these names and print how they do on sequences that they were not fitted on."""
    tables = {}
    for name in names:
        bits, memory = (int(part[1:]) for part in name.split("_"))
        begun = time.perf_counter()
        values = fit(bits, memory, ROUNDS, SAMPLES)
        tables[name] = values.bfloat16()
        found = error(gaussian(1 << 18, seed=1_000_003), values, bits)
        digest = sha256(tables[name].view(torch.uint8).numpy().tobytes()).hexdigest()
        print(f"{name}: {found:.5f}, bound {4.0**-bits:.5f}")
        print(f'    ({bits}, {memory}): "{digest}",  # {time.perf_counter() - begun:.0f} s', flush=True)
    return tables


def main() -> None:
    names = sys.argv[1:] or NAMES
    if unknown := [name for name in names if name not in NAMES]:
        raise SystemExit(f"no trellises named {unknown}; there are {NAMES}")
    kept = load(FILE.read_bytes()) if FILE.exists() else {}
    FILE.write_bytes(save(kept | build(names)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
