"""Fit one recipe in one layer, chunk by chunk: key statistics → solve → decode keys, value statistics → solve → decode.

Where a side has a basis, a second pass over what its prediction leaves comes before the decoding. The bits that it
finds are written into the side: `SideFit.side` is what the artifact's recipe says.

Where keys have feedback, the moments of the layer's queries, which the capture has taken, are all that it needs.

Algorithm 1 of AQUA-KV with the runtime's own codec: what a layer is predicted from are the layers below as inference
will decode them. Each pass over the chunks gives one partial per chunk; partials are added in ascending order.

Source: Shutova et al., 2025 (AQUA-KV), algorithm 1.
Differs: each row's exact sinks are left out of the fit (they are never encoded); the authors fit on all positions.
"""

from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvq_calib.fit import angles, basis, nuq, query
from kvq_calib.fit import predict as fits
from kvq_calib.fit.mlp import fit_mlp
from kvq_calib.statistics import CrossMoments, MeanVariance, Sample
from kvq_runtime import rope
from kvq_runtime.codec import Codec, Context
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import HALVES, Half, Recipe, Side
from kvq_runtime.stages.escape import Escape
from kvq_runtime.stages.mixed import Mixed
from kvq_runtime.stages.nuq import Nuq
from kvq_runtime.stages.polar import PolarFitted
from kvq_runtime.stages.predict import MLP, Linear, LowRank
from kvq_runtime.stages.rotate import OutputBasis

SAMPLE_ROWS = 4096  # tokens that an iterative fit sees

Pair = tuple[Tensor, Tensor]
Partial = tuple[CrossMoments, Sample | None]
Residuals = tuple[CrossMoments, Sample]


@dataclass(frozen=True)
class Blocks:
    """One chunk's keys, or values, as codecs see them: [N, block, C], sinks filled with the token after them.

    x          keys in the recipe's position, or values, float32
    mask_NT    which tokens are ever encoded
    rope       cos and sin of every token, [N, block, K]
    sequences  the number of each block's sequence; `starts` its first position
    """

    x: Tensor
    mask_NT: Tensor
    rope: Pair
    sequences: Tensor
    starts: Tensor


def blocks(recipe: Recipe, half: Half, geometry: Geometry, x_NTC: Tensor, tables: Pair, sequences: range) -> Blocks:
    """Cut captured keys (before RoPE) or values [sequences, tokens, C] into whole blocks."""
    size, sinks = recipe.key.block, max(recipe.key.sinks, recipe.value.sinks)
    count, rows = x_NTC.shape[1] // size, len(x_NTC)
    x = x_NTC[:, : count * size].to(torch.float32, copy=True)
    x[:, :sinks] = x[:, sinks : sinks + 1]
    position = torch.arange(count * size, device=x.device).clamp(min=sinks)
    cos, sin = (table[:, position] for table in tables)
    if half == "key" and recipe.position == "post":
        x = rope.rotate(x.unflatten(-1, (geometry.kv_heads, -1)), cos, sin).flatten(-2)
    mask = (torch.arange(count * size, device=x.device) >= sinks).expand(rows, -1)

    def cut(part: Tensor) -> Tensor:
        return part.expand(rows, *part.shape[1:]).reshape(rows * count, size, *part.shape[2:])

    numbers = torch.tensor(list(sequences)).repeat_interleave(count)
    starts = (torch.arange(count) * size).repeat(rows)
    return Blocks(cut(x), cut(mask), (cut(cos), cut(sin)), numbers, starts)


