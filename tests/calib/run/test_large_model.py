"""A calibration takes the memory of one layer and one chunk, however many of them there are."""

import pytest

from benchmarks.calibration import BOUND, memory

LAYERS = 4
SETTINGS = {"samples": 2, "seq_len": 128, "held_out": 0, "device": "cpu", "dtype": "float32", "threads": 1}


@pytest.mark.slow
def test_a_calibration_takes_one_layer_and_one_chunk(tmp_path):
    geometry = {
        "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 64, "num_hidden_layers": LAYERS,
    }  # fmt: skip
    found = memory(geometry, SETTINGS | {"corpus": "demo", "recipes": ("aqua-2bit",)}, str(tmp_path))
    assert 50e6 < found["layer"] < 70e6
    assert LAYERS * found["layer"] > 2 * BOUND * (found["layer"] + found["chunk"]), "the whole model would not do"
    assert found["layer"] / 2 < found["peak"], "that many bytes are its weights alone"
    assert found["peak"] <= BOUND * (found["layer"] + found["chunk"])
