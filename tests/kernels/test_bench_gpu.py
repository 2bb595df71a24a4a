"""The GPU benchmark's cases, bytes and settings, on a machine that has none; the rest of it where there is a GPU."""

import json

import pytest
import torch

pytest.importorskip("triton")
from benchmarks import cases, clock, gpu
from kvq_runtime.kernels.attend.launch import layout
from kvq_runtime.recipe import preset


def test_every_family_has_a_kernel_for_every_model():
    for model in cases.MODELS:
        for name in cases.FAMILIES:
            recipe = preset(name)
            assert layout(recipe.key, recipe.window.block, model.geometry, "key") is not None, name
            assert layout(recipe.value, recipe.window.block, model.geometry, "value") is not None, name


def test_bytes_of_a_case():
    case = cases.Case(cases.MODELS[0], "kivi-2bit-g128", 2048, 2)
    blocks = (2048 - 192) // 128
    held = 0
    for scheme in (case.schemes().key, case.schemes().value):
        slab = cases.random_slab(scheme, 128, case.model.geometry, case.batch, blocks, torch.device("cpu"))
        held += sum(field.numel() * field.element_size() for field in slab.values())
    assert case.packed() == held
    assert case.dense() == 2 * 2 * 2 * 2048 * 1024
    assert case.exact() == 2 * 2 * 2 * (2048 - 128 * blocks) * 1024


def test_dry_run_lists_the_cases(capsys):
    assert gpu.main(["--dry-run", "--recipes", "higgs-head-2bit", "--lengths", "2048,131072", "--batches", "1,64"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {(row["model"], row["tokens"], row["batch"]) for row in rows} == {
        ("llama-3.1-8b", 2048, 1), ("llama-3.1-8b", 2048, 64), ("llama-3.1-8b", 131072, 1),
        ("qwen2.5-7b", 2048, 1), ("qwen2.5-7b", 2048, 64), ("qwen2.5-7b", 131072, 1),
    }  # fmt: skip
    assert all(4 < row["bytes_ratio"] < 8 for row in rows if row["tokens"] == 131072)


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 1
    assert "--dry-run" in capsys.readouterr().err


@pytest.mark.slow
def test_a_step_runs_as_it_is_timed():
    small = cases.Model("small", 4, 2, 64)
    case = cases.Case(small, "mean-higgs-head-2bit-post", 272, 1, window=16)
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
