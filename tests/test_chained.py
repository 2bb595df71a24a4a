"""Where one launch encodes a flush, its fields are those of the stages one by one."""

from dataclasses import replace

import pytest
import torch
from parity import DEVICE, normal

from kvq_runtime import chained
from kvq_runtime.codec import Codec, Context
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops import dispatch
from kvq_runtime.recipe import Recipe, preset

pytest.importorskip("triton")
from triton.runtime.interpreter import GridExecutor

ONE = (
    *("kivi-2bit-g128", "rtn-3bit", "rtn-absmax-4bit", "quarot-head-4bit", "higgs-head-2bit", "higgs-head-1.5bit"),
    *("lloyd-3bit", "turboquant-3bit", "polar-paper", "polar-3bit", "polar-hadamard"),
)


@pytest.fixture
def launches(monkeypatch) -> list[str]:
    """The kernels that were launched."""
    found: list[str] = []
    run = GridExecutor.__call__

    def counted(self, *args, **settings):
        found.append(self.fn.__module__.rpartition(".")[2] + "." + self.fn.__name__)
        return run(self, *args, **settings)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    return found


def encoded(recipe: Recipe, half: str, x: torch.Tensor, kernels: bool) -> dict[str, torch.Tensor]:
    codec = Codec(recipe, 0, half, Geometry(1, 2, x.shape[-1] // 2), {}).to(torch.device(DEVICE))
    with dispatch.forced(kernels):
        return codec.encode(x, Context())


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts in the interpreter, which a GPU replaces")
@pytest.mark.parametrize("half", ["key", "value"])
@pytest.mark.parametrize("name", ONE)
def test_a_flush_is_one_launch(name, half, launches):
    recipe = preset(name)
    x = normal(1, getattr(recipe, half).block, 128).bfloat16()
    found = encoded(recipe, half, x, True)
    assert len(launches) == 1, launches
    wanted = encoded(recipe, half, x, False)
    assert list(found) == list(wanted)
    for field, given in found.items():
        assert given.shape == wanted[field].shape and given.dtype == wanted[field].dtype
        if given.dtype == torch.uint8:
            assert float((given != wanted[field]).float().mean()) <= 0.01
        else:
            torch.testing.assert_close(given, wanted[field], rtol=2e-3, atol=1e-6)


def test_what_comes_before_the_codes_goes_stage_by_stage(launches):
    """A prediction or feedback is not in the one launch."""
    recipe = preset("kivi-2bit-g128")
    feedback = replace(recipe.key, feedback=preset("squat-2bit").key.feedback)

    assert chained.encoder(feedback, Geometry(1, 2, 64)) is None
    assert chained.encoder(recipe.key, Geometry(1, 2, 64)) is not None
