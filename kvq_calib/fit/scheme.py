"""Fit one scheme of one layer, chunk by chunk: each pass over the chunks gives the sums that a stage is fitted to.

    inputs, input_rows   of a prediction's inputs and target      → predict
    input_chunks         every token of them, a chunk at a time   → predict, by an MLP
    residuals            of what the prediction leaves            → rotate, quantize, correct

The sums of a chunk are a partial; partials are added in ascending order. `Fitting` goes through the stages in the order
of the pipeline, each solved by the module of `kvq_calib.fit` that has the name of the stage's own. Settings that a fit
finds, as bits of channels, are written into `SchemeFit.scheme`, which the artifact's recipe names.

Algorithm 1 of AQUA-KV with the runtime's own codec: what a layer is predicted from are the layers below as inference
will decode them.

Source: Shutova et al., 2025 (AQUA-KV), algorithm 1.
Differs: each row's exact sinks are left out of the fit (they are never encoded); the authors fit on all positions. Of
codes that are searched for, fits read numbers with errors of the same moments (`Codec.approximated`).
"""

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvq_calib.fit.statistics import Attended, CrossMoments, Sample
from kvq_runtime.codec.block_input import block_input
from kvq_runtime.codec.codec import Context
from kvq_runtime.fit.fitting import Fitting
from kvq_runtime.fit.statistics import Residuals, Statistics
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe, Role, Scheme
from kvq_runtime.stages.stage import SLOTS

SAMPLE_ROWS = 4096  # tokens that an iterative fit sees

Pair = tuple[Tensor, Tensor]
Partial = tuple[Attended | CrossMoments | Sample, ...]


@dataclass(frozen=True)
class Blocks:
    """One chunk's keys, or values, as codecs see them: [N, block, C], sinks filled with the token after them.

    x          keys in the recipe's position, or values, float32
    mask_NT    which tokens are ever encoded
    rope       cos and sin of every token, [N, block, K]
    sequences  the number of each block's sequence; all blocks of a sequence follow each other, from position 0 on
    """

    x: Tensor
    mask_NT: Tensor
    rope: Pair
    sequences: Tensor


def blocks(recipe: Recipe, role: Role, geometry: Geometry, x_NTC: Tensor, tables: Pair, sequences: range) -> Blocks:
    """Cut captured keys (before RoPE) or values [sequences, tokens, C] into whole blocks."""
    size, sinks = recipe.window.block, recipe.window.sinks
    count, rows = x_NTC.shape[1] // size, len(x_NTC)
    source = torch.arange(count * size, device=x_NTC.device).clamp(min=sinks)[None]
    turn = "apply" if role == "key" and recipe.position == "post" else None
    x, rope = block_input(x_NTC.float(), source, tables, turn, geometry.kv_heads)
    assert rope is not None, "tables were given"
    mask = (torch.arange(count * size, device=x.device) >= sinks).expand(rows, -1)

    def cut(part: Tensor) -> Tensor:
        return part.reshape(rows * count, size, *part.shape[2:])

    numbers = torch.tensor(list(sequences)).repeat_interleave(count)
    return Blocks(cut(x), cut(mask), (cut(rope[0]), cut(rope[1])), numbers)