class SideFit:
    """The fit of keys or of values: an empty statistic, its update by a chunk, its solution.

    metric_CC   what an error costs, where the side has an output basis
    rows        tokens that scales and bounds are fitted on
    """

    rows = SAMPLE_ROWS

    def __init__(
        self,
        recipe: Recipe,
        layer: int,
        half: Half,
        geometry: Geometry,
        moments: MeanVariance,
        metric_CC: Tensor | None = None,
    ):
        weighed = isinstance(recipe.side(layer, half).rotate, OutputBasis)
        assert not weighed or metric_CC is not None, "an output basis is fitted in a metric"
        self.metric_CC = metric_CC if weighed else None
        self.mean_C = moments.mean_C.float()
        self._arguments = (recipe, layer, half, geometry)
        self.side = recipe.side(layer, half)
        self.predictor = self.side.predictor(layer, half)
        self.tensors: dict[str, Tensor] = {}
        self._hold({"predict.mean": self.mean_C} if self.predictor is not None else {})

    def _hold(self, tensors: dict[str, Tensor]) -> None:
        """Take tensors, and make the codec of all that is fitted so far."""
        recipe, layer, half, geometry = self._arguments
        pair = dict(zip(HALVES, recipe.at(layer), strict=True)) | {half: self.side}
        self.tensors |= tensors
        self.codec = Codec(recipe.with_sides(layer, **pair), layer, half, geometry, self.tensors)
        self.codec.to(self.mean_C.device)

    @property
    def needs_statistics(self) -> bool:
        """Whether a prediction is fitted, beside the mean."""
        return isinstance(self.predictor, Linear)

    @property
    def needs_residuals(self) -> bool:
        """Whether what the prediction leaves is fitted on."""
        return self.side.fitted_quantizer or isinstance(self.side.correct, Escape)

    def solve_feedback(self, queries: query.Queries) -> None:
        """Fit what the error of one block of channels does to the rest."""
        stage, geometry = self.side.feedback, self.codec.geometry
        self._hold(queries.fit(stage, stage.turn(self.side.axis, self.side.rotate, geometry)))

    def empty(self) -> Partial:
        """The statistics before any chunk: moments of inputs and target, both centred, and tokens for an MLP."""
        width, (keys, below) = len(self.mean_C), self.codec.side.inputs(self.codec.layer, self.codec.half)
        inputs = width * (keys + len(below))
        shifts = self.mean_C.new_zeros(inputs), self.mean_C.new_zeros(width)
        sample = Sample(SAMPLE_ROWS, inputs + width) if isinstance(self.predictor, MLP) else None
        return CrossMoments(*shifts), sample

    def partial(self, data: Blocks, context: Context) -> Partial:
        """What one chunk says."""
        moments, sample = self.empty()
        z_NTI = self.codec.inputs(context)
        y_NTC = data.x - self.codec.mean(context)
        moments.update(z_NTI, y_NTC, data.mask_NT)
        if sample is not None:
            rows = torch.cat([z_NTI, y_NTC], -1)
            for number, start, row, mask in zip(data.sequences, data.starts.tolist(), rows, data.mask_NT, strict=True):
                sample.update(row[None], number[None], start, mask[None])
        return moments, sample

    def solve(self, partials: Iterable[Partial], seed: int) -> None:
        """Add the partials in ascending order, and fit."""
        moments, sample = self.empty()
        for index, (part, rows) in enumerate(partials):
            moments.merge(index, part)
            if sample is not None and rows is not None:
                sample.merge(index, rows)
        found = moments.value()
        predictor = self.predictor
        assert isinstance(predictor, Linear), "a mean is fitted by its moments"
        if isinstance(predictor, MLP):
            assert sample is not None
            rows = sample.value().rows_RC
            inputs = len(found.mean_x_I)
            fitted = fit_mlp(rows[:, :inputs], rows[:, inputs:], seed, predictor.norm)
        elif isinstance(predictor, LowRank):
            fitted = fits.fit_low_rank(found, predictor.rank, predictor.ridge)
        elif predictor.storage == "gptq4":
            fitted = fits.fit_gptq(found, predictor.ridge)
        else:
            fitted = fits.fit_linear(found, predictor.ridge)
        self._hold({f"predict.{name}": tensor for name, tensor in fitted.items()})

    def residuals(self, data: Blocks, context: Context, seed: int) -> Residuals:
        """What one chunk says of what the prediction leaves."""
        moments, sample = self.no_residuals(seed)
        rows = self.codec.residual(data.x, context)
        moments.update(rows, rows[..., :0], data.mask_NT)
        # the blocks of a sequence follow each other, from position 0 on: whole sequences are sampled at once
        numbers = data.sequences.unique_consecutive()
        whole = (rows.reshape(len(numbers), -1, rows.shape[-1]), data.mask_NT.reshape(len(numbers), -1))
        sample.update(whole[0], numbers, mask_NT=whole[1])
        return moments, sample

    def no_residuals(self, seed: int) -> Residuals:
        """The statistics of `residuals` before any chunk: second moments, and tokens."""
        zero_C = torch.zeros_like(self.mean_C)
        return CrossMoments(zero_C, zero_C[:0]), Sample(self.rows, len(zero_C), seed)

    def solve_residuals(self, partials: Iterable[Residuals], seed: int) -> None:
        """Add the partials in ascending order; fit basis, bits and scales, then the bound of the escape."""
        moments, sample = self.no_residuals(seed)
        for index, (part, rows) in enumerate(partials):
            moments.merge(index, part)
            sample.merge(index, rows)
        found, rows_NC = moments.value(), sample.value().rows_RC.to(self.mean_C.device)
        if isinstance(self.side.quantize, Mixed):
            moment_CC = found.xx_II + torch.outer(found.mean_x_I, found.mean_x_I)
            quantize, tensors = basis.fit(self.side.quantize, moment_CC, rows_NC, self.metric_CC)
            self.side = replace(self.side, quantize=quantize)
            self._hold(tensors)
        if isinstance(self.side.quantize, Nuq):
            rest_NC = rows_NC if self.side.correct is None else self.side.correct.rest(rows_NC[None])[0]
            found = nuq.fit(self.side.quantize, rows_NC, rest_NC, seed)
            self._hold({f"quantize.{name}": tensor for name, tensor in found.items()})
        if isinstance(self.side.quantize, PolarFitted):
            found = angles.fit(self.side.quantize, self.codec.rotated(rows_NC), self.codec.geometry, seed)
            self._hold({f"quantize.{name}": tensor for name, tensor in found.items()})
        if isinstance(self.side.correct, Escape):
            error_N = (self.codec.rounded(_whole_blocks(rows_NC, 8)) - _whole_blocks(rows_NC, 8)).square().sum(-1)
            bound = self.side.correct.limit * error_N.double().mean()
            self._hold({"correct.bound": bound.float()[None]})

    def rounding(self, side: Side, left: Residuals, seed: int) -> "SideFit":
        """The same prediction with the stages of another side after it, fitted on what the prediction leaves."""
        assert side.predict == self.side.predict, "the prediction is kept"
        other = copy(self)
        other.side, other.tensors = side, {n: t for n, t in self.tensors.items() if n.startswith("predict.")}
        other._hold({})
        if other.needs_residuals:
            other.solve_residuals([left], seed)
        return other

    def decode(self, data: Blocks, context: Context) -> Tensor:
        """The chunk encoded and decoded, centred."""
        return self.codec.decode(self.codec.encode(data.x, context), context)

    def errors(self, data: Blocks, context: Context, decoded: Tensor) -> Tensor:
        """Sums over the encoded tokens, float64: |x|², |x - μ|², |x - prediction|², |x - x̂|², and their number."""
        x = data.x
        centred = x - self.codec.turned(self.mean_C, context)
        predicted = self.codec.predicted(context)
        residual = centred if predicted is None else centred - predicted.float()
        error = (x if self.predictor is None else centred) - decoded.float()
        mask = data.mask_NT[..., None]
        sums = [(part.double().square() * mask).sum() for part in (x, centred, residual, error)]
        return torch.stack([*sums, data.mask_NT.sum().double()])


def _whole_blocks(rows_NC: Tensor, size: int) -> Tensor:
    """Rows as one block of a multiple of `size` tokens, the last row repeated."""
    return torch.cat([rows_NC, rows_NC[-1:].expand(-len(rows_NC) % size, -1)])[None]


def summary(sums: Tensor) -> dict[str, float]:
    """The measures of one side from summed `errors`: relative to the variance about the mean."""
    energy, variance, residual, error, _ = sums.tolist()
    return {
        "relative_error": error / variance if variance else 0.0,
        "explained_variance": 1 - residual / variance if variance else 0.0,
        "mean_energy": 1 - variance / energy if energy else 0.0,
    }
