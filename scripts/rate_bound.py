"""Tell how far codes in trellis paths are from what any quantizer could reach, for the channels of an artifact.

    python -m scripts.rate_bound rest-2bit.safetensors --bits 0.6 1.1 2.1

A `rest-*` artifact has, of each stored channel of its bases, the deviation in steps, on a ladder of three rungs an
octave (`ops/ladder.py`); a step costs the same loss everywhere. Of independent Gaussian channels with these deviations,
and those that are not stored left out:

    paths    squared error of what water-filling gives each channel in whole bits, Σ σ² d(bits), as `aqua-fisher` has it
    bound    the least of any code of as many bits in the mean, Σ min(σ², θ): reverse water-filling

Divergence goes with squared error where it is small, so `bound / paths` is about the least share of its divergence that
a recipe with the same predictions and bases could have. Predictions from finer codes below would be better as well, so
that it is no bound of those. A rung is taken to be anywhere in its third of an octave, by a fixed draw.

    coded    squared error of scalar codes of one step, entropy-coded with dead zones, as `rest` has it
    least    bits in the mean that the best of codes takes for that error, beside --bits

Source: Cover and Thomas, 2006, section 10.3.3.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from kvq_calib.fit.latent import QUIET, expected, water_fill, where_it_falls_to_0
from kvq_runtime.ops import ladder, latent


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each number of bits."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("artifact", type=Path, help="of a rest-* recipe; of more bits, more channels are stored")
    top.add_argument("--width", type=int, default=192, help="channels of all KV heads (default: %(default)s)")
    top.add_argument("--bits", nargs="+", type=float, default=[0.6, 1.1, 2.1], help="an element")
    args = top.parse_args(arguments)
    variances_C = stored(load_file(args.artifact), args.width)
    for bits in args.bits:
        paths, bound = errors(variances_C, bits)
        coded = scalar(variances_C, bits)
        shares = f"bound / paths = {bound / paths:.3f}, bound / coded = {bound / coded:.3f}"
        print(f"{bits:g} bits: {shares}; least = {least(variances_C, coded):.3f} bits")
    return 0


def stored(tensors: dict[str, Tensor], width: int) -> Tensor:
    """Variances of all channels, in steps, 0 of those that are not stored: float64 [places · width]."""
    generator, found = torch.Generator().manual_seed(0), list[Tensor]()
    for name, rungs in tensors.items():
        if name.endswith(".quantize.rung"):
            within = torch.rand(len(rungs), generator=generator, dtype=torch.float64) - 0.5
            octaves = (ladder.LOWEST + rungs.double() + within) / ladder.PER
            found.append(torch.nn.functional.pad(4.0**octaves, (0, width - len(rungs))))
    return torch.cat(found)


def errors(variances_C: Tensor, bits: float) -> tuple[float, float]:
    """Squared error by paths in whole bits, and the least of any code, at so many bits in the mean."""
    left = [1.0, *latent.PATH_DISTORTIONS.values(), *map(latent.distortion, range(6, latent.MAX_BITS + 1))]
    chosen = torch.tensor(water_fill(variances_C, round(bits * len(variances_C)), left))
    paths = variances_C @ torch.tensor(left, dtype=torch.float64)[chosen]
    level = where_it_falls_to_0(lambda octave: _rate(variances_C, octave) - bits, -60.0, 60.0)
    return float(paths), float(variances_C.clamp_max(2.0**level).sum())


def scalar(variances_C: Tensor, bits: float) -> float:
    """Squared error by scalar codes of the step at which they take so many bits in the mean."""
    octave = where_it_falls_to_0(lambda octave: expected(variances_C.sqrt() / 2.0**octave) - bits, -60.0, 60.0)
    deviation_C = variances_C.sqrt() / 2.0**octave
    cell_C = (deviation_C / ladder.LOUD).clamp_min(1)  # in steps
    error_C = ladder.ladder().error[ladder.of_deviation(deviation_C / cell_C).long()] * cell_C.square() * 4.0**octave
    return float(torch.where(deviation_C < QUIET, variances_C, error_C).sum())


def least(variances_C: Tensor, error: float) -> float:
    """Bits in the mean of the best codes of so much squared error: reverse water-filling."""
    level = -where_it_falls_to_0(lambda octave: float(variances_C.clamp_max(2.0**-octave).sum()) - error, -60.0, 60.0)
    return _rate(variances_C, level)


def _rate(variances_C: Tensor, octave: float) -> float:
    """Bits in the mean of channels whose error is at most 2 to the power of `octave` each."""
    return float((variances_C / 2.0**octave).clamp_min(1).log2().mean()) / 2


if __name__ == "__main__":
    raise SystemExit(main())
