"""The statistics that a scheme's stages are fitted to: sums over a calibration's chunks, or over one row of a cache.

A stage names the fields that it needs (`statistics` in its fit module); `Fitting.solve` asks for them one by one.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from kvq_runtime.fit import eigen, moments
from kvq_runtime.stages.stage import Queries as Which

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Residuals:
    """The residual of the prediction, over the tokens that are encoded.

    moment_CC   second moment about zero, float64
    rows_NC     a sample of tokens, float32
    """

    moment_CC: Tensor
    rows_NC: Tensor


@dataclass(frozen=True)
class Queries:
    """The queries of a layer.

    before, after   second moments before and after RoPE, float64 [H, D, D]; None: not summed
    sequence        how many queries one KV head is multiplied with in a sequence
    rope            cos and sin of the positions 0 to T - 1 of a sequence, [1, T, K]: for averages over distances
    """

    before: Tensor | None
    after: Tensor | None
    sequence: float
    rope: Pair | None = None

    def moment(self, which: Which) -> Tensor:
        """The moment of the queries that a stage asks for."""
        chosen = self.after if which == "after" else self.before
        assert chosen is not None, f"queries {which} RoPE were not summed"
        if which != "averaged":
            return chosen
        assert self.rope is not None, "an average over distances needs the positions of a sequence"
        return moments.averaged(chosen, *self.rope)


@dataclass
class Statistics:
    """Everything that was collected so far; None: not yet, or never for these stages.

    mean_C        of the tokens that are encoded, float32; of keys before RoPE
    inputs        joint covariances of a prediction's inputs and target
    input_rows    a sample of inputs and target, float32 [N, I + C]
    input_chunks  () → the same of every token, chunk by chunk in ascending order; may be called again
    residuals     what the prediction leaves
    vocabulary    the first layer's keys before RoPE, or values, of every token of the vocabulary, float32 [V, C]
    attended      second moment of what is left of values, weighed by what queries see in their keys, float64 [H, D, D]
    metric        what an error costs, of a value in the layer's output, of a key in scores, float64 [C, C]
    seed          of random choices
    """

    mean_C: Tensor
    inputs: Any = None
    input_rows: Tensor | None = None
    input_chunks: Callable[[], Iterable[Tensor]] | None = None
    queries: Queries | None = None
    metric: Tensor | None = None
    vocabulary: Tensor | None = None
    attended: Tensor | None = None
    residuals: Residuals | None = None
    seed: int = 0

    @cached_property
    def directions(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Latent variances of the residuals and matrices of their basis: `eigen.directions`."""
        assert self.residuals is not None, "a basis without residuals"
        return eigen.directions(self.residuals.moment_CC, self.metric)
