"""The GPU benchmark's cases, bytes and settings, on a machine that has none; the rest of it where there is a GPU."""

import csv
import json
from collections import defaultdict
from itertools import product

import pytest
import torch

pytest.importorskip("triton")
from transformers import LlamaConfig

from benchmarks import cases, generation, gpu, lines, settings
from kvq_runtime.geometry import ROLES, Geometry
from kvq_runtime.kernels.attend import launch
from kvq_runtime.kernels.attend.host import Layout, constants, layout
from kvq_runtime.recipe import preset


def test_every_family_has_a_kernel_for_every_model():
    for model in cases.MODELS:
        for name in cases.FAMILIES:
            recipe = preset(name)
            assert layout(recipe.key, recipe.window.block, model.geometry, "key", recipe.position) is not None, name
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


@pytest.mark.parametrize("name", ["kivi-2bit-g128", "higgs-head-2bit", "squat-pre-2bit", "mean-higgs-head-2bit-post"])
def test_a_step_runs_as_it_is_timed(name):
    small = cases.Model("small", 4, 2, 64)
    case = cases.Case(small, name, 400, 2, window=16)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    q = torch.randn(2, 4, 1, 64, dtype=torch.bfloat16, device=device)
    out, level = cases.built(case, device)(q)
    assert out.shape == q.shape and bool(torch.isfinite(out).all()) and bool(torch.isfinite(level).all())


def test_settings_are_stored_and_read(tmp_path, monkeypatch):
    measured = {"sm90-d128-x": launch.Launch(128, 8, 3)}
    monkeypatch.setattr(launch, "__file__", str(tmp_path / "launch.py"))
    settings.write(measured)
    stored = json.loads((tmp_path / "launch.json").read_text())
    assert {name: launch.Launch(**given) for name, given in stored.items()} == launch.table() | measured


@pytest.mark.parametrize("name", cases.FAMILIES)
def test_settings_are_tried_from_the_default_on(name):
    geometry, recipe = cases.MODELS[0].geometry, preset(name)
    keys, values = (
        layout(recipe.key, recipe.window.block, geometry, "key", recipe.position),
        layout(recipe.value, recipe.window.block, geometry, "value"),
    )
    assert keys is not None and values is not None
    hows = settings.candidates(keys, values, 4)
    assert hows[0] == launch.default(keys, values, 4) and len(hows) == len(set(hows)) >= 12
    assert {how.tile for how in hows} == ({64} if keys.rounded else {16, 32, 64, 128})


def test_the_fastest_setting_wins_until_the_deadline(monkeypatch):
    hows = [launch.Launch(tile, 2, 1) for tile in (64, 32, 16)]
    monkeypatch.setattr(settings.time, "monotonic", iter([0.0, 2.0]).__next__)

    def step(how: launch.Launch) -> float:
        if how.tile == 32:
            raise RuntimeError("too large")
        return 5.0

    assert list(settings.tried(step, hows, 1.0)) == [(hows[0], 5.0), (hows[1], "RuntimeError")]


def layouts(name: str, size: int = 128) -> tuple[Layout, Layout]:
    recipe, geometry = preset(name), Geometry(1, 8, size)
    keys, values = (
        layout(scheme, recipe.window.block, geometry, role, recipe.position)
        for role, scheme in zip(ROLES, (recipe.key, recipe.value), strict=True)
    )
    assert keys is not None and values is not None
    return keys, values


@pytest.mark.parametrize(
    "name, rows, key",
    [
        ("rtn-4bit", 8, "sm90-d128-token4g128-token4g128-m8"),
        ("kivi-2bit-g128", 8, "sm90-d128-channel2g128-token2g128-m8"),
        ("squat-pre-2bit", 1, "sm90-d128-pre_rope2g32-token2g32-m8"),
        ("higgs-head-4bit", 4, "sm90-d128-codebook8x2-codebook8x2-m8"),
        ("mean-higgs-head-4bit-post", 4, "sm90-d128-codebook8x2-mean-codebook8x2-m8"),
        ("polar-paper", 4, "sm90-d128-pairs4222-pairs4222-m8"),
    ],
)
def test_the_key_of_a_setting(name, rows, key):
    assert launch.key(90, *layouts(name), rows) == key


def test_settings_are_told_apart():
    """By architecture, head size, how keys and values are read, and the tile of query rows; one key is one kernel."""
    measured = defaultdict(set)
    for name, size, rows in product(cases.FAMILIES, (64, 128), (4, 7, 8, 9, 32, 64)):
        keys, values = layouts(name, size)
        layer, *kernel = constants(keys, values, 1, rows, 4, 1, launch.Launch())
        for arch in (80, 90):
            measured[launch.key(arch, keys, values, rows)].add((arch, layer.M, keys.adds_mean, *kernel))
    assert len(measured) > 100 and all(len(kernels) == 1 for kernels in measured.values())


def test_every_family_has_its_instructions_counted():
    with (lines.RESULTS / "kernels_aot.csv").open() as file:
        named = {line["kernel"] for line in csv.DictReader(file) if line["instructions_per_element"]}
    assert {f"attend {name}" for name in cases.FAMILIES} <= named


def test_generation_measures_every_cache(tmp_path, monkeypatch):
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    config = LlamaConfig(**small, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024)
    monkeypatch.setattr(generation, "CONFIGS", {"small": config})
    given = ["--models", "small", "--recipes", "kivi-2bit-g128", "--prompt", "400", "--new", "3", "--batches", "1,2"]
    out = tmp_path / "found.jsonl"
    assert generation.main([*given, "--device", "cpu", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["cache"], row["batch"]) for row in rows] == [
        ("dynamic", 1), ("dynamic", 2), ("kivi-2bit-g128", 1), ("kivi-2bit-g128", 2)
    ]  # fmt: skip
    assert all(row["tokens_per_s"] > 0 for row in rows)
    assert rows[1]["cache_bytes"] == 2 * 2 * 2 * 403 * 32 * 2  # rows, layers, keys and values, tokens, width, bfloat16
    assert generation.main([*given, "--device", "cpu", "--batches", "1,most"]) == 2


@pytest.mark.gpu
def test_a_step_is_one_graph():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
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
    assert gpu.attend(case, 1e12, 1e14)["microseconds"] > 0
