"""Blocks of prefixes for tests: stores, the rows that they are given, and the files that they make."""

from pathlib import Path

import feeding
import fitted
import pytest
import torch
from feeding import GEOMETRY

from kvq_runtime.cache import BlockCache
from kvq_runtime.prefix.store import PrefixBlocks
from kvq_runtime.recipe import Recipe, preset

FEW = ("exact", "exact-pre", "higgs-2bit", "aqua-2bit", "kivi-2bit", "squat-pre-2bit", "svdq-2bit")
QUICK = ("exact", "aqua-2bit", "kivi-2bit")  # the others are slow
EACH = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FEW]


def recipe_of(name: str) -> Recipe:
    """A recipe with blocks of a few tokens."""
    return feeding.small(preset(name))


def store(path: Path, name: str = "rtn-2bit", model: str = "m", seed: int = 0, **settings) -> PrefixBlocks:
    recipe = recipe_of(name)
    tensors = fitted.tensors(recipe, GEOMETRY, seed)
    return PrefixBlocks(path, recipe, GEOMETRY, tensors, model=model, rotary=feeding.rotary(), **settings)


def rows(count: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> tuple[list, list]:
    """Keys and values of every layer, [T, H, D] each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, GEOMETRY.layers, count, GEOMETRY.kv_heads, GEOMETRY.head_size)
    keys, values = torch.randn(shape, generator=generator).to(dtype)
    return list(keys), list(values)


def ids(count: int, first: int = 5) -> list[int]:
    return [(first + 7 * n) % 97 for n in range(count)]


def filled(path: Path, name: str, dtype: torch.dtype = torch.bfloat16):
    """A store and a cache that were given the same tokens, five blocks and a rest; the tokens, and their rows."""
    kept = store(path, name, dtype=dtype)
    count = 5 * kept.block + 3
    tokens, (keys, values) = ids(count), rows(count, dtype=dtype)
    assert kept.put(tokens, keys, values) == 5 * kept.block
    cache = BlockCache(kept.codec.recipe, GEOMETRY, kept.codec.tensors or None)
    cache.positions.announce(None, None, feeding.rotary())
    for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
        cache.update(layer, k.flatten(1)[None], v.flatten(1)[None])
    return kept, cache, tokens, (keys, values)


def decoded(kept: PrefixBlocks, blocks: list, start: int = 0) -> dict[int, tuple]:
    """Keys and values of each layer, copied."""
    return {layer: (k.clone(), v.clone()) for layer, k, v in kept.codec.decode(blocks, start=start)}


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.safetensors"))


def contents(root: Path) -> dict[str, bytes]:
    """The bytes of each block, by its name."""
    return {path.name: path.read_bytes() for path in files(root)}
