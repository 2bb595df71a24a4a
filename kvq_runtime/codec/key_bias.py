"""Subtract the bias of a model's key projection before keys are encoded.

A bias b of `k_proj` is the same for every token: key t is R_t (W h_t + b). Qwen2's have a norm of hundreds, several
times that of W h_t. A rotation, or a scale for a whole head, spreads b over all channels, and the rounding error grows
with it. So keys of every recipe that has no prediction of its own are encoded less R_t b, which a reader adds as it
does any mean; the attention kernels have the term q · R_t b already. Nothing is fitted: b is read from the model.

A recipe that is fitted, to a corpus or to its prompt, subtracts the mean of keys instead, which contains b; but not one
that is fitted to its prompt after RoPE, where no mean is (`policies/prompt_fit.py`).

Differs: no paper subtracts a bias. `key_bias="kept"` of a recipe encodes keys as its paper does.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kvq_runtime.geometry import Geometry
from kvq_runtime.recipe import Recipe
from kvq_runtime.stages.predict import Bias, Mean
from kvq_runtime.stages.stage import Scheme

Biases = Mapping[int, Tensor]  # layer of the geometry → bias of its k_proj, [C]


def nonzero(biases: Mapping[int, Tensor | None]) -> Biases:
    """Return the biases that are not zero, float32 on the CPU."""
    return {n: bias.detach().float().cpu() for n, bias in biases.items() if bias is not None and bool(bias.any())}


def centred(recipe: Recipe, biases: Biases) -> Recipe:
    """Return the recipe with a mean subtracted from keys, if the model has biases and the recipe does not keep them."""
    if not biases or recipe.key_bias == "kept" or (recipe.fits_prompt and recipe.position == "post"):
        return recipe
    mean = Mean() if recipe.fitted or recipe.fits_prompt else Bias()

    def less_mean(key: Scheme) -> Scheme:
        own = key.predict is not None and not key.predict.of_model
        return key if own or key.quantize.keeps_dtype else replace(key, predict=mean)

    layers = {n: (less_mean(key), value) for n, (key, value) in recipe.layers.items()}
    return replace(recipe, key=less_mean(recipe.key), layers=layers)


def tensors(recipe: Recipe, geometry: Geometry, biases: Biases) -> dict[str, Tensor]:
    """Return the tensors of a recipe's `Bias` stages, under the names that an artifact's have; zeros without a bias."""
    return {
        f"layers.{n}.key.predict.mean": biases.get(n, torch.zeros(geometry.width))
        for n in range(geometry.layers)
        if (predict := recipe.at(n)[0].predict) is not None and predict.of_model
    }
