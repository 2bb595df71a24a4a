"""Every op with a kernel gives what its torch body gives: all widths, odd shapes, one row, transposed input."""

import pytest
import torch
from parity import DEVICE, error, normal, poisoned
from tiers import some, together

from kvq_calib.fit.predict import inverse_root, round_group, rounded
from kvq_runtime.ops import dispatch, grid, lloyd, pack, polar, rtn, token_gain, trellis
from kvq_runtime.ops.rotation import SignedHadamard
from kvq_runtime.store import storage

pytest.importorskip("triton")

# relative root-mean-square error of what is decoded; codes may differ where a number lies on a boundary
FLOAT32, HALF = 3e-6, 2e-3
CODES = 2e-3  # the share of codes that may differ

SHAPES = [(1, 1, 1, 8), (2, 3, 5, 32), (1, 7, 3, 80), (3, 1, 1, 128), (1, 2, 1, 1024)]


def both(op, *arguments, **settings):
    """What the kernel gives, what torch gives, each as a tuple."""
    found = []
    for kernels in (True, False):
        with dispatch.forced(kernels):
            given = op(*(a.clone() if isinstance(a, torch.Tensor) else a for a in arguments), **settings)
        found.append(given if isinstance(given, tuple) else (given,))
    return found


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    with poisoned(monkeypatch):
        yield


def differing(found, wanted) -> float:
    return float((found != wanted).float().mean())


def test_every_op_is_here():
    assert set(dispatch.OPS.values()) == {op.__wrapped__ for op in TESTED}
    for name in dispatch.OPS:
        assert callable(dispatch.kernel(name))


def test_a_cpu_tensor_takes_the_torch_body():
    assert not dispatch.runs_kernel(torch.empty(1))
    with dispatch.forced(True):
        assert dispatch.runs_kernel(torch.empty(1))


@pytest.mark.parametrize("range", ["minmax", "absmax"])
@pytest.mark.parametrize("shape, bits", together(SHAPES, [1, 2, 3, 4, 8]))
def test_rtn_encode(range, shape, bits):
    x = normal(*shape) * 3 + 1
    found, wanted = both(rtn.encode, x, bits, range)
    assert differing(*(pack.unpack(part[0], bits, shape[-1]) for part in (found, wanted))) <= CODES
    for got, want in zip(found[1:], wanted[1:], strict=True):
        assert torch.equal(got, want)


def test_rtn_encode_per_channel_and_constant_groups():
    x = normal(2, 64, 24).mT.unflatten(-1, (2, 32))  # [N, C, G, K], strides of a transpose
    found, wanted = both(rtn.encode, x, 2)
    assert differing(found[0], wanted[0]) <= CODES and torch.equal(found[1], wanted[1])
    same = torch.full((2, 16), 2.5, device=DEVICE)
    for range in ("minmax", "absmax"):
        found, wanted = both(rtn.encode, same, 4, range)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("number", some(range(len(grid.DIGESTS)), 3))
