"""Artifacts of real models, as a downstream team takes them from the folder registry in the repository."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvq_runtime import KVQCache
from kvq_runtime.registry.reference import PRODUCTION
from kvq_runtime.registry.resolve import load_artifact, open_registry

ZOO = Path(__file__).parents[2] / "artifacts" / "zoo"
NAMES = sorted(path.name for path in ZOO.glob("names/*"))  # none in a source distribution


def test_the_zoo_is_small_and_every_name_is_measured_and_in_production():
    blobs = [path.stat().st_size for path in (ZOO / "blobs").rglob("*") if path.is_file()]
    assert max(blobs) <= 15e6 and sum(blobs) <= 60e6
    registry = open_registry(str(ZOO))
    for name in NAMES:
        state = registry.state(name)
        version = state.get(state.at(PRODUCTION) or "")
        assert len(registry.evaluations(version.sha256, name)) >= 4, name


@pytest.mark.parametrize("name", NAMES)
def test_an_artifact_of_the_zoo_loads_and_says_what_it_was_fitted_to(name):
    made = load_artifact(f"{name}@production", registry=str(ZOO))
    assert name == f"{made.provenance['model']}-{made.recipe.name}"
    assert {"corpus", "samples", "seq_len", "environment"} <= set(made.provenance)


def test_weights_before_their_rounding_are_taken_with_a_warning_that_says_how_far_they_are(real_model: Path, recwarn):
    """As the Hub's bfloat16 weights are, of which a folder's were rounded to 4 bits."""
    name = "smollm2-135m-fisher-3bit"
    model = AutoModelForCausalLM.from_pretrained(real_model, dtype="auto")
    assert KVQCache.from_pretrained(name, registry=str(ZOO), model=model).get_seq_length() == 0
    assert not [one for one in recwarn if "fingerprint" in str(one.message)]
    del model.config.dequantized_from
    torch.manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            weight = layer.self_attn.k_proj.weight
            weight += 0.02 * weight.float().std() * torch.randn_like(weight)
    with pytest.warns(UserWarning, match=r"differ by 0\.\d+ of their norm.*where either is quantized"):
        KVQCache.from_pretrained(name, registry=str(ZOO), model=model)
