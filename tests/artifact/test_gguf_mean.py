"""The bias file of llama.cpp: read back by a parser of its own, with means that follow from a closed form."""

import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from fitted import tensors

from kvq_runtime.artifact import artifact, gguf_mean
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.artifact.fingerprint import Fingerprint, specs
from kvq_runtime.cli import main
from kvq_runtime.errors import ArtifactError
from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import preset

GEOMETRY = Geometry(3, 2, 16)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def made(recipe: str = "mean-higgs-2bit", qk_norm: bool = True, **settings) -> Artifact:
    found, probes = preset(recipe), {name: torch.ones(shape) for name, (shape, _) in specs(GEOMETRY).items()}
    mark = Fingerprint(GEOMETRY, ROPE | settings, qk_norm, probes)
    return Artifact(found, mark, tensors(found, GEOMETRY), {"model": "a-model"}, {"layers": []})


def parsed(data: bytes) -> tuple[dict, dict]:
    """Values and vectors of a GGUF of version 3, by the specification."""
    place = 0

    def take(form: str):
        nonlocal place
        found = struct.unpack_from("<" + form, data, place)
        place += struct.calcsize("<" + form)
        return found[0] if len(found) == 1 else found

    def text() -> str:
        return take(f"{take('Q')}s").decode()

    assert data[:4] == b"GGUF"
    place = 4
    assert take("I") == 3
    vectors, count = take("QQ")
    values = {text(): {8: text, 7: lambda: take("?")}[take("I")]() for _ in range(count)}
    about = {}
    for _ in range(vectors):
        name, dimensions = text(), take("I")
        about[name] = (take("Q" * dimensions), take("I"), take("Q"))
    start = -(-place // 32) * 32
    assert all(kind == 0 and offset % 32 == 0 for _, kind, offset in about.values())
    ends = [start + offset + 4 * size for size, _, offset in about.values()]
    assert max(ends) <= len(data) < max(ends) + 32
    return values, {n: np.frombuffer(data, "<f4", size, start + offset) for n, (size, _, offset) in about.items()}


def closed_form(mean_HD: np.ndarray, frequencies: np.ndarray, positions: int = 512) -> np.ndarray:
    """A pair of channels is a complex number that every position turns: the mean is a geometric series."""
    turn = np.exp(1j * frequencies)
    series = (1 - turn**positions) / (1 - turn) / positions
    half = mean_HD.shape[1] // 2
    z = (mean_HD[:, :half] + 1j * mean_HD[:, half:]) * series
    return np.concatenate([z.real, z.imag], 1)


@pytest.mark.parametrize("channels", ["halves", "pairs"])
def test_the_file_has_the_mean_of_turned_means(channels):
    given = made()
    values, vectors = parsed(gguf_mean.from_artifact(given, channels))
    assert values == {"general.type": "kv-mean-center", "kv_mean_center.k_rot": False}
    assert list(vectors) == [f"kv_bar.blk.{layer}.k" for layer in range(3)]
    frequencies = 10000.0 ** (-np.arange(8) / 8)
    for layer in range(3):
        mean = given.tensors[f"layers.{layer}.key.predict.mean"].double().numpy().reshape(2, 16)
        expected = closed_form(mean, frequencies)
        if channels == "pairs":  # channel i, and the one that RoPE turns it with
            expected = np.stack([expected[:, :8], expected[:, 8:]], -1).reshape(2, 16)
        np.testing.assert_allclose(vectors[f"kv_bar.blk.{layer}.k"], expected.ravel(), rtol=2e-5, atol=1e-6)
        assert np.abs(expected).max() > 0.1, "the slowest channels keep their mean"


def test_frequencies_are_those_of_transformers():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    for settings in (scaled, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}):
        config = LlamaConfig(head_dim=128, rope_parameters=settings, max_position_embeddings=131072)
        theirs, _ = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, "cpu")
        torch.testing.assert_close(gguf_mean.frequencies(settings, 128).float(), theirs, rtol=1e-5, atol=0)


def test_what_cannot_be_written_is_refused():
    with pytest.raises(ValueError, match="--channels pairs for llama and mistral"):
        gguf_mean.from_artifact(made(qk_norm=False), None)
    with pytest.raises(ValueError, match="removes no mean from keys"):
        gguf_mean.from_artifact(made("oscar-2bit"), "halves")
    with pytest.raises(ValueError, match="RoPE of type 'yarn'"):
        gguf_mean.from_artifact(made(rope_type="yarn"), "halves")


def test_the_command_writes_it(tmp_path: Path, capsys):
    path, out = tmp_path / "a.safetensors", tmp_path / "out" / "kv-bias.gguf"
    path.write_bytes(artifact.to_bytes(made()))
    assert main.main(["export", "gguf-mean", str(path), "-o", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    assert out.read_bytes() == gguf_mean.from_artifact(made(), None) == gguf_mean.from_artifact(made(), "halves")
    assert main.main(["export", "oscar", str(path), "-o", str(out), "--channels", "pairs"]) == 2


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192.0}  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_theta": None}, {"rope_theta": "10000"}, {"rope_theta": 0.0}, {"rope_theta": -1.0}, {"rope_theta": 1e300},
        {"rope_theta": True}, {"partial_rotary_factor": 1e9}, {"partial_rotary_factor": 0.0},
        {"partial_rotary_factor": 0.2}, {"partial_rotary_factor": []}, {"rope_type": "linear"},
        {"rope_type": "linear", "factor": 0.0}, LLAMA3 | {"high_freq_factor": 1.0}, LLAMA3 | {"factor": {}},
        LLAMA3 | {"original_max_position_embeddings": 10**400},
    ],
    ids=str,
)  # fmt: skip
def test_a_rope_that_cannot_be_is_refused(settings):
    with pytest.raises(ArtifactError, match="fingerprint: rope: "):
        gguf_mean.from_artifact(made(**settings), "halves")


def test_a_rope_of_no_type_is_refused():
    with pytest.raises(ValueError, match="RoPE of type"):
        gguf_mean.from_artifact(made(rope_type=["default"]), "halves")
