"""Fit a prediction to joint statistics of its inputs z and its target y.

    linear     W = (C + λ·tr(C)/I · 1)⁻¹ X            C = cov(z), X = cov(z, y), λ the recipe's ridge
    low rank   W V Vᵀ, V the leading eigenvectors of Wᵀ (C + λ·…) W: the best map of that rank
    gptq       W rounded to 4 bits (`kvq_runtime/ops/rtn.py`) one input at a time, the error of each pushed into the
               inputs that follow: the least Σ_o (ŵ_o - w_o)ᵀ C (ŵ_o - w_o)
    MLP        two layers by Adam, on a sample of tokens, which is in memory, or on all of them: chunk after chunk, each
               in an order of its own, as often as it takes for 1000 steps of 1024 tokens; one at a time is in memory

Everything is centred, so the bias is not damped: b = mean(y) - mean(z) W, with the W that is stored, so that it also
takes up the mean of W's rounding.

An MLP is a reference only: it predicts hardly better than a linear map and costs several times as much. The targets are
brought to unit size for its fit, the rates follow the size of the inputs and fall as a cosine, and the start and the
batches come from the seed, so that the same tokens give the same tensors on one machine, whoever decoded the chunks.

Source: Shutova et al., 2025 (AQUA-KV), section 3 and table 9; Reinsel and Velu, 1998 (reduced-rank regression); Frantar
et al., 2022 (GPTQ), algorithm 1, a method for weights.
Differs: GPTQ's inputs are rounded in their own order, one at a time, and C gets no other damping than the ridge.
AQUA-KV's code damps the bias, sums in float32, and centres neither side of the low-rank fit; the paper does
not say how its MLP is trained.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvq_calib.fit.chunks import Chunk
from kvq_calib.fit.scheme import Empty, Given, Inputs, LayerSource, SchemeFit, Summed
from kvq_calib.fit.statistics import Centred, Sample
from kvq_runtime.codec.codec import Codec
from kvq_runtime.fit.statistics import SAMPLE_ROWS, Statistic, Statistics, fixed_sign
from kvq_runtime.ops import dispatch, pack, rtn
from kvq_runtime.ops.rtn import MATRIX_BITS, MATRIX_GROUP
from kvq_runtime.stages.predict import MLP, Linear, LowRank

STEPS, BATCH = 1000, 1024  # of an MLP on a sample; on all tokens at least as many steps, each chunk in a random order
PASSES = 16  # over the chunks at the most: where there are few tokens, a chunk is gone through several times in each
RATE = 3e-3
Tensors = dict[str, Tensor]
Chunks = Callable[[], Iterable[Tensor]]
Kind = Linear | MLP


@dataclass(frozen=True)
class InputRows(Summed[Tensor]):
    """A sample of inputs and target, side by side: float32 [rows, I + C]."""

    passes = ("inputs",)
    rows: int = SAMPLE_ROWS

    def empty(self, fit: SchemeFit, source: LayerSource) -> Empty:
        return partial(Sample, self.rows, _inputs(fit) + fit.codec.geometry.width)

    def add(self, sums: Sample, chunk: Chunk) -> None:
        rows_KW = torch.cat(chunk.joint, -1).flatten(0, 1)
        chunk.offer(sums, rows_KW.__getitem__)


@dataclass(frozen=True)
class InputChunks(Given[Chunks]):
    """() → inputs and target of every token, [N, I + C], chunk by chunk; each call is a pass."""

    passes = ("inputs",)

    def read(self, fit: SchemeFit, source: LayerSource) -> Chunks:
        return lambda: (torch.cat(rows) for (rows,) in source.partials(fit, [(self, list)]))

    def add(self, sums: list[Tensor], chunk: Chunk) -> None:
        z_NTI, y_NTC = chunk.joint
        rows_NTK = torch.cat([z_NTI.float(), y_NTC], -1)
        sums.append(rows_NTK[chunk.data.mask_NT.to(rows_NTK.device)].cpu())


def _inputs(fit: SchemeFit) -> int:
    codec = fit.codec
    return codec.geometry.width * codec.scheme.inputs(codec.layer, codec.role).tokens


def requests(stage: Kind) -> tuple[Statistic[Any], ...]:
    """Return the statistics that a fit needs."""
    if isinstance(stage, MLP):
        return (InputRows(),) if stage.tokens == "sample" else (Inputs(), InputChunks())
    return (Inputs(),)


def solve(stage: Kind, statistics: Statistics, codec: Codec) -> tuple[Kind, Tensors]:
    """The tensors of the predictor, as its `specs` names them; the mean, about which it is fitted, is held already."""
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
    upper_II = inverse_root(damped(joint.xx_II, ridge), int(joint.count))
    fitted = rounded(upper_II.mT @ (upper_II @ joint.xy_IO), upper_II)
    return fitted | {"bias": _bias(joint, Linear(storage="gptq4").matrix(fitted, len(joint.xx_II)))}


def ridge_map(joint: Centred, ridge: float) -> Tensor:
    """W, float64 [I, O]; zero where the inputs do not vary at all."""
    if not joint.xx_II.diagonal().any():
        return torch.zeros_like(joint.xy_IO)
    return torch.cholesky_solve(joint.xy_IO, cholesky(damped(joint.xx_II, ridge), int(joint.count)))


def _bias(joint: Centred, weight_IO: Tensor) -> Tensor:
    return (joint.mean_y_O - joint.mean_x_I @ weight_IO.double()).float()


def rounded(weight_IO: Tensor, upper_II: Tensor) -> Tensors:
    """Round W: codes uint8 [O, I/group, packed], step and low float16; U is upper triangular, UᵀU the inverse of C.

    After input i is rounded with error e, the inputs j > i move by -e · U_ij / U_ii: the move that makes up best for
    the error. A group's ends are taken when its first input is reached.
    """
    inputs, weight = len(weight_IO), weight_IO.double().clone()
    group = min(MATRIX_GROUP, inputs)
    fitted: dict[str, list[Tensor]] = {"codes": [], "step": [], "low": []}
    for start in range(0, inputs, group):
        end = min(start + group, inputs)
        _, step, low = rtn.encode(weight[start:end].mT, MATRIX_BITS)
        codes_OK, errors_KO = round_group(weight[start:end], upper_II[start:end, start:end], step, low)
        weight[end:] -= upper_II[start:end, end:].mT @ errors_KO
        codes_OK = functional.pad(codes_OK, (0, group - codes_OK.shape[1]))
        for name, part in (("codes", pack.pack(codes_OK, MATRIX_BITS)), ("step", step), ("low", low)):
            fitted[name].append(part)
    return {name: torch.stack(parts, 1) for name, parts in fitted.items()}


@dispatch.paired("gptq.round_group")
def round_group(weight_KO: Tensor, upper_KK: Tensor, step: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Round the inputs of one group in turn: codes [O, K], and each input's error over its U_ii, [K, O]."""
    rest, step, low = weight_KO.clone(), step.double(), low.double()
    unit, diagonal = step.where(step > 0, 1.0), upper_KK.diagonal().tolist()
    codes_KO, errors_KO = torch.empty_like(rest), torch.empty_like(rest)
    for i, (code, error) in enumerate(zip(codes_KO, errors_KO, strict=True)):
        torch.sub(rest[i], low, out=code).div_(unit).round_().clamp_(0, 2**MATRIX_BITS - 1)
        torch.sub(rest[i], torch.addcmul(low, step, code), out=error).div_(diagonal[i])
        rest[i + 1 :].addr_(upper_KK[i, i + 1 :], error, alpha=-1)
    return codes_KO.mT.to(torch.uint8), errors_KO


