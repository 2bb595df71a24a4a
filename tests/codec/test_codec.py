"""The composed codec against a slow one written in natural order, its promised errors, and its bill."""

import math

import numpy as np
import pytest
import torch
from feeding import REPRESENTATIVE
from scipy.linalg import hadamard as walsh
from torch import Tensor

from kvq_calib.fit import predict as fits
from kvq_calib.fit.statistics import Centred
from kvq_runtime.artifact import recipe_text
from kvq_runtime.codec import codec, shared
from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import grid, rope, rotation
from kvq_runtime.recipe import Recipe, Scheme, Window
from kvq_runtime.stages.codebook import Grid
from kvq_runtime.stages.polar import Polar
from kvq_runtime.stages.predict import Linear, LowRank, Mean
from kvq_runtime.stages.rotate import Hadamard
from kvq_runtime.stages.rtn import Rtn

NOWHERE = Context()
GRIDS = [(2, 16), (2, 64), (2, 256), (4, 64), (4, 256), (8, 256)]
ERRORS = dict(zip(GRIDS, [0.10756, 0.02974, 0.00776, 0.18425, 0.09643, 0.32233], strict=True))


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def one(
    scheme: Scheme, geometry: Geometry, tensors: dict | None = None, layer=0, role="key", position="post", block=128
) -> Codec:
    recipe = Recipe("test", scheme, scheme, position, window=Window(block=block))
    return Codec(recipe, layer, role, geometry, tensors or {})


def there_and_back(made: Codec, x: Tensor, context: Context = NOWHERE) -> Tensor:
    return made.decode(made.encode(x, context), context)


def relative(error: Tensor, x: Tensor) -> float:
    return float(error.double().square().sum() / x.double().square().sum())


# --- the slow codec: rows of numbers, one group after the other, nothing shared but grids and signs


