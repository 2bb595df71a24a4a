"""The GPU benchmark's cases, bytes and settings, on a machine that has none; the rest of it where there is a GPU."""

import pytest
import torch

pytest.importorskip("triton")
from benchmarks import cases, clock, gpu
from kvq_runtime.recipe import preset


def test_every_family_has_a_kernel_for_every_model():
    for model in cases.MODELS:
        for name in cases.FAMILIES:
            recipe = cases.counted(preset(name), model.geometry)
            assert None not in cases.layouts(recipe, model.geometry), name


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["mean-higgs-head-2bit-post", "fisher-head-2.5bit"])
def test_a_step_runs_as_it_is_timed(recipe):
    small = cases.Model("small", 4, 2, 64)
    case = cases.Case(small, recipe, 272, 1, window=16)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    q = torch.randn(1, 4, 1, 64, dtype=torch.bfloat16, device=device)
    out, level = cases.built(case, device)(q)
    assert out.shape == q.shape and bool(torch.isfinite(out).all()) and bool(torch.isfinite(level).all())


@pytest.mark.gpu
def test_a_step_is_one_graph():
    case = cases.Case(cases.MODELS[0], "kivi-2bit-g128", 4096, 1)
    step = cases.built(case, torch.device("cuda"))
    q = torch.randn(1, 32, 1, 128, dtype=torch.bfloat16, device="cuda")
    wanted = step(q)[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(q)[0]
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)
    assert gpu.Attention(clock.Rates(1e12, 1e12, 1e14, 1.0)).measure(case)["microseconds"] > 0
