"""Open the kept prefixes that a server's options name, for the model that it serves."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvq_runtime.engines import source
from kvq_runtime.engines.source import Share
from kvq_runtime.errors import ArtifactError, named
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.prefix import chain
from kvq_runtime.prefix.shelf import parse_bytes
from kvq_runtime.prefix.store import PrefixBlocks, check
from kvq_runtime.store.promise import Check

SALT = "KVQ_PREFIX_SALT"


@dataclass(frozen=True)
class Settings:
    """The options of an engine on kept prefixes.

    path      folder of the kept prefixes, shared by workers and servers
    recipe    name of a recipe, or a reference to an artifact, as for KVQ_CACHE
    budget    bytes of the folder
    recent    newest tokens of a prompt that are computed, to be exact; None: as many as the recipe's window keeps
    pending   bytes of 16-bit keys and values that may wait to be encoded, in each worker
    threads   of each worker that make and read files; None: as many as `PrefixBlocks` takes
    """

    path: str
    recipe: str
    budget: str | int = "20GB"
    recent: int | None = None
    pending: str | int = "1GB"
    threads: int | None = None


@dataclass(frozen=True)
class Served:
    """The model that a server serves: its decoder's configuration, its files, and what its keys and values are in.

    rotary   its rotation, by its configuration; raises ValueError for one that is not known so
    """

    config: Mapping[str, Any]
    name: str
    revision: str | None
    dtype: torch.dtype
    quantization: str | None
    rotary: Callable[[], Rotary]


def settings(extra: Mapping[str, Any], option: str, who: str) -> Settings:
    """The settings of these options, the value of an engine's `option`; ValueError, a sentence, for others."""
    known = Settings.__dataclass_fields__
    odd, missing = sorted(set(extra) - set(known)), [name for name in ("path", "recipe") if not extra.get(name)]
    if odd or missing:
        what = f"has {', '.join(odd)}" if odd else f"lacks {' and '.join(missing)}"
        raise ValueError(f"{option} {what}; {who} takes {', '.join(known)}")
    if wrong := next((name for name in ("path", "recipe") if not isinstance(extra[name], str)), None):
        raise ValueError(f"{option}: {wrong}={extra[wrong]!r:.80}; give text")
    found = Settings(**extra)
    if found.recent is not None and (type(found.recent) is not int or found.recent < 0):
        raise ValueError(f"{option}: recent={found.recent!r}; use a number of tokens, 0 or more")
    if found.threads is not None and (type(found.threads) is not int or found.threads < 1):
        raise ValueError(f"{option}: threads={found.threads!r}; use a number, 1 or more")
    for name in {"budget", "pending"} & extra.keys():
        parse_bytes(extra[name], f"{option}: {name}=")
    return found


def opened(given: Settings, model: Served, who: str, ranks: int, rank: int | None = None) -> list[PrefixBlocks]:
    """The store of a worker's part of the model; without a rank, those of all parts.

    who     begins messages: the engine's part that asks
    ranks   workers of tensor parallelism
    Raises ValueError or ArtifactError for what cannot be kept, or is not of this model, OSError if the disk refuses,
    each with the reference.
    """
    with named(f"{who}, recipe {given.recipe}"):
        found = source.read(given.recipe)
        recipe = found.recipe
        check(recipe)
        whole = source.match(found, model.config, model.name, model.revision)
        folder = source.folder(model.name, model.revision)
        if folder is None:
            raise ArtifactError(f"the files of {model.name} are not on this machine; give its folder as the model")
        digest = chain.model_digest(folder, model.config, model.quantization or "")
        rotary = model.rotary() if "positions" in recipe.needs else None
        first = source.share_of(whole, rank or 0, ranks)
        shares = [first] if rank is not None else [Share(part, first.parts) for part in range(first.parts)]
        # what is promised is of all heads together
        promised = Check.of(found.artifact.fit) if found.artifact is not None and first.parts == 1 else None
        stores = []
        for share in shares:
            geometry, tensors = source.narrower(whole, share), {}
            if recipe.fitted:
                geometry, tensors = source.narrowed(recipe, whole, found.tensors, share)
            name = f"{digest} {share.part}/{share.parts}"
            stores.append(PrefixBlocks(
                given.path, recipe, geometry, tensors, model=name, dtype=model.dtype, rotary=rotary,
                salt=os.environ.get(SALT, ""), budget=given.budget, promised=promised,
                threads=given.threads,
            ))  # fmt: skip
        return stores
