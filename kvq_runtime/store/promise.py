"""State the error of blocks that a calibration saw, as an artifact's promise.

    error     mean |x - x̂|² of a block's tokens, padding and exact sinks left out, over a spread: mean |x - μ|²
    promise   by layer, of keys and of values: the spread of the tokens that the fit was measured on (those that it held
              out, if it did), and quantiles of the errors of their blocks
    beyond    an error of more than MARGIN times the quantile AT of that

Without a promise the spread is that of the block itself, and nothing is beyond. N blocks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.errors import ArtifactError
from kvq_runtime.geometry import ROLES

QUANTILES = (0.5, 0.9, 0.99, 1.0)  # that are stored and shown
AT, MARGIN = 2, 1.25  # of these the third, and how many times that is kept
LEAST = 1e-4  # of the spread: an error below it is beyond nothing


def block_errors(gap_NTC: Tensor, counted_NT: Tensor | None = None) -> Tensor:
    """Mean |gap|² of the tokens of each block that count, float32 [N]; 0 for a block of which none does."""
    if counted_NT is None:
        return torch.linalg.vector_norm(gap_NTC.float(), dim=(1, 2)).square() / gap_NTC.shape[1]
    tokens_NT = gap_NTC.float().square().sum(2).where(counted_NT, 0.0)
    return tokens_NT.sum(1) / counted_NT.sum(1).clamp(min=1)


def own_spread(x_NTC: Tensor, counted_NT: Tensor | None = None) -> Tensor:
    """Mean |x - μ|² of each block about its own mean, likewise."""
    if counted_NT is None:
        return x_NTC.var(1, correction=0).sum(1)
    count_N11 = counted_NT.sum(1).clamp(min=1)[:, None, None]
    return block_errors(x_NTC - (x_NTC * counted_NT[..., None]).sum(1, keepdim=True) / count_N11, counted_NT)


def quantiles(errors: Sequence[float]) -> tuple[float, ...]:
    """Those of QUANTILES: of n errors the ⌈q n⌉-th smallest. () of none."""
    ranked = sorted(errors)
    return tuple(ranked[math.ceil(q * len(ranked)) - 1] for q in QUANTILES) if ranked else ()


@dataclass(frozen=True)
class Promise:
    """The errors of keys, or of values, of a layer in calibration: a spread, and quantiles over so many blocks."""

    spread: float
    blocks: int
    quantiles: tuple[float, ...]

    @staticmethod
    def of(errors_N: Tensor, spread: float) -> "Promise":
        """From `block_errors`, and the mean |x - μ|² of a token; numbers are rounded to four digits."""
        unit = _short(spread)
        return Promise(unit, len(errors_N), quantiles([_short(error / unit) for error in errors_N.tolist()]))

    @staticmethod
    def read(stated: Any) -> "Promise":
        """From an artifact's JSON. Raises ArtifactError for what is no promise."""
        ranked = stated.get("quantiles") if isinstance(stated, Mapping) else None
        numbers = [stated["spread"], *ranked] if isinstance(ranked, list) and "spread" in stated else []
        good = all(isinstance(one, (int, float)) and 0 <= one < 1e300 for one in numbers)
        if len(numbers) != 1 + len(QUANTILES) or not good or not numbers[0] or type(stated.get("blocks")) is not int:
            raise ArtifactError(f"fit: promise {stated!r:.80}; a spread above 0, blocks, {len(QUANTILES)} quantiles")
        return Promise(numbers[0], stated["blocks"], tuple(numbers[1:]))

    @property
    def bound(self) -> float:
        """The error from which on a block is beyond."""
        return max(LEAST, MARGIN * self.quantiles[AT])


def _short(x: float) -> float:
    return float(f"{x:.4g}")


@dataclass(frozen=True)
class Check:
    """What is asked of the blocks of a cache.

    promises   by layer, and keys (0) or values (1)
    strict     whether a block beyond is an error
    """

    promises: Mapping[tuple[int, int], Promise] = field(default_factory=dict)
    strict: bool = False

    @staticmethod
    def of(fit: Mapping[str, Any], name: str = "", strict: bool = False) -> "Check":
        """From what an artifact's fit measured. Raises ValueError where `strict` has no promise to go by."""
        layers = fit.get("layers", ())
        found = {
            (layer, role): Promise.read(measures[name]["promise"])
            for layer, measures in enumerate(layers if isinstance(layers, Sequence) else ())
            for role, name in enumerate(ROLES)
            if isinstance(measures, Mapping) and isinstance(measures.get(name), Mapping) and "promise" in measures[name]
        }
        if strict and not found:
            raise ValueError(f"strict=True, but {name or 'the artifact'} promises nothing; fit it with this version")
        return Check(found, strict)
