"""Compose the stages of one Scheme into what encodes and decodes one layer's keys or values.

Everything here has shape [N, T, C]: N blocks, T tokens, C channels of all heads. What passes between layers is
*centred*: without the mean, which `restore` puts back. Encoding works in float32; decoding in bfloat16, with float32
sums inside matrix products: its rounding is far below the quantizer's, and it is several times faster, on a CPU without
bfloat16 instructions too (`kvq_runtime/ops/product.py`).

A quantizer may decode in another order than it was given (`Quantizer.order`), the stored order: so the rows of the
matrix that turns decoded elements back are in that order, and nothing is put in place by itself.

What is stored, and what it costs, is the Scheme's own answer. A codec never changes: caches of one fit share it, see
`shared.py`.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvq_runtime.codec.block_input import Context, side_by_side
from kvq_runtime.codec.channel_reader import ChannelReader, channel_reader
from kvq_runtime.codec.latent_reader import LatentReader
from kvq_runtime.codec.matrices import matrices, stored_places
from kvq_runtime.codec.packed import PackedReader, packed_reader
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import dispatch, latent, product, rope
from kvq_runtime.ops.constant import lasting
from kvq_runtime.ops.rotation import Rotation, SignedHadamard, by_runs, in_tile, rotate
from kvq_runtime.recipe import ROLES, Recipe, Role
from kvq_runtime.stages.stage import SLOTS, InputTensor, Site, Specs

_CPU = torch.device("cpu")


class Codec:
    """Encode and decode one layer's keys or values by `recipe`, with the tensors fitted for it.

    tensors        {"predict.weight": ..., ...}, exactly those of `specs`; a fit that has not come so far gives fewer
    back           what rotates a run of decoded elements, in stored order, back; or None
    packed_reader  attends to its packed blocks without decoding them; None where they have to be decoded
    unrotated      whether it encodes keys before RoPE, or by segment: what is decoded has yet to be rotated
    segment        tokens of a segment, of keys that are encoded by segment; else 0
    """

    def __init__(self, recipe: Recipe, layer: int, role: Role, geometry: Geometry, tensors: Mapping[str, Tensor]):
        self.scheme = recipe.scheme(layer, role)
        self.layer, self.geometry, self.block = layer, geometry, recipe.window.block
        self.role: Role = role
        self.predictor = self.scheme.predictor(layer, role)
        self.below = self.scheme.inputs(layer, role).below
        self.unrotated = role == "key" and recipe.position != "post"
        self.segment = recipe.segment if role == "key" and recipe.position == "segment" else 0
        self._turn_mean = role == "key" and recipe.position != "pre"
        self._carried = recipe.cross_layer  # decoded for the layers above in any case
        self._width = self.scheme.width(recipe.window.block, geometry)
        self._hold(tensors, _CPU)
        self._scale_last = False  # whether the quantizer's scale goes through the rotation: it covers what is rotated
        size = self.scheme.quantize.group_size(self._width, geometry)
        if size is not None and self.scheme.quantize.has_lookup and self.back is not None:
            self._scale_last = self.scheme.axis == "token" and size % self.back.shape[-2] == 0

    def to(self, device: torch.device) -> "Codec":
        """Return the codec with every tensor on the device: itself if they are there."""
        if device == self.device:
            return self
        moved = copy.copy(self)
        moved._hold(self.tensors, device)
        return moved

    def __deepcopy__(self, memo: Any) -> "Codec":
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Settings and fitted tensors; what is made of them, and shared with other codecs, is made again."""
        made = ("_own", "_rotation", "back", "_forward", "packed_reader", "device")
        kept = {name: value for name, value in self.__dict__.items() if name not in made}
        return kept | {"place": torch.empty(0, device=self.device)}  # a tensor, which torch.load may map elsewhere

    def __setstate__(self, state: dict[str, Any]) -> None:
        place = state.pop("place")
        self.__dict__.update(state)
        self._hold(self.tensors, place.device)

    @lasting
    def _hold(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self.device, self.tensors = device, dict[str, Tensor]()
        self._own: dict[str, dict[str, Tensor]] = {slot: {} for slot in SLOTS}
        for name, tensor in tensors.items():
            stage, field = name.split(".", 1)
            self.tensors[name] = self._own[stage][field] = tensor.to(device)
        self._rotation, self.back = matrices(self.scheme, self._width, self.geometry, self._own["rotate"], device)
        forward = self._rotation
        # all codecs share a Hadamard's matrix, which is made once a process
        self._forward = forward.matrix if isinstance(forward, SignedHadamard) else forward
        self.packed_reader = self._reader(device)

    def _reader(self, device: torch.device) -> PackedReader | ChannelReader | LatentReader | None:
        """Return the reader of its packed blocks; None: keys before RoPE, and all that is predicted, are decoded."""
        if self.unrotated and not self.segment:
            return None
        scheme, mean, back = self.scheme, self._own["predict"].get("mean"), self.back
        if not scheme.quantize.takes_latents:
            if self.unrotated:
                return None
            if self.role == "key" and scheme.axis == "channel":
                return channel_reader(scheme, self.block, self.geometry, device)
            return packed_reader(scheme, self.geometry, back, device)
        if back is None or "deviation" not in self._own["quantize"] or self._carried or scheme.correct is not None:
            return None
        mean = torch.zeros(self.geometry.width, device=device) if mean is None else mean
        return LatentReader(scheme, self.geometry, self._own["quantize"], back, mean, self.block, self.segment)

    @property
    def fitted(self) -> Mapping[str, Tensor]:
        """The fitted tensors of the quantizer."""
        return self._own["quantize"]

    @property
    def shared(self) -> list[Tensor]:
        """Tensors that do not grow with tokens: fitted ones and rotations."""
        turns = (self._forward, self.back, self.packed_reader.turn if self.packed_reader else None)
        return [*self.tensors.values(), *(matrix for matrix in turns if matrix is not None)]

    def encode(self, x_NTC: Tensor, context: Context) -> dict[str, Tensor]:
        """Encode blocks [N, block, C], any T for most schemes per token: the fields of the quantizer, each [N, ...]."""
        bare = self.predictor is None and self.scheme.correct is None
        x = x_NTC if bare else self.residual(x_NTC, context)
        if self.scheme.correct is None:
            return self._round(x, self._importance(x_NTC, context))
        fields = self._round(self.scheme.correct.rest(x))
        return fields | self.scheme.correct.encode(x, self._unround(fields), self.geometry, self._own["correct"])

    def centred(self, x_NTC: Tensor, context: Context) -> Tensor:
        """Return rows about the mean, if one is removed, float32."""
        return x_NTC.float() if self.predictor is None else x_NTC.float() - self.mean(context)

    def residual(self, x_NTC: Tensor, context: Context) -> Tensor:
        """Return the residual that is left to round after mean and prediction, float32."""
        x = self.centred(x_NTC, context)
        predicted = self.predicted(context)
        return x if predicted is None else x - predicted.float()

    def encode_each(self, blocks: Sequence[tuple[Tensor, Context]]) -> list[tuple[dict[str, Tensor], Context]]:
        """`encode` of each of these alone, to the bit, but that latents are rounded together; and what decodes it.

        Products of matrices may round a block otherwise in other company; what is done to a token alone does not.
        """
        known = [(x_NTC, replace(context, predicted=self.predicted(context))) for x_NTC, context in blocks]
        if len(known) == 1 or not self.rounds_together:
            return [(self.encode(*each), each[1]) for each in known]
        sizes, whole = [len(x_NTC) for x_NTC, _ in known], side_by_side([context for _, context in known])
        x_NTC = torch.cat([x_NTC for x_NTC, _ in known])
        level_NT, rotation = self._importance(x_NTC, whole), self._rotation
        rotated = torch.cat([rotate(x, rotation) for x in self.residual(x_NTC, whole).split(sizes)])
        fields = self._rounded(rotated, level_NT, None)
        parts = zip(*(field.split(sizes) for field in fields.values()), strict=True)
        return [(dict(zip(fields, part, strict=True)), of) for part, (_, of) in zip(parts, known, strict=True)]

    def decode_each(self, blocks: Sequence[tuple[Mapping[str, Tensor], Context]]) -> list[Tensor]:
        """`decode` of each of these alone, likewise."""
        if len(blocks) == 1 or not self.rounds_together:
            return [self.decode(*block) for block in blocks]
        sizes = [len(next(iter(fields.values()))) for fields, _ in blocks]
        whole = {name: torch.cat([fields[name] for fields, _ in blocks]) for name in blocks[0][0]}
        x_NTR = self.scheme.quantize.decode(whole, self._width, self.geometry, self._own["quantize"])
        back = self.back
        assert back is not None, "latents without a way back"
        x_NTC = torch.cat([by_runs(x, back) for x in x_NTR.to(torch.bfloat16).split(sizes)])
        predicted = [self.predicted(context) for _, context in blocks]
        x_NTC = x_NTC.float() if predicted[0] is None else x_NTC.add_(torch.cat(predicted))  # type: ignore[arg-type]
        return [*x_NTC.split(sizes)]

    @property
    def rounds_together(self) -> bool:
        """True if blocks are rounded together: latents that nothing else is stored beside, which take no products."""
        return self.scheme.quantize.takes_latents and self.scheme.correct is None and not self._own["feedback"]

    def encode_decode(self, x_NTC: Tensor, context: Context) -> tuple[dict[str, Tensor], Tensor]:
        """`encode`, and `decode` of what it gives, from one prediction."""
        context = replace(context, predicted=self.predicted(context))
        fields = self.encode(x_NTC, context)
        return fields, self.decode(fields, context)

    def approximated(self, x_NTC: Tensor, context: Context) -> Tensor:
        """Return what `encode_decode` decodes to, or, where encoding takes a search, something with errors like it."""
        quantize: Any = self.scheme.quantize
        if not self.rounds_together:
            return self.encode_decode(x_NTC, context)[1]
        predicted = self.predicted(context)
        x = self.residual(x_NTC, replace(context, predicted=predicted))
        level_NT = self._importance(x_NTC, context)
        x = quantize.approximated(x, self._rotation, self._own["quantize"], self.geometry, level_NT)
        x = self._turned_back(x, self.back)
        return x if predicted is None else predicted.add_(x.to(torch.bfloat16))

    def decode(self, fields: Mapping[str, Tensor], context: Context, out: Tensor | None = None) -> Tensor:
        """Decode blocks to [N, T, C], centred: bfloat16 where predicted, float32 else, or the stored dtype of `exact`.

        out   a float32 [N, T, C] to decode into, where nothing is predicted; what is returned may be another tensor
        """
        own = self.predictor
        predicted = None if own is None or not own.cross_layer else self.predicted(context)
        x = self.decode_residual(fields, out if predicted is None else None)
        return x if predicted is None else predicted.add_(x.to(torch.bfloat16))

    def decode_residual(self, fields: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        """Decode what blocks hold beside the prediction, [N, T, C]: float32, or the stored dtype of `exact`."""
        x = self._unround(fields, out if self.scheme.correct is None else None)
        return x if self.scheme.correct is None else self.scheme.correct.apply(x, fields)

    def tokens(self, fields: Mapping[str, Tensor], block_N: Tensor, place_N: Tensor, channels: slice) -> Tensor:
        """These channels of single tokens, one in each of these blocks, with their mean: [N, channels].

        For schemes per token that predict nothing but a mean; keys stay before RoPE if they are encoded so.
        """
        back = self.back
        if (
            self._scale_last and self.scheme.quantize.by_token
        ):  # as `decode` does: scaled after the rotation back, not rounded in between
            tokens = {name: field[block_N, place_N][None] for name, field in fields.items()}
            x, back = self._unround(tokens)[0], None
        else:
            quantize = self.scheme.quantize
            x = quantize.at(fields, block_N, place_N, self.block, self.geometry, self._own["quantize"])
        if back is None:
            x = x[:, channels]
        elif back.ndim == 2 and len(back) == x.shape[1]:
            x = product.matmul(x.to(torch.bfloat16), back[:, channels]).float()
        else:
            x = by_runs(x.to(torch.bfloat16), back)[:, channels].float()
        return x if self.predictor is None else x + self.centre[channels]

    def rounded(self, x_NTC: Tensor) -> Tensor:
        """Round residuals [N, T, C] with the quantizer alone, and decode them."""
        return self._unround(self._round(x_NTC))

    def one_launch(self, x_NTC: Tensor) -> bool:
        """True if a kernel rotates and rounds this in one launch, so that blocks do not depend on each other.

        Then many are encoded at once; a matrix product may round a block otherwise in other company.
        """
        if self._own["feedback"] or not dispatch.runs_kernel(x_NTC):
            return False
        quantize = self.scheme.quantize
        return quantize.one_launch and in_tile(self._rotation, quantize.group_size(self._width, self.geometry))

    def _importance(self, x_NTC: Tensor, context: Context) -> Tensor | None:
        """Levels of how much errors of tokens count, int8 [N, T]; None: all alike."""
        direction_C = self._own["quantize"].get("importance")
        return None if direction_C is None else latent.importance(self.centred(x_NTC, context), direction_C)

    def _round(self, x_NTC: Tensor, level_NT: Tensor | None = None) -> dict[str, Tensor]:
        x, rotation = x_NTC if self.scheme.axis == "token" else x_NTC.mT, self._rotation
        if self._own["feedback"] and self.scheme.feedback is not None:  # it comes between rotation and rounding
            x, rotation = self.rotated(x), None
            x = self.scheme.feedback.apply(x, self.scheme.axis, self.geometry, self._own["feedback"], self._quantized)
        return self._rounded(x, level_NT, rotation)

    def _rounded(self, x_NRW: Tensor, level_NT: Tensor | None, rotation: Rotation) -> dict[str, Tensor]:
        quantize: Any = self.scheme.quantize
        levels = () if level_NT is None else (level_NT,)
        return quantize.encode(x_NRW, rotation, self._own["quantize"], self.geometry, *levels)

    def _quantized(self, x_NRW: Tensor) -> Tensor:
        """Rows encoded and decoded, before any rotation back."""
        quantize = self.scheme.quantize
        place = stored_places(quantize, self._width, self.geometry, x_NRW.device)
        fields = quantize.encode(x_NRW, None, self._own["quantize"], self.geometry)
        decoded = quantize.decode(fields, self._width, self.geometry, self._own["quantize"]).float()
        return decoded if place is None else decoded[..., place]

    def rotated(self, x_NRW: Tensor) -> Tensor:
        """Vectors as the quantizer rounds them: rotated, float32."""
        return rotate(x_NRW, self._rotation)

    def _unround(self, fields: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        quantize: Any = self.scheme.quantize
        width, back = self._width, self.back
        if self._scale_last and back is not None:
            return product.scaled(by_runs(quantize.lookup(fields, width, self.geometry), back), fields["scale"], out)
        room = out if back is None and self.scheme.axis == "token" else None
        return self._turned_back(quantize.decode(fields, width, self.geometry, self._own["quantize"], room), back)

    def _turned_back(self, x_NRV: Tensor, back: Tensor | None) -> Tensor:
        """Decoded rows turned back, as tokens."""
        x = x_NRV if back is None else by_runs(x_NRV.to(torch.bfloat16), back).float()
        return x if self.scheme.axis == "token" else x.mT

    def restore(self, x_NTC: Tensor, context: Context) -> Tensor:
        """Put the mean back: the keys or values themselves, in the recipe's position."""
        return x_NTC if self.predictor is None else x_NTC + self.mean(context).to(x_NTC.dtype)

    def mean(self, context: Context) -> Tensor:
        """Return the mean that is removed, float32: [C], or [N, T, C] where it turns with the position."""
        return self.turned(self._own["predict"]["mean"], context)

    @property
    def centre(self) -> Tensor:
        """The mean of values, or of keys before RoPE, that is removed: [C], float32."""
        return self._own["predict"]["mean"]

    def turned(self, mean_C: Tensor, context: Context) -> Tensor:
        """Return a mean of values, or of keys before RoPE, where this scheme's tokens are: [C] or [N, T, C]."""
        if not self._turn_mean:
            return mean_C
        assert context.rope is not None, "a mean after RoPE needs the cos and sin in use"
        mean_HD = mean_C.unflatten(0, (self.geometry.kv_heads, -1))
        cos, sin = context.rope[0].float(), context.rope[1].float()
        return rope.rotate(mean_HD.expand(*cos.shape[:2], -1, -1), cos, sin).flatten(-2)

    @property
    def input_tensors(self) -> list[InputTensor]:
        """The inputs of the prediction, in order."""
        return self.scheme.inputs(self.layer, self.role).tensors(self.role)

    def inputs(self, context: Context) -> Tensor:
        """Return the inputs of the prediction, side by side: [N, T, I]."""
        parts = [
            context.below[depth - 1][ROLES.index(role)] if depth else context.keys for depth, role in self.input_tensors
        ]
        assert all(part is not None for part in parts), "a prediction without what it reads"
        return torch.cat([part.to(torch.bfloat16) for part in parts], -1)  # type: ignore[union-attr]

    def predicted(self, context: Context) -> Tensor | None:
        """Return the centred prediction, bfloat16; None where only a mean, or nothing, is predicted."""
        if self.predictor is None or not self.predictor.cross_layer:
            return None
        if context.predicted is not None:
            return context.predicted
        return self.predictor.apply(self.inputs(context), self._own["predict"])

    def affine(self) -> tuple[Tensor, Tensor] | None:
        """Return W [I, C] and b [C], float32, of a linear prediction z W + b from `inputs`; None: it is another."""
        tensors, inputs = self._own["predict"], self.scheme.inputs(self.layer, self.role).tokens
        weight_IC = self.predictor and self.predictor.matrix(tensors, self.geometry.width * inputs)
        return None if weight_IC is None else (weight_IC.float(), tensors["bias"])

    def fields(self, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Names, shapes and dtypes of one encoded block; `dtype` is the model's."""
        return self.scheme.fields(self.block, self.geometry, dtype)

    def bits(self, dtype: torch.dtype = torch.bfloat16) -> float:
        """Return the bits of a stored element: codes and everything stored beside them."""
        return self.scheme.bits(self.block, self.geometry, dtype)


def specs(recipe: Recipe, layer: int, role: Role, geometry: Geometry) -> Specs:
    """Return the tensors an artifact holds for one scheme of one layer: {"predict.weight": (shape, dtype), ...}."""
    if recipe.fits_prompt:
        return {}
    scheme = recipe.scheme(layer, role)
    return scheme.tensors(Site(scheme, role, layer, recipe.position, recipe.window, geometry), geometry)


def all_specs(recipe: Recipe, geometry: Geometry) -> Specs:
    """Every tensor of a fitted recipe under its name in the artifact, `layers.{i}.{key|value}.{stage}.{field}`."""
    return {
        f"layers.{site.layer}.{site.role}.{name}": spec
        for site in recipe.sites(geometry)
        for name, spec in specs(recipe, site.layer, site.role, geometry).items()
    }
