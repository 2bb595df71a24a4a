"""Let a model generate with a cache, in every way that transformers offers."""

import itertools

import fitted
import torch
from feeding import small
from models import random_model
from transformers import DynamicCache, PreTrainedModel

from kvq_runtime.artifact.recipe_text import read
from kvq_runtime.hf import KVQCache, geometry_of
from kvq_runtime.hf.model import CACHE

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
    recipe = read(name) if whole else small(read(name), geometry)
    return KVQCache(recipe, model, fitted.tensors(recipe, geometry) or None)


def generate(model: PreTrainedModel, ids: torch.Tensor, cache, way: str = "greedy", **settings) -> torch.Tensor:
    """The prompt and NEW tokens, [rows, T]; the same numbers are drawn each time."""
    given = WAYS[way] | {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 1} | WAYS[way] | settings
    if given.pop("assistant", False):
        given["assistant_model"] = random_model("llama", seed=0)
        given["assistant_model"].generation_config.num_assistant_tokens = 5
    torch.manual_seed(7)
    return model.generate(ids, past_key_values=cache, **given)


def replayed(model: PreTrainedModel, ids: torch.Tensor, cache, again, way: str) -> torch.Tensor:
    """Generate, and check the new tokens against a plain replay of the text with a cache of its own, `again`.

    The replay feeds the text in the passes in which it was fed, without what was guessed and rejected and without rows
    that a beam gave up, and takes nothing from transformers' loop. Each token has to be the one of the largest logit
    there, or one that could be drawn; a beam's score is the one that generate() states. A rejected guess may have had
    a block encoded a step earlier, and a policy may have heard its queries: of guessed ones four in ten must agree, or
    two, where one in a hundred would by chance. Returns the text.
    """
    starts = []
    handle = model.register_forward_pre_hook(
        lambda module, args, given: starts.append(given[CACHE].get_seq_length()), with_kwargs=True
    )
    found = generate(model, ids, cache, way, return_dict_in_generate=True, output_scores=True)
    handle.remove()
    text, first, cuts = found.sequences, ids.shape[1], [*starts, found.sequences.shape[1] - 1]
    assert text.shape == (len(ids), first + NEW) and torch.equal(text[:, :first], ids)
    with torch.no_grad():
        passes = [text[:, a:b] for a, b in itertools.pairwise(cuts) if b > a]
        assert sum(part.shape[1] for part in passes) == text.shape[1] - 1
        logits = torch.cat([model(part, past_key_values=again).logits for part in passes], 1)[:, first - 1 :].float()
    chosen = logits.gather(2, text[:, first:, None])[..., 0]
    if way == "beams":  # 2e-2: rows of other beams have their say in a dynamic window
        mean = (chosen - logits.logsumexp(-1)).mean(1)
        torch.testing.assert_close(mean, found.sequences_scores, rtol=0, atol=2e-2)
    else:
        best = logits.topk(WAYS[way].get("top_k", 1)).values[..., -1]
        agree = float((chosen >= best - 1e-3 * logits.abs().amax()).double().mean())
        guessed = 0.2 if cache.blocks.recipe.arrival_dependent else 0.4
        assert agree >= (guessed if way in ("lookup", "assisted") else 1), f"{agree:.2f}"
    return text


def stock(model: PreTrainedModel) -> DynamicCache:
    """The cache of transformers."""
    return DynamicCache(config=model.config)


def padded(rows: torch.Tensor, *lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows cut to these lengths, on the left, and their attention mask."""
    mask = torch.arange(rows.shape[1]) >= rows.shape[1] - torch.tensor(lengths)[:, None]
    return rows.where(mask, 1), mask.long()
