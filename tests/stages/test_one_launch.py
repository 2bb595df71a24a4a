"""Quantizers rotate and round in one op: the same as rotating first, and on a GPU one launch."""

from dataclasses import replace

import pytest
import torch
from parity import DEVICE, normal
from tiers import some, together

from kvq_runtime.artifact.recipe_text import read
from kvq_runtime.codec.codec import Codec, Context
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import dispatch
from kvq_runtime.ops.rotation import SignedHadamard, random_matrix, rotate
from kvq_runtime.recipe import Recipe, preset
from kvq_runtime.stages.codebook import Grid, Lloyd
from kvq_runtime.stages.nuq import Nuq
from kvq_runtime.stages.polar import Polar
from kvq_runtime.stages.rotate import Hadamard, Random
from kvq_runtime.stages.rtn import Rtn

pytest.importorskip("triton")
from triton.runtime.interpreter import GridExecutor

ONE = (
    "kivi-2bit-g128",
    "rtn-2bit",
    "quarot-head-4bit",
    "higgs-head-2bit",
    "lloyd-3bit",
    "turboquant-3bit",
    "polar-3bit",
)
GEOMETRY = Geometry(1, 2, 64)
QUANTIZERS = [
    *(Rtn(2, 32), Rtn(4, "head", "absmax"), Grid(2, 16, "head"), Grid(8, 256, "all"), Lloyd(3), Polar(), Nuq(2))
]
ROTATIONS = {
    "hadamard": SignedHadamard(32, 3),
    "hadamard of several groups": SignedHadamard(128, 3),
    "random": random_matrix(64, 0).to(DEVICE),
    "random, no tile": random_matrix(8, 0).to(DEVICE),
}


@pytest.fixture
def launches(monkeypatch) -> list[str]:
    """The kernels that were launched."""
    names: list[str] = []
    run = GridExecutor.__call__

    def counted(self, *args, **settings):
        names.append(self.fn.__module__.rpartition(".")[2] + "." + self.fn.__name__)
        return run(self, *args, **settings)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    return names


def codec(recipe: Recipe, role: str) -> Codec:
    return Codec(recipe, 0, role, GEOMETRY, {}).to(torch.device(DEVICE))


def close(fields: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Codes but for a hundredth, scales within the rounding of float16."""
    assert list(fields) == list(expected)
    for name, field in fields.items():
        assert field.shape == expected[name].shape and field.dtype == expected[name].dtype
        if field.dtype == torch.uint8:
            assert float((field != expected[name]).float().mean()) <= 0.01, name
        else:
            torch.testing.assert_close(field, expected[name], rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernel"])
@pytest.mark.parametrize("quantize, rotation", together(QUANTIZERS, [*ROTATIONS]), ids=str)
def test_rotating_and_rounding_in_one_is_rotating_first(quantize, rotation, kernels):
    """In torch to the last bit."""
    rotation = ROTATIONS[rotation]
    x_NRW = normal(2, 16, GEOMETRY.width).bfloat16()
    tensors = {"points": torch.linspace(-1, 1, 4, device=DEVICE)}  # of nuq
    with dispatch.forced(kernels):
        fields = quantize.encode(x_NRW, rotation, tensors, GEOMETRY)
    with dispatch.forced(False):
        expected = quantize.encode(rotate(x_NRW, rotation), None, tensors, GEOMETRY)
    close(fields, expected)
    assert kernels or all(torch.equal(field, expected[name]) for name, field in fields.items())


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts in the interpreter, which a GPU replaces")
@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize("name", some(ONE, "kivi-2bit-g128", "rtn-2bit", "higgs-head-2bit", "lloyd-3bit", "polar-3bit"))
def test_a_flush_is_one_launch(name, role, launches):
    made, x_NTC = codec(read(name), role), normal(1, 128, 128).bfloat16()
    with dispatch.forced(True):
        assert made.one_launch(x_NTC)
        fields = made.encode(x_NTC, Context())
    assert len(launches) == 1, launches
    with dispatch.forced(False):
        close(fields, made.encode(x_NTC, Context()))


def test_what_is_no_single_launch_is_encoded_block_by_block():
    x_NTC, plain = normal(1, 128, 128), preset("quarot-head-4bit")
    with dispatch.forced(True):
        for rotation in (Hadamard("all"), Random(8)):  # over several groups, and no tile
            scheme = replace(plain.key, rotate=rotation, quantize=replace(plain.key.quantize, group=32))
            assert not codec(replace(plain, key=scheme), "key").one_launch(x_NTC)
        assert codec(plain, "key").one_launch(x_NTC)
        squat = preset("squat-2bit")
        heads, head = GEOMETRY.kv_heads, GEOMETRY.head_size
        moves = {"feedback.update_1": torch.zeros(heads, head // 2, head // 2, device=DEVICE)}
        assert squat.key.feedback is not None and squat.key.feedback.blocks == 2
        assert not Codec(squat, 0, "key", GEOMETRY, moves).one_launch(x_NTC)
    assert not codec(plain, "key").one_launch(x_NTC) or torch.cuda.is_available()
