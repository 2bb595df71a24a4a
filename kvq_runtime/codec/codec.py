"""Compose the stages of one Side into what encodes and decodes one layer's keys or values.

Everything here has shape [N, T, C]: N blocks, T tokens, C channels of all heads. What passes between layers is
*centred*: without the mean, which `restore` puts back. Encoding works in float32; decoding in bfloat16, with float32
sums inside matrix products: its rounding is far below the quantizer's, and it is several times faster.

What is stored, and what it costs, is in `contents.py`; the rotations are in `matrices.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvq_runtime import chained, rope
from kvq_runtime.attention.fold import fold
from kvq_runtime.contents import all_specs, bits, fields, specs
from kvq_runtime.geometry import Geometry
from kvq_runtime.kinds import KINDS
from kvq_runtime.matrices import matrices, places
from kvq_runtime.ops import dispatch
from kvq_runtime.recipe import HALVES, Half, Recipe
from kvq_runtime.stages import groups, predict
from kvq_runtime.stages.exact import Exact
from kvq_runtime.stages.mixed import Mixed
from kvq_runtime.stages.rotate import Basis

__all__ = ["Codec", "Context", "all_specs", "bits", "build", "fields", "specs"]

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Context:
    """What a block is predicted from.

    rope    cos and sin of its tokens, [N, T, K] each, where keys are encoded after RoPE with their mean removed
    keys    this layer's decoded keys, centred; for values
    below   the decoded (keys, values) of the layers underneath, centred, nearest first
    """

    rope: tuple[Tensor, Tensor] | None = None
    keys: Tensor | None = None
    below: Sequence[tuple[Tensor, Tensor]] = ()


class Codec:
    """Encode and decode one layer's keys or values, as `recipe` says, with the tensors fitted for it.

    tensors     {"predict.weight": ..., ...}, exactly those of `specs`; a fit that has not come so far gives fewer
    back        what turns a run of decoded elements, in stored order, back; or None
    fold        how its blocks are attended to as they lie; or None
    turns_keys  whether what is decoded has to be turned by its position to be a key
    """

    def __init__(self, recipe: Recipe, layer: int, half: Half, geometry: Geometry, tensors: Mapping[str, Tensor]):
        self.side = recipe.side(layer, half)
        self.layer, self.geometry = layer, geometry
        self.half: Half = half
        self.predictor = self.side.predictor(layer, half)
        self.reads_keys, self.below = self.side.inputs(layer, half)
        self.turns_keys = half == "key" and recipe.position == "pre"
        self._turn_mean = half == "key" and recipe.position == "post"
        self._width = geometry.width if self.side.axis == "token" else self.side.block
        self.tensors: dict[str, Tensor] = {}
        self._hold(tensors, _CPU)
        self._chained = chained.encoder(self.side, geometry)
        self._scale_last = False  # whether the quantizer's scale goes through the rotation: it covers what is rotated
        if self.back is not None and hasattr(self.side.quantize, "lookup"):
            size = groups.size(self.side.quantize.group, self._width, geometry)
            self._scale_last = self.side.axis == "token" and size % len(self.back) == 0

    def to(self, device: torch.device) -> "Codec":
        """Move every tensor to the device."""
        self._hold(self.tensors, device)
        return self

    def _hold(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self.tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        self._own: dict[str, dict[str, Tensor]] = {stage: {} for stage in KINDS}
        for name, tensor in self.tensors.items():
            stage, field = name.split(".", 1)
            self._own[stage][field] = tensor
        # only a fitted quantizer is given tensors
        self._fitted = {"tensors": self._own["quantize"]} if self._own["quantize"] else {}
        if isinstance(self.side.rotate, Basis):
            own = self._own["rotate"]
            self._turn, dual = own.get("basis"), own.get("dual", own.get("basis"))
            self.back = None if dual is None else dual.mT
        else:
            self._turn, self.back = matrices(self.side.rotate, self.side.quantize, self._width, self.geometry, device)
        self.fold = fold(self, device)

    @property
    def fitted(self) -> Mapping[str, Tensor]:
        """What was fitted for the quantizer."""
        return self._own["quantize"]

    @property
    def shared(self) -> list[Tensor]:
        """Tensors that do not grow with tokens: fitted ones and rotations."""
        matrices = (self._turn, self.back, self.fold.turn if self.fold else None)
        return [*self.tensors.values(), *(matrix for matrix in matrices if matrix is not None)]

    def encode(self, x_NTC: Tensor, context: Context) -> dict[str, Tensor]:
        """Encode blocks [N, block, C] (any T for most per-token sides): the fields of the quantizer, each [N, ...]."""
        if isinstance(self.side.quantize, Exact):
            return self.side.quantize.encode(x_NTC, self.geometry)
        bare = self.predictor is None and self.side.correct is None
        x = x_NTC if bare and self.chains(x_NTC) else self.residual(x_NTC, context)
        if self.side.correct is None:
            return self._round(x)
        fields = self._round(self.side.correct.rest(x))
        return fields | self.side.correct.encode(x, self._unround(fields), self.geometry, self._own["correct"])

    def residual(self, x_NTC: Tensor, context: Context) -> Tensor:
        """What is left to be rounded after mean and prediction, float32."""
        x = x_NTC.float()
        if self.predictor is not None:
            x = x - self.mean(context)
        predicted = self.predicted(context)
        return x if predicted is None else x - predicted.float()

    def decode(self, fields: Mapping[str, Tensor], context: Context, out: Tensor | None = None) -> Tensor:
        """Decode blocks to [N, T, C], centred: bfloat16 where predicted, float32 else, or the stored dtype of `exact`.

        out   a float32 [N, T, C] to decode into, where nothing is predicted; what is returned may be another tensor
        """
        predicted = self.predicted(context)
        plain = predicted is None and self.side.correct is None
        x = self._unround(fields, out if plain else None)
        if self.side.correct is not None:
            x = self.side.correct.apply(x, fields)
        return x if predicted is None else predicted.add_(x.to(torch.bfloat16))

    def tokens(self, fields: Mapping[str, Tensor], block_N: Tensor, place_N: Tensor, channels: slice) -> Tensor:
        """These channels of single tokens, one in each of these blocks, with their mean: [N, channels].

        For sides per token that predict nothing but a mean; keys stay before RoPE if they are encoded so.
        """
        if isinstance(self.side.quantize, Mixed):
            assert self.back is not None
            z = self.side.quantize.decode_at(fields, block_N, place_N, self.side.block, self.geometry, **self._fitted)
            x = (z @ self.back[:, channels]).float()
        else:
            x = self._unround({name: field[block_N, place_N][None] for name, field in fields.items()})[0, :, channels]
        return x if self.predictor is None else x + self._own["predict"]["mean"][channels]

    def rounded(self, x_NTC: Tensor) -> Tensor:
        """What the quantizer alone makes of residuals [N, T, C]."""
        return self._unround(self._round(x_NTC))

    def chains(self, x_NTC: Tensor) -> bool:
        """Whether one launch encodes this."""
        return self._chained is not None and dispatch.runs_kernel(x_NTC)

    def _round(self, x_NTC: Tensor) -> dict[str, Tensor]:
        x_NRW = x_NTC if self.side.axis == "token" else x_NTC.mT
        if self._chained is not None and self.chains(x_NTC):
            return self._chained(x_NRW, self._own["quantize"])
        x = self.rotated(x_NRW)
        if self._own["feedback"]:
            x = self.side.feedback.apply(x, self.side.axis, self.geometry, self._own["feedback"], self._quantized)
        return self.side.quantize.encode(x, self.geometry, **self._fitted)

    def _quantized(self, x_NRW: Tensor) -> Tensor:
        """Rows encoded and decoded, before any rotation back."""
        quantize, place = self.side.quantize, places(self.side.quantize, self._width, self.geometry, x_NRW.device)
        found = quantize.decode(quantize.encode(x_NRW, self.geometry), self._width, self.geometry).float()
        return found if place is None else found[..., place]

    def rotated(self, x_NRW: Tensor) -> Tensor:
        """Vectors as the quantizer sees them: rotated."""
        return x_NRW if self._turn is None else _grouped(x_NRW, self._turn.float())

    def _unround(self, fields: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        quantize: Any = self.side.quantize
        width = self._width
        if self._scale_last:
            assert self.back is not None
            return groups.scaled(
                _grouped(quantize.lookup(fields, width, self.geometry), self.back), fields["scale"], out
            )
        if quantize.kind == "rtn" and self.back is None and self.side.axis == "token":
            return quantize.decode(fields, width, self.geometry, out)
        x = quantize.decode(fields, width, self.geometry, **self._fitted)
        x = x if self.back is None else _grouped(x.to(torch.bfloat16), self.back).float()
        return x if self.side.axis == "token" else x.mT

    def restore(self, x_NTC: Tensor, context: Context) -> Tensor:
        """Put the mean back: the keys or values themselves, in the recipe's position."""
        return x_NTC if self.predictor is None else x_NTC + self.mean(context).to(x_NTC.dtype)

    def mean(self, context: Context) -> Tensor:
        """The mean that is removed, float32: [C], or [N, T, C] where it turns with the position."""
        return self.turned(self._own["predict"]["mean"], context)

    def turned(self, mean_C: Tensor, context: Context) -> Tensor:
        """A mean of values, or of keys before RoPE, where this side's tokens are: [C] or [N, T, C]."""
        if not self._turn_mean:
            return mean_C
        assert context.rope is not None, "a mean after RoPE needs the cos and sin in use"
        mean_HD = mean_C.unflatten(0, (self.geometry.kv_heads, -1))
        cos, sin = (part.float() for part in context.rope)
        return rope.rotate(mean_HD.expand(*cos.shape[:2], -1, -1), cos, sin).flatten(-2)

    def inputs(self, context: Context) -> Tensor:
        """The inputs of the prediction, side by side: [N, T, I]."""
        which = HALVES.index(self.half)
        parts = [context.keys] if self.reads_keys else []
        parts += [context.below[depth - 1][which] for depth in self.below]
        assert all(part is not None for part in parts), "a prediction without what it reads"
        return torch.cat([part.to(torch.bfloat16) for part in parts], -1)  # type: ignore[union-attr]

    def predicted(self, context: Context) -> Tensor | None:
        """The centred prediction, bfloat16; None where only a mean, or nothing, is predicted."""
        if not isinstance(self.predictor, predict.Linear):
            return None
        return self.predictor.apply(self.inputs(context), self._own["predict"])

    def fields(self, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Names, shapes and dtypes of one encoded block; `dtype` is the model's."""
        return fields(self.side, self.geometry, dtype)

    def bits(self, dtype: torch.dtype = torch.bfloat16) -> float:
        """What a stored element costs, in bits: codes and everything stored beside them."""
        return bits(self.side, self.geometry, dtype)


def build(recipe: Recipe, geometry: Geometry, tensors: Mapping[str, Tensor]) -> list[tuple[Codec, Codec]]:
    """The codecs of all layers, (keys, values) each, from the tensors of an artifact."""

    def one(layer: int, half: Half) -> Codec:
        start = f"layers.{layer}.{half}."
        names = specs(recipe, layer, half, geometry)
        return Codec(recipe, layer, half, geometry, {name: tensors[start + name] for name in names})

    return [(one(layer, "key"), one(layer, "value")) for layer in range(geometry.layers)]


def _grouped(x_NRW: Tensor, matrix_WV: Tensor) -> Tensor:
    """Each run of W elements times the matrix: V elements in its place."""
    taken, given = matrix_WV.shape
    return (x_NRW.reshape(-1, taken) @ matrix_WV).view(*x_NRW.shape[:-1], x_NRW.shape[-1] // taken * given)
