"""Options of the connector, and which parts of a model its stores are of."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tiny_artifact import tiny

from kvq_runtime.artifact import artifact
from kvq_runtime.engines import worker
from kvq_runtime.engines.worker import Served, Settings
from kvq_runtime.errors import ArtifactError
from kvq_runtime.hf.model import rotary_of_config


@pytest.fixture
def served(demo_model: Path) -> Served:
    config = json.loads((demo_model / "config.json").read_text())

    def rotary():
        from transformers import AutoConfig

        return rotary_of_config(AutoConfig.from_pretrained(demo_model), torch.bfloat16)

    return Served(config, str(demo_model), None, torch.bfloat16, None, rotary)


def names(stores: list) -> list[str]:
    return [one.root for one in stores]


def test_a_worker_has_its_part_and_a_scheduler_all(served: Served, tmp_path: Path):
    """Parts share nothing but the folder, and as many servers as wanted find the same ones."""
    given = Settings(str(tmp_path), "higgs-2bit")
    whole, both = worker.opened(given, served, "a server", 1), worker.opened(given, served, "a server", 2)
    assert [one.format.geometry.kv_heads for one in (*whole, *both)] == [2, 1, 1]
    assert len({*names(whole), *names(both)}) == 3
    for rank in (0, 1):
        assert names(worker.opened(given, served, "a server", 2, rank)) == names(both)[rank : rank + 1]
    assert (
        names(worker.opened(given, served, "a server", 4, 3)) == names(both)[1:]
    )  # more workers than heads: two have the same
    before = worker.opened(Settings(str(tmp_path), "exact-pre"), served, "a server", 2, 1)
    assert whole[0].codec.rotary is None and before[0].codec.rotary is not None


def test_other_weights_configurations_and_salts_find_nothing(served: Served, tmp_path: Path, monkeypatch):
    given = Settings(str(tmp_path / "kept"), "rtn-2bit")
    first = names(worker.opened(given, served, "a server", 1))
    assert names(worker.opened(given, served, "a server", 1)) == first
    shutil.copytree(served.name, tmp_path / "model")
    moved = replace(served, name=str(tmp_path / "model"))
    assert names(worker.opened(given, moved, "a server", 1)) == first  # the same files elsewhere are the same model
    weights = safetensors.torch.load_file(tmp_path / "model" / "model.safetensors")
    last = sorted(weights)[-1]
    weights[last] = weights[last] * 1.01
    safetensors.torch.save_file(weights, tmp_path / "model" / "model.safetensors")
    others = [
        names(worker.opened(given, each, "a server", 1))
        for each in (moved, replace(served, quantization="fp8"), replace(served, dtype=torch.float32),
                     replace(served, config=dict(served.config) | {"rms_norm_eps": 0.1}))
    ]  # fmt: skip
    monkeypatch.setenv(worker.SALT, "secret")
    others.append(names(worker.opened(given, served, "a server", 1)))
    assert len({*first, *(one for each in others for one in each)}) == 6
    assert "secret" not in "".join(path.read_text(errors="ignore") for path in tmp_path.rglob("*.json"))


@pytest.mark.parametrize(("extra", "message"), [
    ({}, "lacks path and recipe"), ({"path": "x"}, "lacks recipe"),
    ({"path": "x", "recipe": "exact", "salt": "s"}, "has salt"),
    ({"path": "x", "recipe": "exact", "recent": -1}, "recent=-1"),
    ({"path": "x", "recipe": "exact", "pending": "much"}, "an option: pending='much'"),
    ({"path": "x", "recipe": "exact", "budget": "much"}, "an option: budget='much'"),
    ({"path": "x", "recipe": 2}, "an option: recipe=2; give text"),
    ({"path": ["x"], "recipe": "exact"}, r"an option: path=\['x'\]; give text"),
])  # fmt: skip
def test_options_that_are_none_are_refused(extra: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        worker.settings(extra, "an option", "a server")


@pytest.mark.parametrize(("recipe", "message"), [
    ("aqua-2bit", "has to be fitted"), ("subkv-2bit", "arrive"), ("no-such-recipe", "no-such-recipe"),
    ("squat-online-2bit", "fitted to each prompt"),
])  # fmt: skip
def test_a_recipe_that_cannot_be_kept_is_refused_by_name(recipe: str, message: str, served: Served, tmp_path: Path):
    with pytest.raises(ValueError, match=message) as refused:
        worker.opened(Settings(str(tmp_path), recipe), served, "KVQConnector", 1)
    assert str(refused.value).startswith(f"KVQConnector, recipe {recipe}: ")


def test_an_artifact_of_another_model_is_refused(served: Served, tmp_path: Path):
    artifact.save(tiny(), tmp_path / "tiny.safetensors")
    with pytest.raises(ArtifactError, match=r"KVQConnector, recipe .*tiny.safetensors: fingerprint"):
        worker.opened(Settings(str(tmp_path / "kept"), str(tmp_path / "tiny.safetensors")), served, "KVQConnector", 1)


def test_a_model_without_files_is_refused(served: Served, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match="no safetensors files"):
        worker.opened(
            Settings(str(tmp_path / "kept"), "exact"), replace(served, name=str(tmp_path / "empty")), "a server", 1
        )
    (tmp_path / "empty" / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{not json at all")
    with pytest.raises(ArtifactError, match="no safetensors file"):
        worker.opened(
            Settings(str(tmp_path / "kept"), "exact"), replace(served, name=str(tmp_path / "empty")), "a server", 1
        )
