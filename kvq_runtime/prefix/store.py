"""Keep prefixes encoded: token ids and rows of keys and values in, blocks on a shelf, the same rows out.

Knows nothing of transformers; `hf/prefix.py` is this for a loaded model. A serving engine's connector gives its
rows to `put`, and takes `load` and `decode`.

    tokens [T] + K, V of all layers [T, H, D], after RoPE → blocks of 128 tokens → files → K, V [T, H, D]
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path

import torch
from torch import Tensor

from kvq_runtime.cache import BlockCache
from kvq_runtime.errors import ArtifactError, spoken
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.prefix import block_codec, block_file, chain
from kvq_runtime.prefix.block_codec import BlockCodec
from kvq_runtime.prefix.block_file import Block, BlockFormat, Link
from kvq_runtime.prefix.block_folder import Folder, Memory, Shelf, parse_bytes
from kvq_runtime.recipe import Recipe

LARGEST_BLOCK = 1 << 14  # tokens, whose ids stand in the header of a file
TOGETHER = 32  # blocks that are encoded as one run
HELD = 64 << 20  # bytes of such blocks, at most
_log = logging.getLogger(__name__)


class PrefixBlocks:
    """Encoded blocks of prefixes, of one model under one recipe.

    path       a folder that processes share; None: this process' memory
    recipe     how tokens are encoded;   geometry   of the model;   tensors   of an artifact, if the recipe is fitted
    model      text that differs for models whose keys and values differ: weights, revision, and part of the model,
               where processes hold parts
    dtype      of the model's keys and values
    rotary     the model's rotation; needed where "positions" is among `recipe.needs`
    salt       of a tenant: blocks that are put under one are found under no other
    budget     bytes on the shelf: a number, or text such as "20GB"

    Raises ValueError for a recipe whose blocks cannot be kept, ArtifactError for a folder that others can write to.
    """

    def __init__(
        self,
        path: str | Path | None,
        recipe: Recipe,
        geometry: Geometry,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        model: str,
        dtype: torch.dtype = torch.bfloat16,
        rotary: Rotary | None = None,
        salt: str = "",
        budget: str | int = "20GB",
    ):
        check(recipe)
        self.codec = BlockCodec(recipe, geometry, tensors or {}, rotary)
        self.format = BlockFormat(recipe, geometry, dtype)
        self.budget = parse_bytes(budget)
        largest = self.format.largest
        if largest > self.budget:
            raise ValueError(f"budget={budget!r}; one block of {recipe.name} takes {largest} bytes")
        self.together = max(1, min(TOGETHER, HELD // largest))  # blocks of a run
        about = self.format.describe(model, tensors or {})
        digest = block_file.digest(about)
        self.root = chain.root(digest, salt)
        self.shelf: Shelf = (
            Memory(self.budget) if path is None else Folder(Path(path).expanduser(), about, digest, self.budget)
        )
        self.tally: Counter[str] = Counter()  # read, written: bytes of blocks; damaged, unreadable: blocks
        self._refused: set[str] = set()  # reasons since a block was last written

    def under(self, salt: str) -> "PrefixBlocks":
        """Return the store of a tenant: other chains, on the same shelf. Without a salt it is this one."""
        if not salt:
            return self
        other = copy(self)
        other.root = chain.tenant(self.root, salt)
        return other

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.format.recipe.window.block

    def longest(self, tokens: Tensor | Iterable[int]) -> int:
        """Return how many of these tokens, from the first on, are kept; their blocks are not read, so not checked."""
        count = 0
        for name in chain.names(self.root, chain.token_row(tokens), self.block):
            if not self.shelf.has(name):
                break
            count += 1
        return count * self.block

    def put(
        self, tokens: Tensor | Iterable[int], keys: Sequence[Tensor], values: Sequence[Tensor], start: int = 0
    ) -> int:
        """Keep the whole blocks of a prefix; returns how many tokens of it are kept now.

        keys     of each layer, after RoPE, [T, H, D] or [T, C]: those of tokens `start` to start + T
        values   the same
        start    the first token of the rows, a multiple of `block`; all before it should be kept already
        Blocks that are kept are not encoded again. OSError: the disk refused; the blocks before it are kept.
        """
        if start % self.block:
            raise ValueError(f"start={start}; give rows from a multiple of {self.block} on")
        count = self.format.geometry.layers
        if not len(keys) == len(values) == count:
            raise ValueError(f"rows of {len(keys)} and {len(values)} layers; the store holds {count}")
        pairs = [(k.flatten(1), v.flatten(1)) for k, v in zip(keys, values, strict=True)]
        self._check_dtype(pairs[0][1].dtype)
        stop = start + min(len(x) for pair in pairs for x in pair)

        def encoded(number: int, end: int) -> list[Block]:
            span = slice(number * self.block - start, end * self.block - start)
            return self.codec.encode(number, {n: (k[span], v[span]) for n, (k, v) in enumerate(pairs)})

        return self._keep(chain.token_row(tokens)[:stop], encoded, start // self.block)

    def put_cache(self, tokens: Tensor | Iterable[int], cache: BlockCache, row: int = 0) -> int:
        """The same of one row of a cache, whose encoded blocks are kept as they are; whole blocks of the exact window
        are encoded. Raises ValueError for a cache with padding, or with positions that do not count from 0."""
        positions = cache.positions
        if positions.real_BT is not None or positions.elsewhere or positions.dropped:
            raise ValueError(
                "the cache has padded or dropped slots, or positions that do not count from 0; keep rows one by one, "
                "without padding"
            )
        token_T = chain.token_row(tokens)[: cache.length]
        if not len(token_T):
            return 0
        self._check_dtype(next(iter(cache.layers.values())).buffer_2BTC.dtype)
        blocks = min(store.blocks for store in cache.layers.values())

        def encoded(number: int, end: int) -> list[Block]:
            if number < blocks:
                return [block_codec.held(cache, number, row)]
            return self.codec.encode(number, block_codec.window_rows(cache, number, end, row))

        return self._keep(token_T, encoded, 0)

    def load(self, tokens: Tensor | Iterable[int], limit: int | None = None, start: int = 0) -> list[Block]:
        """The kept blocks of these tokens from token `start` on, checked: of the first `limit` tokens at most.

        A damaged block, and all after it, are missing; it is removed, with a warning.
        """
        return [*self._loaded(tokens, limit, start)]

    def checked(self, tokens: Tensor | Iterable[int], limit: int | None = None, start: int = 0) -> int:
        """Return how many of these tokens, from the first on, `load` would find now; it trusts those before `start`."""
        return start + self.block * sum(1 for _ in self._loaded(tokens, limit, start))

    def decode(
        self, blocks: Sequence[Block], device: torch.device | str = "cpu", start: int = 0
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (layer, keys after RoPE, values), [tokens, H, D] in the model's dtype, of the layers in order.

        start   how many tokens are before the first of these blocks
        The two are valid until the next layer is asked for, which is decoded into the same memory.
        """
        return self.codec.decode(blocks, device, start)

    def _loaded(self, tokens: Tensor | Iterable[int], limit: int | None, start: int) -> Iterator[Block]:
        if start % self.block:
            raise ValueError(f"start={start}; blocks begin at multiples of {self.block}")
        token_T = chain.token_row(tokens)
        token_T = token_T if limit is None else token_T[: max(0, limit)]
        names = chain.names(self.root, token_T, self.block)
        count = start // self.block
        for number in range(count, len(names)):
            block = self._read(names[number], self._link(names, token_T, number))
            if block is None:
                break
            count = number + 1
            yield block
        self.shelf.used(names[:count])

    def _read(self, name: str, link: Link) -> Block | None:
        """Read a block; None if it is missing, unreadable or damaged, which is counted and logged."""
        try:
            data = self.shelf.get(name, self.format.largest)
            if data is None:
                return None
            block = self.format.from_bytes(data, link)
            self.tally["read"] += len(data)
            return block
        except ArtifactError as error:
            self.tally["damaged"] += 1
            _log.warning("block %d of a kept prefix is damaged, and removed: %s: %s", link.number, name, error)
            self.shelf.drop(name)
        except OSError as error:
            self.tally["unreadable"] += 1
            _log.warning("block %d of a kept prefix cannot be read: %s", link.number, error)
        return None

    def _check_dtype(self, dtype: torch.dtype) -> None:
        if dtype != self.format.dtype:
            raise ValueError(
                f"keys and values are {dtype}, the store's {self.format.dtype}; make a store of their dtype, or do not "
                "run the model under autocast"
            )

    def _keep(self, token_T: Tensor, encoded: Callable[[int, int], list[Block]], first: int) -> int:
        """Write the blocks that are missing, in order; `encoded` gives those of a run, or some of its first."""
        names = chain.names(self.root, token_T, self.block)[: max(1, self.budget // self.format.largest)]
        gone = next((number for number, name in enumerate(names[:first]) if not self.shelf.has(name)), None)
        names = names if gone is None else names[:gone]  # what follows could not be found
        number = 0
        while number < len(names):
            if self.shelf.has(names[number]):
                number += 1
                continue
            if number < first:
                break  # what was written since has evicted it
            end = min(len(names), number + self.together)
            end = next((n for n in range(number + 1, end) if self.shelf.has(names[n])), end)
            for block in encoded(number, end):
                data = self.format.to_bytes(block, self._link(names, token_T, number))
                self.shelf.put(names[number], data)
                self._refused.clear()
                self.tally["written"] += len(data)
                number += 1
        self.shelf.used(names[:number])
        return number * self.block

    def _link(self, names: Sequence[str], token_T: Tensor, number: int) -> Link:
        span = slice(number * self.block, (number + 1) * self.block)
        return Link(self.root, names[number - 1] if number else self.root, number, tuple(token_T[span].tolist()))

    def refused(self, error: Exception) -> None:
        """Log that blocks are not kept, and why: once, until a block is written again."""
        why = spoken(error)
        if why not in self._refused:
            self._refused.add(why)
            _log.warning("blocks of a prefix are not kept: %s (said once, until one is kept)", why)


def check(recipe: Recipe) -> None:
    """Raise ValueError, a sentence, for a recipe whose blocks mean nothing in another cache."""
    why = None
    if recipe.fits_prompt:
        why = "is fitted to each prompt, so that its blocks mean nothing in another cache; use the calibrated recipe"
    elif recipe.arrival_dependent:
        why = (
            "decides by how tokens arrive what is held, so that equal tokens do not have equal blocks; use the recipe "
            "without that choice"
        )
    elif recipe.policies:
        kinds = " and ".join(policy.kind for policy in recipe.policies)
        why = f"reads what {kinds} stores beside a block, which is not kept; use the recipe without it"
    elif recipe.window.block > LARGEST_BLOCK:
        why = f"encodes {recipe.window.block} tokens together; at most {LARGEST_BLOCK} are kept as one block"
    if why is not None:
        raise ValueError(f"{recipe.name} {why}")