@pytest.mark.parametrize("width", [16, 80])
def test_grid(number, width):
    dim, size = sorted(grid.DIGESTS)[number]
    found, wanted = both(grid.encode, normal(3, 5, width) * 2, dim, size)
    codes = (pack.unpack(part[0], size.bit_length() - 1, width // dim) for part in (found, wanted))
    assert differing(*codes) <= CODES
    assert error(found[1], wanted[1]) <= HALF


@pytest.mark.parametrize("shape, bits", together(SHAPES, lloyd.BITS))
def test_lloyd(shape, bits):
    found, wanted = both(lloyd.encode, normal(*shape), bits, "plain")
    assert differing(*(pack.unpack(part[0], bits, shape[-1]) for part in (found, wanted))) <= CODES
    assert error(found[1], wanted[1]) <= HALF


@pytest.mark.parametrize("bits", some(trellis.DIGESTS, 2))
@pytest.mark.parametrize("shape", [(9, 3, 8), (5, 6, 1), (1, 1, 1), (0, 2, 3)])
def test_paths(shape, bits, monkeypatch):
    """The same ones, bit by bit; of several launches, too."""
    values = trellis.table(bits).to(DEVICE, torch.float32)
    rms = normal(*shape[:2], seed=1).exp()
    monkeypatch.setattr(dispatch.kernels("encode.trellis"), "DROPPED", 1 << 14)
    found, wanted = both(trellis.best_path, normal(*shape), rms, values, bits)
    assert found[0].dtype == wanted[0].dtype and torch.equal(found[0], wanted[0])


@pytest.mark.parametrize("inputs, outputs", [(64, 20), (150, 17), (40, 3)])
def test_matrices_rounded_in_turn(inputs, outputs):
    weight, rows = normal(inputs, outputs).double(), normal(500, inputs, seed=1).double()
    weight[:, 1] = 0.25
    found, wanted = both(lambda w_IO, u_II: tuple(rounded(w_IO, u_II).values()), weight, inverse_root(rows.mT @ rows))
    assert len(wanted[0].unique()) > 30
    assert all(torch.equal(got, want) for got, want in zip(found, wanted, strict=True))


@pytest.mark.parametrize("width, tokens, dtype", [(80, 1, torch.float32), (1100, 3, torch.bfloat16)])
def test_tokens_are_appended_where_the_device_counts(width, tokens, dtype):
    """Twice in a row, of keys and values that are views of wider tensors; nothing else in the buffer changes."""
    x_BTC = normal(3, tokens, 3 * width).to(dtype)
    k_BTC, v_BTC = x_BTC[..., :width], x_BTC.mT.contiguous().mT[..., width : 2 * width]
    made = []
    for kernels in (True, False):
        buffer_2BWC, counts = normal(2, 3, 40, width, seed=1).to(dtype), torch.tensor([5, 4, 20, 0], dtype=torch.int32)
        counts = counts.to(DEVICE)
        with dispatch.forced(kernels):
            for _ in range(2):
                storage.append(k_BTC, v_BTC, buffer_2BWC, counts)
        assert counts.tolist() == [5, 4, 20 + 2 * tokens, 0]
        made.append(buffer_2BWC)
    assert torch.equal(*made)
    wanted_2BWC = normal(2, 3, 40, width, seed=1).to(dtype)
    for first in (24, 24 + tokens):
        wanted_2BWC[:, :, first : first + tokens] = torch.stack([k_BTC, v_BTC])
    assert torch.equal(made[0], wanted_2BWC)


def rotation_of(name: str | None, width: int):
    """No rotation, a Hadamard or a random matrix, which kernels have in their tile at 32 or 128, and not at 80."""
    if name == "matrix":
        return torch.linalg.qr(normal(width, width, seed=5)).Q.contiguous()
    return name and SignedHadamard(16, 0)


@pytest.mark.parametrize(
    "turn, width",
    [("matrix", 32), *(pytest.param(*one, marks=pytest.mark.slow) for one in (("hadamard", 80), ("matrix", 128)))],
)
def test_rotated_and_encoded(turn, width):
    turn = rotation_of(turn, width)
    x = normal(2, 3, width) * 2
    ops = [(rtn.encode, (bits, "minmax")) for bits in (1, 2, 3, 4, 8)] + [(rtn.encode, (2, "absmax"))]
    ops += [(grid.encode, (2, 16)), (grid.encode, (8, 256))]
    ops += [(lloyd.encode, (bits, scale)) for bits, scale in ((1, "plain"), (3, "norm"), (4, "least_squares"))]
    for op, settings in ops:
        found, wanted = both(op, x, *settings, turn)
        assert found[0].shape == wanted[0].shape
        assert differing(found[0], wanted[0]) <= 4 * CODES, (op, settings)
        for got, want in zip(found[1:], wanted[1:], strict=True):
            assert error(got, want) <= HALF, (op, settings)


@pytest.mark.parametrize(
    "turn, bits, width", [("matrix", (4, 2, 2, 2), 80), (None, (5, 3, 3), 128), ("hadamard", (3, 2, 1, 4), 32)]
)
def test_rotated_and_encoded_as_angles(turn, bits, width):
    turn = rotation_of(turn, width)
    cuts = [polar.codebook(level, wide)[0].float().to(DEVICE) for level, wide in enumerate(bits, start=1)]
    for boundaries in (None, [each + 0.01 for each in cuts]):
        found, wanted = both(polar.encode, normal(2, 3, width), bits, turn, boundaries)
        assert found[0].shape == wanted[0].shape and found[1].dtype == torch.float16
        assert differing(found[0], wanted[0]) <= 4 * CODES
        assert error(found[1], wanted[1]) <= HALF


@pytest.mark.parametrize(
    "runs, gains, bits, tokens, steps",
    [
        (((3, 7), (2, 5), (4, 3), (5, 2), (2, 1)), 1, 3, 32, True),
        (((2, 6), (4, 4), (8, 2)), 2, 2, 8, False),
        (((3, 3), (6, 1)), 3, 4, 64, True),
        (((2, 6), (6, 2)), 0, 0, 16, False),
        (((2, 3), (4, 2)), 2, 1, 16, True),
        (((5, 3), (3, 2)), 1, 3, 24, True),
    ],
)
def test_latents(runs, gains, bits, tokens, steps):
    stored = sum(count for count, _ in runs)
    deviation = torch.exp(normal(stored) / 2)
    deviation[stored // 2] = 0
    z = normal(3, stored, tokens) * torch.exp(normal(3, 1, tokens) / 2) * deviation[:, None]
    ends = torch.tensor([[-1.0, 1.0], [-0.5, 1.5], [-2.0, 0.5]], device=DEVICE)[:gains] if gains else None
    index = torch.arange(stored) * max(gains, 1) // stored if gains < 3 else torch.arange(stored) % gains
    if bits == 1:  # the second gain has no channel
        index = torch.zeros_like(index)
    found, wanted = both(token_gain.encode, z, deviation, runs, ends, bits, index, steps)
    assert found[0].shape == wanted[0].shape
    same = torch.ones(3, stored, tokens, dtype=torch.bool, device=DEVICE)
    if gains:
        assert differing(found[1], wanted[1]) <= 0.02  # two gains may be nearly as good
        same = (found[1] == wanted[1])[:, index.to(DEVICE)]
    start, place = 0, 0
    for count, width in runs:
        size = count * pack.packed_size(tokens, width)
        codes = [pack.unpack(packed[:, start : start + size].unflatten(1, (count, -1)), width, tokens)
                 for packed in (found[0], wanted[0])]  # fmt: skip
        assert differing(*(each[same[:, place : place + count]] for each in codes)) <= CODES
        start, place = start + size, place + count


@pytest.mark.parametrize(
    "op, settings", [(rtn.encode, (4, "minmax")), (grid.encode, (2, 16)), (lloyd.encode, (2, "norm"))]
)
def test_no_rows(op, settings):
    for turn in (None, SignedHadamard(64, 0), torch.eye(64, device=DEVICE)):
        found, wanted = both(op, torch.zeros(0, 3, 64, device=DEVICE), *settings, turn)
        assert [x.shape for x in found] == [x.shape for x in wanted]


TESTED = [
    *(rtn.encode, grid.encode, lloyd.encode, polar.encode),
    *(trellis.best_path, token_gain.encode, round_group, storage.append),
]
