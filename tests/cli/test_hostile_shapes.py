"""`kvq bytes` of a config.json that is damaged, or made to harm: refused in a sentence, and at once."""

import json
import time

import pytest

CONFIG = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}


@pytest.mark.parametrize("given, why", [
    ({"num_hidden_layers": 10**7}, "num_hidden_layers=10000000; a whole number from 0 to 4096 is needed"),
    ({"num_hidden_layers": 10**400}, "a whole number from 0 to 4096 is needed"),
    ({"head_dim": "128"}, "head_dim='128'; a whole number from 0 to 16384 is needed"),
    ({"num_key_value_heads": [8]}, "num_key_value_heads=[8]; a whole number"),
    ({"num_attention_heads": 0}, "num_attention_heads=0; a whole number from 1"),
    ({"per_layer_config": {"0": {"head_dim": 10**12}}}, "head_dim=1000000000000; a whole number"),
    ({"per_layer_config": dict.fromkeys(range(5000), 1)}, "an object of at most 4096 is needed"),
    ({"layer_types": -1}, "layer_types=-1; a list with one for each layer is needed"),
    ({"layer_types": ["full_attention"]}, "layer_types has 1 for 32 layers"),
    ({"kv_lora_rank": 512}, "is not a family that kvq serves; use a model of llama"),
])  # fmt: skip
def test_sizes_and_types_that_no_model_has(given, why, kvq, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | given))
    begun = time.thread_time()
    code, _, err = kvq("bytes", "aqua-2bit", "--model", str(tmp_path))
    assert code == 2 and why in err, err
    assert time.thread_time() - begun < 2
