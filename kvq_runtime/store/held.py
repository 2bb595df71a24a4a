"""Compute, from shapes alone, the bytes of a cache of a number of tokens, as the stores allocate them, and from how
many tokens on they are fewer than those of 16 bit, or of plain HIGGS.

    blocks    ⌊(T - recent) / block⌋ of them, in slabs of 32 of which the last grows by doubling
    window    its room, recent + block tokens, in 16 bits, and the sinks beside it
    policies  what policies hold beside that, by their `held_bytes`
    shared    predictors, bases, codebooks and whatever else was fitted, and rotations: once, whatever T and the batch

Nothing is filled and nothing measured: a cache of 131,072 tokens of a model with 70 billion parameters takes no memory
to count. `memory_report()` of a real cache is the same number (`tests/store/test_held.py` fills one), but for a window
to which a prompt of about its length has left other room, and for the device tables of a GPU. Left out are fixed
codebooks (at most 8 KiB a process). Bits by latent channel that a fit finds (`target`) are not known before it: all
channels count.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kvq_runtime.codec import codec as codecs
from kvq_runtime.codec.codec import Codec
from kvq_runtime.geometry import NONE_SLIDE, ROLES, SLAB, Geometry, Sliding
from kvq_runtime.recipe import Recipe, preset
from kvq_runtime.stages.stage import Site
from kvq_runtime.store.memory import asymptotic_bits
from kvq_runtime.store.storage import storage_bytes

NAMES = {  # what the tensors of a stage are called in a table
    **{"predict": "predictors", "rotate": "bases", "quantize": "codebooks and ranges"},
    **{"feedback": "feedback", "correct": "bounds"},
}
PLAIN = tuple(f"higgs-{bits}" for bits in ("1bit", "1.5bit", "2bit", "2bit-slow", "3bit", "4bit"))


@dataclass(frozen=True)
class HeldBytes:
    """Bytes of `batch` rows of `tokens` tokens each.

    sequence   by kind: grow with tokens and batch      shared   by kind: do not
    exact      what 16 bits would hold                  sliding    of layers that slide, or of indexers, in both
    """

    tokens: int
    batch: int
    sequence: Mapping[str, int]
    shared: Mapping[str, int]
    exact: int
    sliding: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.sequence.values()) + sum(self.shared.values()) + self.sliding

    @property
    def own_bits(self) -> float:
        """Bytes that grow with tokens, in bits per key or value element of the tokens seen."""
        return 16 * sum(self.sequence.values()) / max(1, self.exact - self.sliding)

    @property
    def bits(self) -> float:
        """All bytes but of layers that slide and of indexers, in bits per key or value element of the tokens seen."""
        return 16 * (self.total - self.sliding) / max(1, self.exact - self.sliding)


@dataclass(frozen=True)
class Sizes:
    """A recipe on a model whose exact tokens are of `dtype`; a window that may grow is billed at its longest.

    sliding   layers that slide over a window, which transformers holds beside it, and keys of indexers
    """

    recipe: Recipe
    geometry: Geometry
    dtype: torch.dtype = torch.bfloat16
    sliding: Sliding = NONE_SLIDE

    @cached_property
    def shared(self) -> dict[str, int]:
        """Bytes that do not grow: fitted tensors by stage, and rotations."""
        found: Counter[str] = Counter()
        for name, spec in codecs.all_specs(self.recipe, self.geometry).items():
            found[NAMES[name.split(".")[3]]] += _bytes(spec)
        layers = range(self.geometry.layers)
        plain = next((n for n in layers if n not in self.recipe.layers), 0)  # one with the schemes that most have
        fixed = list[Tensor]()
        for site in self.recipe.sites(self.geometry):
            tensors = self._rotation(site)
            if tensors or site.layer in {0, *self.recipe.layers, plain}:
                held = Codec(self.recipe, site.layer, site.role, self.geometry, tensors).shared
                if tensors:  # beside it the codec holds the matrix back
                    found["rotations"] += storage_bytes(held) - storage_bytes(tensors.values())
                else:
                    fixed += held
        found["rotations"] += storage_bytes(fixed)
        return dict(+found)

    def _rotation(self, site: Site) -> dict[str, Tensor]:
        """Tensors of the rotation's shapes, if calibration fits one there."""
        rotate = site.scheme.rotate
        if rotate is None or not rotate.fitted or self.recipe.fits(site.scheme):
            return {}
        specs = rotate.tensors(site, self.geometry)
        return {f"rotate.{name}": torch.zeros(*shape, dtype=dtype) for name, (shape, dtype) in specs.items()}

    @cached_property
    def _block(self) -> dict[str, int]:
        """Bytes of one block of one row in all layers, by kind, what policies store beside it included."""
        window, found = self.recipe.window, Counter[str]()
        for site in self.recipe.sites(self.geometry):
            kinds = site.scheme.memory_kinds(window.block, self.geometry)
            for name, spec in site.scheme.fields(window.block, self.geometry, self.dtype).items():
                found[kinds[name]] += _bytes(spec)
        for role in ROLES:
            extra = sum(policy.extra_bits(role, self.dtype) for policy in self.recipe.policies)
            each = round(extra * window.block * self.geometry.width / 8)
            found["beside blocks"] += self.geometry.layers * each
        return dict(+found)

    @cached_property
    def _fitted_by_row(self) -> int:
        """Bytes of what a cache fits to each row."""
        sites = [one for one in self.recipe.sites(self.geometry) if self.recipe.fits(one.scheme)]
        return sum(_bytes(spec) for one in sites for spec in one.scheme.tensors(one, self.geometry).values())

    def at(self, tokens: int, batch: int = 1) -> HeldBytes:
        """Return the bytes that a cache of `batch` rows of `tokens` tokens holds in a step, by kind."""
        window, rows = self.recipe.widest.window, tokens
        blocks, exact = max(0, rows - window.recent) // window.block, window.recent + window.block
        found: Counter[str] = Counter()
        for policy in self.recipe.policies:
            chosen = policy.chosen(rows, window)
            if chosen is not None:
                blocks, exact = chosen[0], max(exact, chosen[1])
            for kind, size in policy.held_bytes(self.geometry, rows, window, self.dtype).items():
                found[kind] += batch * size
        elements = 2 * self.geometry.layers * self.geometry.width
        token = elements * self.dtype.itemsize
        found["window"] += batch * exact * token
        found["sinks"] += batch * window.sinks * token
        for kind, size in self._block.items():
            found[kind] += batch * _allocated(blocks) * size
        found["fitted to each row"] += batch * self._fitted_by_row
        beside = batch * self.sliding.bytes(tokens)
        return HeldBytes(tokens, batch, dict(+found), self.shared, batch * rows * elements * 2 + beside, beside)

    def smaller_from(self, batch: int = 1) -> int | None:
        """From how many tokens a row on all bytes are always fewer than in 16 bits; None: never."""
        if self.sliding != NONE_SLIDE:
            return replace(self, sliding=NONE_SLIDE).smaller_from(batch)
        far = 1 << 24
        rate = (self.at(2 * far, batch).total - self.at(far, batch).total) / far
        saved = self.at(1, batch).exact - rate
        if saved <= 0:
            return None
        # what does not grow, and the room of a slab, which is the most that more than one block holds at once
        fixed = self.at(1, batch).total + batch * SLAB * sum(self._block.values())
        block = self.recipe.window.block
        tokens = math.ceil(fixed / saved) + SLAB * block
        while tokens > block and self.at(tokens - 1, batch).total < self.at(tokens - block, batch).exact:
            tokens -= block  # a cache never shrinks: what is less than the block's first tokens is less all through it
        while tokens > 1:
            held = self.at(tokens - 1, batch)
            if held.total >= held.exact:
                break
            tokens -= 1
        return tokens


