"""Trellis codes: the best of all paths, decoded bit by bit, nearer to the bound than grids; and their builder."""

import itertools
import math

import numpy as np
import pytest
import torch

from kvq_runtime.ops import grid, pack, trellis
from scripts import build_tables

SIZES = sorted(pair for pair in trellis.DIGESTS if pair[1] in (8, 10))
# (bits, memory) → mean squared error on a standard Gaussian of a table in a random order that was not fitted
UNFITTED = {(1, 10): 0.2817, (2, 8): 0.0852, (2, 10): 0.0765}
GRIDS = {1: (8, 256), 2: (2, 16), 3: (2, 64), 4: (2, 256)}  # HIGGS's of as many bits an element


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def paths(x_NK: torch.Tensor, values: torch.Tensor, bits: int) -> torch.Tensor:
    """The best paths through rows that are one group of size 1."""
    return trellis.best_path(x_NK[:, None], torch.ones(len(x_NK), 1), values.float(), bits)


def slow_states(packed: np.ndarray, bits: int, memory: int, count: int) -> list[int]:
    """Write the stream as a text of bits, zeros before it, and read the last ones at every element."""
    text = "0" * memory + "".join(f"{byte:08b}" for byte in packed)
    ends = [memory + bits * (place + 1) for place in range(count)]
    return [int(text[end - memory : end], 2) for end in ends]


@pytest.mark.parametrize("size", SIZES)
def test_tables_are_pinned_and_centred(size):
    values = trellis.table(*size)
    assert values.dtype == torch.bfloat16 and tuple(values.shape) == (2 ** size[1],)
    assert abs(float(values.float().mean())) < 0.15 and float(values.float().abs().max()) < 5


def test_a_changed_table_is_refused(monkeypatch):
    monkeypatch.setitem(trellis.DIGESTS, (2, 8), "0" * 64)
    trellis.table.cache_clear()
    with pytest.raises(RuntimeError, match="pinned is 0000"):
        trellis.table(2, 8)
    monkeypatch.undo()
    assert len(trellis.table(2, 8)) == 256
    with pytest.raises(ValueError, match="there are"):
        trellis.table(2, 9)


