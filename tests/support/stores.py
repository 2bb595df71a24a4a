"""Prefixes of the embedded model: its keys and values, an artifact, and what a store decodes."""

from functools import cache
from pathlib import Path

import fitted
import torch
from torch import Tensor

from kvq_runtime.artifact import artifact, fingerprint
from kvq_runtime.artifact.artifact import Artifact
from kvq_runtime.hf.model import CACHE, rotary_of_folder
from kvq_runtime.prefix.store import PrefixBlocks
from kvq_runtime.recipe import preset
from kvq_runtime.vllm import served_recipe

MODEL = Path(__file__).parents[2] / "artifacts" / "demo-model"


@cache
def rows(count: int) -> Tensor:
    """Keys after RoPE and values, [2, layers, tokens, heads, head size], of the embedded model for `ids(count)`."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([ids(count)]) % model.config.vocab_size, **{CACHE: cache})
    return torch.stack([torch.stack([x[0].transpose(0, 1) for x in (one.keys, one.values)]) for one in cache.layers], 1)


def ids(count: int) -> list[int]:
    return list(range(1000, 1000 + count))


def aqua(folder: Path) -> str:
    """An artifact of the model, before RoPE and across layers, with the tensors of a fit drawn at random."""
    config, recipe = served_recipe.model_config(str(MODEL), None), preset("aqua-2bit")
    print_of = fingerprint.from_config(config, served_recipe.projections(MODEL))
    path = folder / "kvq.safetensors"
    path.write_bytes(
        artifact.to_bytes(Artifact(recipe, print_of, fitted.tensors(recipe, print_of.geometry), {"model": "demo"}, {}))
    )
    return str(path)


def decoded(folder: Path, recipe: str, tokens: list[int], rows_2LTHD: Tensor) -> Tensor:
    """What a store in this folder gives of these tokens."""
    served = served_recipe.read(recipe)
    geometry = served_recipe.match(served, served_recipe.model_config(str(MODEL), None), str(MODEL), None)
    rotary = rotary_of_folder(MODEL, torch.bfloat16)
    store = PrefixBlocks(folder, served.recipe, geometry, served.tensors, model="x", rotary=rotary)
    store.put(tokens, [*rows_2LTHD[0]], [*rows_2LTHD[1]])
    return torch.stack([torch.stack([k, v]) for _, k, v in store.codec.decode(store.load(tokens))], 1).clone()
