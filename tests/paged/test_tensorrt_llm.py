"""TensorRT-LLM's connector, driven by a stand-in: what it has beyond every store's contract (test_stores.py)."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import stores
import torch
import trtllm_stand_in
from stores import BLOCK, HEADS, LAYERS, MODEL, SIZE

from kvq_runtime.engines import keeper
from kvq_runtime.prefix.coder import Coder

COUNT = 3 * BLOCK + 20
TOKENS = stores.ids(COUNT)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch):
    return stores.tensorrt_llm(monkeypatch)


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    return stores.rows(COUNT)


def serve(server: Any, rows: torch.Tensor, tokens: list[int] = TOKENS, **more: Any) -> tuple[int, torch.Tensor]:
    found = server.serve(tokens, rows[:, :, : len(tokens)], **more)
    server.written()
    return found


@pytest.mark.parametrize("more", [{"chunk": 50}, {"reuses": False}, {"tensor_parallel_size": 2}])
def test_prompts_in_chunks_answers_and_ranks_are_kept(more: dict, made, rows, tmp_path: Path):
    """What a step has computed is kept in it: later its pages may be another request's."""
    first, other = made(tmp_path, "lloyd-3bit", **more), made(tmp_path, "lloyd-3bit", **more)
    assert serve(first, rows, answer=100)[0] == 0
    count, loaded = serve(other, rows, answer=100)
    assert count == 2 * BLOCK, "of the prompt; the answer's block is kept for the next turn"
    assert torch.equal(loaded, stores.decoded("lloyd-3bit", TOKENS, rows)[:, :, : 2 * BLOCK])
    assert serve(made(tmp_path, "lloyd-3bit", **more), rows)[0] == 3 * BLOCK


def test_what_the_runtime_reuses_is_not_loaded(made, rows, tmp_path: Path):
    """Whole pages, and the first tokens of one: that is loaded whole, as tokens of a page are written together."""
    serve(made(tmp_path, "exact"), rows)
    server = made(tmp_path, "exact")
    serve(server, rows, TOKENS[: BLOCK + 75])
    other = [*TOKENS[: BLOCK + 40], *range(7, 57)]
    assert serve(server, rows, other)[0] == 0, "1 block and 40 tokens are in pages"
    count, loaded = serve(server, rows)
    assert count == 3 * BLOCK - (BLOCK + 64) and torch.equal(loaded, rows[:, :, : 3 * BLOCK])
    fourth = made(tmp_path, "exact")
    serve(fourth, rows, [*TOKENS[: BLOCK + 40], *range(7, 57)])
    count, loaded = serve(fourth, rows)
    assert count == 3 * BLOCK - (BLOCK + 40) and torch.equal(loaded, rows[:, :, : 3 * BLOCK])


def test_a_promise_is_kept_whatever_becomes_of_the_folder(made, rows, tmp_path: Path, monkeypatch):
    """In slices, one a step; between the promise and the load every file goes."""
    monkeypatch.setattr(keeper, "SLICE", BLOCK)
    serve(made(tmp_path, "kivi-2bit"), rows)
    server = made(tmp_path, "kivi-2bit")
    allocated = server.scheduler.update_state_after_alloc

    def late(*given: Any) -> None:
        for path in stores.files(tmp_path):
            path.unlink()
        allocated(*given)

    monkeypatch.setattr(server.scheduler, "update_state_after_alloc", late)
    count, loaded = serve(server, rows)
    assert count == 3 * BLOCK and torch.equal(loaded, stores.decoded("kivi-2bit", TOKENS, rows))


def test_a_promise_that_cannot_be_kept_ends_the_server(made, rows, tmp_path: Path, monkeypatch):
    """Nothing tells TensorRT-LLM to compute what it counts as computed: a wrong answer would follow."""
    serve(made(tmp_path, "exact"), rows)
    server = made(tmp_path, "exact")

    def broken(*given: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Coder, "decode", broken)
    with pytest.raises(RuntimeError, match="promised cannot be decoded"):
        serve(server, rows)


@pytest.mark.parametrize("other", [
    {"lora_task_id": 3}, {"multimodal_hashes": [[1]]}, {"prompt_embedding_table": torch.zeros(1)},
    {"is_dummy_request": True}, {"py_multimodal_data": {"image": 1}}, {"cache_salt_id": 5},
])  # fmt: skip
def test_what_tokens_alone_do_not_decide_is_not_shared(other: dict, made, rows, tmp_path: Path):
    serve(made(tmp_path, "exact"), rows, **other)
    assert serve(made(tmp_path, "exact"), rows)[0] == 0
    assert serve(made(tmp_path, "exact"), rows, **other)[0] == (3 * BLOCK if "cache_salt_id" in other else 0)