class SchemeFit(Fitting):
    """The fit of keys or of values: an empty statistic, its update by a chunk, its solution.

    rows   tokens that scales and bounds are fitted on
    """

    packages = ("kvq_calib.fit", "kvq_runtime.fit")
    rows = SAMPLE_ROWS

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a worker: the codec, the mean and the queries' moments, without other statistics."""
        kept = Statistics(self.statistics.mean_C, queries=self.statistics.queries, seed=self.statistics.seed)
        return self.__dict__ | {"statistics": kept}

    def empty(self, field: str) -> Partial:
        """The sums of a field of `Statistics` before any chunk: moments of what is centred, or a sample of tokens."""
        width, seed = len(self.statistics.mean_C), self.statistics.seed
        zeros = self.statistics.mean_C.new_zeros
        if field == "residuals":
            return CrossMoments(zeros(width), zeros(0)), Sample(self.rows, width, seed)
        if field == "attended":
            queries = self.statistics.queries
            assert queries is not None and queries.after is not None, "values are weighed by queries"
            return (Attended(queries.after),)
        inputs = width * self.scheme.inputs(self.codec.layer, self.codec.role).tokens
        if field == "input_rows":
            return (Sample(SAMPLE_ROWS, inputs + width),)
        return (CrossMoments(zeros(inputs), zeros(width)),)

    def rows_of(self, data: Blocks, context: Context) -> Tensor:
        """The inputs and targets of a prediction, of every token of one chunk that is ever encoded: [N, I + C]."""
        rows_NTK = torch.cat([self.codec.inputs(context).float(), data.x - self.codec.mean(context)], -1)
        return rows_NTK[data.mask_NT.to(rows_NTK.device)].cpu()

    def partial(self, field: str, data: Blocks, context: Context) -> Partial:
        """The sums of one chunk."""
        if field == "residuals":
            z_NTI = self.codec.residual(data.x, context)
            y_NTC = z_NTI[..., :0]
        else:
            z_NTI, y_NTC = self.codec.inputs(context), data.x - self.codec.mean(context)
        numbers = data.sequences.unique_consecutive()
        partial = self.empty(field)
        for sums in partial:
            if isinstance(sums, CrossMoments):
                sums.update(z_NTI, y_NTC, data.mask_NT)
            else:  # whole sequences at once, from position 0 on
                rows = torch.cat([z_NTI, y_NTC], -1)
                whole = rows.reshape(len(numbers), -1, rows.shape[-1])
                sums.update(whole, numbers, mask_NT=data.mask_NT.reshape(len(numbers), -1))
        return partial

    def attended(self, data: Blocks, context: Context, k_NTC: Tensor) -> Partial:
        """The sums of one chunk of values that need its keys, after RoPE."""
        (partial,) = self.empty("attended")
        assert isinstance(partial, Attended)
        partial.update(k_NTC, self.codec.residual(data.x, context), data.mask_NT)
        return (partial,)

    def merged(self, field: str, partials: Iterable[Partial]) -> Any:
        """A field of `Statistics`, from the partials of all chunks in ascending order."""
        totals = self.empty(field)
        for index, partial in enumerate(partials):
            for total, part in zip(totals, partial, strict=True):
                total.merge(index, part)  # type: ignore[arg-type]
        values: list[Any] = [total.value() for total in totals]
        if field in ("inputs", "attended"):
            return values[0]
        if field == "input_rows":
            return values[0].rows_RC
        moments, sample = values
        moment_CC = moments.xx_II + torch.outer(moments.mean_x_I, moments.mean_x_I)
        return Residuals(moment_CC, sample.rows_RC.to(moment_CC.device))

    def with_rounding(self, scheme: Scheme, statistics: Statistics, collect: Callable[[str], Any]) -> "SchemeFit":
        """The same prediction with the stages of another scheme after it, fitted to what the prediction leaves.

        collect   gives what `statistics` does not have yet
        """
        assert scheme.predict == self.scheme.predict, "the prediction is kept"
        other = copy(self)
        other.scheme, other.statistics = scheme, statistics
        other.tensors = {name: tensor for name, tensor in self.tensors.items() if name.startswith("predict.")}
        other.hold({})
        other.solve(collect, SLOTS[1:])
        return other

    def decode(self, data: Blocks, context: Context) -> Tensor:
        """The chunk encoded and decoded, centred."""
        return self.codec.encode_decode(data.x, context)[1]

    def approximated(self, data: Blocks, context: Context) -> Tensor:
        """The same without a search for codes, with errors of the same moments."""
        return self.codec.approximated(data.x, context)

    def errors(self, data: Blocks, context: Context, decoded: Tensor) -> Tensor:
        """Sums over the encoded tokens, float64: |x|², |x - μ|², |x - prediction|², |x - x̂|², and their number."""
        x = data.x
        centred = x - self.codec.turned(self.statistics.mean_C, context)
        predicted = self.codec.predicted(context)
        residual = centred if predicted is None else centred - predicted.float()
        error = (x if self.predictor is None else centred) - decoded.float()
        mask = data.mask_NT[..., None]
        sums = [(part.double().square() * mask).sum() for part in (x, centred, residual, error)]
        return torch.stack([*sums, data.mask_NT.sum().double()])


def summary(sums: Tensor) -> dict[str, float]:
    """The measures of one scheme from summed `errors`: relative to the variance about the mean."""
    energy, variance, residual, error, _ = sums.tolist()
    return {
        "relative_error": error / variance if variance else 0.0,
        "explained_variance": 1 - residual / variance if variance else 0.0,
        "mean_energy": 1 - variance / energy if energy else 0.0,
    }
