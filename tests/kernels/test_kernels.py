"""Every op with a kernel gives what its torch body gives: all widths, odd shapes, one row, transposed input."""

import pytest
import torch
from parity import DEVICE, error, normal, poisoned

from kvq_runtime.ops import chain, dispatch, feedback, grid, hadamard, latent, lloyd, pack, polar, predict, rtn

pytest.importorskip("triton")

# relative root-mean-square error of what is decoded; codes may differ where a number lies on a boundary
FLOAT32, HALF, BFLOAT = 3e-6, 2e-3, 6e-3  # the interpreter cuts bfloat16 off where a GPU rounds
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


def codes(*shape: int, top: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, top, shape, dtype=torch.uint8, generator=generator).to(DEVICE)


def differing(found, wanted) -> float:
    return float((found != wanted).float().mean())


def test_every_op_is_here():
    named = {f"{op.__module__.rpartition('.')[2]}.{op.__name__}" for op in TESTED}
    assert set(dispatch.OPS) == named
    for name in dispatch.OPS:
        assert callable(dispatch.kernel(name))


def test_a_cpu_tensor_takes_the_torch_body():
    assert not dispatch.runs_kernel(torch.empty(1))
    with dispatch.forced(True):
        assert dispatch.runs_kernel(torch.empty(1))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 5, 20, 64, 127])
def test_pack(bits, count):
    given = codes(3, 2, count, top=2**bits, seed=count)
    (packed,), (wanted,) = both(pack.pack, given, bits)
    assert torch.equal(packed, wanted)
    (found,), (again,) = both(pack.unpack, packed, bits, count)
    assert torch.equal(found, again) and torch.equal(found, given)


@pytest.mark.parametrize("size", [1, 2, 16, 64, 128, 1024])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_hadamard(size, dtype):
    x = normal(3, 5, 2 * size).to(dtype)
    for op in (hadamard.rotate, hadamard.rotate_back):
        found, wanted = both(op, x, size, 3)
        assert error(found[0], wanted[0]) <= FLOAT32
    with dispatch.forced(True):
        assert error(hadamard.rotate_back(hadamard.rotate(x, size, 3), size, 3), x) < 1e-6


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", [rtn.encode_minmax, rtn.encode_absmax])
def test_rtn_encode(op, shape, bits):
    x = normal(*shape) * 3 + 1
    found, wanted = both(op, x, bits)
    assert differing(found[0], wanted[0]) <= CODES
    for got, want in zip(found[1:], wanted[1:], strict=True):
        assert torch.equal(got, want)


def test_rtn_encode_per_channel_and_constant_groups():
    x = normal(2, 64, 24).mT.unflatten(-1, (2, 32))  # [N, C, G, K], strides of a transpose
    found, wanted = both(rtn.encode_minmax, x, 2)
    assert differing(found[0], wanted[0]) <= CODES and torch.equal(found[1], wanted[1])
    same = torch.full((2, 16), 2.5, device=DEVICE)
    for op in (rtn.encode_minmax, rtn.encode_absmax):
        found, wanted = both(op, same, 4)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_rtn_decode(shape, bits):
    given, step, low = codes(*shape, top=2**bits), normal(*shape[:-1]).half(), normal(*shape[:-1], seed=1).half()
    for start in (low, None):
        found, wanted = both(rtn.decode, given, step, start, bits)
        assert error(found[0], wanted[0]) <= FLOAT32
    room = torch.empty(*shape[:-1], 2 * shape[-1], device=DEVICE)[..., ::2]
    with dispatch.forced(True):
        assert rtn.decode(given, step, low, bits, room) is room
    assert error(room, rtn.decode(given.cpu(), step.cpu(), low.cpu(), bits).to(DEVICE)) <= FLOAT32