def test_the_newest_tokens_are_computed_unless_told_otherwise(made, rows, tmp_path: Path, monkeypatch):
    serve(made(tmp_path, "exact"), rows)
    connector = trtllm_stand_in.installed(monkeypatch)
    monkeypatch.setenv(connector.OPTION, json.dumps({"path": str(tmp_path), "recipe": "exact"}))
    server = trtllm_stand_in.Runtime(connector, trtllm_stand_in.arguments(str(MODEL)), LAYERS, HEADS, SIZE)
    assert serve(server, rows)[0] == 2 * BLOCK


OPTIONS = '{"path": "kept", "recipe": "exact"}'


@pytest.mark.parametrize(("args", "option", "message"), [
    ({"pipeline_parallel_size": 2}, OPTIONS, "tensor parallelism alone"),
    ({"enable_attention_dp": True}, OPTIONS, "tensor parallelism alone"),
    ({"speculative_config": SimpleNamespace()}, OPTIONS, "drop speculative_config"),
    ({"attn_backend": "FLASHINFER"}, OPTIONS, "attn_backend TRTLLM alone"),
    ({"use_kv_cache_manager_v2": "auto"}, OPTIONS, "use_kv_cache_manager_v2: false"),
    ({"enable_block_reuse": False}, OPTIONS, "enable_block_reuse: true"),
    ({"host_cache_size": 1 << 30}, OPTIONS, "host_cache_size"),
    ({"max_attention_window": [128, 4096]}, OPTIONS, "max_attention_window"),
    ({"dtype": "fp8"}, OPTIONS, "in fp8 are not kept"), ({"tensor_parallel_size": 3}, OPTIONS, "3 workers"),
    ({"tokens_per_block": 48}, OPTIONS, "tokens_per_block"), ({"model": "no/where"}, OPTIONS, "no config.json"),
    ({}, "", "set KVQ_PREFIXES"), ({}, "[]", "no JSON object"), ({}, "{", "KVQ_PREFIXES"),
    ({}, '{"path": "x", "recipe": "exact", "salt": "s"}', "has salt"),
])  # fmt: skip
def test_what_cannot_be_kept_stops_the_start(args: dict, option: str, message: str, tmp_path: Path, monkeypatch):
    connector = trtllm_stand_in.installed(monkeypatch)
    monkeypatch.setenv(connector.OPTION, option)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        arguments = trtllm_stand_in.arguments(**{"model": str(MODEL)} | args)
        trtllm_stand_in.Runtime(connector, arguments, LAYERS, HEADS, SIZE)


LATENT = {"kv_lora_rank": 512, "dtype": "bfloat16"}
POOLED = {"model_type": "deepseek_v4", "num_hidden_layers": 1, "head_dim": 512, "compress_ratios": [4],
          "dtype": "bfloat16"}  # fmt: skip


@pytest.mark.parametrize("config, why", [(LATENT, "latents"), (POOLED, "entries of several tokens")])
def test_latents_and_entries_stop_the_start(config, why, tmp_path: Path, monkeypatch):
    connector = trtllm_stand_in.installed(monkeypatch)
    monkeypatch.setenv(connector.OPTION, OPTIONS)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"caches {why}"):
        connector.Worker(trtllm_stand_in.arguments(str(tmp_path)))


@pytest.mark.parametrize(("layers", "dtype"), [(LAYERS + 1, torch.bfloat16), (LAYERS, torch.float8_e4m3fn)])
def test_a_pool_of_another_shape_is_refused(layers: int, dtype: torch.dtype, tmp_path: Path, monkeypatch):
    """Of layers that a draft model has, or of pages in 8 bits."""
    connector = trtllm_stand_in.installed(monkeypatch)
    monkeypatch.setenv(connector.OPTION, json.dumps({"path": str(tmp_path), "recipe": "exact"}))
    worker = connector.Worker(trtllm_stand_in.arguments(str(MODEL)))
    with pytest.raises(ValueError, match="the pool's pages are"):
        worker.register_kv_caches(torch.zeros(4, layers, 2, HEADS * 32 * SIZE).to(dtype))


def test_recipes_after_rope_need_no_transformers(tmp_path: Path, monkeypatch):
    """TensorRT-LLM pins a release of its own."""
    connector = trtllm_stand_in.installed(monkeypatch)
    monkeypatch.setitem(sys.modules, "kvq_runtime.hf.model", None)
    for recipe in ("kivi-2bit", "exact-pre"):
        monkeypatch.setenv(connector.OPTION, json.dumps({"path": str(tmp_path), "recipe": recipe}))
        if recipe == "kivi-2bit":
            connector.Scheduler(trtllm_stand_in.arguments(str(MODEL)))
        else:
            with pytest.raises(ValueError, match="exact-pre: turning keys back needs the extra hf"):
                connector.Scheduler(trtllm_stand_in.arguments(str(MODEL)))