def slow_grid(group: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Vector i of a group is elements (i, i + K/d, i + 2K/d, ...)."""
    dim = points.shape[1]
    scale = math.sqrt(np.mean(group**2)) or 1.0
    vectors = group.reshape(dim, -1).T / scale
    nearest = points[((vectors[:, None] - points) ** 2).sum(-1).argmin(1)]
    least_squares = np.float16(scale * (vectors * nearest).sum() / (nearest**2).sum())
    return (nearest * float(least_squares)).T.reshape(-1)


def slow_rtn(group: np.ndarray, bits: int, symmetric: bool) -> np.ndarray:
    top = 2**bits - 1
    low, high = (-np.abs(group).max(), np.abs(group).max()) if symmetric else (group.min(), group.max())
    low = low if symmetric else float(np.float16(low))
    step = float(np.float16((high - low) / top))
    low = -step * top / 2 if symmetric else low
    return low + step * (np.clip(np.round((group - low) / step), 0, top) if step else 0 * group)


def slow_row(row: np.ndarray, scheme: Scheme, turn: int, group: int) -> np.ndarray:
    """Rotate by groups of `turn`, round by groups of `group`, rotate back."""
    matrix = np.eye(1)
    if scheme.rotate is not None:
        matrix = rotation.signs(turn, scheme.rotate.seed).double().numpy()[:, None] * walsh(turn) / math.sqrt(turn)
    size, stage = len(matrix), scheme.quantize
    turned = (row.reshape(-1, size) @ matrix).reshape(-1, group)
    if isinstance(stage, Grid):
        points = grid.points(stage.dim, stage.size).double().numpy()
        decoded = [slow_grid(part, points) for part in turned]
    else:
        decoded = [slow_rtn(part, stage.bits, stage.range == "absmax") for part in turned]
    return (np.stack(decoded).reshape(-1, size) @ matrix.T).reshape(-1)


def power(width: int) -> int:
    return max(size for size in (1 << n for n in range(11)) if width % size == 0)


def slow_sizes(scheme: Scheme, width: int, head: int | None) -> tuple[int, int]:
    """(Hadamard size, group size) in numbers, from the words."""
    turn = scheme.rotate.group if scheme.rotate is not None else 1
    if isinstance(turn, str):
        turn = power(head if turn == "head" and head else width)
    group = scheme.quantize.group
    if isinstance(group, str):
        group = head if group == "head" and head else power(width)
    return turn, group


CASES = [
    *[Scheme(Grid(dim, size, "all"), rotate=Hadamard("all")) for dim, size in GRIDS],
    Scheme(Grid(8, 256, "head"), rotate=Hadamard("head", seed=3)),
    Scheme(Grid(2, 16, 16), rotate=Hadamard(32)),
    Scheme(Grid(2, 16, 32), rotate=Hadamard(8)),
    Scheme(Grid(2, 16, 32), rotate=Hadamard("all"), axis="channel"),
    *[Scheme(Rtn(bits, "head"), rotate=Hadamard("head")) for bits in (1, 3, 8)],
    Scheme(Rtn(2, 8, "absmax"), rotate=Hadamard("all")),
    Scheme(Rtn(3, 16), axis="channel"),
]


@pytest.mark.parametrize("head_size", [64, 80])
@pytest.mark.parametrize("scheme", CASES, ids=lambda s: f"{s.quantize}{s.rotate and s.rotate.group}{s.axis}"[:60])
def test_agrees_with_the_slow_codec(scheme, head_size):
    """All but the bf16 of decoding: a relative 2^-8, far from the tens of percent that a wrong order costs."""
    geometry = Geometry(1, 2, head_size)
    tokens = 96 if scheme.axis == "channel" else 3
    x = gaussian(2, tokens, geometry.width, seed=head_size) * torch.linspace(0.5, 4, geometry.width)
    x[0, 1] += 3
    made = one(scheme, geometry, block=96)
    decoded = there_and_back(made, x).float()
    rows = x if scheme.axis == "token" else x.mT
    turn, group = slow_sizes(scheme, rows.shape[-1], head_size if scheme.axis == "token" else None)
    slow = [slow_row(row, scheme, turn, group) for row in rows.reshape(-1, rows.shape[-1]).double().numpy()]
    expected = torch.from_numpy(np.stack(slow)).view(rows.shape)
    expected = expected if scheme.axis == "token" else expected.mT
    assert relative(decoded - expected, expected) < 2**-16 + 1e-4 * (isinstance(scheme.quantize, Rtn))


@pytest.mark.parametrize("size", GRIDS)
@pytest.mark.parametrize("rotate", [None, Hadamard()])
def test_error_on_gaussian_data_is_the_grids(size, rotate):
    """With 1024 elements a scale costs nothing, and the grid's own error is all there is."""
    made = one(Scheme(Grid(*size), rotate=rotate), Geometry(1, 8, 128))
    x = 5 * gaussian(4, 64, 1024)
    assert relative(x - there_and_back(made, x).float(), x) == pytest.approx(ERRORS[size], rel=0.01)


@pytest.mark.parametrize("head_size", [64, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [name for name in REPRESENTATIVE if "online" not in name])
def test_bits_are_the_bytes_that_are_held(name, head_size):
    geometry = Geometry(3, 4, head_size)
    recipe = recipe_text.read(name)
    stages = [scheme.quantize for scheme in recipe.schemes if isinstance(scheme.quantize, Polar)]
    if head_size == 80 and any(stage.levels == 0 and stage.group == "head" for stage in stages):
        with pytest.raises(ValueError, match="levels=0 does not fit a vector of 80 elements"):
            recipe.check(geometry)
        return
    tensors = {n: torch.zeros(shape, dtype=dtype) for n, (shape, dtype) in codec.all_specs(recipe, geometry).items()}
    for layer, pair in enumerate(shared.build(recipe, geometry, tensors)):
        for made in pair:
            x = gaussian(1, recipe.window.block, geometry.width).bfloat16()
            below = [(x, x)] * min(layer, 3)
            ones = torch.ones(1, recipe.window.block, head_size // 2)
            fields = made.encode(x, Context((ones, 0 * ones), x, below))
            assert {n: (tuple(t.shape[1:]), t.dtype) for n, t in fields.items()} == made.fields(torch.bfloat16)
            held = sum(8 * tensor.untyped_storage().nbytes() for tensor in fields.values())
            assert made.bits() == held / x.numel()


# --- prediction


GEOMETRY = Geometry(3, 2, 32)


def moments(z: Tensor, y: Tensor) -> Centred:
    z, y = z.flatten(0, -2).double(), y.flatten(0, -2).double()
    centred = z - z.mean(0), y - y.mean(0)
    gram, cross = (centred[0].mT @ part / len(z) for part in centred)
    return Centred(len(z), z.mean(0), y.mean(0), gram, cross, y.mT.cov(correction=0))


def chain(noise: float = 0.2):
    """Keys and values of two layers, the upper ones mostly a linear map of (keys, values) as the recipe has them."""
    keys, values = gaussian(6, 128, 64, seed=1), gaussian(6, 128, 64, seed=2)
    up = gaussian(64, 64, seed=3) / 8, gaussian(128, 64, seed=4) / 11
    above = keys @ up[0] + noise * gaussian(6, 128, 64, seed=5)
    return keys, values, above, torch.cat([above, values], -1) @ up[1] + noise * gaussian(6, 128, 64, seed=6)


@pytest.mark.parametrize("predictor", [Linear(), LowRank(rank=48), Linear(storage="gptq4")])
def test_prediction_from_context_lowers_the_error(predictor):
    """What is left to round is the noise: 0.2² of the target's variance and the error of the decoded inputs."""
    keys, values, above, target = chain()
    mean = 10 * gaussian(64, seed=7)
    scheme = Scheme(Grid(2, 256), rotate=Hadamard(), predict=predictor)
    context = Context(keys=above, below=[(keys, values)])
    z = torch.cat([above, values], -1).bfloat16()
    if isinstance(predictor, LowRank):
        fitted = fits.fit_low_rank(moments(z, target), predictor.rank, predictor.ridge)
    else:
        fit = fits.fit_gptq if predictor.storage == "gptq4" else fits.fit_linear
        fitted = fit(moments(z, target), predictor.ridge)
    tensors = {f"predict.{name}": tensor for name, tensor in ({"mean": mean} | fitted).items()}
    made = one(scheme, GEOMETRY, tensors, layer=1, role="value")
    specs = codec.specs(Recipe("test", scheme, scheme), 1, "value", GEOMETRY)
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == specs
    x = target + mean
    decoded = there_and_back(made, x, context)
    plain = there_and_back(one(Scheme(Grid(2, 256), rotate=Hadamard()), GEOMETRY), target)
    errors = [relative(target - found.float(), target) for found in (decoded, plain)]
    assert errors[0] < (0.35 if isinstance(predictor, LowRank) else 0.1) * errors[1]
    restored = made.restore(decoded.float(), context)
    torch.testing.assert_close(restored, decoded.float() + mean)
    assert relative(x - restored, target) == pytest.approx(errors[0], rel=1e-3)


def test_inputs_are_keys_then_values_below_nearest_first():
    recipe = Recipe("test", Scheme(Grid(), predict=Linear()), Scheme(Grid(), predict=Linear(below=(1, 2))))
    made = Codec(recipe, 2, "value", GEOMETRY, {"predict.mean": torch.zeros(64)})
    parts = [torch.full((1, 2, 64), float(number)) for number in range(5)]
    context = Context(keys=parts[0], below=[(parts[1], parts[2]), (parts[3], parts[4])])
    assert made.inputs(context)[0, 0, ::64].tolist() == [0, 2, 4]
    below = Codec(recipe, 2, "key", GEOMETRY, {"predict.mean": torch.zeros(64)})
    assert below.inputs(context)[0, 0].unique().tolist() == [1]
    both = Scheme(Grid(), predict=Linear(below=(1, 2), both=True))
    for role, order in (("key", [1, 3, 2, 4]), ("value", [0, 2, 4, 1, 3])):
        other = Codec(Recipe("test", both, both), 2, role, GEOMETRY, {"predict.mean": torch.zeros(64)})
        assert other.inputs(context)[0, 0, ::64].tolist() == order


@pytest.mark.parametrize("role", ["key", "value"])
def test_a_mean_is_removed_and_put_back(role):
    """A mean a hundred times the signal costs nothing: the error stays the grid's share of the signal."""
    mean = 100 * gaussian(64, seed=9)
    made = one(Scheme(Grid(2, 16, "head"), predict=Mean()), GEOMETRY, {"predict.mean": mean}, role=role, position="pre")
    signal = gaussian(2, 128, 64)
    decoded = there_and_back(made, signal + mean)
    assert relative(signal - decoded.float(), signal) < 0.12
    torch.testing.assert_close(made.restore(decoded.float(), NOWHERE), decoded.float() + mean)


def test_a_mean_after_rope_turns_with_the_position():
    geometry, tokens = Geometry(1, 2, 32), 128
    angle = torch.arange(tokens)[:, None] * 100.0 ** (-torch.arange(16) / 16)
    tables = (1.1 * angle.cos())[None], (1.1 * angle.sin())[None]
    mean, signal = 20 * gaussian(64, seed=1), gaussian(1, tokens, 64)
    roles = mean.view(2, 2, 16)
    turned = torch.complex(roles[:, 0], roles[:, 1]) * torch.polar(torch.tensor(1.1), angle)[:, None]
    mean_TC = torch.stack([turned.real, turned.imag], 2).reshape(tokens, 64)
    x = rope.rotate((signal + mean).unflatten(-1, (2, 32)), *tables).flatten(-2)
    made = one(Scheme(Grid(2, 256, "head"), predict=Mean()), geometry, {"predict.mean": mean})
    context = Context(rope=tables)
    torch.testing.assert_close(made.mean(context)[0], mean_TC, rtol=1e-4, atol=1e-4)
    decoded = made.decode(made.encode(x, context), context)
    assert relative(x - mean_TC - decoded.float(), x - mean_TC) < 0.012
    values = one(Scheme(Grid(), predict=Mean()), geometry, {"predict.mean": mean}, role="value")
    assert torch.equal(values.mean(context), mean)
