"""Keep prefixes encoded in a folder: token ids and rows of keys and values in, blocks on disk, the same rows out.

Knows nothing of transformers: `prefix/transformers.py` is this for a loaded model, `prefix/vllm.py` for vLLM's pages.

    tokens [T] + K, V of all layers [T, H, D], after RoPE → blocks of 128 tokens → files → K, V [T, H, D]
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from pathlib import Path

import torch
from torch import Tensor

from kvq_runtime.cache import BlockCache
from kvq_runtime.errors import ArtifactError
from kvq_runtime.geometry import Geometry
from kvq_runtime.ops.rope import Rotary
from kvq_runtime.prefix import block_codec, chain
from kvq_runtime.prefix.block_codec import BlockCodec
from kvq_runtime.prefix.block_file import Block, BlockFormat, Link
from kvq_runtime.prefix.folder import Folder, parse_bytes
from kvq_runtime.recipe import Recipe

TOGETHER = 32  # blocks that are encoded as one run
_log = logging.getLogger(__name__)


class PrefixBlocks:
    """Encoded blocks of prefixes in a folder, of one model under one recipe.

    path       a folder, which processes may share
    tensors    of an artifact, if the recipe is fitted
    model      text that differs between models whose keys and values differ: a digest, and the shard of the model
    dtype      of the model's keys and values
    rotary     the model's rotation, where the recipe needs positions
    budget     bytes of the folder: a number, or text such as "20GB"

    Raises ValueError for a recipe whose blocks cannot be kept, ArtifactError for a folder that others can write to.
    """

    def __init__(
        self,
        path: str | Path,
        recipe: Recipe,
        geometry: Geometry,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        model: str,
        dtype: torch.dtype = torch.bfloat16,
        rotary: Rotary | None = None,
        budget: str | int = "20GB",
    ):
        check_recipe(recipe)
        self.codec = BlockCodec(recipe, geometry, tensors or {}, rotary)
        self.format = BlockFormat(recipe, geometry, dtype)
        budget_bytes = parse_bytes(budget)
        if self.format.largest > budget_bytes:
            raise ValueError(f"budget={budget!r}; one block of {recipe.name} takes {self.format.largest} bytes")
        description = self.format.describe(model, chain.tensors_digest(tensors or {}))
        self.root = chain.json_digest(description)
        self.folder = Folder(Path(path).expanduser(), description, self.root, budget_bytes)

    def of_tenant(self, salt: str) -> "PrefixBlocks":
        """Return the store of a tenant: other chains in the same folder. Without a salt it is this one."""
        if not salt:
            return self
        other = copy(self)
        other.root = chain.tenant_root(self.root, salt)
        return other

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.format.recipe.window.block

    def names(self, tokens: Tensor | Iterable[int]) -> list[str]:
        """Return the names of the whole blocks of a text."""
        return chain.block_names(self.root, chain.token_row(tokens), self.block)

    def longest(self, tokens: Tensor | Iterable[int]) -> int:
        """Return how many of these tokens, from the first on, are kept; their blocks are not read, so not checked."""
        return self._present(self.names(tokens)) * self.block

    def put(
        self, tokens: Tensor | Iterable[int], keys: Sequence[Tensor], values: Sequence[Tensor], start: int = 0
    ) -> int:
        """Keep the whole blocks of a prefix; return how many of its tokens are kept now.

        keys     of each layer, after RoPE, [T, H, D] or [T, C], of tokens `start` to start + T;   values   likewise
        start    a multiple of `block`; nothing is kept unless all blocks before it are
        Blocks that are kept are not encoded again. OSError: the disk refused; the blocks before are kept.
        """
        assert start % self.block == 0 and len(keys) == len(values) == self.format.geometry.layers
        pairs = [(k.flatten(1), v.flatten(1)) for k, v in zip(keys, values, strict=True)]
        self._check_dtype(pairs[0][1].dtype)
        stop = start + min(len(x) for pair in pairs for x in pair)

        def encode(number: int, end: int) -> list[Block]:
            span = slice(number * self.block - start, end * self.block - start)
            return self.codec.encode(number, {n: (k[span], v[span]) for n, (k, v) in enumerate(pairs)})

        return self._keep(chain.token_row(tokens)[:stop], encode, start // self.block)

    def put_cache(self, tokens: Tensor | Iterable[int], cache: BlockCache, row: int = 0) -> int:
        """Keep one row of a cache, its encoded blocks as they are; whole blocks of the exact window are encoded.

        Raises ValueError for a cache with padding, or with positions that do not count from 0.
        """
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

        def encode(number: int, end: int) -> list[Block]:
            if number < blocks:
                return [block_codec.encoded_block(cache, n, row) for n in range(number, min(end, blocks))]
            return self.codec.encode(number, block_codec.window_rows(cache, number, end, row))

        return self._keep(token_T, encode)

    def load(self, tokens: Tensor | Iterable[int], limit: int | None = None, start: int = 0) -> list[Block]:
        """Return the kept blocks of these tokens from token `start` on, checked: of the first `limit` tokens at most.

        A damaged block, and all after it, are missing; it is removed, with a warning in the log.
        """
        assert start % self.block == 0
        token_T = chain.token_row(tokens)
        token_T = token_T if limit is None else token_T[: max(0, limit)]
        names, first, blocks = self.names(token_T), start // self.block, list[Block]()
        for number in range(first, len(names)):
            block = self._read(names[number], self._link(names, token_T, number))
            if block is None:
                break
            blocks.append(block)
        self.folder.touch(names[: first + len(blocks)])
        return blocks

    def _read(self, name: str, link: Link) -> Block | None:
        """Read a block; None if it is missing, unreadable or damaged, which is logged."""
        try:
            data = self.folder.get(name, self.format.largest)
            return None if data is None else self.format.from_bytes(data, link)
        except ArtifactError as error:
            _log.warning("block %d of a kept prefix is damaged, and removed: %s: %s", link.number, name, error)
            self.folder.drop(name)
        except OSError as error:
            _log.warning("block %d of a kept prefix cannot be read: %s", link.number, error)
        return None

    def _check_dtype(self, dtype: torch.dtype) -> None:
        if dtype != self.format.dtype:
            raise ValueError(
                f"keys and values are {dtype}, the store's {self.format.dtype}; make a store of their dtype, or do not "
                "run the model under autocast"
            )

    def _present(self, names: Sequence[str]) -> int:
        """Count the blocks, from the first on, that are in the folder."""
        return next((number for number, name in enumerate(names) if not self.folder.has(name)), len(names))

    def _keep(self, token_T: Tensor, encode: Callable[[int, int], list[Block]], first: int = 0) -> int:
        """Write the missing blocks from block `first` on, in order; return how many tokens are kept.

        encode   returns the blocks of a run, or some of its first
        """
        names = self.names(token_T)[: max(1, self.folder.budget // self.format.largest)]
        number = self._present(names)
        while first <= number < len(names):
            for block in encode(number, min(len(names), number + TOGETHER)):
                data = self.format.to_bytes(block, self._link(names, token_T, number))
                self.folder.put(names[number], data)
                number += 1
        self.folder.touch(names[:number])
        return number * self.block

    def _link(self, names: Sequence[str], token_T: Tensor, number: int) -> Link:
        span = slice(number * self.block, (number + 1) * self.block)
        return Link(names[number - 1] if number else self.root, number, tuple(token_T[span].tolist()))


def check_recipe(recipe: Recipe) -> None:
    """Raise ValueError for a recipe whose blocks mean nothing in another cache."""
    if recipe.fits_prompt:
        why = "is fitted to each prompt; use the calibrated recipe"
    elif recipe.arrival_dependent:
        why = "chooses tokens by how they arrive, so that equal tokens do not have equal blocks; use one that does not"
    elif recipe.policies:
        kinds = " and ".join(policy.kind for policy in recipe.policies)
        why = f"reads what {kinds} stores beside a block, which is not kept; use the recipe without it"
    else:
        return
    raise ValueError(f"{recipe.name} {why}")
