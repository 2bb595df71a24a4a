"""Fit a prediction to joint statistics of its inputs z and its target y.

    linear     W = (C + λ·tr(C)/I · 1)⁻¹ X            C = cov(z), X = cov(z, y), λ the recipe's ridge
    low rank   W V Vᵀ, V the leading eigenvectors of Wᵀ (C + λ·…) W: the best map of that rank
    gptq       W rounded one input at a time, the error of each pushed into the inputs that follow

An MLP is fitted by `mlp.py`. Everything is centred, so the bias is not damped: b = mean(y) - mean(z) W, with the W that
is stored, so that it also takes up the mean of W's rounding.

Source: Shutova et al., 2025 (AQUA-KV), section 3 and table 9; Reinsel and Velu, 1998 (reduced-rank regression); Frantar
et al., 2023 (GPTQ), algorithm 1.
Differs: AQUA-KV's code damps the bias, sums in float32, and centres neither side of the low-rank fit.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvq_calib.fit.gptq import cholesky, damped, gptq
from kvq_calib.fit.mlp import fit_mlp, fit_mlp_to_all
from kvq_calib.fit.requests import Empty, Given, Source, Summed
from kvq_calib.fit.scheme import Chunk, SchemeFit
from kvq_calib.fit.statistics import Centred, CrossMoments, Sample
from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit import predict
from kvq_runtime.fit.eigen import fixed_sign
from kvq_runtime.fit.statistics import SAMPLE_ROWS, Statistic, Statistics
from kvq_runtime.stages.predict import MLP, Linear, LowRank, Mean

Tensors = dict[str, Tensor]


Kind = Mean | Linear | MLP


@dataclass(frozen=True)
class Inputs(Summed[Centred]):
    """Joint covariances of a prediction's inputs and its target."""

    passes = ("inputs",)

    def empty(self, fit: SchemeFit, source: Source) -> Empty:
        return partial(CrossMoments, fit.zeros(_inputs(fit)), fit.zeros(fit.codec.geometry.width))

    def add(self, sums: CrossMoments, chunk: Chunk) -> None:
        sums.update(*chunk.joint, chunk.data.mask_NT)


@dataclass(frozen=True)
class InputRows(Summed[Tensor]):
    """A sample of inputs and target, side by side: float32 [rows, I + C]."""

    passes = ("inputs",)
    rows: int = SAMPLE_ROWS

    def empty(self, fit: SchemeFit, source: Source) -> Empty:
        return partial(Sample, self.rows, _inputs(fit) + fit.codec.geometry.width)

    def add(self, sums: Sample, chunk: Chunk) -> None:
        chunk.offer(sums, torch.cat(chunk.joint, -1))


@dataclass(frozen=True)
class InputChunks(Given[Callable[[], Iterable[Tensor]]]):
    """() → inputs and target of every token, [N, I + C], chunk by chunk; each call is a pass."""

    passes = ("inputs",)

    def of(self, fit: SchemeFit, source: Source) -> Callable[[], Iterable[Tensor]]:
        return lambda: (torch.cat(rows) for (rows,) in source.partials(fit, [(self, list)]))

    def add(self, sums: list[Tensor], chunk: Chunk) -> None:
        z_NTI, y_NTC = chunk.joint
        rows_NTK = torch.cat([z_NTI.float(), y_NTC], -1)
        sums.append(rows_NTK[chunk.data.mask_NT.to(rows_NTK.device)].cpu())


def _inputs(fit: SchemeFit) -> int:
    codec = fit.codec
    return codec.geometry.width * codec.scheme.inputs(codec.layer, codec.role).tokens


def requests(stage: Kind) -> tuple[Statistic[Any], ...]:
    """Return the statistics that a fit needs; a mean needs none."""
    if isinstance(stage, MLP):
        return (InputRows(),) if stage.tokens == "sample" else (Inputs(), InputChunks())
    return (Inputs(),) if isinstance(stage, Linear) else ()


def solve(stage: Kind, statistics: Statistics, codec: Codec) -> tuple[Kind, Tensors]:
    """The tensors of the predictor, as its `specs` names them; the mean, about which it is fitted, is held already."""
    if isinstance(stage, Mean):
        return stage, predict.solve(stage, statistics, codec)[1]
    if isinstance(stage, MLP) and stage.tokens == "all":
        return stage, fit_mlp_to_all(stage, statistics[Inputs()], statistics[InputChunks()], statistics.seed)
    if isinstance(stage, MLP):
        z_NI, y_NC = statistics[InputRows()].tensor_split([-codec.geometry.width], 1)
        return stage, fit_mlp(stage, z_NI, y_NC, statistics.seed)
    if isinstance(stage, LowRank):
        return stage, fit_low_rank(statistics[Inputs()], stage.rank, stage.ridge)
    return stage, (fit_gptq if stage.storage == "gptq4" else fit_linear)(statistics[Inputs()], stage.ridge)


def fit_linear(joint: Centred, ridge: float) -> Tensors:
    """Centred ridge regression: {"weight": bf16 [I, O], "bias": float32 [O]}."""
    weight = ridge_map(joint, ridge).to(torch.bfloat16)
    return {"weight": weight, "bias": _bias(joint, weight)}


def fit_low_rank(joint: Centred, rank: int, ridge: float) -> Tensors:
    """Centred reduced-rank ridge regression: {"down": bf16 [I, r], "up": bf16 [r, O], "bias": float32 [O]}."""
    weight = ridge_map(joint, ridge)
    fitted_OO = weight.mT @ joint.xy_IO  # = Wᵀ (C + λ…) W
    vectors = torch.linalg.eigh((fitted_OO + fitted_OO.mT) / 2).eigenvectors
    basis_OR = fixed_sign(vectors.flip(1)[:, : min(rank, *weight.shape)])
    down, up = (weight @ basis_OR).to(torch.bfloat16), basis_OR.mT.to(torch.bfloat16).contiguous()
    return {"down": down, "up": up, "bias": _bias(joint, down.double() @ up.double())}


def fit_gptq(joint: Centred, ridge: float) -> Tensors:
    """Centred ridge regression, stored in 4 bits: {"codes", "step", "low", "bias"}."""
    found = gptq(ridge_map(joint, ridge), damped(joint.xx_II, ridge))
    return found | {"bias": _bias(joint, Linear(storage="gptq4").matrix(found, len(joint.xx_II)))}


def ridge_map(joint: Centred, ridge: float) -> Tensor:
    """W, float64 [I, O]; zero where the inputs do not vary at all."""
    if not joint.xx_II.diagonal().any():
        return torch.zeros_like(joint.xy_IO)
    return torch.cholesky_solve(joint.xy_IO, cholesky(damped(joint.xx_II, ridge), int(joint.count)))


def residual_variance(joint: Centred, weight_IO: Tensor) -> Tensor:
    """The variance of y - z W, per channel: float64 [O]."""
    weight = weight_IO.double()
    quadratic = (weight * (joint.xx_II @ weight)).sum(0)
    return joint.yy_O - 2 * (weight * joint.xy_IO).sum(0) + quadratic


def _bias(joint: Centred, weight_IO: Tensor) -> Tensor:
    return (joint.mean_y_O - joint.mean_x_I @ weight_IO.double()).float()
