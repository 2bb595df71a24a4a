"""vLLM's connector by its parts: what one server keeps another loads, and nothing else."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import stores
import torch
from stores import BLOCK, MODEL, VLLM

from kvq_runtime.prefix.block_folder import Folder

COUNT = 5 * BLOCK + 20
TOKENS = stores.ids(COUNT)


@pytest.fixture(scope="module")
def aqua(tmp_path_factory: pytest.TempPathFactory) -> str:
    return stores.aqua(tmp_path_factory.mktemp("aqua"))


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    return stores.rows(COUNT)


def kept(folder: Path, recipe: str, rows: torch.Tensor, tokens: list[int] = TOKENS, **more: Any) -> int:
    """How many tokens a new server loads; what it computes is kept when this returns."""
    server = VLLM(folder, recipe, **more)
    count = server.serve(tokens, rows[:, :, : len(tokens)])[0]
    server.written()
    return count


@pytest.mark.parametrize("name", ["exact", "kivi-2bit", "lloyd-3bit", "aqua-2bit"])
def test_another_server_loads_what_the_store_decodes(name: str, aqua: str, rows, tmp_path: Path):
    """Whole blocks; by channel, by token, and before RoPE with each layer predicted from those below."""
    recipe = aqua if name == "aqua-2bit" else name
    assert kept(tmp_path, recipe, rows) == 0
    count, loaded = VLLM(tmp_path, recipe).serve(TOKENS, rows)
    assert count == 5 * BLOCK and torch.equal(loaded, stores.decoded(recipe, TOKENS, rows))


def test_a_block_that_is_not_full_is_not_kept(rows, tmp_path: Path):
    assert kept(tmp_path, "exact", rows, TOKENS[: 2 * BLOCK + 70]) == 0
    assert len(stores.files(tmp_path)) == 2
    assert kept(tmp_path, "exact", rows) == 2 * BLOCK
    assert kept(tmp_path, "exact", rows) == 5 * BLOCK


def test_another_token_ends_what_is_found(rows, tmp_path: Path):
    kept(tmp_path, "exact", rows)
    other = [*TOKENS[: 2 * BLOCK + 9], 7, *TOKENS[2 * BLOCK + 10 :]]
    count, loaded = VLLM(tmp_path, "exact").serve(other, rows)
    assert count == 2 * BLOCK and torch.equal(loaded, rows[:, :, : 2 * BLOCK])
    assert kept(tmp_path, "exact", rows, TOKENS[1:]) == 0, "no token is where it was"


def test_other_recipes_models_and_tenants_find_nothing(rows, tmp_path: Path, monkeypatch):
    kept(tmp_path / "kept", "exact", rows)
    shutil.copytree(MODEL, tmp_path / "model")
    assert kept(tmp_path / "kept", "exact", rows, model=tmp_path / "model") == 5 * BLOCK, "the same elsewhere"
    weights = safetensors.torch.load_file(tmp_path / "model" / "model.safetensors")
    safetensors.torch.save_file({n: x * 1.01 for n, x in weights.items()}, tmp_path / "model" / "model.safetensors")
    assert kept(tmp_path / "kept", "exact", rows, model=tmp_path / "model") == 0
    assert kept(tmp_path / "kept", "lloyd-3bit", rows) == 0
    monkeypatch.setenv("KVQ_PREFIX_SALT", "another")
    assert kept(tmp_path / "kept", "exact", rows) == 0


def test_a_damaged_block_ends_what_is_loaded_and_is_written_again(rows, tmp_path: Path, caplog):
    kept(tmp_path, "exact", rows)
    third = stores.files(tmp_path)[2]
    data = bytearray(third.read_bytes())
    data[-1] ^= 1
    third.write_bytes(data)
    server = VLLM(tmp_path, "exact")
    count, loaded = server.serve(TOKENS, rows)
    server.written()
    assert count == 2 * BLOCK and torch.equal(loaded, rows[:, :, : 2 * BLOCK])
    assert "damaged, and removed" in caplog.text
    assert kept(tmp_path, "exact", rows) == 5 * BLOCK


def test_a_full_disk_costs_the_blocks_and_no_request(rows, tmp_path: Path, monkeypatch, caplog):
    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Folder, "put", full)
        assert kept(tmp_path, "exact", rows) == 0
    assert "No space left" in caplog.text and not stores.files(tmp_path)
    assert kept(tmp_path, "exact", rows) == 0
    assert kept(tmp_path, "exact", rows) == 5 * BLOCK


def test_what_is_not_finite_is_not_kept(rows, tmp_path: Path, caplog):
    broken = rows.clone()
    broken[0, 3, 4 * BLOCK + 5] = float("nan")
    kept(tmp_path, "exact", broken)
    assert "NaN" in caplog.text and kept(tmp_path, "exact", rows) == 4 * BLOCK


@pytest.mark.parametrize("recipe", ["subkv-2bit", "aqua-2bit", "no-such-recipe"])
def test_a_recipe_that_cannot_be_kept_stops_the_start(recipe: str, tmp_path: Path):
    """It depends on how tokens arrive; it is not fitted; there is none."""
    with pytest.raises((ValueError, RuntimeError), match=recipe):
        VLLM(tmp_path, recipe)


def test_an_artifact_of_another_model_stops_the_start(aqua: str, tmp_path: Path):
    config = json.loads((MODEL / "config.json").read_text()) | {"rope_theta": 7.0, "rope_parameters": None}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises((ValueError, RuntimeError), match="fingerprint"):
        VLLM(tmp_path / "kept", aqua, model=tmp_path / "model")
