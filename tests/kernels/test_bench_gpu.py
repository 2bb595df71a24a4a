"""The GPU benchmark's cases, bytes and settings, on a machine that has none; the rest of it where there is a GPU."""

import csv
import json
from collections import defaultdict
from contextlib import nullcontext
from itertools import product

import pytest
import torch

pytest.importorskip("triton")
from transformers import LlamaConfig

from benchmarks import cases, clock, generation, gpu, measure, report
from kvq_runtime.geometry import ROLES, Geometry
from kvq_runtime.hf.model import CACHE
from kvq_runtime.kernels.attend import launch
from kvq_runtime.kernels.attend.launch import Layout, constants, layout
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
    measure.write(measured)
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
    hows = measure.candidates(keys, values, 4)
    assert hows[0] == launch.default(keys, values, 4) and len(hows) == len(set(hows)) >= 6
    varied = {64}, {1}, {168, 255}
    if not keys.rounded:
        varied = {16, 32, 64, 128}, {1, 2, 4, 8}, {255}
    assert ({how.tile for how in hows}, {how.warps for how in hows}, {how.registers for how in hows}) == varied


def test_the_fastest_setting_wins_until_the_deadline(monkeypatch):
    hows = [launch.Launch(tile, 2, 1) for tile in (64, 32, 16)]
    monkeypatch.setattr(measure.time, "monotonic", iter([0.0, 2.0]).__next__)

    def step(how: launch.Launch) -> float:
        if how.tile == 32:
            raise RuntimeError("too large")
        return 5.0

    assert list(measure.tried(step, hows, 1.0)) == [(hows[0], 5.0), (hows[1], "RuntimeError")]


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
        layer, *kernel = constants(keys, values, rows, 4, launch.Launch())
        for arch in (80, 90):
            measured[launch.key(arch, keys, values, rows)].add((arch, layer.M, keys.adds_mean, *kernel))
    assert len(measured) > 60 and all(len(kernels) == 1 for kernels in measured.values())


def test_every_family_has_its_instructions_counted():
    with (report.RESULTS / "kernels_aot.csv").open() as file:
        named = {line["kernel"] for line in csv.DictReader(file) if line["instructions_per_element"]}
    assert {f"attend {name}" for name in cases.FAMILIES} <= named


SMALL = LlamaConfig(
    hidden_size=64, intermediate_size=64, num_hidden_layers=2, vocab_size=64, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=1024,
)  # fmt: skip
GIVEN = ["--models", "small", "--recipes", "kivi-2bit-g128", "--prompt", "400", "--new", "3", "--device", "cpu"]


@pytest.fixture
def generated(tmp_path, monkeypatch):
    """What a call of benchmarks.generation with a small model adds to its results."""
    monkeypatch.setattr(generation, "CONFIGS", {"small": SMALL})
    out = tmp_path / "found.jsonl"

    def run(*given: str) -> list[dict]:
        before = len(list(report.read(out)))
        assert generation.main([*GIVEN, "--out", str(out), *given]) == 0
        return list(report.read(out))[before:]

    return run


def test_generation_measures_every_cache(generated):
    rows = generated("--batches", "2,1")
    names = ["kivi-2bit-g128", "static", "static unmasked", "dynamic"]
    assert [(row["batch"], row["cache"]) for row in rows] == list(product([2, 1], names))
    assert all(0 < row["low_ms"] <= row["ms_per_step"] <= row["high_ms"] <= row["worst_ms"] for row in rows)
    of = {(row["cache"], row["batch"]): row for row in rows}
    token = 2 * 2 * 2 * 32  # bytes of a row: layers, keys and values, bfloat16, width
    assert of["dynamic", 2]["cache_bytes"] == 2 * (403 + generation.WARM) * token
    assert of["static", 2]["cache_bytes"] == 2 * (403 + generation.SPARE) * token
    assert of["kivi-2bit-g128", 2]["cache_bytes"] > of["kivi-2bit-g128", 1]["cache_bytes"]


def test_generation_does_what_is_missing(generated):
    generated("--batches", "1")
    assert {row["batch"] for row in generated("--batches", "1,2")} == {2}
    assert generated("--batches", "1,2") == []
    assert len(generated("--batches", "1", "--again")) == 4
    assert [row["what"] for row in generated("--batches", "1", "--again", "--minutes", "0")] == ["stopped"]


def test_what_is_out_of_memory_takes_no_larger_batch(generated, monkeypatch):
    asked = []

    def generate(model, way, batch, prompt, new):
        asked.append((way.cache, batch))
        if way.cache == "dynamic" and batch > 1:
            raise torch.OutOfMemoryError("too much")
        raise ValueError("something else")

    monkeypatch.setattr(generation, "generate", generate)
    rows = generated("--batches", "1,2,4")
    assert [batch for cache, batch in asked if cache == "dynamic"] == [1, 2]
    assert [batch for cache, batch in asked if cache == "static"] == [1, 2, 4], "other errors say nothing of the next"
    assert sum("error" in row for row in rows) == 10 and sum("out_of_memory" in row for row in rows) == 1


def test_a_model_that_cannot_be_made_ends_the_run(generated, monkeypatch):
    def warm(model, prompt):
        raise RuntimeError("no such weights")

    monkeypatch.setattr(generation, "warm", warm)
    with pytest.raises(RuntimeError, match="no such weights"):
        generated("--batches", "1")


