"""Build `kvq_runtime/ops/grids.safetensors` again and print each grid's error, beside what is published, and digest.

    python scripts/build_grids.py [d2_n16 ...]      only these; the others stay

Takes some minutes. Put the digests into `DIGESTS` of `kvq_runtime/ops/grid.py`.
"""

import sys
import time
from hashlib import sha256
from pathlib import Path

import fit_grid
import torch
from safetensors.torch import load, save

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


def build(names: list[str], effort: fit_grid.Effort) -> dict[str, torch.Tensor]:
    """Fit the grids of these names and print how they do on samples that they were not fitted on."""
    grids = {}
    for name in names:
        dim, size = (int(part[1:]) for part in name.split("_"))
        begun = time.perf_counter()
        grid = grids[name] = fit_grid.fit(dim, size, effort)
        error = fit_grid.error(fit_grid.gaussian(dim, 21, seed=1_000_003), grid)
        digest = sha256(grid.numpy().tobytes()).hexdigest()
        print(
            f"{name}: {error:.5f} per dimension, published {PUBLISHED[name]:.5f} ({error / PUBLISHED[name] - 1:+.2%})"
        )
        print(f'    ({dim}, {size}): "{digest}",  # {time.perf_counter() - begun:.0f} s', flush=True)
    return grids


def main() -> None:
    names = sys.argv[1:] or list(PUBLISHED)
    if unknown := [name for name in names if name not in PUBLISHED]:
        raise SystemExit(f"no grids named {unknown}; there are {sorted(PUBLISHED)}")
    kept = load(FILE.read_bytes()) if FILE.exists() else {}
    FILE.write_bytes(save(kept | build(names, fit_grid.Effort())))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
