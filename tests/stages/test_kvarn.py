"""KVarN: tiles balanced and rounded by numpy, one number after another; what balancing leaves, and what it is for."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from feeding import error, feed_in, read, turned
from torch import Tensor

from kvq_runtime.cache import BlockCache
from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.codec.key_bias import centred, tensors
from kvq_runtime.geometry import ROLES, Geometry, Window
from kvq_runtime.ops.pack import unpack
from kvq_runtime.ops.rotation import hadamard_matrix
from kvq_runtime.ops.sinkhorn import column_scales
from kvq_runtime.recipe import Recipe, preset

GEOMETRY = Geometry(1, 2, 16)
TOKENS = 24
RECIPE = replace(preset("kvarn-k4v2"), window=Window(0, 8, TOKENS))


def activations(seed: int = 0, blocks: int = 1) -> Tensor:
    """Tokens and channels of unequal size, about means."""
    generator = torch.Generator().manual_seed(seed)
    x = 0.5 + torch.randn(blocks, TOKENS, GEOMETRY.width, generator=generator)
    loud = torch.randn(1, TOKENS, 1, generator=generator).exp(), torch.randn(GEOMETRY.width, generator=generator).exp()
    return 0.01 * x * loud[0] * loud[1]


def coded(role, x_NTC: Tensor, recipe: Recipe = RECIPE) -> tuple[Codec, dict[str, Tensor]]:
    codec = Codec(recipe.check(GEOMETRY), 0, role, GEOMETRY, {})
    return codec, codec.encode(x_NTC, Context())


def decoded(role, x_NTC: Tensor, recipe: Recipe = RECIPE) -> Tensor:
    codec, fields = coded(role, x_NTC, recipe)
    return codec.decode(fields, Context()).float()


def balanced(tile: np.ndarray) -> np.ndarray:
    """Scales of columns, in the log domain, by loops over rows and columns; the least unbalanced of 16 steps."""
    rows, columns = (np.zeros(size) for size in tile.shape)
    found = []
    for _ in range(17):
        for c in range(tile.shape[1]):
            columns[c] += np.log(np.std([tile[r, c] / np.exp(rows[r] + columns[c]) for r in range(tile.shape[0])]))
        kept = columns.copy()
        for r in range(tile.shape[0]):
            rows[r] += np.log(np.std([tile[r, c] / np.exp(rows[r] + columns[c]) for c in range(tile.shape[1])]))
        left = (tile / np.exp(rows[:, None] + columns)).std(0)
        found.append((left.max() / left.min(), kept))
    best = min(found[:16], key=lambda one: one[0])[1]
    return np.exp(best - best.mean())


def rounded(tile: np.ndarray, bits: int) -> np.ndarray:
    """Round each row of a tile over the scales of its columns, between the ends of the row; numbers in float16."""
    scale, out = balanced(tile).astype(np.float16).astype(float), np.empty_like(tile)
    for r, row in enumerate(tile / scale):
        low = float(np.float16(row.min()))
        step = float(np.float16((row.max() - low) / (2**bits - 1)))
        out[r] = scale * (low + step * np.clip(np.round((row - low) / step), 0, 2**bits - 1))
    return out


@pytest.mark.parametrize(("role", "bits"), [("key", 4), ("value", 2)])
def test_agrees_with_loops_in_float64(role, bits):
    """Heads rotated, each a tile; keys by channel, values by token; rotated back."""
    x, size = activations(), GEOMETRY.head_size
    turn, out = hadamard_matrix(size, 0).double().numpy(), np.empty(x.shape[1:])
    for head in (slice(0, size), slice(size, 2 * size)):
        tile = x[0, :, head].double().numpy() @ turn
        tile = rounded(tile.T, bits).T if role == "key" else rounded(tile, bits)
        out[:, head] = tile @ turn.T
    assert error(decoded(role, x), torch.from_numpy(out)[None].float()) < 2**-7


def test_bits_are_codes_and_three_numbers():
    geometry = Geometry(1, 8, 128)
    for name, widths in (("kvarn-k4v4", (4, 4)), ("kvarn-k4v2", (4, 2)), ("kvarn-k2v2", (2, 2))):
        for role, bits in zip(ROLES, widths, strict=True):
            assert Codec(preset(name), 0, role, geometry, {}).bits() == bits + 3 * 16 / 128
    codec, fields = coded("key", activations())
    held = sum(field[0].numel() * field.element_size() for field in fields.values())
    assert codec.bits() == 8 * held / (TOKENS * GEOMETRY.width)


def test_rows_and_columns_are_left_with_one_deviation():
    tile = activations(1)[0].double()
    tile = tile / column_scales(tile)
    tile = tile / tile.std(1, keepdim=True)
    before, after = activations(1)[0].std(0), tile.std(0)
    assert after.max() / after.min() < 1.001 and before.max() / before.min() > 10


@pytest.mark.parametrize("role", ROLES)
def test_a_tile_of_other_scales_has_the_same_codes(role):
    """As balanced before and after; but where a number lies between two codes the stored scales decide."""
    plain, x = (
        replace(RECIPE, key=replace(RECIPE.key, rotate=None), value=replace(RECIPE.value, rotate=None)),
        activations(),
    )
    rows, columns = torch.linspace(-2, 2, TOKENS).exp()[:, None], torch.linspace(1, -1, GEOMETRY.width).exp()
    (codec, one), (_, two) = coded(role, x, plain), coded(role, x * rows * columns, plain)
    bits = codec.scheme.quantize.bits
    codes = [unpack(fields["codes"], bits, fields["scale"].shape[-1]).int() for fields in (one, two)]
    assert (codes[0] - codes[1]).abs().max() <= 1 and (codes[0] != codes[1]).float().mean() < 0.02


def test_a_loud_token_and_a_loud_channel_harm_no_others():
    for role in ROLES:
        x = activations(2)
        quiet = error(decoded(role, x), x)
        x[0, 5] *= 50
        others = torch.arange(TOKENS) != 5
        assert error(decoded(role, x)[:, others], x[:, others]) < 1.5 * quiet


def test_constant_and_empty_rows_and_columns_are_finite():
    for role in ROLES:
        x = activations(3)
        x[0, 3], x[0, 4], x[0, :, :16], x[0, :, 20] = 0, 2, 0, 1
        for given in (x, torch.zeros_like(x), torch.full_like(x, 1e-7)):
            assert decoded(role, given).isfinite().all()
        assert not decoded(role, x)[..., :16].any()


def test_keys_are_balanced_less_the_bias_of_their_projection():
    """After RoPE a bias is as many waves as it has pairs of channels; without it keys lose what they lose anyway."""
    geometry = Geometry(1, 2, 32)
    x = turned(0.3 * torch.randn(1, 2, 1, 80, 64, generator=torch.Generator().manual_seed(5)), geometry)
    bias = 20 * torch.randn(64, generator=torch.Generator().manual_seed(6))
    biased = x.clone()
    biased[:, 0] += turned(bias.expand_as(x), geometry)[:, 0]
    recipe = replace(preset("kvarn-k4v4"), window=Window(0, 16, 32))
    errors = {}
    for name, made, fixed, given in (
        ("plain", recipe, {}, x),
        ("less bias", centred(recipe, {0: bias}), tensors(centred(recipe, {0: bias}), geometry, {0: bias}), biased),
        ("bias kept", recipe, {}, biased),
    ):
        cache = BlockCache(made, geometry, fixed or None)
        feed_in(cache, given, [80])
        errors[name] = float((read(cache)[0][0] - given[0, 0]).norm())
    assert errors["less bias"] < 1.1 * errors["plain"] < 0.5 * errors["bias kept"]