def test_most_rows_are_for_a_gpu(capsys):
    assert generation.main([*GIVEN, "--batches", "1,most"]) == 2
    assert list(generation.batches("8,1,32,most"))[:5] == [8, 1, 32, 64, 128]


def small_model(attention: str):
    model = generation.random_model("small", "cpu").float()
    model.set_attn_implementation(attention)
    return model


def test_a_batch_is_one_row_repeated(monkeypatch):
    """A prompt is taken in once: then every row of every cache gives what the row alone gives."""
    monkeypatch.setattr(generation, "CONFIGS", {"small": SMALL})
    ids = torch.randint(64, (1, 300), generator=torch.Generator().manual_seed(1))
    for way in generation.ways(["kivi-2bit-g128"], gpu=False):
        if way.cache == "static unmasked":
            continue
        model = small_model(way.attention)
        found = []
        for rows in (1, 3):
            cache = way.make(model, 310)
            with torch.inference_mode():
                model(ids, past_key_values=cache)
                generation.repeat(cache, rows)
                token, place = torch.full((rows, 1), 5), torch.full((rows, 1), 300)
                found.append(model(token, position_ids=place, past_key_values=cache).logits)
        assert torch.allclose(found[1], found[0].expand(3, -1, -1), atol=1e-5), way


def test_a_recorded_step_of_a_static_cache(monkeypatch):
    """Replayed, it generates what steps of a DynamicCache do: tokens, places and the buffer's end go on together."""
    monkeypatch.setattr(generation, "CONFIGS", {"small": SMALL})
    model = small_model("sdpa")
    ids = torch.randint(64, (1, 300), generator=torch.Generator().manual_seed(1))

    def capture(call):
        """What a graph is: recorded without being run; replayed from the same tensors into the same result."""
        held = [layer.cumulative_length.clone() for layer in cache.layers]
        out = call()
        for layer, length in zip(cache.layers, held, strict=True):
            layer.cumulative_length.copy_(length)
        return out.fill_(-1), lambda: out.copy_(call())

    monkeypatch.setattr(generation, "captured", capture)
    monkeypatch.setattr(generation, "unsynchronized", nullcontext)
    said = {}
    for way in (generation.Way("dynamic", "sdpa", False), generation.Way("static", "sdpa", True)):
        cache = way.make(model, 320)
        with torch.inference_mode():
            model(ids, past_key_values=cache)
            token, place, found = torch.full((1, 1), 5), torch.full((1, 1), 300), []

            def step(cache=cache, token=token, place=place) -> torch.Tensor:
                return model(token, position_ids=place, past_key_values=cache).logits[:, -1:].argmax(-1)

            forward = generation.recorded(cache, step, token, place) if way.graph else step
            if not way.graph:
                token.copy_(step())  # that one is taken before the graph is recorded
                place += 1
            for _ in range(8):
                token.copy_(forward())
                place += 1
                found.append(int(token))
        said[way.cache] = found
    assert said["static"] == said["dynamic"] and len(set(said["static"])) > 1


def test_the_unmasked_buffer_is_read_whole(monkeypatch):
    """Without a mask a step reads every token of the buffer: as fast as a full one, and right where it is full."""
    monkeypatch.setattr(generation, "CONFIGS", {"small": SMALL})
    ids = torch.randint(64, (1, 300), generator=torch.Generator().manual_seed(1))
    last = []
    for name, attention, room in (
        *(("static", "sdpa", 301), ("static unmasked", "unmasked", 301), ("static unmasked", "unmasked", 310)),
    ):
        model = small_model(attention)
        cache = generation.Way(name, attention, False).make(model, room)
        with torch.inference_mode():
            model(ids, past_key_values=cache)
            step = {"position_ids": torch.full((1, 1), 300), CACHE: cache}
            last.append(model(torch.full((1, 1), 5), **step).logits)
    assert torch.allclose(last[0], last[1], atol=1e-5) and not torch.allclose(last[0], last[2], atol=1e-5)


def test_generation_is_rehearsed_with_the_heads_of_the_model(monkeypatch):
    monkeypatch.setattr(generation, "CONFIGS", {"small": SMALL})
    seen = []
    monkeypatch.setattr(generation, "generate", lambda *given: seen.append(given))
    generation.rehearse("small", "kivi-2bit-g128", 8, 400, torch.device("cpu"))
    model, way, batch, prompt, new = seen[0]
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (1, 4, 2)
    assert (config.head_dim, way.cache, way.attention, batch, prompt) == (16, "kivi-2bit-g128", "kvq", 8, 400)
    assert new > 128, "a block is encoded"


def test_what_was_measured_is_drawn(tmp_path):
    report.main(
        [
            str(report.RESULTS / "gpu-nvidia-h200.jsonl"),
            "--plot",
            str(tmp_path / "picture.png"),
            "--model",
            "qwen2.5-7b",
        ]
    )
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    drawn = report.speed_figure
    found = [
        {"what": "attend", "recipe": recipe, "tokens": tokens, "batch": 1, "speed_up": speed_up}
        for recipe, tokens, speed_up in (("rtn-2bit", 4096, 2.0), ("rtn-2bit", 2048, 0.5), ("polar-3bit", 2048, 0.4))
    ]
    (axis,) = drawn(found, "").axes
    assert [line.get_xydata().tolist() for line in axis.lines[:2]] == [[[2048, 0.5], [4096, 2.0]], [[2048, 0.4]]]


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
    assert measure.Attention(clock.Rates(1e12, 1e12, 1e14, 1.0)).measure(case)["microseconds"] > 0