def inverse_root(covariance_II: Tensor, count: int = 0) -> Tensor:
    """Return the upper triangular U with UᵀU the inverse, float64: a Cholesky factor from the last input to the first.

    count   samples that the covariance is of, as `cholesky` has it
    """
    factor_II = cholesky(covariance_II.double().flip(0, 1), count)
    return torch.linalg.solve_triangular(factor_II, torch.eye(len(factor_II)).to(factor_II), upper=False).flip(0, 1)


def damped(covariance_II: Tensor, ridge: float) -> Tensor:
    """Return a covariance with a part of its mean more on the diagonal."""
    diagonal = covariance_II.diagonal()
    return covariance_II + torch.diag(ridge * diagonal.mean().expand_as(diagonal))


def cholesky(matrix_II: Tensor, count: int = 0) -> Tensor:
    """Return the lower factor; what is not positive definite by rounding alone gets a little more on its diagonal.

    count   samples that the matrix is of, which an error names; 0: unknown
    """
    for jitter in (0.0, 1e-10, 1e-8, 1e-6):
        factor, info = torch.linalg.cholesky_ex(damped(matrix_II, jitter))
        if not info and bool(factor.isfinite().all()):
            return factor
    source, state = f" from {count} samples" if count else "", "finite" if matrix_II.isfinite().all() else "not finite"
    raise RuntimeError(
        f"the covariance of {len(matrix_II)} inputs{source} ({state}) is not positive definite; "
        "use more samples, or a larger ridge"
    )


