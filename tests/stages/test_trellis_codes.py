"""The trellis stage: a codec of its own computed by hand, its bill, single tokens, and HIGGS at equal bits."""

import numpy as np
import pytest
import torch

from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import trellis
from kvq_runtime.ops.rotation import hadamard_matrix
from kvq_runtime.recipe import Recipe, Scheme, preset
from kvq_runtime.stages.codebook import Trellis
from kvq_runtime.stages.rotate import Hadamard

GEOMETRY = Geometry(1, 2, 32)
NOWHERE = Context()


def rows(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, tokens, GEOMETRY.width, generator=torch.Generator().manual_seed(seed))


def made(scheme: Scheme) -> Codec:
    return Codec(Recipe("test", scheme, scheme), 0, "key", GEOMETRY, {})


def slow(row: np.ndarray, bits: int, memory: int) -> np.ndarray:
    """Viterbi's algorithm in float64, one state after another, through all groups [G, K] of a row."""
    values = trellis.table(bits, memory).double().numpy()
    rms = np.sqrt(np.mean(row**2, 1))
    cost, back = np.full(2**memory, np.inf), []
    cost[0] = 0.0
    for x, size in zip(row.flatten(), np.repeat(rms, row.shape[1]), strict=True):
        now, chosen = np.full(2**memory, np.inf), np.zeros(2**memory, dtype=int)
        for state in range(2**memory):
            before = [(state >> bits) + (dropped << (memory - bits)) for dropped in range(2**bits)]
            chosen[state] = min(before, key=lambda one: cost[one])
            now[state] = cost[chosen[state]] + (x - size * values[state]) ** 2
        cost = now
        back.append(chosen)
    state, decoded = int(cost.argmin()), []
    for chosen in reversed(back):
        decoded.append(values[state])
        state = chosen[state]
    found = np.array(decoded[::-1]).reshape(row.shape)
    scale = (row * found).sum(1) / (found**2).sum(1)
    return np.float16(scale).astype(float)[:, None] * found


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_the_codec_by_hand(bits):
    codec, x = made(Scheme(Trellis(bits, 8), rotate=Hadamard("head"))), rows(2)
    matrix = hadamard_matrix(32, 0).double().numpy()
    expected = [slow(row @ matrix, bits, 8) @ matrix.T for row in x.double().numpy().reshape(-1, 2, 32)]
    found = codec.decode(codec.encode(x, NOWHERE), NOWHERE)
    assert found.double().numpy().reshape(-1, 2, 32) == pytest.approx(np.array(expected), abs=2e-2)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_bits_are_those_of_the_codes_and_one_scale(bits):
    scheme = preset(f"trellis-head-{bits}bit").key
    assert scheme.bits(128, GEOMETRY) == bits + 16 / 32
    fields = made(scheme).encode(rows(128), NOWHERE)
    held = 8 * sum(field.numel() * field.element_size() for field in fields.values())
    assert held / rows(128).numel() == bits + 16 / 32


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_single_tokens_are_decoded_alone(bits):
    codec = made(Scheme(Trellis(bits)))
    fields = codec.encode(rows(16), NOWHERE)
    block_N, token_N = torch.tensor([1, 0, 1]), torch.tensor([3, 15, 0])
    found = codec.tokens(fields, block_N, token_N, slice(None))
    assert torch.equal(found, codec.decode(fields, NOWHERE)[block_N, token_N])


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_less_error_than_higgs_at_the_same_bits(bits):
    x, errors = rows(256, seed=3), []
    for name in (f"trellis-head-{bits}bit", f"higgs-head-{bits}bit"):
        codec = made(preset(name).key)
        errors.append(float((codec.decode(codec.encode(x, NOWHERE), NOWHERE).float() - x).square().mean()))
        assert preset(name).key.bits(128, GEOMETRY) == bits + 0.5
    assert errors[0] < 0.93 * errors[1]


def test_what_there_is_no_table_for_is_refused():
    with pytest.raises(ValueError, match="no trellis with bits=5 memory=10; there are"):
        Trellis(5)
    with pytest.raises(ValueError, match="use at least 1"):
        Trellis(2, group=0)
