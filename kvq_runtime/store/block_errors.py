"""Count the blocks of a cache whose error is beyond nearly all errors that its calibration saw.

    error   mean |x - x̂|² of a block's tokens, padding and exact sinks left out
    bound   by layer, of keys and of values: the 99.9% quantile of errors of the calibration's text, as estimated from
            its held-out blocks (`kvq_calib/fit/scheme.py`)

A few blocks beyond are normal. Many mean that the text, or the model, differs from the calibration's.

Shapes: N blocks.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.errors import ArtifactError
from kvq_runtime.geometry import ROLES

QUANTILE = 0.999
FIELD = "block_error"  # of a layer's keys, or values, in what an artifact says of its fit
COLLAPSE = 3.0  # of relative_key_error: SmolLM2 has at most 2.4, at 2 bits; Qwen2.5 with its bias at least 4.3, at 4
WARN = 0.1  # a share of blocks, a hundred times what the quantile leaves
Bounds = Mapping[tuple[int, int], float]  # by layer, and keys (0) or values (1)


def block_errors(gap_NTC: Tensor, counted_NT: Tensor | None = None) -> Tensor:
    """Mean |gap|² of the tokens of each block that count, float32 [N]; 0 for a block of which none does."""
    if counted_NT is None:
        return torch.linalg.vector_norm(gap_NTC.float(), dim=(1, 2)).square() / gap_NTC.shape[1]
    tokens_NT = gap_NTC.float().square().sum(2).where(counted_NT, 0.0)
    return tokens_NT.sum(1) / counted_NT.sum(1).clamp(min=1)


def bounds_in(fit: Mapping[str, Any]) -> dict[tuple[int, int], float]:
    """Read the bounds in what an artifact says of its fit; ArtifactError for one that is no number of at least 0."""
    bounds, layers = {}, fit.get("layers", ())
    for layer, measures in enumerate(layers if isinstance(layers, Sequence) else ()):
        for role, name in enumerate(ROLES):
            measured = measures.get(name) if isinstance(measures, Mapping) else None
            if not isinstance(measured, Mapping) or FIELD not in measured:
                continue
            bound = measured[FIELD]
            if isinstance(bound, bool) or not isinstance(bound, (int, float)) or not 0 <= bound < 1e300:
                raise ArtifactError(f"fit: {FIELD} of layer {layer} {name}s is {bound!r:.80}; a number of at least 0")
            bounds[layer, role] = float(bound)
    return bounds


def relative_key_error(gap_NTC: Tensor, k_NTC: Tensor, heads: int, counted_NT: Tensor | None) -> Tensor:
    """Return √(Σ|gap|² / 2Σ(ρ - mean ρ)²), a scalar: the error of keys over what differs between the tokens of a block.

    ρ is the length of each pair of channels that RoPE turns together, first half of a head with second, so that a
    constant in keys before RoPE counts as little as one after it. Where there is none, 2Σ(ρ - mean ρ)² is a half of
    what differs (0.43 of a Gaussian's). Tokens that do not count are left out.
    """
    length_NTK = torch.hypot(*k_NTC.float().unflatten(-1, (heads, 2, -1)).unbind(-2)).flatten(2)
    weight_NT1 = torch.ones_like(length_NTK[..., :1]) if counted_NT is None else counted_NT[..., None].float()
    mean_N1K = (length_NTK * weight_NT1).sum(1, keepdim=True) / weight_NT1.sum(1, keepdim=True).clamp(min=1)
    own = ((length_NTK - mean_N1K) * weight_NT1).norm() * 2**0.5
    return ((gap_NTC.float() * weight_NT1).norm() / own).nan_to_num(0.0, 0.0, 0.0)


class BlockErrors:
    """The count of one cache since it was empty.

    blocks   encoded blocks of keys and of values, of all layers and rows      beyond   those whose error is beyond
    """

    def __init__(self, bounds: Bounds):
        self.bounds = bounds
        self.blocks: int = 0
        self.beyond: int | Tensor = 0  # on the device, which nothing waits for

    def add(self, layer: int, role: int, gap_NTC: Tensor, counted_NT: Tensor | None) -> None:
        """Count blocks of which decoding leaves this error."""
        errors_N = block_errors(gap_NTC, counted_NT).nan_to_num(math.inf, math.inf)
        self.blocks += len(errors_N)
        self.beyond = self.beyond + (errors_N > self.bounds.get((layer, role), math.inf)).sum()

    def restore(self, blocks: int, beyond: int | Tensor) -> None:
        """Forget the blocks of a pass that is undone."""
        self.blocks, self.beyond = blocks, beyond

    @property
    def share(self) -> float | None:
        """The share of blocks beyond; None: there are no blocks, or nothing is known of the calibration's errors."""
        return int(self.beyond) / self.blocks if self.blocks and self.bounds else None