def fit_mlp(
    predictor: MLP, z_NI: Tensor, y_NO: Tensor, seed: int, steps: int = STEPS, batch: int = BATCH
) -> dict[str, Tensor]:
    """Return the tensors of an MLP, as its `specs` names them but for "mean", from a sample: y is centred already."""
    random = torch.Generator().manual_seed(seed)
    z, y = z_NI.float(), y_NO.float()
    unit, reach = (float(x.square().mean().sqrt().clamp_min(1e-12)) for x in (y, z))
    weights, adam = _start(predictor, z.shape[1], y.shape[1], reach, random, z.device)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    for _ in range(steps):
        rows = torch.randint(len(z), (min(batch, len(z)),), generator=random).to(z.device)
        _step(predictor, weights, adam, z[rows], y[rows] / unit)
        decay.step()
    return _stored(predictor, weights, unit, lambda: [torch.cat([z, y], 1)])


def fit_mlp_to_all(
    predictor: MLP, joint: Centred, chunks: Chunks, seed: int, steps: int = STEPS, batch: int = BATCH
) -> dict[str, Tensor]:
    """Return the same from every token.

    joint    moments of all inputs and targets: how many there are, and how large
    chunks   () → the tokens of each chunk, inputs and centred targets side by side, [N, I + O]; called for every pass
    steps    at least, and as many more as one pass over more tokens takes
    """
    random = torch.Generator().manual_seed(seed)
    inputs, outputs = len(joint.mean_x_I), len(joint.mean_y_O)
    squares = (joint.yy_O + joint.mean_y_O.square(), joint.xx_II.diagonal() + joint.mean_x_I.square())
    unit, reach = (float(x.mean().sqrt().clamp_min(1e-12)) for x in squares)
    weights, adam = _start(predictor, inputs, outputs, reach, random, joint.mean_x_I.device)
    rates = [group["lr"] for group in adam.param_groups]
    epochs = max(1, math.ceil(steps * batch / joint.count))
    passes = min(epochs, PASSES)
    every, seen = epochs // passes * passes * joint.count, 0
    for rows_NK in _batches(chunks, passes, epochs // passes, batch, random):
        for group, rate in zip(adam.param_groups, rates, strict=True):
            group["lr"] = rate * (1 + math.cos(math.pi * seen / every)) / 2
        z, y = rows_NK.to(weights["out"].device).tensor_split([inputs], 1)
        _step(predictor, weights, adam, z, y / unit)
        seen += len(z)
    return _stored(predictor, weights, unit, chunks)


def _batches(chunks: Chunks, passes: int, again: int, batch: int, random: torch.Generator) -> Iterator[Tensor]:
    """Batches of about `batch` tokens: each chunk in an order of its own, `again` times in each pass."""
    for _ in range(passes):
        for rows_NK in chunks():
            parts = max(1, round(len(rows_NK) / batch))
            for _ in range(again):
                order = torch.randperm(len(rows_NK), generator=random).to(rows_NK.device)
                yield from (rows_NK[part] for part in order.tensor_split(parts) if len(part))


def _start(
    predictor: MLP, inputs: int, outputs: int, reach: float, random: torch.Generator, device: torch.device
) -> tuple[Tensors, torch.optim.Adam]:
    """Random weights, and what changes them; `reach` is the size of an input that is not normalized."""
    wide, reach = predictor.hidden_size(inputs, outputs), 1.0 if predictor.norm == "layer" else reach
    shapes = (inputs, wide), (wide, outputs)
    hidden, out = (torch.randn(shape, generator=random) / math.sqrt(shape[0]) for shape in shapes)
    drawn = {"hidden": hidden / reach, "hidden_bias": torch.zeros(wide), "out": out, "bias": torch.zeros(outputs)}
    weights = {name: tensor.to(device).requires_grad_() for name, tensor in drawn.items()}
    groups = [{"params": [x], "lr": RATE / reach if name == "hidden" else RATE} for name, x in weights.items()]
    return weights, torch.optim.Adam(groups)


def _step(predictor: MLP, weights: Tensors, adam: torch.optim.Adam, z: Tensor, y: Tensor) -> None:
    loss = functional.mse_loss(predictor.apply(z, weights), y)
    adam.zero_grad()
    loss.backward()
    adam.step()


def _stored(predictor: MLP, weights: Tensors, unit: float, chunks: Chunks) -> Tensors:
    """In the stored dtypes and the targets' unit, with a bias that centres the error on the tokens of these chunks."""
    fitted = {name: tensor.detach() for name, tensor in weights.items()}
    stored = {
        "hidden": fitted["hidden"].to(torch.bfloat16),
        "hidden_bias": fitted["hidden_bias"],
        "out": (fitted["out"] * unit).to(torch.bfloat16),
        "bias": torch.zeros_like(fitted["bias"]),
    }
    total, count = torch.zeros_like(fitted["bias"], dtype=torch.float64), 0
    for rows_NK in chunks():
        z, y = rows_NK.to(total.device).tensor_split([len(fitted["hidden"])], 1)
        total += (y - predictor.apply(z, stored)).double().sum(0)
        count += len(z)
    return stored | {"bias": (total / count).float()}
