"""Blocks of prefixes for tests: stores, the rows that they are given, and the files that they make."""

from pathlib import Path

import feeding
import fitted
import pytest
import torch
from feeding import GEOMETRY, RECIPES

from kvq_runtime.cache import BlockCache
from kvq_runtime.prefix.store import PrefixBlocks

REFUSED = {name for name, recipe in RECIPES.items() if recipe.policies}
KEPT = [name for name in RECIPES if name not in REFUSED]
FEW = (
    "exact", "exact-pre", "higgs-2bit", "aqua-2bit", "kivi-2bit", "squat-pre-2bit", "svdq-2bit",
)  # fmt: skip
QUICK = (
    "exact",
    "aqua-2bit",
    "kivi-2bit",
)  # of which `make test` runs what the others are put through as well


def each(names) -> list:
    """Recipes as parameters; all but a few are slow."""
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


def store(path=None, name: str = "rtn-2bit", model: str = "m", **settings) -> PrefixBlocks:
    recipe = RECIPES[name]
    tensors = fitted.tensors(recipe, GEOMETRY)
    dtype = settings.pop("dtype", torch.bfloat16)
    return PrefixBlocks(path, recipe, GEOMETRY, tensors, model=model, dtype=dtype, rotary=feeding.rotary(), **settings)


def rows(count: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> tuple[list, list]:
    """Keys and values of every layer, [T, H, D] each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, GEOMETRY.layers, count, GEOMETRY.kv_heads, GEOMETRY.head_size)
    keys, values = torch.randn(shape, generator=generator).to(dtype)
    return list(keys), list(values)


def ids(count: int, first: int = 5) -> list[int]:
    return [(first + 7 * n) % 97 for n in range(count)]


def filled(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[PrefixBlocks, BlockCache, list[int], tuple]:
    """A store and a cache that were given the same tokens: five blocks and a rest."""
    kept = store(name=name, dtype=dtype)
    count = 5 * kept.block + 3
    tokens, (keys, values) = ids(count), rows(count, dtype=dtype)
    assert kept.put(tokens, keys, values) == 5 * kept.block
    cache = BlockCache(kept.format.recipe, GEOMETRY, kept.codec.tensors or None)
    cache.positions.announce(None, None, feeding.rotary())
    for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
        cache.update(layer, k.flatten(1)[None], v.flatten(1)[None])
    return kept, cache, tokens, (keys, values)


def size_of(count: int) -> int:
    """Bytes of the files of so many tokens; the first has sinks, so that it is larger than the others."""
    kept, (keys, values) = store(), rows(count)
    kept.put(ids(count), keys, values)
    return kept.shelf.size  # type: ignore[attr-defined]


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.safetensors"))