@pytest.mark.parametrize("dim, size", grid.sizes())
@pytest.mark.parametrize("width", [16, 80, 128])
def test_grid(dim, size, width):
    x = normal(3, 5, width) * 2
    found, wanted = both(grid.encode, x, dim, size)
    assert differing(found[0], wanted[0]) <= CODES
    assert error(found[1], wanted[1]) <= HALF
    table = grid.points(dim, size).to(DEVICE)
    got, want = both(grid.decode, wanted[0], wanted[1], table)
    assert error(got[0], want[0]) <= FLOAT32


@pytest.mark.parametrize("bits", lloyd.BITS)
@pytest.mark.parametrize("shape", SHAPES)
def test_lloyd(shape, bits):
    found, wanted = both(lloyd.encode, normal(*shape), bits)
    assert differing(found[0], wanted[0]) <= CODES and error(found[1], wanted[1]) <= FLOAT32
    got, want = both(lloyd.decode, *wanted, bits)
    assert error(got[0], want[0]) <= FLOAT32


@pytest.mark.parametrize("bits, width", [((4, 2, 2, 2), 80), ((4, 2, 2, 2), 128), ((5, *[3] * 5), 64), ((3, 2, 1), 8)])
@pytest.mark.parametrize("kind", ["unit", "mean"])
def test_polar(bits, width, kind):
    (found, radii), (wanted, lengths) = both(polar.encode, normal(3, 2, width), bits)
    assert error(radii, lengths) <= FLOAT32
    assert all(differing(a, b) <= CODES for a, b in zip(found, wanted, strict=True))
    points = [polar.points_on(torch.device(DEVICE), level, wide, kind) for level, wide in enumerate(bits, start=1)]
    got, want = both(polar.decode, wanted, lengths, points)
    assert error(got[0], want[0]) <= FLOAT32


@pytest.mark.parametrize("bits, width", [((4, 2, 2, 2), 80), ((6, 4, 1), 128), ((2, 1), 8)])
def test_polar_with_other_boundaries(bits, width):
    """Rising ones anywhere in the range; at level 1 on both sides of half the circle."""
    drawn = torch.Generator().manual_seed(4)
    cuts = [
        (torch.rand(2**wide - 1, generator=drawn) * (2 if level else 0.5) * torch.pi).sort().values.to(DEVICE)
        for wide, level in zip(bits, [True] + [False] * (len(bits) - 1), strict=True)
    ]
    (found, radii), (wanted, lengths) = both(polar.encode_fitted, normal(3, 2, width), cuts)
    assert error(radii, lengths) <= FLOAT32
    assert [level.shape[-1] for level in found] == [width >> n for n in range(1, len(bits) + 1)]
    assert all(differing(a, b) <= CODES for a, b in zip(found, wanted, strict=True))
    assert len(wanted[0].unique()) > 2


@pytest.mark.parametrize("bits", range(1, 9))
def test_latent(bits):
    z, deviation = normal(2, 6, 40), normal(6, seed=1).abs()
    deviation[2] = 0
    found, wanted = both(latent.encode_gaussian, z, deviation, bits)
    assert differing(found[0], wanted[0]) <= CODES
    got, want = both(latent.decode_gaussian, wanted[0], deviation, bits)
    assert error(got[0], want[0]) <= FLOAT32
    for low in (-deviation, z.amin(-1)):
        high = low + 3 * deviation
        found, wanted = both(latent.encode_uniform, z, low, high, bits)
        assert differing(found[0], wanted[0]) <= CODES
        got, want = both(latent.decode_uniform, wanted[0], low, high, bits)
        assert error(got[0], want[0]) <= FLOAT32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_predict_add(dtype):
    predicted, rounded = normal(2, 3, 40).to(dtype), normal(2, 3, 40, seed=1)
    found, wanted = both(predict.add, predicted, rounded)
    assert found[0].dtype == dtype
    assert error(found[0], wanted[0]) <= (BFLOAT if dtype == torch.bfloat16 else 0)
    with dispatch.forced(True):
        assert predict.add(predicted, rounded) is predicted


