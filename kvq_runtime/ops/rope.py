"""RoPE and its inverse, with the cosines and sines that the model uses.

Half layout, as in transformers: channel f of the first half and channel f of the second make a pair. K = rotated
channels / 2; channels beyond 2 K are not rotated. The inverse divides by cos² + sin², which is the squared scaling of
YaRN and its like, and which also takes out the rounding of a 16-bit cosine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.families import FULL

Pair = tuple[Tensor, Tensor]

# transformers' rope_type: of frequencies that are the same for every text, and of those that change with its length
FIXED_TYPES = ("default", "linear", "llama3", "yarn")
VARYING_TYPES = ("dynamic", "longrope")


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read RoPE's settings in a configuration of transformers 4 or 5: those of full attention."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    by_type = isinstance(parameters, Mapping) and any(isinstance(value, Mapping) for value in parameters.values())
    return dict((parameters.get(FULL) or {}) if by_type else parameters)


@dataclass(frozen=True)
class Rotary:
    """A model's rotation: cos and sin of position × frequency, times `scaling`, rounded to the model's dtype."""

    frequencies_K: Tensor
    scaling: float
    dtype: torch.dtype

    def tables(self, positions_NT: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, [N, T, K] each, at whole positions."""
        angles = positions_NT[..., None].float() * self.frequencies_K
        return (angles.cos() * self.scaling).to(self.dtype), (angles.sin() * self.scaling).to(self.dtype)


def rotate(x_NTHD: Tensor, cos_NTK: Tensor, sin_NTK: Tensor) -> Tensor:
    """Apply RoPE: [N, T, H, D] with cos and sin [N or 1, T, K]; the result has the dtype of `x`."""
    half = cos_NTK.shape[-1]
    cos, sin = cos_NTK[:, :, None].to(x_NTHD.dtype), sin_NTK[:, :, None].to(x_NTHD.dtype)
    turned = x_NTHD if 2 * half == x_NTHD.shape[-1] else x_NTHD[..., : 2 * half]
    # whole rows and one roll: slices of half a head are an order of magnitude slower on a CPU
    out = turned * torch.cat([cos, cos], -1)
    out.addcmul_(turned.roll(half, -1), torch.cat([-sin, sin], -1))
    return out if turned is x_NTHD else torch.cat([out, x_NTHD[..., 2 * half :]], -1)


def spread(cos_NTK: Tensor, sin_NTK: Tensor, heads: int, size: int) -> tuple[Tensor, Tensor]:
    """Return the factors of every channel of all heads, [N, T, C] each: of the channel itself, and of its partner."""
    rest = size - 2 * cos_NTK.shape[-1]
    cos = torch.nn.functional.pad(torch.cat([cos_NTK, cos_NTK], -1), (0, rest), value=1.0)
    sin = torch.nn.functional.pad(torch.cat([-sin_NTK, sin_NTK], -1), (0, rest))
    return cos.repeat(1, 1, heads), sin.repeat(1, 1, heads)


def rotate_rows(x_NTC: Tensor, cos_NTC: Tensor, sin_NTC: Tensor, heads: int, half: int) -> None:
    """Apply `rotate` in place, all heads side by side, with factors of `spread`."""
    x_NTHD = x_NTC.unflatten(-1, (heads, -1))
    partner = x_NTHD.roll(half, -1)
    if 2 * half < x_NTHD.shape[-1]:
        partner[..., : 2 * half] = x_NTHD[..., : 2 * half].roll(half, -1)
    x_NTC.mul_(cos_NTC).addcmul_(partner.flatten(-2), sin_NTC)


def of_middles(tables: Pair, segment: int) -> Pair:
    """Return cos and sin of the middle slot of each token's segment, [N, T, K] each, from those of the tokens."""
    slots = tables[0].shape[1]
    slot_T = torch.arange(slots, device=tables[0].device) // segment * segment + segment // 2
    slot_T = slot_T.clamp_(max=slots - 1)
    return tables[0][:, slot_T], tables[1][:, slot_T]


def by_segment(tables: Pair, segment: int) -> tuple[Tensor | None, Tensor]:
    """Return cos and sin side by side, float32, of the middles of segments, [N, S, 2K], or None with segment 0, and of
    the tokens, [N, T, 2K]."""
    waves = torch.cat([table.float() for table in tables], -1)
    return (torch.cat(of_middles(tables, segment), -1)[:, ::segment].float() if segment else None), waves


def between(tables: Pair, others: Pair) -> Pair:
    """Return cos and sin of the angles from `others` to `tables`, float32, without the scaling of either."""
    (cos, sin), (cos_0, sin_0) = ((x.float() for x in pair) for pair in (tables, others))
    norm = cos_0.square() + sin_0.square()
    return (cos * cos_0 + sin * sin_0) / norm, (sin * cos_0 - cos * sin_0) / norm


def unrotate(x_NTHD: Tensor, cos_NTK: Tensor, sin_NTK: Tensor) -> Tensor:
    """Undo `rotate`, in float32."""
    cos, sin = cos_NTK.float(), sin_NTK.float()
    norm = cos.square() + sin.square()
    return rotate(x_NTHD.float(), cos / norm, -sin / norm)
