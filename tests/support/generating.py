"""Let a model generate with a cache, in every way that transformers offers."""

import fitted
import torch
from feeding import small
from models import random_model
from transformers import DynamicCache, PreTrainedModel

from kvq_runtime.hf import KVQCache, geometry_of
from kvq_runtime.recipe import preset

NEW = 40  # tokens
WAYS = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beams": {"num_beams": 3},
    "lookup": {"prompt_lookup_num_tokens": 4},
    "assisted": {"assistant": True},
    "chunked": {"prefill_chunk_size": 13},
}


def kvq(name: str, model: PreTrainedModel, whole: bool = False) -> KVQCache:
    """A cache with a window of a few tokens, and random fitted tensors where the recipe wants some."""
    geometry = geometry_of(model)
    recipe = preset(name) if whole else small(preset(name), geometry)
    return KVQCache(recipe, model, fitted.tensors(recipe, geometry) or None)


def generate(model: PreTrainedModel, ids: torch.Tensor, cache, way: str = "greedy", **settings) -> torch.Tensor:
    """The prompt and NEW tokens, [rows, T]; the same numbers are drawn each time."""
    given = WAYS[way] | {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 1} | WAYS[way] | settings
    if given.pop("assistant", False):
        given["assistant_model"] = random_model("llama", seed=0)
        given["assistant_model"].generation_config.num_assistant_tokens = 5
    torch.manual_seed(7)
    return model.generate(ids, past_key_values=cache, **given)


def stock(model: PreTrainedModel) -> DynamicCache:
    """The cache of transformers."""
    return DynamicCache(config=model.config)


def padded(rows: torch.Tensor, *lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows cut to these lengths, on the left, and their attention mask."""
    mask = torch.arange(rows.shape[1]) >= rows.shape[1] - torch.tensor(lengths)[:, None]
    return rows.where(mask, 1), mask.long()