@pytest.mark.parametrize("size, blocks, count", [(64, 2, 128), (80, 4, 1), (96, 3, 40), (128, 2, 33)])
@pytest.mark.parametrize("rows", [False, True])
def test_feedback(size, blocks, count, rows):
    group = size // blocks
    moves = normal(*([3] * rows), 2, size - group, group, seed=1) / size**0.5
    found, wanted = both(feedback.follow, normal(3, 2, size, count), moves, normal(3, 2, group, count, seed=2))
    assert error(found[0], wanted[0]) <= FLOAT32
    assert not torch.equal(wanted[0], normal(3, 2, size, count))
    with dispatch.forced(True):
        turned = normal(3, 2, size, count).mT.contiguous().mT
        assert error(feedback.follow(turned, moves, normal(3, 2, group, count, seed=2)), wanted[0]) <= FLOAT32


TURNS = [None, chain.Signed(16, 0), "matrix"]


@pytest.mark.parametrize("turn", TURNS, ids=["plain", "hadamard", "matrix"])
@pytest.mark.parametrize("width", [32, 80, 128])
def test_chains(width, turn):
    if turn == "matrix":
        turn = torch.linalg.qr(normal(width, width, seed=5)).Q.contiguous()
    x = normal(2, 3, width) * 2
    ways = [(chain.minmax, (bits,)) for bits in (1, 2, 3, 4, 8)] + [(chain.absmax, (2,))]
    ways += [(chain.nearest, (2, size)) for size in (16, 64, 256)] + [(chain.nearest, (8, 256))]
    ways += [(chain.sphere, (bits, scale)) for bits in (1, 2, 3, 4) for scale in ("plain", "norm", "least_squares")]
    for op, settings in ways:
        found, wanted = both(op, x, *settings, turn)
        assert found[0].shape == wanted[0].shape
        assert differing(found[0], wanted[0]) <= 4 * CODES, (op, settings)
        for got, want in zip(found[1:], wanted[1:], strict=True):
            assert error(got, want) <= HALF, (op, settings)


@pytest.mark.parametrize("turn", TURNS, ids=["plain", "hadamard", "matrix"])
@pytest.mark.parametrize("bits, width", [((4, 2, 2, 2), 80), ((5, 3, 3), 128), ((6, 1), 64), ((3, 2, 1, 4), 32)])
def test_angles_in_one_go(bits, width, turn):
    if turn == "matrix":
        turn = torch.linalg.qr(normal(width, width, seed=5)).Q.contiguous()
    cuts = [polar.codebook(level, wide)[0].float().to(DEVICE) for level, wide in enumerate(bits, start=1)]
    for boundaries in (None, [each + 0.01 for each in cuts]):
        found, wanted = both(chain.angles, normal(2, 3, width), bits, turn, boundaries)
        assert found[0].shape == wanted[0].shape and found[1].dtype == torch.float16
        assert differing(found[0], wanted[0]) <= 4 * CODES
        assert error(found[1], wanted[1]) <= HALF


@pytest.mark.parametrize("op, settings", [(rtn.encode_minmax, (4,)), (grid.encode, (2, 16)), (lloyd.encode, (2,))])
def test_no_rows(op, settings):
    found, wanted = both(op, torch.zeros(0, 3, 64, device=DEVICE), *settings)
    assert [x.shape for x in found] == [x.shape for x in wanted]


TESTED = [
    *(pack.pack, pack.unpack, hadamard.rotate, hadamard.rotate_back, rtn.encode_minmax, rtn.encode_absmax, rtn.decode),
    *(
        grid.encode,
        grid.decode,
        lloyd.encode,
        lloyd.decode,
        polar.encode,
        polar.encode_fitted,
        polar.decode,
        predict.add,
    ),
    *(latent.encode_gaussian, latent.decode_gaussian, latent.encode_uniform, latent.decode_uniform),
    *(chain.minmax, chain.absmax, chain.nearest, chain.sphere, chain.angles, feedback.follow),
]