def smaller_from(recipe: Recipe, geometry: Geometry, shared_bytes: int) -> int | None:
    """Tokens (batch 1) from which a recipe holds fewer bytes than plain recipes, which have no fitted tensors.

    It is compared with the plain recipe of the fewest bits at or above its own.

    shared_bytes   of the recipe's fitted tensors and rotations
    None if never, and for the plain recipes themselves.
    """
    if recipe.name in PLAIN:
        return None
    bits = asymptotic_bits(recipe, geometry)
    peers = [asymptotic_bits(other, geometry) for other in map(preset, PLAIN) if serves(other, geometry)]
    wider = [peer for peer in peers if peer >= bits]
    if not wider:
        return None
    saved = (min(wider) - bits) * 2 * geometry.layers * geometry.width / 8  # bytes a token
    return None if saved <= 0 else -int(-shared_bytes // saved)


def serves(recipe: Recipe, geometry: Geometry) -> bool:
    """True if the recipe can be used with these head sizes."""
    try:
        recipe.check(geometry)
    except ValueError:
        return False
    return True


def _allocated(blocks: int) -> int:
    """Blocks that slabs have room for: all but the last are whole, which has a power of two."""
    rest = blocks % SLAB
    return blocks - rest + (1 << (rest - 1).bit_length() if rest else 0)


def _bytes(spec: tuple[Iterable[int], torch.dtype]) -> int:
    shape, dtype = spec
    return math.prod(shape) * dtype.itemsize