@pytest.mark.parametrize(("bits", "length"), [(1, 11), (2, 6), (3, 4), (4, 3)])
@pytest.mark.parametrize("memory", [8, 10])
def test_no_other_path_is_better(bits, length, memory):
    """Every stream of a short row is tried, in float64."""
    values = trellis.table(bits, memory).double().numpy()
    streams = np.array(list(itertools.product(range(2**bits), repeat=length)))
    state, decoded = np.zeros(len(streams), dtype=np.int64), []
    for codes in streams.T:
        state = (state * 2**bits + codes) % 2**memory
        decoded.append(values[state])
    x = numbers(20, length)
    found = paths(x, trellis.table(bits, memory), bits).numpy()
    for row, path in zip(x.double().numpy(), found, strict=True):
        best = ((row - np.stack(decoded, 1)) ** 2).sum(1).min()
        assert ((row - values[path]) ** 2).sum() == pytest.approx(best, rel=1e-5)
        assert all(now // 2**bits == before % 2 ** (memory - bits) for before, now in itertools.pairwise(path))
        assert path[0] < 2**bits


def test_groups_are_weighed_with_their_size():
    """Of all paths through three groups of two elements it is the best after each has its root mean square again."""
    bits, memory = 2, 8
    values = trellis.table(bits, memory).double().numpy()
    streams = np.array(list(itertools.product(range(4), repeat=6)))
    state, decoded = np.zeros(len(streams), dtype=np.int64), []
    for codes in streams.T:
        state = (state * 4 + codes) % 256
        decoded.append(values[state])
    x, rms = numbers(40, 3, 2), numbers(40, 3, seed=1).exp()
    found = trellis.best_path(x, rms, trellis.table(bits, memory).float(), bits).numpy()
    weight = np.repeat(rms.double().numpy() ** 2, 2, 1)
    unweighed = paths(x.flatten(1), trellis.table(bits, memory), bits).numpy()
    for row, of_each, path in zip(x.double().flatten(1).numpy(), weight, found, strict=True):
        best = (of_each * (row - np.stack(decoded, 1)) ** 2).sum(1).min()
        assert (of_each * (row - values[path]) ** 2).sum() == pytest.approx(best, rel=1e-4)
    assert (found != unweighed).any()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", [(1, 8), (1, 13), (4, 32), (3, 5)])
def test_packed_codes_are_read_bit_by_bit(size, shape):
    (bits, memory), count = size, shape[0] * shape[1]
    x = numbers(3, 2, *shape)
    packed, scale = trellis.encode(x, bits, memory)
    assert packed.dtype == torch.uint8 and packed.shape == (3, 2, trellis.packed_size(count, bits))
    assert trellis.packed_size(count, bits) == math.ceil(count * bits / 8) and scale.shape == (3, 2, shape[0])
    values, rms = trellis.table(bits, memory), x.view(6, *shape).square().mean(-1).sqrt()
    path = trellis.best_path(x.view(6, *shape) / rms[..., None], rms, values.float(), bits)
    expected = [slow_states(stream, bits, memory, count) for stream in packed.view(6, -1).numpy()]
    assert path.tolist() == expected
    for dtype in (torch.bfloat16, torch.float32):
        decoded = trellis.decode(packed, bits, memory, count, dtype)
        assert decoded.dtype == dtype and torch.equal(decoded.view(6, count).float(), values[path].float())


@pytest.mark.parametrize("size", SIZES)
def test_the_error_is_between_the_bound_and_the_grids(size):
    """Of sequences of 128: below that of HIGGS's grid of as many bits, and above the rate-distortion bound."""
    bits, memory = size
    x, values = numbers(1024, 128, seed=7), trellis.table(bits, memory).float()
    error = float((x - values[paths(x, values, bits)]).double().square().mean())
    dim, points = GRIDS[bits]
    vectors = x.reshape(-1, dim)
    of_grid = float((vectors - grid.points(dim, points)[grid.scan(vectors, grid.points(dim, points))]).square().mean())
    assert 4.0**-bits < error < 0.95 * of_grid
    if size in UNFITTED:
        assert 0.93 * UNFITTED[size] < error < 1.02 * UNFITTED[size]


@pytest.mark.parametrize("bits", trellis.BITS)
def test_more_memory_is_nearer_to_the_bound(bits):
    x = numbers(512, 128, seed=8)
    tables = [trellis.table(bits, memory).float() for memory in (8, 10)]
    errors = [float((x - values[paths(x, values, bits)]).square().mean()) for values in tables]
    assert 0.85 < errors[1] / errors[0] < 0.98


def test_scales_are_least_squares():
    """The error is orthogonal to what is decoded, up to the float16 of the scale."""
    x = numbers(64, 2, 64) * torch.logspace(-2, 2, 64)[:, None, None]
    packed, scale = trellis.encode(x, 2, 8)
    decoded = trellis.decode(packed, 2, 8, 128, torch.float32).view(x.shape) * scale.float()[..., None]
    share = ((x - decoded) * decoded).sum(-1) / decoded.square().sum(-1)
    assert float(share.abs().max()) < 2**-10


@pytest.mark.parametrize("size", [(1, 8), (2, 10), (3, 8)])
def test_encoding_does_not_depend_on_company(size):
    x = numbers(700, 2, 16)
    codes, scale = trellis.encode(x, *size)
    for row in (0, 7, 511, 512, 699):
        alone = trellis.encode(x[row], *size)
        assert torch.equal(alone[0], codes[row]) and torch.equal(alone[1], scale[row])
    few = trellis.encode(x[3:40], *size)
    assert torch.equal(few[0], codes[3:40]) and torch.equal(few[1], scale[3:40])


@pytest.mark.parametrize("bits", trellis.BITS)
def test_zeros_nothing_and_nonsense(bits):
    assert not trellis.encode(torch.zeros(2, 3, 16), bits, 8)[1].any()
    codes, scale = trellis.encode(torch.zeros(0, 1, 16), bits, 8)
    assert codes.shape == (0, 2 * bits) and scale.shape == (0, 1)
    nonsense = torch.tensor([[float("nan")] * 16, [1.0] * 16])
    assert trellis.encode(nonsense[:, None], bits, 8)[1].isfinite().tolist() == [[False], [True]]
    silent = torch.stack([torch.zeros(16), torch.ones(16)]).expand(2, 2, 16).clone()
    assert (trellis.encode(silent, bits, 8)[1] > 0).tolist() == [[False, True]] * 2


def test_the_stream_of_two_bits_is_not_planar():
    """An element's bits stand beside its neighbours, so that a shift reads them: 0, 1, 2, 3 are one byte in order."""
    codes = torch.arange(4)
    assert trellis.pack(codes, 2).tolist() == [0b00011011]
    assert pack.pack(codes, 2).tolist() == [0b11100100]


def test_the_builder_lowers_the_error_and_repeats_itself():
    x = build_tables.sequences(1 << 15, seed=5)
    fits = [build_tables.fit_trellis(2, 8, rounds, samples=64) for rounds in (0, 1, 12)]
    errors = [build_tables.trellis_error(x, values, 2) for values in fits]
    assert errors[0] > 1.02 * errors[1] > 1.04 * errors[2]
    assert torch.equal(build_tables.fit_trellis(2, 8, 2, 64), build_tables.fit_trellis(2, 8, 2, 64))
